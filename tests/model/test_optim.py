"""The optimizer against AdamW computed by hand in float64, and the schedule of the learning rate."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kernels.adamw import MULTIPLE, triton
from kernels.registry import KernelsConfig, Unavailable, describe, load
from model.flat_adamw import FlatAdamW
from model.optim import OptimConfig, TorchAdamW, learning_rate, rename_impl
from model.optimizers import make_optimizer
from runtime.config import UserError

ADAMW = {
    "learning_rate": 1e-2,
    "min_lr": 1e-3,
    "warmup_steps": 4,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "grad_clip": 1.0,
}


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # with a GPU, Triton's interpreter is off
LOSS = torch.tensor(1.0)  # finite


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(dtype)


def batch(step):
    return torch.randn(7, 6, generator=torch.Generator().manual_seed(step))


def by_hand(weights, gradients, state, step, lr, config):
    """One step of AdamW in float64 by the paper (algorithm 2), after clipping. Returns the norm of the gradients."""
    norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
    for i, (w, g) in enumerate(zip(weights, gradients, strict=True)):
        g = g.double() * min(1.0, config.grad_clip / (norm + 1e-6))
        m, v = state.get(i, (torch.zeros_like(w), torch.zeros_like(w)))
        m, v = config.beta1 * m + (1 - config.beta1) * g, config.beta2 * v + (1 - config.beta2) * g * g
        state[i] = m, v
        if w.dim() >= 2:
            w *= 1 - lr * config.weight_decay
        w -= lr * (m / (1 - config.beta1**step)) / ((v / (1 - config.beta2**step)).sqrt() + 1e-8)
    return norm


def test_a_step_is_adamw_with_decay_of_matrices_only():
    """Weights and gradient norms of 5 steps equal those computed by hand."""
    net, config = model(), OptimConfig(**ADAMW)
    optimizer, state = TorchAdamW(net, config), {}
    expected = [w.detach().double().clone() for w in net.parameters()]
    for step in range(1, 6):
        (net(batch(step)).square().sum() * 10).backward()
        gradients = [w.grad.clone() for w in net.parameters()]
        optimizer.accumulate()
        norm = optimizer.step(1e-2, LOSS)
        assert norm.item() == pytest.approx(by_hand(expected, gradients, state, step, 1e-2, config), rel=1e-5)
        assert all(w.grad is None for w in net.parameters())
        for w, e in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(w.double(), e, rtol=1e-5, atol=1e-6)


def test_bf16_weights_have_fp32_masters():
    """1000 steps of 1e-5 move a weight of 1 by 1e-2. A bf16 weight without a master would lose each of them."""
    net = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    nn.init.ones_(net.weight)
    optimizer = TorchAdamW(net, OptimConfig(**ADAMW | {"weight_decay": 0.0, "grad_clip": 0.0}))
    for _ in range(1000):
        net.weight.grad = torch.ones_like(net.weight)
        optimizer.accumulate()
        optimizer.step(1e-5, LOSS)
    assert net.weight.dtype == torch.bfloat16
    torch.testing.assert_close(optimizer.masters[0], torch.full((4, 4), 1 - 1e-2), rtol=0, atol=1000 * 2**-24)
    assert torch.equal(net.weight, optimizer.masters[0].bfloat16())


def test_bf16_gradients_add_up_in_fp32():
    """257 gradients of 1 have the sum 257. In bf16 the sum would stop at 256."""
    net = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    optimizer = TorchAdamW(net, OptimConfig(**ADAMW))
    for _ in range(257):
        net.weight.grad = torch.ones_like(net.weight)
        optimizer.accumulate()
        assert net.weight.grad is None
    assert torch.equal(optimizer.masters[0].grad, torch.full((4, 4), 257.0))
    assert optimizer.step(0.0, LOSS).item() == 257 * 4


def five_steps_with_a_nan(stop):
    """The weights after each of five steps, and the optimizer. The third step has a NaN among its gradients."""
    net = model()
    optimizer, weights = TorchAdamW(net, OptimConfig(**ADAMW), stop=stop), []
    for step in range(1, 6):
        net(batch(step)).square().sum().backward()
        if step == 3:
            net[0].weight.grad[0, 0] = math.nan
        optimizer.accumulate()
        optimizer.step(1e-2, LOSS)
        weights.append([w.detach().clone() for w in net.parameters()])
    return weights, optimizer


def same(a, b):
    return all(map(torch.equal, a, b))


def test_a_step_that_is_not_finite_changes_nothing():
    """Without `stop`, the run ends as one without this step. With `stop`, no later step changes a weight."""
    weights, optimizer = five_steps_with_a_nan(stop=False)
    assert same(weights[1], weights[2])
    assert not same(weights[2], weights[3])
    counters = optimizer.refused, optimizer.first_refused, optimizer.steps
    assert (*map(int, counters), optimizer.updates) == (1, 3, 5, 4)
    assert int(optimizer.refused_in_a_row) == 0
    net = model()
    without = TorchAdamW(net, OptimConfig(**ADAMW))
    for step in (1, 2, 4, 5):
        net(batch(step)).square().sum().backward()
        without.step(1e-2, LOSS)
    assert same(weights[4], net.parameters())

    weights, optimizer = five_steps_with_a_nan(stop=True)
    assert same(weights[1], weights[4])
    assert (int(optimizer.refused), int(optimizer.first_refused), optimizer.updates) == (3, 3, 2)
    assert int(optimizer.refused_in_a_row) == 3


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_refused(loss):
    net = model()
    before = [w.detach().clone() for w in net.parameters()]
    optimizer = TorchAdamW(net, OptimConfig(**ADAMW))
    net(batch(1)).square().sum().backward()
    optimizer.step(1e-2, torch.tensor(loss))
    assert same(before, net.parameters())
    assert int(optimizer.first_refused) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_with_copied_state_makes_the_same_steps(dtype):
    """After 3 steps the state is copied into another optimizer. 3 more steps of both give bit-equal weights."""
    nets = [model(dtype), model(dtype)]
    first, second = (TorchAdamW(net, OptimConfig(**ADAMW)) for net in nets)

    def step(net, optimizer, number):
        net(batch(number).to(dtype)).square().sum().backward()
        optimizer.accumulate()
        optimizer.step(1e-2, LOSS)

    for number in range(1, 4):
        step(nets[0], first, number)
    for group, tensors in second.state().items():
        for name, tensor in tensors.items():
            assert tensor.dtype == torch.float32
            tensor.copy_(first.state()[group][name])
    second.load(first.steps, first.updates)
    assert same(nets[0].parameters(), nets[1].parameters())
    for number in range(4, 7):
        step(nets[0], first, number)
        step(nets[1], second, number)
    assert same(nets[0].parameters(), nets[1].parameters())
    assert (int(second.steps), second.updates) == (6, 6)


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_flat_adamw_makes_the_steps_of_torch_adamw(impl, micro_steps, stop):
    """Weights, masters, moments, norms and counters of five steps, the third of which is refused.

    The weights are in fp16, because Triton's interpreter rounds to bf16 wrongly. The norms are summed in another order,
    and may differ by 2^-20 of their size. Masters and moments may then differ by some such units.
    """
    nets = [model(torch.float16).to(DEVICE) for _ in range(2)]
    config = OptimConfig(**ADAMW)
    torch_adamw, flat = (
        TorchAdamW(nets[0], config, stop=stop),
        FlatAdamW(nets[1], config, load("adamw", impl, torch.device(DEVICE)), stop=stop),
    )
    assert all(weight.data_ptr() % 128 == flat.flat_weight.data_ptr() % 128 for weight in nets[1].parameters())
    for step in range(1, 6):
        norms = []
        for net, optimizer in zip(nets, (torch_adamw, flat), strict=True):
            for micro_step in range(micro_steps):
                net(batch(10 * step + micro_step).to(DEVICE, torch.float16)).square().sum().backward()
                if step == 3 and micro_step == 0:
                    net[0].weight.grad[0, 0] = math.nan
                optimizer.accumulate()
                assert all(weight.grad is None for weight in net.parameters())
            norms.append(optimizer.step(1e-2, LOSS.to(DEVICE)))
        torch.testing.assert_close(*norms, rtol=2**-20, atol=0, equal_nan=True)
        nets[0].load_state_dict(nets[1].state_dict())  # otherwise the next gradients differ by a unit of fp16
    for group, tensors in torch_adamw.state().items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(flat.state()[group][name], tensor, rtol=2**-16, atol=2**-24)
    for name in ("steps", "refused", "first_refused", "updates"):
        assert int(getattr(flat, name)) == int(getattr(torch_adamw, name)), name


def test_flat_adamw_continues_from_the_state_of_torch_adamw():
    """A checkpoint of one is a checkpoint of the other: after loading, both make the same step."""
    nets = [model(torch.float16).to(DEVICE) for _ in range(2)]
    first, second = TorchAdamW(nets[0], OptimConfig(**ADAMW)), FlatAdamW(nets[1], OptimConfig(**ADAMW), triton.adamw)
    for step in range(1, 4):
        nets[0](batch(step).to(DEVICE, torch.float16)).square().sum().backward()
        first.accumulate()
        first.step(1e-2, LOSS.to(DEVICE))
    for group, tensors in second.state().items():
        for name, tensor in tensors.items():
            tensor.copy_(first.state()[group][name])
    second.load(int(first.steps), first.updates)
    assert same(nets[0].parameters(), nets[1].parameters())
    for net, optimizer in zip(nets, (first, second), strict=True):
        net(batch(4).to(DEVICE, torch.float16)).square().sum().backward()
        optimizer.accumulate()
        optimizer.step(1e-2, LOSS.to(DEVICE))
    for name, tensor in first.state()["model"].items():
        torch.testing.assert_close(second.state()["model"][name], tensor, rtol=2**-16, atol=2**-24)


def test_the_choice_of_the_optimizer(monkeypatch, tmp_path):
    """On a CPU it is PyTorch's by default. kernels.adamw=triton says why it cannot run."""
    config, device = OptimConfig(**ADAMW), torch.device("cpu")
    optimizer = make_optimizer(model(torch.bfloat16), config)
    assert isinstance(optimizer, TorchAdamW)
    assert optimizer.kernels == {"adamw": "auto (eager)"} == {"adamw": auto_kernel(device)}
    assert make_optimizer(model(), config, impl="eager").kernels["adamw"] == f"eager (torch {torch.__version__})"
    optimizer = make_optimizer(model(torch.float16).to(DEVICE), config, impl="triton")
    assert isinstance(optimizer, FlatAdamW)
    assert optimizer.kernels["adamw"].startswith("triton (triton 3.")
    mine = tmp_path / "mine.py"
    mine.write_text("from kernels.adamw._template import adamw")
    optimizer = make_optimizer(model(torch.bfloat16), config, impl=str(mine))
    assert isinstance(optimizer, FlatAdamW)
    with pytest.raises(Unavailable, match=r"adamw=triton cannot run here: only kernels\.adamw=eager updates fp32"):
        make_optimizer(model(), config, impl="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(Unavailable, match="adamw=triton cannot run here: it needs an NVIDIA GPU"):
        make_optimizer(model(torch.bfloat16), config, impl="triton")
    with pytest.raises(UserError, match=r"optim\.impl=apex: choose torch, triton or null"):
        OptimConfig(**ADAMW, impl="apex")


def auto_kernel(device):
    return describe("adamw", "auto", shape=(MULTIPLE,), dtype=torch.bfloat16, device=device)


@pytest.mark.parametrize(("old", "name"), [("torch", "eager"), ("triton", "triton")])
def test_optim_impl_is_an_alias_of_kernels_adamw(capsys, old, name):
    config, kernels = OptimConfig(**ADAMW, impl=old), KernelsConfig()
    assert kernels.adamw == "auto"
    for _ in range(2):
        rename_impl(config, kernels)
        assert (config.impl, kernels.adamw) == (None, name)
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"and the next release does not know it: write kernels.adamw={name}")
    with pytest.raises(UserError, match=f"old name of kernels.adamw={name}, but kernels.adamw=mine: remove optim.impl"):
        rename_impl(OptimConfig(**ADAMW, impl=old), SimpleNamespace(adamw="mine"))


def test_the_schedule_of_the_learning_rate():
    """A linear warm-up of 4 steps, half a cosine to step 24, and min_lr after it."""
    config = OptimConfig(**ADAMW)
    rates = [learning_rate(config, step, last=24) for step in range(1, 31)]
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert rates[13] == pytest.approx((1e-2 + 1e-3) / 2)  # step 14 is half way from 4 to 24
    assert rates[23:] == pytest.approx([1e-3] * 7)
    assert all(a > b for a, b in pairwise(rates[3:24]))
    assert learning_rate(OptimConfig(**ADAMW | {"warmup_steps": 0}), 1, last=1) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": -1.0}, "optim.learning_rate=-1.0: it must be finite and not negative"),
        ({"beta2": 1.0}, r"optim.beta2=1.0: it must be in \[0, 1\)"),
        ({"min_lr": 1.0}, "optim.min_lr=1.0 is above optim.learning_rate=0.01"),
    ],
)
def test_impossible_settings(changes, message):
    with pytest.raises(UserError, match=message):
        OptimConfig(**ADAMW | changes)
