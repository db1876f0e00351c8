"""The MLP of triton.py with a backward that recomputes h, so that autograd saves only the input and the weights.

With triton.py, autograd saves h = x W_fc^T + b_fc for the backward, 4 C numbers a token. In bf16 that is 8 C bytes,
6 KB at C = 768, and 74 KB a token over the 12 layers of GPT-2 124M. Here the backward first runs the forward's kernel
again, so h and all gradients are bit-equal to triton.py's. The backward then writes dh over h.

The price is one more matmul, 7 instead of 6, which is 1/6 more FLOPs. A checkpoint around the op would recompute both
matmuls of the forward.
"""

from torch import Tensor

from kernels.gpu import check_dtypes
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.mlp.triton import RUNS, detail, unquantized_mlp  # noqa: F401


def mlp(x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None) -> Tensor:
    check_dtypes("mlp", x, w_fc)
    return unquantized_mlp(x, w_fc, b_fc, w_proj, b_proj, save_h=False)
