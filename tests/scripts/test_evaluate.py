"""`python -m scripts.evaluate`: compared with the val/loss of training, with transformers, and with counted bytes."""

import json
import math
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kernels.registry import impls, unavailable
from lab import evaluation
from lab.bench.new_backends import WrongKernel
from model.gpt import GPT
from scripts import evaluate as script
from scripts import generate
from tests.model.test_gpt import SMALL, gpt, hugging_face
from tests.test_train import QUICK, row

CPU = torch.device("cpu")
CONFIG = replace(SMALL, n_layer=1, vocab_size=264, block_size=48)


@pytest.fixture
def evaluate(called, monkeypatch, tmp_path):
    """Run the command in this process: evaluate("checkpoint=run") -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: called("evaluate.py", script.main, "device=cpu", "precision=fp32", *arguments)


def test_a_new_kernel_is_checked_before_the_evaluation(evaluate, monkeypatch, hf_model):
    def refuse(kernels, attn, device):
        assert (kernels.rms_norm, attn.impl, device) == ("eager", "math", CPU)  # GPT-2 does not call rms_norm
        raise WrongKernel("mine.py is wrong")

    monkeypatch.setattr(script, "check_new_backends", refuse)
    Path("run").mkdir()
    code, _, err = evaluate(*TEXT, "attn=math", "kernels.rms_norm=triton", "out_dir=run")
    warning, error = err.splitlines()
    assert (code, error) == (1, "error: mine.py is wrong")
    assert warning.startswith("warning: kernels.rms_norm=triton has no effect, ")
    assert json.loads(Path("run/result.json").read_text())["status"] == "wrong: mine.py is wrong"


@pytest.fixture
def hf_model(tmp_path):
    """A model of transformers, saved in the folder `hf_model`, and a folder `text` with 40 files."""
    model = hugging_face(gpt(CONFIG))
    model.save_pretrained(tmp_path / "hf_model")
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"Nº {number}: " + "ein Stück Text, " * (5 + number % 7))
    return model


TEXT = "checkpoint=hf_model", "data=text", "data.path=text", "data.cache=tokens", "batch_size=4"


@pytest.mark.exhaustive
def test_the_loss_equals_the_val_loss_of_training_on_the_same_batches(hotswap, evaluate):
    """`batches=3` takes the batches of the run's own evaluations, with every attention that runs here.

    Batches are small for Triton's interpreter.
    """
    batches = "train.eval_every=4", "train.eval_batches=3", "train.max_steps=4", "train.checkpoint_every=4"
    batches += "train.batch_size=2", "train.block_size=48", "train.tokens_per_step=96"
    code, _, err = hotswap(*QUICK, *batches)
    assert (code, err) == (0, "")
    for attn in impls("attention"):
        if unavailable("attention", attn, CPU):
            continue
        code, out, err = evaluate("checkpoint=run", "batches=3", f"attn={attn}", f"out_dir={attn}")
        assert code == 0, err
        assert row(attn)["val/loss"] == pytest.approx(row("run")["val/loss"], rel=1e-5)
        assert row(attn)["kernels"]["attention"].startswith(attn)
        assert row(attn)["tokens"] == 3 * 2 * 48
        assert f"loss {row(attn)['val/loss']:.4f} nats a token" in out


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_runs_model_computes_in_the_precision_of_its_training(hotswap, called, precision):
    """evaluate then gives the loss of the run's own evaluation, and generate records it."""
    small = "train.eval_every=2", "train.eval_batches=1", "train.max_steps=2", "train.checkpoint_every=2"
    assert hotswap(*QUICK, *small, f"precision={precision}")[0] == 0
    again = "checkpoint=run", "device=cpu"
    assert called("evaluate.py", script.main, *again, "batches=1", "out_dir=evaluated")[0] == 0
    assert row("evaluated")["config"]["precision"] == precision
    assert row("evaluated")["val/loss"] == pytest.approx(row("run")["val/loss"], rel=1e-6)
    words = "prompt=a", "max_new_tokens=2", "generate.kv=auto"
    assert called("generate.py", generate.main, *again, *words, "out_dir=generated")[0] == 0
    assert row("generated")["config"]["precision"] == precision
    assert called("generate.py", generate.main, *again, *words, "out_dir=asked", "precision=amp")[0] == 0
    assert row("asked")["config"]["precision"] == "amp"


