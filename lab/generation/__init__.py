"""Generation for scripts.generate and scripts.race: read prompts, write texts, measure, race."""
