"""What is safe to print on a terminal. All rooms may import this file, and it imports none of them."""

import io
import os
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


def accept_any_encoding() -> None:
    """Print characters that the terminal's encoding lacks as \\xe9 or \\ufffd. Child processes do so too.

    A closed stdin is then empty, and what goes to a closed stdout or stderr is lost.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # opened in this order, the three get the free numbers 0, 1 and 2
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, open until the end
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    os.environ["PYTHONIOENCODING"] = f"{encoding}:backslashreplace"
