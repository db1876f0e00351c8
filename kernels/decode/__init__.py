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
                            cannot run this model with this cache
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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels import attention, mlp, norm
from kernels.cache import FP8, Cache
from kernels.rope import rope_table, rotate

TRAINS = False  # the training step does not call it, and it has no gradients
DEFAULT = "blocks"
FAILED_LAUNCH = -2  # every token of a launch of generate_tokens() that failed; NO_TOKEN is a token with NaN or inf


class Layer(NamedTuple):
    """The weights of a block in the compute dtype. A matrix is (out, in). In a model without biases they are None."""

    ln_1_weight: Tensor  # (C,)
    ln_1_bias: Tensor | None
    qkv_weight: Tensor  # ((H + 2 Hkv) D, C): queries, keys, values
    qkv_bias: Tensor | None
    proj_weight: Tensor  # (C, C)
    proj_bias: Tensor | None
    ln_2_weight: Tensor
    ln_2_bias: Tensor | None
    fc_weight: Tensor  # (F, C)
    fc_bias: Tensor | None
    fc_proj_weight: Tensor  # (C, F)
    fc_proj_bias: Tensor | None


MATRICES = "qkv_weight", "proj_weight", "fc_weight", "fc_proj_weight"  # of a Layer


class Weights(NamedTuple):
    """The weights of a model in the compute dtype, and the sizes that their shapes do not show."""

    wte: Tensor  # (V, C): token embeddings
    head: Tensor  # (V, C): the same tensor as wte, unless a backend packs it in another layout
    wpe: Tensor | None  # (P, C): position embeddings; None: rotary positions
    layers: tuple[Layer, ...]
    ln_f_weight: Tensor  # (C,)
    ln_f_bias: Tensor | None
    heads: int  # H, of queries
    kv_heads: int  # Hkv
    stream_dtype: torch.dtype  # of the residual stream

    @property
    def head_dim(self) -> int:
        return self.wte.shape[1] // self.heads

    @property
    def matrices(self) -> list[Any]:
        """The matrices of the layers, and the head."""
        return [*(getattr(layer, name) for layer in self.layers for name in MATRICES), self.head]

    def map_matrices(self, function: Callable[[Any], Any]) -> "Weights":
        """Return the weights with function(matrix) in the place of each of the matrices."""
        layers = []
        for layer in self.layers:
            layers.append(layer._replace(**{name: function(getattr(layer, name)) for name in MATRICES}))
        return self._replace(head=function(self.head), layers=tuple(layers))


class Model(NamedTuple):
    """The model as pack() gets it."""

    forward: Callable[[Tensor, Cache], Tensor]  # the model's own blocks: (tokens, cache) -> logits
    weights: Callable[[], Weights]


SHAPES = {
    "124m": {"batch": 1, "lengths": [128], "rows": 256, "width": 768, "heads": 12, "n_layer": 12, "vocab": 50304},
    "124m-64": {"batch": 64, "lengths": [128], "rows": 256, "width": 768, "heads": 12, "n_layer": 12, "vocab": 50304},
    "1558m": {"batch": 1, "lengths": [128], "rows": 256, "width": 1600, "heads": 25, "n_layer": 48, "vocab": 50304},
}

# lengths: the cached tokens of each sequence; tokens: T
CASES = {
    "one": {"batch": 1, "lengths": [5], "n_layer": 2},
    "empty_cache": {"batch": 1, "lengths": [0]},
    "batch": {"batch": 3, "lengths": [5, 5, 5]},
    "ragged": {"batch": 3, "lengths": [0, 17, 30], "n_layer": 2},
    "many_keys": {"batch": 1, "lengths": [300], "rows": 320},
    "several_tokens": {"batch": 2, "lengths": [9, 20], "tokens": 4},
    "eight_tokens": {"batch": 1, "lengths": [3], "tokens": 8},
    "rope": {"batch": 2, "lengths": [4, 11], "rope": True},
    "gqa": {"batch": 2, "lengths": [4, 11], "heads": 4, "kv_heads": 2},
    "mqa_rope": {"batch": 2, "lengths": [4, 11], "heads": 4, "kv_heads": 1, "rope": True, "tokens": 2},
    "no_bias": {"batch": 1, "lengths": [7], "bias": False},
    "odd_width": {"batch": 1, "lengths": [7], "width": 60, "heads": 3, "vocab": 101},
    "many_sequences": {"batch": 20, "lengths": [6]},
    "ring": {"batch": 2, "lengths": [40, 33], "rows": 16},
    "fp8": {"batch": 2, "lengths": [9, 20], "kv_dtype": FP8},
    "fp8_ring": {"batch": 1, "lengths": [40], "rows": 16, "kv_dtype": FP8},
    "fp32_stream": {"batch": 2, "lengths": [9, 20], "stream_dtype": torch.float32},
}


