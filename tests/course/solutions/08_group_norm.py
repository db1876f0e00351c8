"""A program reduces one channel: a loop over the images, and inside it a loop over the blocks of an image."""

import torch
import triton
import triton.language as tl


@triton.jit
def batch_norm_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, B, C, PIXELS: tl.constexpr, BLOCK: tl.constexpr):
    channel = tl.program_id(0).to(tl.int64)
    n, mean, m2 = 0.0, 0.0, 0.0
    for image in range(B):
        run = (image * C + channel) * PIXELS
        for start in range(0, PIXELS, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + run + at, at < PIXELS, other=0.0).to(tl.float32)
            k = tl.minimum(BLOCK, PIXELS - start).to(tl.float32)
            block_mean = tl.sum(x, 0) / k
            centred = tl.where(at < PIXELS, x - block_mean, 0.0)
            d = block_mean - mean
            mean += d * k / (n + k)
            m2 += tl.sum(centred * centred, 0) + d * d * n * k / (n + k)
            n += k
    rstd = 1.0 / tl.sqrt(m2 / n + 1e-5)
    weight = tl.load(weight_ptr + channel).to(tl.float32)
    bias = tl.load(bias_ptr + channel).to(tl.float32)
    for image in range(B):
        run = (image * C + channel) * PIXELS
        for start in range(0, PIXELS, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + run + at, at < PIXELS, other=0.0).to(tl.float32)
            y = (x - mean) * rstd * weight + bias
            tl.store(out_ptr + run + at, y * tl.sigmoid(y), at < PIXELS)


def solution(x, weight, bias, groups):
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    B, C, H, W = x.shape
    batch_norm_kernel[(C,)](x, weight, bias, out, B, C, PIXELS=H * W, BLOCK=4096, num_warps=8)
    return out
