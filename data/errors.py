class DataError(ValueError):
    """Text, tokenizer files or token shards that cannot be used; the message is one line for the user."""
