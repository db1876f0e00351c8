"""scripts/evaluate.py against the training's own val/loss, and against transformers and the bytes of the text."""

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kernels.registry import impls, unavailable
from scripts import evaluate as script
from tests.model.test_gpt import SMALL, gpt, hugging_face
from tests.test_train import QUICK, row

CPU = torch.device("cpu")
CONFIG = replace(SMALL, n_layer=1, vocab_size=264, block_size=48)


@pytest.fixture
def evaluate(called, monkeypatch, tmp_path):
    """evaluate("checkpoint=run") -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: called("evaluate.py", script.main, "device=cpu", "precision=fp32", *arguments)


@pytest.fixture
def theirs(tmp_path):
    """A model of Hugging Face's, its folder, and some text: `theirs`, `text`."""
    model = hugging_face(gpt(CONFIG))
    model.save_pretrained(tmp_path / "theirs")
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"Nº {number}: " + "ein Stück Text, " * (5 + number % 7))
    return model


TEXT = "checkpoint=theirs", "data=text", "data.path=text", "data.cache=tokens", "batch_size=4"


def test_is_the_trainings_val_loss(hotswap, evaluate):
    """The same batches, in the order of a checkpoint's own config, under every attention that runs here."""
    batches = "train.eval_every=4", "train.eval_batches=3", "train.max_steps=4", "train.checkpoint_every=4"
    code, _, err = hotswap(*QUICK, *batches)
    assert (code, err) == (0, "")
    for attn in impls("attention"):
        if unavailable("attention", attn, CPU):
            continue
        code, out, err = evaluate("checkpoint=run", "batches=3", f"attn={attn}", f"out_dir={attn}")
        assert code == 0, err
        assert row(attn)["val/loss"] == pytest.approx(row("run")["val/loss"], rel=1e-5)
        assert row(attn)["kernels"]["attention"].startswith(attn)
        assert row(attn)["tokens"] == 3 * 4 * 128
        assert f"loss {row(attn)['val/loss']:.4f} nats a token" in out


