"""The MLP of triton.py that keeps nothing but its input: the backward computes h once more.

triton.py keeps h = x W_fc^T + b_fc for the backward, 4 C numbers a token: 8 C bytes in bf16, 6 KB at C = 768, and 74 KB
a token over the 12 layers of GPT-2 124M. Here the backward begins with the forward's kernel, so h and all gradients are
the same bits; and as h is then nobody else's, dh is written over it.

The price is one product more, 7 where there were 6: 1/6 of the op's FLOPs. (A checkpoint around the op would cost both
products of the forward.)
"""

from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.mlp.triton import apply, detail  # noqa: F401

RUNS = ("mlp_(gluon_)?kernel|::mlp_fwd",)


def mlp(x, w_fc, b_fc, w_proj, b_proj):
    return apply(x, w_fc, b_fc, w_proj, b_proj, keep=False)
