"""The figures of the meter, on a clock that the test sets."""

import statistics

import pytest
import torch

from runtime import device, meter, timing
from runtime.device import BF16_PEAK, Ceiling
from runtime.meter import WARMUP, Meter

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock whose time `now` the test sets."""

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
    monkeypatch.setattr(device, "device_name", lambda _: "NVIDIA H200")
    return Ceiling(CPU, torch.float32, flops_per_token=1e9)


def test_figures_leave_out_the_warmup_and_evaluations(clock, ceiling):
    """The first step takes 30 s, steps 10 and 11 take 3 s each, the others 1 s. An evaluation of 50 s follows step 7.

    After the warm-up there are four intervals of 2 steps.
    """
    m = Meter(CPU, tokens_per_step=1000, ceiling=ceiling)
    seconds = {1: 30, 10: 3, 11: 3}
    for step in range(1, 12):
        clock.now += seconds.get(step, 1)
        if step <= WARMUP or step % 2 == 1:
            figures = m.end_interval(step)
        if step == 7:
            clock.now += 50
            m.start_interval(step)
    assert figures["perf/step_ms"] == 3000
    assert m.step_seconds == [1, 1, 1, 3]
    row = m.result()
    assert row["perf/tokens_per_sec"] == 1000
    assert row["perf/tokens_per_sec/p80"] == 1000
    assert row["perf/tokens_per_sec/p20"] == pytest.approx(
        1000 / statistics.quantiles([1, 1, 1, 3], n=5, method="inclusive")[-1]
    )
    assert (row["perf/first_step_s"], row["perf/compile_s"], row["perf/warmup_s"]) == (30, 29, 32)
    assert row["perf/mfu"] == 1000 * 1e9 / 989.4e12
    assert row["perf/mfu_measured_peak"] == 1000 * 1e9 / 800e12


def test_an_interval_ends_when_the_gpu_has_done_its_work(clock, ceiling, monkeypatch):
    """The host launches each step in 1 ms. The GPU, on which the meter waits, takes a second."""
    m, launched = Meter(CPU, 1000, ceiling), []

    def synchronize(device):
        clock.now += len(launched)
        launched.clear()

    monkeypatch.setattr(meter, "synchronize", synchronize)
    for step in range(1, 10):
        clock.now += 0.001
        launched.append(step)
        if step % 3 == 0:
            m.end_interval(step)
    assert m.result()["perf/tokens_per_sec"] == pytest.approx(1000 / 1.001)


def test_the_warmup_of_a_resumed_run_is_in_no_sample(clock, ceiling):
    """It compiles again: its first step takes 30 s. The first sample is of the step after its warm-up."""
    m = Meter(CPU, 1000, ceiling, steps_before=10, seconds_before=50.0)
    for step in range(11, 16):
        clock.now += 30 if step == 11 else 1
        m.end_interval(step)
    assert m.step_seconds == [1, 1]
    assert m.result()["perf/first_step_s"] == 30


def test_mfu_is_of_one_device(ceiling):
    """Four GPUs make 4000 tokens/s together."""
    four = Ceiling(CPU, torch.float32, flops_per_token=1e9, devices=4).figures(4000.0)
    one = ceiling.figures(1000.0)
    assert four["perf/tokens_per_sec"] == 4 * one["perf/tokens_per_sec"]
    for key in ("perf/tokens_per_sec_per_device", "perf/mfu", "perf/mfu_measured_peak"):
        assert four[key] == one[key]


def test_data_wait_is_a_mean_per_step(clock, ceiling):
    m = Meter(CPU, 1000, ceiling)
    clock.now += 1
    m.end_interval(WARMUP)
    for _ in range(4):
        clock.now += 1
        m.data_wait += 0.25
    assert m.end_interval(WARMUP + 4)["perf/data_wait_ms"] == 250
    assert m.result()["perf/data_wait_ms"] == 250


def test_there_is_no_throughput_when_the_run_ends_in_its_warmup(clock, ceiling):
    m = Meter(CPU, 1000, ceiling)
    clock.now += 1
    m.end_interval(1)
    assert m.result()["perf/tokens_per_sec"] is None
    assert m.result()["perf/mfu"] is None


def test_only_graphs_of_later_training_steps_count_as_recompilations(ceiling):
    """The graphs of the first step and of an evaluation do not count. Steps 3 and 4 have new shapes, and count."""
    torch.compiler.reset()
    f = torch.compile(lambda x: x * 2 + 1, backend="eager", dynamic=False)
    m = Meter(CPU, 1000, ceiling)
    for step, size in enumerate((3, 3, 4, 5), 1):
        f(torch.ones(size))
        m.end_interval(step)
        if step == 2:
            f(torch.ones(9))
            m.start_interval(step)
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
def test_only_a_gpu_with_a_known_name_has_mfu(monkeypatch, name, tflops):
    """The whole name must match, because another chip may have a name with the same beginning."""
    monkeypatch.setattr(device, "measured_flops", lambda *_: 1e12)
    monkeypatch.setattr(device, "device_name", lambda _: name)
    ceiling = Ceiling(CPU, torch.float32, flops_per_token=1e9)
    expected = None if tflops is None else 1000 * 1e9 / (tflops * 1e12)
    assert ceiling.figures(1000.0)["perf/mfu"] == expected
    assert ceiling.figures(1000.0)["perf/mfu_measured_peak"] == 1.0
    assert all(peak > 1e13 for peak in BF16_PEAK.values())


@pytest.mark.parametrize(("wait", "flops", "size"), [(0, 20e9, 1024), (0.02, 100e9, 1024), (0, 0.5e9, 256)])
def test_the_speed_of_a_busy_and_of_a_slow_cpu(monkeypatch, wait, flops, size):
    """On a busy CPU every call waits for a core, so a small matmul would make it seem 300 times as slow as it is.

    On a slow CPU 1024^3 takes 4 s. The whole measurement takes less than 2 s.
    """
    spent = []

    def seconds(work, device, warmup=3, calls=10, **_):
        spent.extend((warmup + calls) * [wait + 2 * len(work()) ** 3 / flops])
        return spent[-calls:]

    monkeypatch.setattr(timing, "call_seconds", seconds)
    assert timing.measured_flops(CPU, torch.float32) == pytest.approx(2 * size**3 / (wait + 2 * size**3 / flops))
    assert sum(spent) < 2


@pytest.mark.parametrize(("seconds", "size"), [(2**-10, 1024), (2**-1, 128)])
def test_measured_flops_and_bandwidth_follow_from_the_seconds_of_a_matmul_and_a_copy(monkeypatch, seconds, size):
    """A matmul of n^3 is 2 n^3 FLOP, and a copy reads and writes 2^27 bytes. Here each call takes `seconds`.

    If a matmul is slow, it is not repeated with a larger size.
    """
    results = []

    def timed(work, device, **_):
        results.append(work())
        return [seconds] * 10

    monkeypatch.setattr(timing, "call_seconds", timed)
    assert timing.measured_flops(CPU, torch.bfloat16) == 2 * size**3 / seconds
    assert timing.measured_bandwidth(CPU) == 2**28 / seconds
    *_, product, copy = results
    assert (product.shape, product.dtype) == ((size, size), torch.bfloat16)
    assert (copy.nbytes, bool((copy == 1).all())) == (2**27, True)
