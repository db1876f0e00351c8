"""Weights from Hugging Face and nanoGPT: the logits against transformers, and against nanoGPT's formula by hand."""

import json
import math
import pickle
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from data.errors import DataError
from model import pretrained
from model.config import GPTConfig
from model.gpt import GPT
from model.optim import OptimConfig, learning_rate
from model.pretrained import fit_config, load_weights, read_pretrained, read_shape, tokenizer_of
from model.sources import TRAINING
from runtime.config import UserError, field_defaults
from runtime.ranks import Ranks
from runtime.saver import Checkpoints
from tests.model.test_gpt import SMALL, gpt, hugging_face, ops

ROOT = Path(__file__).parents[2]
# fields that GPT-2's formats lack
OURS = "dropout", *(field for field in field_defaults(GPTConfig) if field != "norm_eps")
MODEL = {key: value for key, value in asdict(SMALL).items() if key not in OURS}
IDX = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")


def equal(weights, others):
    """Whether the names, their order and all bits are the same."""
    same = (w.dtype == others[name].dtype and torch.equal(w, others[name]) for name, w in weights.items())
    return list(weights) == list(others) and all(same)


def logits(weights, config=SMALL):
    """The logits of our model with these weights."""
    model = GPT(config, ops())
    load_weights(model, pretrained.Pretrained(None, weights, None, "weights"))
    return model(IDX).detach()


def near(got, exact, rounded):
    """Return whether `got` is as near to `exact`, in float64, as twice the error of `rounded`, in float32, allows."""
    eps = torch.finfo(torch.float32).eps * exact.abs().max()
    return (got - exact).abs().max() <= 2 * (rounded - exact).abs().max() + 2 * eps


@pytest.fixture
def folder(tmp_path):
    """The folder that transformers' save_pretrained writes for `gpt()`."""
    hugging_face(gpt()).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def rewrite(folder, tensors=lambda held: held, **config):
    """Change the tensors of a Hugging Face folder by a function, and its config by keys. None removes a key."""
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    save_file(
        {k: w.clone() for k, w in tensors(load_file(folder / "model.safetensors")).items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return str(folder)


def test_a_hugging_face_folder(folder):
    """GPT2LMHeadModel.from_pretrained() loads the same weights, bit for bit, and gives the same logits."""
    from transformers import GPT2LMHeadModel

    found = read_pretrained(str(folder))
    assert (found.config, found.tokenizer, found.name, found.checkpoint) == (SMALL, None, str(folder), None)
    assert equal(found.weights, dict(gpt().state_dict()))
    theirs = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        rounded = theirs(IDX).logits
        assert near(logits(found.weights), theirs.double()(IDX).logits, rounded)


@pytest.mark.parametrize(
    ("ids", "tokenizer"),
    [(257, "bytes"), (320, "bytes"), (321, None), (50256, None), (50257, "gpt2"), (50304, "gpt2"), (50305, None)],
)
def test_the_tokenizer_follows_from_the_size_of_the_vocabulary(tmp_path, ids, tokenizer):
    """A size names a tokenizer if it is its number of ids, padded to a multiple of 64 or not. Other sizes name none."""
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8, "vocab_size": ids}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_shape(str(tmp_path))
    assert found.tokenizer == tokenizer
    assert tokenizer_of(found, "bytes").name == "bytes"
    with pytest.raises(DataError, match=r"^tokenizer=foo: choose bytes or gpt2, or name a folder"):
        tokenizer_of(found, "foo")
    if tokenizer is None:
        with pytest.raises(UserError, match=rf"names no tokenizer, and none fits its {ids} ids: pass tokenizer="):
            tokenizer_of(found, None)


def test_training_with_another_tokenizer_is_refused(hotswap, tmp_path):
    """GPT-2's vocabulary implies its tokenizer, and data=text's default is bytes."""
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 128, "vocab_size": 50257}
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    (tmp_path / "book.txt").write_text("text " * 1000)
    code, _, err = hotswap("+experiment=smoke", "init_from=theirs", "data=text", "data.path=book.txt")
    assert (code, err) == (
        1,
        "error: init_from=theirs has the vocabulary of the tokenizer gpt2, and data.tokenizer is bytes: pass "
        "data.tokenizer=gpt2\n",
    )


