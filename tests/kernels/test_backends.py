"""Every backend of every op, against reference() in float64. These tests find new ops and new backends.

The rule is in kernels/check.py: the error is at most 2 x eager's error on the same inputs + rounding. Eager itself must
agree with reference() in float64.
"""

import functools
import inspect
import re
import zlib
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from kernels import fp8
from kernels.check import (
    broken_rule,
    exact_results,
    float_tensors,
    out_of_place,
    outputs_and_gradients,
    poisoned_memory,
    why_wrong,
)
from kernels.compat import TorchDispatchMode
from kernels.registry import (
    OPS,
    KernelError,
    Unavailable,
    backend,
    checkpointed_operators,
    contract,
    impls,
    load,
    unavailable,
)
from lab.judge.op_worker import call_once
from model.recompute import save_or_recompute

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def reason_to_leave_out(op, impl):
    """Return why the backend runs on no device of this machine, or None."""
    try:
        reasons = [unavailable(op, impl, torch.device(device)) for device in DEVICES]
    except KernelError:  # the tests of this backend fail with it
        return None
    return reasons[-1] if all(reasons) else None


# Without a GPU and the contestants' packages, half of all cases are of backends that cannot run
LEFT_OUT = {(op, impl): reason for op in OPS for impl in impls(op) if (reason := reason_to_leave_out(op, impl))}
IMPLS = {op: [impl for impl in impls(op) if (op, impl) not in LEFT_OUT] for op in OPS}
BACKENDS = [pytest.param(op, impl, id=f"{op}-{impl}") for op in OPS for impl in IMPLS[op]]
LARGE = 1000  # a longer side takes Triton's interpreter 1 to 4 s a case
CASES = [
    pytest.param(
        *(op, impl, case),
        id=f"{op}-{impl}-{case}",
        marks=[pytest.mark.exhaustive] if max(sizes["shape"]) > LARGE else [],
    )
    for op in OPS
    for impl in IMPLS[op]
    for case, sizes in contract(op).CASES.items()
]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture
def poison():
    with poisoned_memory():
        yield


def load_or_skip(op, impl, device, inputs=None):
    """Return the op's function. Skip the test, with the backend's reason, if it cannot run on this device or inputs."""
    inputs = inputs or {}
    try:
        function = load(op, impl, device)
        if missing := inputs.keys() - inspect.signature(function).parameters.keys():
            pytest.skip(f"{op}={impl} takes no {', '.join(missing)}")
        floats = [tensor.dtype for tensor in float_tensors(inputs.values())]
        if floats and (device.type == "cuda" or any(dtype.itemsize == 2 for dtype in floats) or "fp8" in inputs):
            # raises Unavailable for a dtype or a size: the interpreter lacks bf16, and some kernels fp32 or odd sizes
            function(**inputs)
    except Unavailable as reason:
        pytest.skip(str(reason))
    return function


def load_compilable(op, impl, device, inputs=None):
    """Do what load_or_skip() does. Skip a backend with a RUNTIME, for which kernels.compile=true is an error."""
    if runtime := getattr(backend(op, impl), "RUNTIME", None):
        pytest.skip(f"torch.compile cannot trace {runtime}")
    return load_or_skip(op, impl, device, inputs)


