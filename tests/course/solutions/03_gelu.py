"""gelu(x) = x s, where s is the sigmoid of 2 u, and s' = s (1 - s) 2 u'. So gelu' = s + x s (1 - s) 2 u'."""

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < n)
    square = x * x
    s = tl.sigmoid(1.5957691216 * x * (1 + 0.044715 * square))
    derivative_of_twice_u = 1.5957691216 * (1 + 3 * 0.044715 * square)
    tl.store(out_ptr + at, s + x * s * (1 - s) * derivative_of_twice_u, at < n)


def solution(x):
    out = torch.empty_like(x)
    kernel[(triton.cdiv(out.numel(), 1024),)](x, out, out.numel(), BLOCK=1024)
    return out
