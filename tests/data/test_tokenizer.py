import random
import time

import numpy as np
import pytest
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from data.errors import DataError
from data.tokenizer import GPT2, Bytes, split_into_pieces


def test_bytes_round_trip():
    tokenizer, sentence = Bytes(), "naïve — 数学 \n\0"
    ids = tokenizer.encode(sentence)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(sentence.encode())
    assert tokenizer.decode([256, *ids.tolist(), 300]) == sentence


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Give tiktoken an empty cache, and make every look-up of a host name fail after a minute."""
    import socket

    def slow_failing_lookup(*args, **kwargs):
        time.sleep(60)
        raise OSError("no such host")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", slow_failing_lookup)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_gpt2_without_files_and_network_is_an_error_before_the_look_up_ends(offline):
    start = time.perf_counter()
    with pytest.raises(DataError, match="set TIKTOKEN_CACHE_DIR to a folder that tiktoken filled") as error:
        GPT2()
    assert time.perf_counter() - start < 30  # 1.1 s on an idle machine
    assert "\n" not in str(error.value)
    assert "data." not in str(error.value)  # not every program that needs the tokenizer has config keys data.*


def test_gpt2_round_trip(monkeypatch):
    """The vocabulary of this test holds only the single bytes, because we may not ship OpenAI's vocabulary."""
    single_bytes = tiktoken.Encoding(
        "single_bytes",
        pat_str=r".",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|endoftext|>": 50256},
    )
    monkeypatch.setattr("data.tokenizer.gpt2_files", list)
    monkeypatch.setattr("tiktoken.get_encoding", {"gpt2": single_bytes}.__getitem__)
    tokenizer = GPT2()
    ids = tokenizer.encode("né<|endoftext|>")
    assert ids.dtype == np.uint16
    assert ids.tolist() == list("né<|endoftext|>".encode())  # text that looks like a special token is text
    assert tokenizer.decode([50256, *ids.tolist(), 50300]) == "né<|endoftext|>"


def test_gpt2_gives_openais_ids():
    """Skipped if the vocabulary is neither cached nor on the network."""
    try:
        tokenizer = GPT2()
    except DataError as error:
        pytest.skip(str(error))
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]


def test_lengths_of_bytes_are_one():
    lengths = Bytes().lengths
    assert (lengths.dtype, lengths.tolist()) == (np.int64, [1] * 256 + [0])


def test_lengths_of_gpt2_are_bytes_of_text(monkeypatch):
    """The length of "ä" is 2, and eot has no text."""
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257, "ä".encode(): 258}
    ranks |= {b"#%d" % i: i for i in range(259, 50256)}
    small = tiktoken.Encoding(
        "small", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
    )
    monkeypatch.setattr("data.tokenizer.gpt2_files", list)
    monkeypatch.setattr("tiktoken.get_encoding", {"gpt2": small}.__getitem__)
    tokenizer = GPT2()
    assert (tokenizer.lengths.dtype, len(tokenizer.lengths)) == (np.int64, 50257)
    assert tokenizer.lengths[[65, 256, 257, 258, 50255, 50256]].tolist() == [1, 2, 3, 2, 6, 0]
    sentence = "the häth, thethe"
    assert tokenizer.lengths[tokenizer.encode(sentence)].sum() == len(sentence.encode())


def test_a_long_run_of_one_character_is_quick():
    """tiktoken 0.12 takes more than 60 s, because its time is quadratic. 0.13 takes 0.1 s."""
    ranks = {bytes([i]): i for i in range(256)} | {b"a" * 2**i: 255 + i for i in range(1, 4)}
    encoding = tiktoken.Encoding("runs", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})
    start = time.perf_counter()
    assert len(encoding.encode_to_numpy("a" * 200_000)) == 25_000
    assert time.perf_counter() - start < 10


def test_pieces_have_the_ids_of_the_whole_text():
    """2,000 random texts are cut into small pieces. The encoding has GPT-2's pattern, and merges with white space."""
    ranks = {bytes([i]): i for i in range(256)}
    for token in (b"\n\n", b"\n\n\n", b" \n", b"\n ", b"  ", b" a", b"aa", b".\n", b"\na", b"'s", b"\r\n"):
        ranks[token] = len(ranks)
    encoding = tiktoken.Encoding("white_space", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})
    rng, cuts = random.Random(0), 0
    for _ in range(2000):
        text = "".join(rng.choices(["a", "\n", " ", ".", "'s", "1", "\u3000", "\r\n", "é", "\x1c"], k=40))
        pieces = list(split_into_pieces(text, size=rng.choice([1, 2, 5, 10])))
        cuts += len(pieces) - 1
        assert "".join(pieces) == text
        assert [i for piece in pieces for i in encoding.encode(piece)] == encoding.encode(text), repr(text)
    assert cuts > 1000


def test_pieces_end_at_the_first_newline_after_the_size():
    pieces = list(split_into_pieces("0123456789\n" * 100, 50))
    assert {len(piece) for piece in pieces[:-1]} == {55}
    assert list(split_into_pieces("", 50)) == [""]
    assert list(split_into_pieces("no newline " * 100, 50)) == ["no newline " * 100]
