"""Statuses of backends that are right, wrong, unavailable or broken, from processes of their own."""

import re

import pytest
import torch

from kernels.registry import OPS, Unavailable, backend, contract
from lab.bench.probe import Probe, matrix_probes, probe_status, run_probes

CPU = torch.device("cpu")
NORM = Probe("norm", "eager", {"shape": (3, 64)}, torch.float32)


@pytest.mark.usefixtures("quick_python")
def test_another_process_continues_after_a_failure():
    bad = NORM._replace(shape={"shapes": (3, 64)})
    first, second = run_probes([[NORM, bad, NORM], [NORM]], CPU, limit=60)
    assert [status.partition(":")[0] for status in first] == ["ok", "failed", "ok"]
    assert re.match(r"failed: TypeError: .* 'shapes'", first[1])
    assert len(second) == 1


def test_a_lack_of_time_or_memory_decides_nothing():
    """A petabyte of inputs, and a limit in which no process starts. Another process continues."""
    large = NORM._replace(shape={"shape": (2**24, 2**24)})
    [statuses] = run_probes([[large, NORM]], CPU, limit=60)
    assert re.match(r"undecided: RuntimeError: .*DefaultCPUAllocator", statuses[0])
    assert statuses[1].startswith("ok: ")
    assert list(run_probes([[NORM]], CPU, limit=0)) == [["undecided: no answer within 0 s"]]


class Half(torch.autograd.Function):
    """The identity, with half of its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx / 2


def test_eager_is_compared_with_the_formula(monkeypatch):
    """Eager is the baseline of the other backends, so a comparison with itself would say nothing."""
    module = backend("norm", "eager")
    right = module.norm
    assert probe_status(NORM, CPU) == f"ok: torch {torch.__version__}"
    monkeypatch.setattr(module, "norm", lambda x, residual, weight, bias: right(x, residual, weight, bias, eps=0.1))
    assert probe_status(NORM, CPU).startswith("wrong: out0: error ")
    monkeypatch.setattr(module, "norm", lambda x, *rest, **more: right(Half.apply(x), *rest, **more))
    assert probe_status(NORM, CPU).startswith("wrong: d_x: error ")
    assert probe_status(NORM._replace(backward=False), CPU).startswith("ok: ")


def test_a_backend_that_refuses_is_unavailable(monkeypatch):
    """It refuses by raising Unavailable, or because it lacks an argument."""

    def refuses(*inputs, **more):
        raise Unavailable("norm=eager takes no fp8")

    monkeypatch.setattr(backend("norm", "eager"), "norm", refuses)
    assert probe_status(NORM, CPU) == "unavailable: norm=eager takes no fp8"
    monkeypatch.setattr(backend("attention", "eager"), "attention", lambda q, k, v, *, causal=True, scale=None: q)
    status = probe_status(Probe("attention", "eager", {"shape": (1, 8, 2, 16), "window": 3}, torch.float32), CPU)
    assert re.match(r"unavailable: attention=eager cannot run this: .* takes no window .*: choose attn=", status)


def writes_its_input(right):
    def norm(x, *rest, **more):
        results = right(x, *rest, **more)
        x.detach().zero_()
        return results

    return norm


def gives_other_bits(right):
    calls = iter(range(10))
    return lambda x, *rest, **more: right(x * (1 + 1e-7 * next(calls)), *rest, **more)


def leaves_an_element(right):
    """The last element of y is what the memory held, which is usually 0 in a new process."""

    def norm(x, *rest, **more):
        y, residual = right(x, *rest, **more)
        return torch.cat([y.flatten()[:-1], torch.empty(1)]).view_as(y), residual

    return norm


@pytest.mark.parametrize(
    ("break_norm", "status"),
    [
        (writes_its_input, "wrong: it writes to its input x"),
        (gives_other_bits, "wrong: two calls give other bits in out0"),
        (leaves_an_element, "wrong: out0: error nan"),
    ],
)
def test_a_probe_sees_what_numbers_alone_do_not_show(break_norm, status, monkeypatch):
    module = backend("norm", "eager")
    assert probe_status(NORM, CPU).startswith("ok: ")
    monkeypatch.setattr(module, "norm", break_norm(module.norm))
    assert probe_status(NORM, CPU).startswith(status)


@pytest.mark.parametrize("op", OPS)
def test_the_matrix_has_every_size(op):
    columns = matrix_probes(op, "eager", torch.device("cuda"))
    sizes = [int(size) for size in contract(op).SIZES]
    assert [int(size) for size in columns["bf16"]] == sizes
    assert columns["compile"]["bf16"].compiled
    probes = [probe for values in columns.values() for probe in values.values()]
    assert {probe.shape["shape"][-1] for probe in probes} >= set(sizes)
    for probe in probes:
        if probe.shape["shape"][-1] <= 768:
            assert contract(op).inputs(**probe.shape, dtype=probe.dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton has no interpreter beside a GPU")
def test_what_tritons_interpreter_cannot_run_of_a_users_file_is_not_wrong():
    probe = NORM._replace(impl="course/05_norm.py")
    assert probe_status(probe, CPU).startswith("ok: ")
    bf16, compiled = probe._replace(dtype=torch.bfloat16), probe._replace(compiled=True)
    assert "in Triton's interpreter gives wrong results in bfloat16" in probe_status(bf16, CPU)
    assert probe_status(compiled, CPU) == "unavailable: torch.compile cannot trace Triton's interpreter"
