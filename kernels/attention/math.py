"""scaled_dot_product_attention as PyTorch composes it of products and a softmax: its reference, on any device.

The (B, H, Tq, Tk) scores are in memory as in eager.py; of bf16 they are computed and kept in fp32, twice the bytes.
"""

from math import sqrt

from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention import sdpa


def attention(q, k, v, *, causal=True, scale=None, lengths=None, window=None, starts=None):
    limits = {"causal": causal, "lengths": lengths, "window": window, "starts": starts}
    scale = 1 / sqrt(q.shape[-1]) if scale is None else scale
    with sdpa_kernel(SDPBackend.MATH):
        # Where q and k are scaled alike, torch.compile (Inductor, 2.13) puts a fused kernel in place of the products.
        # PyTorch scales q by -sqrt(|scale|) if scale is negative: the same numbers, and no such pattern
        return sdpa.attention(-q, k, v, scale=-scale, **limits)
