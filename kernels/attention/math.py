"""scaled_dot_product_attention from matmuls and a softmax: PyTorch's own reference, on any device.

It writes the (B, H, Tq, Tk) scores to memory, as eager.py does. For bf16 inputs PyTorch computes and saves the scores
in fp32, which takes twice the bytes.
"""

from math import sqrt

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention import sdpa


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    lengths: Tensor | None = None,
    window: int | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    limits = {"causal": causal, "lengths": lengths, "window": window, "starts": starts}
    scale = 1 / sqrt(q.shape[-1]) if scale is None else scale
    with sdpa_kernel(SDPBackend.MATH):
        # PyTorch multiplies both q and k by sqrt(scale). torch.compile (Inductor, 2.13) recognizes this pattern and
        # replaces the matmuls with a fused kernel. Given -q and -scale, PyTorch multiplies -q by -sqrt(scale). The
        # numbers are the same, but Inductor does not recognize this pattern
        return sdpa.attention(-q, k, v, scale=-scale, **limits)
