"""The KV cache as one forward pass uses it. model/generate.py allocates the tensors."""

from typing import NamedTuple

from torch import Tensor


class Cache(NamedTuple):
    """The keys and values of all tokens so far, and the positions of this call's tokens."""

    kv: list[tuple[Tensor, Tensor]]  # (keys, values) of each layer, (B, T_max, Hkv, D) each, in the compute dtype
    positions: Tensor  # (T,) int64: the positions of this call's tokens
    keys: int  # attention reads the first `keys` of the T_max positions; an int, because it is part of the shapes
    lengths: Tensor | None  # (B,) int32: how many of these positions hold a token; None: all of them

    def layer(self, i: int) -> "Cache":
        """The cache of layer i alone."""
        return self._replace(kv=self.kv[i : i + 1])

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (B, T, Hkv, D) into a cache of one layer(). Returns its first `keys` keys and values."""
        [(all_k, all_v)] = self.kv
        all_k.index_copy_(1, self.positions, k)
        all_v.index_copy_(1, self.positions, v)
        return all_k[:, : self.keys], all_v[:, : self.keys]