def test_impossible_file_names():
    for name in ("x" * 5000, "x/" + "y" * 5000):
        with pytest.raises(UserError, match=r"^[xy/]+: there can be no such file or folder: "):
            read_shape(name)


def without_prefix(held):
    return {name.removeprefix("transformer."): weight for name, weight in held.items()}


def with_masks(held):
    mask = torch.ones(24, 24, dtype=torch.bool).tril()[None, None]
    for i in range(3):
        held |= {f"transformer.h.{i}.attn.bias": mask, f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4)}
    return held


def with_head(held):
    return {**held, "lm_head.weight": held["transformer.wte.weight"]}


def without_head(held):
    return {name: weight for name, weight in held.items() if name != "lm_head.weight"}


@pytest.mark.parametrize(
    "change", [without_prefix, with_masks, with_head, without_head, lambda held: without_prefix(with_masks(held))]
)
def test_variants_of_a_hugging_face_file(folder, change):
    """With and without the prefix, the masks of old files, and the head: the weights are bit-equal."""
    assert equal(read_pretrained(rewrite(folder, change)).weights, dict(gpt().state_dict()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_becomes_fp32(folder, dtype):
    found = read_pretrained(rewrite(folder, lambda held: {name: weight.to(dtype) for name, weight in held.items()}))
    assert equal(found.weights, {name: weight.to(dtype).float() for name, weight in gpt().state_dict().items()})


def test_sharded(tmp_path):
    hugging_face(gpt()).save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert equal(read_pretrained(str(tmp_path)).weights, dict(gpt().state_dict()))
    shards[1].unlink()
    with pytest.raises(UserError, match=r"model-00002-of-\d+.safetensors cannot be read: .*; fetch it again"):
        read_pretrained(str(tmp_path))


def test_a_smaller_and_a_larger_position_table(folder):
    """A smaller table takes the first rows. A larger one, and another number of layers, is an error."""
    found = read_pretrained(str(folder))
    short = GPT(replace(SMALL, block_size=10), ops())
    load_weights(short, found)
    assert torch.equal(short(IDX[:, :10]), gpt()(IDX[:, :10]))
    with pytest.raises(UserError, match=r"model.block_size=25 is more than the 24 positions of"):
        load_weights(GPT(replace(SMALL, block_size=25), ops()), found)
    with pytest.raises(UserError, match=r"is not this model: it lacks h.3.ln_1.weight, h.3.ln_1.bias, .* and 9 more"):
        load_weights(GPT(replace(SMALL, n_layer=4), ops()), found)


def test_weights_load_into_a_bf16_model(folder):
    model = GPT(SMALL, ops(), torch.bfloat16).to(torch.bfloat16)
    load_weights(model, read_pretrained(str(folder)))
    assert equal(dict(model.state_dict()), {k: w.bfloat16() for k, w in gpt().state_dict().items()})


def test_fit_config():
    found = pretrained.Pretrained(MODEL, {}, None, "theirs")
    everything = {key: value for key, value in asdict(SMALL).items() if key not in TRAINING}
    assert fit_config(found, {}) == everything  # so that nothing of model=NAME stays
    asked = {"block_size": 8, "n_head": 3, "dropout": 0.5, "window": 5}
    assert fit_config(found, asked) == {**everything, **asked}
    with pytest.raises(UserError, match=r"model.block_size=25 is more than the 24 positions of theirs"):
        fit_config(found, {"block_size": 25})
    with pytest.raises(UserError, match=r"model.vocab_size=128, but theirs has 97: leave model.vocab_size out"):
        fit_config(found, {"vocab_size": 128})
    rope = found._replace(model={**MODEL, "pos": "rope"})
    longer = {"block_size": 4096, "rope_theta": 5e5, "rope_scaling": 8.0}
    assert fit_config(rope, longer) == {**everything, "pos": "rope", **longer}
    with pytest.raises(UserError, match=r"model.norm_eps=0.001, but theirs has 1e-05: leave model.norm_eps out"):
        fit_config(found, {"norm_eps": 1e-3})
    with pytest.raises(UserError, match=r"model.logit_softcap=30, but theirs has null: leave model.logit_softcap out"):
        fit_config(found, {"logit_softcap": 30})


def test_a_number_that_null_stands_for_is_no_other_shape():
    """SMALL has 3 heads of 16 channels, and an MLP of 4 x 48. A source may store these as null or as numbers."""
    numbers = {"n_kv_head": 3, "head_dim": 16, "hidden": 192}
    nulls = dict.fromkeys(numbers)
    for model, asked in ((nulls, numbers), (numbers, nulls)):
        found = pretrained.Pretrained({**MODEL, **model}, {}, None, "theirs")
        fitted = fit_config(found, asked)
        assert {key: fitted[key] for key in model} == model
    for key, value, have in (("n_kv_head", 1, 3), ("head_dim", 8, 16), ("hidden", 96, 192)):
        for source, other in ((None, value), (value, None)):
            found = pretrained.Pretrained({**MODEL, key: source}, {}, None, "theirs")
            text = f"model.{key}={other or 'null'}, but theirs has {have if source is None else value}: leave"
            with pytest.raises(UserError, match=text):
                fit_config(found, {key: other})


def test_finetuning_is_a_config():
    """+experiment=finetune: GPT-2 with its tokenizer, dropout, and a constant learning rate of 3e-5."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("config", ["+experiment=finetune"])
    assert (cfg.init_from, cfg.data.source, cfg.data.tokenizer, cfg.model.dropout) == ("gpt2", "hub", "gpt2", 0.1)
    assert cfg.train.tokens_per_step % (cfg.train.batch_size * cfg.train.block_size) == 0
    optim, last = OptimConfig(**cfg.optim), cfg.train.max_steps
    assert {learning_rate(optim, step, last) for step in range(1, last + 1)} == {3e-5}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "its model_type is mamba, and only gpt2, llama and qwen3 can be read"),
        ({"model_type": None}, "another architecture: its model_type is None"),
        ({"activation_function": "gelu"}, "activation_function=gelu, and only activation_function=gelu_new is comp"),
        ({"scale_attn_by_inverse_layer_idx": True}, "has scale_attn_by_inverse_layer_idx=True"),
        ({"scale_attn_weights": False}, "has scale_attn_weights=False"),
        ({"layer_norm_epsilon": 2.0}, r"model.norm_eps=2.0: it must be in \(0, 1\)"),
        ({"layer_norm_epsilon": "small"}, "model.norm_eps=small: its type must be float"),
        ({"add_cross_attention": True}, "has add_cross_attention=True"),
        ({"n_inner": "96"}, "its n_inner must be an integer, and is '96'"),
        ({"tie_word_embeddings": False}, "is not this model: it lacks lm_head.weight$"),
        ({"n_embd": None}, "its n_embd must be an integer, and is None"),
        ({"n_layer": "3"}, "its n_layer must be an integer, and is '3'"),
        ({"n_head": 5}, "cannot be built: model.n_embd=48 is not a multiple of model.n_head=5"),
        ({"n_positions": 32}, r"it has in another shape wpe.weight \(24, 48\), not \(32, 48\)"),
    ],
)
def test_another_architecture_is_refused(folder, config, message):
    with pytest.raises(UserError, match=message) as error:
        read_pretrained(rewrite(folder, without_head, **config))
    assert "\n" not in str(error.value)


def test_harmless_differences(folder):
    """Another rounding in attention, and GPT-2's own width of the MLP."""
    source = rewrite(folder, with_head, reorder_and_upcast_attn=True, n_inner=192)
    assert equal(read_pretrained(source).weights, dict(gpt().state_dict()))


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_its_own(folder, tied):
    """config.json says whether the model has one. null is transformers' default: the head is tied."""
    source = rewrite(folder, with_head, tie_word_embeddings=tied)
    assert read_shape(source).config.tie_embeddings == tied
    if tied:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": None}))
        assert read_shape(source).config.tie_embeddings


def without_a_bias(held):
    del held["transformer.h.1.mlp.c_fc.bias"]
    return held


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (without_a_bias, r"is not this model: it lacks h.1.mlp.c_fc.bias$"),
        (lambda held: {**held, "score.weight": torch.ones(2, 48)}, "it also has score.weight$"),
        (
            lambda held: {**held, "transformer.ln_f.bias": torch.ones(47)},
            r"it has in another shape ln_f.bias \(47,\), not \(48,\)$",
        ),
        (lambda held: {**held, "lm_head.weight": torch.ones(97, 48)}, "ties the head, but lm_head.weight differs from"),
        (
            lambda held: {**held, "transformer.ln_f.bias": torch.ones(48, dtype=torch.int8)},
            "holds ln_f.bias as torch.int8: quantized weights are not read",
        ),
    ],
)
def test_wrong_tensors_are_refused(folder, tensors, message):
    with pytest.raises(UserError, match=message):
        read_pretrained(rewrite(folder, tensors))


