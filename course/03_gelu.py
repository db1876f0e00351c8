"""Rung 3: GELU, in CUDA C++ and in Triton.

GPT-2's MLP applies gelu(x) = 0.5 x (1 + tanh(u)), with u = sqrt(2 / pi) (x + 0.044715 x^3), to each number between its
two matmuls (Hendrycks and Gimpel 2016, arXiv:1606.08415). `reference` below has eight operators: eight kernels. A pass
is a read or a write of the whole tensor. Six operators make two passes, and the two that combine two tensors make
three: 18 passes. One kernel for the whole formula is called fused. It makes two passes, because all intermediate
results stay in registers. An element takes 8 bytes in fp32 and about 10 FLOP, far below the ridge. So the fused kernel
can take a ninth of the time. The hardware has an exponential, so both kernels use 0.5 (1 + tanh(u)) = sigmoid(2 u).

Exercise: `exercise` below is the derivative of gelu(x), which the backward needs, with 17 operators. Write one kernel
for it, in either language, behind a function `solution(x)`. Express it by the sigmoid s of 2 u, so that it takes one
exponential: what is the derivative of s? Run `python course/03_gelu.py mine.py`.
"""

import functools

import torch
import triton
import triton.language as tl
from torch.utils.cpp_extension import load_inline

SOURCE = r"""#include <c10/cuda/CUDAStream.h>

__global__ void gelu_kernel(const float* x, float* out, int64_t n) {
  int64_t first = int64_t(blockIdx.x) * 1024 + threadIdx.x;
  float values[4];
  for (int k = 0; k < 4; ++k) values[k] = first + 256 * k < n ? x[first + 256 * k] : 0.0f;
  for (int k = 0; k < 4; ++k) {
    float v = values[k], twice_u = 1.5957691216f * (v + 0.044715f * v * v * v);  // 2 sqrt(2 / pi)
    if (first + 256 * k < n) out[first + 256 * k] = v / (1.0f + expf(-twice_u));
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
    return load_inline("course_gelu", "torch::Tensor gelu(torch::Tensor x);", SOURCE, functions=["gelu"])


@triton.jit
def gelu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < n)
    tl.store(out_ptr + at, x * tl.sigmoid(1.5957691216 * (x + 0.044715 * x * x * x)), at < n)


def triton_gelu(x):
    out, n = torch.empty_like(x), x.numel()
    gelu_kernel[(triton.cdiv(n, 1024),)](x, out, n, BLOCK=1024)
    return out


KERNELS = {"cuda": lambda x: library().gelu(x), "triton": triton_gelu}
OTHERS = {"F.gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh")}
DTYPE = torch.float32
SHAPES = {"gpu": {"n": 65536 * 3072}, "cpu": {"n": 5000}}  # 65,536 tokens in GPT-2 124M's MLP


def inputs(n, dtype, device):
    return {"x": torch.randn(n, device=device).to(dtype)}


def reference(x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def cost(n, dtype):
    return {"forward": (10 * n, 2 * n * dtype.itemsize)}


def exercise(x):
    tanh = torch.tanh(0.7978845608 * (x + 0.044715 * x**3))
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * 0.7978845608 * (1 + 3 * 0.044715 * x**2)


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
