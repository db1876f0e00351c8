"""Rung 3: GELU, in CUDA C++ and in Triton.

GPT-2's MLP applies GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415) to each number between its two matmuls:

    gelu(x) = 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))

Each operator of this formula is a kernel that reads its operands from memory and writes its result to memory. A read
or a write of the whole tensor is a pass. `reference` below has eight operators: the power, three products with a
number, two sums, tanh, and the last product. Six of them make two passes, and two make three: 18 passes. One kernel for
the whole formula makes two passes, because all intermediate results stay in registers. Such a kernel is fused.

An element takes 8 bytes in fp32 and about 10 FLOP, far below the ridge of 186 FLOP a byte, so only the passes count.
The floor of the fused kernel is a ninth of the floor of the eight kernels.

The kernels compute tanh from an exponential, which the hardware has: 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2 u)), the
sigmoid of 2 u. In CUDA, a kernel can call a `__device__` function. `F.gelu` is PyTorch's own fused kernel, and
torch.compile generates a fused kernel in Triton from the formula.

Exercise: the backward needs the derivative gelu'(x). `exercise` below has its formula, with 17 operators. Write it as
one kernel, in either language, behind a function `solution(x)`. Express the derivative by the sigmoid s of 2 u, so that
it takes one exponential: what is the derivative of s? Run

    python course/03_gelu.py mine.py
"""

import functools
import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <c10/cuda/CUDAStream.h>

__device__ float gelu(float x) {
  float twice_u = 1.5957691216f * (x + 0.044715f * x * x * x);  // 2 sqrt(2 / pi)
  return x / (1.0f + expf(-twice_u));
}

__global__ void gelu_kernel(const float* x, float* out, int64_t n) {
  int64_t first = int64_t(blockIdx.x) * 1024 + threadIdx.x;
  float values[4];
  for (int k = 0; k < 4; ++k) values[k] = first + 256 * k < n ? x[first + 256 * k] : 0.0f;
  for (int k = 0; k < 4; ++k) {
    if (first + 256 * k < n) out[first + 256 * k] = gelu(values[k]);
  }
}

torch::Tensor gelu(torch::Tensor x) {
  torch::Tensor out = torch::empty_like(x);
  int64_t n = x.numel(), blocks = (n + 1023) / 1024;
  gelu_kernel<<<blocks, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(x.data_ptr<float>(), out.data_ptr<float>(), n);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}
"""


@functools.cache
def library():
    declaration = "torch::Tensor gelu(torch::Tensor x);"
    return load_inline("course_gelu", cpp_sources=declaration, cuda_sources=SOURCE, functions=["gelu"])


@triton.jit
def gelu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < n)
    twice_u = 1.5957691216 * (x + 0.044715 * x * x * x)
    tl.store(out_ptr + at, x * tl.sigmoid(twice_u), at < n)


def triton_gelu(x):
    out = torch.empty_like(x)
    n = out.numel()
    gelu_kernel[(triton.cdiv(n, 1024),)](x, out, n, BLOCK=1024)
    return out


KERNELS = {"cuda": lambda x: library().gelu(x), "triton": triton_gelu}
OTHERS = {"F.gelu": lambda x: F.gelu(x, approximate="tanh")}
DTYPE = torch.float32
SHAPES = {"gpu": {"shape": (65536, 3072)}, "cpu": {"shape": (5, 1031)}}  # 65,536 tokens in GPT-2 124M's MLP


def inputs(shape, dtype, device):
    return {"x": torch.randn(shape, device=device).to(dtype)}


def reference(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def cost(shape, dtype):
    n = math.prod(shape)
    return {"forward": (10 * n, 2 * n * dtype.itemsize)}


def exercise(x):
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
