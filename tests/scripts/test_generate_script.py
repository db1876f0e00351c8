"""scripts/generate.py: the text against full forwards, its record, what the shell hands over, and mistakes."""

import json
import random
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from data.tokenizer import Bytes
from kernels.registry import AttnConfig
from model import cost
from model.text import Text
from runtime.config import UserError
from scripts import generate as script
from tests.model.test_generate import HERE, best, lively
from tests.model.test_gpt import SMALL, hugging_face

CONFIG = replace(SMALL, vocab_size=264, block_size=80)
ARGUMENTS = "checkpoint=theirs", "device=cpu", "precision=fp32"


@pytest.fixture
def command(called, monkeypatch, tmp_path):
    """command("prompt=a") -> (exit code, stdout, stderr), in a folder with a Hugging Face model in `theirs`."""
    monkeypatch.chdir(tmp_path)
    hugging_face(lively(CONFIG, spread=1.0)).save_pretrained("theirs")
    return lambda *arguments: called("generate.py", script.program, *ARGUMENTS, *arguments)


def row(folder):
    return json.loads(Path(folder, "result.json").read_text())


@pytest.mark.parametrize("attn", HERE)
def test_greedy_text_and_record(command, attn):
    code, out, err = command("prompt=Hello (world", "max_new_tokens=40", "temperature=0", f"attn={attn}", "out_dir=run")
    assert (code, err) == (0, "")
    start = torch.tensor([list(b"Hello (world")])
    model = lively(CONFIG, spread=1.0)
    ids = start
    for _ in range(40):  # ids from 257 up are the vocabulary's padding
        ids = torch.cat((ids, model(ids)[:, -1, :257].argmax(-1, keepdim=True)), dim=1)
    ids = ids[0].tolist()
    assert len(set(ids[12:])) > 20
    assert 256 not in ids
    text = Bytes().decode(ids)
    assert f"\n\n{text}\n\ndecode   " in out
    assert Path("run/sample.txt").read_text() == text + "\n"

    result = row("run")
    assert result["status"] == "ok"
    assert result["config"]["prompt"] == "Hello (world"
    assert result["kernels"]["attention"].startswith(attn)
    assert set(result["kernels"]) == {"norm", "attention", "mlp", "compile"}
    assert result["gen/prompt_tokens"] == 12
    assert result["gen/tokens"] == 40
    assert result["gen/prefill_tokens_per_sec"] == pytest.approx(12 / (1e-3 * result["gen/ttft_ms"]))
    assert result["gen/decode_tokens_per_sec"] == pytest.approx(1e3 / result["gen/step_ms"])
    least = cost.decode_bytes(CONFIG, 1, 12 + 20, torch.float32)
    share = least / (1e-3 * result["gen/step_ms"]) / result["measured_bandwidth"]
    assert result["gen/bandwidth_utilisation"] == pytest.approx(share)
    assert 0 < share < 1
    assert result["mem/kv_cache_gib"] * 2**30 == cost.kv_cache_bytes(CONFIG, 1, 64, torch.float32)  # of 52
    assert result["mem/weights_gib"] * 2**30 == 4 * cost.parameters(CONFIG)
    [line] = Path("run/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["gen/ttft_ms"] == result["gen/ttft_ms"]


def test_samples_are_seeded_and_numbered(command):
    many = "prompt=a", "batch=3", "max_new_tokens=20", "top_p=0.9"
    outs = [command(*many, f"seed={seed}", f"out_dir=run{i}")[1] for i, seed in enumerate((1, 1, 2))]
    texts = [Path(f"run{i}/sample.txt").read_text() for i in range(3)]
    assert texts[0] == texts[1] != texts[2]
    assert [out.count("\n--- ") for out in outs] == [3, 3, 3]
    assert len(set(texts[0].split("\n"))) > 1


def test_an_empty_prompt_begins_a_document_and_a_stop_ends_it(command):
    model = lively(CONFIG, spread=1.0)
    ids = best(model, torch.tensor([[256]]), 6)[0, 1:].tolist()
    stop = next(i for i in range(1, 6) if ids[i] not in ids[:i])
    assert command("temperature=0", "max_new_tokens=30", f"stop=[{ids[stop]}]", "out_dir=run")[0] == 0
    assert row("run")["gen/tokens"] == stop + 1
    assert Path("run/sample.txt").read_text() == Bytes().decode(ids[:stop]) + "\n"


PROMPTS = [
    *(
        "def main(",
        "Hello, world = {1: [2]}",
        "it's",
        'say "a"',
        '"',
        "a\\",
        'a\\"b',
        "${oc.env:HOME}",
        "\\${x}",
        "a\nb",
    ),
    *(
        "x: y # z",
        " lead and trail ",
        "???x",
        "null",
        "007",
        "日本 🙂",
        "\\\\",
        "$x",
        "~a!+",
        "\\\\\\",
        "'a",
        "\\'",
        "",
    ),
    *('"quoted"', "'quoted'", '"Hello" she said "bye"', '""', '"', "a\\\n", "\\\n", "a=b", "prompt=", "a,b", "x\n\n"),
]


def test_prompts_are_literal(monkeypatch):
    """What the shell hands over is what the program gets, and a row's command hands over the same again."""
    draw, signs = random.Random(0), '\\\\""\'${}\n a=,()[]~:#'
    prompts = PROMPTS + ["".join(draw.choices(signs, k=draw.randint(1, 8))) for _ in range(100)]
    told = []
    monkeypatch.setattr(script, "main", lambda: told.append(sys.argv[1:]))
    for prompt in prompts:
        monkeypatch.setattr("sys.argv", ["generate.py", f"prompt={prompt}", "checkpoint=a=b"])
        script.program()
    parser = OverridesParser.create()
    for prompt, (first, second) in zip(prompts, told, strict=True):
        held = OmegaConf.create({"prompt": parser.parse_override(first).value()})
        assert OmegaConf.to_container(held, resolve=True) == {"prompt": prompt}, first
        assert second == "checkpoint=a=b"


@pytest.mark.parametrize("prompt", ['"Hello" she said "bye"', "it's ${x} (\n", ""])
def test_the_rows_command_is_the_same_again(command, prompt):
    words = [f"prompt={prompt}"] if prompt else []
    code, _, err = command(*words, "max_new_tokens=2", "stop=['(',b]", "out_dir=run")
    assert (code, err) == (0, "")
    _, _, *again = shlex.split(row("run")["command"])
    words = [word for word in again if word not in (*ARGUMENTS, "out_dir=run")]
    assert command(*words, "out_dir=again")[0] == 0
    assert row("again")["config"]["prompt"] == row("run")["config"]["prompt"] == prompt
    assert row("again")["config"]["stop"] == ["(", "b"]
    assert Path("again/sample.txt").read_text() == Path("run/sample.txt").read_text()


@pytest.mark.parametrize(("prompt", "new"), [("a" * 9, 71), ("", 79), ("a" * 79, 1)])
def test_without_a_number_as_many_as_fit(command, prompt, new):
    """80 positions, with an empty prompt's end of text."""
    code, _, err = command(f"prompt={prompt}", "temperature=0", "tokenizer=bytes", "out_dir=run")
    assert (code, err) == (0, "")
    assert row("run")["config"]["max_new_tokens"] == new


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint=null"], "checkpoint is missing: name a run"),
        (["checkpoint=nowhere/at/all"], "nowhere/at/all: there is no such file or folder"),
        (["max_new_tokens=0"], "max_new_tokens=0: it must be at least 1"),
        (["batch=0"], "batch=0: it must be at least 1"),
        (["temperature=-1"], "temperature=-1.0: it must be 0"),
        (["temperature=nan"], "temperature=nan: it must be 0"),
        (["top_k=-1"], "top_k=-1: it must be at least 1, or 0 for no limit"),
        (["top_p=0"], "top_p=0.0: it must be in (0, 1]"),
        (["top_p=1.1"], "top_p=1.1: it must be in (0, 1]"),
        (["stop=[1.5]"], "stop=[1.5]: it must be a list of texts and token ids"),
        (["seed=-1"], "seed=-1: it must be in [0, 2^63)"),
        (["precision=fp16"], "precision=fp16: choose fp32, amp, bf16"),
        (["tokenizer=gpt3"], "tokenizer=gpt3: choose bytes or gpt2"),
        (["tokenizer=gpt2"], "tokenizer=gpt2 has 50257 ids, and theirs only 264: name the one of its training"),
        (['checkpoint="~nobody-here/x"'], "~nobody-here/x: there can be no such file or folder"),
        (["attn=none"], "attn=none: no such choice"),
        (["prompts=a"], "unknown key prompts; did you mean prompt?"),
        ([f"prompt={'a' * 80}"], "the prompt has 80 tokens, and theirs has 80 positions: shorten it"),
        (["prompt=abc", "max_new_tokens=78"], "pass max_new_tokens=77 or a shorter prompt"),
    ],
)
def test_mistakes_are_one_line(command, arguments, message):
    code, _, err = command(*arguments)
    assert err.startswith("error: ") or str(code).startswith("error: ")
    line = err or f"{code}\n"
    assert message in line
    assert line.count("\n") == 1
    assert not Path("out").exists()


