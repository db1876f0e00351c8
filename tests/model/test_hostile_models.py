"""Damaged and hostile files of models: each is read as it was, or refused in one line, quickly and in little memory."""

import json
import math
import os
import random
import socket
import struct
import zipfile
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from common.files import read_json, write_json
from model import export, llama
from model.config import LARGEST, GPTConfig
from model.pretrained import Pretrained, read_pretrained
from runtime.config import UserError
from scripts import evaluate, generate
from scripts import export as export_command
from tests.model.test_gpt import gpt
from tests.model.test_pretrained import nanogpt_state, saved
from tests.model.test_today import CONFIGS
from tests.model.test_today import gpt as qwen3

SMALL = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8, "bias": True, "vocab_size": 320, "dropout": 0.0}
HF_CONFIG = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 8, "vocab_size": 320}


def nested(depth):
    """Lists in lists: their text has 10^depth characters, and the pickle only 10 * depth."""
    value = "x"
    for _ in range(depth):
        value = [value] * 10
    return value


VALUES = [None, True, 1.5, -1, 0, 3, 10**6, 2**31, 2**64, 10**5000, math.nan, math.inf, "", "3", "a\nb\x1b[2J" * 99]
VALUES += [[], {}, [1], {"a": {}}, nested(12)]
MISSING = object()


def changed(values, key, value):
    """A copy of a dict with another value, or without the key."""
    return {name: held for name, held in values.items() if name != key} | ({} if value is MISSING else {key: value})


def reads(path):
    """Whether read_pretrained() reads a source. Otherwise it must raise UserError of one short line."""
    try:
        found = read_pretrained(str(path))
    except UserError as error:
        if "\n" in str(error) or len(str(error)) > 1500:
            raise AssertionError("the message is not a short line") from error
        return False
    assert all(weight.dtype == torch.float32 and weight.is_contiguous() for weight in found.weights.values())
    return True


# ckpt.pt


def save_ckpt(path, **changes):
    held = {"model": nanogpt_state(SMALL), "model_args": SMALL, "config": {"dataset": "x"}, "iter_num": 1}
    torch.save({key: value for key, value in (held | changes).items() if value is not MISSING}, path)
    return path


@pytest.mark.parametrize("key", SMALL)
def test_a_wrong_value_in_model_args(tmp_path, key):
    for number, value in enumerate([*VALUES, MISSING]):
        path = save_ckpt(tmp_path / f"{number}.pt", model_args=changed(SMALL, key, value))
        # nanoGPT's dropout is not read. torch.load reads no integer of more than 255 bytes
        is_refused = value in (10**5000, VALUES[-1])  # check_saved() passes no text of 10^12 characters
        expected = (key == "dropout" and not is_refused) or (key == "bias" and (value is True or value is MISSING))
        assert reads(path) == expected, value


@pytest.mark.parametrize("key", ["model", "model_args", "config", "iter_num"])
def test_a_wrong_part_of_ckpt_pt(tmp_path, key):
    for number, value in enumerate([*VALUES, MISSING, {1: 2}, {"a": 1}, {None: torch.ones(1)}, {"dataset": []}]):
        path = save_ckpt(tmp_path / f"{number}.pt", **{key: value})
        is_read = reads(path)
        if key in ("model", "model_args"):
            assert not is_read, value
    for data in ({"tokenizer": 3}, {"tokenizer": ["gpt2"]}):
        assert not reads(save_ckpt(tmp_path / "data.pt", config={"data": data}))


def wrong_tensors(weight):
    """Values that may stand in the place of a tensor of this shape."""
    dtypes = (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8)
    yield from (weight.to(dtype) for dtype in dtypes)
    yield from (weight[:-1], weight[None], torch.tensor(1.0), torch.ones(0))
    yield torch.zeros(1).expand(weight.shape)
    yield weight.to_sparse()
    yield weight.to("meta")
    yield torch.quantize_per_tensor(weight.detach(), 0.1, 0, torch.qint8)
    yield from (None, 3, [1.0], "x", {"a": 1})


@pytest.mark.parametrize("name", ["transformer.wte.weight", "transformer.h.0.attn.c_attn.bias", "lm_head.weight"])
@pytest.mark.filterwarnings("ignore")  # of sparse and quantized tensors
def test_a_wrong_tensor_in_ckpt_pt(tmp_path, name):
    state = nanogpt_state(SMALL)
    for number, value in enumerate(wrong_tensors(state[name])):
        assert not reads(save_ckpt(tmp_path / f"{number}.pt", model={**state, name: value})), value
    assert not reads(save_ckpt(tmp_path / "extra.pt", model={**state, "transformer.x" * 999 + "\n": torch.ones(1)}))
    assert reads(save_ckpt(tmp_path / "nan.pt", model={**state, "transformer.ln_f.bias": torch.full((8,), math.nan)}))


