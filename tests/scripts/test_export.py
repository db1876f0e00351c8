"""`python -m scripts.export`: transformers and nanoGPT read its files, and the weights are the same bits."""

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

from data.tokenizer import TOKENIZERS, gpt2_files
from model.export import write_files
from model.pretrained import read_pretrained
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
COMMAND = ["-m", "scripts.export"]
OPTIM = {"learning_rate": 1e-3, "weight_decay": 0.25, "beta1": 0.8, "beta2": 0.9}


@pytest.fixture
def command(called, monkeypatch, tmp_path):
    """Run the command in this process, in an empty folder: command("path=x") -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: called("export.py", export.main, *arguments)


def test_transformers_gives_the_same_logits_for_an_exported_checkpoint(command):
    """read_pretrained() reads the exported folder back with the same weights."""
    from transformers import GPT2LMHeadModel

    saved(Path("run"), gpt(replace(SMALL, vocab_size=320)))
    assert command("checkpoint=run", "path=a/b") == (
        0,
        "run at step 20: 0.1M parameters in fp32 -> a/b/model.safetensors, a/b/config.json, a/b/merges.txt, "
        "a/b/vocab.json, a/b/tokenizer_config.json\n",
        "",
    )
    assert sorted(os.listdir("a/b")) == [
        "config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer_config.json",
        "vocab.json",
    ]
    with safe_open("a/b/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # older versions of transformers refuse a file without it
    source = read_pretrained("a/b")
    assert source.config == replace(SMALL, vocab_size=320)
    assert equal(source.weights, read_pretrained("run").weights)
    model, report = GPT2LMHeadModel.from_pretrained("a/b", output_loading_info=True, attn_implementation="eager")
    assert not any(report.values()), report
    assert (model.dtype, model.config.eos_token_id) == (torch.float32, 256)
    with torch.no_grad():
        our_logits = logits(source.weights, replace(SMALL, vocab_size=320))
        fp32_logits = model.eval()(IDX).logits
        assert near(our_logits, model.double()(IDX).logits, fp32_logits)


TEXTS = (
    "def main():\n\treturn  'x'\n\n\n",
    "Grüße, 世界! \U0001f642 it's 1,234.5",
    "  two  spaces\r\n",
    "".join(map(chr, range(1, 0x180))),
)
NO_GPT2 = pytest.mark.skipif(not all(map(Path.is_file, gpt2_files())), reason="tiktoken's cache is empty")


@pytest.mark.parametrize(("name", "size"), [("bytes", 320), pytest.param("gpt2", 50304, marks=NO_GPT2)])
def test_a_pipeline_of_transformers_opens_the_export_with_its_tokenizer(command, monkeypatch, name, size):
    """The ids are ours, for gpt2 tiktoken's, and all files have the mode that umask decides."""
    from transformers import AutoTokenizer, pipeline

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hugging_face(gpt(replace(SMALL, vocab_size=size))).save_pretrained("original")
    assert command("checkpoint=original", "path=exported")[0] == 0
    assert {path.stat().st_mode & 0o777 for path in Path("exported").iterdir()} == {0o666 & ~umask()}
    tokenizer = AutoTokenizer.from_pretrained("exported")
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids == TOKENIZERS[name]().encode(text).tolist()
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == TOKENIZERS[name].eot
    [result] = pipeline("text-generation", "exported", device="cpu")("Hello", max_new_tokens=2, do_sample=False)
    assert result["generated_text"].startswith("Hello")


def umask():
    """Return this process's umask, which can only be read by setting it."""
    value = os.umask(0)
    os.umask(value)
    return value


@pytest.mark.parametrize("changes", [{}, {"norm_eps": 0.1}, {"hidden": 80}, {"tie_embeddings": False}])
def test_a_file_of_transformers_has_the_same_tensors_when_it_is_exported_again(command, changes):
    """The names and the shared keys of config.json are the same too, and the logits are transformers'."""
    config = replace(SMALL, **changes)
    theirs = hugging_face(gpt(config))
    theirs.save_pretrained("original")
    source = read_pretrained("original")
    assert source.config == config
    with torch.no_grad():
        fp32_logits = theirs(IDX).logits
        assert near(logits(source.weights, config), theirs.double()(IDX).logits, fp32_logits)
    assert command("checkpoint=original", "path=exported")[0] == 0
    original, exported = load_file("original/model.safetensors"), load_file("exported/model.safetensors")
    assert equal(dict(sorted(exported.items())), dict(sorted(original.items())))
    original, exported = (json.loads(Path(folder, "config.json").read_text()) for folder in ("original", "exported"))
    shared = (set(original) & set(exported)) - {"bos_token_id", "eos_token_id"}
    assert {key: exported[key] for key in shared} == {key: original[key] for key in shared}
    sizes = {"n_layer", "n_head", "n_embd", "n_positions", "n_inner", "vocab_size"}
    assert {*sizes, "layer_norm_epsilon", "tie_word_embeddings"} <= shared