def common_dtype(device):
    """Return a dtype that every backend supports on this device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def attention_tolerance(dtype):
    """Return the tolerances for attention over few keys: 4 roundings of its weights and values to dtype."""
    tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
    return {"rtol": tolerance, "atol": tolerance}


def assert_as_good_as_eager(got, eager, truth, inputs, dtype):
    """Assert the rule of kernels/check.py."""
    reason = broken_rule(got, eager, truth, inputs, dtype)
    assert reason is None, reason


def case_inputs(op, case, dtype, device):
    """Return the inputs of a case, by its name in CASES. The seed depends on the name."""
    return contract(op).inputs(**contract(op).CASES[case], dtype=dtype, device=device, seed=zlib.crc32(case.encode()))


@pytest.mark.parametrize(("op", "impl"), [pytest.param(*backend, id="-".join(backend)) for backend in LEFT_OUT])
def test_a_backend_that_is_left_out_lacks_what_it_names(op, impl):
    """eager and triton run on every machine. The package that another backend needs is missing."""
    reason = LEFT_OUT[op, impl]
    assert impl != "eager"
    assert impl != "triton" or not find_spec("triton")
    for module in re.findall(r"No module named '([\w.]+)", reason):
        with pytest.raises(ImportError):
            import_module(module)
    pytest.skip(f"{op}={impl} cannot run here: {reason}")


@pytest.mark.parametrize(("op", "case"), [(op, case) for op in OPS for case in contract(op).CASES])
def test_eager_agrees_with_the_reference_in_float64(op, case):
    """Outputs and gradients agree to rounding. So eager, the baseline of the rule, is itself right."""
    inputs = case_inputs(op, case, torch.float64, "cpu")
    truth = outputs_and_gradients(contract(op).reference, inputs)
    got = outputs_and_gradients(load(op, "eager", torch.device("cpu")), inputs)
    for name, exact in truth.items():
        # a sum has at most 1e4 terms, and each is rounded with a relative error of 1.1e-16
        torch.testing.assert_close(got[name], exact, rtol=1e-10, atol=1e-12 * max(1, exact.abs().max().item()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "impl", "case"), CASES)
def test_against_float64(op, impl, case, dtype, device, poison, fp8_on_a_cpu):
    """Outputs and gradients follow the rule, for every case of the contract. Every element of them is written.

    A backend with a RUNTIME compiles 0.3 s for each case. On a CPU, only its first case and FEATURES are also in bf16.
    """
    quick = next(iter(contract(op).CASES)), *contract(op).FEATURES
    is_slow = device.type == "cpu" and dtype == torch.bfloat16 and hasattr(backend(op, impl), "RUNTIME")
    if is_slow and case not in quick:
        pytest.skip("this case is tested in fp32, and in bf16 on a GPU")
    inputs = case_inputs(op, case, dtype, device)
    function = load_or_skip(op, impl, device, inputs)
    assert why_wrong(op, impl, function, inputs, dtype) is None


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["no_grad", "inference"])
@pytest.mark.parametrize(("op", "impl", "case"), CASES)
def test_without_gradients(op, impl, case, way):
    """The outputs follow the rule. A backend may then run other kernels, such as those that Inductor generates."""
    device = torch.device("cuda")
    inputs = case_inputs(op, case, torch.bfloat16, device)
    function = load_or_skip(op, impl, device, inputs)
    got = call_once(out_of_place(contract(op), function), inputs, way, seed=0)
    eager = call_once(out_of_place(contract(op), load(op, "eager", device)), inputs, way, seed=0)
    truth = {name: tensor for name, tensor in exact_results(op, impl, inputs).items() if name in eager}
    assert_as_good_as_eager(got, eager, truth, inputs, torch.bfloat16)


@pytest.mark.parametrize(("op", "impl"), BACKENDS)
def test_in_fp16(op, impl, device, poison):
    """Results follow the rule in fp16."""
    inputs = case_inputs(op, next(iter(contract(op).CASES)), torch.float16, device)
    function = load_or_skip(op, impl, device, inputs)
    assert why_wrong(op, impl, function, inputs, torch.float16) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("impl", impls("loss"))
def test_small_probabilities_in_fp16(impl, device):
    """The smallest number of fp16 is 6e-8. A probability of 1 / V, divided by the number of targets, is about as small.

    On a GPU the sizes are of GPT-2 124M: 2e-5 / 16,384 = 1e-9.
    """
    shape, vocab = ((16384, 768), 50304) if device.type == "cuda" else ((512, 16), 8192)
    inputs = contract("loss").inputs(shape, vocab=vocab, dtype=torch.float16, device=device)
    function = load_or_skip("loss", impl, device, inputs)
    assert why_wrong("loss", impl, function, inputs, torch.float16) is None


@pytest.mark.parametrize("dout", [1.0, 1 / 3, 65536.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("impl", impls("loss"))
def test_the_gradient_of_the_loss_scales_the_gradients(impl, dtype, dout, device):
    """It may be 1 / 3, as in gradient accumulation over 3, or 65,536, which fp16 lacks, as in the first GradScaler."""
    inputs = case_inputs("loss", "some_ignored", dtype, device)
    function = load_or_skip("loss", impl, device, inputs)
    assert why_wrong("loss", impl, function, inputs, dtype, dout=dout) is None


@pytest.mark.parametrize(("op", "impl"), BACKENDS)
def test_expanded_output_gradients(op, impl, device, poison):
    """Results follow the rule if the output's gradient has stride 0, as `out.sum().backward()` gives it."""
    cases = [case for case in ("packed", "non_contiguous") if case in contract(op).CASES] or list(contract(op).CASES)
    inputs = case_inputs(op, cases[0], common_dtype(device), device)
    function = load_or_skip(op, impl, device, inputs)
    assert why_wrong(op, impl, function, inputs, common_dtype(device), expand=True) is None


