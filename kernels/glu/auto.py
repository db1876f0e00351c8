"""Call the gated MLP that was measured to be the fastest on this GPU: see kernels/fastest.py."""

from functools import partial

from torch import Tensor

from kernels import fastest

deterministic = False  # the backend that it calls may be nondeterministic
unavailable = partial(fastest.unavailable, "glu")
detail = partial(fastest.detail, "glu")


def glu(
    x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None, fp8: bool = False
) -> Tensor:
    return fastest.call_fastest("glu", x, w_fc, b_fc, w_proj, b_proj, fp8=fp8)
