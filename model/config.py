"""The shape and the precisions of the model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from model.vocabulary import padded
from runtime.config import UserError, check, field_defaults, value_text

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


EPS = 1e-5  # of GPT-2's norms, and the default of the ops norm and rms_norm


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
    norm: str = "layernorm"  # layernorm | rmsnorm, which has no bias
    norm_eps: float = EPS  # is added to the variance, or with rmsnorm to the mean square
    head_dim: int | None = None  # channels of a head; null: n_embd / n_head
    rope_theta: float = 10000.0  # the base of the rotary frequencies: the slowest turns once in about 2 pi theta tokens
    rope_scaling: float | None = None  # Llama 3's factor for the slow frequencies: kernels/rope/__init__.py
    qk_norm: bool = False  # RMSNorm of each query and key, before the rotation
    mlp: str = "gelu"  # gelu | relu2 | swiglu, which has two matrices in the place of the first
    hidden: int | None = None  # width of the MLP; null: 4 n_embd, and with swiglu 8/3 n_embd, rounded up to 64
    tie_embeddings: bool = True  # the head is the table of the token embeddings
    logit_softcap: float | None = None  # the logits are cap tanh(logits / cap), as in Gemma 2; null: no cap

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = field.type | int if field.type in (float, float | None) else field.type
            is_right = field.type is bool if isinstance(value, bool) else isinstance(value, kinds)
            kind = getattr(field.type, "__name__", field.type)
            check(is_right, f"model.{field.name}={value_text(value)}: its type must be {kind}")
        for key, largest in LARGEST.items():
            value = getattr(self, key)
            check(1 <= value <= largest, f"model.{key}={value_text(value)}: it must be from 1 to {largest:,}")
        check(
            self.head_dim is not None or self.n_embd % self.n_head == 0,
            f"model.n_embd={self.n_embd} is not a multiple of model.n_head={self.n_head}: heads are equal parts; "
            "or set model.head_dim",
        )
        check(
            self.head_dim is None or 1 <= self.head_dim <= LARGEST["n_embd"],
            f"model.head_dim={value_text(self.head_dim)}: it must be from 1 to {LARGEST['n_embd']:,}, or null",
        )
        check(
            self.kv_heads >= 1 and self.n_head % self.kv_heads == 0,
            f"model.n_kv_head={value_text(self.n_kv_head)}: model.n_head={self.n_head} must be a multiple of it",
        )
        check(
            self.window is None or 1 <= self.window < 2**31,
            f"model.window={value_text(self.window)}: it must be in [1, 2^31), or null",
        )
        check(
            self.hidden is None or 1 <= self.hidden <= 2**20,
            f"model.hidden={value_text(self.hidden)}: it must be from 1 to {2**20:,}, or null",
        )
        choices = {
            "pos": ("learned", "rope"),
            "norm": ("layernorm", "rmsnorm"),
            "mlp": ("gelu", "swiglu", "relu2"),
            "checkpointing": ("none", "block", "host", "chunks"),
        }
        for key, names in choices.items():
            value = getattr(self, key)
            check(value in names, f"model.{key}={value_text(value)}: choose {' or '.join(names)}")
        check(
            self.pos == "learned" or self.head_size % 2 == 0,
            f"model.pos=rope rotates pairs of channels, and a head has {self.head_size}, which is odd: choose an even "
            "model.head_dim",
        )
        check(
            self.checkpointing in ("block", "host") or not self.keep_attention,
            "model.keep_attention=true works only with model.checkpointing=block or host",
        )
        check(0 <= self.dropout < 1, f"model.dropout={self.dropout}: it must be in [0, 1)")
        check(0 < self.norm_eps < 1, f"model.norm_eps={self.norm_eps}: it must be in (0, 1)")
        check(1 < self.rope_theta < 1e12, f"model.rope_theta={self.rope_theta}: it must be in (1, 1e12)")
        check(
            self.rope_scaling is None or 1 <= self.rope_scaling < 1e6,
            f"model.rope_scaling={self.rope_scaling}: it must be a factor in [1, 1e6), or null",
        )
        rotary_only = {"qk_norm=true": self.qk_norm, f"rope_scaling={self.rope_scaling}": self.rope_scaling}
        rotary_only[f"rope_theta={self.rope_theta}"] = self.rope_theta != GPTConfig.rope_theta
        for text, is_set in rotary_only.items():
            check(self.pos == "rope" or not is_set, f"model.{text} needs rotary positions: add model.pos=rope")
        check(
            self.logit_softcap is None or 0 < self.logit_softcap < math.inf,
            f"model.logit_softcap={self.logit_softcap}: it must be a positive number, or null",
        )
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

    @classmethod
    def changes(cls, model: Mapping) -> dict[str, str]:
        """Return {field: its value as on the command line} of the fields that differ from their defaults.

        `model` is a row's or a checkpoint's config.model, which may lack fields, or vars() of a GPTConfig.
        """
        defaults = field_defaults(cls)
        changed = {key: model[key] for key in defaults if key in model and model[key] != defaults[key]}
        return {key: value_text(value).lower() for key, value in changed.items()}

    @property
    def head_size(self) -> int:
        """The channels of a head."""
        return self.n_embd // self.n_head if self.head_dim is None else self.head_dim

    @property
    def hidden_size(self) -> int:
        """The width of the MLP. By default all kinds of MLP have 8 n_embd^2 weights."""
        if self.hidden is not None:
            return self.hidden
        return padded(-(-8 * self.n_embd // 3)) if self.mlp == "swiglu" else 4 * self.n_embd

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    def needs(self, attention: Sequence[str] = ()) -> dict[str, list[str]]:
        """Return {op: the optional arguments that this model passes to it}; of attention also those in `attention`."""
        return {
            "attention": [*([] if self.window is None else ["window"]), *attention],
            "loss": [] if self.logit_softcap is None else ["softcap"],
            "mlp": ["activation"] if self.mlp == "relu2" else [],
            "rope": ["q_weight"] if self.qk_norm else [],
        }
