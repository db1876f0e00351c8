"""GPT-2, written around its kernels: here are the parameters and the data flow, the mathematics is in `kernels/`.

The names are GPT-2's (wte, wpe, h, ln_1, attn.c_attn, ...), so a state dict is the same under every choice of kernel.
Two dtypes run through it: the compute dtype, in which branches are computed and to which weights are cast where they
are used, and the dtype of the residual stream, which is that of the stored weights (see PRECISIONS).
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kernels.packed import split
from kernels.registry import Ops, keeps
from runtime.config import UserError, check

# name -> (dtype of the stored weights and the residual stream, compute dtype)
PRECISIONS = {
    "fp32": (torch.float32, torch.float32),
    "amp": (torch.float32, torch.bfloat16),  # as nanoGPT's autocast
    "bf16": (torch.bfloat16, torch.bfloat16),  # as llm.c; the optimizer holds fp32 masters
}


@dataclass
class GPTConfig:
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int  # positions in the table wpe
    vocab_size: int  # GPT-2's 50257, padded to a multiple of 64
    pos: str  # learned: GPT-2's table | rope: rotary, no table
    bias: bool
    dropout: float
    n_kv_head: int | None = None  # keys and values, each for n_head / n_kv_head heads (GQA); null: n_head, as GPT-2
    window: int | None = None  # a token sees the last `window` ones, itself included; null: all
    # block: the backward computes each block again, from what enters it (arXiv:1604.06174): 18 KB a token of 12 layers
    # with 768 channels, in bf16; host: that waits in the host's memory
    checkpointing: str = "none"
    keep_attention: bool = False  # in a checkpoint its output: 19 KB a token of these 12 layers, and not computed again

    def __post_init__(self):
        for key in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            check(1 <= getattr(self, key) < 2**31, f"model.{key}={getattr(self, key)}: it must be in [1, 2^31)")
        check(
            self.n_embd % self.n_head == 0,
            f"model.n_embd={self.n_embd} is not a multiple of model.n_head={self.n_head}: heads are equal parts",
        )
        check(
            self.kv_heads >= 1 and self.n_head % self.kv_heads == 0,
            f"model.n_kv_head={self.n_kv_head}: model.n_head={self.n_head} must be a multiple of it",
        )
        check(self.window is None or self.window >= 1, f"model.window={self.window}: it must be at least 1, or null")
        check(self.pos in ("learned", "rope"), f"model.pos={self.pos}: choose learned or rope")
        check(
            self.pos == "learned" or self.head_dim % 2 == 0,
            f"model.pos=rope turns pairs of channels, and n_embd / n_head = {self.head_dim} is odd",
        )
        check(
            self.checkpointing in ("none", "block", "host"),
            f"model.checkpointing={self.checkpointing}: choose none, block or host",
        )
        check(
            self.checkpointing != "none" or not self.keep_attention,
            "model.keep_attention=true is of checkpoints: choose model.checkpointing=block or host",
        )
        check(0 <= self.dropout < 1, f"model.dropout={self.dropout}: it must be in [0, 1)")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def needs(self) -> list[str]:
        """Arguments that its attention must have."""
        return [] if self.window is None else ["window"]

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head


def cast(weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if weight is None else weight.to(dtype)


class Linear(nn.Linear):
    """y = x W^T + b in x's dtype, whatever the weights are stored in."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, cast(self.weight, x.dtype), cast(self.bias, x.dtype))


class LayerNorm(nn.Module):
    """residual += x, then LayerNorm: returns (y in the compute dtype, residual)."""

    def __init__(self, config: GPTConfig, ops: Ops, dtype: torch.dtype):
        super().__init__()
        self.norm, self.dtype = ops.norm, dtype
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        self.bias = nn.Parameter(torch.zeros(config.n_embd)) if config.bias else None

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.norm(x, residual, cast(self.weight, self.dtype), cast(self.bias, self.dtype))


