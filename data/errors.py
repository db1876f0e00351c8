class DataError(ValueError):
    """Text, tokenizer files or token shards that cannot be used; the message is one line for the user."""


def line(error: Exception) -> str:
    """The error in one line of at most 300 characters."""
    text = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."
