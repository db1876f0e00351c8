"""Rung 4: a softmax over rows, in CUDA C++ and in Triton, and for rows that do not fit into registers.

softmax(x)[c] is exp(x[c] - m) / total. m is the maximum of the row: without it exp(89) would overflow in fp32. total is
the sum of exp(x - m) over the row. Both are reductions: they need the whole row before the first result is known. An
element takes 8 bytes and about 5 FLOP: memory-bound.

- cuda, 88% of the floor on an H200: a block of 1024 threads computes a row. By `__shfl_xor_sync` the threads of a warp
  read each other's registers: after five steps each has the sum of its warp. The warps exchange these sums in shared
  memory, a small memory in each multiprocessor. At the barrier `__syncthreads()` a thread waits for its whole block.
- triton, 98%: a program of 16 warps holds the row in registers. `tl.max` and `tl.sum` do the work of `reduce`.
- online, 66%: a program reads its row in blocks of 4096, and keeps m and total of those so far. If m grows to m', it
  multiplies total by exp(m - m') (Milakov and Gimelshein 2018, arXiv:1805.02867). Then it reads the row again, partly
  from memory: the rows of all running programs take more than the 50 MB of L2, the cache of all multiprocessors.

Exercise: write the entropy of each row's softmax, m + log(total) - sum(p x) with the probabilities p. Read the row
once, in blocks, with a second running sum, of exp(x - m) x. Beyond the end of the row 0 times -inf is NaN, so choose by
`tl.where(mask, a, b)`. `solution(x)` returns one number a row. Run `python course/04_softmax.py mine.py`.
"""

import functools

import torch
import triton
import triton.language as tl
from torch.utils.cpp_extension import load_inline

SOURCE = r"""#include <c10/cuda/CUDAStream.h>

template <typename Op> __device__ float reduce(float value, Op op) {  // kernels call it; all threads get the result
  __shared__ float of_warp[32];
  for (int d = 16; d > 0; d /= 2) value = op(value, __shfl_xor_sync(~0u, value, d));  // of thread number ^ d
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warp[threadIdx.x % 32];
  for (int d = 16; d > 0; d /= 2) value = op(value, __shfl_xor_sync(~0u, value, d));
  __syncthreads();  // before the next call writes of_warp
  return value;
}

__global__ void softmax_kernel(const float* x, float* out, int columns) {
  x += int64_t(blockIdx.x) * columns, out += int64_t(blockIdx.x) * columns;
  float m = -INFINITY, sum = 0;
  for (int c = threadIdx.x; c < columns; c += 1024) m = fmaxf(m, x[c]);
  m = reduce(m, [](float a, float b) { return fmaxf(a, b); });
  for (int c = threadIdx.x; c < columns; c += 1024) sum += expf(x[c] - m);  // finds the row in L2
  float inverse = 1 / reduce(sum, [](float a, float b) { return a + b; });
  for (int c = threadIdx.x; c < columns; c += 1024) out[c] = expf(x[c] - m) * inverse;
}

torch::Tensor softmax(torch::Tensor x) {
  torch::Tensor out = torch::empty_like(x);
  auto stream = c10::cuda::getCurrentCUDAStream();
  softmax_kernel<<<x.size(0), 1024, 0, stream>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.size(1));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}
"""


@functools.cache
def library():
    return load_inline("course_softmax", "torch::Tensor softmax(torch::Tensor x);", SOURCE, functions=["softmax"])


@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # rows times columns may pass 2^31
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + c, c < columns, other=-float("inf"))  # other: where the mask is False
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * columns + c, e / tl.sum(e, 0), c < columns)


@triton.jit
def online_softmax_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row, m, total = tl.program_id(0).to(tl.int64), -float("inf"), 0.0
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * columns + c, c < columns, other=-float("inf"))
        larger = tl.maximum(m, tl.max(x, 0))
        m, total = larger, total * tl.exp(m - larger) + tl.sum(tl.exp(x - larger), 0)
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * columns + c, c < columns, other=-float("inf"))
        tl.store(out_ptr + row * columns + c, tl.exp(x - m) / total, c < columns)


def launch(kernel, x, **constants):
    out = torch.empty_like(x)
    kernel[(len(x),)](x, out, x.shape[1], **constants)
    return out


KERNELS = {
    "cuda": lambda x: library().softmax(x),
    "triton": lambda x: launch(softmax_kernel, x, BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=16),
    "online": lambda x: launch(online_softmax_kernel, x, BLOCK=4096, num_warps=8),
}
DTYPE = torch.float32
SHAPES = {"gpu": {"rows": 32768, "columns": 16384}, "cpu": {"rows": 3, "columns": 9001}}  # scores of two heads


def inputs(rows, columns, dtype, device):
    return {"x": torch.randn(rows, columns, device=device).to(dtype)}


def reference(x):
    return torch.softmax(x, -1)


def cost(rows, columns, dtype):
    return {"forward": (5 * rows * columns, 2 * rows * columns * dtype.itemsize)}


def exercise(x):
    return -(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(-1)


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