def test_is_transformers_loss_and_the_texts_bytes(evaluate, theirs, monkeypatch):
    """Every window once, in sequences of 32: transformers' loss of each token, and bytes counted in the text itself."""
    kept = []
    monkeypatch.setattr(script, "open_dataset", lambda cfg, real=script.open_dataset: kept.append(real(cfg)) or kept[0])
    code, out, err = evaluate(*TEXT, "block_size=32", "out_dir=run")
    assert code == 0, err
    nats, tokens, size = 0.0, 0, 0
    theirs.double()
    for shard in kept[0].val:
        ids = torch.from_numpy(np.asarray(shard.tokens).astype(np.int64))
        for start in range(0, len(ids) - 32, 32):
            window = ids[start : start + 33]
            logits = theirs(window[None, :-1]).logits[0]
            nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
            tokens += 32
            size += len(bytes(i for i in window[1:].tolist() if i < 256))
    result = row("run")
    assert (result["tokens"], result["bytes"]) == (tokens, size)
    assert size < tokens  # there are ends of text among them
    assert tokens % (4 * 32)  # and the last batch is smaller
    assert result["val/loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert result["val/perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert result["val/bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-5)
    assert f"{result['val/bits_per_byte']:.4f} bits per byte" in out
    [line] = Path("run/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["val/bits_per_byte"] == result["val/bits_per_byte"]


def test_compiled_is_uncompiled(evaluate, theirs, monkeypatch):
    """Traced whole; Inductor itself is left out, as test_train.py has it."""
    monkeypatch.setattr(script.GPT, "compile", lambda self, **how: nn.Module.compile(self, backend="aot_eager", **how))
    for kernels in ("eager", "compile"):
        code, _, err = evaluate(*TEXT, "batches=2", f"kernels={kernels}", f"out_dir={kernels}")
        assert code == 0, err
    assert row("compile")["kernels"]["compile"] is True
    assert row("compile")["val/loss"] == pytest.approx(row("eager")["val/loss"], rel=1e-5)


def test_bits_per_byte_by_hand():
    """A model that knows nothing takes log2 V bits a token; here tokens are of 0 to 9 bytes."""
    model = gpt(CONFIG)
    torch.nn.init.zeros_(model.wte.weight)
    generator = torch.Generator().manual_seed(0)
    batches = [tuple(torch.randint(264, (2, 3, 16), generator=generator)) for _ in range(3)]
    lengths = np.random.default_rng(0).integers(0, 10, 264)
    figures = script.evaluate(model, iter(batches), lengths, CPU)
    size = sum(lengths[i] for _, y in batches for i in y.flatten().tolist())
    assert figures["bytes"] == size
    assert figures["val/bits_per_byte"] == pytest.approx(math.log2(264) * 3 * 3 * 16 / size, rel=1e-6)
    assert script.evaluate(model, iter(batches), 0 * lengths, CPU)["val/bits_per_byte"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint=null"], "checkpoint is missing"),
        (["checkpoint=theirs"], "theirs does not say what text to evaluate it on: pass data=text"),
        ([*TEXT, "block_size=49"], "block_size=49: theirs has 48 positions, pass block_size=48 or less\n"),
        (
            [*TEXT, "data.path=text/0.txt"],
            "the validation text has 10 tokens, and one sample takes 49 (block_size + 1)",
        ),
        ([*TEXT, "tokenizer=foo"], "tokenizer=foo: choose bytes or gpt2\n"),
        (['checkpoint="~nobody-here/x"'], "~nobody-here/x: there can be no such file or folder"),
        ([*TEXT, "batches=0"], "batches=0: it must be at least 1"),
        ([*TEXT, "precision=fp8"], "precision=fp8: choose fp32, amp, bf16"),
        ([*TEXT, "tokenizer=gpt2"], "tokenizer=gpt2 has 50257 ids, and theirs only 264: name the one of its training"),
        ([*TEXT, "data.path=nowhere"], "nowhere"),
        ([*TEXT, "block=1"], "unknown key block"),
    ],
)
def test_mistakes_are_one_line(evaluate, theirs, arguments, message):
    code, _, err = evaluate(*arguments)
    assert code != 0
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert "model." not in err
    assert "train." not in err
    assert not Path("out").exists()  # nothing was begun


def test_data_that_is_no_longer_the_trainings(hotswap, evaluate, tmp_path):
    """Not without a word; by its name it is a choice like any other."""
    (tmp_path / "book.txt").write_text("all work and no play " * 500)
    words = "data=text", "data.path=book.txt"
    code, _, err = hotswap(*QUICK, *words, "train.max_steps=1", "train.checkpoint_every=1")
    assert (code, err) == (0, "")
    assert evaluate("checkpoint=run", "out_dir=same")[0] == 0
    with open("book.txt", "a") as file:
        file.write("makes Jack a dull boy " * 500)
    code, _, err = evaluate("checkpoint=run", "out_dir=refused")
    assert code == 1
    assert err.startswith("error: the data of run at step 1 is no longer that of its training (other: train, val): ")
    command = shlex.split(err.partition(" all the same with ")[2])
    assert command[:2] == [*words]
    assert not Path("refused").exists()
    code, _, err = evaluate("checkpoint=run", *command, "out_dir=chosen")
    assert (code, err) == (0, "")
    assert row("chosen")["val/loss"] != row("same")["val/loss"]


def test_how_much_of_a_text_is_judged(evaluate, theirs):
    """The held-out share by default, which is told; data.val_fraction=1 is all of it."""
    size = sum(path.stat().st_size + 1 for path in Path("text").iterdir())
    for fraction, least, most in ((None, 0.01, 0.4), (1, 1, 1)):
        more = [f"data.val_fraction={fraction}"] if fraction else []
        code, out, err = evaluate(*TEXT, *more, "block_size=32", f"out_dir=run{fraction}")
        assert (code, err) == (0, "")
        told = re.search(
            r"data +text, bytes: ([\d,]+) validation tokens of ([\d,]+) \(data.val_fraction=(.*)\), in", out
        )
        held, every = (int(count.replace(",", "")) for count in told.groups()[:2])
        assert every == size
        assert least <= held / every <= most
        assert told[3] == str(fraction or 0.1)
        assert row(f"run{fraction}")["tokens"] == (held - 1) // 32 * 32