class Cache(NamedTuple):
    """The keys and values of all tokens so far, and where this call's tokens stand among them (model/generate.py)."""

    kv: list[tuple[Tensor, Tensor]]  # a layer's keys and values, (B, T_max, Hkv, D) each in the compute dtype
    positions: Tensor  # (T,) int64
    keys: int  # of T_max, how many are read: part of the shapes, so the same for many steps
    lengths: Tensor | None  # (B,) int32, how many of them exist; None: all

    def layer(self, i: int) -> "Cache":
        return Cache(self.kv[i : i + 1], self.positions, self.keys, self.lengths)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Of one layer: keeps k and v (B, T, Hkv, D) at their positions; returns all there are, (B, keys, Hkv, D)."""
        [(all_k, all_v)] = self.kv
        all_k.index_copy_(1, self.positions, k)
        all_v.index_copy_(1, self.positions, v)
        return all_k[:, : self.keys], all_v[:, : self.keys]


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, ops: Ops):
        super().__init__()
        self.attention, self.heads = ops.attention, (config.n_head, config.kv_heads, config.kv_heads)
        self.limits = {} if config.window is None else {"window": config.window}
        self.c_attn = Linear(config.n_embd, sum(self.heads) * config.head_dim, bias=config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, rope: Tensor | None, starts: Tensor | None, cache: Cache | None) -> Tensor:
        B, T, C = x.shape
        q, k, v = split(self.c_attn(x).view(B, T, sum(self.heads), -1), self.heads)  # (B, T, H or Hkv, D) each
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:
            k, v = cache.append(k, v)
        lengths = None if cache is None else cache.lengths
        given = {name: value for name, value in (("lengths", lengths), ("starts", starts)) if value is not None}
        return self.c_proj(self.attention(q, k, v, **self.limits, **given).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig, ops: Ops):
        super().__init__()
        self.mlp = ops.mlp
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.c_fc.weight, self.c_fc.bias, self.c_proj.weight, self.c_proj.bias
        return self.mlp(x, *(cast(weight, x.dtype) for weight in weights))


class Block(nn.Module):
    """Takes the last branch's output and the residual stream without it; adding them is the next norm's work."""

    def __init__(self, config: GPTConfig, ops: Ops, dtype: torch.dtype):
        super().__init__()
        self.ln_1 = LayerNorm(config, ops, dtype)
        self.attn = Attention(config, ops)
        self.ln_2 = LayerNorm(config, ops, dtype)
        self.mlp = MLP(config, ops)
        self.drop = dropout(config)

    def forward(
        self, x: Tensor, residual: Tensor | None, rope: Tensor | None, starts: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        h, residual = self.ln_1(x, residual)
        h, residual = self.ln_2(self.drop(self.attn(h, rope, starts, cache)), residual)
        return self.drop(self.mlp(h)), residual


class GPT(nn.Module):
    """idx (B, T) -> logits (B, T, V) in the compute dtype; with targets (B, T), their mean cross-entropy instead.

    starts (B, T) int32 keeps attention inside documents: the place in the sequence where each token's own begins.
    With a cache idx is what comes after the tokens that it holds, and the logits are those of the last token (B, 1, V).
    """

    def __init__(self, config: GPTConfig, ops: Ops, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.loss = config, ops.loss
        self.checkpoint = partial(checkpoint, use_reentrant=False)
        if config.keep_attention:
            policy = partial(kept_or_not, keeps(ops.attention))
            contexts = partial(create_selective_checkpoint_contexts, policy)
            self.checkpoint = partial(self.checkpoint, context_fn=contexts)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # also the head (Press and Wolf 2017)
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.pos == "learned" else None
        self.drop = dropout(config)
        self.h = nn.ModuleList(Block(config, ops, dtype) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config, ops, dtype)
        self.init_weights()

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, starts: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        T = idx.shape[1]
        x, residual, rope = self.wte(idx), None, None
        if self.wpe is None:
            positions = torch.arange(T, device=idx.device, dtype=torch.float32) if cache is None else cache.positions
            rope = rope_table(positions, self.config.head_dim)
        else:
            if self.config.block_size < T:
                raise UserError(beyond_table(T, self.config.block_size))
            x = x + (self.wpe.weight[:T] if cache is None else self.wpe(cache.positions))
        x = self.drop(x)
        again = self.config.checkpointing != "none" and torch.is_grad_enabled()
        kept = save_on_cpu(pin_memory=True) if again and self.config.checkpointing == "host" else nullcontext()
        for i, block in enumerate(self.h):
            if again and residual is not None:  # keep one, not two: by prediction 2.7 million tokens of 124M, not 2.0
                x, residual = residual + x, None
            run = partial(block, rope=rope, starts=starts, cache=None if cache is None else cache.layer(i))
            with kept:  # its inputs alone: what it keeps itself is the checkpoint's
                x, residual = self.checkpoint(run, x, residual) if again else run(x, residual)
        if cache is not None:
            x, residual = x[:, -1:], residual[:, -1:]
        x, _ = self.ln_f(x, residual)
        head = cast(self.wte.weight, x.dtype)
        return F.linear(x, head) if targets is None else self.loss(x, head, targets)

    @torch.no_grad()
    def init_weights(self) -> None:
        """GPT-2's: normal with 0.02; the two projections onto the residual stream less, by the number of them."""
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
            elif weight.dim() == 2:
                residual = name.endswith("c_proj.weight")
                weight.normal_(0, 0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02)


def kept_or_not(names: Sequence[str], _, op: OpOverload, *args, **kwargs) -> CheckpointPolicy:
    """For PyTorch's selective checkpoints: the outputs of these operators are kept, all else is computed again."""
    return CheckpointPolicy.MUST_SAVE if op.name() in names else CheckpointPolicy.PREFER_RECOMPUTE


def dropout(config: GPTConfig) -> nn.Module:
    return nn.Dropout(config.dropout) if config.dropout else nn.Identity()


def beyond_table(length: int, block_size: int) -> str:
    return (
        f"a sequence of {length} is beyond the model's position table of model.block_size={block_size}: "
        "shorten it, raise model.block_size, or choose model.pos=rope"
    )


def rope_table(positions: Tensor, head_dim: int) -> Tensor:
    """(2, T, 1, D/2) fp32: the cosines and sines of position * 10000^(-2i/D) (Su et al. 2021, arXiv:2104.09864)."""
    frequencies = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = torch.outer(positions.float(), 10000.0 ** (-frequencies / head_dim))
    return torch.stack((angles.cos(), angles.sin())).unsqueeze(2)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn channel i of the first half with channel i of the second (GPT-NeoX's pairing); x is (B, T, H, D)."""
    cos, sin = rope
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