def test_a_model_that_is_larger_than_its_file_is_not_built(tmp_path, monkeypatch):
    """Every size is compared with the tensors first. A stride of 0 gives any number of values in a few bytes."""
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self: pytest.fail(f"it allocates {self.shape}"))
    huge = {**SMALL, "n_layer": 100, "n_embd": 2**16, "vocab_size": 2**20}
    assert not reads(save_ckpt(tmp_path / "a.pt", model_args=huge))
    state = {name: torch.zeros(1).expand(weight.shape) for name, weight in nanogpt_state(SMALL).items()}
    assert not reads(save_ckpt(tmp_path / "b.pt", model=state))
    one = torch.zeros(320 * 8)
    state = {name: one[: weight.numel()].view(weight.shape) for name, weight in nanogpt_state(SMALL).items()}
    assert not reads(save_ckpt(tmp_path / "c.pt", model=state))


def test_a_compressed_ckpt_pt_and_a_large_object_are_refused_before_they_are_read(tmp_path, monkeypatch):
    """Both would become 20 GB of memory. torch.load() itself allows bytearray(N)."""
    whole = save_ckpt(tmp_path / "ckpt.pt")
    monkeypatch.setattr(torch, "load", lambda *args, **options: pytest.fail("torch.load reads it"))
    with zipfile.ZipFile(whole) as source:
        parts = {name: source.read(name) for name in source.namelist()}

    def write(path, compression=zipfile.ZIP_STORED, **changes):
        with zipfile.ZipFile(path, "w", compression) as target:
            for name, content in (parts | changes).items():
                target.writestr(name, content)
        return path

    assert not reads(write(tmp_path / "bomb.pt", zipfile.ZIP_DEFLATED))
    for pickled in (b"cbuiltins\nbytearray\n(J\xff\xff\xff\x7ftR.", b"ccollections\nCounter\n.", b"cos\nsystem\n."):
        assert not reads(write(tmp_path / "large.pt", **{"ckpt/data.pkl": b"\x80\x02" + pickled}))
    assert not reads(write(tmp_path / "long.pt", **{"ckpt/data.pkl": b"\x80\x02" + b"]" * 2**24 + b"."}))


# Hugging Face's folders


@pytest.fixture(params=["gpt2", "qwen3"])
def folder(request, tmp_path):
    """A Hugging Face folder of SMALL, or of a Qwen3."""
    path = tmp_path / "theirs"
    path.mkdir()
    if request.param == "qwen3":
        config = replace(CONFIGS["qwen3"], vocab_size=320)
        source = Pretrained(asdict(replace(config, dropout=0.0)), dict(qwen3(config).state_dict()), None, "qwen3")
        source.model.pop("dropout")
        export.export(source, "hf", path)
    else:
        state = nanogpt_state(SMALL)
        linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        tensors = {name: (w.T if name.endswith(linear) else w).contiguous() for name, w in state.items()}
        del tensors["lm_head.weight"]
        (path / "config.json").write_text(json.dumps(HF_CONFIG))
        save_file(tensors, path / "model.safetensors")
    assert reads(path)
    return path


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


CONFIG_KEYS = [*HF_CONFIG, *export.SUPPORTED_VALUES, "layer_norm_epsilon", "n_inner", "tie_word_embeddings"]
LLAMA_KEYS = {*llama.SIZES.values(), *llama.HEADS.values(), *llama.SUPPORTED_VALUES, *llama.READ_KEYS}
LLAMA_KEYS |= llama.READ_KEYS_BY_KIND["qwen3"]


@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
@pytest.mark.parametrize("key", [*sorted(LLAMA_KEYS), "rope", "unknown"])
def test_a_wrong_value_in_the_config_of_a_qwen3(folder, key):
    """Each is read, or is one line; the sizes are always refused. `rope` is a key of the rope parameters."""
    whole = config_of(folder)
    for value in [value for value in VALUES if value != 10**5000] + [MISSING]:
        value = nested(4) if value == VALUES[-1] else value
        held = [changed(whole, key, value)]
        if key == "rope":
            rope = {"rope_type": "llama3", "factor": 8.0, **llama.LLAMA3}
            held = [{**whole, "rope_scaling": changed(rope, name, value)} for name in (*rope, "rope_theta", "type")]
        if key == "max_window_layers":
            held = [changed({**whole, "use_sliding_window": True, "sliding_window": 5}, key, value)]
        for config in held:
            (folder / "config.json").write_text(json.dumps(config))
            is_read = reads(folder)
            if key in llama.SIZES.values() and key != "max_position_embeddings":  # a rope model has no table
                assert not is_read, value


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
@pytest.mark.parametrize("key", CONFIG_KEYS)
def test_a_wrong_value_in_config_json(folder, key):
    """json.dumps() writes NaN and Infinity, and Python reads them. Values that mean the same are read."""
    for value in [value for value in VALUES if value != 10**5000] + [MISSING]:
        if value == VALUES[-1]:
            value = nested(4)  # JSON repeats a list that is held twice
        (folder / "config.json").write_text(json.dumps(changed(HF_CONFIG, key, value)))
        is_read = reads(folder)
        if key in HF_CONFIG:
            assert not is_read, value


