"""The contract of the op rope: rotary positions for queries and keys (Su et al. 2021, arXiv:2104.09864).

    rope(qkv, table, kv_heads, q_weight=None, k_weight=None, eps=1e-5) -> out

    qkv       (B, T, H + 2 Hkv, D)  queries, keys and values side by side, in the compute dtype; D is even
    table     (2, T, 1, D/2) or (2, B, T, 1, D/2)  fp32, from rope_table()
    kv_heads  Hkv
    q_weight, k_weight  (D,)  in the compute dtype. With them, each query and each key is first normalised by RMSNorm
              over its D channels (Dehghani et al. 2023, arXiv:2302.05442; Qwen3). Both or neither are None
    out       (B, T, H + 2 Hkv, D)  like qkv, with rotated queries and keys. The values are copies

A rotation turns each pair of channels, i and i + D/2 (as in GPT-NeoX and Llama), by an angle of the table. The result
stays packed, so attention's gradients of q, k and v come back side by side, and nothing is concatenated (packed.py).

The table has no gradient. A backend that cannot normalise omits q_weight and k_weight from its function; the registry
then raises Unavailable for model.qk_norm=true. A backend may return NaN gradients for weights for which they would be
imprecise, with why_nan(q_weight, k_weight), as in norm.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TENSORS = {"qkv": "B T heads D", "q_weight": "D", "k_weight": "D"}
ANY_STRIDES = ("qkv",)
OPTIONAL = ("q_weight", "k_weight", "eps")  # arguments that a backend may lack

# The shapes to measure: (B, T, H + 2 Hkv, D) of GPT-2 124M's heads, of SmolLM2-135M and of Qwen3-0.6B
SHAPES = {
    "124m": {"shape": (64, 1024, 36, 64), "kv_heads": 12},
    "smollm2-135m": {"shape": (64, 1024, 15, 64), "kv_heads": 3},
    "qwen3-0.6b": {"shape": (16, 1024, 32, 128), "kv_heads": 8, "qk_norm": True},
}

CASES = {
    "64": {"shape": (2, 33, 9, 64), "kv_heads": 3},
    "128": {"shape": (1, 33, 4, 128), "kv_heads": 1},
    "80": {"shape": (2, 17, 6, 80), "kv_heads": 2},
    "D=2": {"shape": (3, 5, 3, 2), "kv_heads": 1},
    "D=30": {"shape": (2, 7, 7, 30), "kv_heads": 2},
    "one_token": {"shape": (1, 1, 3, 64), "kv_heads": 1},
    "many_heads": {"shape": (1, 9, 70, 32), "kv_heads": 4},
    "large_positions": {"shape": (2, 9, 3, 64), "kv_heads": 1, "first": 100_000},
    "positions_of_sequences": {"shape": (3, 9, 6, 64), "kv_heads": 2, "per_sequence": True},
    "norm": {"shape": (2, 33, 6, 64), "kv_heads": 2, "qk_norm": True},
    "norm_80": {"shape": (2, 17, 4, 80), "kv_heads": 1, "qk_norm": True, "per_sequence": True},
    "norm_small": {"shape": (2, 9, 3, 16), "kv_heads": 1, "qk_norm": True, "scale": 1e-3},
    "norm_eps": {"shape": (2, 9, 3, 16), "kv_heads": 1, "qk_norm": True, "eps": 0.1},
    "non_contiguous": {"shape": (2, 10, 6, 64), "kv_heads": 2, "qk_norm": True, "contiguous": False},
}

SIZES = {str(D): {"shape": (2, 33, 6, D), "kv_heads": 2} for D in (64, 80, 96, 128, 256)}
FEATURES = ["norm", "positions_of_sequences"]

MODEL = {"pos": "rope"}
BOUND = "bytes"
FAMILY = r"(?i)rope|rotary"


def in_model(
    *,
    batch: int,
    length: int,
    n_head: int,
    kv_heads: int,
    head_dim: int,
    pos: str,
    qk_norm: bool,
    eps: float,
    keys: int | None = None,
    **_: object,
) -> dict[str, Any] | None:
    """Return the arguments of inputs() for a model's call. In a decoding step each sequence has its own position."""
    if pos != "rope":
        return None
    options = {"per_sequence": True} if keys else {}
    options |= {"qk_norm": True, "eps": eps} if qk_norm else {}
    return {"shape": (batch, length, n_head + 2 * kv_heads, head_dim), "kv_heads": kv_heads, **options}


