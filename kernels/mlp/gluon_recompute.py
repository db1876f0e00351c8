"""The MLP of gluon.py with a backward that recomputes h: see triton_recompute.py."""

from functools import partial

from kernels.gpu import hopper_unavailable
from kernels.mlp.gluon import RUNS, check_inputs, detail, unquantized_mlp  # noqa: F401

unavailable = partial(hopper_unavailable, "mlp", impl="triton_recompute")


def mlp(x, w_fc, b_fc, w_proj, b_proj):
    check_inputs(x, w_fc, "gluon_recompute")
    return unquantized_mlp(x, w_fc, b_fc, w_proj, b_proj, save_h=False)
