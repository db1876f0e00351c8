"""What a GPU draws, and why it slows down: power, energy, SM clock, temperature and the reasons for a lower clock.

At its power limit a GPU lowers its clock. Then a kernel that draws less power lets the others run faster. So compare
two runs only at the same clock. A row carries these figures for the time in which its speed was measured.

They come from NVML. The GPU counts energy, so the mean power misses no peak. The others are sampled in a thread,
because at the end of an interval the GPU is idle, and its clock is another one.
"""

import statistics
import threading
import time
from collections import Counter
from typing import NamedTuple

import torch

from common.terminal import class_and_message, warn
from runtime.ranks import Ranks

try:
    import pynvml  # of the package nvidia-ml-py
except ImportError:
    pynvml = None

SAMPLE_SECONDS = 0.2
SHORTEST = 1.0  # the fewest seconds that give figures: five samples
REASONS = {  # bits of nvml.h that mean power or heat; the rest are left out
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
POWER_CAP = 0x04


class Sample(NamedTuple):
    sm_mhz: int
    celsius: int
    reasons: int  # bits of REASONS


class Sensors:
    """The sensors of a GPU. Every method raises pynvml.NVMLError if the GPU lacks a sensor."""

    def __init__(self, device: torch.device):
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self.limit_watts = pynvml.nvmlDeviceGetEnforcedPowerLimit(self.handle) / 1e3
        self.max_sm_mhz = pynvml.nvmlDeviceGetMaxClockInfo(self.handle, pynvml.NVML_CLOCK_SM)
        self.sample(), self.joules()  # raises now if a sensor is missing

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
    """Return the GPU's sensors; None on a CPU, if a sensor is missing, as in a part of a GPU (MIG), or without NVML."""
    if device.type != "cuda" or pynvml is None:
        return None
    try:
        return Sensors(device)
    except (pynvml.NVMLError, AttributeError):  # an old package of the same name lacks some functions
        return None


class PowerMeter:
    """Adds up the energy of intervals, from start() to stop(). In a `with` block it also samples the other sensors."""

    def __init__(self, device: torch.device):
        self.sensors = find_sensors(device)
        self.joules = self.seconds = 0.0
        self.samples: Counter[Sample] = Counter()
        self.recent: list[Sample] = []  # since start()
        self.closed = threading.Event()

    def __enter__(self) -> "PowerMeter":
        if self.sensors:
            self.closed.clear()
            threading.Thread(target=self._watch, args=(self.sensors,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closed.set()

    def _watch(self, sensors: Sensors) -> None:
        try:
            while not self.closed.wait(SAMPLE_SECONDS):
                self.recent.append(sensors.sample())
        except Exception as error:  # the run goes on without more samples
            reason = class_and_message(error)
            warn(f"the GPU's clock and temperature can no longer be read: {reason}; the row has those before")

    def _joules(self) -> float:
        if self.sensors:
            try:
                return self.sensors.joules()
            except pynvml.NVMLError as error:
                self.sensors = None  # the run goes on
                warn(f"the GPU's energy can no longer be read: {class_and_message(error)}; the row has no power/*")
        return 0.0

    def start(self) -> None:
        self.recent = []
        self.since = time.perf_counter(), self._joules()

    def stop(self) -> None:
        seconds, joules = self.since
        self.joules += self._joules() - joules
        self.seconds += time.perf_counter() - seconds
        self.samples.update(self.recent)

    def figures(self, tokens: int, ranks: Ranks) -> dict:
        """Return the figures of all GPUs of the job, which made `tokens` in the intervals.

        Power and energy are sums over the GPUs, the clock is of the slowest, and the temperature of the hottest. {} if
        a GPU has no sensors or no samples, or the intervals are shorter than SHORTEST seconds.
        """
        readable = self.sensors and self.samples and self.seconds >= SHORTEST
        gpus = ranks.gather((self.sensors.limit_watts, self.seconds, self.joules, self.samples) if readable else None)
        if None in gpus:
            return {}
        limits, seconds, joules, samples = zip(*gpus, strict=True)
        all_samples = sum(samples, Counter())
        shares = {name: share(all_samples, bit) for bit, name in REASONS.items()}
        return {
            "power/watts": sum(energy / duration for energy, duration in zip(joules, seconds, strict=True)),
            "power/limit_watts": sum(limits),
            "power/joules_per_token": sum(joules) / tokens,
            "power/sm_mhz": min(statistics.median(sample.sm_mhz for sample in of_gpu.elements()) for of_gpu in samples),
            "power/max_sm_mhz": self.sensors.max_sm_mhz,
            "power/celsius": max(sample.celsius for sample in all_samples),
            "power/at_limit": share(all_samples, POWER_CAP),
            "power/slowed_by": {name: part for name, part in shares.items() if part},
        }


def share(samples: Counter[Sample], bit: int) -> float:
    """Return the share of the samples with this reason."""
    return sum(count for sample, count in samples.items() if sample.reasons & bit) / samples.total()


def tokens_per_joule_cell(row: dict) -> str:
    """Return the row's tokens a joule, rounded to three digits below 100; empty if the row has no such figure."""
    if not row.get("power/joules_per_token"):
        return ""
    tokens = 1 / row["power/joules_per_token"]
    return f"{tokens:,.0f}" if tokens >= 100 else f"{tokens:.3g}"
