"""The loss of gluon.py with all tokens in one chunk, for runs with memory to spare: see triton_whole.py.

The (N, V) matrix that exists until the forward ends has the exponentials of the logits.
"""

from functools import partial

from torch import Tensor

from kernels.gpu import hopper_unavailable
from kernels.loss.gluon import RUNS, apply_to_rows, detail, linear_cross_entropy, refusal  # noqa: F401
from kernels.registry import Unavailable

unavailable = partial(hopper_unavailable, "loss", impl="triton_whole")


def loss(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -1, softcap: float | None = None) -> Tensor:
    if reason := refusal(x, weight):
        raise Unavailable(f"loss=gluon_whole takes {reason}: choose kernels.loss=triton_whole")
    return apply_to_rows(linear_cross_entropy, x, weight, targets, ignore_index, True, softcap)  # whole: one chunk