def test_damaged_files(folder, tmp_path):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model.safetensors cannot be read: .*; fetch it again"):
        read_pretrained(str(folder))
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(
        UserError, match=r"has no model.safetensors, and pickled weights \(.bin\) are not read.*convert"
    ):
        read_pretrained(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json cannot be read: Expecting property name"):
        read_shape(str(folder))
    (tmp_path / "empty").mkdir()
    for source, message in [
        (tmp_path / "nothing", "there is no such file or folder"),
        (tmp_path / "empty", "holds no valid checkpoint"),
        (folder / "config.json", "is not nanoGPT's ckpt.pt: name a .pt file, or the folder of a model"),
    ]:
        with pytest.raises(UserError, match=message):
            read_pretrained(str(source))


# nanoGPT


def nanogpt_forward(state, args, idx, gelu=lambda x: F.gelu(x, approximate="tanh")):
    """nanoGPT's logits by its formula: a state dict and idx (B, T) -> (B, T, V)."""
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
    """A state dict as nanoGPT saves it, with random tensors. The head is the token table."""
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
        "config": {"data": {"tokenizer": "gpt2"}},
    }
    torch.save({**held, "optimizer": {"state": {}, "param_groups": []}, "best_val_loss": torch.tensor(3.5)}, path)
    return str(path)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("state", [{}, {"prefix": "_orig_mod."}, {"masks": True}])
