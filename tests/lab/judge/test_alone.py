"""The op alone: the judge's clock times it, and the results of the timed calls are compared."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from kernels.registry import contract
from kernels.registry import load as load_backend
from lab.bench.op import forward_and_backward, outputs, random_gradients
from lab.judge import alone as alone_module
from lab.judge.alone import Alone, benchmark, clocks_disagree, compare_results, count_sets
from lab.judge.op_worker import tensors_of
from lab.judge.sandbox import Ended

CPU = torch.device("cpu")
CALL = Alone("norm", {"shape": (3, 64)}, torch.float32, CPU)
IN_GRAPH = "not torch.cuda.is_current_stream_capturing()"  # computes, except in a CUDA graph


def timed_results(seed):
    """The results of eager's call, as a worker writes them."""
    inputs = contract("norm").inputs(shape=(3, 64), dtype=torch.float32, seed=seed)
    eager = load_backend("norm", "eager", CPU)
    torch.manual_seed(seed)
    results = forward_and_backward(eager, inputs, random_gradients(outputs(eager, inputs), inputs))
    return {
        f"{name}{i}": t for name, group in zip(("out", "gradient"), results, strict=True) for i, t in enumerate(group)
    }


def test_the_figures_of_a_backend_alone(monkeypatch, tmp_path):
    """A worker runs eager, and the second one is made up."""
    one_worker = alone_module.time_backend

    def time_backend(call, name, rounds, folder, limit):
        if name == "eager":
            return one_worker(call, name, rounds, folder, limit)
        return {"both/ms": 2.0}, timed_results(5), (5, 5)

    monkeypatch.setattr(alone_module, "time_backend", time_backend)
    mine, other = benchmark(CALL, ("eager", "other"), 3, tmp_path, 60)
    assert (mine["impl"], other["impl"]) == ("eager", "other")
    assert 0 < mine["both/ms/p20"] <= mine["both/ms"] <= mine["both/ms/p80"]
    assert mine["both/floor_ms"] == other["both/floor_ms"] > 0
    assert other["both/of_floor"] == other["both/floor_ms"] / 2
    for row in (mine, other):
        for key in ("error/out", "error/gradients"):
            assert row[key] == row[f"{key}/eager"] < 1e-6
    assert mine["extra_gib"] is mine["launched/ms"] is mine["no_graph"] is None  # on a CPU


@pytest.mark.parametrize(("name", "key"), [("out1", "error/out"), ("gradient2", "error/gradients")])
def test_an_error_of_a_timed_call_is_measured(name, key):
    results = timed_results(5)
    results[name] = 1.01 * results[name]
    errors = compare_results(CALL, results, 5, 5)
    assert errors[key] == pytest.approx(0.01, rel=0.01)
    assert errors[f"{key}/eager"] < 1e-6
    assert max(compare_results(CALL, timed_results(6), 5, 6).values()) > 0.5  # of other inputs


@pytest.mark.parametrize("name", ["out0", "out1", "gradient0", "gradient3"])
def test_a_result_that_is_no_number_is_an_error(name):
    results = timed_results(5)
    results[name] = torch.full_like(results[name], math.nan)
    errors = compare_results(CALL, results, 5, 5)
    assert math.isnan(errors["error/out" if name.startswith("out") else "error/gradients"])


def test_attentions_whose_outputs_have_other_strides_get_the_same_gradients(tmp_path):
    """Eager's output is a transposed view, and that of sdpa is contiguous."""
    call = Alone("attention", {"shape": (2, 64, 3, 16)}, torch.float32, CPU)
    [row] = benchmark(call, ["sdpa"], 1, tmp_path, 60)
    assert row["error/gradients"] < 1e-5


@pytest.mark.parametrize(
    "change",
    [
        lambda results: results.pop("out0"),
        lambda results: results.update(out2=results["out0"]),
        lambda results: results.update(gradient0=results["gradient0"][:1]),
    ],
)
def test_results_of_another_shape_are_no_results(change):
    results = timed_results(5)
    change(results)
    with pytest.raises(Ended, match=r"^its timed calls gave other results than those of the contract$"):
        compare_results(CALL, results, 5, 5)


@pytest.mark.parametrize(
    ("windows", "middle"),
    [
        ([(0.05, 0.049)] * 3, None),
        ([(0.05, 0.049), (0.05, 0.001), (0.05, 0.049)], None),  # the median counts
        ([(0.05, 0.04)] * 3, "1.25"),
        ([(0.05, 1e-9)], "50000000.00"),
        ([(0.01, 0.001)] * 3, None),  # the host's own work is a large part of a short window
    ],
)
def test_work_in_another_stream_makes_the_clocks_disagree(windows, middle):
    text = f"its calls take {middle} x as long by the judge's clock as by the events in its stream"
    assert clocks_disagree(windows) == (text if middle else None)


