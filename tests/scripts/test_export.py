"""scripts.export: what it writes is what transformers and nanoGPT read, bit for bit."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from model.pretrained import read
from runtime.config import UserError
from scripts import export
from tests.model.test_gpt import SMALL, gpt, hugging_face
from tests.model.test_pretrained import (
    IDX,
    MODEL,
    NANOGPT,
    equal,
    logits,
    nanogpt_checkpoint,
    nanogpt_forward,
    near,
    saved,
)

ROOT = Path(__file__).parents[2]
OPTIM = {"learning_rate": 1e-3, "weight_decay": 0.25, "beta1": 0.8, "beta2": 0.9}


@pytest.fixture
def command(called, monkeypatch, tmp_path):
    """command("path=x") -> (exit code, stdout, stderr), in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: called("export.py", export.main, *arguments)


def test_hugging_face(command):
    """A checkpoint of ours in transformers: its logits are ours; read again, it is the same."""
    from transformers import GPT2LMHeadModel

    saved(Path("run"), gpt(replace(SMALL, vocab_size=320)))
    assert command("checkpoint=run", "path=a/b") == (
        0,
        "run at step 20: 0.1M parameters in fp32 -> a/b/model.safetensors, a/b/config.json\n",
        "",
    )
    assert sorted(os.listdir("a/b")) == ["config.json", "model.safetensors"]
    with safe_open("a/b/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # older versions of transformers refuse a file without
    found = read("a/b")
    assert found.model == {**MODEL, "vocab_size": 320}
    assert equal(found.weights, read("run").weights)
    theirs, report = GPT2LMHeadModel.from_pretrained("a/b", output_loading_info=True, attn_implementation="eager")
    assert not any(report.values()), report
    assert (theirs.dtype, theirs.config.eos_token_id) == (torch.float32, 256)
    with torch.no_grad():
        ours = logits(found.weights, replace(SMALL, vocab_size=320))
        rounded = theirs.eval()(IDX).logits
        assert near(ours, theirs.double()(IDX).logits, rounded)


def test_hugging_face_and_back(command):
    """transformers' own file -> ours -> a file with the same tensors under the same names."""
    hugging_face(gpt()).save_pretrained("theirs")
    assert command("checkpoint=theirs", "path=again")[0] == 0
    theirs, again = load_file("theirs/model.safetensors"), load_file("again/model.safetensors")
    assert equal(dict(sorted(again.items())), dict(sorted(theirs.items())))
    config, told = (json.loads(Path(folder, "config.json").read_text()) for folder in ("theirs", "again"))
    shared = (set(config) & set(told)) - {"bos_token_id", "eos_token_id"}
    assert {key: told[key] for key in shared} == {key: config[key] for key in shared}
    assert {"n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "layer_norm_epsilon"} <= shared


def test_hugging_face_without_biases(command):
    """Theirs always has them: of zeros, with which the logits are the same."""
    config = replace(SMALL, bias=False)
    saved(Path("run"), gpt(config))
    assert command("checkpoint=run", "path=hf")[0] == 0
    ours, found = read("run").weights, read("hf")
    assert equal({name: found.weights[name] for name in ours}, ours)
    extra = [weight for name, weight in found.weights.items() if name not in ours]
    assert len(extra) == 3 * 6 + 1
    assert not torch.cat(extra).any()
    torch.testing.assert_close(logits(found.weights), logits(ours, config))


def nanogpts_optimizer(state):
    """The AdamW that nanoGPT builds around a state dict: (by name, optimizer), with nanoGPT's figures."""
    by_name = {name: nn.Parameter(weight.clone()) for name, weight in state.items() if name != "lm_head.weight"}
    groups = [
        {"params": [w for w in by_name.values() if w.dim() >= 2], "weight_decay": 0.1},
        {"params": [w for w in by_name.values() if w.dim() < 2], "weight_decay": 0.0},
    ]
    return by_name, torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpt(command, bias):
    """A checkpoint of ours as nanoGPT resumes it: model_args, weights, and AdamW's moments under the right numbers."""
    _, moments = saved(Path("run"), gpt(replace(SMALL, bias=bias, dropout=0.2)), optim=OPTIM)
    assert command("checkpoint=run", "format=nanogpt", "path=nano")[::2] == (0, "")
    held = torch.load("nano/ckpt.pt", map_location="cpu", weights_only=True)
    args = {**NANOGPT, "bias": bias}
    assert held["model_args"] == args
    assert (held["iter_num"], held["best_val_loss"], held["config"]["optim"]) == (20, 2.5, OPTIM)
    state = held["model"]
    weights = read("run").weights
    names = [*(f"transformer.{name}" for name in weights), "lm_head.weight"]
    assert equal(state, dict(zip(names, [*weights.values(), weights["wte.weight"]], strict=True)))
    exact = nanogpt_forward({name: weight.double() for name, weight in state.items()}, args, IDX)
    assert near(logits(weights, replace(SMALL, bias=bias)), exact, nanogpt_forward(state, args, IDX))
    again = read("nano")
    assert (again.model, again.tokenizer) == ({**MODEL, "bias": bias}, "bytes")
    assert equal(again.weights, weights)

    by_name, optimizer = nanogpts_optimizer(state)
    optimizer.load_state_dict(held["optimizer"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}
    for name, weight in by_name.items():
        found = optimizer.state[weight]
        assert found["step"] == 20
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[key], moments[key][name.removeprefix("transformer.")]), (name, key)


def test_nanogpt_and_back(command):
    """nanoGPT's own file -> ours -> the same state dict; AdamW starts anew, and takes a step."""
    nanogpt_checkpoint("ckpt.pt")
    assert command("checkpoint=ckpt.pt", "format=nanogpt", "path=again")[0] == 0
    held, theirs = (torch.load(path, weights_only=True) for path in ("again/ckpt.pt", "ckpt.pt"))
    assert equal(held["model"], theirs["model"])
    assert held["model"]["lm_head.weight"].data_ptr() == held["model"]["transformer.wte.weight"].data_ptr()
    assert held["model_args"] == {**NANOGPT, "dropout": 0.0}
    assert (held["iter_num"], held["best_val_loss"], read("again").tokenizer) == (0, 1e9, "gpt2")
    by_name, optimizer = nanogpts_optimizer(held["model"])
    optimizer.load_state_dict(held["optimizer"])
    for weight in by_name.values():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert {state["step"].item() for state in optimizer.state.values()} == {1.0}


def test_from_one_to_the_other(command):
    """Hugging Face's -> nanoGPT's -> Hugging Face's."""
    hugging_face(gpt()).save_pretrained("theirs")
    assert command("checkpoint=theirs", "format=nanogpt", "path=x")[0] == 0
    assert command("checkpoint=x/ckpt.pt", "path=x")[0] == 0
    theirs, again = load_file("theirs/model.safetensors"), load_file("x/model.safetensors")
    assert equal(dict(sorted(again.items())), dict(sorted(theirs.items())))


def test_nothing_is_overwritten(command):
    hugging_face(gpt()).save_pretrained("theirs")
    Path("ckpt.pt").write_text("precious")
    for arguments, taken in [
        (("checkpoint=theirs", "path=theirs"), "model.safetensors and config.json"),
        (("checkpoint=./not/even/read", "format=nanogpt", "path=."), "ckpt.pt"),
    ]:
        code, _, err = command(*arguments)
        assert (code, err.count("\n")) == (1, 1)
        assert f"already holds {taken}, which stays: choose another folder" in err
    with pytest.raises(UserError, match=r"already holds ckpt.pt"):  # it came while the model was read
        export.write(Path(), {"ckpt.pt": lambda path: path.write_text("new")})
    assert Path("ckpt.pt").read_text() == "precious"
    assert sorted(os.listdir()) == ["ckpt.pt", "theirs"]


def test_a_write_that_fails_leaves_nothing(command, monkeypatch):
    """A disk that is full when half of it is written: one line, no file, and not the first of the two either."""
    hugging_face(gpt()).save_pretrained("theirs")
    whole = Path.write_text

    def full(path, text):
        whole(path, text[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
        assert command("checkpoint=theirs", "path=out") == (
            1,
            "",
            "error: path=out cannot be written: No space left on device; 0.5 GiB are free there, choose another folder"
            "\n",
        )
    assert os.listdir() == ["theirs"]
    assert command("checkpoint=theirs", "path=out")[0] == 0


def test_nanogpts_file_on_a_full_disk(command, monkeypatch):
    """torch.save's own words for it are 20 lines of C++; no new folder stays, and an old one as it was."""
    hugging_face(gpt()).save_pretrained("theirs")
    Path("old").mkdir()

    def full(held, path):
        Path(path).write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0\nframe #0: c10")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
    for path in ("a/b", "old"):
        code, out, err = command("checkpoint=theirs", "format=nanogpt", f"path={path}")
        assert (code, out) == (1, "")
        assert err == (
            f"error: path={path} cannot be written: torch.save broke off; 0.5 GiB are free there, choose another "
            "folder\n"
        )
    assert sorted(os.listdir()) == ["old", "theirs"]
    assert os.listdir("old") == []


def test_mistakes(command):
    saved(Path("rope"), gpt(replace(SMALL, pos="rope")))
    hugging_face(gpt()).save_pretrained("theirs")
    Path("file").touch()
    for arguments, message in [
        (("path=x",), "checkpoint is missing: name a run"),
        (("checkpoint=theirs",), "path is missing: name the folder to write to"),
        (("checkpoint=theirs", "path=x", "format=gguf"), "format=gguf: choose hf or nanogpt"),
        (("checkpoint=rope", "path=x"), "rope at step 20 has rope positions, which hf's GPT-2 does not know"),
        (("checkpoint=rope", "path=x", "format=nanogpt"), "has rope positions, which nanogpt's GPT-2 does not know"),
        (("checkpoint=theirs", "path=file"), "path=file cannot be written: "),
        (("checkpoint=./none", "path=x"), "./none: there is no such file or folder"),
        (("checkpoint=theirs", 'path="~nobody-here/x"'), "~nobody-here/x: there can be no such file or folder"),
        (("checkpiont=theirs", "path=x"), "unknown key checkpiont; did you mean checkpoint?"),
    ]:
        code, out, err = command(*arguments)
        assert (code, out, err.count("\n")) == (1, "", 1), err
        assert err.startswith(f"error: {message}") or (err.startswith("error: ") and message in err)
    assert not Path("x").exists()


def test_from_the_shell(tmp_path):
    """As it is run, with HF_ENDPOINT at a port where nobody listens; and --help shows the keys with their comments."""
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    arguments = "checkpoint=gpt2-medium", f"path={tmp_path / 'x'}"
    program = [sys.executable, "-m", "scripts.export"]
    done = subprocess.run([*program, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert "error: gpt2-medium: " in done.stderr
    assert "http://127.0.0.1:9 cannot be reached" in done.stderr
    done = subprocess.run([*program, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert (
        "format: hf                          # hf (config.json, model.safetensors) | nanogpt (ckpt.pt)" in done.stdout
    )
