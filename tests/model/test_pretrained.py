"""What is read from Hugging Face's and nanoGPT's files, against transformers and against nanoGPT's formula by hand."""

import json
import math
import pickle
import socket
import sys
import threading
import time
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from model import pretrained
from model.gpt import GPT
from model.optim import OptimConfig, learning_rate
from model.pretrained import fitted, load, read, shape, tokenizer_of
from runtime.config import UserError
from runtime.ranks import Ranks
from runtime.saver import Checkpoints
from tests.model.test_gpt import SMALL, gpt, hugging_face, ops

ROOT = Path(__file__).parents[2]
OURS = ("dropout", "n_kv_head", "window", "checkpointing", "keep_attention")  # what other formats do not tell
MODEL = {key: value for key, value in asdict(SMALL).items() if key not in OURS}
IDX = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")


def equal(weights, others):
    """The same names in the same order, with the same bits."""
    same = (w.dtype == others[name].dtype and torch.equal(w, others[name]) for name, w in weights.items())
    return list(weights) == list(others) and all(same)


def logits(weights, config=SMALL):
    """Our model's, with weights that were read."""
    model = GPT(config, ops())
    load(model, pretrained.Pretrained(None, weights, None, "weights"))
    return model(IDX).detach()


def near(got, exact, rounded):
    """As near to a float64 reference as the reference in float32 is, times 2 (as in test_gpt.py)."""
    eps = torch.finfo(torch.float32).eps * exact.abs().max()
    return (got - exact).abs().max() <= 2 * (rounded - exact).abs().max() + 2 * eps


@pytest.fixture
def folder(tmp_path):
    """What transformers' save_pretrained writes of `gpt()`."""
    hugging_face(gpt()).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def rewrite(folder, tensors=lambda held: held, **config):
    """Change a Hugging Face folder: its tensors by a function, its config by keys (None takes one out)."""
    held = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in held.items() if v is not None}))
    save_file(
        {k: w.clone() for k, w in tensors(load_file(folder / "model.safetensors")).items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return str(folder)


def test_hugging_faces_folder(folder):
    """Weights bit for bit, and the logits of GPT2LMHeadModel.from_pretrained."""
    from transformers import GPT2LMHeadModel

    found = read(str(folder))
    assert (found.model, found.tokenizer, found.name, found.checkpoint) == (MODEL, None, str(folder), None)
    assert equal(found.weights, dict(gpt().state_dict()))
    theirs = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        rounded = theirs(IDX).logits
        assert near(logits(found.weights), theirs.double()(IDX).logits, rounded)


@pytest.mark.parametrize(
    ("ids", "tokenizer"),
    [(257, "bytes"), (320, "bytes"), (321, None), (50256, None), (50257, "gpt2"), (50304, "gpt2"), (50305, None)],
)
def test_a_vocabulary_tells_the_tokenizer(tmp_path, ids, tokenizer):
    """Of a folder that does not, by its own size or padded to a multiple of 64; and what then is asked for."""
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8, "vocab_size": ids}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = shape(str(tmp_path))
    assert found.tokenizer == tokenizer
    assert tokenizer_of(found, "bytes").name == "bytes"
    with pytest.raises(UserError, match=r"^tokenizer=foo: choose bytes or gpt2$"):
        tokenizer_of(found, "foo")
    if tokenizer is None:
        with pytest.raises(UserError, match=rf"does not tell its tokenizer, nor do its {ids} ids: pass tokenizer="):
            tokenizer_of(found, None)


def test_training_goes_on_with_the_sources_ids(hotswap, tmp_path):
    """A GPT-2 in a folder that does not name its tokenizer: bytes, data=text's default, are other ids."""
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 128, "vocab_size": 50257}
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    (tmp_path / "book.txt").write_text("text " * 1000)
    code, _, err = hotswap("+experiment=smoke", "init_from=theirs", "data=text", "data.path=book.txt")
    assert (code, err) == (
        1,
        "error: init_from=theirs knows the ids of the tokenizer gpt2, and data.tokenizer is bytes: pass "
        "data.tokenizer=gpt2\n",
    )


