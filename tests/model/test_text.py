"""The text of a stream of tokens: whole characters, and stops."""

import numpy as np
import pytest

from data.tokenizer import Bytes
from model.text import Text


def stream(ids, stops=()):
    text = Text(Bytes(), list(stops))
    pieces = []
    for token in ids:
        pieces.append(text.add(token))
        if text.stopped:
            return pieces
    return [*pieces, text.finish()]


def test_each_character_comes_with_its_last_byte():
    written = "naïve 日本 🙂!"
    pieces = stream(written.encode())
    assert "".join(pieces) == written
    ends = np.cumsum([len(character.encode()) for character in written]) - 1
    assert [i for i, piece in enumerate(pieces) if piece] == ends.tolist()


def test_invalid_bytes_give_the_text_of_decoding_all_at_once():
    """10,000 random bytes, most of them invalid UTF-8, and a text that ends inside a character."""
    ids = np.random.default_rng(0).choice([*b"ab", 0xC3, 0xA9, 0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0x99, 0x82, 0xFF], 10_000)
    assert "".join(stream(ids.tolist())) == Bytes().decode(ids.tolist())
    cut = "é🙂".encode()[:-1]
    assert "".join(stream(cut)) == Bytes().decode(list(cut)) == "é\ufffd"


@pytest.mark.parametrize(
    ("written", "stops", "expected"),
    [
        ("one END two", ["END"], "one "),
        ("one EN END", ["END"], "one EN "),
        ("one EN", ["END"], "one EN"),
        ("aaab", ["aab"], "a"),
        ("a b c", ["c", "b"], "a "),
        ("日本語", ["本"], "日"),
        ("x\n\ny", ["\n\n"], "x"),
        ("END", ["END"], ""),
        ("abc", [ord("b")], "a"),
    ],
)
def test_a_stop_text_is_left_out(written, stops, expected):
    """The text ends before the first stop, and no part of a stop text comes early."""
    pieces = stream(written.encode(), stops)
    assert "".join(pieces) == expected


def test_end_of_text_stops():
    assert stream([97, 256, 98]) == ["a", ""]
