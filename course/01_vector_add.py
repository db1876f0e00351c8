"""Rung 1: add two vectors, in Triton.

A GPU has over a hundred multiprocessors. A kernel is a program that runs many times in parallel, and each run has its
own number, `tl.program_id(0)`. Here each program adds one block of 1024 elements. The numbers of its elements are one
vector, `at`; a load fetches the whole block at once. The last block reaches beyond the end of the vector, so a mask
says which elements exist.

In bf16 an element moves 6 bytes: two loads and a store of 2 bytes each. That is one FLOP for 6 bytes. An H200 moves
4.2 TB/s and computes 777 TFLOP/s, 186 FLOP a byte, so this kernel waits for memory: it is memory-bound. Its floor is
the time of a copy of as many bytes, and no kernel can be faster. PyTorch's own addition is already at the floor.

Exercise: `exercise` below is three operators in PyTorch, and each reads and writes memory. Write one kernel that loads
x and y once and stores once. Put it behind a function `solution(x, y)` in a file of yours, and run

    python course/01_vector_add.py mine.py
"""

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # int64: n may pass 2^31
    x = tl.load(x_ptr + at, at < n)
    y = tl.load(y_ptr + at, at < n)
    tl.store(out_ptr + at, x + y, at < n)


def add(x, y):
    out = torch.empty_like(x)
    n = out.numel()
    add_kernel[(triton.cdiv(n, 1024),)](x, y, out, n, BLOCK=1024)
    return out


KERNELS = {"triton": add}
SHAPES = {"gpu": {"shape": (2**28,)}, "cpu": {"shape": (5000,)}}


def inputs(shape, dtype, device):
    x, y = torch.randn(2, *shape, device=device).to(dtype)
    return {"x": x, "y": y}


def reference(x, y):
    return x + y


def cost(shape, dtype):
    n = shape[0]
    return {"forward": (n, 3 * n * dtype.itemsize)}


def exercise(x, y):
    return (x + y).clamp(min=0) * y


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