TEXTS = {
    "empty": b"",
    "binary": bytes(range(256)),
    "not UTF-8": b'{"model_type": "\xff"}',
    "a list": b"[]",
    "deep": b"[" * 200_000,
    "deep and closed": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a huge int": b'{"n_layer": ' + b"9" * 10_000 + b"}",
    "not closed": b'{"model_type": "gpt2"',
    "a byte order mark": b"\xef\xbb\xbf" + json.dumps(HF_CONFIG).encode(),
    "UTF-16": json.dumps(HF_CONFIG).encode("utf-16"),
}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_file_that_is_something_else(folder, name):
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    for text in TEXTS.values():
        (folder / name).write_bytes(text)
        assert not reads(folder)


def test_of_a_key_that_stands_twice_the_last_counts(folder):
    """As in transformers: JSON does not say more."""
    twice = f'{{"n_layer": {10**6}, "num_hidden_layers": {10**6}, '
    text = (folder / "config.json").read_text().replace("{", twice, 1)
    (folder / "config.json").write_text(text.replace('"n_layer": 1000000, ', "") if "qwen3" in text else text)
    assert reads(folder)


def test_an_index_names_only_files_beside_it(folder):
    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    outside = folder.parent / "other.safetensors"
    outside.write_bytes(weights.read_bytes())
    weights.rename(folder / "model-1.safetensors")
    names = sorted(load_file(outside))
    for value in (
        *("../other.safetensors", str(outside), "model-1.bin", "sub/model-1.safetensors", "", ".", "..", "a\0b"),
        *(None, 3, ["model-1.safetensors"], {}),
    ):
        index.write_text(json.dumps({"weight_map": {**dict.fromkeys(names, "model-1.safetensors"), names[0]: value}}))
        assert not reads(folder), value
    for weight_map in (None, [], "x", 3, {}):
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert not reads(folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")}))
    assert reads(folder)


@pytest.mark.parametrize("number", [0, 7, -1, "head"])
def test_a_wrong_tensor_in_safetensors(folder, number):
    path = folder / "model.safetensors"
    held = load_file(path)
    table = next(name for name in held if name.endswith(("wte.weight", "embed_tokens.weight")))
    name = "lm_head.weight" if number == "head" else sorted(held)[number]
    whole = held.get(name, held[table])
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8):
        save_file({**held, name: whole.to(dtype)}, path)
        assert not reads(folder), dtype
    for value in (whole[:-1].clone(), whole[None].clone(), torch.tensor(1.0), torch.ones(0)):
        save_file({**held, name: value}, path)
        assert not reads(folder), value.shape


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]},
        {"dtype": "F32", "shape": [2**63, 2**63], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]},
        {"dtype": "X", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
    ],
)
def test_a_header_of_safetensors_that_claims_more_than_the_file_has(folder, entry):
    header = json.dumps({"transformer.wte.weight": entry}).encode()
    for length in (len(header), 2**40, 2**64 - 1):
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + header + b"\0" * 4)
        assert not reads(folder)


# all formats