def test_biases_are_zeros_when_a_model_without_biases_is_exported_to_hf(command):
    """GPT-2 in transformers always has biases. With zeros the logits are the same."""
    config = replace(SMALL, bias=False)
    saved(Path("run"), gpt(config))
    assert command("checkpoint=run", "path=hf")[0] == 0
    weights, exported = read_pretrained("run").weights, read_pretrained("hf").weights
    assert equal({name: exported[name] for name in weights}, weights)
    biases = [weight for name, weight in exported.items() if name not in weights]
    assert len(biases) == 3 * 6 + 1
    assert not torch.cat(biases).any()
    torch.testing.assert_close(logits(exported), logits(weights, config))


def nanogpt_optimizer(state):
    """Return ({name: parameter}, AdamW), as nanoGPT builds them from a state dict, with nanoGPT's default settings."""
    by_name = {name: nn.Parameter(weight.clone()) for name, weight in state.items() if name != "lm_head.weight"}
    groups = [
        {"params": [w for w in by_name.values() if w.dim() >= 2], "weight_decay": 0.1},
        {"params": [w for w in by_name.values() if w.dim() < 2], "weight_decay": 0.0},
    ]
    return by_name, torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpt_can_resume_an_exported_checkpoint(command, bias):
    """ckpt.pt has model_args and weights as nanoGPT writes them. AdamW's moments belong to the right parameters."""
    _, moments = saved(Path("run"), gpt(replace(SMALL, bias=bias, dropout=0.2)), optim=OPTIM)
    assert command("checkpoint=run", "format=nanogpt", "path=nano")[::2] == (0, "")
    file = torch.load("nano/ckpt.pt", map_location="cpu", weights_only=True)
    args = {**NANOGPT, "bias": bias}
    assert file["model_args"] == args
    assert (file["iter_num"], file["best_val_loss"], file["config"]["optim"]) == (20, 2.5, OPTIM)
    state = file["model"]
    weights = read_pretrained("run").weights
    names = [*(f"transformer.{name}" for name in weights), "lm_head.weight"]
    assert equal(state, dict(zip(names, [*weights.values(), weights["wte.weight"]], strict=True)))
    exact = nanogpt_forward({name: weight.double() for name, weight in state.items()}, args, IDX)
    assert near(logits(weights, replace(SMALL, bias=bias)), exact, nanogpt_forward(state, args, IDX))
    source = read_pretrained("nano")
    assert (source.model, source.tokenizer) == ({**MODEL, "bias": bias}, "bytes")
    assert equal(source.weights, weights)

    by_name, optimizer = nanogpt_optimizer(state)
    optimizer.load_state_dict(file["optimizer"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}
    for name, weight in by_name.items():
        adamw = optimizer.state[weight]
        assert adamw["step"] == 20
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(adamw[key], moments[key][name.removeprefix("transformer.")]), (name, key)


def test_a_file_of_nanogpt_has_the_same_tensors_when_it_is_exported_again(command):
    """AdamW starts without moments, and can take a step."""
    nanogpt_checkpoint("ckpt.pt")
    assert command("checkpoint=ckpt.pt", "format=nanogpt", "path=exported")[0] == 0
    exported, original = (torch.load(path, weights_only=True) for path in ("exported/ckpt.pt", "ckpt.pt"))
    weights = exported["model"]
    assert equal(weights, original["model"])
    assert weights["lm_head.weight"].data_ptr() == weights["transformer.wte.weight"].data_ptr()
    assert exported["model_args"] == {**NANOGPT, "dropout": 0.0}
    assert (exported["iter_num"], exported["best_val_loss"]) == (0, 1e9)
    assert read_pretrained("exported").tokenizer == "gpt2"
    by_name, optimizer = nanogpt_optimizer(weights)
    optimizer.load_state_dict(exported["optimizer"])
    for weight in by_name.values():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert {state["step"].item() for state in optimizer.state.values()} == {1.0}


def test_tensors_are_the_same_when_a_model_goes_from_hf_to_nanogpt_to_hf(command):
    hugging_face(gpt()).save_pretrained("original")
    assert command("checkpoint=original", "format=nanogpt", "path=exported")[0] == 0
    assert command("checkpoint=exported/ckpt.pt", "path=exported")[0] == 0
    original, exported = load_file("original/model.safetensors"), load_file("exported/model.safetensors")
    assert equal(dict(sorted(exported.items())), dict(sorted(original.items())))


def test_an_existing_file_is_never_overwritten(command):
    hugging_face(gpt()).save_pretrained("hf_model")
    Path("ckpt.pt").write_text("precious")
    for arguments, names in [
        (("checkpoint=hf_model", "path=hf_model"), "model.safetensors and config.json"),
        (("checkpoint=./not/even/read", "format=nanogpt", "path=."), "ckpt.pt"),
    ]:
        code, _, err = command(*arguments)
        assert (code, err.count("\n")) == (1, 1)
        assert f"already holds {names}: choose another folder" in err
    with pytest.raises(UserError, match=r"already holds ckpt.pt"):  # the file appeared while the model was read
        write_files(Path(), {"ckpt.pt": lambda path: path.write_text("new")})
    assert Path("ckpt.pt").read_text() == "precious"
    assert sorted(os.listdir()) == ["ckpt.pt", "hf_model"]


def test_files_are_on_the_disk_before_they_get_their_names(tmp_path, disk):
    write_files(tmp_path, {name: lambda path: path.write_text("x") for name in ("a", "b")})
    hidden = [f"{tmp_path}/.{name}.unfinished" for name in ("a", "b")]
    assert disk == [*hidden, (hidden[0], f"{tmp_path}/a"), (hidden[1], f"{tmp_path}/b"), str(tmp_path)]


def test_no_file_is_left_when_the_disk_is_full(command, monkeypatch):
    """The second file is half written when the disk is full. The error is one line, and the first file is gone too."""
    hugging_face(gpt()).save_pretrained("hf_model")
    original = Path.write_text

    def write_half(path, text, encoding):
        original(path, text[:10], encoding)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_half)
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
        assert command("checkpoint=hf_model", "path=out") == (
            1,
            "",
            "error: path=out cannot be written: No space left on device; 0.5 GiB are free there, choose another folder"
            "\n",
        )
    assert os.listdir("out") == []
    assert command("checkpoint=hf_model", "path=out")[0] == 0


