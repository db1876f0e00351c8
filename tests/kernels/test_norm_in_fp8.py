"""The norm that writes fp8 for the next op gives the bits of a norm and a pass that rounds its output."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from kernels import fp8
from kernels.linear.triton import linear
from kernels.norm import inputs
from kernels.norm.triton import norm_in_fp8
from kernels.quantize import quantize, unit_tensor
from kernels.registry import AttnConfig, KernelsConfig, backend, contract, norm_before, resolve
from kernels.tuned import write_table
from model.config import GPTConfig
from model.gpt import GPT
from model.step import load_ops

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
pytestmark = pytest.mark.usefixtures("fp8_on_a_cpu")
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32, "vocab_size": 128}
NAMES = "769", "1600", "narrow", "many_rows", "no_residual", "plain", "fp32_residual", "non_contiguous"


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op in ("norm", "rms_norm") for name in NAMES if name in contract(op).CASES]
)
def test_both_layouts_have_the_bits_of_norm_and_quantize(op, name):
    arguments = contract(op).inputs(**contract(op).CASES[name], dtype=DTYPE, device=DEVICE)
    y, stream = getattr(backend(op, "triton"), op)(**arguments)
    in_fp8, stream_beside = backend(op, "triton").norm_in_fp8(**arguments)
    assert (in_fp8.shape, in_fp8.dtype) == (y.shape, y.dtype)
    assert torch.equal(stream, stream_beside)
    rows, columns, _ = quantize(y.reshape(-1, y.shape[-1]), unit_tensor(fp8.X_SCALE, DEVICE))
    assert torch.equal(in_fp8.rows.view(torch.uint8), rows.view(torch.uint8))
    assert torch.equal(in_fp8.columns.view(torch.uint8), columns.view(torch.uint8))


def test_infinities_become_nan():
    arguments = inputs((5, 64), residual=False, dtype=DTYPE, device=DEVICE)
    with torch.no_grad():
        arguments["bias"][:3] = torch.tensor([1e6, torch.inf, -torch.inf])
    in_fp8, _ = norm_in_fp8(**arguments)
    assert (in_fp8.rows[:, 0].float() == 448).all()
    assert in_fp8.rows[:, 1:3].float().isnan().all()
    assert in_fp8.columns[1:3, :5].float().isnan().all()


@pytest.mark.parametrize(
    ("kind", "checkpointing"), [("layernorm", "none"), ("layernorm", "block"), ("rmsnorm", "none")]
)
def test_a_model_has_the_same_loss_and_gradients(kind, checkpointing, monkeypatch):
    config = GPTConfig(**SIZES, pos="learned", bias=True, dropout=0.0, norm=kind, checkpointing=checkpointing)
    kernels = KernelsConfig(norm="triton", rms_norm="triton", linear="triton", mlp="triton")
    ops = resolve(kernels, AttnConfig("sdpa"), DEVICE, in_fp8=True)
    op = "norm" if kind == "layernorm" else "rms_norm"
    module, called = backend(op, "triton"), getattr(ops, op)
    norm_in_fp8 = module.norm_in_fp8
    assert norm_before("linear", ops, called) is norm_before("mlp", ops, called) is norm_in_fp8
    tokens = torch.randint(128, (2, 33), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    results = []
    for function in (norm_in_fp8, getattr(module, op)):
        monkeypatch.setattr(module, "norm_in_fp8", function)
        torch.manual_seed(2)
        model = GPT(config, ops, DTYPE).to(DEVICE, DTYPE)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_square_weight_refuses_an_input_without_values():
    """Its dweight is not in fp8, so the backward would read x, which nothing has written."""
    x, _ = norm_in_fp8(**inputs((5, 64), residual=False, dtype=DTYPE, device=DEVICE))
    with pytest.raises(ValueError, match=r"square weight \(64\)"):
        linear(x, torch.zeros(64, 64, dtype=DTYPE, device=DEVICE), None, fp8=True)


def test_only_ops_that_take_fp8_get_it():
    for kernels in (KernelsConfig(norm="triton"), KernelsConfig(norm="eager", linear="triton", mlp="triton")):
        ops = resolve(kernels, AttnConfig("sdpa"), DEVICE, in_fp8=True)
        assert norm_before("linear", ops, ops.norm) is norm_before("mlp", ops, ops.norm) is ops.norm
    kernels = KernelsConfig(norm="triton", linear="triton", mlp="triton", fp8=["mlp"])
    ops = resolve(kernels, AttnConfig("sdpa"), DEVICE, in_fp8=True)
    assert norm_before("linear", ops, ops.norm) is ops.norm
    assert norm_before("mlp", ops, ops.norm) is norm_in_fp8


@pytest.mark.parametrize("mlp", ["triton", "eager"])
@pytest.mark.parametrize("linear", ["triton", "eager"])
@pytest.mark.parametrize("norm", ["triton", "eager"])
def test_auto_writes_fp8_where_the_chosen_backends_can(norm, linear, mlp, tables):
    """The norm and the op after it must both be Triton."""
    entries = {"norm bfloat16": norm, "linear bfloat16 fp8": linear, "mlp bfloat16 fp8": mlp}
    write_table(tables[0], {name: {"parameters": {"64": impl}} for name, impl in entries.items()})
    config = GPTConfig(**SIZES, pos="learned", bias=True, dropout=0.0)
    kernels = KernelsConfig(norm="auto", linear="auto", mlp="auto")
    ops = load_ops(config, kernels, AttnConfig("sdpa"), "fp8", DEVICE)
    for op, impl in (("linear", linear), ("mlp", mlp)):
        in_fp8 = norm == impl == "triton"
        assert norm_before(op, ops, ops.norm) is (norm_in_fp8 if in_fp8 else ops.norm)