@pytest.mark.parametrize(("op", "impl"), BACKENDS)
def test_inputs_and_output_gradients_do_not_change(op, impl, device):
    """Forward and backward write to none of the tensors that the caller passes."""
    inputs = case_inputs(op, next(iter(contract(op).CASES)), common_dtype(device), device)
    function = load_or_skip(op, impl, device, inputs)
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    outputs = function(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    douts = [torch.randn_like(out) for out in outputs]
    douts_before = [dout.clone() for dout in douts]
    torch.autograd.grad(outputs, [t for t in float_tensors(inputs.values()) if t.requires_grad], douts)
    assert all(torch.equal(inputs[name], value) for name, value in before.items())
    assert all(map(torch.equal, douts, douts_before))


@pytest.mark.parametrize(("op", "impl"), BACKENDS)
def test_in_an_activation_checkpoint(op, impl, device):
    """A recompute in the backward (model.checkpointing=block) changes nothing, but for the last bits of atomic sums."""
    dtype = common_dtype(device)
    inputs = case_inputs(op, next(iter(contract(op).CASES)), dtype, device)
    function = load_or_skip(op, impl, device, inputs)
    recomputed = outputs_and_gradients(functools.partial(checkpoint, function, use_reentrant=False), inputs)
    assert_equal_but_for_atomics(recomputed, outputs_and_gradients(function, inputs), dtype)


def assert_equal_but_for_atomics(got, expected, dtype):
    """Assert that results agree to 2 units in the last place of bf16, or to 1e-5 in fp32."""
    tolerance = 2 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-5
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance * value.abs().max().item())


@pytest.mark.parametrize("impl", [impl for impl in IMPLS["attention"] if hasattr(backend("attention", impl), "KEEPS")])
def test_in_a_checkpoint_that_keeps_attention(impl, device):
    """The operators in KEEPS run once instead of twice (model.keep_attention=true), and the results are the same."""
    names, calls = backend("attention", impl).KEEPS, []

    class CallRecorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.name() in names:
                calls.append(func.name())
            return func(*args, **(kwargs or {}))

    dtype = common_dtype(device)
    inputs = case_inputs("attention", next(iter(contract("attention").CASES)), dtype, device)
    function = load_or_skip("attention", impl, device, inputs)
    policy = functools.partial(save_or_recompute, checkpointed_operators(function))
    keep_attention = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}
    results, counts = [], []
    for options in ({}, keep_attention):
        calls.clear()
        with CallRecorder():
            checkpointed = functools.partial(checkpoint, function, use_reentrant=False, **options)
            results.append(outputs_and_gradients(checkpointed, inputs))
        counts.append(len(calls))
    assert counts == [2, 1]
    assert_equal_but_for_atomics(results[1], results[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "impl"), BACKENDS)
def test_two_calls_give_the_same_bits(op, impl, dtype, device):
    """Outputs and gradients are equal, for so many rows that many programs add to one sum."""
    if device.type == "cuda" and not getattr(backend(op, impl), "deterministic", True):
        pytest.skip(f"{op}={impl} has deterministic = False")
    inputs = contract(op).inputs(**shape_with_long_sums(op, device), dtype=dtype, device=device)
    function = load_or_skip(op, impl, device, inputs)
    first, second = (outputs_and_gradients(function, inputs) for _ in range(2))
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def shape_with_long_sums(op, device):
    """Return arguments of inputs() with many rows; for a new op, the case that moves the most bytes."""
    rows, width = (4096, 768) if device.type == "cuda" else (64, 128)
    shapes = {
        "norm": {"shape": (rows, width)},
        "attention": {"shape": (2, rows, 2, 64)},
        "mlp": {"shape": (rows, width)},
        "loss": {"shape": (rows, width), "vocab": 1000},
    }
    if op in shapes:
        return shapes[op]
    return max(contract(op).CASES.values(), key=lambda case: contract(op).cost(**case)["forward"][1])


