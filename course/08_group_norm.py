"""Rung 8: GroupNorm and SiLU of a diffusion U-Net, a reduction in a loop.

A block of such a U-Net normalises an image x (B, C, H, W) in groups of channels (GroupNorm, Wu and He 2018,
arXiv:1803.08494), scales each channel, and applies SiLU:

    y = (x - mean) rstd weight[c] + bias[c]    out = y sigmoid(y)

In memory the pixels of a channel are neighbours, and so are the channels of a group. So a group of an image is one run
of C / groups H W numbers. Here that is 10 channels of 64 x 64 pixels: 40,960 numbers, too many for the registers of a
program. A program reads its group in blocks, twice: first for the mean and the variance, then to write the result.

E[x^2] - E[x]^2 is inexact if the mean is far from 0, because it subtracts two large numbers. So the program computes
the mean of a block and m2, the sum of its squared distances from that mean. It merges them with those of the n numbers
before (Chan, Golub and LeVeque 1979). With k numbers in the block, and d = mean of the block - mean so far:

    mean += d k / (n + k)    m2 += m2 of the block + d^2 n k / (n + k)

In bf16 an element takes 4 bytes, one read and one write, and about 15 FLOP: memory-bound. The second read should find
the group in the L2 cache. With 16 warps a program, a multiprocessor runs 4 programs. The groups of all running programs
are 132 x 4 x 82 kB = 43 MB, and the L2 cache of an H200 has 50 MB.

Exercise: `exercise` is BatchNorm and SiLU. It normalises a channel over all images: the numbers that a program reduces
are B runs of H W pixels, and C H W apart. Write it as one kernel behind a function `solution(x, weight, bias, groups)`,
which does not need groups. Images may be smaller than a block of your program. Run

    python course/08_group_norm.py mine.py
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


@triton.jit
def group_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, eps, C: tl.constexpr, GROUPS: tl.constexpr, PIXELS: tl.constexpr
):
    BLOCK: tl.constexpr = 8192
    SIZE: tl.constexpr = C // GROUPS * PIXELS
    group = tl.program_id(0).to(tl.int64)  # of B GROUPS
    n, mean, m2 = 0.0, 0.0, 0.0
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + group * SIZE + at, at < SIZE, other=0.0).to(tl.float32)
        k = tl.minimum(BLOCK, SIZE - start).to(tl.float32)
        block_mean = tl.sum(x, 0) / k
        centred = tl.where(at < SIZE, x - block_mean, 0.0)
        d = block_mean - mean
        mean += d * k / (n + k)
        m2 += tl.sum(centred * centred, 0) + d * d * n * k / (n + k)
        n += k
    rstd = 1.0 / tl.sqrt(m2 / SIZE + eps)
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + group * SIZE + at, at < SIZE, other=0.0).to(tl.float32)
        channel = (group % GROUPS) * (C // GROUPS) + at // PIXELS
        weight = tl.load(weight_ptr + channel, at < SIZE, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + channel, at < SIZE, other=0.0).to(tl.float32)
        y = (x - mean) * rstd * weight + bias
        tl.store(out_ptr + group * SIZE + at, y * tl.sigmoid(y), at < SIZE)


def group_norm_silu(x, weight, bias, groups):
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    B, C, H, W = x.shape
    constants = {"C": C, "GROUPS": groups, "PIXELS": H * W}
    group_norm_kernel[(B * groups,)](x, weight, bias, out, 1e-5, **constants, num_warps=16)
    return out


KERNELS = {"triton": group_norm_silu}
SHAPES = {"gpu": {"shape": (64, 320, 64, 64)}, "cpu": {"shape": (2, 64, 65, 67)}}  # Stable Diffusion's first level


def inputs(shape, dtype, device):
    x = torch.randn(shape, device=device) + 1
    weight, bias = 1 + 0.1 * torch.randn(shape[1], device=device), 0.1 * torch.randn(shape[1], device=device)
    return {"x": x.to(dtype), "weight": weight.to(dtype), "bias": bias.to(dtype), "groups": 32}


def reference(x, weight, bias, groups):
    return F.silu(F.group_norm(x, groups, weight, bias, 1e-5))


def cost(shape, dtype):
    n = torch.Size(shape).numel()
    return {"forward": (15 * n, 2 * n * dtype.itemsize)}


def exercise(x, weight, bias, groups):
    return F.silu(F.batch_norm(x, None, None, weight, bias, training=True))


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
