"""Show a race on the terminal: the decoders side by side at their true relative speed, with texts and tokens/s."""

import bisect
import shutil
import sys
import time
import unicodedata

from common.terminal import printable
from lab.generation.race import Racer

FEWEST_COLUMNS = 32  # of a decoder; on a narrower terminal the decoders are below each other
FRAMES = 20  # a second
SECONDS = 5.0, 15.0  # the shortest and the longest replay, unless replay= sets the seconds
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # to an empty screen without a cursor, and back
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
HOME, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


def choose_seconds(racers: list[Racer], asked: float | None) -> float:
    """Return the seconds of the replay: `asked`, or if it is None the slowest decoder's seconds, limited to SECONDS."""
    if asked is not None:
        return asked
    low, high = SECONDS
    return min(max(max(racer.times[-1] for racer in racers), low), high)


def describe_pace(seconds: float, replay_seconds: float) -> str:
    """Return how much slower or faster the replay is than the race."""
    ratio = replay_seconds / seconds
    if 0.95 < ratio < 1.05:
        return "at true speed"
    return f"{ratio:.1f} times slower" if ratio > 1 else f"{1 / ratio:.1f} times faster"


def replay(racers: list[Racer], prompt: str, seconds: float) -> None:
    """Play the race on the terminal's other screen, and return to the first one. Ctrl-C skips the rest."""
    end = max(racer.times[-1] for racer in racers)
    title = (
        f"They ran one after the other, each alone on the device. Replay {describe_pace(end, seconds)}; Ctrl-C skips."
    )
    sys.stdout.write(ENTER)
    try:
        start = time.monotonic()
        now = 0.0
        while now < end:
            now = min((time.monotonic() - start) * end / seconds, end)
            size = shutil.get_terminal_size()
            lines = frame(racers, prompt, title, now, size.columns - 1, size.lines)
            sys.stdout.write(HOME + f"{CLEAR_LINE}\r\n".join(lines) + CLEAR_LINE + CLEAR_REST)
            sys.stdout.flush()
            time.sleep(1 / FRAMES)
        time.sleep(1.0)
    except KeyboardInterrupt:
        pass
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()


def frame(racers: list[Racer], prompt: str, title: str, now: float, columns: int, rows: int) -> list[str]:
    """Return the screen's lines, `now` seconds after the start: a column for each decoder, or a block of rows."""
    head = [*wrap(title, columns), ""][:rows]
    count, rows = len(racers), rows - len(head)
    if columns // count >= FEWEST_COLUMNS:
        width = (columns - 3 * (count - 1)) // count
        blocks = [racer_lines(racer, prompt, now, width, rows) for racer in racers]
        return [*head, *map(" | ".join, zip(*blocks, strict=True))]
    lines = [line for racer in racers for line in racer_lines(racer, prompt, now, columns, max(rows // count, 2))]
    return head + lines[:rows]


def racer_lines(racer: Racer, prompt: str, now: float, width: int, height: int) -> list[str]:
    """Return `height` lines of `width` columns: the decoder's name, its tokens/s so far, and the end of its text."""
    arrived = bisect.bisect_right(racer.times, now)
    name, figures = (wrap(line, width)[0] for line in headers(racer, arrived, now))
    text = printable(prompt + "".join(racer.pieces[:arrived])).expandtabs(4)
    lines, room = wrap(text, width), max(0, height - 2)
    shown = lines[max(0, len(lines) - room) :]
    blank = [" " * width] * (room - len(shown))
    return [BOLD + name + PLAIN, figures, *shown, *blank][:height]


def headers(racer: Racer, arrived: int, now: float) -> tuple[str, str]:
    """Return two lines: the decoder's name, and its tokens so far with the tokens/s since the first one."""
    if not arrived:
        return racer.name, "reads the prompt"
    done = arrived == len(racer.times)
    name = f"{racer.name}  done in {racer.times[-1]:.2f} s" if done else racer.name
    seconds = (racer.times[-1] if done else now) - racer.times[0]
    rate = (racer.counts[arrived - 1] - racer.counts[0]) / seconds if seconds > 0 else 0.0
    return name, f"{racer.counts[arrived - 1]:,} tokens  {rate:,.0f} tok/s"


def wrap(text: str, width: int) -> list[str]:
    """Return the text in lines of exactly `width` columns. A wide character, such as an emoji, takes two columns."""
    lines, line, used = [], "", 0
    for character in text:
        wide = columns_of(character)
        if character == "\n" or used + wide > width:
            lines.append(line + " " * (width - used))
            line, used = "", 0
        if character != "\n":
            line, used = line + character, used + wide
    return [*lines, line + " " * (width - used)]


def columns_of(character: str) -> int:
    """Return how many columns a terminal gives the character: 0, 1 or 2."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1
