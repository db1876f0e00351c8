"""Every custom operator of kernels/, forward and backward, follows PyTorch's rules for custom operators."""

import contextlib
import functools
import re
from pathlib import Path

import pytest
import torch

from kernels.adamw import MULTIPLE
from kernels.adamw import inputs as adamw_inputs
from kernels.adamw.eager import adamw as eager_adamw
from kernels.adamw.triton import adamw as triton_adamw
from kernels.attention import cudnn_frontend, document_starts, flash, flex
from kernels.compat import TorchDispatchMode
from kernels.decode import _sampling
from kernels.muon import _updates as muon_updates
from kernels.muon import inputs as muon_inputs
from kernels.muon.triton import muon as triton_muon
from kernels.registry import OPS, backend, contract, impls, unavailable
from kernels.sampling import Sampling
from tests.kernels.test_backends import DEVICES, case_inputs, float_tensors, load_or_skip
from tests.kernels.test_contestants import CPU, ONE_DTYPE, WRAPPED, packages  # noqa: F401
from tests.kernels.test_cudnn_frontend import package as cudnn_package  # noqa: F401
from tests.kernels.test_flash import stand_in  # noqa: F401

ROOT = Path(__file__).parents[2] / "kernels"
CASES = {  # small, because opcheck calls an op about ten times; every case of an op that is not in the table
    "norm": ["fp32_residual", "plain"],
    "rms_norm": ["fp32_residual", "no_residual"],
    "attention": ["64"],
    "linear": ["one_row", "no_bias", "fp8"],
    "mlp": ["one_row", "no_bias", "fp8", "relu2", "relu2_fp8"],
    "glu": ["one_row", "bias", "fp8"],
    "rope": ["80", "norm"],
    "loss": ["some_ignored", "768", "fp8", "softcap"],  # Gluon takes no vocabulary of 257
    "muon": ["wide"],
}
WITH_CASES = [(op, impl, case) for op in OPS for impl in impls(op) for case in CASES.get(op, contract(op).CASES)]
UTILS = "test_faketensor", "test_autograd_registration", "test_schema", "test_aot_dispatch_dynamic"
FP8 = torch.float8_e4m3fn, torch.float8_e5m2


class CallRecorder(TorchDispatchMode):
    """Records the calls of our custom ops: op -> (arguments, results)."""

    supports_higher_order_operators = True  # FlexAttention uses higher-order operators

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "hotswap":
            self.calls[func] = args, result if isinstance(result, (tuple, list)) else (result,)
        return result


def recorded(function, inputs):
    """Return (whether its arguments require gradients, op, arguments, results) of each call of an operator.

    The calls are the forward without and with gradients, and the backward.
    """
    with CallRecorder() as without_gradients, torch.no_grad():
        function(**inputs)
    with CallRecorder() as forward:
        outputs = function(**inputs)
    outputs = float_tensors(outputs if isinstance(outputs, tuple) else (outputs,))
    outputs = [out for out in outputs if out.requires_grad]
    with CallRecorder() as backward:
        if outputs:
            leaves = [tensor for tensor in float_tensors(inputs.values()) if tensor.requires_grad]
            torch.autograd.grad(outputs, leaves, [torch.randn_like(out) for out in outputs])
    return [
        (record is forward and bool(outputs), func, args, results)
        for record in (without_gradients, forward, backward)
        for func, (args, results) in record.calls.items()
    ]


def opcheck(calls):
    for requires_gradients, func, args, results in calls:
        copies = [arg.detach().clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        if requires_gradients:
            for copy in float_tensors(copies):
                copy.requires_grad_()
        # the last two checks compute with all tensors, which PyTorch cannot do in fp8
        in_fp8 = any(isinstance(value, torch.Tensor) and value.dtype in FP8 for value in (*args, *results))
        torch.library.opcheck(func, copies, test_utils=UTILS[:2] if in_fp8 else UTILS)


def other_calls(device):
    """Return functions, and their arguments, that call the operators that no op's function calls."""
    starts = torch.tensor([document_starts((3, 5))] * 2, dtype=torch.int32, device=device)
    seeds, positions = (torch.arange(2, device=device) for _ in range(2))
    draw = {"logits": torch.randn(2, 300, device=device), "seeds": seeds, "positions": positions}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrices, numbers = torch.randn(3, 2, 5, 3, device=device), torch.ones(2, device=device)
    updated = {"refuse": numbers[0] > 1}
    momentum = {"momentum": matrices[0], "gradient": matrices[1], "scale": numbers[0], "beta": 0.9, "dtype": dtype}
    applied = {"master": matrices[0], "weight": matrices[1].to(dtype), "steps": matrices[2].mT, "lr": numbers[1]}
    return [
        (muon_updates.update_momentum, updated | momentum),
        (muon_updates.apply_steps, updated | applied | {"length": 0.2, "weight_decay": 0.1}),
        (triton_adamw, adamw_inputs((2 * MULTIPLE,), dtype=dtype, device=device)),
        (eager_adamw, adamw_inputs((2 * MULTIPLE,), dtype=dtype, device=device)),
        (triton_muon, muon_inputs((2, 48, 16), dtype=dtype, device=device)),
        (flash.document_bounds, {"starts": starts}),
        (flex.list_blocks, {"selected": (starts[:, None] > 1).expand(2, 3, 8).mT}),
        (functools.partial(_sampling.sample_tokens, sampling=Sampling(300, top_k=7)), draw),
        *[
            (
                lambda op=op, **arguments: backend(op, "triton").norm_in_fp8(**arguments)[1],
                case_inputs(op, "fp32_residual", dtype, device),
            )
            for op in ("norm", "rms_norm")
        ],
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "impl", "case"), WITH_CASES)
def test_opcheck(op, impl, case, device, fp8_on_a_cpu):
    """torch.library.opcheck finds no mistake.

    An op neither changes nor returns its arguments, and no two outputs share memory. Its fake outputs have the real
    shapes and strides, also if sizes are symbols.
    """
    device = torch.device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = case_inputs(op, case, dtype, device)
    opcheck(recorded(load_or_skip(op, impl, device, inputs), inputs))