# The doctor's matrix tests SIZES (by width) in every dtype, and FEATURES (names in CASES) in bf16, on a CPU in fp32
SIZES = {str(C): {"batch": 1, "lengths": [9], "width": C, "heads": C // 64, "n_layer": 1} for C in (64, 768, 1600)}
FEATURES = ["batch", "ragged", "rope", "gqa", "no_bias", "ring", "fp8", "several_tokens"]

BOUND = "bytes"
EPS, THETA = 1e-5, 10000.0  # of LayerNorm and of the rotary positions. The backends compute no others


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
    cache = cache.locate(positions)
    x = weights.wte[tokens].to(weights.stream_dtype)
    if weights.wpe is not None:
        x = x + weights.wpe[positions.clamp(max=len(weights.wpe) - 1)]
    residual = None
    for i, layer in enumerate(weights.layers):
        h, residual = norm.reference(x, residual, layer.ln_1_weight, layer.ln_1_bias)
        qkv = linear(h, layer.qkv_weight, layer.qkv_bias).view(B, T, H + 2 * Hkv, D)
        q, k, v = qkv.split((H, Hkv, Hkv), dim=2)
        if weights.wpe is None:
            rope = rope_table(positions, D)
            q, k = rotate(q, rope), rotate(k, rope)
        k, v = cache.layer(i).append(k, v)
        y = attend(q, k, v, lengths=cache.lengths).reshape(B, T, -1)
        h, residual = norm.reference(
            linear(y, layer.proj_weight, layer.proj_bias), residual, layer.ln_2_weight, layer.ln_2_bias
        )
        h = mlp.gelu(linear(h, layer.fc_weight, layer.fc_bias))
        x = linear(h, layer.fc_proj_weight, layer.fc_proj_bias)
    h, _ = norm.reference(x, residual, weights.ln_f_weight, weights.ln_f_bias)
    return linear(h, weights.head)


def inputs(
    batch: int,
    lengths: Sequence[int],
    *,
    tokens: int = 1,
    width: int = 64,
    heads: int = 2,
    kv_heads: int | None = None,
    n_layer: int = 1,
    vocab: int = 97,
    rows: int = 64,
    rope: bool = False,
    bias: bool = True,
    kv_dtype: torch.dtype | None = None,
    stream_dtype: torch.dtype | None = None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Return random arguments of reference(), as a dict.

    lengths       cached tokens of each sequence; a list of one number is for all sequences
    rows          rows of the cache; fewer than the longest length + tokens make it a ring
    kv_dtype      dtype of the cache; None: dtype
    stream_dtype  dtype of the residual stream; None: dtype
    """
    generator = torch.Generator(device).manual_seed(seed)
    kv_heads = kv_heads or heads
    lengths = list(lengths) * (batch if len(lengths) == 1 else 1)
    head_dim, hidden = width // heads, 4 * width

    def randn(*size: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return (mean + std * torch.randn(*size, generator=generator, device=device)).to(dtype)

    def optional(size: int) -> Tensor | None:
        return randn(size, std=0.1) if bias else None

    def layer() -> Layer:
        qkv = (heads + 2 * kv_heads) * head_dim
        return Layer(
            ln_1_weight=randn(width, std=0.1, mean=1.0),
            ln_1_bias=optional(width),
            qkv_weight=randn(qkv, width, std=width**-0.5),
            qkv_bias=optional(qkv),
            proj_weight=randn(width, width, std=width**-0.5),
            proj_bias=optional(width),
            ln_2_weight=randn(width, std=0.1, mean=1.0),
            ln_2_bias=optional(width),
            fc_weight=randn(hidden, width, std=width**-0.5),
            fc_bias=optional(hidden),
            fc_proj_weight=randn(width, hidden, std=hidden**-0.5),
            fc_proj_bias=optional(width),
        )

    wte = randn(vocab, width)
    weights = Weights(
        wte=wte,
        head=wte,
        wpe=None if rope else randn(max(lengths) + tokens, width),
        layers=tuple(layer() for _ in range(n_layer)),
        ln_f_weight=randn(width, std=0.1, mean=1.0),
        ln_f_bias=optional(width),
        heads=heads,
        kv_heads=kv_heads,
        stream_dtype=torch.promote_types(stream_dtype or dtype, dtype),
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
    n_layer: int = 2,
    vocab: int = 97,
    dtype: torch.dtype = torch.bfloat16,
    **_: object,
) -> dict[str, tuple[int, int]]:
    """Return {"forward": (FLOPs, bytes)}. The bytes: each matrix, each key and value, and the logits, once each."""
    lengths = list(lengths) * (batch if len(lengths) == 1 else 1)
    kv_width = (kv_heads or heads) * (width // heads)
    matrices = n_layer * (10 * width * width + 2 * width * kv_width) + vocab * width
    keys = sum(lengths) + batch * tokens
    elements = matrices + 2 * n_layer * keys * kv_width + batch * tokens * vocab
    pairs = tokens * keys  # of a query and a key; a few more than the causal mask leaves
    return {"forward": (2 * batch * tokens * matrices + 4 * n_layer * pairs * width, elements * dtype.itemsize)}
