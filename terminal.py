"""What is safe to print on a terminal. All rooms may import this file, and it imports none of them."""

import sys

# Control characters could move the cursor or change the terminal's colours. Tab and line feed are harmless
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def printable(text: object) -> str:
    """Return the text for a terminal: with \\x1b in place of the control character ESC, and so on."""
    return str(text).translate(CONTROLS)


def one_line(error: BaseException) -> str:
    """Return the error's class and message in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def warn(message: object) -> None:
    """Print a warning to stderr. A path in it may hold control characters."""
    print(f"warning: {printable(message)}", file=sys.stderr)
