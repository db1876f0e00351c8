"""GPT-2, written around its kernels: the parameters and the data flow are here, the mathematics is in `kernels/`.

The parameters have GPT-2's names (wte, wpe, h, ln_1, attn.c_attn, ...), and no kernel adds parameters, so a state dict
is the same under every choice of kernels.

The model has two dtypes. The branches (attention and MLP) run in the compute dtype, to which each weight is cast where
it is used. The residual stream has the dtype of the stored weights (see PRECISIONS).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.cache import Cache
from kernels.packed import split
from kernels.registry import Ops, norm_before
from kernels.rope import rope_table, rotate
from model.chunks import run_in_chunks
from model.recompute import BlockRunner
from model.vocabulary import padded
from runtime.config import UserError, check, value_text

# name -> (dtype of the stored weights and the residual stream, compute dtype)
PRECISIONS = {
    "fp32": (torch.float32, torch.float32),
    "amp": (torch.float32, torch.bfloat16),  # like nanoGPT's autocast
    "bf16": (torch.bfloat16, torch.bfloat16),  # like llm.c; the optimizer holds fp32 masters
    "fp8": (torch.bfloat16, torch.bfloat16),  # bf16, with the products of linear, mlp and loss in fp8 (kernels/fp8.py)
}

# No known model is larger: DeepNet (Wang et al. 2022) has 1,000 layers, PaLM an n_embd of 18,432, and Gemma 262,144
# tokens. Building 10^6 layers takes minutes and fills the memory. With pos=rope, block_size allocates nothing
LARGEST = {"n_layer": 1000, "n_head": 2**16, "n_embd": 2**16, "block_size": 2**31 - 1, "vocab_size": 2**20}


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
    n_kv_head: int | None = None  # heads of keys and values, each shared by n_head / n_kv_head queries; null: n_head
    window: int | None = None  # a token attends to the last `window` tokens, itself included; null: to all
    checkpointing: str = "none"  # none | block | host: see model/recompute.py; chunks: model/chunks.py
    keep_attention: bool = False  # checkpoints also save the output of attention

    def __post_init__(self):
        for field in fields(self):
            value, kinds = getattr(self, field.name), (field.type, int) if field.type is float else field.type
            is_right = field.type is bool if isinstance(value, bool) else isinstance(value, kinds)
            kind = getattr(field.type, "__name__", field.type)
            check(is_right, f"model.{field.name}={value_text(value)}: its type must be {kind}")
        for key, largest in LARGEST.items():
            value = getattr(self, key)
            check(1 <= value <= largest, f"model.{key}={value_text(value)}: it must be from 1 to {largest:,}")
        check(
            self.n_embd % self.n_head == 0,
            f"model.n_embd={self.n_embd} is not a multiple of model.n_head={self.n_head}: heads are equal parts",
        )
        check(
            self.kv_heads >= 1 and self.n_head % self.kv_heads == 0,
            f"model.n_kv_head={value_text(self.n_kv_head)}: model.n_head={self.n_head} must be a multiple of it",
        )
        check(
            self.window is None or 1 <= self.window < 2**31,
            f"model.window={value_text(self.window)}: it must be in [1, 2^31), or null",
        )
        check(self.pos in ("learned", "rope"), f"model.pos={value_text(self.pos)}: choose learned or rope")
        check(
            self.pos == "learned" or self.head_dim % 2 == 0,
            f"model.pos=rope rotates pairs of channels, and n_embd / n_head = {self.head_dim} is odd",
        )
        check(
            self.checkpointing in ("none", "block", "host", "chunks"),
            f"model.checkpointing={value_text(self.checkpointing)}: choose none, block, host or chunks",
        )
        check(
            self.checkpointing in ("block", "host") or not self.keep_attention,
            "model.keep_attention=true works only with model.checkpointing=block or host",
        )
        check(0 <= self.dropout < 1, f"model.dropout={self.dropout}: it must be in [0, 1)")
        check(
            self.checkpointing != "chunks" or not self.dropout,
            f"model.checkpointing=chunks does not support dropout: model.dropout={self.dropout} must be 0, or choose "
            "model.checkpointing=host",
        )

    def check_length(self, length: int, key: str = "") -> None:
        """Raise UserError if a sequence of this length is longer than the table of learned positions."""
        # torch.compile would make a graph for each length that it formats, so only the raise does
        if self.pos == "learned" and length > self.block_size:
            raise UserError(
                f"{key}a sequence of {length} is beyond the model's position table of "
                f"model.block_size={self.block_size}: shorten it, raise model.block_size, or choose model.pos=rope"
            )

    def check_vocabulary(self, tokenizer: str, ids: int) -> None:
        """Raise UserError if the tokenizer has more ids than the model has embeddings."""
        check(
            ids <= self.vocab_size,
            f"data.tokenizer={tokenizer} has {ids} ids, and model.vocab_size={self.vocab_size} is less: "
            f"pass model.vocab_size={padded(ids)}",
        )

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def attention_needs(self) -> list[str]:
        """The optional arguments that this model passes to its attention."""
        return [] if self.window is None else ["window"]


def cast(weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if weight is None else weight.to(dtype)


class Linear(nn.Linear):
    """y = x W^T + b in x's dtype, whatever dtype the weights are stored in."""

    def __init__(self, ops: Ops, in_features: int, out_features: int, bias: bool):
        super().__init__(in_features, out_features, bias)
        self.linear = ops.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, cast(self.weight, x.dtype), cast(self.bias, x.dtype))


