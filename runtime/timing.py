"""How long something takes on a device, and what the device can do at most."""

import statistics
import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a matmul on this very machine: random data, 8192^3 on a GPU and 1024^3 on a CPU."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: a @ b, device)


def measured_bandwidth(device: torch.device) -> float:
    """Bytes/s, read and written, of a copy on this very machine: of 1 GiB on a GPU, 128 MiB on a CPU."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)


def median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of 10 calls after 3, each waited for."""
    for _ in range(3):
        work()
    seconds = []
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def in_turn(
    works: dict[str, Callable[[], object]], device: torch.device, rounds: int, seconds: float = 0.02
) -> dict[str, list[float]]:
    """Work -> seconds a call, a sample each round. Every work has its turn, of as many calls as fill `seconds`.

    On a GPU it is by device events, of a GPU that is busy: it sleeps until the calls are launched, as in a training
    step, where the host runs ahead. Else Python would set the figure of what takes less than a millisecond. Of work
    with more launches than fit into the GPU's queue (about 1,000) fewer calls have a turn; what waits for the GPU by
    itself is timed with its waiting.
    """
    waited = {name: median_seconds(work, device) for name, work in works.items()}
    calls = {name: max(1, int(seconds / each)) for name, each in waited.items()}
    launching = {name: _launching(work, device) for name, work in works.items()}
    samples = {name: [] for name in works}

    def turn(name: str) -> tuple[float, bool]:
        return _seconds(works[name], calls[name], device, 1.5 * calls[name] * launching[name])

    for name in works:
        while calls[name] > 1 and not turn(name)[1]:
            calls[name] //= 2
    for number in range(rounds):
        for name in works if number % 2 == 0 else reversed(works):  # ABBA: a drift hits all alike
            samples[name].append(turn(name)[0] / calls[name])
    return samples


def _launching(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call that nobody waits for, the host's share; on a CPU there is none."""
    if device.type != "cuda":
        return 0.0
    synchronize(device)
    start = time.perf_counter()
    work()
    took = time.perf_counter() - start
    synchronize(device)
    return took


def _seconds(work: Callable[[], object], calls: int, device: torch.device, ahead: float) -> tuple[float, bool]:
    """Of so many calls, and whether the GPU, which first sleeps for `ahead` seconds, had them all before it began."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return time.perf_counter() - start, True
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(2e9 * ahead))  # clocks; an H200 has 1.98e9 a second
    start.record()
    for _ in range(calls):
        work()
    launched = not start.query()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3, launched
