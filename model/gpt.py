"""GPT-2, written around its kernels: the parameters and the data flow are here, the mathematics is in `kernels/`.

The parameters have GPT-2's names (wte, wpe, h, ln_1, attn.c_attn, ...), and no kernel adds parameters, so a state dict
is the same under every choice of kernels.

The model has two dtypes. The branches (attention and MLP) run in the compute dtype, to which each weight is cast where
it is used. The residual stream has the dtype of the stored weights (PRECISIONS in model/config.py).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from kernels.cache import Cache
from kernels.loss import cap_logits, softcap_argument
from kernels.packed import split
from kernels.registry import Ops
from kernels.rope import rope_table
from model.chunks import run_in_chunks
from model.config import EPS, GPTConfig
from model.layers import Linear, Norm, cast
from model.recompute import BlockRunner
from runtime.config import UserError


class Attention(nn.Module):
    """Causal self-attention, x (B, T, C) -> (B, T, C). With a cache, x are the tokens that follow the cached ones."""

    def __init__(self, config: GPTConfig, ops: Ops):
        super().__init__()
        self.attention = self.cached_attention = ops.attention  # parallel=context replaces the first
        self.heads = (config.n_head, config.kv_heads, config.kv_heads)
        self.options = {} if config.window is None else {"window": config.window}
        self.rope = ops.rope
        self.q_norm = nn.RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None
        self.c_attn = Linear(ops, config.n_embd, sum(self.heads) * config.head_size, bias=config.bias)
        self.c_proj = Linear(ops, config.n_head * config.head_size, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, rope: Tensor | None, starts: Tensor | None, cache: Cache | None) -> Tensor:
        return self.c_proj(self.attend(*self.qkv(x, rope), starts, cache).flatten(2))

    def qkv(self, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, T, H, D), k and v (B, T, Hkv, D), views of one tensor.

        q and k are rotated if the positions are rotary, and before that normalised if the model does so.
        """
        qkv = self.c_attn(x).view(*x.shape[:2], sum(self.heads), -1)
        if rope is not None:
            qkv = self.rope(qkv, rope, self.heads[1], **self.norms_in_dtype(x.dtype))
        return split(qkv, self.heads)

    def norms_in_dtype(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments of rope() that normalise q and k: only those in use, because a backend may lack them."""
        if self.q_norm is None:
            return {}
        weights = {"q_weight": cast(self.q_norm.weight, dtype), "k_weight": cast(self.k_norm.weight, dtype)}
        return weights if self.q_norm.eps == EPS else {**weights, "eps": self.q_norm.eps}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, cache: Cache | None = None) -> Tensor:
        """Return the output of each head, (B, T, H, D)."""
        attention = self.attention
        options = dict(self.options)  # only the arguments in use: a backend need not take the others
        if starts is not None:
            options["starts"] = starts
        if cache is not None:
            k, v = cache.append(k, v)
            attention = self.cached_attention
            if cache.positions is not None:  # a decoding step, whose cache holds no key outside the window
                options = {"lengths": cache.lengths}
        return attention(q, k, v, **options)


class MLP(nn.Module):
    """x (B, T, C) -> (B, T, C). With mlp=swiglu, c_fc has the rows of the gate, then those of up (kernels/glu)."""

    def __init__(self, config: GPTConfig, ops: Ops):
        super().__init__()
        self.op = "glu" if config.mlp == "swiglu" else "mlp"
        self.mlp = getattr(ops, self.op)
        self.options = {"activation": config.mlp} if config.mlp == "relu2" else {}  # a backend need not take it
        rows = config.hidden_size * (2 if self.op == "glu" else 1)
        self.c_fc = nn.Linear(config.n_embd, rows, bias=config.bias)
        self.c_proj = nn.Linear(config.hidden_size, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.c_fc.weight, self.c_fc.bias, self.c_proj.weight, self.c_proj.bias
        return self.mlp(x, *(cast(weight, x.dtype) for weight in weights), **self.options)


class Block(nn.Module):
    """(x, residual) -> (x, residual), (B, T, C) each: x is the output of the last branch, not yet added to the stream.

    The next norm adds x to residual, because a kernel can do both in one pass. With checkpointing=chunks it returns
    (x + residual, None).
    """

    def __init__(self, config: GPTConfig, ops: Ops, dtype: torch.dtype):
        super().__init__()
        is_square = (config.n_head + 2 * config.kv_heads) * config.head_size == config.n_embd  # see kernels/fp8.py
        self.ln_1 = Norm(config, ops, dtype, next_op=None if is_square else "linear")
        self.attn = Attention(config, ops)
        mlp = MLP(config, ops)
        self.ln_2 = Norm(config, ops, dtype, next_op=mlp.op)  # before mlp: nanoGPT's optimizer numbers the tensors
        self.mlp = mlp
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.chunked = config.checkpointing == "chunks"

    def forward(
        self, x: Tensor, residual: Tensor | None, rope: Tensor | None, starts: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.chunked and cache is None:
            return run_in_chunks(self, x if residual is None else residual + x, rope, starts), None
        h, residual = self.ln_1(x, residual)
        h, residual = self.ln_2(self.drop(self.attn(h, rope, starts, cache)), residual)
        return self.drop(self.mlp(h)), residual


class GPT(nn.Module):
    """idx (B, T) -> logits (B, T, V) in the compute dtype; with targets (B, T), their mean cross-entropy instead.

    starts (B, T) int32 keeps attention inside documents: for each token, the index at which its document begins. With a
    cache, idx has only the new tokens, which follow the cached ones. A prefill returns the logits of each sequence's
    last token, (B, 1, V). Raises UserError if idx has another shape or dtype, or is longer than the table of learned
    positions.
    """

    def __init__(self, config: GPTConfig, ops: Ops, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.ops, self.loss = config, ops, ops.loss
        self.part = 0  # with parallel=context, idx is this part of each sequence: see model/context.py
        self.run_block = BlockRunner(config.checkpointing, config.keep_attention, ops.attention, config.dropout)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        # None: the head is wte (Press and Wolf 2017)
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.pos == "learned" else None
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.h = nn.ModuleList(Block(config, ops, dtype) for _ in range(config.n_layer))
        self.ln_f = Norm(config, ops, dtype)
        self.init_weights()

    def __call__(self, idx: Tensor, *tensors: Tensor, cache: Cache | None = None, **named: Tensor) -> Tensor:
        """Check idx, and call forward(). model.compile() compiles only forward(), so these errors stay as they are."""
        if idx.dim() != 2 or idx.dtype not in (torch.int64, torch.int32):
            raise UserError(f"idx must be token ids (B, T), not {tuple(idx.shape)} {idx.dtype}")
        is_prefill = cache is not None and cache.positions is None
        self.config.check_length(cache.keys if is_prefill else idx.shape[1])
        return super().__call__(idx, *tensors, cache=cache, **named)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, starts: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        T = idx.shape[1]
        if cache is None:
            positions = torch.arange(self.part * T, (self.part + 1) * T, device=idx.device)
        else:
            positions = cache.token_positions(T)  # (T,); in a decoding step (B, T)
            cache = cache.locate(positions)
        rope = self.rope_table(positions) if self.wpe is None else None
        x, residual = self.drop(self.embed(idx, positions)), None  # (B, T, C)
        for i, block in enumerate(self.h):
            layer_cache = None if cache is None else cache.layer(i)
            x, residual = self.run_block(block, x, residual, rope=rope, starts=starts, cache=layer_cache)
        if cache is not None:
            x, residual = cache.select(x), cache.select(residual)
        if targets is not None:
            return self.head_loss(x, residual, targets)
        x, _ = self.ln_f(x, residual)
        return cap_logits(nn.functional.linear(x, cast(self.head.weight, x.dtype)), self.config.logit_softcap)

    def head_loss(self, x: Tensor, residual: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the last block's output."""
        x, _ = self.ln_f(x, residual)
        return self.loss(x, cast(self.head.weight, x.dtype), targets, **softcap_argument(self.config.logit_softcap))

    @property
    def head(self) -> nn.Module:
        """The module whose weight (V, C) makes the logits."""
        return self.wte if self.lm_head is None else self.lm_head

    def rope_table(self, positions: Tensor) -> Tensor:
        """Return the cosines and sines of positions (T,) or (B, T), for the op rope."""
        config = self.config
        return rope_table(positions, config.head_size, config.rope_theta, config.rope_scaling)

    def embed(self, idx: Tensor, positions: Tensor) -> Tensor:
        """Return the embeddings of the tokens, plus those of the positions if they are learned, (B, T, C)."""
        if self.wpe is None:
            return self.wte(idx)
        positions = positions.clamp(max=self.config.block_size - 1)  # the caller discards tokens beyond the table
        return self.wte(idx) + self.wpe(positions)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw GPT-2's initial weights: normal with deviation 0.02, zero biases.

        The 2 n_layer projections onto the residual stream (c_proj) get 0.02 / sqrt(2 n_layer).
        """
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
            elif weight.dim() == 2:
                is_projection = name.endswith("c_proj.weight")
                weight.normal_(0, 0.02 / math.sqrt(2 * self.config.n_layer) if is_projection else 0.02)
