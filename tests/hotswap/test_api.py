"""The arguments of hotswap's public functions: a wrong one raises a ValueError of one line, and a model still works."""

import inspect
import math
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

import hotswap
from kernels.registry import OPS, AttnConfig, KernelsConfig, Ops, contract, load
from kernels.tuned import merged_table, table_paths, write_table
from model import step
from model.config import GPTConfig
from model.gpt import GPT

CPU = torch.device("cpu")
SHAPE = {"n_layer": 1, "n_embd": 16, "n_head": 2, "block_size": 16, "vocab_size": 64}
OPTIONS = {"device": "cpu", "precision": "fp32"}


def tiny(**changes):
    return hotswap.build("tiny", **{**SHAPE, **OPTIONS, **changes})


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """{function: its arguments in a right call}. build() and load() also take fields of GPTConfig."""
    path, model = tmp_path_factory.mktemp("model") / "ckpt.pt", tiny()
    torch.save({"model": model.state_dict(), "model_args": {**SHAPE, "bias": True}}, path)
    choices = {"kernels": "eager", "attn": "sdpa", **OPTIONS}
    shape = {field.name: getattr(model.config, field.name) for field in fields(GPTConfig)}
    generate = {"model": model, "idx": torch.arange(8).view(2, 4), "max_new_tokens": 2, "n_vocab": 64}
    return {
        "build": {"model": "tiny", "seed": 1, **choices, **shape},
        "load": {"source": path, "block_size": 8, "window": 4, "dropout": 0.0, "checkpointing": "none", **choices},
        "op": {"name": "norm", "impl": "eager", "device": "cpu"},
        "generate": {**generate, "temperature": 1.0, "top_k": 3, "top_p": 0.9, "seed": 0},
    }


STRANGE = [
    None,
    -1,
    0,
    1.5,
    math.nan,
    math.inf,
    2**70,
    "",
    "?",
    "~nobody-here/mine.py",
    [],
    ["eager"],
    {},
    {"norm": None},
    {"a": object()},
    True,
]
STRANGE += [
    object(),
    torch.float32,
    torch.device("meta"),
    torch.ones(2, 3),
    Path("x"),
    b"x",
    len,
    torch.nn.Linear(2, 2),
]


@pytest.mark.parametrize("function", ["build", "load", "op", "generate"])
def test_a_strange_argument_works_or_raises_one_line(calls, function):
    """Every argument in turn has a third of the strange values: all of them together would take 75 s."""
    public = {name for name in hotswap.__all__ if not isinstance(getattr(hotswap, name), type)}
    assert calls.keys() == public
    call, right = getattr(hotswap, function), calls[function]
    assert right.keys() >= inspect.signature(call).parameters.keys() - {"fields"}
    call(**right)
    for number, name in enumerate(right):
        for value in STRANGE[number % 3 :: 3]:
            message = "it works"
            try:
                call(**right | {name: value})
            except ValueError as error:
                message = str(error)
            assert len(message.splitlines()) == 1, (name, value)
    call(**right)


def test_op_takes_auto_which_chooses_at_each_call(tables, monkeypatch):
    """The library has its own copy of the rooms, so also its own cache of the tables."""
    monkeypatch.setattr("hotswap.kernels.fastest.merged_table", merged_table)
    write_table(table_paths(CPU)[0], {"mlp float32": {"parameters": {"16": "eager"}}})
    mlp, inputs = hotswap.op("mlp", "auto", "cpu"), contract("mlp").inputs((3, 16), dtype=torch.float32)
    assert torch.equal(mlp(**inputs), hotswap.op("mlp", "eager", "cpu")(**inputs))
    with pytest.raises(ValueError, match=r"^mlp=auto: nothing was measured for `mlp float64` on this device: run "):
        mlp(*(tensor.double() for tensor in inputs.values()))


