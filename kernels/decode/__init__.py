"""The contract of the op decode: the next tokens of each sequence through the whole stack, over the KV cache.

    decode(packed, tokens, cache) -> logits

    packed  the result of the backend's pack(); Weights if the backend has no pack()
    tokens  (B, T) int64: the T tokens of each sequence that follow its cached tokens. T is 1, or up to 8 in a step that
            verifies a draft
    cache   kernels/cache.py, with `positions`; the backend appends the keys and values of the T tokens to it
    logits  (B, T, V) in the compute dtype; logits[:, t] predict the token after tokens[:, t]

A backend may also define

    pack(model, cache)      called once. It returns `packed`, such as weights in another layout. `model` is a Model, and
                            `cache` has the shapes and dtypes of every later cache. It raises Unavailable if decode()
                            cannot run this model with this cache: see refuse_other_shapes()
    sample_tokens(...)      its own kernel for sampling.sample_tokens(), which draws NO_TOKEN from NaN
    decode_token(logits, seeds, positions, sampling, tokens, output)
                            after a step of one token: draw with sample_tokens() at positions + 1, store the draws in
                            tokens (B, 1) and in output (B,), a column of a tensor, and add 1 to the positions. tokens
                            get id 0 instead of NO_TOKEN, because the next step reads their embeddings
    generate_tokens(packed, tokens, cache, seeds, sampling, steps, stops) -> (B, steps) int64
                            several tokens in one launch, with the draws of sampling.sample_tokens(). tokens are (B, 1).
                            A sequence that draws NO_TOKEN or an id of the tuple `stops` repeats it until the launch
                            ends. All tokens are FAILED_LAUNCH if the launch failed, because a part of it waited too
                            long. It returns before the GPU is done; otherwise several launches would seem to end at the
                            same time
    weight_bytes(packed)    the bytes of weights that a step reads; only for weights in another dtype than the model's
    detail()                its version, for the row
    LOSSY = True            it rounds the weights, so its logits differ from the model's
    COMPILES = True         kernels.compile=true may compile decode(), which is plain PyTorch

The op has no gradients, and the training step does not call it (TRAINS). A step reads all weights to make B tokens, so
bytes limit its speed. The default, kernels.decode=blocks, runs the model's own blocks.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels import attention, mlp, norm, rms_norm
from kernels import rope as rotary
from kernels.cache import FP8, Cache
from kernels.decode._cases import CASES, SHAPES  # noqa: F401
from kernels.decode._weights import EPS, MATRICES, THETA, Layer, Model, Weights, refuse_other_shapes  # noqa: F401
from kernels.glu import swiglu

TRAINS = False  # the training step does not call it, and it has no gradients
DEFAULT = "blocks"
FAILED_LAUNCH = -2  # every token of a launch of generate_tokens() that failed; NO_TOKEN is a token with NaN or inf


# The doctor's matrix tests SIZES (by width) in every dtype, and FEATURES (names in CASES) in bf16, on a CPU in fp32
SIZES = {str(C): {"batch": 1, "lengths": [9], "width": C, "heads": C // 64, "n_layer": 1} for C in (64, 768, 1600)}
FEATURES = ["batch", "ragged", "rope", "gqa", "no_bias", "ring", "fp8", "several_tokens", "llama", "qwen3"]

BOUND = "bytes"


def run(backend: ModuleType, weights: Weights, tokens: Tensor, cache: Cache) -> Tensor:
    """Return the logits of a backend's decode(). reference() takes the place of the model's own blocks."""
    model = Model(lambda tokens, cache: reference(weights, tokens, cache), lambda: weights)
    packed = backend.pack(model, cache) if hasattr(backend, "pack") else weights
    return backend.decode(packed, tokens, cache)


def reference(weights: Weights, tokens: Tensor, cache: Cache, attend: Callable = attention.reference) -> Tensor:
    """Compute the logits by the references of the other ops, in the dtype of the weights. Append to the cache.

    A contestant may replace the attention: attend(q, k, v, lengths=...) for each layer, in their order.
    """
    B, T = tokens.shape
    H, Hkv, D = weights.heads, weights.kv_heads, weights.head_dim
    positions = cache.token_positions(T)
    cache, rope = cache.locate(positions), weights.rope_table(positions)
    x = weights.wte[tokens].to(weights.stream_dtype)
    if weights.wpe is not None:
        x = x + weights.wpe[positions.clamp(max=len(weights.wpe) - 1)]
    residual = None
    for i, layer in enumerate(weights.layers):
        h, residual = add_norm(weights, x, residual, layer.ln_1_weight, layer.ln_1_bias)
        qkv = linear(h, layer.qkv_weight, layer.qkv_bias).view(B, T, H + 2 * Hkv, D)
        if rope is not None:
            qkv = rotary.reference(qkv, rope, Hkv, layer.q_norm_weight, layer.k_norm_weight, weights.norm_eps)
        q, k, v = qkv.split((H, Hkv, Hkv), dim=2)
        k, v = cache.layer(i).append(k, v)
        y = attend(q, k, v, lengths=cache.lengths).reshape(B, T, -1)
        x = linear(y, layer.proj_weight, layer.proj_bias)
        h, residual = add_norm(weights, x, residual, layer.ln_2_weight, layer.ln_2_bias)
        h = activate(linear(h, layer.fc_weight, layer.fc_bias), weights.mlp)
        x = linear(h, layer.fc_proj_weight, layer.fc_proj_bias)
    h, _ = add_norm(weights, x, residual, weights.ln_f_weight, weights.ln_f_bias)
    return linear(h, weights.head)


def add_norm(
    weights: Weights, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the model's norm of residual + x, and this sum."""
    if weights.norm == "rmsnorm":
        return rms_norm.reference(x, residual, weight, weights.norm_eps)
    return norm.reference(x, residual, weight, bias, weights.norm_eps)


