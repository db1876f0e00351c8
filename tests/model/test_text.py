"""The text of a stream of tokens: whole characters, and stops."""

import numpy as np
import pytest

from data.tokenizer import Bytes
from model.text import Text


class Pieces(Bytes):
    """A tokenizer with tokens of several bytes, like GPT-2. Id i stands for PIECES[i]."""

    PIECES = (
        b"ab",
        b"c\xf0\x9f",
        b"\x99\x82d",
        b"\x9f\x99",
        b"\xf0",
        b"\x82",
        b"END",
        b" E",
        b"ND tail",
        b"\xe2\x82\xac",
    )

    def decode_bytes(self, ids):
        return b"".join(self.PIECES[i] for i in ids if i < len(self.PIECES))


def stream(ids, stops=(), tokenizer=None):
    """Return the new text of each token up to a stop, and the rest."""
    text = Text(tokenizer or Bytes(), list(stops))
    pieces = []
    for token in ids:
        pieces.append(text.add([token]))
        if text.stopped:
            break
    return [*pieces, text.finish()]


def test_each_character_comes_with_its_last_byte():
    written = "naïve 日本 🙂!"
    pieces = stream(written.encode())
    assert "".join(pieces) == written
    ends = np.cumsum([len(character.encode()) for character in written]) - 1
    assert [i for i, piece in enumerate(pieces) if piece] == ends.tolist()


def test_a_combining_character_follows_its_base():
    """add() returns the base at once, because a terminal adds the accent to the last character."""
    assert stream("e\u0301x".encode()) == ["e", "", "\u0301", "x", ""]


@pytest.mark.parametrize(
    ("ids", "pieces"),
    [
        ([0, 1, 2], ["ab", "c", "🙂d", ""]),
        ([4, 3, 5, 0], ["", "", "🙂", "ab", ""]),
        ([1, 0], ["c", "\ufffdab", ""]),
        ([4, 4, 9], ["", "\ufffd", "\ufffd€", ""]),
        ([5, 5, 5], ["\ufffd", "\ufffd", "\ufffd", ""]),
        ([4, 300, 3, 301, 5], ["", "", "", "", "🙂", ""]),
    ],
    ids=["two_tokens", "three_tokens", "cut", "cut_twice", "only_invalid", "with_padding"],
)
def test_characters_across_tokens_of_several_bytes(ids, pieces):
    assert stream(ids, tokenizer=Pieces()) == pieces


def test_invalid_bytes_give_the_text_of_decoding_all_at_once():
    """10,000 random bytes, most of them invalid UTF-8, and a text that ends inside a character."""
    ids = np.random.default_rng(0).choice([*b"ab", 0xC3, 0xA9, 0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0x99, 0x82, 0xFF], 10_000)
    assert "".join(stream(ids.tolist())) == Bytes().decode(ids.tolist())
    cut = "é🙂".encode()[:-1]
    assert "".join(stream(cut)) == Bytes().decode(list(cut)) == "é\ufffd"


@pytest.mark.parametrize("size", [2, 3, 5, 8, 1000])
@pytest.mark.parametrize("tokenizer", [Bytes(), Pieces()], ids=["bytes", "pieces"])
def test_groups_of_tokens_give_the_text_of_all_tokens(tokenizer, size):
    """After each group, add() has returned all characters but the last one, if that one may lack bytes."""
    written = list("naïve 日本 🙂 \ufffd!".encode()) * 20
    if isinstance(tokenizer, Pieces):  # 10 and 11 are padding of the vocabulary
        written = np.random.default_rng(0).choice([0, 1, 1, 2, 2, 3, 4, 5, 9, 10, 11], 1000).tolist()
    text, so_far = Text(tokenizer, []), ""
    for end in range(size, len(written) + size, size):
        so_far += text.add(written[end - size : end])
        assert tokenizer.decode(written[:end]) in (so_far, so_far + "\ufffd")
    assert so_far + text.finish() == tokenizer.decode(written)
    assert text.tokens == written


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_stop_id_ends_a_group(size):
    """The text ends before the first stop, and `tokens` with it, also if half a character comes before."""
    text, ids = Text(Bytes(), [7]), [*b"ab", 0xF0, 0x9F, 256, *b"c", 7]
    pieces = [text.add(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "".join(pieces) + text.finish() == "ab\ufffd"
    assert (text.tokens, text.stopped) == (ids[:5], True)


@pytest.mark.parametrize(
    ("written", "stops", "expected"),
    [
        ("one END two", ["END"], "one "),
        ("one EN END", ["END"], "one EN "),
        ("one EN", ["END"], "one EN"),
        ("aaab", ["aab"], "a"),
        ("a b c", ["c", "b"], "a "),
        ("abcd", ["abcx", "bc"], "a"),
        ("日本語", ["本"], "日"),
        ("x\n\ny", ["\n\n"], "x"),
        ("END", ["END"], ""),
        ("abc", [ord("b")], "a"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stop_text_is_left_out(written, stops, expected, size):
    """The text ends before the first stop, also inside a step of several tokens. It has no part of a stop text."""
    text, ids, pieces = Text(Bytes(), stops), list(written.encode()), []
    for start in range(0, len(ids), size):
        pieces.append(text.add(ids[start : start + size]))
    pieces.append(text.finish())
    assert "".join(pieces) == expected
    assert text.stopped == (expected != written)


def test_tokens_end_with_the_last_token_of_the_stop():
    text = Text(Pieces(), ["END"])
    assert text.add([0, 7, 8, 0, 0]) == "ab "
    assert (text.tokens, text.stopped, text.add([0]), text.finish()) == ([0, 7, 8], True, "", "")


def test_half_a_character_after_a_stop_is_left_out():
    text = Text(Pieces(), ["c"])
    assert text.add([0, 1]) + text.finish() == "ab"


def test_end_of_text_stops_unless_there_are_no_stops():
    assert stream([97, 256, 98]) == ["a", "", ""]
    text = Text(Bytes(), None)
    assert text.add([97, 256, 98]) == "ab"
    assert not text.stopped