@pytest.mark.parametrize("name", ["ckpt.pt", "config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["FIFO", "folder", "socket", "device", "link to itself"])
def test_something_else_in_the_place_of_a_file(folder, name, kind, monkeypatch):
    """It is named in one line, and nothing waits for a writer."""
    monkeypatch.chdir(folder)  # the path of a socket has at most 107 characters
    if name == "ckpt.pt":
        os.unlink("config.json")
    if name.endswith("index.json"):
        os.unlink("model.safetensors")
    if os.path.exists(name):
        os.unlink(name)
    if kind == "FIFO":
        os.mkfifo(name)
    elif kind == "folder":
        os.mkdir(name)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
    else:
        os.symlink("/dev/zero" if kind == "device" else name, name)
    with pytest.raises(UserError) as error:
        read_pretrained(".")
    if kind != "link to itself":
        assert f"it is a {kind}" in str(error.value)
    if name == "ckpt.pt" and kind in ("FIFO", "socket", "device"):
        with pytest.raises(UserError, match=f"it is a {kind}"):
            read_pretrained("ckpt.pt")


@pytest.mark.parametrize("name", ["ckpt.pt", "config.json", "model.safetensors"])
def test_flipped_bits_and_cut_files(folder, name):
    """A flip in a number of a tensor is not noticed, because these formats have no digest."""
    if name == "ckpt.pt":
        (folder / "config.json").unlink()
        save_ckpt(folder / name)
    path, draw = folder / name, random.Random(1)
    whole = path.read_bytes()
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(draw.choice((1, 1, 8))):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        reads(folder)
    for size in sorted({0, 1, 7, 8, 9, *draw.sample(range(len(whole)), 20)}):
        path.write_bytes(whole[:size])
        assert not reads(folder), size


@pytest.mark.parametrize("key", LARGEST)
def test_sizes_are_bounded(key):
    fields = {**dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size", "vocab_size"), 1), "pos": "learned"}
    GPTConfig(**(fields | {key: 1}), bias=True, dropout=0.0)
    for value in (0, -1, LARGEST[key] + 1, 10**5000, True, 1.0, "1", None, [1]):
        with pytest.raises(UserError, match=rf"^model.{key}=.*: it(s type)? must be [^\n]*$"):
            GPTConfig(**(fields | {key: value}), bias=True, dropout=0.0)


def test_a_model_of_a_million_layers_is_refused_before_it_is_built(hotswap):
    """It took minutes to build, and filled the memory."""
    assert hotswap("+experiment=smoke", "model.n_layer=1000000")[::2] == (
        1,
        "error: model.n_layer=1000000: it must be from 1 to 1,000\n",
    )


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_the_commands_print_one_line(called, folder, monkeypatch):
    """init_from, checkpoint= of generate, evaluate and export: a config that does not fit, and a damaged ckpt.pt."""
    monkeypatch.chdir(folder.parent)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | {"n_layer": 2}))
    (folder.parent / "x.pt").write_bytes(save_ckpt(folder.parent / "ckpt.pt").read_bytes()[:-50])
    programs = {
        "train.py": (train.main, "+experiment=smoke", "train.block_size=8", "train.tokens_per_step=128", "init_from="),
        "generate.py": (generate.main, "prompt=a", "tokenizer=bytes", "checkpoint="),
        "evaluate.py": (evaluate.main, "data=text", "checkpoint="),
        "export.py": (export_command.main, "path=new", "checkpoint="),
    }
    for name, (main, *words, key) in programs.items():
        for source, message in (("theirs", "theirs is not this model: it lacks h.1."), ("x.pt", "x.pt cannot be read")):
            code, _, err = called(name, main, *words, f"{key}{source}")
            assert (code, err.count("\n")) == (1, 1), (name, err)
            assert err.startswith(f"error: {message}"), (name, err)
    assert not (folder.parent / "new").exists()


# checkpoints of ours, whose manifest somebody has sealed again


@pytest.fixture
def run(tmp_path):
    """The checkpoint of a run, and a function that changes the value of a key in its config."""
    folder = saved(tmp_path / "run", gpt(), precision="bf16", train={"block_size": 8}, kernels={"fp8": None})[0]
    path = folder / "checkpoints/step-000020/manifest.json"
    whole = read_json(path)

    def change(keys, value):
        facts = json.loads(json.dumps(whole))
        group = facts
        for key in keys[:-1]:
            group = group[key]
        group[keys[-1]] = value
        if value is MISSING:
            del group[keys[-1]]
        write_json(path, facts)
        return path.parent

    return change


def test_a_wrong_value_in_the_config_of_a_manifest(run):
    """Each is refused in one line, or the command that reads it computes without it."""
    keys = [("config",), *(("config", group) for group in ("model", "data", "train", "precision"))]
    keys += [("config", "model", key) for key in ("n_layer", "n_embd", "pos", "bias", "window", "n_kv_head", "unknown")]
    keys += [("config", "data", "tokenizer"), ("config", "train", "block_size")]
    for key in keys:
        for value in [value for value in VALUES if value != 10**5000][:-1]:
            path = run(key, value)
            if reads(path):
                read_pretrained(str(path)).run_config  # noqa: B018, it raises UserError
        if key[-1] not in ("window", "n_kv_head", "tokenizer", "train", "precision", "block_size", "unknown"):
            assert not reads(run(key, MISSING)), key
    for key, value in ((("config", "model", "n_layer"), 10**6), (("config", "precision"), "fp64")):
        assert not reads(run(key, value))


def test_a_wrong_value_for_the_optimizer_of_an_export(run, tmp_path):
    for key in (("config", "optim"), ("val_loss",), ("config", "model", "dropout")):
        for number, value in enumerate([*VALUES[:9], *VALUES[10:-1], {"beta1": 2.0}, {"learning_rate": "x"}]):
            path = run(key, value)
            try:
                source = read_pretrained(str(path))
                export.export(source, "nanogpt", tmp_path / f"{key[-1]}-{number}")
            except UserError as error:
                if "\n" in str(error):
                    raise AssertionError("the message is not a line") from error