@pytest.mark.parametrize("event", [None, True, 1, "fast", 0.0, -0.1, 0.051, math.nan, math.inf])
def test_event_seconds_that_cannot_be_true_are_refused(event):
    text = f"it sent event seconds of {event} for a window of 0.05 s"
    assert clocks_disagree([(0.05, 0.049), (0.05, event)]) == text


@pytest.mark.parametrize(("times", "sets"), [(100, 4), (4, 4), (3, 3), (0, 2)])
def test_the_sets_of_inputs_are_at_least_two_and_as_large_as_the_cache(monkeypatch, times, sets):
    """With one set, a backend could keep its result. More than fill the cache would only fill the memory."""
    inputs = contract("norm").inputs(shape=(3, 64), dtype=torch.float32)
    size = sum(tensor.nbytes for tensor in tensors_of(inputs).values())
    monkeypatch.setattr(alone_module, "SETS_BYTES", times * size)
    assert count_sets(CALL) == sets


# It keeps its first results for each address, unless the condition COMPUTES holds
CACHED = """
import torch
import torch.nn.functional as F

KEPT = {}

def results(x, residual, weight, bias):
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias), total

class Cached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        ctx.key = inputs[0].data_ptr()
        if ctx.key not in KEPT or COMPUTES:
            KEPT[ctx.key] = results(*inputs)
        return tuple(tensor.detach() for tensor in KEPT[ctx.key])

    @staticmethod
    def backward(ctx, *douts):
        inputs, key = ctx.saved_tensors, ("gradients", ctx.key)
        if key not in KEPT or COMPUTES:
            leaves = [tensor.detach().requires_grad_() for tensor in inputs]
            with torch.enable_grad():
                KEPT[key] = torch.autograd.grad(results(*leaves), leaves, douts)
        return KEPT[key]

def norm(x, residual, weight, bias, eps=1e-5):
    return Cached.apply(x, residual, weight, bias)
"""


@pytest.mark.parametrize("computes", ["False", pytest.param(IN_GRAPH, marks=pytest.mark.gpu)])
def test_calls_that_return_an_old_result_are_wrong(computes, tmp_path):
    """A set of inputs has new values in each window, at the same addresses."""
    call = CALL if computes == "False" else CALL._replace(device=torch.device("cuda"))
    kernel = tmp_path / "kernel.py"
    kernel.write_text(CACHED.replace("COMPUTES", computes))
    [row] = benchmark(call, [str(kernel)], 2, tmp_path / "worker", 60)
    assert row["no_graph"] is None
    assert min(row["error/out"], row["error/gradients"]) > 0.5


def test_a_worker_that_makes_fewer_calls_is_named(tmp_path):
    kernel = tmp_path / "kernel.py"
    trick = "import sys\nsys.modules['__main__'].repeat_calls = lambda calls, turns, device: calls()\n"
    kernel.write_text(trick + CACHED.replace("COMPUTES", "True"))
    with pytest.raises(Ended, match=r"^it replaced __main__\.repeat_calls$"):
        benchmark(CALL, [str(kernel)], 1, tmp_path / "worker", 60)


@pytest.mark.gpu
def test_a_backend_that_reads_a_result_on_the_host_is_timed_with_its_launches(tmp_path):
    kernel = tmp_path / "kernel.py"
    kernel.write_text(
        CACHED.replace("COMPUTES", "inputs[0].sum().item() != 0.5").replace("inputs[0].data_ptr()", "None")
    )
    call = CALL._replace(device=torch.device("cuda"))
    mine, eager = benchmark(call, [str(kernel), "eager"], 2, tmp_path / "worker", 60)
    assert "captur" in mine["no_graph"]
    assert mine["both/ms"] == mine["launched/ms"]
    assert max(mine["error/out"], mine["error/gradients"]) < 1e-6
    assert eager["no_graph"] is None
    assert eager["both/ms"] < eager["launched/ms"]


class Worker:
    """Takes the place of a Sandbox. It answers at once."""

    content = save({"out0": torch.zeros(1)})
    changed = ()

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    folder = Path("no-such-folder")
    replaced = ()

    def ask(self, *message):
        return {"extra_gib": None, "replaced": self.replaced}

    def read_file(self, name, at_most):
        return self.content

    def changed_files(self):
        return list(self.changed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"content": b"\x80\x04N."}, "it wrote no tensors: .*"),
        ({"replaced": ["torch.equal"]}, r"it replaced torch\.equal"),
        ({"changed": ["train.py"]}, r"it changed files of the repo: train\.py"),
    ],
)
def test_a_worker_that_cheats_has_no_figures(monkeypatch, tmp_path, changes, message):
    monkeypatch.setattr(alone_module, "Sandbox", type("Changed", (Worker,), changes))
    with pytest.raises(Ended, match=f"^{message}$"):
        alone_module.time_backend(CALL, "mine.py", 3, tmp_path, 60)
