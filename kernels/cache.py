"""The KV cache as one call of the model uses it: a prefill, or a decoding step. model/decoder.py allocates it.

Row p % rows of a layer holds the key of position p. With a sliding window the cache is a ring of `window` rows: a new
key overwrites the key that has just left the window. Attention does not depend on the order of keys, so a decoding step
over a ring masks only the rows that are still empty.

The rows may be in float8_e4m3fn, which takes half the bytes of bf16. Its 3 bits of mantissa round a value by up to 6%.
Its largest value is 448, so keys and values of a trained GPT need no scales.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


class Cache(NamedTuple):
    """The keys and values of all tokens so far, and the places of this call's T tokens.

    A prefill has positions=None. The T tokens of every sequence have the positions keys - T ... keys - 1. A shorter
    sequence ends at `last`, and its rows after `last` may hold anything.
    """

    kv: list[tuple[Tensor, Tensor]]  # (keys, values) of each layer, (B, rows, Hkv, D) each
    keys: int  # attention reads at most this many keys; an int, because it is part of the shapes
    positions: Tensor | None = None  # decoding: (B,) int64, the position of each sequence's first new token
    # Prefill: (B,) int64, the index of each sequence's last token; outside [0, T) if another call has this token
    last: Tensor | None = None
    # Decoding, after locate(): the indices (B, 1) and (B, T) int64 of the new tokens' rows
    slots: tuple[Tensor, Tensor] | None = None
    lengths: Tensor | None = None  # decoding, after locate(): (B,) int32, each sequence's keys, new ones too
    keeps_fp8: bool = False  # append() returns fp8 rows as they are, because attention reads them

    def locate(self, positions: Tensor) -> "Cache":
        """Return the cache with the `slots` and `lengths` of the tokens at token_positions(). All layers share them."""
        if self.positions is None:
            return self
        lengths = (self.positions + positions.shape[1]).clamp(max=self.rows).to(torch.int32)
        sequences = torch.arange(len(lengths), device=lengths.device)[:, None]
        return self._replace(slots=(sequences, positions % self.rows), lengths=lengths)

    def layer(self, i: int) -> "Cache":
        """Return the cache of layer i."""
        return self._replace(kv=self.kv[i : i + 1])

    @property
    def rows(self) -> int:
        return self.kv[0][0].shape[1]

    def token_positions(self, T: int) -> Tensor:
        """Return the positions of this call's tokens: (T,) in a prefill, (B, T) in a decoding step."""
        device = self.kv[0][0].device
        if self.positions is None:
            return torch.arange(self.keys - T, self.keys, device=device)
        return self.positions[:, None] + torch.arange(T, device=device)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (B, T, Hkv, D). Return the keys and values for attention. Call locate() and layer() before."""
        [(keys, values)] = self.kv
        write = self._write_prefill if self.positions is None else self._write_step
        return write(keys, k), write(values, v)

    def select(self, x: Tensor) -> Tensor:
        """Return the tokens of x (B, T, C) that need logits: with `last` one of each sequence, (B, 1, C); else all."""
        if self.last is None:
            return x
        return x[torch.arange(len(x), device=x.device), self.last.clamp(0, x.shape[1] - 1)].unsqueeze(1)

    def _read(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        return stored if self.keeps_fp8 else convert(stored, dtype)

    def _write_step(self, stored: Tensor, new: Tensor) -> Tensor:
        # With scatter_(), Inductor copies the cache in every step: 64 sequences made 45,678 tokens/s instead of 84,534
        as_indexable(stored)[self.slots] = as_indexable(convert(new, stored.dtype))
        return self._read(stored[:, : self.keys], new.dtype)

    def _write_prefill(self, stored: Tensor, new: Tensor) -> Tensor:
        """Write the new keys. Return the earlier keys, of which a ring has the last `rows`, and then the new keys."""
        B, T = new.shape[:2]
        end, rows = self.keys, self.rows
        start = end - T
        if end <= rows:
            stored[:, start:end] = convert(new, stored.dtype)
            return new if start == 0 else self._read(stored[:, :end], new.dtype)
        memory, device = as_indexable(stored), new.device
        before = memory[:, torch.arange(max(0, start - rows), start, device=device) % rows].view(stored.dtype)
        # Each sequence keeps its last `rows` positions. A short sequence ends before this call does
        ends = start + (self.last + 1).clamp(0, T)
        positions = ends[:, None] - rows + torch.arange(rows, device=device)  # (B, rows) that each sequence keeps
        sequences = torch.arange(B, device=device)[:, None]
        values = as_indexable(convert(new[sequences, (positions - start).clamp(min=0)], stored.dtype))
        is_new = (positions >= start)[:, :, None, None]
        memory[sequences, positions % rows] = torch.where(is_new, values, memory[sequences, positions % rows])
        return torch.cat((convert(before, new.dtype), new), dim=1) if start else new


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`. A value beyond the range of fp8 becomes the largest one, because PyTorch would make NaN."""
    if dtype == FP8 and x.dtype != FP8:
        largest = torch.finfo(FP8).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def as_indexable(x: Tensor) -> Tensor:
    """Return x, or its bytes if x is in fp8, because PyTorch cannot index fp8 tensors."""
    return x.view(torch.uint8) if x.dtype == FP8 else x
