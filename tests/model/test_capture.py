"""Steps from a CUDA graph against uncaptured steps.

On a CPU, a graph that records operators and runs them again takes the place of the CUDA graph.
"""

import gc
import warnings
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.registry import AttnConfig, KernelsConfig
from lab.compat import tree_leaves
from model import capture
from model.config import GPTConfig
from model.optim import OptimConfig
from model.optimizers import make_optimizer
from model.step import build, train_step
from runtime.config import UserError

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 64, "pos": "learned", "bias": True}
ADAMW = {"learning_rate": 1e-2, "min_lr": 0.0, "warmup_steps": 0, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95}
CPU = torch.device("cpu")


class RecordedGraph(TorchDispatchMode):
    """A CUDA graph for the CPU: it records operators with their arguments, and a replay runs them on the same tensors.

    As in a CUDA graph, a number from the host keeps its value. Unlike a CUDA graph, recording runs the operators, so
    the first replay does nothing.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.replays = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        if self.replays == 1:
            return
        for func, args, kwargs, out in self.calls:
            results = func(*args, **kwargs)
            for new, old in zip(tree_leaves(results), tree_leaves(out), strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)


@contextmanager
def recording(graph, capture_error_mode):
    with graph:
        yield


@pytest.fixture
def recorded_graphs(monkeypatch):
    """Let StepRunner capture on a CPU."""
    monkeypatch.setattr(capture, "reason_against", lambda *_: None)
    monkeypatch.setattr(capture, "reason_against_size", lambda _: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)


def trainer(device=CPU, kernels=None, attn="sdpa", precision="fp32", optim="adamw", **changes):
    config = GPTConfig(**SHAPE | {"dropout": 0.0} | changes)
    model = build(config, kernels or KernelsConfig(), AttnConfig(attn), precision, device, seed=1)
    return model, make_optimizer(model, OptimConfig(**ADAMW, grad_clip=0.5, name=optim))


def batches_of(step, micro_steps, device=CPU):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(64, (micro_steps, 2, 3, 16), generator=generator).to(device)
    return [tuple(pair) for pair in tokens]


def run(step, model, optimizer, micro_steps, device=CPU, broken=5):
    """Losses, norms, counters and weights of six steps. In step `broken` a weight is NaN."""
    torch.manual_seed(3)
    results = []
    for number in range(1, 7):
        weight = optimizer.weights[0]
        if number == broken:
            with torch.no_grad():
                weight[0, 0] = torch.nan
        loss, norm = step(batches_of(number, micro_steps, device), 1e-2 / number)
        results.append(torch.stack([loss, norm]).clone())
    counters = [optimizer.refused, optimizer.first_refused, optimizer.steps]
    return [*results, *counters, *model.state_dict().values()]


def assert_same_bits(captured, plain):
    for a, b in zip(captured, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("micro_steps", "dropout", "precision", "optim"),
    [(1, 0.0, "fp32", "adamw"), (2, 0.1, "fp32", "adamw"), (2, 0.0, "bf16", "adamw"), (2, 0.0, "bf16", "muon")],
)
def test_replayed_steps_equal_uncaptured_steps(recorded_graphs, micro_steps, dropout, precision, optim):
    """Each step has another batch and learning rate, draws other dropout, and the fifth one is refused."""
    model, optimizer = trainer(dropout=dropout, precision=precision, optim=optim)
    step = capture.StepRunner(model, optimizer, wanted=None)
    captured = run(step, model, optimizer, micro_steps)
    assert step.graph.replays == 4
    assert step.figures == {"cuda_graph": "captured"}
    model, optimizer = trainer(dropout=dropout, precision=precision, optim=optim)
    plain = run(lambda *args: train_step(model, optimizer, *args), model, optimizer, micro_steps)
    assert int(optimizer.first_refused) == 5
    assert_same_bits(captured, plain)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_graph_of_an_earlier_step_in_a_reference_cycle_is_freed(request, device):
    """Otherwise the capture fails on a GPU."""
    request.addfinalizer(gc.enable)
    gc.disable()
    if device == "cpu":
        request.getfixturevalue("recorded_graphs")
    model, optimizer = trainer(torch.device(device))

    class Token:
        """An object that lives as long as the autograd graph of the first step."""

    tokens = weakref.WeakSet()

    def keep(module, arguments, output):
        hook.remove()
        output.grad_fn.metadata["token"] = token = Token()
        tokens.add(token)
        cycle = [output]
        cycle.append(cycle)

    hook = model.register_forward_hook(keep)
    step = capture.StepRunner(model, optimizer, wanted=None)
    for number in range(1, 3):
        step(batches_of(number, 1, device), 1e-3)
        assert len(tokens) == 1
    step(batches_of(3, 1, device), 1e-3)
    assert step.graph
    assert not tokens


def test_a_released_step_is_not_captured(recorded_graphs):
    model, optimizer = trainer()
    step = capture.StepRunner(model, optimizer, wanted=None)
    for number in range(1, 4):
        step(batches_of(number, 1), 1e-3)
    step.release()
    step(batches_of(4, 1), 1e-3)
    assert (step.graph, int(optimizer.steps)) == (None, 4)


def test_what_cannot_be_captured_says_why():
    """By default such a run is not captured. With train.cuda_graph=true it is an error of one line."""
    gpu = torch.device("cuda")
    config = GPTConfig(**SHAPE | {"dropout": 0.1, "checkpointing": "block"})
    assert capture.reason_against(config, CPU) == "it needs an NVIDIA GPU"
    assert "model.dropout" in capture.reason_against(config, gpu)
    config.dropout = 0.0
    assert capture.reason_against(config, gpu) is None
    for on_host in ("host", "chunks"):
        config.checkpointing = on_host
        assert f"model.checkpointing={on_host}" in capture.reason_against(config, gpu)
    model, optimizer = trainer()
    assert capture.StepRunner(model, optimizer, wanted=None).why_not == "it needs an NVIDIA GPU"
    assert capture.StepRunner(model, optimizer, wanted=False).why_not == "train.cuda_graph=false"
    with pytest.raises(UserError, match=r"train\.cuda_graph=true is impossible: it needs an NVIDIA GPU; pass null or"):
        capture.StepRunner(model, optimizer, wanted=True)


@pytest.mark.filterwarnings("ignore:called a synchronizing")
def test_a_step_that_waits_for_the_gpu_is_not_captured(recorded_graphs, monkeypatch):
    """PyTorch warns about the wait in the second step. The text of its warning is tested on a GPU."""
    model, optimizer = trainer()
    hook = model.register_forward_hook(lambda *_: warnings.warn("called a synchronizing CUDA operation", stacklevel=1))
    step = capture.StepRunner(model, optimizer, wanted=None)
    for number in range(1, 4):
        step(batches_of(number, 1), 1e-3)
    hook.remove()
    assert step.graph is None
    assert step.why_not.startswith(f"{__file__}:")
    assert step.why_not.endswith(" waits for the GPU")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [{}, {"dropout": 0.1}, {"precision": "bf16"}, {"checkpointing": "block"}, {"precision": "bf16", "optim": "muon"}],
    ids=str,
)
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_replayed_steps_equal_uncaptured_steps_on_a_gpu(micro_steps, changes):
    """With deterministic kernels, every bit is the same."""
    gpu = torch.device("cuda")
    triton = KernelsConfig(norm="triton", mlp="triton", loss="triton", linear="triton")
    options = {"device": gpu, "kernels": triton, "attn": "triton", **changes}
    model, optimizer = trainer(**options)
    step = capture.StepRunner(model, optimizer, wanted=True)
    captured = run(step, model, optimizer, micro_steps, gpu)
    assert step.graph
    model, optimizer = trainer(**options)
    plain = run(lambda *args: train_step(model, optimizer, *args), model, optimizer, micro_steps, gpu)
    assert_same_bits(captured, plain)


@pytest.mark.gpu
def test_a_wait_for_the_gpu_is_found():
    model, optimizer = trainer(torch.device("cuda"))

    def wait(module, arguments, output):
        output.item()

    model.register_forward_hook(wait)
    step = capture.StepRunner(model, optimizer, wanted=True)
    step(batches_of(1, 1, "cuda"), 1e-3)
    with pytest.raises(UserError, match=r"test_capture.py:\d+ waits for the GPU"):
        step(batches_of(2, 1, "cuda"), 1e-3)