def test_names_that_no_file_has():
    for name in ("~nobody-here/x", "x" * 5000, "x/" + "y" * 5000):
        with pytest.raises(UserError, match=r"^[xy/~a-z-]+: there can be no such file or folder: "):
            shape(name)


def bare(held):
    return {name.removeprefix("transformer."): weight for name, weight in held.items()}


def masked(held):
    mask = torch.ones(24, 24, dtype=torch.bool).tril()[None, None]
    for i in range(3):
        held |= {f"transformer.h.{i}.attn.bias": mask, f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4)}
    return held


def headed(held):
    return {**held, "lm_head.weight": held["transformer.wte.weight"]}


def headless(held):
    return {name: weight for name, weight in held.items() if name != "lm_head.weight"}


@pytest.mark.parametrize("how", [bare, masked, headed, headless, lambda held: bare(masked(held))])
def test_every_way_to_save_the_same(folder, how):
    assert equal(read(rewrite(folder, how)).weights, dict(gpt().state_dict()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_becomes_fp32(folder, dtype):
    found = read(rewrite(folder, lambda held: {name: weight.to(dtype) for name, weight in held.items()}))
    assert equal(found.weights, {name: weight.to(dtype).float() for name, weight in gpt().state_dict().items()})


def test_sharded(tmp_path):
    hugging_face(gpt()).save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert equal(read(str(tmp_path)).weights, dict(gpt().state_dict()))
    shards[1].unlink()
    with pytest.raises(UserError, match=r"model-00002-of-\d+.safetensors cannot be read: .*; fetch it again"):
        read(str(tmp_path))


def test_a_smaller_and_a_larger_position_table(folder):
    """The first rows, as nanoGPT's crop_block_size; more than there are is a line."""
    found = read(str(folder))
    short = GPT(replace(SMALL, block_size=10), ops())
    load(short, found)
    assert torch.equal(short(IDX[:, :10]), gpt()(IDX[:, :10]))
    with pytest.raises(UserError, match=r"model.block_size=25 is more than the 24 positions of"):
        load(GPT(replace(SMALL, block_size=25), ops()), found)
    with pytest.raises(UserError, match=r"is not this model: it lacks h.3.ln_1.weight, h.3.ln_1.bias, .* and 9 more"):
        load(GPT(replace(SMALL, n_layer=4), ops()), found)


def test_loads_into_bf16(folder):
    model = GPT(SMALL, ops(), torch.bfloat16).to(torch.bfloat16)
    load(model, read(str(folder)))
    assert equal(dict(model.state_dict()), {k: w.bfloat16() for k, w in gpt().state_dict().items()})


def test_fitted():
    found = pretrained.Pretrained(MODEL, {}, None, "theirs")
    assert fitted(found, {}) == MODEL
    assert fitted(found, {"block_size": 8, "n_head": 3, "dropout": 0.5}) == {**MODEL, "block_size": 8, "dropout": 0.5}
    with pytest.raises(UserError, match=r"model.block_size=25 is more than the 24 positions of theirs"):
        fitted(found, {"block_size": 25})
    with pytest.raises(UserError, match=r"model.vocab_size=128, but theirs has 97: leave model.vocab_size out"):
        fitted(found, {"vocab_size": 128})
    rope = found._replace(model={**MODEL, "pos": "rope"})
    assert fitted(rope, {"block_size": 4096}) == {**MODEL, "pos": "rope", "block_size": 4096}


def test_finetuning_is_a_config():
    """GPT-2 in its own tokens, steps that divide, one small learning rate throughout, and dropout."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("config", ["+experiment=finetune"])
    assert (cfg.init_from, cfg.data.source, cfg.data.tokenizer, cfg.model.dropout) == ("gpt2", "hub", "gpt2", 0.1)
    assert cfg.train.tokens_per_step % (cfg.train.batch_size * cfg.train.block_size) == 0
    optim, last = OptimConfig(**cfg.optim), cfg.train.max_steps
    assert {learning_rate(optim, step, last) for step in range(1, last + 1)} == {3e-5}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "another architecture: its model_type is llama, and only gpt2 can be read"),
        ({"model_type": None}, "another architecture: its model_type is None"),
        ({"activation_function": "gelu"}, "activation_function=gelu, and only activation_function=gelu_new is comp"),
        ({"scale_attn_by_inverse_layer_idx": True}, "has scale_attn_by_inverse_layer_idx=True"),
        ({"scale_attn_weights": False}, "has scale_attn_weights=False"),
        ({"layer_norm_epsilon": 1e-6}, "has layer_norm_epsilon=1e-06"),
        ({"add_cross_attention": True}, "has add_cross_attention=True"),
        ({"n_inner": 96}, "has n_inner=96, and only n_inner=192 is computed here"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=false and no lm_head.weight: its head is missing"),
        ({"n_embd": None}, "does not tell its size: n_embd is missing"),
        ({"n_layer": "3"}, "does not tell its size: n_layer is 3"),
        ({"n_head": 5}, "is no model that can be built: model.n_embd=48 is not a multiple of model.n_head=5"),
        ({"n_positions": 32}, r"it has in another shape wpe.weight \(24, 48\), not \(32, 48\)"),
    ],
)
def test_another_architecture(folder, config, message):
    with pytest.raises(UserError, match=message) as error:
        read(rewrite(folder, headless, **config))
    assert "\n" not in str(error.value)


def test_harmless_differences(folder):
    """How attention is rounded, a null, an untied head that is equal."""
    source = rewrite(folder, headed, reorder_and_upcast_attn=True, n_inner=192, tie_word_embeddings=False)
    assert equal(read(source).weights, dict(gpt().state_dict()))


def without(held):
    del held["transformer.h.1.mlp.c_fc.bias"]
    return held


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (without, r"is not this model: it lacks h.1.mlp.c_fc.bias$"),
        (lambda held: {**held, "score.weight": torch.ones(2, 48)}, "it has, unknown here, score.weight$"),
        (
            lambda held: {**held, "transformer.ln_f.bias": torch.ones(47)},
            r"it has in another shape ln_f.bias \(47,\), not \(48,\)$",
        ),
        (lambda held: {**held, "lm_head.weight": torch.ones(97, 48)}, "has an untied head: its lm_head.weight is not"),
        (
            lambda held: {**held, "transformer.ln_f.bias": torch.ones(48, dtype=torch.int8)},
            "holds ln_f.bias as torch.int8: quantized weights are not read",
        ),
    ],
)
def test_wrong_tensors(folder, tensors, message):
    with pytest.raises(UserError, match=message):
        read(rewrite(folder, tensors))


def test_damaged_files(folder, tmp_path):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model.safetensors cannot be read: .*; fetch it again"):
        read(str(folder))
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(
        UserError, match=r"has no model.safetensors, and pickled weights \(.bin\) are not read.*convert"
    ):
        read(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json cannot be read: Expecting property name"):
        shape(str(folder))
    (tmp_path / "empty").mkdir()
    for source, message in [
        (tmp_path / "nothing", "there is no such file or folder"),
        (tmp_path / "empty", "holds no good checkpoint"),
        (folder / "config.json", "is not nanoGPT's ckpt.pt: name a .pt file, or the folder of a model"),
    ]:
        with pytest.raises(UserError, match=message):
            read(str(source))


# nanoGPT


def nanogpt_forward(state, args, idx, gelu=lambda x: F.gelu(x, approximate="tanh")):
    """nanoGPT's logits from its state dict, by its formula: (B, T) -> (B, T, V)."""
    B, T = idx.shape
    C, H = args["n_embd"], args["n_head"]

    def linear(x, name):
        y = x @ state[f"{name}.weight"].T
        return y + state[f"{name}.bias"] if args["bias"] else y

    def layer_norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        y = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * state[f"{name}.weight"]
        return y + state[f"{name}.bias"] if args["bias"] else y

    def attention(x, name):
        heads = linear(x, f"{name}.c_attn").view(B, T, 3, H, C // H).permute(2, 0, 3, 1, 4)
        q, k, v = heads  # (B, H, T, D)
        scores = q @ k.transpose(-2, -1) / math.sqrt(C // H)
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        return linear((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C), f"{name}.c_proj")

    x = state["transformer.wte.weight"][idx] + state["transformer.wpe.weight"][:T]
    for i in range(args["n_layer"]):
        block = f"transformer.h.{i}"
        x = x + attention(layer_norm(x, f"{block}.ln_1"), f"{block}.attn")
        x = x + linear(gelu(linear(layer_norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")), f"{block}.mlp.c_proj")
    return layer_norm(x, "transformer.ln_f") @ state["lm_head.weight"].T


def nanogpt_state(args, seed=0, prefix="", masks=False):
    """A state dict as nanoGPT saves it, every tensor random; the head is the token table itself."""
    C, draw = args["n_embd"], torch.Generator().manual_seed(seed)
    shapes = {"wte": (args["vocab_size"], C), "wpe": (args["block_size"], C)}
    for i in range(args["n_layer"]):
        linears = {"attn.c_attn": (3 * C, C), "attn.c_proj": (C, C), "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
        for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
            shapes[f"h.{i}.{name}"] = linears.get(name, (C,))
    state = {}
    for name, size in {**shapes, "ln_f": (C,)}.items():
        state[f"{prefix}transformer.{name}.weight"] = 0.2 * torch.randn(size, generator=draw) + (len(size) == 1)
        if args["bias"] and name not in ("wte", "wpe"):
            state[f"{prefix}transformer.{name}.bias"] = 0.2 * torch.randn(size[0], generator=draw)
        if masks and name.endswith("c_proj") and "attn" in name:
            state[f"{prefix}transformer.{name.replace('c_proj', 'bias')}"] = torch.ones(1, 1, 24, 24).tril()
    return {**state, f"{prefix}lm_head.weight": state[f"{prefix}transformer.wte.weight"]}


NANOGPT = {"n_layer": 3, "n_head": 3, "n_embd": 48, "block_size": 24, "bias": True, "vocab_size": 97, "dropout": 0.2}


def nanogpt_checkpoint(path, args=NANOGPT, **state):
    """ckpt.pt as nanoGPT's train.py saves it; best_val_loss is a tensor there."""
    held = {
        "model": nanogpt_state(args, **state),
        "model_args": args,
        "iter_num": 7,
        "config": {"dataset": "openwebtext"},
    }
    torch.save({**held, "optimizer": {"state": {}, "param_groups": []}, "best_val_loss": torch.tensor(3.5)}, path)
    return str(path)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("state", [{}, {"prefix": "_orig_mod."}, {"masks": True}])
def test_nanogpts_checkpoint(tmp_path, bias, state):
    args = {**NANOGPT, "bias": bias}
    found = read(nanogpt_checkpoint(tmp_path / "ckpt.pt", args, **state))
    assert (found.model, found.tokenizer) == ({**MODEL, "bias": bias}, "gpt2")
    theirs = nanogpt_state(args)
    assert equal({f"transformer.{k}": w for k, w in found.weights.items()}, headless(theirs))
    exact = nanogpt_forward({name: weight.double() for name, weight in theirs.items()}, args, IDX)
    assert near(logits(found.weights, replace(SMALL, bias=bias)), exact, nanogpt_forward(theirs, args, IDX))
    assert equal(read(str(tmp_path)).weights, found.weights)  # nanoGPT's out_dir


def test_the_two_gelus():
    """nanoGPT's own is by erf: as far from ours as the docstring says, and no farther."""
    x = torch.linspace(-20, 20, 400_001, dtype=torch.float64)
    assert 4e-4 < (F.gelu(x) - F.gelu(x, approximate="tanh")).abs().max() < 5e-4


def test_nanogpt_without_a_choice_of_bias(tmp_path):
    args = {key: value for key, value in NANOGPT.items() if key != "bias"}
    path = tmp_path / "ckpt.pt"
    torch.save({"model": nanogpt_state(NANOGPT), "model_args": args, "config": {"dataset": "shakespeare_char"}}, path)
    assert (shape(str(path)).model["bias"], shape(str(path)).tokenizer) == (True, None)


class Config:
    """A type that torch.load(weights_only=True) does not build."""


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"model": {}}, "is not nanoGPT's ckpt.pt: it has no `model` and `model_args`"),
        ([1], "is not nanoGPT's ckpt.pt"),
        ({"model": {}, "model_args": {**NANOGPT, "use_rmsnorm": True}}, "of a changed nanoGPT: .* have use_rmsnorm"),
        ({"model": {}, "model_args": {**NANOGPT, "vocab_size": None}}, "tell its size: vocab_size is None"),
        ({"model": {}, "model_args": NANOGPT}, "it lacks wte.weight, wpe.weight, h.0.ln_1.weight and 37 more"),
        (
            {"model": Config(), "model_args": NANOGPT},
            "x.pt cannot be read as nanoGPT's ckpt.pt: it is damaged, or holds",
        ),
    ],
)
def test_wrong_checkpoints(tmp_path, held, message):
    torch.save(held, tmp_path / "x.pt")
    with pytest.raises(UserError, match=message) as error:
        read(str(tmp_path / "x.pt"))
    assert "\n" not in str(error.value)


GARBAGE = [b"", b"no zip", b"PK\x03\x04 truncated", b"\x80\x02.", b"cos\nsystem\n.", b"I1\n.", b"\x80\x05\x95\xff" * 9]


@pytest.mark.parametrize("content", [*GARBAGE, pickle.dumps({"model": {}, "model_args": NANOGPT}), bytes(range(256))])
def test_no_checkpoint_at_all(tmp_path, content):
    """Whatever the unpickler makes of it, the same sentence."""
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(UserError) as error:
        read(str(tmp_path / "x.pt"))
    assert str(error.value) == (
        f"{tmp_path}/x.pt cannot be read as nanoGPT's ckpt.pt: it is damaged, or holds more than tensors and plain "
        "values, which may be any program and is not run"
    )


# our own checkpoints


def saved(run, model, step=20, **config):
    """A checkpoint of ours, of a run that is at `step`; each moment is another random tensor."""
    draw = torch.Generator().manual_seed(2)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    moments = {
        key: {name: torch.rand(weight.shape, generator=draw) for name, weight in weights.items()}
        for key in ("exp_avg", "exp_avg_sq")
    }
    config = {"model": asdict(model.config), "data": {"tokenizer": "bytes"}, **config}
    checkpoints = Checkpoints(run / "checkpoints", 2, False, Ranks(), CPU)
    checkpoints.save(
        step,
        {"model": weights, **moments},
        {"updates": step},
        {"config": config, "val_loss": 2.5, "data": {}, "elapsed": 1.0},
    )
    checkpoints.close()
    return run, moments


OWN = "dropout", "checkpointing", "keep_attention"


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, pos="rope", bias=False)])
def test_our_own(tmp_path, config):
    run, _ = saved(tmp_path / "run", gpt(config))
    for source in (run, run / "checkpoints", run / "checkpoints/step-000020", run / "checkpoints/best"):
        found = read(str(source))
        assert found[2:4] == ("bytes", f"{run} at step 20")
        assert found.checkpoint.resolve() == run / "checkpoints/step-000020"
        assert found.model == {key: value for key, value in asdict(config).items() if key not in OWN}
        assert equal(found.weights, dict(gpt(config).state_dict()))


def test_our_own_passes_on_nothing_that_only_a_training_step_knows(tmp_path):
    """keep_attention asks for an attention that names its operators, and eager, which may generate, does not."""
    model = gpt()
    model.config = replace(SMALL, dropout=0.1, checkpointing="block", keep_attention=True)
    found = read(str(saved(tmp_path / "run", model)[0]))
    assert found.model == {key: value for key, value in asdict(SMALL).items() if key not in OWN}
    assert equal(found.weights, dict(model.state_dict()))


def test_our_own_when_damaged(tmp_path):
    run, _ = saved(tmp_path / "run", gpt())
    file = run / "checkpoints/step-000020/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"step-000020 is damaged: model.safetensors has another SHA-256"):
        read(str(file.parent))


# the hub


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, openai-community/gpt2, in `self.server.folder`, and a list of what was asked for."""

    def do_GET(self):
        self.server.asked.append(f"{self.command} {self.path}")
        commit, folder = "0" * 40, self.server.folder
        if "openai-community/gpt2/" not in self.path:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if "/tree/" in self.path:
            files = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "1"} for f in folder.iterdir()]
            return self.answer(200, json.dumps(files).encode())
        if "/api/" in self.path:
            files = [{"rfilename": file.name} for file in folder.iterdir()]
            return self.answer(
                200, json.dumps({"id": "openai-community/gpt2", "sha": commit, "siblings": files}).encode()
            )
        file = folder / self.path.rsplit("/", 1)[1]
        return self.answer(200, file.read_bytes(), {"X-Repo-Commit": commit, "ETag": f'"{file.name}"'})

    do_HEAD = do_GET

    def answer(self, status, body, headers=()):
        self.send_response(status)
        for key, value in {"Content-Length": len(body), **dict(headers)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """hub(address): the hub is there; hub(None): HF_HUB_OFFLINE=1. Its cache is empty at first."""
    from huggingface_hub import constants

    for key in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.chdir(tmp_path)

    def at(address):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", address is None)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        files = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)

    return at


def test_the_hub(hub, folder):
    """The shape costs config.json alone; for what is cached nothing is asked, and no network needed."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.folder, server.asked = folder, []
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub(f"http://127.0.0.1:{server.server_port}")
    try:
        assert shape("openai-community/gpt2")[:3] == (MODEL, {}, "gpt2")
        assert {line.rsplit("/", 1)[1] for line in server.asked if line.startswith("GET") and "resolve" in line} == {
            "config.json"
        }
        with pytest.raises(UserError, match=r"openai/gpt5: .* and http://127.0.0.1:\d+ says 404: is that its name\?"):
            read("openai/gpt5")
        assert equal(read("openai-community/gpt2").weights, dict(gpt().state_dict()))
        assert not [line for line in server.asked if ".bin" in line]
        asked = len(server.asked)
        read("openai-community/gpt2")
        assert len(server.asked) == asked
    finally:
        server.shutdown()
        server.server_close()
    hub(None)
    assert equal(read("openai-community/gpt2").weights, dict(gpt().state_dict()))


def test_no_network(hub, monkeypatch):
    """Refused, silent, without a name server, or forbidden: a line within 2 seconds."""
    closed = socket.create_server(("127.0.0.1", 0))
    silent = socket.create_server(("127.0.0.1", 0))
    addresses = [f"http://127.0.0.1:{server.getsockname()[1]}" for server in (closed, silent)]
    closed.close()
    lookup = socket.getaddrinfo

    def slow(host, *rest, **more):
        if host == "hub.example":
            time.sleep(4)
        return lookup(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    import huggingface_hub.errors  # noqa: F401 (its import is not what is timed)

    for address in (*addresses, "http://hub.example", None):
        hub(address)
        start = time.perf_counter()
        reason = f"{address} cannot be reached" if address else "HF_HUB_OFFLINE keeps from downloading it"
        with pytest.raises(UserError, match=f"^gpt2: there is no such file or folder, .* and {reason}"):
            shape("gpt2")
        assert time.perf_counter() - start < 2
    silent.close()


def test_without_the_hubs_library(hub, monkeypatch, folder):
    """It is needed for the hub's names only."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        UserError, match=r"gpt2 is on the hub, which needs huggingface_hub: pip install huggingface_hub"
    ):
        read("gpt2")
    assert equal(read(str(folder)).weights, dict(gpt().state_dict()))


@pytest.mark.parametrize("name", ["out/RUN/checkpoints", "/nowhere", "a--b/c", ""])
def test_no_name_of_a_model(hub, name):
    hub(None)
    with pytest.raises(UserError, match=r"there is no such file or folder|holds no good checkpoint"):
        read(name)
