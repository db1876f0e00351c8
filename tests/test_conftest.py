"""The patch of Triton's interpreter in tests/conftest.py works, and is still needed."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is not used on a GPU", allow_module_level=True)

import triton
from triton import language as tl
from triton.runtime.interpreter import ReduceOps

calls = []


@triton.jit
def add_and_count(a, b):
    calls.append(1)
    return a + b


@triton.jit
def sum_kernel(x_ptr, sum_ptr, N: tl.constexpr):
    tl.store(sum_ptr, tl.reduce(tl.load(x_ptr + tl.arange(0, N)), 0, add_and_count))


def count_calls() -> int:
    """Sum the numbers 0 to 63 in the interpreter, and return how often it calls the function of tl.reduce()."""
    calls.clear()
    result = torch.zeros(1)
    sum_kernel[(1,)](torch.arange(64.0), result, 64)
    assert result.item() == 2016
    return len(calls)


def test_a_reduction_in_the_interpreter_halves_its_block():
    """A block of 64 is halved 6 times."""
    assert count_calls() == 6


def test_the_patch_of_the_interpreter_is_still_needed(monkeypatch):
    """Triton's own method calls the function for each number after the first."""
    monkeypatch.setattr(ReduceOps, "generic_reduce", ReduceOps.generic_reduce.__wrapped__)
    assert count_calls() == 63, (
        "Triton no longer calls the function for each number: delete speed_up_triton_interpreter()"
    )