def test_what_a_run_in_fp8_and_another_source_compute_in(hotswap, called, monkeypatch):
    """evaluate takes the run's fp8 ops. Nothing generates in fp8, so generate takes the dtype of the weights."""
    assert hotswap(*QUICK, "train.max_steps=1", "train.checkpoint_every=1")[0] == 0
    own = {"precision": "fp8", "kernels": {"fp8": ["mlp"]}}
    seen = []
    monkeypatch.setattr("model.sources.Pretrained.run_config", property(lambda source: own))
    monkeypatch.setattr("lab.evaluation.open_text", lambda *_: sys.exit("read"))
    monkeypatch.setattr(script, "kernels_label", lambda config, kernels, attn: seen.append(kernels.fp8) or "")
    assert called("evaluate.py", script.main, "checkpoint=run", "device=cpu")[2] == "read\n"
    assert seen == [["mlp"]]
    words = "checkpoint=run", "device=cpu", "prompt=a", "max_new_tokens=2"
    for own, precision in (({"precision": "fp8"}, "bf16"), ({}, "bf16"), ({"precision": "amp"}, "amp")):
        assert called("generate.py", generate.main, *words, f"out_dir={len(own)}{precision}")[0] == 0
        assert row(f"{len(own)}{precision}")["config"]["precision"] == precision


