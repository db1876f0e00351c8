"""The search for the longest context that fits, in training and in generation."""
