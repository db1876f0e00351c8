import statistics

import pytest
import torch

from runtime import device, meter
from runtime.device import BF16_PEAK, Ceiling
from runtime.meter import WARMUP, Meter
from runtime.timing import measured_flops

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""

    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(meter, "time", clock)
    return clock


@pytest.fixture
def ceiling(monkeypatch):
    monkeypatch.setattr(device, "measured_flops", lambda *_: 800e12)
    monkeypatch.setattr(device, "name", lambda _: "NVIDIA H200")
    return Ceiling(CPU, torch.float32, flops_per_token=1e9)


def test_medians_leave_warmup_and_evaluations_out(clock, ceiling):
    """Steps of 1 s after a first of 30 s; laps of 2 steps; an evaluation of 50 s between two of them."""
    m = Meter(CPU, tokens_per_step=1000, ceiling=ceiling)
    for step in range(1, 12):
        clock.now += 30 if step == 1 else 1 if step < 10 else 3
        if step <= WARMUP or step % 2 == 1:
            figures = m.lap(step)
        if step == 7:
            clock.now += 50
            m.restart(step)
    assert figures["perf/step_ms"] == 3000
    # laps after the warm-up: steps 4 to 5 and 6 to 7 of 1 s, 8 to 9 of 1 s, 10 to 11 of 3 s
    assert m.seconds == [1, 1, 1, 3]
    row = m.result()
    assert row["perf/tokens_per_sec"] == 1000
    assert row["perf/tokens_per_sec/p80"] == 1000
    assert row["perf/tokens_per_sec/p20"] == pytest.approx(
        1000 / statistics.quantiles([1, 1, 1, 3], n=5, method="inclusive")[-1]
    )
    assert (row["perf/first_step_s"], row["perf/compile_s"], row["perf/warmup_s"]) == (30, 29, 32)
    assert row["perf/mfu"] == 1000 * 1e9 / 989.4e12
    assert row["perf/mfu_measured_peak"] == 1000 * 1e9 / 800e12


def test_waiting_for_data_is_a_share_of_the_step(clock, ceiling):
    m = Meter(CPU, 1000, ceiling)
    clock.now += 1
    m.lap(WARMUP)
    for _ in range(4):
        clock.now += 1
        m.waited += 0.25
    assert m.lap(WARMUP + 4)["perf/data_wait_ms"] == 250
    assert m.result()["perf/data_wait_ms"] == 250


def test_a_run_that_ends_in_its_warmup_has_no_throughput(clock, ceiling):
    m = Meter(CPU, 1000, ceiling)
    clock.now += 1
    m.lap(1)
    assert m.result()["perf/tokens_per_sec"] is None
    assert m.result()["perf/mfu"] is None


def test_recompilations_are_counted_in_training_only(ceiling):
    """The first step's graph is no recompilation, nor is what an evaluation compiles; another shape later is."""
    torch.compiler.reset()
    f = torch.compile(lambda x: x * 2 + 1, backend="eager", dynamic=False)
    m = Meter(CPU, 1000, ceiling)
    for step, size in enumerate((3, 3, 4, 5), 1):
        f(torch.ones(size))
        m.lap(step)
        if step == 2:
            f(torch.ones(9))
            m.restart(step)
    assert m.recompiles == 2


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("AMD EPYC", None),
    ],
)
def test_an_unknown_gpu_has_no_peak(monkeypatch, name, tflops):
    """The whole name counts: another chip may go by the beginning of it."""
    monkeypatch.setattr(device, "measured_flops", lambda *_: 1e12)
    monkeypatch.setattr(device, "name", lambda _: name)
    ceiling = Ceiling(CPU, torch.float32, flops_per_token=1e9)
    assert ceiling.figures(1000.0)["perf/mfu"] == (tflops and 1000 * 1e9 / (tflops * 1e12))
    assert ceiling.figures(1000.0)["perf/mfu_measured_peak"] == 1.0
    assert all(peak > 1e13 for peak in BF16_PEAK.values())


def test_the_measured_peak_is_a_matmul():
    """On this CPU: above what one scalar core could do (4 GFLOP/s), below a thousand of them."""
    assert 4e9 < measured_flops(CPU, torch.float32) < 4e14
