"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864)."""

import torch
from torch import Tensor


def rope_table(positions: Tensor, head_dim: int, theta: float = 10000.0) -> Tensor:
    """positions (T,) or (B, T) -> (2, [B,] T, 1, D/2) fp32: cosine and sine of position * theta^(-2i/D)."""
    frequencies = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float().unsqueeze(-1) * theta ** (-frequencies / head_dim)
    return torch.stack((angles.cos(), angles.sin())).unsqueeze(-2)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate each pair of channels of x (B, T, H, D): i and i + D/2, as in GPT-NeoX. `rope` is rope_table()'s."""
    cos, sin = rope
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