def test_a_checkpoint_of_nanogpt(tmp_path, bias, state):
    """The weights are bit-equal, and the logits are nanoGPT's; also with the prefix of torch.compile and with masks."""
    args = {**NANOGPT, "bias": bias}
    found = read_pretrained(nanogpt_checkpoint(tmp_path / "ckpt.pt", args, **state))
    assert (found.model, found.tokenizer) == ({**MODEL, "bias": bias}, "gpt2")
    theirs = nanogpt_state(args)
    assert equal({f"transformer.{k}": w for k, w in found.weights.items()}, without_head(theirs))
    exact = nanogpt_forward({name: weight.double() for name, weight in theirs.items()}, args, IDX)
    assert near(logits(found.weights, replace(SMALL, bias=bias)), exact, nanogpt_forward(theirs, args, IDX))
    assert equal(read_pretrained(str(tmp_path)).weights, found.weights)  # nanoGPT's out_dir


def test_the_two_gelus():
    """GELU by erf and by tanh differ by less than 5e-4, as the docstring of model/pretrained.py says."""
    x = torch.linspace(-20, 20, 400_001, dtype=torch.float64)
    assert 4e-4 < (F.gelu(x) - F.gelu(x, approximate="tanh")).abs().max() < 5e-4


def test_nanogpt_without_a_choice_of_bias(tmp_path):
    args = {key: value for key, value in NANOGPT.items() if key != "bias"}
    path = tmp_path / "ckpt.pt"
    torch.save({"model": nanogpt_state(NANOGPT), "model_args": args, "config": {"dataset": "shakespeare_char"}}, path)
    assert (read_shape(str(path)).model["bias"], read_shape(str(path)).tokenizer) == (True, None)


