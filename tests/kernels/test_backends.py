"""Every backend of every op, against reference() in float64. A new file in an op's folder is tested by being there.

The rule is kernels/check.py's: twice what eager itself loses at that dtype on the same numbers. Eager has to be right
in float64 first.
"""

import functools
import inspect
import zlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from kernels.check import evaluate, tensors, wrong
from kernels.registry import OPS, Unavailable, backend, contract, impls, keeps, load
from model.gpt import kept_or_not

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
BACKENDS = [pytest.param(op, impl, id=f"{op}-{impl}") for op in OPS for impl in impls(op)]
CASES = [
    pytest.param(op, impl, case, id=f"{op}-{impl}-{case}")
    for op in OPS
    for impl in impls(op)
    for case in contract(op).CASES
]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture
def poison(monkeypatch):
    """torch.empty and its kin give NaN: what a kernel forgets to write is seen."""

    def poisoned(make):
        @functools.wraps(make)
        def make_nan(*args, **kwargs):
            tensor = make(*args, **kwargs)
            real = tensor.is_floating_point() and not isinstance(tensor, FakeTensor)
            return tensor.fill_(float("nan")) if real else tensor

        return make_nan

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def usable(op, impl, device, inputs=None):
    """The op's function, or a skip with the backend's own reason: for this device, or for these inputs."""
    inputs = inputs or {}
    try:
        function = load(op, impl, device)
        if missing := inputs.keys() - inspect.signature(function).parameters.keys():
            pytest.skip(f"{op}={impl} takes no {', '.join(missing)}")
        floats = [tensor.dtype for tensor in tensors(inputs.values())]
        if floats and (device.type == "cuda" or torch.bfloat16 in floats):
            function(**inputs)  # Triton's interpreter has no bf16, and some kernels nothing else
    except Unavailable as why:
        pytest.skip(str(why))
    return function


def common(device):
    """A dtype that every backend takes there."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def rounding(dtype):
    """What attention over few keys may lose, or win, in another order: its weights and values are rounded to dtype."""
    off = max(1e-5, 4 * torch.finfo(dtype).eps)
    return {"rtol": off, "atol": off}


def assert_as_good_as_eager(got, eager, truth, inputs, dtype):
    assert (why := wrong(got, eager, truth, inputs, dtype)) is None, why


def case_inputs(op, case, dtype, device):
    return contract(op).inputs(**contract(op).CASES[case], dtype=dtype, device=device, seed=zlib.crc32(case.encode()))


@pytest.mark.parametrize(("op", "case"), [(op, case) for op in OPS for case in contract(op).CASES])
def test_eager_is_the_formula(op, case):
    """In float64 eager and reference agree to rounding, outputs and gradients: the yardstick itself is right."""
    inputs = case_inputs(op, case, torch.float64, "cpu")
    truth = evaluate(contract(op).reference, inputs)
    got = evaluate(load(op, "eager", torch.device("cpu")), inputs)
    for name, exact in truth.items():
        # sums of up to 1e4 terms, each rounded at 1.1e-16
        torch.testing.assert_close(got[name], exact, rtol=1e-10, atol=1e-12 * max(1, exact.abs().max().item()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "impl", "case"), CASES)
def test_against_float64(op, impl, case, dtype, device, poison):
    inputs = case_inputs(op, case, dtype, device)
    function = usable(op, impl, device, inputs)
    truth = evaluate(contract(op).reference, inputs, dtype=torch.float64)
    eager = evaluate(load(op, "eager", device), inputs)
    assert_as_good_as_eager(evaluate(function, inputs), eager, truth, inputs, dtype)


@pytest.mark.parametrize(("op", "impl"), BACKENDS)
def test_expanded_gradients(op, impl, device, poison):
    """`out.sum().backward()` hands down a gradient of stride 0, and so does a broadcast."""
    inputs = case_inputs(op, "non_contiguous" if op != "attention" else "packed", common(device), device)
    function = usable(op, impl, device, inputs)
    truth = evaluate(contract(op).reference, inputs, expand=True, dtype=torch.float64)
    eager = evaluate(load(op, "eager", device), inputs, expand=True)
    assert_as_good_as_eager(evaluate(function, inputs, expand=True), eager, truth, inputs, common(device))


@pytest.mark.parametrize(("op", "impl"), BACKENDS)
def test_nothing_given_is_written_to(op, impl, device):
    """Neither the arguments nor the incoming gradients change."""
    inputs = case_inputs(op, next(iter(contract(op).CASES)), common(device), device)
    function = usable(op, impl, device, inputs)
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    outputs = function(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    douts = [torch.randn_like(out) for out in outputs]
    kept = [dout.clone() for dout in douts]
    torch.autograd.grad(outputs, tensors(inputs.values()), douts)
    assert all(torch.equal(inputs[name], value) for name, value in before.items())
    assert all(torch.equal(dout, copy) for dout, copy in zip(douts, kept, strict=True))


@pytest.mark.parametrize(("op", "impl"), BACKENDS)
def test_under_a_checkpoint(op, impl, device):
    """Computed again in the backward, as with model.checkpointing=block, it is what it was, but for sums by atomics."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # all backends have it there
    inputs = case_inputs(op, next(iter(contract(op).CASES)), dtype, device)
    function = usable(op, impl, device, inputs)
    again = evaluate(functools.partial(checkpoint, function, use_reentrant=False), inputs)
    ulp = 2 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-5
    for name, kept in evaluate(function, inputs).items():
        torch.testing.assert_close(again[name], kept, rtol=ulp, atol=ulp * kept.abs().max().item())


