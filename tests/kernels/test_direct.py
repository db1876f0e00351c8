"""custom_op(): an operator has the same results without the dispatcher, and observers still see operators."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.direct import custom_op

calls = []


def launch_forward(x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    calls.append("forward")
    return x * (2 * factor), x.new_ones(len(x))


def empty_outputs(x, factor):
    return torch.empty_like(x), x.new_empty(len(x))


def launch_backward(dy: Tensor, factor: float) -> Tensor:
    calls.append("backward")
    return dy * (2 * factor)


twice_bwd = custom_op("hotswap_test::twice_bwd", launch_backward, lambda dy, factor: torch.empty_like(dy))


def setup_context(ctx, inputs, output):
    ctx.factor = inputs[1]
    ctx.save_for_backward(output[1])
    ctx.set_materialize_grads(False)


def backward(ctx, dy, dones):
    [ones] = ctx.saved_tensors
    return twice_bwd(dy * ones, ctx.factor), None


twice = custom_op("hotswap_test::twice", launch_forward, empty_outputs, backward, setup_context)


@pytest.fixture
def x():
    calls.clear()
    return torch.arange(3.0, requires_grad=True)


def gradient(x, function=twice):
    [dx] = torch.autograd.grad(function(x, 3.0)[0].sum(), [x])
    return dx.tolist()


def dispatched_operators(work):
    """Return the names of our operators that a profiler sees in the dispatcher."""
    with torch.profiler.profile() as profiler:
        work()
    return {event.name for event in profiler.events() if event.name.startswith("hotswap_test")}


def test_forward_and_backward(x):
    """Each call runs the Python function once."""
    assert twice(x, 3.0)[0].tolist() == [0, 6, 12]
    assert gradient(x) == [6, 6, 6]
    assert calls == ["forward", "forward", "backward"]
    with torch.no_grad():
        assert not twice(x, 3.0)[0].requires_grad


def test_the_dispatcher_is_not_called(x, monkeypatch):
    def fail(*_):
        raise AssertionError("the dispatcher was called")

    monkeypatch.setattr(torch._library.custom_ops.CustomOpDef, "__call__", fail)
    assert gradient(x) == [6, 6, 6]


def test_a_second_derivative_raises(x):
    """twice_bwd has no backward, so a second derivative would lack a term. The error names the file."""
    y, _ = twice(x.square(), 3.0)
    with pytest.raises(RuntimeError, match=r"^tests.kernels.test_direct has no second derivative .*: choose "):
        torch.autograd.grad(y.sum(), [x], create_graph=True)


def test_a_profiler_sees_the_operators(x):
    assert dispatched_operators(lambda: gradient(x)) == {"hotswap_test::twice", "hotswap_test::twice_bwd"}


def test_fake_tensors_run_no_kernel(x):
    """The fake outputs have the right shapes."""
    with FakeTensorMode():
        y, ones = twice(torch.empty(5, requires_grad=True), 3.0)
        assert (y.shape, ones.shape) == ((5,), (5,))
    assert calls == []


def test_torch_compile_makes_one_graph(x):
    """fullgraph=True raises at a graph break. The gradient is right in the first and the second call."""
    compiled = torch.compile(lambda x, factor: twice(x * 2, factor), fullgraph=True, backend="aot_eager")
    assert gradient(x, compiled) == [12, 12, 12]
    assert gradient(x, compiled) == [12, 12, 12]
    assert calls == ["forward", "backward"] * 2  # tracing used fake tensors, so it called neither