def test_loss_and_bytes_equal_those_of_transformers_and_of_the_text(evaluate, hf_model, monkeypatch):
    """Every window of 32 tokens counts once: the loss of transformers, and the bytes of the tokens' text."""
    datasets = []
    original = evaluation.open_dataset

    def open_dataset(config):
        datasets.append(original(config))
        return datasets[-1]

    monkeypatch.setattr(evaluation, "open_dataset", open_dataset)
    code, out, err = evaluate(*TEXT, "block_size=32", "out_dir=run")
    assert code == 0, err
    nats, tokens, size = 0.0, 0, 0
    hf_model.double()
    for shard in datasets[0].val:
        ids = torch.from_numpy(np.asarray(shard.tokens).astype(np.int64))
        for start in range(0, len(ids) - 32, 32):
            window = ids[start : start + 33]
            logits = hf_model(window[None, :-1]).logits[0]
            nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
            tokens += 32
            size += len(bytes(i for i in window[1:].tolist() if i < 256))
    result = row("run")
    assert (result["tokens"], result["bytes"]) == (tokens, size)
    assert size < tokens  # some tokens are an end of text, which has no bytes
    assert tokens % (4 * 32)  # the last batch is smaller
    assert result["val/loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert result["val/perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert result["val/bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-5)
    assert f"{result['val/bits_per_byte']:.4f} bits per byte" in out
    [line] = Path("run/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["val/bits_per_byte"] == result["val/bits_per_byte"]


def test_the_loss_is_the_same_when_the_model_is_compiled(evaluate, hf_model, monkeypatch):
    """torch.compile traces the whole model. The backend aot_eager replaces Inductor, as in test_train.py."""
    monkeypatch.setattr(GPT, "compile", lambda self, **how: nn.Module.compile(self, backend="aot_eager", **how))
    for kernels in ("eager", "compile"):
        code, _, err = evaluate(*TEXT, "batches=2", f"kernels={kernels}", f"out_dir={kernels}")
        assert code == 0, err
    assert row("compile")["kernels"]["compile"] is True
    assert row("compile")["val/loss"] == pytest.approx(row("eager")["val/loss"], rel=1e-5)


def test_bits_per_byte_follow_from_the_vocabulary_when_all_tokens_are_equally_likely():
    """A model with zero weights needs log2 V bits a token. The tokens of this test have 0 to 9 bytes."""
    model = gpt(CONFIG)
    torch.nn.init.zeros_(model.wte.weight)
    generator = torch.Generator().manual_seed(0)
    batches = [tuple(torch.randint(264, (2, 3, 16), generator=generator)) for _ in range(3)]
    lengths = np.random.default_rng(0).integers(0, 10, 264)
    figures = evaluation.score(model, iter(batches), lengths, CPU)
    size = sum(lengths[i] for _, y in batches for i in y.flatten().tolist())
    assert figures["bytes"] == size
    assert figures["val/bits_per_byte"] == pytest.approx(math.log2(264) * 3 * 3 * 16 / size, rel=1e-6)
    assert evaluation.score(model, iter(batches), 0 * lengths, CPU)["val/bits_per_byte"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint=null"], "checkpoint is missing"),
        (["checkpoint=hf_model"], "hf_model has no record of its data: pass another, data=text"),
        ([*TEXT, "block_size=49"], "block_size=49: hf_model has 48 positions, pass block_size=48 or less\n"),
        (
            [*TEXT, "data.path=text/0.txt"],
            "the validation text has 10 tokens, and one sample takes 49 (block_size + 1)",
        ),
        ([*TEXT, "tokenizer=foo"], "tokenizer=foo: choose bytes or gpt2, or name a folder with tokenizer.json or "),
        (['checkpoint="~nobody-here/x"'], "~nobody-here/x: the home folder of this user is not known"),
        ([*TEXT, "batches=0"], "batches=0: it must be at least 1"),
        ([*TEXT, "precision=int8"], "precision=int8: choose fp32, amp, bf16, fp8"),
        (
            [*TEXT, "tokenizer=gpt2"],
            "tokenizer=gpt2 has 50257 ids, and hf_model only 264: name the one it trained with",
        ),
        ([*TEXT, "data.path=nowhere"], "nowhere"),
        ([*TEXT, "block=1"], "unknown key block"),
    ],
)
def test_a_mistake_prints_one_line(evaluate, hf_model, arguments, message):
    code, _, err = evaluate(*arguments)
    assert code != 0
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert "model." not in err
    assert "train." not in err
    assert not Path("out").exists()  # no run was started


def test_changed_data_is_refused_until_the_command_names_it(hotswap, evaluate, tmp_path):
    """The error gives the arguments that name the data. With these arguments the changed data is accepted."""
    (tmp_path / "book.txt").write_text("all work and no play " * 500)
    data = "data=text", "data.path=book.txt"
    code, _, err = hotswap(*QUICK, *data, "train.max_steps=1", "train.checkpoint_every=1")
    assert (code, err) == (0, "")
    assert evaluate("checkpoint=run", "out_dir=same")[0] == 0
    with open("book.txt", "a") as file:
        file.write("makes Jack a dull boy " * 500)
    code, _, err = evaluate("checkpoint=run", "out_dir=refused")
    assert code == 1
    assert err.startswith("error: the data of run at step 1 changed after its training (different: train, val): ")
    arguments = shlex.split(err.partition(" on the new data with ")[2])
    assert arguments[:2] == [*data]
    assert not Path("refused").exists()
    code, _, err = evaluate("checkpoint=run", *arguments, "out_dir=chosen")
    assert (code, err) == (0, "")
    assert row("chosen")["val/loss"] != row("same")["val/loss"]


@pytest.mark.parametrize(
    ("arguments", "fraction", "smallest_share", "largest_share"),
    [([], "0.1", 0.01, 0.4), (["data.val_fraction=1"], "1", 1, 1)],
)
def test_only_the_validation_share_is_evaluated(evaluate, hf_model, arguments, fraction, smallest_share, largest_share):
    """The output says how many tokens that is. With data.val_fraction=1 it is the whole text."""
    size = sum(path.stat().st_size + 1 for path in Path("text").iterdir())
    code, out, err = evaluate(*TEXT, *arguments, "block_size=32", "out_dir=run")
    assert (code, err) == (0, "")
    summary = re.search(
        r"data +text, bytes: ([\d,]+) validation tokens of ([\d,]+) \(data.val_fraction=(.*)\), in", out
    )
    held_out, total = (int(count.replace(",", "")) for count in summary.groups()[:2])
    assert total == size
    assert smallest_share <= held_out / total <= largest_share
    assert summary[3] == fraction
    assert row("run")["tokens"] == (held_out - 1) // 32 * 32
