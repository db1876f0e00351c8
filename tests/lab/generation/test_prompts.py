"""Prompts from files, stdin and random ids, and how many tokens fit after them."""

import io
import os
import pty
import random
from types import SimpleNamespace

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from data.tokenizer import Bytes
from lab.generation import prompts
from lab.generation.prompts import (
    check_stdin,
    encode_prompt,
    fit_new_tokens,
    longest_prompt,
    make_batch,
    make_prompts,
    quote_prompt,
    random_prompt,
    read_prompts,
    take_stdin,
)
from model.sources import Pretrained
from runtime.config import UserError

LEARNED = Pretrained({"pos": "learned", "block_size": 8}, {}, "bytes", "a model")
ROPE = Pretrained({"pos": "rope", "block_size": 8}, {}, "bytes", "a model")


@pytest.mark.parametrize(
    ("name", "data", "texts"),
    [
        ("a.txt", b"one\ntwo\n", ["one", "two"]),
        ("a.txt", b"one\ntwo", ["one", "two"]),
        ("a.txt", b"\xef\xbb\xbfone\r\n two \r\n", ["one", " two "]),
        ("a.txt", b"one\n\n \t\ntwo\n\n", ["one", "two"]),
        ("a.txt", "日本\u2028x\x0cy\x85z\n".encode(), ["日本\u2028x\x0cy\x85z"]),
        ("a.txt", b"[1, 2]\n{}\n", ["[1, 2]", "{}"]),
        ("a.txt", b'{"text": "a"}\n', ['{"text": "a"}']),
        ("a.txt", b'{"prompt": "a\\nb", "id": 3}\n\n{"prompt": ""}\r\n', ["a\nb", ""]),
        ("a.jsonl", '{"prompt": "日\u2028本"}\n'.encode(), ["日\u2028本"]),
    ],
)
def test_each_line_is_a_prompt(name, data, texts, tmp_path):
    """Windows line ends, a byte order mark and blank lines are not in a prompt. A JSON line may hold line breaks."""
    path = tmp_path / name
    path.write_bytes(data)
    assert [prompt.text for prompt in read_prompts(str(path), Bytes())] == texts