def rope_table(positions: Tensor, head_dim: int, theta: float = 10000.0, scaling: float | None = None) -> Tensor:
    """positions (T,) or (B, T) -> (2, [B,] T, 1, D/2) fp32: cosine and sine of position * theta^(-2i/D).

    `scaling` is the factor of Llama 3 by which the slow frequencies are divided: see scale_frequencies().
    """
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = theta ** (-pairs / head_dim)
    if scaling is not None:
        frequencies = scale_frequencies(frequencies, scaling)
    angles = positions.float().unsqueeze(-1) * frequencies
    return torch.stack((angles.cos(), angles.sin())).unsqueeze(-2)


# Llama 3 was trained on 8,192 tokens. A frequency that turns at least 4 times in them stays as it is, and one that
# turns at most once is divided by the factor
TRAINED_LENGTH, LOW, HIGH = 8192, 1.0, 4.0


def scale_frequencies(frequencies: Tensor, factor: float) -> Tensor:
    """Divide the slow frequencies by `factor`, as Llama 3.1 does, and interpolate between slow and fast ones."""
    turns = TRAINED_LENGTH * frequencies / (2 * math.pi)
    share = ((turns - LOW) / (HIGH - LOW)).clamp(0, 1)  # 1: a fast frequency, which stays
    return frequencies * (share + (1 - share) / factor)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate each pair of channels of x (B, T, H, D): i and i + D/2. `table` is rope_table()'s."""
    cos, sin = table
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def reference(
    qkv: Tensor,
    table: Tensor,
    kv_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    q, k, v = qkv.split((qkv.shape[2] - 2 * kv_heads, kv_heads, kv_heads), dim=2)
    rotated = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        if weight is not None:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        rotated.append(rotate(x, table).to(qkv.dtype))
    return torch.cat((*rotated, v), dim=2)


def conflict(
    qkv: Tensor,
    table: Tensor,
    kv_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    **_: object,
) -> str | None:
    """Return, in one line, why the sizes of the arguments do not fit together, or None."""
    B, T, heads, D = qkv.shape
    if D % 2:
        return f"a head of qkv has {D} channels: it must be even, because pairs of channels turn"
    if not 0 < 2 * kv_heads < heads:
        return f"qkv has {heads} heads: with kv_heads={kv_heads} keys and values, no heads are left for queries"
    if tuple(table.shape) not in ((2, T, 1, D // 2), (2, B, T, 1, D // 2)):
        return f"table has the shape {tuple(table.shape)}, and must have {(2, T, 1, D // 2)} or {(2, B, T, 1, D // 2)}"
    if (q_weight is None) != (k_weight is None):
        return "only one of q_weight and k_weight is given"
    return None


def inputs(
    shape: Sequence[int],
    *,
    kv_heads: int,
    qk_norm: bool = False,
    eps: float | None = None,
    first: int = 0,
    per_sequence: bool = False,
    scale: float = 1.0,
    contiguous: bool = True,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Return random arguments of rope(), as a dict. `shape` is that of qkv, (B, T, H + 2 Hkv, D).

    The first token has the position `first`. With per_sequence, each sequence begins at another one.
    """
    generator = torch.Generator(device).manual_seed(seed)
    B, T, heads, D = shape
    width = D if contiguous else D + 8

    def randn(*size: int, std: float, mean: float = 0.0) -> Tensor:
        return (mean + std * torch.randn(*size, generator=generator, device=device)).to(dtype)

    positions = first + torch.arange(T, device=device)
    if per_sequence:
        positions = positions + 7 * torch.arange(B, device=device)[:, None]
    arguments: dict[str, Any] = {"qkv": randn(B, T, heads, width, std=scale)[..., :D].detach().requires_grad_()}
    arguments |= {"table": rope_table(positions, D), "kv_heads": kv_heads}
    if qk_norm:
        arguments |= {name: randn(D, std=0.1, mean=1.0).requires_grad_() for name in ("q_weight", "k_weight")}
    return arguments | ({} if eps is None else {"eps": eps})


def cost(
    shape: Sequence[int],
    *,
    kv_heads: int,
    qk_norm: bool = False,
    per_sequence: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **_: object,
) -> dict[str, tuple[int, int]]:
    """Return {"forward": (FLOPs, bytes), "backward": (FLOPs, bytes)}.

    The backward reads the gradient and writes another, and with qk_norm reads the queries and keys again.
    """
    B, T, heads, D = shape
    elements, turned = B * T * heads * D, B * T * (heads - kv_heads) * D
    table = 4 * T * D * (B if per_sequence else 1)
    weights = 2 * D * dtype.itemsize if qk_norm else 0
    forward = 2 * elements * dtype.itemsize + table + weights
    backward = forward + (turned * dtype.itemsize + weights if qk_norm else 0)
    return {
        "forward": ((3 + 4 * qk_norm) * turned, forward),
        "backward": ((3 + 9 * qk_norm) * turned, backward),
    }
