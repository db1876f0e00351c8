"""Call the MLP that was measured to be the fastest on this GPU: see kernels/fastest.py."""

from functools import partial

from torch import Tensor

from kernels import fastest

deterministic = False  # the backend that it calls may be nondeterministic
unavailable = partial(fastest.unavailable, "mlp")
detail = partial(fastest.detail, "mlp")


def mlp(
    x: Tensor,
    w_fc: Tensor,
    b_fc: Tensor | None,
    w_proj: Tensor,
    b_proj: Tensor | None,
    fp8: bool = False,
    activation: str = "gelu",
) -> Tensor:
    options = {} if activation == "gelu" else {"activation": activation}
    return fastest.call_fastest("mlp", x, w_fc, b_fc, w_proj, b_proj, fp8=fp8, **options)
