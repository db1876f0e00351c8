"""Rung 1: add two vectors, in Triton.

A kernel is a function that runs on the GPU many times in parallel. Triton calls each run a program, and
`tl.program_id(0)` is its number. Each program here adds one block of 1024 elements, and the vector `at` holds their
numbers. A kernel gets a tensor as the address of its first element, so `x_ptr + at` is a vector of addresses, and one
`tl.load` fetches the elements there. The last block reaches beyond n: the mask `at < n` says which elements exist.

In bf16 an element takes 6 bytes (two loads and a store) and one FLOP, far below the ridge of 186 FLOP a byte. So the
kernel is memory-bound. PyTorch's own addition is already at the floor, the time of a copy of as many bytes.

Exercise: `exercise` below is three operators in PyTorch, and each operator reads and writes memory. Write one kernel
that loads x and y once and stores the result once. `tl.maximum(a, b)` is the larger of two. Call the kernel in a
function `solution(x, y)`, in a file of your own, and run `python course/01_vector_add.py mine.py`.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):  # known when Triton compiles, and a power of 2
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # int64: n may pass 2^31
    x = tl.load(x_ptr + at, at < n)
    y = tl.load(y_ptr + at, at < n)
    tl.store(out_ptr + at, x + y, at < n)


def add(x, y):
    out, n = torch.empty_like(x), x.numel()
    add_kernel[(triton.cdiv(n, 1024),)](x, y, out, n, BLOCK=1024)  # in the brackets: how many programs run
    return out


KERNELS = {"triton": add}  # lab/bench/rung.py explains the names from here on
SHAPES = {"gpu": {"n": 2**28}, "cpu": {"n": 5000}}


def inputs(n, dtype, device):
    return {"x": torch.randn(n, device=device).to(dtype), "y": torch.randn(n, device=device).to(dtype)}


def reference(x, y):
    return x + y


def cost(n, dtype):
    return {"forward": (n, 3 * n * dtype.itemsize)}


def exercise(x, y):
    return (x + y).clamp(min=0) * y


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
