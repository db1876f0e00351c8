"""What is safe to print on a terminal, and commands to paste into it. It imports no other room."""

import contextlib
import io
import os
import re
import select
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


def one_line(error: BaseException) -> str:
    """Return the error's message, or its class name if it has no message, as one line cut after 300 characters."""
    text = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."


def warn(message: object) -> None:
    """Print a warning to stderr, in one write: threads print, too. A path in it may hold control characters."""
    print(f"warning: {printable(message)}\n", end="", file=sys.stderr)


class LostOutput(OSError):
    """The stdout of a command that only prints cannot be written."""


class Output(io.FileIO):
    """The file below sys.stdout or sys.stderr. It drops bytes that the operating system refuses.

    Python's own file would raise the error in print(), and once more in the flush at Python's exit.
    """

    records = False  # whether this process records something: see outlive_output()
    lost = False  # a LostOutput was raised

    def write(self, data) -> int:
        """Write all bytes. Raises LostOutput if this is the stdout of a command that only prints, but only once."""
        left = memoryview(data).cast("B")
        try:
            while len(left):  # Python's own file writes only a part to a pipe that does not block, as ssh makes them
                count = super().write(left)
                if count is None:
                    select.select([], [self], [])
                left = left[count or 0 :]
        except OSError as error:
            if not (Output.records or self.lost or self.fileno() != 1):
                self.lost = True
                raise LostOutput(error.errno, error.strerror) from None
        return len(data)


def set_up_streams() -> None:
    """Let sys.stdout and sys.stderr write through Output, with \\xe9 for a character that the encoding lacks.

    Child processes do so, too. A closed stdin is then empty, and what goes to a closed stdout or stderr is lost.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream = getattr(sys, name)
        if stream is None:  # opened in this order, the three get the free numbers 0, 1 and 2
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)  # otherwise a file of a child process gets this number
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            raw = getattr(stream.buffer, "raw", stream.buffer)
            if type(raw) is io.FileIO and raw.fileno() == number:  # not a stream of pytest
                stream = through_output(stream, number)
                setattr(sys, name, stream)
                setattr(sys, f"__{name}__", stream)
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    os.environ["PYTHONIOENCODING"] = f"{encoding}:backslashreplace"


def through_output(stream: io.TextIOWrapper, number: int) -> io.TextIOWrapper:
    """Return a stream like this one, which writes through Output to the file with this number."""
    with contextlib.suppress(OSError):
        stream.flush()
    file = Output(number, "wb", closefd=False)
    if not stream.write_through:  # with Python's option -u there is no buffer
        file = io.BufferedWriter(file)
    lines, through = stream.line_buffering, stream.write_through
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=lines, write_through=through)


def outlive_output() -> None:
    """From here on, drop output that cannot be written. A command calls this before it records something."""
    Output.records = True


def shell_command(*words: str | os.PathLike) -> str:
    """Return the words as a command for a shell. A Path that begins with - gets ./ in front, because it is no flag."""
    return shlex.join(
        f"./{word}" if isinstance(word, os.PathLike) and str(word).startswith("-") else str(word) for word in words
    )


def override(key: str, value: object) -> str:
    """Return the argument key=value of a command, with which Hydra reads exactly this value.

    The value is a text, a path, a number, a bool, None, or a list of them. A shell needs shell_command(), too.
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