class Config:
    """A type that torch.load(weights_only=True) does not build."""


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"model": {}}, "is not nanoGPT's ckpt.pt: it has no `model` and `model_args`"),
        ([1], "is not nanoGPT's ckpt.pt"),
        ({"model": {}, "model_args": {**NANOGPT, "use_rmsnorm": True}}, "of a changed nanoGPT: .* have use_rmsnorm"),
        (
            {"model": {}, "model_args": {**NANOGPT, "vocab_size": None}},
            "its vocab_size must be an integer, and is None",
        ),
        ({"model": {}, "model_args": NANOGPT}, "it lacks wte.weight, wpe.weight, h.0.ln_1.weight and 37 more"),
        (
            {"model": Config(), "model_args": NANOGPT},
            "x.pt cannot be read as nanoGPT's ckpt.pt: it is damaged, or holds",
        ),
    ],
)
def test_wrong_checkpoints_of_nanogpt_are_refused(tmp_path, contents, message):
    torch.save(contents, tmp_path / "x.pt")
    with pytest.raises(UserError, match=message) as error:
        read_pretrained(str(tmp_path / "x.pt"))
    assert "\n" not in str(error.value)


GARBAGE = [b"", b"no zip", b"PK\x03\x04 truncated", b"\x80\x02.", b"cos\nsystem\n.", b"I1\n.", b"\x80\x05\x95\xff" * 9]


@pytest.mark.parametrize("content", [*GARBAGE, pickle.dumps({"model": {}, "model_args": NANOGPT}), bytes(range(256))])
def test_a_file_that_is_no_checkpoint(tmp_path, content):
    """The error is the same sentence for all, whatever the unpickler raises."""
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(UserError) as error:
        read_pretrained(str(tmp_path / "x.pt"))
    assert str(error.value) == (
        f"{tmp_path}/x.pt cannot be read as nanoGPT's ckpt.pt: it is damaged, or holds more than tensors and plain "
        "values, which may be any program and is not run"
    )


# our own checkpoints


def saved(run, model, step=20, **config):
    """Write a checkpoint of ours: (the run's folder, its random moments)."""
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
        {"config": config, "val_loss": 2.5, "data": {}, "elapsed": 1.0, "metrics_lines": 0, "figures": {}},
    )
    checkpoints.close()
    return run, moments


TRAINING_FIELDS = "dropout", "checkpointing", "keep_attention"


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, pos="rope", bias=False)])
def test_a_checkpoint_of_ours(tmp_path, config):
    run, _ = saved(tmp_path / "run", gpt(config))
    for source in (run, run / "checkpoints", run / "checkpoints/step-000020", run / "checkpoints/best"):
        found = read_pretrained(str(source))
        assert found[2:4] == ("bytes", f"{run} at step 20")
        assert found.checkpoint.resolve() == run / "checkpoints/step-000020"
        assert found.model == {key: value for key, value in asdict(config).items() if key not in TRAINING_FIELDS}
        assert equal(found.weights, dict(gpt(config).state_dict()))


def test_a_checkpoint_of_ours_passes_on_no_training_fields(tmp_path):
    """keep_attention would exclude eager attention, which can generate but names no operators."""
    model = gpt()
    model.config = replace(SMALL, dropout=0.1, checkpointing="block", keep_attention=True)
    found = read_pretrained(str(saved(tmp_path / "run", model)[0]))
    assert found.model == {key: value for key, value in asdict(SMALL).items() if key not in TRAINING_FIELDS}
    assert equal(found.weights, dict(model.state_dict()))


def test_a_damaged_checkpoint_of_ours_is_refused(tmp_path):
    run, _ = saved(tmp_path / "run", gpt())
    file = run / "checkpoints/step-000020/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"step-000020 is damaged: model.safetensors has another SHA-256"):
        read_pretrained(str(file.parent))
