"""How long a function takes on a device, and how fast a matmul and a copy are on it."""

import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from runtime import torch_compat


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all work that was launched. On a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a matmul of random numbers on this device. It takes at most 2 s.

    The matmul is 8192^3 on a GPU and 1024^3 on a CPU, or smaller if these would take too long: 1024^3 in bf16 takes 4 s
    on a CPU without AVX-512.
    """
    size, largest, previous = 64, 8192 if device.type == "cuda" else 1024, None
    while True:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        multiply = partial(torch.matmul, a, b)
        fastest = min(call_seconds(multiply, device, warmup=1, calls=2))
        # The next size has 8 times the FLOPs. But on a busy CPU a small call mostly waits for a core, some 20 ms
        growth = min(8.0, max(1.0, fastest / previous)) if previous else 0.0
        if size == largest or 13 * growth * fastest > 1:  # 3 calls for warm-up and 10 timed ones
            return 2 * size**3 / median_seconds(multiply, device)
        size, previous = 2 * size, fastest


def measured_bandwidth(device: torch.device) -> float:
    """Return the bytes/s of a copy on this device, read plus written. It copies 1 GiB on a GPU, 128 MiB on a CPU."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)


def median_seconds(function: Callable[[], object], device: torch.device, enough: float = math.inf) -> float:
    """Return the median of call_seconds()."""
    return statistics.median(call_seconds(function, device, enough=enough))


def call_seconds(
    function: Callable[[], object], device: torch.device, warmup: int = 3, calls: int = 10, enough: float = math.inf
) -> list[float]:
    """Return the seconds of `calls` synchronised calls after `warmup` others, or of fewer that took `enough` s."""
    for _ in range(warmup):
        function()
    seconds = []
    while not seconds or (len(seconds) < calls and sum(seconds) < enough):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def time_in_turns(
    functions: dict[str, Callable[[], object]], device: torch.device, rounds: int, seconds: float = 0.02
) -> dict[str, list[float]]:
    """Return {name: the seconds of a call of this function, one sample for each round}.

    In each round every function has its turn, with as many calls as take `seconds`. Before a turn the GPU sleeps until
    the host has launched all calls, so it never waits for the host, as in a training step. Otherwise a call of less
    than a millisecond would seem to take as long as its launch. If the launches do not fit into the GPU's queue (about
    1,000), the turn has fewer calls.
    """
    # `enough`, because a slow function has one call in each turn, however exact its median is
    medians = {name: median_seconds(function, device, enough=5 * seconds) for name, function in functions.items()}
    calls = {name: max(1, int(seconds / median)) for name, median in medians.items()}
    launch_seconds = {name: _launch_seconds(function, device) for name, function in functions.items()}
    samples = {name: [] for name in functions}

    def turn(name: str) -> tuple[float, bool]:
        return time_calls(functions[name], calls[name], device, 1.5 * calls[name] * launch_seconds[name])

    for name in functions:
        while calls[name] > 1 and not turn(name)[1]:
            calls[name] //= 2
    for number in range(rounds):
        order = functions if number % 2 == 0 else reversed(functions)  # A B, B A: a drift affects all of them equally
        for name in order:
            samples[name].append(turn(name)[0] / calls[name])
    return samples


def _launch_seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that the host takes to launch a call; 0 on a CPU, which launches nothing."""
    if device.type != "cuda":
        return 0.0
    synchronize(device)
    start = time.perf_counter()
    function()
    seconds = time.perf_counter() - start
    synchronize(device)
    return seconds


def time_calls(
    function: Callable[[], object], calls: int, device: torch.device, sleep: float = 0.0
) -> tuple[float, bool]:
    """Return (the seconds of all calls, whether all were launched before the first began).

    A GPU first sleeps so many seconds, and what was launched before does not count.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return time.perf_counter() - start, True
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch_compat.sleep_on_gpu(sleep)
    start.record()
    for _ in range(calls):
        function()
    all_launched = not start.query()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3, all_launched
