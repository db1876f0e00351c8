"""Call the rotation that was measured to be the fastest on this GPU: see kernels/fastest.py."""

from functools import partial
from typing import Any

from torch import Tensor

from kernels import fastest

deterministic = False  # the backend that it calls may be nondeterministic
unavailable = partial(fastest.unavailable, "rope")
detail = partial(fastest.detail, "rope")


def rope(
    qkv: Tensor,
    table: Tensor,
    kv_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    norm: dict[str, Any] = {} if q_weight is None else {"q_weight": q_weight, "k_weight": k_weight, "eps": eps}
    return fastest.call_fastest("rope", qkv, table, kv_heads, **norm)
