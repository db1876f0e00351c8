"""Call the loss that was measured to be the fastest on this GPU: see kernels/fastest.py."""

from functools import partial

from torch import Tensor

from kernels import fastest
from kernels.loss import softcap_argument

deterministic = False  # the backend that it calls may be nondeterministic
unavailable = partial(fastest.unavailable, "loss")
detail = partial(fastest.detail, "loss")


def loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -1,
    fp8: bool = False,
    softcap: float | None = None,
) -> Tensor:
    options = {"ignore_index": ignore_index, **softcap_argument(softcap)}
    return fastest.call_fastest("loss", x, weight, targets, fp8=fp8, **options)
