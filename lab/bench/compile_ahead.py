"""Compile Triton kernels in threads, before they run.

A search for launch parameters compiles each kernel about ten times, and one compilation takes about 0.5 s. Triton
compiles mostly in C++ and in ptxas, which is a program of its own, so threads compile at the same time.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
import triton
from triton.runtime.jit import JITFunction

from runtime.device import usable_cores


@contextmanager
def launches_only_compile() -> Iterator[None]:
    """Inside the with block a launch compiles its kernel in a thread, and does not run it. The end waits for all.

    Tensors that a kernel would write stay as they are. A kernel that does not compile raises its error when it is
    launched after the block. Autograd computes in the calling thread, because a mode of Triton holds for one thread.
    """
    run = JITFunction.run

    def compile_in_thread(self, *arguments, **options):
        return run(self, *arguments, **{**options, "warmup": True})

    with (
        ThreadPoolExecutor(usable_cores()) as threads,
        triton.AsyncCompileMode(threads, ignore_errors=True),
        torch.autograd.set_multithreading_enabled(False),
    ):
        JITFunction.run = compile_in_thread
        try:
            yield
        finally:
            JITFunction.run = run
