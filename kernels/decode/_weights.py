"""What pack() of a decoder gets: the weights of a model, and what their shapes do not show."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.cache import Cache
from kernels.registry import Unavailable
from kernels.rope import rope_table


class Layer(NamedTuple):
    """The weights of a block in the compute dtype. A matrix is (out, in). In a model without biases they are None."""

    ln_1_weight: Tensor  # (C,)
    ln_1_bias: Tensor | None  # None with RMSNorm
    qkv_weight: Tensor  # ((H + 2 Hkv) D, C): queries, keys, values
    qkv_bias: Tensor | None
    proj_weight: Tensor  # (C, H D)
    proj_bias: Tensor | None
    ln_2_weight: Tensor
    ln_2_bias: Tensor | None
    fc_weight: Tensor  # (F, C); with swiglu (2 F, C): the rows of the gate, then the rows of up
    fc_bias: Tensor | None
    fc_proj_weight: Tensor  # (C, F)
    fc_proj_bias: Tensor | None
    q_norm_weight: Tensor | None = None  # (D,), or None: queries and keys are not normalised
    k_norm_weight: Tensor | None = None


MATRICES = "qkv_weight", "proj_weight", "fc_weight", "fc_proj_weight"  # of a Layer
EPS, THETA = 1e-5, 10000.0  # the defaults of GPTConfig


class Weights(NamedTuple):
    """The weights of a model in the compute dtype, and the sizes that their shapes do not show."""

    wte: Tensor  # (V, C): token embeddings
    head: Tensor  # (V, C): the same tensor as wte if the model has no head of its own
    wpe: Tensor | None  # (P, C): position embeddings; None: rotary positions
    layers: tuple[Layer, ...]
    ln_f_weight: Tensor  # (C,)
    ln_f_bias: Tensor | None
    heads: int  # H, of queries
    kv_heads: int  # Hkv
    head_dim: int  # D
    stream_dtype: torch.dtype  # of the residual stream
    norm: str = "layernorm"  # these five as in GPTConfig
    norm_eps: float = EPS  # also of the norm of queries and keys
    mlp: str = "gelu"
    rope_theta: float = THETA
    rope_scaling: float | None = None

    @property
    def has_qk_norm(self) -> bool:
        return self.layers[0].q_norm_weight is not None

    def rope_table(self, positions: Tensor) -> Tensor | None:
        """Return rope_table() of positions (B, T), or None with learned positions."""
        if self.wpe is not None:
            return None
        return rope_table(positions, self.head_dim, self.rope_theta, self.rope_scaling)

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


def refuse_other_shapes(impl: str, weights: Weights, computes: Collection[str] = ()) -> None:
    """Raise Unavailable, with their names, if fields of GPTConfig differ from GPT-2's. Those in `computes` may differ.

    Call it in pack() before the matrices get another layout. heads, kv_heads, bias and pos may always differ.
    """
    C, F = weights.wte.shape[1], weights.layers[0].fc_weight.shape[0]
    differences = {
        "norm": weights.norm != "layernorm" and weights.norm,
        "norm_eps": weights.norm_eps != EPS and f"{weights.norm_eps:g}",
        "rope_theta": weights.wpe is None and weights.rope_theta != THETA and f"{weights.rope_theta:g}",
        "rope_scaling": weights.rope_scaling,
        "head_dim": weights.head_dim * weights.heads != C and weights.head_dim,
        "qk_norm": weights.has_qk_norm and "true",
        "mlp": weights.mlp != "gelu" and weights.mlp,
        "hidden": weights.mlp != "swiglu" and 4 * C != F and F,
        "tie_embeddings": weights.head is not weights.wte and "false",
    }
    names = [f"model.{field}={value}" for field, value in differences.items() if value and field not in computes]
    if names:
        raise Unavailable(
            f"kernels.decode={impl} computes GPT-2's shape, and this model has {' and '.join(names)}: choose "
            "kernels.decode=triton, or kernels.decode=blocks"
        )
