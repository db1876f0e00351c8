"""The gated MLP of triton.py with a backward that recomputes gate and up, so autograd saves only x and the weights.

With triton.py, autograd saves gate and up for the backward, 2 F numbers a token. In bf16 that is 4 F bytes, 6 KB at F =
1536, and 184 KB a token over the 30 layers of SmolLM2-135M. Here the backward first runs the forward's kernel again, so
gate, up and all gradients are bit-equal to triton.py's. The backward then writes their gradients over them.

The price is the larger matmul of the forward once more, which is 2/9 more FLOPs.
"""

from torch import Tensor

from kernels.glu.triton import RUNS, detail, unquantized_glu  # noqa: F401
from kernels.gpu import check_dtypes
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401


def glu(x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None) -> Tensor:
    check_dtypes("glu", x, w_fc)
    return unquantized_glu(x, w_fc, b_fc, w_proj, b_proj, save_h=False)
