import hashlib
import random
import time

import numpy as np
import pytest
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from data.errors import DataError
from data.tokenizer import GPT2, GPT2_FILES, Bytes, pieces


def test_bytes_round_trip():
    tokenizer, sentence = Bytes(), "naïve — 数学 \n\0"
    ids = tokenizer.encode(sentence)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(sentence.encode())
    assert tokenizer.decode([256, *ids.tolist(), 300]) == sentence


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No vocabulary in the cache, and a network on which no name is ever found."""
    import socket

    def lookup(*args, **kwargs):
        time.sleep(5)
        raise OSError("no such host")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_gpt2_without_files_and_network_is_a_line_within_two_seconds(offline):
    start = time.perf_counter()
    with pytest.raises(DataError, match="set TIKTOKEN_CACHE_DIR to a folder that tiktoken filled") as error:
        GPT2()
    assert time.perf_counter() - start < 2
    assert "\n" not in str(error.value)
    assert "data." not in str(error.value)  # not every program that needs it has such keys


def test_gpt2_with_a_damaged_cache_and_no_network(offline, tmp_path):
    """Files of the right names and the wrong bytes are no vocabulary."""
    for url in GPT2_FILES:
        (tmp_path / hashlib.sha1(url.encode()).hexdigest()).write_text("broken")
    with pytest.raises(DataError, match=r"^the tokenizer gpt2 needs GPT-2's vocabulary"):
        GPT2()


def test_gpt2_ids(monkeypatch):
    """With a vocabulary of the single bytes in place of OpenAI's, which is not ours to ship."""
    single = tiktoken.Encoding(
        "single",
        pat_str=r".",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|endoftext|>": 50256},
    )
    monkeypatch.setattr("data.tokenizer.cached", lambda: True)
    monkeypatch.setattr("tiktoken.get_encoding", {"gpt2": single}.__getitem__)
    tokenizer = GPT2()
    ids = tokenizer.encode("né<|endoftext|>")
    assert ids.dtype == np.uint16
    assert ids.tolist() == list("né<|endoftext|>".encode())  # text that looks like a special token is text
    assert tokenizer.decode([50256, *ids.tolist(), 50300]) == "né<|endoftext|>"


def test_gpt2_ids_are_published():
    """Where the vocabulary is to be had: the ids that OpenAI's own encoder gives."""
    try:
        tokenizer = GPT2()
    except DataError as error:
        pytest.skip(str(error))
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]


def test_lengths_of_bytes():
    lengths = Bytes().lengths
    assert (lengths.dtype, lengths.tolist()) == (np.int64, [1] * 256 + [0])


def test_lengths_of_gpt2(monkeypatch):
    """Bytes of text, not characters; 0 for eot and for ids that a vocabulary lacks."""
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257, "ä".encode(): 300}
    small = tiktoken.Encoding(
        "small", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
    )
    monkeypatch.setattr("data.tokenizer.cached", lambda: True)
    monkeypatch.setattr("tiktoken.get_encoding", {"gpt2": small}.__getitem__)
    tokenizer = GPT2()
    assert (tokenizer.lengths.dtype, len(tokenizer.lengths)) == (np.int64, 50257)
    assert tokenizer.lengths[[65, 256, 257, 299, 300, 50256]].tolist() == [1, 2, 3, 0, 2, 0]
    sentence = "the häth, thethe"
    assert tokenizer.lengths[tokenizer.encode(sentence)].sum() == len(sentence.encode())


def test_pieces_have_the_ids_of_the_whole():
    """GPT-2's pattern, with merges within and across all that white space does; 2,000 random texts, cut finely."""
    ranks = {bytes([i]): i for i in range(256)}
    for token in (b"\n\n", b"\n\n\n", b" \n", b"\n ", b"  ", b" a", b"aa", b".\n", b"\na", b"'s", b"\r\n"):
        ranks[token] = len(ranks)
    encoding = tiktoken.Encoding("white", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})
    draw, cuts = random.Random(0), 0
    for _ in range(2000):
        whole = "".join(draw.choices(["a", "\n", " ", ".", "'s", "1", "\u3000", "\r\n", "é", "\x1c"], k=40))
        parts = list(pieces(whole, size=draw.choice([1, 2, 5, 10])))
        cuts += len(parts) - 1
        assert "".join(parts) == whole
        assert [i for part in parts for i in encoding.encode(part)] == encoding.encode(whole), repr(whole)
    assert cuts > 1000


def test_pieces_are_of_the_size_that_was_asked_for():
    whole = "0123456789\n" * 100
    assert {len(part) for part in list(pieces(whole, 50))[:-1]} == {55}
    assert list(pieces("", 50)) == [""]
    assert list(pieces("no newline " * 100, 50)) == ["no newline " * 100]