def test_prompts_come_from_stdin(monkeypatch):
    """The ids of an empty prompt are the end of text."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": ""}\n{"prompt": "b"}')))
    prompts = read_prompts("-", Bytes())
    assert [(prompt.ids, prompt.where) for prompt in prompts] == [
        ([256], "line 1 of stdin"),
        ([98], "line 2 of stdin"),
    ]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", "a.txt: a.txt has no prompt; write a prompt a line, or JSON lines with a key prompt"),
        ("a.txt", b"\n \r\n\n", "a.txt has no prompt"),
        ("a.txt", b"one\n\ntw\xffo\n", "line 3 of a.txt is not UTF-8 text: it has the byte 0xff"),
        ("a.txt", b"caf\xe9\n", "line 1 of a.txt is not UTF-8 text: it has the byte 0xe9"),
        ("a.txt", "one\n".encode("utf-16"), "line 1 of a.txt is not UTF-8 text: it has the byte 0xff"),
        ("a.txt", b'{"prompt": "a"}\n\nb\n', 'line 3 of a.txt is not a JSON object with a text under "prompt"'),
        ("a.jsonl", b"one\n", 'line 1 of a.jsonl is not a JSON object with a text under "prompt"'),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": 3}\n', "line 2 of a.jsonl is not a JSON object"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "b"\n', "line 2 of a.jsonl is not a JSON object"),
        ("a.jsonl", b"[" * 100_000, "line 1 of a.jsonl is not a JSON object"),
        ("a.txt", b'{"prompt": "a"}\n{"prompt": "b\\ud800"}\n', "line 2 of a.txt is not UTF-8 text: character 2 is"),
        ("folder", None, "prompts=folder cannot be read: it is a folder, and must be a regular file"),
        ("/dev/zero", None, "prompts=/dev/zero cannot be read: it is a device, and must be a regular file"),
        (
            "fifo",
            None,
            "fifo cannot be read: it is a FIFO, and must be a regular file; prompts=- reads a pipe on stdin",
        ),
        ("missing", None, "prompts=missing cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(name, data, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo("fifo")
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as error:
        read_prompts(name, Bytes())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_stdin_without_an_end_is_one_line(monkeypatch):
    monkeypatch.setattr(prompts, "MOST_BYTES", 5000)
    with open("/dev/zero") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(UserError, match=r"^stdin has more than 5,000 bytes: pass shorter prompts$"):
            read_prompts("-", Bytes())


def test_prompts_do_not_come_from_a_terminal(monkeypatch):
    other, terminal = pty.openpty()
    with open(terminal) as stdin, open(other):
        assert os.isatty(terminal)
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(UserError, match="stdin is a terminal: pass prompts=FILE"):
            read_prompts("-", Bytes())


@pytest.mark.parametrize(
    "arguments", [["-m", "prompts=-"], ["prompts=a.txt,-", "--multirun"], ["+sweep=generate", "prompts=-"]]
)
def test_jobs_of_a_sweep_have_no_stdin(arguments):
    with pytest.raises(UserError, match="prompts=- cannot run in a sweep"):
        check_stdin(arguments)
    check_stdin(["prompts=-"])
    check_stdin(["-m", "prompts=a.txt,b.txt"])


def words_with_stdin(monkeypatch, text, *words, end=True):
    """Return the arguments after take_stdin(), with a pipe on stdin that has this text."""
    read, write = os.pipe()
    os.write(write, text)
    if end:
        os.close(write)
    arguments = ["generate.py", *words]
    with open(read) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        take_stdin(arguments)
    if not end:
        os.close(write)
    return arguments[1:]


def test_a_pipe_is_the_prompt_if_there_is_no_other(monkeypatch, capsys):
    """An empty or a silent pipe adds no prompt, so that cron and CI begin a document."""
    assert words_with_stdin(monkeypatch, b"def main(\n", "batch=2") == ["batch=2", "prompt=def main("]
    assert words_with_stdin(monkeypatch, "ä\n\n".encode()) == ["prompt=ä\n"]
    for given in ("prompt=a", "prompts=-", "prompt_tokens=3", "+prompt="):
        assert words_with_stdin(monkeypatch, b"not read", given) == [given]
    assert words_with_stdin(monkeypatch, b"") == []
    assert words_with_stdin(monkeypatch, b"\n") == []
    with pytest.raises(UserError, match="line 1 of stdin is not UTF-8 text: it has the byte 0xff"):
        words_with_stdin(monkeypatch, b"a\xff")
    monkeypatch.setattr("lab.generation.prompts.STDIN_SECONDS", 0.05)
    assert capsys.readouterr().err == ""
    assert words_with_stdin(monkeypatch, b"", end=False) == []
    line = "warning: no prompt came from the pipe on stdin within 0.05 s: prompts=- waits for it\n"
    assert capsys.readouterr().err == line


def test_a_file_on_stdin_is_the_prompt_and_a_device_is_not(monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"a\r\nb")
    with open(tmp_path / "file") as file, open(os.devnull) as null:
        for stdin, words in ((file, ["generate.py", "prompt=a\nb"]), (null, ["generate.py"]), (None, ["generate.py"])):
            monkeypatch.setattr("sys.stdin", stdin)
            arguments = ["generate.py"]
            take_stdin(arguments)
            assert arguments == words


def test_random_prompts_are_those_of_their_seed():
    """Those of the built-in tokenizers are torch's, as in the recorded rows.

    A length without room is refused before the ids are drawn.
    """
    ids = random_prompt(1000, 257, Bytes(), 3).ids
    assert ids == torch.randint(256, (1000,), generator=torch.Generator().manual_seed(3)).tolist()
    assert make_prompts(None, None, 1000, ROPE, 257, Bytes(), 3)[0].ids == ids
    assert make_prompts(None, None, 1000, ROPE, 257, Bytes(), 4)[0].ids != ids
    with pytest.raises(UserError, match="the prompt has 2000000000 tokens, but a model has 8 positions"):
        make_prompts(None, None, 2_000_000_000, LEARNED, 257, Bytes(), 3)


def test_random_prompts_have_all_ids_but_the_ends_of_text():
    """Also those that the tokenizer lacks. An id is missing among 10,000 of 97 with a probability below 1e-42."""
    tokenizer = SimpleNamespace(stops=(7, 99, 0))
    assert {*random_prompt(10_000, 100, tokenizer, 3).ids} == {*range(100)} - {7, 99, 0}


def test_the_longest_prompt_decides_how_many_tokens_fit():
    """The message names the line of the longest prompt."""
    short, long = encode_prompt("ab", Bytes(), "line 1 of f"), encode_prompt("abcdef", Bytes(), "line 2 of f")
    assert longest_prompt([short, long]) == long
    assert fit_new_tokens([short, long], None, LEARNED) == 2
    assert fit_new_tokens([short], None, LEARNED) == 6
    with pytest.raises(
        UserError, match="line 2 of f has 6 tokens, and with max_new_tokens=3 these are more than the 8"
    ):
        fit_new_tokens([short, long], 3, LEARNED)
    with pytest.raises(UserError, match="line 3 of f has 8 tokens, but a model has 8 positions: shorten it"):
        fit_new_tokens([short, encode_prompt("a" * 8, Bytes(), "line 3 of f")], None, LEARNED)


def test_prompt_and_new_tokens_may_exceed_block_size_when_positions_are_rope():
    """The default of max_new_tokens is then 128."""
    prompt = encode_prompt("a" * 20, Bytes())
    assert fit_new_tokens([prompt], 50, ROPE) == 50
    assert fit_new_tokens([prompt], None, ROPE) == 128


def test_a_batch_is_ragged():
    idx, lengths = make_batch([encode_prompt(text, Bytes()) for text in ("a", "bcd", "")])
    assert idx.tolist() == [[97, 0, 0], [98, 99, 100], [256, 0, 0]]
    assert lengths.tolist() == [1, 3, 1]


PROMPTS = [
    *("def main(", "Hello, world = {1: [2]}", "it's", 'say "a"', '"', "a\\", 'a\\"b', "${oc.env:HOME}", "\\${x}"),
    *("a\nb", "x: y # z", " lead and trail ", "???x", "null", "007", "日本 🙂", "\\\\", "$x", "~a!+", "\\\\\\"),
    *("'a", "\\'", "", '"quoted"', "'quoted'", '"Hello" she said "bye"', '""', '"', "a\\\n", "\\\n", "a=b"),
    *("prompt=", "a,b", "x\n\n"),
]


def test_the_prompt_is_exactly_what_the_shell_passes():
    """Characters that mean something to Hydra or OmegaConf stay as they are. Other arguments do not change."""
    random_state, characters = random.Random(0), '\\\\""\'${}\n a=,()[]~:#'
    prompts = PROMPTS + ["".join(random_state.choices(characters, k=random_state.randint(1, 8))) for _ in range(100)]
    parser = OverridesParser.create()
    for prompt in prompts:
        arguments = ["generate.py", f"prompt={prompt}", "checkpoint=a=b"]
        quote_prompt(arguments)
        config = OmegaConf.create({"prompt": parser.parse_override(arguments[1]).value()})
        assert OmegaConf.to_container(config, resolve=True) == {"prompt": prompt}, arguments[1]
        assert arguments[::2] == ["generate.py", "checkpoint=a=b"]