def activate(h: Tensor, kind: str) -> Tensor:
    """Return the input (..., F) of the MLP's second matmul. h is (..., F), and with swiglu (..., 2 F)."""
    return swiglu(h) if kind == "swiglu" else mlp.ACTIVATIONS[kind](h)


def inputs(
    batch: int,
    lengths: Sequence[int],
    *,
    tokens: int = 1,
    width: int = 64,
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    hidden: int | None = None,
    n_layer: int = 1,
    vocab: int = 97,
    rows: int = 64,
    rope: bool = False,
    bias: bool = True,
    qk_norm: bool = False,
    tie_embeddings: bool = True,
    norm: str = "layernorm",
    norm_eps: float = EPS,
    mlp: str = "gelu",
    rope_theta: float = THETA,
    rope_scaling: float | None = None,
    kv_dtype: torch.dtype | None = None,
    stream_dtype: torch.dtype | None = None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Return random arguments of reference(), as a dict.

    lengths       cached tokens of each sequence; a list of one number is for all sequences
    head_dim      D; None: width / heads
    hidden        F; None: 4 width
    rows          rows of the cache; fewer than the longest length + tokens make it a ring
    kv_dtype      dtype of the cache; None: dtype
    stream_dtype  dtype of the residual stream; None: dtype
    norm ...      the other fields of GPTConfig have its names
    """
    generator = torch.Generator(device).manual_seed(seed)
    kv_heads = kv_heads or heads
    lengths = list(lengths) * (batch if len(lengths) == 1 else 1)
    head_dim, hidden = head_dim or width // heads, hidden or 4 * width

    def randn(*size: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return (mean + std * torch.randn(*size, generator=generator, device=device)).to(dtype)

    def optional(size: int, present: bool = bias) -> Tensor | None:
        return randn(size, std=0.1) if present else None

    def gain(size: int, present: bool = True) -> Tensor | None:
        return randn(size, std=0.1, mean=1.0) if present else None

    has_shift = bias and norm == "layernorm"

    def layer() -> Layer:
        qkv = (heads + 2 * kv_heads) * head_dim
        fc = 2 * hidden if mlp == "swiglu" else hidden
        return Layer(
            ln_1_weight=gain(width),
            ln_1_bias=optional(width, has_shift),
            qkv_weight=randn(qkv, width, std=width**-0.5),
            qkv_bias=optional(qkv),
            proj_weight=randn(width, heads * head_dim, std=(heads * head_dim) ** -0.5),
            proj_bias=optional(width),
            ln_2_weight=gain(width),
            ln_2_bias=optional(width, has_shift),
            fc_weight=randn(fc, width, std=width**-0.5),
            fc_bias=optional(fc),
            fc_proj_weight=randn(width, hidden, std=hidden**-0.5),
            fc_proj_bias=optional(width),
            q_norm_weight=gain(head_dim, qk_norm),
            k_norm_weight=gain(head_dim, qk_norm),
        )

    wte = randn(vocab, width)
    weights = Weights(
        wte=wte,
        head=wte if tie_embeddings else randn(vocab, width),
        wpe=None if rope else randn(max(lengths) + tokens, width),
        layers=tuple(layer() for _ in range(n_layer)),
        ln_f_weight=gain(width),
        ln_f_bias=optional(width, has_shift),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        stream_dtype=torch.promote_types(stream_dtype or dtype, dtype),
        norm=norm,
        norm_eps=norm_eps,
        mlp=mlp,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
    )
    kv = []
    for _ in range(n_layer):
        keys, values = (randn(batch, rows, kv_heads, head_dim).to(kv_dtype or dtype) for _ in range(2))
        kv.append((keys, values))
    positions = torch.tensor(lengths, device=device)
    ids = torch.randint(vocab, (batch, tokens), generator=generator, device=device)
    return {"weights": weights, "tokens": ids, "cache": Cache(kv, min(rows, max(lengths) + tokens), positions)}


def to_float64(arguments: dict) -> dict:
    """Return a copy of the arguments of reference() in float64. A cache in fp8 stays in fp8."""
    weights, cache = arguments["weights"], arguments["cache"]

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.double()
        if isinstance(value, Layer):
            return Layer(*map(convert, value))
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        return torch.float64 if isinstance(value, torch.dtype) else value

    kv = [tuple(t.clone() if t.dtype == FP8 else t.double() for t in pair) for pair in cache.kv]
    return arguments | {"weights": Weights(*map(convert, weights)), "cache": cache._replace(kv=kv)}


def cost(
    batch: int,
    lengths: Sequence[int],
    *,
    tokens: int = 1,
    width: int = 64,
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    hidden: int | None = None,
    mlp: str = "gelu",
    n_layer: int = 1,
    vocab: int = 97,
    kv_dtype: torch.dtype | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **_: object,
) -> dict[str, tuple[int, int]]:
    """Return {"forward": (FLOPs, bytes)}. The bytes: each matrix, each key and value, and the logits, once each."""
    lengths = list(lengths) * (batch if len(lengths) == 1 else 1)
    head_dim, hidden = head_dim or width // heads, hidden or 4 * width
    q_width, kv_width = heads * head_dim, (kv_heads or heads) * head_dim
    rows_of_hidden = 3 if mlp == "swiglu" else 2  # the matrices of the MLP, hidden x width each
    matrices = n_layer * width * (2 * q_width + 2 * kv_width + rows_of_hidden * hidden) + vocab * width
    keys = sum(lengths) + batch * tokens
    cached = 2 * n_layer * keys * kv_width * (kv_dtype or dtype).itemsize
    pairs = tokens * keys  # of a query and a key; a few more than the causal mask leaves
    flops = 2 * batch * tokens * matrices + 4 * n_layer * pairs * q_width
    return {"forward": (flops, (matrices + batch * tokens * vocab) * dtype.itemsize + cached)}
