class DataError(ValueError):
    """A text, a tokenizer file or a token shard cannot be used. The message is one line for the user."""


def one_line(error: Exception) -> str:
    """Return the error's message, or its class name if it has no message, as one line cut after 300 characters."""
    text = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."