class LayerNorm(nn.Module):
    """(x, residual) -> (y, residual + x), all (B, T, C).

    y is LayerNorm(residual + x) in the compute dtype, or in fp8 (InFp8 of kernels/fp8.py) if the next op takes that.
    """

    def __init__(self, config: GPTConfig, norm: Callable, dtype: torch.dtype):
        super().__init__()
        self.norm, self.dtype = norm, dtype
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        self.bias = nn.Parameter(torch.zeros(config.n_embd)) if config.bias else None

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.norm(x, residual, *self.parameters_in_dtype())

    def parameters_in_dtype(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias in the compute dtype."""
        return cast(self.weight, self.dtype), cast(self.bias, self.dtype)


class Attention(nn.Module):
    """Causal self-attention, x (B, T, C) -> (B, T, C). With a cache, x are the tokens that follow the cached ones."""

    def __init__(self, config: GPTConfig, ops: Ops):
        super().__init__()
        self.attention = self.cached_attention = ops.attention  # parallel=context replaces the first
        self.heads = (config.n_head, config.kv_heads, config.kv_heads)
        self.options = {} if config.window is None else {"window": config.window}
        self.c_attn = Linear(ops, config.n_embd, sum(self.heads) * config.head_dim, bias=config.bias)
        self.c_proj = Linear(ops, config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, rope: Tensor | None, starts: Tensor | None, cache: Cache | None) -> Tensor:
        return self.c_proj(self.attend(*self.qkv(x, rope), starts, cache).flatten(2))

    def qkv(self, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, T, H, D), k and v (B, T, Hkv, D), rotated if the positions are rotary."""
        B, T, _ = x.shape
        q, k, v = split(self.c_attn(x).view(B, T, sum(self.heads), -1), self.heads)
        return (q, k, v) if rope is None else (rotate(q, rope), rotate(k, rope), v)

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
    def __init__(self, config: GPTConfig, ops: Ops):
        super().__init__()
        self.mlp = ops.mlp
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.c_fc.weight, self.c_fc.bias, self.c_proj.weight, self.c_proj.bias
        return self.mlp(x, *(cast(weight, x.dtype) for weight in weights))


class Block(nn.Module):
    """(x, residual) -> (x, residual), (B, T, C) each: x is the output of the last branch, not yet added to the stream.

    The next norm adds x to residual, because a kernel can do both in one pass. With checkpointing=chunks it returns
    (x + residual, None).
    """

    def __init__(self, config: GPTConfig, ops: Ops, dtype: torch.dtype):
        super().__init__()
        self.ln_1 = LayerNorm(config, norm_before("linear", ops), dtype)
        self.attn = Attention(config, ops)
        self.ln_2 = LayerNorm(config, norm_before("mlp", ops), dtype)
        self.mlp = MLP(config, ops)
        self.drop = dropout(config)
        self.chunked = config.checkpointing == "chunks"

    def forward(
        self, x: Tensor, residual: Tensor | None, rope: Tensor | None, starts: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.chunked and cache is None:
            return run_in_chunks(self, x if residual is None else residual + x, rope, starts), None
        h, residual = self.ln_1(x, residual)
        h, residual = self.ln_2(self.drop(self.attn(h, rope, starts, cache)), residual)
        return self.drop(self.mlp(h)), residual

    # forward() without a cache is qkv(), attn.attend() and after_attention(). model/chunks.py calls the first and the
    # third on chunks of tokens

    def qkv(self, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return self.attn.qkv(self.ln_1(x, None)[0], rope)

    def after_attention(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the stream after the block. `out` (B, T, H, D) is attention's output, and x the stream before."""
        h, residual = self.ln_2(self.attn.c_proj(out.flatten(2)), x)
        return residual + self.mlp(h)

    def weights_before_attention(self) -> list[nn.Parameter]:
        return [*self.ln_1.parameters(), *self.attn.c_attn.parameters()]

    def weights_after_attention(self) -> list[nn.Parameter]:
        return [*self.attn.c_proj.parameters(), *self.ln_2.parameters(), *self.mlp.parameters()]


class GPT(nn.Module):
    """idx (B, T) -> logits (B, T, V) in the compute dtype; with targets (B, T), their mean cross-entropy instead.

    starts (B, T) int32 keeps attention inside documents: for each token, the index at which its document begins. With a
    cache, idx has only the new tokens, which follow the cached ones. A prefill returns the logits of each sequence's
    last token, (B, 1, V). Raises UserError if idx has another shape or dtype, or is longer than the table of learned
    positions.
    """

    def __init__(self, config: GPTConfig, ops: Ops, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.loss = config, ops.loss
        self.part = 0  # with parallel=context, idx is this part of each sequence: see model/context.py
        self.run_block = BlockRunner(config.checkpointing, config.keep_attention, ops.attention, config.dropout)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # also lm_head (Press and Wolf 2017)
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.pos == "learned" else None
        self.drop = dropout(config)
        self.h = nn.ModuleList(Block(config, ops, dtype) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config, ops.norm, dtype)
        self.init_weights()

    def __call__(self, idx: Tensor, *arguments, **options) -> Tensor:
        """Check idx, and call forward(). model.compile() compiles only forward(), so these errors stay as they are."""
        if idx.dim() != 2 or idx.dtype not in (torch.int64, torch.int32):
            raise UserError(f"idx must be token ids (B, T), not {tuple(idx.shape)} {idx.dtype}")
        self.config.check_length(idx.shape[1])
        return super().__call__(idx, *arguments, **options)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, starts: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        if cache is not None:
            cache = cache.locate(idx.shape[1])
        rope = self.rotary_table(idx, cache)
        x, residual = self.drop(self.embed(idx, cache)), None  # (B, T, C)
        for i, block in enumerate(self.h):
            layer_cache = None if cache is None else cache.layer(i)
            x, residual = self.run_block(block, x, residual, rope=rope, starts=starts, cache=layer_cache)
        if cache is not None:
            x, residual = cache.select(x), cache.select(residual)
        if targets is not None:
            return self.head_loss(x, residual, targets)
        x, _ = self.ln_f(x, residual)
        return F.linear(x, cast(self.wte.weight, x.dtype))  # logits

    def head_loss(self, x: Tensor, residual: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the last block's output."""
        x, _ = self.ln_f(x, residual)
        return self.loss(x, cast(self.wte.weight, x.dtype), targets)

    def embed(self, idx: Tensor, cache: Cache | None) -> Tensor:
        """Return the embeddings of the tokens, plus the embeddings of learned positions, (B, T, C)."""
        tok_emb, T = self.wte(idx), idx.shape[1]
        if self.wpe is None:
            return tok_emb
        if cache is None:
            first = self.part * T
            return tok_emb + self.wpe.weight[first : first + T]  # (T, C)
        if cache.positions is None:
            self.config.check_length(cache.keys)
        # Steps may reach beyond the table: a draft, or the last steps of a CUDA graph. Nobody takes such a token
        return tok_emb + self.wpe(cache.token_positions(T).clamp(max=self.config.block_size - 1))

    def rotary_table(self, idx: Tensor, cache: Cache | None) -> Tensor | None:
        """The table of rotary positions, (2, [B,] T, 1, D/2) fp32; None if the positions are learned."""
        if self.config.pos == "learned":
            return None
        T = idx.shape[1]
        positions = self.part * T + torch.arange(T, device=idx.device) if cache is None else cache.token_positions(T)
        return rope_table(positions, self.config.head_dim)

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


def in_eval_mode(function: Callable) -> Callable:
    """Decorator: function(model, ...) runs in eval mode. Then, also after an error, each module has its mode again."""

    @functools.wraps(function)
    def call(model: nn.Module, *args, **options):
        check(isinstance(model, nn.Module) and hasattr(model, "wte"), f"model={value_text(model)}: it must be a GPT")
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            return function(model, *args, **options)
        finally:
            for module, training in modes:
                module.training = training

    return call


def dropout(config: GPTConfig) -> nn.Module:
    return nn.Dropout(config.dropout) if config.dropout else nn.Identity()