@pytest.mark.parametrize("impl", [impl for impl in impls("attention") if hasattr(backend("attention", impl), "KEEPS")])
def test_under_a_checkpoint_that_keeps_attention(impl, device):
    """What KEEPS names runs once where it ran twice, and all is what it was."""
    names, seen = backend("attention", impl).KEEPS, []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.extend([func.name()] * (func.name() in names))
            return func(*args, **(kwargs or {}))

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = case_inputs("attention", next(iter(contract("attention").CASES)), dtype, device)
    function = usable("attention", impl, device, inputs)
    policy = functools.partial(kept_or_not, keeps(function))
    contexts = {}, {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}
    found, times = [], []
    for context in contexts:
        seen.clear()
        with Seen():
            found.append(evaluate(functools.partial(checkpoint, function, use_reentrant=False, **context), inputs))
        times.append(len(seen))
    assert times == [2, 1]
    ulp = 2 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-5
    for name, kept in found[0].items():
        torch.testing.assert_close(found[1][name], kept, rtol=ulp, atol=ulp * kept.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "impl"), BACKENDS)
def test_twice_the_same_bits(op, impl, dtype, device):
    """Outputs and gradients of two calls, with enough rows that many programs add to one sum."""
    if device.type == "cuda" and not getattr(backend(op, impl), "deterministic", True):
        pytest.skip(f"{op}={impl} says that they may differ")
    rows = 4096 if device.type == "cuda" else 64
    shape = {"shape": (2, rows, 2, 64)} if op == "attention" else {"shape": (rows, 768)}
    inputs = contract(op).inputs(**shape, **({"vocab": 1000} if op == "loss" else {}), dtype=dtype, device=device)
    function = usable(op, impl, device, inputs)
    first, second = (evaluate(function, inputs) for _ in range(2))
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


COMPILED = {
    "norm": ["768", "fp32_residual", "plain"],
    "attention": ["64", "gqa", "decode", "lengths", "window", "documents"],
    "mlp": ["768", "no_bias"],
    "loss": ["768", "some_ignored", "all_ignored"],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("op", "impl", "case"), [(op, impl, case) for op in OPS for impl in impls(op) for case in COMPILED[op]]
)
def test_compiled_is_uncompiled(op, impl, case, dtype, device):
    """fullgraph=True: no graph break; and the same rule holds for what the compiler made of it."""
    inputs = case_inputs(op, case, dtype, device)
    function = usable(op, impl, device, inputs)
    truth = evaluate(contract(op).reference, inputs, dtype=torch.float64)
    eager = evaluate(load(op, "eager", device), inputs)
    torch.compiler.reset()
    got = evaluate(torch.compile(function, fullgraph=True), inputs)
    assert_as_good_as_eager(got, eager, truth, inputs, dtype)


