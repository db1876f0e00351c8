"""`python -m scripts.generate`: its text compared with forwards without a cache, its row, its prompt, and mistakes."""

import json
import random
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from data.tokenizer import Bytes
from lab.generation import encode_prompt
from model import cost
from model.pretrained import Pretrained
from runtime.config import UserError
from scripts import generate as script
from tests.model.test_generate import DECODING, greedy, varied_gpt
from tests.model.test_gpt import SMALL, hugging_face

CONFIG = replace(SMALL, vocab_size=264, block_size=80)
ARGUMENTS = "checkpoint=hf_model", "device=cpu", "precision=fp32"


@pytest.fixture
def command(called, monkeypatch, tmp_path):
    """Run the command in this process: command("prompt=a") -> (exit code, stdout, stderr).

    The current folder has a model of transformers in `hf_model`.
    """
    monkeypatch.chdir(tmp_path)
    hugging_face(varied_gpt(CONFIG, spread=1.0)).save_pretrained("hf_model")
    return lambda *arguments: called("generate.py", script.main_with_exact_prompt, *ARGUMENTS, *arguments)


def row(folder):
    return json.loads(Path(folder, "result.json").read_text())


@pytest.mark.exhaustive
@pytest.mark.parametrize("attn", DECODING)
def test_greedy_text_equals_that_of_forwards_without_a_cache(command, attn):
    """The row has the figures of the generation."""
    code, out, err = command("prompt=Hello (world", "max_new_tokens=40", "temperature=0", f"attn={attn}", "out_dir=run")
    assert (code, err) == (0, "")
    start = torch.tensor([list(b"Hello (world")])
    model = varied_gpt(CONFIG, spread=1.0)
    ids = start
    for _ in range(40):  # the ids from 257 on are padding of the vocabulary
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
    assert result["mem/kv_cache_gib"] * 2**30 == cost.kv_cache_bytes(CONFIG, 1, 64, torch.float32)  # for 52 tokens
    assert result["mem/weights_gib"] * 2**30 == 4 * cost.parameters(CONFIG)
    [line] = Path("run/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["gen/ttft_ms"] == result["gen/ttft_ms"]


def test_samples_are_equal_only_when_the_seed_is_equal(command):
    """Several samples are printed with numbers."""
    arguments = "prompt=a", "batch=3", "max_new_tokens=20", "top_p=0.9"
    outs = [command(*arguments, f"seed={seed}", f"out_dir=run{i}")[1] for i, seed in enumerate((1, 1, 2))]
    texts = [Path(f"run{i}/sample.txt").read_text() for i in range(3)]
    assert texts[0] == texts[1] != texts[2]
    assert [out.count("\n--- ") for out in outs] == [3, 3, 3]
    assert len(set(texts[0].split("\n"))) > 1


def test_a_document_begins_when_the_prompt_is_empty_and_ends_at_a_stop(command):
    model = varied_gpt(CONFIG, spread=1.0)
    ids = greedy(model, torch.tensor([[256]]), 6)[0, 1:].tolist()
    stop = next(i for i in range(1, 6) if ids[i] not in ids[:i])
    assert command("temperature=0", "max_new_tokens=30", f"stop=[{ids[stop]}]", "out_dir=run")[0] == 0
    assert row("run")["gen/tokens"] == stop + 1
    assert Path("run/sample.txt").read_text() == Bytes().decode(ids[:stop]) + "\n"


PROMPTS = [
    *("def main(", "Hello, world = {1: [2]}", "it's", 'say "a"', '"', "a\\", 'a\\"b', "${oc.env:HOME}", "\\${x}"),
    *("a\nb", "x: y # z", " lead and trail ", "???x", "null", "007", "日本 🙂", "\\\\", "$x", "~a!+", "\\\\\\"),
    *("'a", "\\'", "", '"quoted"', "'quoted'", '"Hello" she said "bye"', '""', '"', "a\\\n", "\\\n", "a=b"),
    *("prompt=", "a,b", "x\n\n"),
]


def test_the_prompt_is_exactly_what_the_shell_passes(monkeypatch):
    """Characters that mean something to Hydra or OmegaConf stay as they are. Other arguments do not change."""
    random_state, characters = random.Random(0), '\\\\""\'${}\n a=,()[]~:#'
    prompts = PROMPTS + ["".join(random_state.choices(characters, k=random_state.randint(1, 8))) for _ in range(100)]
    passed_on = []
    monkeypatch.setattr(script, "main", lambda: passed_on.append(sys.argv[1:]))
    for prompt in prompts:
        monkeypatch.setattr("sys.argv", ["generate.py", f"prompt={prompt}", "checkpoint=a=b"])
        script.main_with_exact_prompt()
    parser = OverridesParser.create()
    for prompt, (prompt_word, checkpoint_word) in zip(prompts, passed_on, strict=True):
        config = OmegaConf.create({"prompt": parser.parse_override(prompt_word).value()})
        assert OmegaConf.to_container(config, resolve=True) == {"prompt": prompt}, prompt_word
        assert checkpoint_word == "checkpoint=a=b"


@pytest.mark.parametrize("prompt", ['"Hello" she said "bye"', "it's ${x} (\n", ""])
def test_the_text_is_the_same_when_the_command_of_the_row_runs(command, prompt):
    words = [f"prompt={prompt}"] if prompt else []
    code, _, err = command(*words, "max_new_tokens=2", "stop=['(',b]", "out_dir=run")
    assert (code, err) == (0, "")
    _, _, *arguments = shlex.split(row("run")["command"])
    words = [word for word in arguments if word not in (*ARGUMENTS, "out_dir=run")]
    assert command(*words, "out_dir=repeated")[0] == 0
    assert row("repeated")["config"]["prompt"] == row("run")["config"]["prompt"] == prompt
    assert row("repeated")["config"]["stop"] == ["(", "b"]
    assert Path("repeated/sample.txt").read_text() == Path("run/sample.txt").read_text()


@pytest.mark.parametrize(("prompt", "new_tokens"), [("a" * 9, 71), ("", 79), ("a" * 79, 1)])
def test_new_tokens_fill_the_positions_when_no_number_is_given(command, prompt, new_tokens):
    """The model has 80 positions. An empty prompt takes one of them, for the end of text."""
    code, _, err = command(f"prompt={prompt}", "temperature=0", "tokenizer=bytes", "out_dir=run")
    assert (code, err) == (0, "")
    assert row("run")["config"]["max_new_tokens"] == new_tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint=null"], "checkpoint is missing: pass a run"),
        (["checkpoint=nowhere/at/all"], "nowhere/at/all: there is no such file or folder"),
        (["max_new_tokens=0"], "max_new_tokens=0: it must be in [1, 2^31)"),
        (["batch=0"], "batch=0: it must be in [1, 2^31)"),
        (["temperature=-1"], "temperature=-1.0: it must be 0"),
        (["temperature=nan"], "temperature=nan: it must be 0"),
        (["top_k=-1"], "top_k=-1: it must be at least 1, or 0 for no limit"),
        (["top_p=0"], "top_p=0.0: it must be in (0, 1]"),
        (["top_p=1.1"], "top_p=1.1: it must be in (0, 1]"),
        (["stop=[1.5]"], "stop=[1.5]: it must be a list of texts and token ids"),
        (["seed=-1"], "seed=-1: it must be in [0, 2^63)"),
        (["precision=fp16"], "precision=fp16: choose fp32, amp, bf16"),
        (["tokenizer=gpt3"], "tokenizer=gpt3: choose bytes or gpt2"),
        (["tokenizer=gpt2"], "tokenizer=gpt2 has 50257 ids, and hf_model only 264: name the one it trained with"),
        (['checkpoint="~nobody-here/x"'], "~nobody-here/x: there can be no such file or folder"),
        (["attn=none"], "attn=none: no such choice"),
        (["prompts=a"], "unknown key prompts; did you mean prompt?"),
        ([f"prompt={'a' * 80}"], "the prompt has 80 tokens, but hf_model has 80 positions: shorten it"),
        (["prompt=abc", "max_new_tokens=78"], "pass max_new_tokens=77 or a shorter prompt"),
    ],
)
def test_a_mistake_prints_one_line(command, arguments, message):
    code, _, err = command(*arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("error: ")
    assert message in err
    assert not Path("out").exists()


def test_prompt_and_new_tokens_may_exceed_block_size_when_positions_are_rope():
    """The default of max_new_tokens is then 128."""
    source = Pretrained({"pos": "rope", "block_size": 8}, {}, "bytes", "rope")
    ids, new_tokens = encode_prompt("a" * 20, 50, source, Bytes())
    assert (len(ids), new_tokens) == (20, 50)
    assert encode_prompt("a" * 20, None, source, Bytes())[1] == 128
    with pytest.raises(UserError, match="the prompt has 20 tokens"):
        encode_prompt("a" * 20, None, source._replace(model={"pos": "learned", "block_size": 8}), Bytes())