COMPILED = {  # every case of an op that is not in the table
    "norm": ["fp32_residual", "plain"],
    "rms_norm": ["fp32_residual", "no_residual"],
    "attention": ["gqa", "decode", "lengths", "window", "documents"],
    "linear": ["non_contiguous", "no_bias", "fp8"],
    "mlp": ["non_contiguous", "no_bias", "fp8", "relu2"],
    "glu": ["non_contiguous", "bias", "fp8"],
    "rope": ["non_contiguous", "positions_of_sequences"],
    "loss": ["non_contiguous", "some_ignored", "fp8", "softcap", "softcap_fp8"],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES if torch.cuda.is_available() else [torch.float32], ids=str)
@pytest.mark.parametrize(
    ("op", "impl", "case"),
    [(op, impl, case) for op in OPS for impl in IMPLS[op] for case in COMPILED.get(op, contract(op).CASES)],
)
def test_under_torch_compile(op, impl, case, dtype, device, fp8_on_a_cpu, monkeypatch):
    """The compiled function follows the same rule. It is one graph: fullgraph=True raises at a graph break.

    On a CPU it is compiled without Inductor, whose C++ takes 3 s to compile for each case, and in fp32 only: the graph
    of eager PyTorch in bf16 is the same one.
    """
    inputs = case_inputs(op, case, dtype, device)
    function = load_compilable(op, impl, device, inputs)
    if "fp8" in inputs and device.type == "cuda":
        for variable in fp8.PTXAS_PATHS:
            monkeypatch.delenv(variable, raising=False)  # other tests compile with Triton's own ptxas
        if reason := fp8.choose_ptxas(device):
            pytest.skip(reason)
        monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # processes that run already keep the old one
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")

    def call(**arguments):  # Inductor cannot compile eager's check in float64, because Triton casts no float64 to fp8
        exact = "fp8" in arguments and arguments["x"].dtype == torch.float64
        return (function if exact else compiled)(**arguments)

    assert why_wrong(op, impl, call, inputs, dtype) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("impl", IMPLS["attention"])
def test_attention_compiles_for_any_length(impl, device):
    """From the second length on, lengths are symbols to torch.compile, so code must not take them for numbers."""
    function = load_compilable("attention", impl, device)
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for queries, keys in ((5, 5), (9, 9), (7, 7), (3, 11), (4, 13), (1, 7), (1, 8)):
        inputs = contract("attention").inputs((2, queries, 2, 16), keys=keys, dtype=common_dtype(device), device=device)
        try:
            expected = function(**inputs)
        except Unavailable:  # the backend does not support this shape, compiled or not
            continue
        torch.testing.assert_close(compiled(**inputs), expected, **attention_tolerance(expected.dtype))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("impl", ["reference", *IMPLS["attention"]])
def test_attention_ignores_keys_beyond_the_lengths(impl, queries, causal, device):
    """Each sequence gives the result of keys cut to its length, although large values are stored after them."""
    module, lengths, dtype = contract("attention"), (3, 17, 40), common_dtype(device)
    inputs = module.inputs((3, queries, 4, 16), keys=40, kv_heads=2, causal=causal, dtype=dtype, device=device)
    given = {"lengths": torch.tensor(lengths, dtype=torch.int32, device=device)}
    function = module.reference if impl == "reference" else load_or_skip("attention", impl, device, inputs | given)
    q, k, v = (inputs[name].detach() for name in "qkv")
    for row, length in enumerate(lengths):
        k[row, length:], v[row, length:] = 1e4, -1e4
    got = function(q, k, v, causal=causal, **given)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        cut = module.reference(q[one].double(), k[one, :length].double(), v[one, :length].double(), causal=causal)
        torch.testing.assert_close(got[one].double(), cut, **attention_tolerance(dtype))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", IMPLS["attention"])
