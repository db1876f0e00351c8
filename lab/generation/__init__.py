"""Generation for scripts.generate: read prompts, write texts, measure."""