def test_no_ckpt_pt_is_left_when_the_disk_is_full(command, monkeypatch):
    """The error is one line, although torch.save's message has 20 lines of C++."""
    hugging_face(gpt()).save_pretrained("hf_model")
    Path("old").mkdir()

    def save_half(contents, path):
        Path(path).write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0\nframe #0: c10")

    monkeypatch.setattr(torch, "save", save_half)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
    for path in ("a/b", "old"):
        code, out, err = command("checkpoint=hf_model", "format=nanogpt", f"path={path}")
        assert (code, out) == (1, "")
        assert err == (
            f"error: path={path} cannot be written: torch.save broke off; 0.5 GiB are free there, choose another "
            "folder\n"
        )
    assert os.listdir("a/b") == os.listdir("old") == []


def test_a_mistake_prints_one_line(command):
    saved(Path("rope"), gpt(replace(SMALL, pos="rope")))
    saved(Path("norms"), gpt(replace(SMALL, norm="rmsnorm", norm_eps=1e-6)))
    saved(Path("capped"), gpt(replace(SMALL, logit_softcap=30.0)))
    saved(Path("wide"), gpt(replace(SMALL, hidden=80, tie_embeddings=False)))
    hugging_face(gpt()).save_pretrained("hf_model")
    Path("file").touch()
    for arguments, message in [
        (("path=x",), "checkpoint is missing: pass a run"),
        (("checkpoint=hf_model",), "path is missing: pass the folder to write to"),
        (("checkpoint=hf_model", "path=x", "format=gguf"), "format=gguf: choose hf or nanogpt"),
        (("checkpoint=rope", "path=x"), "rope at step 20 has rope positions, which hf's GPT-2 lacks"),
        (("checkpoint=rope", "path=x", "format=nanogpt"), "has rope positions, which nanogpt's GPT-2 lacks"),
        (("checkpoint=norms", "path=x"), "has RMSNorm, which hf's GPT-2 "),
        (
            ("checkpoint=norms", "path=x", "format=nanogpt"),
            "has RMSNorm and another epsilon in its norms (norm_eps), which nanogpt's GPT-2 ",
        ),
        (
            ("checkpoint=wide", "path=x", "format=nanogpt"),
            "has an MLP of another width (hidden) and a head of its own (tie_embeddings), which nanogpt's GPT-2 ",
        ),
        (("checkpoint=capped", "path=x"), "has a soft cap of its logits (logit_softcap), which hf's GPT-2 lacks"),
        (("checkpoint=hf_model", "path=file"), "path=file cannot be written: "),
        (("checkpoint=./none", "path=x"), "./none: there is no such file or folder"),
        (("checkpoint=hf_model", 'path="~nobody-here/x"'), "~nobody-here/x: the home folder of this user is not known"),
        (("checkpiont=hf_model", "path=x"), "unknown key checkpiont; did you mean checkpoint?"),
    ]:
        code, out, err = command(*arguments)
        assert (code, out, err.count("\n")) == (1, "", 1), err
        assert err.startswith("error: ")
        assert message in err
    assert not Path("x").exists()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_the_error_names_the_hub_when_it_cannot_be_reached(tmp_path):
    """The command runs from a shell, with HF_ENDPOINT at a port where nobody listens."""
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    arguments = "checkpoint=gpt2-medium", f"path={tmp_path / 'x'}"
    process = subprocess.run(
        [sys.executable, *COMMAND, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (process.returncode, process.stdout, process.stderr.count("\n")) == (1, "", 1), process.stderr
    assert "error: gpt2-medium: " in process.stderr
    assert "http://127.0.0.1:9 does not answer" in process.stderr


def test_help_shows_every_key_with_its_comment():
    process = subprocess.run([sys.executable, *COMMAND, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0
    line = "format: hf                          # hf (weights, config, tokenizer of transformers) | nanogpt (ckpt.pt)"
    assert line in process.stdout
