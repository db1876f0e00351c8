"""The MLP of gluon.py with a backward that recomputes h: see triton_recompute.py."""

from functools import partial

from torch import Tensor

from kernels.gpu import hopper_unavailable
from kernels.mlp.gluon import RUNS, detail, refusal, unquantized_mlp  # noqa: F401
from kernels.registry import Unavailable

unavailable = partial(hopper_unavailable, "mlp", impl="triton_recompute")


def mlp(x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None) -> Tensor:
    if reason := refusal(x, w_fc):
        raise Unavailable(f"mlp=gluon_recompute takes {reason}: choose kernels.mlp=triton_recompute")
    return unquantized_mlp(x, w_fc, b_fc, w_proj, b_proj, save_h=False)
