"""What is safe to print on a terminal, and commands to paste into it. All rooms may import this file.

It imports none of them.
"""

import io
import os
import re
import shlex
import sys

# Control characters could move the cursor or change the terminal's colours. Tab and line feed are harmless
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def printable(text: object) -> str:
    """Return the text for a terminal: with \\x1b in place of the control character ESC, and so on."""
    return str(text).translate(CONTROLS)


def class_and_message(error: BaseException) -> str:
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


def shell_command(*words: str | os.PathLike) -> str:
    """Return the words as a command for a shell. A Path that begins with - gets ./ in front, because it is no flag."""
    return shlex.join(
        f"./{word}" if isinstance(word, os.PathLike) and str(word).startswith("-") else str(word) for word in words
    )


def override(key: str, value: object) -> str:
    """Return the argument key=value of a command, with which Hydra reads exactly this value.

    The value is a text, a path, a number, a bool, None, or a list of them. shell_command() adds the quotes for a shell.
    """
    return f"{key}={_hydra_value(value)}"


def _hydra_value(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(_hydra_value(element) or quote_exactly('') for element in value)}]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return quote_override(str(value)) if isinstance(value, str | os.PathLike) else str(value)


def quote_override(value: str) -> str:
    """Quote the value of an override if Hydra would read it as something else: syntax, a number, a bool or null."""
    is_plain = re.fullmatch(r"(?!\.\d)[a-z_./][\w./:%@+-]*", value, re.ASCII | re.IGNORECASE)
    if value == "" or (is_plain and value.lower() not in ("null", "true", "false", "nan", "inf")):
        return value
    return quote_exactly(value)


def quote_exactly(value: str) -> str:
    """Return the value in quotes. Hydra and OmegaConf then read exactly this text, with any ( , $ \\ or = in it."""
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # otherwise OmegaConf would interpolate
    # Double the backslashes before a quote and at the end, because they would escape the quote; then escape the quote
    value = re.sub(r'(\\*)"', r'\1\1\\"', value)
    value = re.sub(r"(\\*)\Z", r"\1\1", value)
    return f'"{value}"'