def test_gradients_with_lengths_are_right_or_refused(impl, causal, device):
    """Callers ask for none. But a backward that ignored the lengths would give wrong numbers without a word."""
    sizes = {"keys": 40, "lengths": (5, 40), "causal": causal, "dtype": common_dtype(device), "device": device}
    inputs = contract("attention").inputs((2, 5, 2, 16), **sizes)
    attention = load_or_skip("attention", impl, device, inputs)
    q, k, v = (inputs.pop(name) for name in "qkv")
    out = attention(q, k, v, **inputs).sum()
    if impl in ("triton", "flash", "cudnn_frontend"):
        with pytest.raises(Unavailable, match=f"^attention={impl} has no gradients with lengths: choose attn=sdpa$"):
            out.backward()
        return
    exact = contract("attention").reference(q.double(), k.double(), v.double(), **inputs).sum()
    for got, right in zip(torch.autograd.grad(out, (q, k, v)), torch.autograd.grad(exact, (q, k, v)), strict=True):
        torch.testing.assert_close(got.double(), right.double(), **attention_tolerance(got.dtype))


@pytest.mark.exhaustive
@pytest.mark.parametrize("impl", IMPLS["loss"])
def test_rounding_errors_of_the_loss_average_out(impl, device):
    """The gradient of the head has an error below 2^-8 if all rows predict almost the same, as in the first steps.

    A rounding error that all rows share does not average out. Here log-probabilities are near -log 4000 = -8.3, where
    bf16 has an error of up to 1/32. So a loss with a bf16 log_softmax has an error above 2^-6. Rounding the gradient
    itself to bf16 gives an error of at most 2^-9.
    """
    function = load_or_skip("loss", impl, device, case_inputs("loss", "one_row", torch.bfloat16, device))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 8, generator=generator) + 0.01 * torch.randn(4096, 8, generator=generator)
    weight = 0.035 * torch.randn(4000, 8, generator=generator)
    targets = (x[0] @ weight.T).softmax(-1).multinomial(4096, replacement=True, generator=generator)

    def dweight_error(function):
        """Return ||dweight - exact|| / ||exact||, where `exact` is in float64."""
        leaf = weight.to(device, torch.bfloat16).requires_grad_()
        exact = leaf.detach().double().requires_grad_()
        rows = x.to(device, torch.bfloat16).requires_grad_()
        function(rows, leaf, targets.to(device)).backward()
        contract("loss").reference(rows.detach().double(), exact, targets.to(device)).backward()
        return ((leaf.grad.double() - exact.grad).norm() / exact.grad.norm()).item()

    def loss_with_bf16_log_softmax(x, weight, targets):
        log_probs = torch.nn.functional.linear(x, weight).log_softmax(-1)
        return torch.nn.functional.nll_loss(log_probs.float(), targets)

    assert dweight_error(function) < 2**-8
    assert dweight_error(loss_with_bf16_log_softmax) > 2**-6


def test_the_rule_fails_for_wrong_backends():
    """One norm computes the variance as E[x^2] - E[x]^2, inexact if the mean is far from 0. One omits the last row."""

    def inexact(x, residual, weight, bias, eps=1e-5):
        residual = residual + x
        variance = residual.square().mean(-1, keepdim=True) - residual.mean(-1, keepdim=True).square()
        return (residual - residual.mean(-1, keepdim=True)) * torch.rsqrt(variance + eps) * weight + bias, residual

    def omits_last_row(x, residual, weight, bias, eps=1e-5):
        y, residual = load("norm", "eager", torch.device("cpu"))(x, residual, weight, bias, eps)
        return y * (torch.arange(len(y)) < len(y) - 1).unsqueeze(-1), residual

    inputs = case_inputs("norm", "far_mean", torch.float32, "cpu")
    truth = outputs_and_gradients(contract("norm").reference, inputs, dtype=torch.float64)
    eager = outputs_and_gradients(load("norm", "eager", torch.device("cpu")), inputs)
    for broken in (inexact, omits_last_row):
        with pytest.raises(AssertionError, match="out0: error"):
            assert_as_good_as_eager(outputs_and_gradients(broken, inputs), eager, truth, inputs, torch.float32)