def test_without_positions_there_is_no_longest(command):
    """Rope: prompt and new tokens may go beyond block_size; 128 are the default."""
    source = script.Pretrained({"pos": "rope", "block_size": 8}, {}, "bytes", "rope")
    cfg = script.Config("x", "a" * 20, 50, 0.0, 0, 1.0, 1, 2, None, None, None, "cpu", "fp32", None, AttnConfig("sdpa"))
    assert script.encode(cfg, source, Bytes()).shape == (2, 20)
    assert cfg.max_new_tokens == 50
    cfg.max_new_tokens = None
    script.encode(cfg, source, Bytes())
    assert cfg.max_new_tokens == 128
    with pytest.raises(UserError, match="the prompt has 20 tokens"):
        script.encode(cfg, source._replace(model={"pos": "learned", "block_size": 8}), Bytes())


def told(ids, stops=()):
    text = Text(Bytes(), list(stops))
    pieces = []
    for token in ids:
        pieces.append(text.add(token))
        if text.stopped:
            return pieces
    return [*pieces, text.finish()]


def test_characters_come_whole():
    """Split over tokens, each character comes with its last byte, and no other is late."""
    written = "naïve 日本 🙂!"
    pieces = told(written.encode())
    assert "".join(pieces) == written
    ends = np.cumsum([len(character.encode()) for character in written]) - 1
    assert [i for i, piece in enumerate(pieces) if piece] == ends.tolist()


def test_bytes_that_are_no_text_are_told_as_decoded_at_once():
    """10,000 bytes, of which most are invalid: whole or piece by piece is the same."""
    ids = np.random.default_rng(0).choice([*b"ab", 0xC3, 0xA9, 0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0x99, 0x82, 0xFF], 10_000)
    assert "".join(told(ids.tolist())) == Bytes().decode(ids.tolist())
    cut = "é🙂".encode()[:-1]
    assert "".join(told(cut)) == Bytes().decode(list(cut)) == "é\ufffd"


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
def test_stops(written, stops, expected):
    """A stop text is left out, and no part of it is told before it is known to be none."""
    pieces = told(written.encode(), stops)
    assert "".join(pieces) == expected


def test_end_of_text_stops():
    assert told([97, 256, 98]) == ["a", ""]