PROMPT = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"idx": PROMPT[0]},
            "idx must be token ids (B, T) int64, at least one for each sequence, not (3,) torch.int64",
        ),
        ({"idx": PROMPT[:, :0]}, "at least one for each sequence, not (1, 0) torch.int64"),
        ({"idx": PROMPT[:0]}, "at least one for each sequence, not (0, 3) torch.int64"),
        ({"idx": PROMPT.float()}, "not (1, 3) torch.float32"),
        ({"idx": PROMPT.int()}, "not (1, 3) torch.int32"),
        ({"idx": PROMPT.tolist()}, "not a list"),
        ({"idx": PROMPT - 2}, "idx has ids from -1 to 1, and model.vocab_size is 64"),
        ({"idx": PROMPT + 61}, "idx has ids from 62 to 64, and model.vocab_size is 64"),
        ({"idx": PROMPT.to("meta")}, "idx is on meta, and the model on cpu: pass idx.to('cpu')"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1: it must be in [0, 2^31)"),
        ({"max_new_tokens": 2.0}, "max_new_tokens=2.0: it must be in [0, 2^31)"),
        ({"n_vocab": 0}, "n_vocab=0: it must be in [1, 64], because model.vocab_size is 64"),
        ({"n_vocab": 65}, "n_vocab=65: it must be in [1, 64], because model.vocab_size is 64"),
        ({"temperature": math.nan}, "temperature=nan: it must be 0 (the most probable token each time) or in [0.0001"),
        ({"temperature": -1}, "temperature=-1: it must be 0"),
        ({"temperature": math.inf}, "temperature=inf: it must be 0"),
        ({"top_k": -1}, "top_k=-1: it must be at least 1, or 0 for no limit"),
        ({"top_p": 0}, "top_p=0: it must be in (0, 1]; 1 is no limit"),
        ({"top_p": math.nan}, "top_p=nan: it must be in (0, 1]; 1 is no limit"),
        ({"seed": -1}, "seed=-1: it must be in [0, 2^63)"),
        ({"model": "tiny"}, "model=tiny: it must be a GPT"),
    ],
)
def test_a_wrong_argument_of_generate(calls, changes, message):
    """The model stays in training mode, and the next call is right."""
    model = calls["generate"]["model"].train()
    right = {"model": model, "idx": PROMPT, "max_new_tokens": 4, "n_vocab": 64}
    expected = hotswap.generate(**right)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        hotswap.generate(**right | changes)
    assert "\n" not in str(error.value)
    assert all(module.training for module in model.modules())
    assert torch.equal(hotswap.generate(**right), expected)


def test_arguments_of_generate_that_a_user_may_expect_to_work(calls):
    """nanoGPT's top_k=None, no new token, numpy's numbers, and a prompt beyond block_size."""
    model = calls["generate"]["model"]
    expected = hotswap.generate(model, PROMPT, 4, n_vocab=64)
    assert torch.equal(hotswap.generate(model, PROMPT, 4, n_vocab=64, top_k=None), expected)
    assert torch.equal(hotswap.generate(model, PROMPT, 0, n_vocab=64), PROMPT)
    numbers = {"n_vocab": np.int64(64), "temperature": np.float32(1), "seed": np.int32(0)}
    assert torch.equal(hotswap.generate(model, PROMPT, np.int64(4), **numbers), expected)
    assert hotswap.generate(model, PROMPT.repeat(1, 9), 2, n_vocab=64).shape == (1, 29)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hotswap.build({"n_layer": 2}), "model={'n_layer': 2}: choose gpt2_124m, "),
        (lambda: tiny(seed=None), "seed=None: it must be in [0, 2^63)"),
        (lambda: tiny(n_layer=object()), "model.n_layer: Value 'object' is not a supported primitive type"),
        (lambda: tiny(kernels=["triton"]), "kernels=['triton']: choose auto, "),
        (lambda: tiny(precision=torch.float32), "precision=torch.float32: choose fp32, amp, bf16, fp8"),
        (lambda: tiny(device=torch.device("meta")), "device=meta: choose auto, cpu, cuda or cuda:N"),
        (lambda: hotswap.load(tiny()), "source=a GPT: it must be text or a path"),
        (lambda: hotswap.op("norm", None), "impl=None: it must be the name of a backend of norm, or a path"),
        (lambda: tiny()(PROMPT[0]), "idx must be token ids (B, T), not (3,) torch.int64"),
        (lambda: tiny()(PROMPT.float()), "idx must be token ids (B, T), not (1, 3) torch.float32"),
        (lambda: tiny()(PROMPT.repeat(1, 6)), "a sequence of 18 is beyond the model's position table of model.block_s"),
    ],
)
def test_a_wrong_argument(call, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_device_of_torch_is_a_device(calls):
    for function in ("build", "load", "op"):
        getattr(hotswap, function)(**calls[function] | {"device": CPU})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_weights_of_a_seed_are_those_of_torchs_generator(device):
    """They are bit-equal to a model that is made after torch.manual_seed(), and do not change with a version."""
    groups, device = (KernelsConfig(), AttnConfig("eager")), torch.device(device)
    config = GPTConfig(**SHAPE, pos="learned", bias=True, dropout=0.0)
    built = step.build(config, *groups, "fp32", device, seed=5).state_dict()
    with torch.random.fork_rng(), device:
        torch.manual_seed(5)
        expected = GPT(config, Ops(*(load(op, "eager", device) for op in OPS))).state_dict()
    assert all(torch.equal(built[name], weight) for name, weight in expected.items())
    assert len({weight.sum().item() for weight in built.values()}) > 3
    first = hotswap.build("tiny", n_layer=2, seed=5, **OPTIONS).h[1].attn.c_attn.weight.flatten()[:2]
    torch.testing.assert_close(first, torch.tensor([0.020320512, -0.019029038]), rtol=1e-6, atol=0)


def test_a_model_on_the_meta_device_gives_the_shape_of_its_logits():
    assert tiny().to("meta")(PROMPT.to("meta")).shape == (*PROMPT.shape, 64)
