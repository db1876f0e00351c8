"""The replay of a race on a terminal."""

import re

import pytest

from lab.generation import replay as module
from lab.generation.race import Racer
from lab.generation.replay import choose_seconds, columns_of, describe_pace, frame, replay, wrap


def racer(name, seconds, count=100):
    """Return a decoder that repeats a line of 6 tokens, `count` tokens in `seconds`."""
    words = ["ab ", "日本", "🙂", "e\u0301", "\x1b[2J", "\n"]
    times = [seconds * (n + 1) / count for n in range(count)]
    return Racer(name, times=times, counts=list(range(1, count + 1)), pieces=[words[n % 6] for n in range(count)])


def plain(lines):
    return [re.sub(r"\x1b\[\d*m", "", line) for line in lines]


def width(line):
    return sum(map(columns_of, line))


@pytest.mark.parametrize("now", [0.0, 0.05, 3.0, 10.0, 99.0])
@pytest.mark.parametrize(("columns", "rows"), [(119, 30), (79, 12), (40, 20), (5, 3)])
def test_a_frame_fits_the_terminal(now, columns, rows):
    """Wide and combining characters count, and control characters are replaced."""
    lines = plain(frame([racer("a", 10.0), racer("b", 5.0)], "prompt\n", "They ran alone.", now, columns, rows))
    assert len(lines) <= rows
    assert {width(line) for line in lines[len(wrap("They ran alone.", columns)) + 1 :]} <= {columns, columns - 1}
    assert "\x1b" not in "".join(lines)


def test_decoders_stand_side_by_side_with_their_speed_so_far():
    """The title and an empty line come first."""

    def columns(now):
        lines = plain(frame([racer("a", 10.0), racer("b", 5.0)], "", "t", now, 79, 7))
        return [[line.split(" | ")[n].rstrip() for line in lines[2:]] for n in range(2)]

    assert columns(0.0) == [[name, "reads the prompt", "", "", ""] for name in "ab"]
    left, right = columns(2.1)
    assert left == ["a", "21 tokens  10 tok/s", "ab 日本🙂e\u0301\\x1b[2J", "ab 日本🙂e\u0301\\x1b[2J", "ab 日本🙂"]
    assert right[:2] == ["b", "42 tokens  20 tok/s"]
    assert columns(6.0)[1][:2] == ["b  done in 5.00 s", "100 tokens  20 tok/s"]


def test_decoders_stand_below_each_other_on_a_narrow_terminal():
    lines = plain(frame([racer("a", 10.0), racer("b", 5.0)], "", "t", 3.0, 40, 20))
    assert [n for n, line in enumerate(lines) if "tok/s" in line] == [3, 12]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", ["   "]),
        ("abcd", ["abc", "d  "]),
        ("a\n\nb", ["a  ", "   ", "b  "]),
        ("日本", ["日 ", "本 "]),
        ("e\u0301", ["e\u0301  "]),
    ],
)
def test_lines_have_the_width_of_the_terminal(text, lines):
    assert wrap(text, 3) == lines


def test_a_replay_takes_a_time_to_watch():
    assert [choose_seconds([racer("a", 1.0), racer("b", seconds)], None) for seconds in (0.1, 7, 100)] == [5, 7, 15]
    assert choose_seconds([racer("a", 1.0)], 2.5) == 2.5
    assert [describe_pace(2.0, seconds) for seconds in (2.0, 5.0, 1.0)] == [
        *("at true speed", "2.5 times slower", "2.0 times faster")
    ]


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_terminal_is_as_before_after_a_replay(monkeypatch, capsys, interrupted):
    """Ctrl-C skips the rest."""
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(module.time, "sleep", sleep)
    replay([racer("a", 0.2), racer("b", 0.1)], "p", seconds=0.05)
    out = capsys.readouterr().out
    assert out.startswith(module.ENTER)
    assert out.endswith(module.LEAVE)
    assert (len(slept) == 1) == interrupted
    assert "They ran one after the other, each alone on the device. Replay 4.0 times faster" in out
    assert ("done in 0.20 s" in out) != interrupted
