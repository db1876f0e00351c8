"""Muon against a plain Muon and PyTorch's AdamW in float64, resumed, refused, accumulated, and on two ranks."""

import math

import pytest
import torch
from torch import nn

from kernels.registry import KernelsConfig, Unavailable, load
from lab.report.describe import kernels_cell
from model.muon import FlatMuon, Muon
from model.optim import OptimConfig
from model.optimizers import make_optimizer
from runtime.config import UserError
from tests.model.test_optim import ADAMW, DEVICE, LOSS, same
from tests.test_parallel import torchrun
from tests.test_train import ROOT

CONFIG = OptimConfig(**ADAMW, name="muon", momentum=0.9)
NO_INTERPRETER = "on a CPU it needs Triton's interpreter, which is off with a GPU"
HIDDEN = ["h.0.weight", "h.2.weight", "h.3.weight", "h.4.weight"]


class Net(nn.Module):
    """An embedding and its head, and four matrices in blocks: three of one shape, and a wide one; bias and norm."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(11, 6)
        square = [nn.Linear(6, 6) for _ in range(3)]
        self.h = nn.ModuleList([square[0], nn.LayerNorm(6), *square[1:], nn.Linear(6, 10)])
        self.lm_head = nn.Linear(10, 11, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens)
        for layer in self.h:
            x = layer(x)
        return self.lm_head(x).square().sum()


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(step):
    return torch.randint(11, (7,), generator=torch.Generator().manual_seed(step))


def muon(net, ranks=None, dtype=torch.float32, config=CONFIG, **options):
    return Muon(net, config, load("muon", "eager", torch.device("cpu")), ranks, dtype=dtype, **options)


def flat_muon(net, ranks=None, dtype=torch.float32, config=CONFIG, **options):
    if DEVICE == "cuda":
        pytest.skip(NO_INTERPRETER)
    adamw, op = load("adamw", "triton", torch.device("cpu")), load("muon", "eager", torch.device("cpu"))
    return FlatMuon(net, config, adamw, op, ranks, dtype, **options)


# Triton's interpreter rounds to bf16 wrongly, but not to fp16
DTYPES = pytest.mark.parametrize(
    ("make", "dtype"),
    [(muon, torch.float32), (muon, torch.bfloat16), (flat_muon, torch.float32), (flat_muon, torch.float16)],
)
BOTH = pytest.mark.parametrize("make", [muon, flat_muon])


def plain_muon(weight, gradient, momentum, lr, config):
    """Update a matrix in place, as Jordan et al. 2024 describe it, with the factor of Moonlight."""
    momentum.mul_(config.momentum).add_(gradient, alpha=1 - config.momentum)
    x = (1 - config.momentum) * gradient + config.momentum * momentum
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        if x.shape[0] > x.shape[1]:
            gram = x.T @ x
            x = 3.4445 * x + x @ (-4.7750 * gram + 2.0315 * gram @ gram)
        else:
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    weight.mul_(1 - lr * config.weight_decay).sub_(lr * 0.2 * math.sqrt(max(weight.shape)) * x)


@BOTH
def test_steps_equal_a_plain_muon_and_adamw_in_float64(make):
    """Weights and momentum of 5 clipped steps. Embedding, head and vectors are AdamW's; only matrices decay."""
    net = model()
    optimizer, expected = make(net), {name: w.detach().double().clone() for name, w in net.named_parameters()}
    momentum = {name: torch.zeros_like(expected[name]) for name in HIDDEN}
    others = {name: w.requires_grad_() for name, w in expected.items() if name not in HIDDEN}
    groups = [
        {"params": [w for w in others.values() if w.dim() == 2], "weight_decay": CONFIG.weight_decay},
        {"params": [w for w in others.values() if w.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(CONFIG.beta1, CONFIG.beta2))
    for step in range(1, 6):
        net(batch(step)).backward()
        gradients = {name: w.grad.double() for name, w in net.named_parameters()}
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        assert norm > CONFIG.grad_clip
        optimizer.accumulate()
        assert optimizer.step(1e-2, LOSS).item() == pytest.approx(norm.item(), rel=1e-5)
        gradients = {name: g * CONFIG.grad_clip / (norm + 1e-6) for name, g in gradients.items()}
        for name in HIDDEN:
            plain_muon(expected[name], gradients[name], momentum[name], 1e-2, CONFIG)
        for name, w in others.items():
            w.grad = gradients[name]
        adamw.step()
        for name, w in net.named_parameters():
            # Newton-Schulz makes an error of fp32 485 times as large, at most; a step is 1e-2 long
            torch.testing.assert_close(w.double(), expected[name].detach(), rtol=2**-20, atol=1e-2 * step * 2**-15)
            assert w.grad is None
    state = optimizer.state()
    assert list(state["momentum"]) == sorted(HIDDEN, key=lambda name: net.get_parameter(name).shape)
    assert state["exp_avg"].keys() == state["exp_avg_sq"].keys() == others.keys()
    for name in HIDDEN:
        torch.testing.assert_close(state["momentum"][name].double(), momentum[name], rtol=1e-4, atol=1e-6)
    shapes = {f"{group}.{name}": t.shape for group, tensors in state.items() for name, t in tensors.items()}
    assert optimizer.state_shapes() == shapes


@BOTH
def test_an_update_is_as_long_as_one_of_adamw(make):
    """Without decay, the RMS of the first step is 0.2 lr times a singular value between 0.68 and 1.21."""
    net = model()
    before = {name: net.get_parameter(name).detach().clone() for name in HIDDEN}
    optimizer = make(net, config=OptimConfig(**ADAMW | {"weight_decay": 0.0}, name="muon"))
    net(batch(1)).backward()
    gradients = {name: net.get_parameter(name).grad.clone() for name in HIDDEN}
    optimizer.accumulate()
    optimizer.step(1e-2, LOSS)
    for name in HIDDEN:
        values = torch.linalg.svdvals(gradients[name])
        rms = (net.get_parameter(name) - before[name]).square().mean().sqrt().item()
        assert rms < 1.21 * 0.2 * 1e-2
        if values.min() > 0.002 * values.norm():
            assert rms > 0.68 * 0.2 * 1e-2


def test_bf16_weights_have_fp32_masters_and_momentum():
    net = model(torch.bfloat16)
    optimizer = muon(net, dtype=torch.bfloat16)
    for step in range(1, 4):
        net(batch(step)).backward()
        optimizer.accumulate()
        optimizer.step(1e-4, LOSS)
    for weight, master in zip(net.parameters(), optimizer.masters, strict=True):
        assert (weight.dtype, master.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(weight, master.bfloat16())
    assert any(not torch.equal(w.float(), m) for w, m in zip(net.parameters(), optimizer.masters, strict=True))
    assert {t.dtype for tensors in optimizer.state().values() for t in tensors.values()} == {torch.float32}


@BOTH
def test_gradients_of_micro_steps_add_up(make):
    nets, weights = [model(), model()], []
    for net, parts in zip(nets, (3, 1), strict=True):
        optimizer = make(net)
        for step in range(3):
            if parts == 3:
                for part in range(3):
                    net(batch(10 * step + part)).backward()
                    optimizer.accumulate()
            else:
                (net(batch(10 * step)) + net(batch(10 * step + 1)) + net(batch(10 * step + 2))).backward()
                optimizer.accumulate()
            optimizer.step(1e-2, LOSS)
        weights.append([w.detach().clone() for w in net.parameters()])
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-18, atol=3e-2 * 2**-15)


def states(optimizer):
    return [t.clone() for tensors in optimizer.state().values() for t in tensors.values()]


@DTYPES
def test_a_step_that_is_not_finite_changes_nothing(make, dtype):
    """The third of five steps has a NaN. The run ends bit for bit as one without this step."""
    nets = [model(dtype), model(dtype)]
    optimizers = [make(net, dtype=dtype, stop=False) for net in nets]
    for net, optimizer, steps in zip(nets, optimizers, ([1, 2, 3, 4, 5], [1, 2, 4, 5]), strict=True):
        for step in steps:
            before = states(optimizer)
            net(batch(step)).backward()
            if step == 3:
                net.h[0].weight.grad[0, 0] = math.nan
            optimizer.accumulate()
            optimizer.step(1e-2, LOSS)
            assert same(before, states(optimizer)) == (step == 3)
    assert same(*map(states, optimizers))
    assert same(*(net.parameters() for net in nets))
    first = optimizers[0]
    assert (*map(int, (first.refused, first.first_refused, first.steps)), first.updates) == (1, 3, 5, 4)


@DTYPES
def test_an_optimizer_with_copied_state_makes_the_same_steps(make, dtype):
    nets = [model(dtype), model(dtype)]
    first, second = (make(net, dtype=dtype) for net in nets)

    def step(net, optimizer, number):
        net(batch(number)).backward()
        optimizer.accumulate()
        optimizer.step(1e-2, LOSS)

    for number in range(1, 4):
        step(nets[0], first, number)
    for group, tensors in second.state().items():
        for name, tensor in tensors.items():
            tensor.copy_(first.state()[group][name])
    second.load(first.steps, first.updates)
    for number in range(4, 7):
        step(nets[0], first, number)
        step(nets[1], second, number)
    assert same(nets[0].parameters(), nets[1].parameters())
    assert same(states(first), states(second))
    assert (int(second.steps), second.updates) == (6, 6)


def test_the_flat_optimizer_continues_from_the_state_of_the_other_one():
    """A checkpoint of one is a checkpoint of the other: after loading, both make the same step."""
    nets = [model(torch.float16), model(torch.float16)]
    first, second = muon(nets[0]), flat_muon(nets[1])
    for step in range(1, 4):
        nets[0](batch(step)).backward()
        first.accumulate()
        first.step(1e-2, LOSS)
    ours, theirs = second.state(), first.state()
    assert {group: list(tensors) for group, tensors in ours.items()} == first.state_names() == second.state_names()
    for group, tensors in ours.items():
        for name, tensor in tensors.items():
            tensor.copy_(theirs[group][name])
    second.load(int(first.steps), first.updates)
    assert same(*(net.parameters() for net in nets))
    for net, optimizer in zip(nets, (first, second), strict=True):
        net(batch(4)).backward()
        optimizer.accumulate()
        optimizer.step(1e-2, LOSS)
    for name, master in first.state()["model"].items():
        torch.testing.assert_close(second.state()["model"][name], master, rtol=2**-16, atol=1e-2 * 2**-15)
    assert all(torch.equal(w, m.half()) for w, m in zip(nets[1].parameters(), ours["model"].values(), strict=True))


def test_the_choice_of_the_backends(monkeypatch):
    net = model().to(DEVICE)
    optimizer = make_optimizer(net, CONFIG, dtype=torch.float32)
    assert isinstance(optimizer, Muon)
    if DEVICE == "cpu":
        assert optimizer.kernels == {"adamw": "auto (eager)", "muon": "auto (eager)"}
    kernels = make_optimizer(net, CONFIG, muon="triton", dtype=torch.float32).kernels
    assert kernels["muon"].startswith("triton (triton 3.")
    with pytest.raises(Unavailable, match=r"adamw=triton cannot run here: only kernels\.adamw=eager updates fp32"):
        make_optimizer(net, CONFIG, impl="triton")
    optimizer = make_optimizer(model(torch.float16).to(DEVICE), CONFIG, impl="triton", muon="triton")
    assert isinstance(optimizer, FlatMuon)
    assert {op: text.split()[0] for op, text in optimizer.kernels.items()} == {"adamw": "triton", "muon": "triton"}
    with pytest.raises(Unavailable, match=r"muon=gram cannot run here: it needs gram-newton-schulz==0\.1\.6"):
        make_optimizer(net, CONFIG, muon="gram")
    with monkeypatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        mine = str(ROOT / "kernels/adamw/_template.py")
        with pytest.raises(Unavailable, match="cannot run here: with optim=muon it needs an NVIDIA GPU"):
            make_optimizer(model(torch.bfloat16), CONFIG, impl=mine)
    monkeypatch.setattr("model.optimizers.is_sharded", lambda weight: True)
    with pytest.raises(Unavailable, match="optim=muon needs whole matrices: choose parallel=ddp or context, or"):
        make_optimizer(net, CONFIG)
    with pytest.raises(UserError, match=r"optim\.name=sgd: choose adamw, muon"):
        OptimConfig(**ADAMW, name="sgd")
    with pytest.raises(UserError, match=r"optim\.momentum=1\.0: it must be in \[0, 1\)"):
        OptimConfig(**ADAMW, momentum=1.0)


def test_a_table_names_the_optimizer_and_its_backend():
    kernels = vars(KernelsConfig(muon="triton"))
    assert kernels_cell({"config": {"kernels": kernels, "optim": {"name": "muon"}}}) == "eager, muon triton, Muon"
    assert kernels_cell({"config": {"kernels": vars(KernelsConfig()), "optim": {"name": "adamw"}}}) == "eager"


RANKS = """
import sys
sys.path.insert(0, {root!r})
import torch
from runtime.ranks import Ranks, join_ranks
from tests.model.test_muon import LOSS, batch, flat_muon, model, muon

computed = []

def train(make, dtype, ranks, divide):
    "The weights after three steps. With `divide`, each of the four micro-steps is on one rank."
    net = model(dtype)
    optimizer = make(net, ranks, dtype=dtype)
    op = optimizer.muon
    optimizer.muon = lambda matrices: computed.append(len(matrices)) or op(matrices)
    micro_steps = range(4)[ranks.rank :: ranks.world_size] if divide else range(4)
    for step in range(3):
        for micro_step in micro_steps:
            loss = net(batch(10 * step + micro_step)) / len(micro_steps)
            optimizer.backward(loss, last=micro_step == micro_steps[-1])
        optimizer.step(1e-2, torch.tensor(1.0))
    return [*net.parameters(), *(t for tensors in optimizer.state().values() for t in tensors.values())]

with join_ranks(torch.device("cpu")) as ranks:
    for make, dtype in ((muon, torch.float32), (muon, torch.bfloat16), (flat_muon, torch.float32)):
        computed.clear()
        same, alone = (train(make, dtype, job, divide=False) for job in (ranks, Ranks()))
        assert all(map(torch.equal, same, alone)), (make, dtype)
        assert computed[:2] == [2, 1], computed  # of three matrices, and of one
        assert computed[6:8] == [3, 1], computed
    for make in (muon, flat_muon):
        ours, again, alone = (train(make, torch.float32, job, divide=True) for job in (ranks, ranks, Ranks()))
        for a, b, c in zip(ours, again, alone, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c, rtol=2**-16, atol=3e-2 * 2**-14)
"""


@pytest.mark.usefixtures("quick_python")
def test_two_ranks_share_the_matrices_and_make_the_steps_of_one(tmp_path):
    """With the same batches on both ranks, every bit is that of one rank. With divided batches, the sums round."""
    if DEVICE == "cuda":
        pytest.skip(NO_INTERPRETER)
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(root=str(ROOT)))
    code, out, err = torchrun(tmp_path, script=script)
    assert (code, out) == (0, ""), err
