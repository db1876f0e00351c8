"""The power figures, with a GPU whose sensors the test sets; and one test on a real GPU."""

import threading
from collections import Counter
from threading import Event, current_thread
from types import SimpleNamespace

import pytest
import torch

from lab.sweep.table import figure_columns
from runtime import console, device, meter, power
from runtime.meter import WARMUP, Meter
from runtime.power import PowerMeter, Sample
from runtime.ranks import Ranks

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
COOL, CAPPED, HOT = Sample(1980, 50, 0x1), Sample(1500, 60, 0x4), Sample(1400, 80, 0x4 | 0x20)


class NVMLError(Exception):
    pass


class Gpu:
    """A GPU that draws 500 W, with the functions of pynvml that runtime.power calls; and a fake time module."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVMLError = 1, 0, NVMLError
    now = 100.0

    def __init__(self, missing=None):
        self.missing = missing

    def perf_counter(self):
        return self.now

    def __getattr__(self, name):
        values = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetClockInfo": CAPPED.sm_mhz,
            "nvmlDeviceGetTemperature": CAPPED.celsius,
            "nvmlDeviceGetCurrentClocksEventReasons": CAPPED.reasons,
            "nvmlDeviceGetTotalEnergyConsumption": 1e3 * 500 * self.now,
        }

        def function(*arguments):
            if name == self.missing:
                raise NVMLError
            return values[name]

        return function


@pytest.fixture
def gpu(monkeypatch):
    """A GPU. Outside of a `with` block the test takes the samples itself."""
    fake = Gpu()
    monkeypatch.setattr(power, "pynvml", fake)
    monkeypatch.setattr(power, "time", fake)
    monkeypatch.setattr(meter, "time", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    return fake


def draw(meter, gpu, seconds, samples):
    """Let an interval pass in which the GPU is in these states."""
    meter.start()
    gpu.now += seconds
    meter.recent += samples


def test_figures_are_of_the_complete_intervals(gpu):
    meter = PowerMeter(CUDA)
    draw(meter, gpu, 2, [COOL, CAPPED])
    meter.stop()
    draw(meter, gpu, 100, [HOT] * 9)  # without stop()
    draw(meter, gpu, 1, [CAPPED, CAPPED])
    meter.stop()
    assert meter.figures(3000, Ranks()) == {
        "power/watts": 500,
        "power/limit_watts": 700,
        "power/joules_per_token": 0.5,
        "power/sm_mhz": 1500,
        "power/max_sm_mhz": 1980,
        "power/celsius": 60,
        "power/at_limit": 0.75,
        "power/slowed_by": {"sw_power_cap": 0.75},
    }


def test_a_job_on_two_gpus_sums_power_and_takes_the_slowest_clock(gpu, monkeypatch):
    meter, ranks = PowerMeter(CUDA), Ranks()
    draw(meter, gpu, 2, [COOL, COOL])
    meter.stop()
    monkeypatch.setattr(ranks, "gather", lambda own: [own, (600.0, 2.5, 1000.0, Counter([HOT, HOT]))])
    figures = meter.figures(4000, ranks)
    assert (figures["power/watts"], figures["power/limit_watts"]) == (900, 1300)
    assert (figures["power/joules_per_token"], figures["power/sm_mhz"], figures["power/celsius"]) == (0.5, 1400, 80)
    assert figures["power/slowed_by"] == {"sw_power_cap": 0.5, "sw_thermal_slowdown": 0.5}
    monkeypatch.setattr(ranks, "gather", lambda own: [own, None])
    assert meter.figures(4000, ranks) == {}


def test_no_figures_without_sensors_or_in_a_short_time(gpu, monkeypatch):
    meter = PowerMeter(CUDA)
    draw(meter, gpu, 0.9, [COOL])
    meter.stop()
    assert meter.figures(1000, Ranks()) == {}
    old = SimpleNamespace(NVMLError=NVMLError)  # a package of this name without the functions
    for kind, module in ((CPU, gpu), (CUDA, None), (CUDA, Gpu("nvmlDeviceGetTotalEnergyConsumption")), (CUDA, old)):
        monkeypatch.setattr(power, "pynvml", module)
        meter = PowerMeter(kind)
        draw(meter, gpu, 2, [COOL])
        meter.stop()
        assert meter.figures(1000, Ranks()) == {}


def test_a_thread_samples_in_the_with_block(gpu, monkeypatch):
    monkeypatch.setattr(power, "SAMPLE_SECONDS", 1e-3)
    threads, enough = [], Event()

    def sample(self):
        threads.append(current_thread())
        if len(threads) > 1 and meter.recent:
            enough.set()
        return CAPPED

    monkeypatch.setattr(power.Sensors, "sample", sample)
    meter = PowerMeter(CUDA)
    with meter:
        draw(meter, gpu, 2, [])
        enough.clear()  # draw() discards the samples before it
        assert enough.wait(timeout=60)
        meter.stop()
    assert meter.figures(1000, Ranks())["power/at_limit"] == 1
    assert threads[0] is current_thread() is not threads[1]  # the first sample tries the sensors
    threads[1].join(timeout=60)
    assert not threads[1].is_alive()


@pytest.mark.parametrize("sensor", ["nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetTemperature"])
def test_a_sensor_that_fails_during_a_run_is_a_warning(sensor, gpu, monkeypatch, capsys):
    """Without the energy there are no figures. Without new samples, those before it stay."""
    monkeypatch.setattr(power, "SAMPLE_SECONDS", 1e-3)
    before = set(threading.enumerate())
    with PowerMeter(CUDA) as meter:
        [thread] = set(threading.enumerate()) - before
        draw(meter, gpu, 2, [CAPPED])
        gpu.missing = sensor
        meter.stop()
        meter.start()
        meter.stop()
        if "Temperature" in sensor:
            thread.join(60)
    figures = meter.figures(1000, Ranks())
    assert figures == {} if "Energy" in sensor else figures["power/watts"] == 500
    what = "energy" if "Energy" in sensor else "clock and temperature"
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: the GPU's {what} can no longer be read: NVMLError; ")


def test_a_row_of_training_leaves_out_the_warmup(gpu, monkeypatch):
    """5 steps in 10 s, after a hot warm-up."""
    monkeypatch.setattr(device, "measured_flops", lambda *_: 800e12)
    monkeypatch.setattr(meter, "PowerMeter", lambda _: PowerMeter(CUDA))
    own = Meter(CPU, 1000, device.Ceiling(CPU, torch.float32, flops_per_token=1e9))
    for step, seconds, sample in ((WARMUP, 3, HOT), (WARMUP + 5, 10, CAPPED)):
        own.power.recent.append(sample)
        gpu.now += seconds
        own.end_interval(step)
    row = own.result() | {"status": "ok", "cuda_graph": "captured"}
    assert (row["power/watts"], row["power/joules_per_token"], row["power/celsius"]) == (500, 1.0, 60)
    line = "\npower    500 of 700 W, 100% of the time at its limit; SM 1,500 of 1,980 MHz; 60 C; 1 tokens a joule"
    assert line in console.summary(row)
    cells = {name: cell(row) for name, cell in figure_columns([row]).items()}
    assert [cells[name] for name in ("tokens/J", "at power limit", "SM MHz")] == ["1", "100%", "1,500"]
    without = {key: value for key, value in row.items() if not key.startswith("power/")}
    assert "power" not in console.summary(without)
    assert "tokens/J" not in figure_columns([without])


@pytest.mark.gpu
def test_a_gpu_at_work_draws_power():
    pytest.importorskip("pynvml")
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device=CUDA)
    with PowerMeter(CUDA) as meter:
        meter.start()
        end = power.time.perf_counter() + 1.5
        while power.time.perf_counter() < end:
            for _ in range(20):
                x @ x
            torch.cuda.synchronize()
        meter.stop()
    figures = meter.figures(1, Ranks())
    assert 100 < figures["power/watts"] < 1.1 * figures["power/limit_watts"]
    assert 300 < figures["power/sm_mhz"] <= figures["power/max_sm_mhz"]
    assert 20 < figures["power/celsius"] < 100
