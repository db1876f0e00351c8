"""Each block normalises its own copy of x: shuffles add the squares of a warp, shared memory those of all warps."""

import functools

import torch
from torch.utils.cpp_extension import load_inline

KERNEL = r"""
#include <cooperative_groups.h>
#include <cuda_bf16.h>
typedef __nv_bfloat16 bf16;
constexpr int C = 768, F = 4 * C, WARPS = C / 32, ROWS = WARPS / 4, BLOCKS = F / WARPS;  // a thread for each channel
__device__ void load(uint4 (&piece)[C / 256], const bf16* weights) {  // a thread gets 8 of each 256 weights
  const uint4* from = (const uint4*)weights + (blockIdx.x * WARPS + threadIdx.x / 32) * (C / 8) + threadIdx.x % 32;
  for (int i = 0; i < C / 256; ++i) piece[i] = __ldcs(from + 32 * i);
}
__device__ float warp_sum(float sum) {
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
  return sum;
}
__device__ float multiply(const uint4 (&piece)[C / 256], const float* x) {  // all threads of a warp get its sum
  float sum = 0;
  for (int i = 0; i < 8 * (C / 256); ++i)
    sum += __bfloat162float(((const bf16*)piece)[i]) * x[i / 8 * 256 + threadIdx.x % 32 * 8 + i % 8];
  return warp_sum(sum);
}
__global__ void __launch_bounds__(C) decode_kernel(
    const bf16* x, const bf16* w1, const bf16* w2, bf16* out, float* hidden, float* branch, int64_t layers) {
  __shared__ float normalized[C], input[F], sums[WARPS];
  auto grid = cooperative_groups::this_grid();
  const int t = threadIdx.x, warp = t / 32;
  float stream = __bfloat162float(x[t]);  // a channel of x in each thread
  uint4 piece[C / 256];
  load(piece, w1);
  for (int64_t layer = 0; layer < layers; ++layer) {
    sums[warp] = warp_sum(stream * stream);
    __syncthreads();
    float squares = 0;
    for (int i = 0; i < WARPS; ++i) squares += sums[i];
    normalized[t] = stream * rsqrtf(squares / C + 1e-5f);
    __syncthreads();
    const float h = multiply(piece, normalized);
    if (t % 32 == 0) hidden[blockIdx.x * WARPS + warp] = h / (1 + __expf(-1.5957691f * h * (1 + 0.044715f * h * h)));
    auto arrival = grid.barrier_arrive();
    load(piece, w2 + layer * C * F);
    grid.barrier_wait(std::move(arrival));
    for (int i = t; i < F; i += C) input[i] = hidden[i];
    __syncthreads();
    sums[warp] = multiply(piece, input + warp % 4 * C);
    __syncthreads();
    if (t < ROWS) branch[blockIdx.x * ROWS + t] = sums[4 * t] + sums[4 * t + 1] + sums[4 * t + 2] + sums[4 * t + 3];
    arrival = grid.barrier_arrive();
    load(piece, w1 + (layer + 1) % layers * F * C);  // after the last layer nobody uses it
    grid.barrier_wait(std::move(arrival));
    stream += branch[t];
  }
  if (blockIdx.x == 0) out[t] = __float2bfloat16(stream);
}
void decode(std::vector<int64_t> a) {
  void* arguments[] = {&a[0], &a[1], &a[2], &a[3], &a[4], &a[5], &a[6]};
  auto error = cudaLaunchCooperativeKernel((void*)decode_kernel, BLOCKS, C, arguments, 0, (cudaStream_t)a[7]);
  TORCH_CHECK(error == cudaSuccess, cudaGetErrorString(error));
}
"""
SIGNATURE = "void decode(std::vector<int64_t> a);"
library = functools.cache(lambda: load_inline("course_decoder_with_norm", SIGNATURE, KERNEL, functions=["decode"]))


def solution(x, w1, w2):
    out, (hidden, branch) = torch.empty_like(x), torch.empty(2, 3072, dtype=torch.float32, device=x.device)
    addresses = [tensor.data_ptr() for tensor in (x, w1, w2, out, hidden, branch)]
    library().decode([*addresses, len(w1), torch.cuda.current_stream().cuda_stream])
    return out
