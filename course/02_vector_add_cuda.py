"""Rung 2: add two vectors, in CUDA C++.

Triton describes what a program does with a block of elements. CUDA C++ describes what one thread does with one element.
A launch starts a grid of blocks, and each block has the same number of threads, here 256. A block of CUDA is what a
program is in Triton: it runs on one multiprocessor, and `blockIdx.x` is its number. `threadIdx.x` is the number of the
thread in its block. Where Triton has a mask for a vector of numbers, CUDA has an `if` for one number.

The hardware runs 32 neighbouring threads together: a warp. A warp executes one instruction for all of its threads. If
they load neighbouring elements, their loads become a few large requests to memory (coalesced). If the elements are far
apart, each thread needs a request of its own. Triton arranges the threads of a block that way by itself.

An element takes 12 bytes in fp32 and one FLOP, so the kernel is memory-bound, as in rung 1. A load takes hundreds of
clocks, so a multiprocessor reaches the speed of memory only if it has many loads in flight. The first kernel has two
loads in each thread. The second kernel starts the eight loads of four elements before its first store.

nvcc compiles the `__global__` functions for the GPU, and the other functions for the CPU. `load_inline` calls nvcc,
adds Python's bindings, and loads the library. `<<<blocks, threads, 0, stream>>>` launches a kernel. The stream is
PyTorch's queue: the GPU runs the kernels in it one after the other.

Exercise: `exercise` below averages each element of x with its two neighbours, and adds y. Outside of the vector x is 0.
Write it as one kernel in CUDA C++, behind a function `solution(x, y)`. The first and the last thread have a neighbour
that does not exist, and must not load it. Run

    python course/02_vector_add_cuda.py mine.py
"""

import functools

import torch
import torch.nn.functional as F
from torch.utils.cpp_extension import CUDA_HOME, load_inline

SOURCE = r"""
#include <c10/cuda/CUDAStream.h>

__global__ void add_kernel(const float* x, const float* y, float* out, int64_t n) {
  int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i < n) out[i] = x[i] + y[i];  // the last block reaches beyond the end
}

__global__ void add_four_kernel(const float* x, const float* y, float* out, int64_t n) {
  int64_t first = int64_t(blockIdx.x) * 1024 + threadIdx.x;  // of elements that are 256 apart
  float sums[4];  // the loops have constant bounds: the compiler unrolls them, and sums are four registers
  for (int k = 0; k < 4; ++k) sums[k] = first + 256 * k < n ? x[first + 256 * k] + y[first + 256 * k] : 0.0f;
  for (int k = 0; k < 4; ++k) {
    if (first + 256 * k < n) out[first + 256 * k] = sums[k];
  }
}

torch::Tensor add(torch::Tensor x, torch::Tensor y, bool four) {
  torch::Tensor out = torch::empty_like(x);
  int64_t n = x.numel(), per_block = four ? 1024 : 256, blocks = (n + per_block - 1) / per_block;
  auto kernel = four ? add_four_kernel : add_kernel;
  cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  kernel<<<blocks, 256, 0, stream>>>(x.data_ptr<float>(), y.data_ptr<float>(), out.data_ptr<float>(), n);
  C10_CUDA_KERNEL_LAUNCH_CHECK();  // a launch that fails says nothing by itself
  return out;
}
"""
DECLARATION = "torch::Tensor add(torch::Tensor x, torch::Tensor y, bool four);"


@functools.cache  # compiles at the first call; PyTorch keeps the library on disk until the source changes
def library():
    return load_inline("course_add", cpp_sources=DECLARATION, cuda_sources=SOURCE, functions=["add"])


def unavailable(device):
    if device.type != "cuda" or CUDA_HOME is None:
        return "it needs an NVIDIA GPU and nvcc, the compiler of the CUDA toolkit"
    return None


def add(x, y):
    return library().add(x, y, False)


def add_four(x, y):
    return library().add(x, y, True)


KERNELS = {"cuda": add, "cuda_four": add_four}
DTYPE = torch.float32
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
    padded = F.pad(x, (1, 1))
    return (padded[:-2] + x + padded[2:]) / 3 + y


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
