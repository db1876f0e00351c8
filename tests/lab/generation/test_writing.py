"""Texts on the terminal while they arrive, and in the run's folder."""

import io
import json

import pytest

from data.tokenizer import Bytes
from lab.generation.prompts import encode_prompt
from lab.generation.writing import read_stream, show, write_texts
from model.text import Text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def prompts(*texts):
    return [encode_prompt(text, Bytes()) for text in texts]


def test_one_text_is_printed_as_it_grows(tmp_path, monkeypatch):
    """Each piece is printed before the next step starts."""
    printed, seen = io.StringIO(), []
    monkeypatch.setattr("sys.stdout", printed)

    def steps():
        for step in ([[97, 98]], [[0xC3]], [[0xA9]], [[69]], [[78, 99]]):
            yield step
            seen.append(printed.getvalue())

    written, arrivals = write_texts(steps(), prompts("> "), [Text(Bytes(), ["END"])], tmp_path)
    assert seen == ["> ab", "> ab", "> abé", "> abé", "> abéENc"]
    assert written == ["abéENc"]
    assert [arrival.tokens for arrival in arrivals] == [2, 1, 1, 1, 2]
    assert (tmp_path / "sample.txt").read_text() == "> abéENc\n"
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == {"prompt": "> ", "text": "abéENc", "tokens": 7}


def test_several_texts_are_printed_at_the_end(tmp_path, capsys):
    """A text that has stopped takes no further tokens, and the stream ends when all have stopped."""
    steps = iter([[[97], [98]], [[256], [99]], [[100], [256]], [[101], [101]]])
    texts = [Text(Bytes(), []) for _ in range(2)]
    written, arrivals = write_texts(steps, prompts("1", "2\n"), texts, tmp_path)
    assert written == ["a", "bc"]
    assert len(arrivals) == 3
    assert capsys.readouterr().out == "--- 1\n1a\n--- 2\n2\nbc"
    assert (tmp_path / "sample.txt").read_text() == "--- 1\n1a\n--- 2\n2\nbc\n"
    lines = list(map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines()))
    assert lines == [{"prompt": "1", "text": "a", "tokens": 2}, {"prompt": "2\n", "text": "bc", "tokens": 3}]


def test_a_step_of_several_tokens_ends_at_the_stop_inside_it():
    """With a draft, the sequences have different numbers of tokens in a step."""
    texts = [Text(Bytes(), ["cd"]), Text(Bytes(), [])]
    steps = iter([[list(b"abc"), []], [list(b"def"), list(b"x")], [list(b"gh"), [256, 97]], [[1], [1]]])
    pieces = [new for _, new in read_stream(steps, texts)]
    assert pieces == [["ab", ""], ["", "x"], ["", ""]]
    assert [len(text.tokens) for text in texts] == [4, 2]


TEXT = "a\x1b[2Jb\t\r\n\x9b"


@pytest.mark.parametrize(
    ("stream", "raw", "shown"),
    [(Terminal(), False, "a\\x1b[2Jb\t\\x0d\n\\x9b"), (Terminal(), True, TEXT), (io.StringIO(), False, TEXT)],
)
def test_control_characters_do_not_reach_a_terminal(monkeypatch, stream, raw, shown):
    monkeypatch.setattr("sys.stdout", stream)
    show(TEXT, raw)
    assert stream.getvalue() == shown
