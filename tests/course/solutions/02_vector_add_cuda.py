"""Three loads of x in each thread. Two of them are in the L1 cache, because the neighbouring threads load them, too."""

import functools

from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <c10/cuda/CUDAStream.h>

__global__ void average_kernel(const float* x, const float* y, float* out, int64_t n) {
  int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i >= n) return;
  float left = i > 0 ? x[i - 1] : 0.0f;
  float right = i + 1 < n ? x[i + 1] : 0.0f;
  out[i] = (left + x[i] + right) / 3.0f + y[i];
}

torch::Tensor average(torch::Tensor x, torch::Tensor y) {
  torch::Tensor out = torch::empty_like(x);
  int64_t n = x.numel();
  cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  int64_t blocks = (n + 255) / 256;
  average_kernel<<<blocks, 256, 0, stream>>>(x.data_ptr<float>(), y.data_ptr<float>(), out.data_ptr<float>(), n);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}
"""
DECLARATION = "torch::Tensor average(torch::Tensor x, torch::Tensor y);"


@functools.cache
def library():
    return load_inline("course_average", cpp_sources=DECLARATION, cuda_sources=SOURCE, functions=["average"])


def solution(x, y):
    return library().average(x, y)