@pytest.mark.parametrize("impl", impls("attention"))
def test_attention_traces_for_any_length(impl, device):
    """As the lengths of prompts differ, torch.compile makes symbols of them, and a comparison of symbols is no bool."""
    function = usable("attention", impl, device)
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for queries, keys in ((5, 5), (9, 9), (7, 7), (3, 11), (4, 13), (1, 7), (1, 8)):
        inputs = contract("attention").inputs((2, queries, 2, 16), keys=keys, dtype=common(device), device=device)
        try:
            expected = function(**inputs)
        except Unavailable:  # of this shape, and then compiled as well
            continue
        torch.testing.assert_close(compiled(**inputs), expected, **rounding(expected.dtype))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("impl", ["reference", *impls("attention")])
def test_lengths_are_shorter_keys(impl, queries, causal, device):
    """Each row as if its keys ended there, whatever stands behind them, to the rounding of weights and values."""
    module, lengths, dtype = contract("attention"), (3, 17, 40), common(device)
    inputs = module.inputs((3, queries, 4, 16), keys=40, kv_heads=2, causal=causal, dtype=dtype, device=device)
    given = {"lengths": torch.tensor(lengths, dtype=torch.int32, device=device)}
    function = module.reference if impl == "reference" else usable("attention", impl, device, inputs | given)
    q, k, v = (inputs[name].detach() for name in "qkv")
    for row, length in enumerate(lengths):
        k[row, length:], v[row, length:] = 1e4, -1e4
    got = function(q, k, v, causal=causal, **given)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = module.reference(q[one].double(), k[one, :length].double(), v[one, :length].double(), causal=causal)
        torch.testing.assert_close(got[one].double(), alone, **rounding(dtype))


@pytest.mark.parametrize("impl", impls("loss"))
def test_rounding_of_the_loss_does_not_add_up(impl, device):
    """Rows that predict alike, as in the first steps of a training: a rounding that they share does not average out.

    Log-probabilities near -8 rounded to bf16 are off by up to 1/64, which is what nanoGPT's autocast does; bf16
    gradients are off by 2^-9 of themselves. The root mean square over the vocabulary is some 10 times as large.
    """
    function = usable("loss", impl, device, case_inputs("loss", "one_row", torch.bfloat16, device))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 8, generator=generator) + 0.01 * torch.randn(8192, 8, generator=generator)
    weight = 0.035 * torch.randn(4000, 8, generator=generator)
    targets = (x[0] @ weight.T).softmax(-1).multinomial(8192, replacement=True, generator=generator)

    def off(function):
        """The error of dweight against float64, relative, in the root mean square."""
        leaf = weight.to(device, torch.bfloat16).requires_grad_()
        exact = leaf.detach().double().requires_grad_()
        rows, wanted = x.to(device, torch.bfloat16).requires_grad_(), targets.to(device)
        function(rows, leaf, wanted).backward()
        contract("loss").reference(rows.detach().double(), exact, wanted).backward()
        return ((leaf.grad.double() - exact.grad).norm() / exact.grad.norm()).item()

    def rounded(x, weight, targets):
        log_probs = torch.nn.functional.linear(x, weight).log_softmax(-1)
        return torch.nn.functional.nll_loss(log_probs.float(), targets)

    assert off(function) < 2**-8
    assert off(rounded) > 2**-6


def test_the_rule_can_fail():
    """A variance as E[x^2] - E[x]^2 loses its digits where the mean is far from zero; and a row can be forgotten."""

    def careless(x, residual, weight, bias, eps=1e-5):
        residual = residual + x
        variance = residual.square().mean(-1, keepdim=True) - residual.mean(-1, keepdim=True).square()
        return (residual - residual.mean(-1, keepdim=True)) * torch.rsqrt(variance + eps) * weight + bias, residual

    def forgetful(x, residual, weight, bias, eps=1e-5):
        y, residual = load("norm", "eager", torch.device("cpu"))(x, residual, weight, bias, eps)
        return y * (torch.arange(len(y)) < len(y) - 1).unsqueeze(-1), residual

    inputs = case_inputs("norm", "far_mean", torch.float32, "cpu")
    truth = evaluate(contract("norm").reference, inputs, dtype=torch.float64)
    eager = evaluate(load("norm", "eager", torch.device("cpu")), inputs)
    for broken in (careless, forgetful):
        with pytest.raises(AssertionError, match="out0: error"):
            assert_as_good_as_eager(evaluate(broken, inputs), eager, truth, inputs, torch.float32)
