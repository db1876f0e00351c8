"""What a GPU draws, and why it slows down: power, energy, SM clock, temperature and limits of the clock, through NVML.

At its power limit a GPU lowers its clock. Then a kernel that moves fewer bytes makes the others faster, and two runs
compare only at the same clock. So a row carries these figures for the time that its speed was measured in.

Energy is a counter of the GPU, so the mean power is exact. The others are sampled in a thread, because at the end of an
interval the GPU is idle, and its clock is another one.
"""

import contextlib
import statistics
import threading
import time
from typing import NamedTuple

import torch

from runtime.ranks import Ranks

try:
    import pynvml  # of the package nvidia-ml-py
except ImportError:
    pynvml = None

SAMPLE_SECONDS = 0.2
SHORTEST = 1.0  # seconds of a figure: the energy counter moves every 20 to 100 ms
# Why the clock is lower than its maximum, by the bits of nvml.h. The other bits are settings, and no lack of power
REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
POWER_REASONS = 0x04 | 0x80


class Sample(NamedTuple):
    sm_mhz: int
    celsius: int
    reasons: int  # bits of REASONS


class Sensors:
    """The sensors of a GPU. Every method raises pynvml.NVMLError if the GPU lacks one of them."""

    def __init__(self, device: torch.device):
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self.limit_watts = pynvml.nvmlDeviceGetEnforcedPowerLimit(self.handle) / 1e3
        self.max_sm_mhz = pynvml.nvmlDeviceGetMaxClockInfo(self.handle, pynvml.NVML_CLOCK_SM)
        self.sample(), self.joules()

    def sample(self) -> Sample:
        return Sample(
            pynvml.nvmlDeviceGetClockInfo(self.handle, pynvml.NVML_CLOCK_SM),
            pynvml.nvmlDeviceGetTemperature(self.handle, pynvml.NVML_TEMPERATURE_GPU),
            pynvml.nvmlDeviceGetCurrentClocksEventReasons(self.handle),
        )

    def joules(self) -> float:
        """Return the energy since the driver was loaded."""
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3


def find_sensors(device: torch.device) -> Sensors | None:
    """Return the GPU's sensors; None on a CPU, without nvidia-ml-py, and for a part of a GPU (MIG)."""
    if device.type != "cuda" or pynvml is None:
        return None
    try:
        return Sensors(device)
    except pynvml.NVMLError:
        return None


class PowerMeter:
    """Adds up the energy between start() and stop(), of one interval or of several, and keeps samples of the rest."""

    def __init__(self, device: torch.device):
        self.sensors = find_sensors(device)
        self.joules = self.seconds = 0.0
        self.samples: list[Sample] = []
        self.recent: list[Sample] = []  # since start()
        self.closed = threading.Event()
        if self.sensors:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        with contextlib.suppress(pynvml.NVMLError):  # the run goes on without more samples
            while not self.closed.wait(SAMPLE_SECONDS):
                self.recent.append(self.sensors.sample())

    def start(self) -> None:
        self.recent = []
        self.since = time.perf_counter(), self.sensors.joules() if self.sensors else 0.0

    def stop(self) -> None:
        """End the interval that start() began. An interval without stop() counts nothing."""
        if self.sensors:
            seconds, joules = self.since
            self.seconds += time.perf_counter() - seconds
            self.joules += self.sensors.joules() - joules
            self.samples += self.recent

    def figures(self, tokens: int, ranks: Ranks) -> dict:
        """End the thread, and return the figures of all GPUs of the job, which made `tokens` in the intervals.

        Power and energy are sums over the GPUs, the clock is of the slowest, and the temperature of the hottest. {} if
        a GPU has no sensors, or the intervals are shorter than SHORTEST seconds.
        """
        self.closed.set()
        readable = self.samples and self.seconds >= SHORTEST
        gpus = ranks.gather((self.sensors.limit_watts, self.seconds, self.joules, self.samples) if readable else None)
        if None in gpus:
            return {}
        limits, seconds, joules, samples = zip(*gpus, strict=True)
        everyone = [sample for own in samples for sample in own]
        seen = {name: share(everyone, bit) for bit, name in REASONS.items()}
        return {
            "power/watts": sum(map(float.__truediv__, joules, seconds)),
            "power/limit_watts": sum(limits),
            "power/joules_per_token": sum(joules) / tokens,
            "power/sm_mhz": min(statistics.median(sample.sm_mhz for sample in own) for own in samples),
            "power/max_sm_mhz": self.sensors.max_sm_mhz,
            "power/celsius": max(sample.celsius for sample in everyone),
            "power/at_limit": share(everyone, POWER_REASONS),
            "power/slowed_by": {name: part for name, part in seen.items() if part},
        }


def share(samples: list[Sample], bits: int) -> float:
    """Return the share of the samples with one of these reasons."""
    return sum(bool(sample.reasons & bits) for sample in samples) / len(samples)


def tokens_per_joule(row: dict) -> str:
    """Return the row's figure with three digits or more; empty if the row has none."""
    if not row.get("power/joules_per_token"):
        return ""
    tokens = 1 / row["power/joules_per_token"]
    return f"{tokens:,.0f}" if tokens >= 100 else f"{tokens:.3g}"