@pytest.mark.parametrize(("op", "impl"), WRAPPED)
def test_opcheck_of_wrapped_kernels(op, impl, packages):  # noqa: F811
    """The same for other people's kernels, with plain PyTorch in place of their packages."""
    if op == "loss" and DEVICES[-1] == "cuda":
        pytest.skip("its backward is in Triton, which does not run on the CPU beside a GPU")
    inputs = case_inputs(op, CASES[op][0], ONE_DTYPE.get((op, impl), torch.float32), CPU)
    opcheck(recorded(getattr(backend(op, impl), op), inputs))


@pytest.fixture
def flash_calls(stand_in, monkeypatch):  # noqa: F811
    """FlashAttention's functions and arguments, with plain PyTorch in place of its package."""
    stand_in("fa4")
    monkeypatch.setattr(flash, "choose_version", lambda version, q: "fa4")
    return [(flash.attention, case_inputs("attention", case, torch.float32, CPU)) for case in ("gqa", "documents")]


def test_opcheck_of_flash(flash_calls):
    for function, inputs in flash_calls:
        opcheck(recorded(function, inputs))


@pytest.fixture
def cudnn_calls(cudnn_package):  # noqa: F811
    """The same for cuDNN's front end."""
    gqa, lengths = (case_inputs("attention", case, torch.bfloat16, CPU) for case in ("gqa", "lengths"))
    lengths |= {name: lengths[name].detach() for name in "qkv"}  # callers with lengths ask for no gradient
    return [(cudnn_frontend.attention, inputs) for inputs in (gqa, lengths)]


def test_opcheck_of_cudnn_frontend(cudnn_calls):
    for function, inputs in cudnn_calls:
        opcheck(recorded(function, inputs))


@pytest.mark.parametrize("device", DEVICES[-1:])  # beside a GPU, Triton does not run on the CPU
def test_opcheck_of_other_operators(device, fp8_on_a_cpu):
    for function, inputs in other_calls(torch.device(device)):
        opcheck(recorded(function, inputs))


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="the packages are replaced on a CPU only")
def test_every_operator_is_checked(packages, flash_calls, cudnn_calls, fp8_on_a_cpu):  # noqa: F811
    """The tests above call every operator that a file of kernels/ defines."""
    calls = [*flash_calls, *cudnn_calls, *other_calls(CPU)]
    for op, impl, case in WITH_CASES:
        inputs = case_inputs(op, case, torch.float32, CPU)
        with contextlib.suppress(pytest.skip.Exception):
            calls.append((load_or_skip(op, impl, CPU, inputs), inputs))
    for op, impl in WRAPPED:
        inputs = case_inputs(op, CASES[op][0], ONE_DTYPE.get((op, impl), torch.float32), CPU)
        calls.append((getattr(backend(op, impl), op), inputs))
    called = {func._schema.name for function, inputs in calls for _, func, _, _ in recorded(function, inputs)}
    source = "".join(path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py"))
    names = re.findall(r'custom_op\(\s*"(hotswap::\w+)"', source)
    for define, part in (("mlp", ""), ("linear", ""), ("glu", "_swiglu"), ("rope", "_rope")):
        found = re.findall(rf'\bdefine_{define}\("(\w+)"', source)
        names += [f"hotswap::{name}{part}_{way}" for name in found for way in ("fwd", "bwd")]
    for name in re.findall(r'\bdefine_norm\("(\w+)"', source):
        names += [f"hotswap::{name}_{part}" for part in ("norm_fwd", "rms_norm_fwd", "norm_bwd")]
    assert {"hotswap::mlp_fwd", "hotswap::mlp_gluon_fp8_bwd"} <= {*names}
    missing = {name for name in names if "gluon" not in name} - called  # Gluon needs a GPU
    if unavailable("loss", "torch_chunked", CPU):  # it needs torch 2.13
        missing.discard("hotswap::torch_linear_cross_entropy")
    assert {name for name in missing if "gluon" not in name} == set()  # test_opcheck calls Gluon's on Hopper
