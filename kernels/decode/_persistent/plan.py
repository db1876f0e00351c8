"""Which rows of each matrix a block multiplies, and the order in which the weights lie in memory for that."""

from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cache import Cache
from kernels.decode import Layer, Weights

# Most bytes in one TMA copy. A copy has at least one tile for each warp, even if that is more. On an H200 a token of 12
# layers of 1558M takes 393 us with 14,000, and 355 us with 18,000. For 124M both give the same pieces
PIECE_BYTES = 18_000
MOST_HEAD_ROWS = 24  # of a block in one pass over the head
TILE_ROW_BYTES = 64  # of one row in a tile, which a warp multiplies at once


class Plan(NamedTuple):
    """How a block multiplies its rows of W (N, K): `rows` rows in each pass, which comes in pieces of `tiles` tiles."""

    rows: int
    passes: int
    tiles: int

    @property
    def share(self) -> int:
        """The rows of a block."""
        return self.rows * self.passes


def make_plan(weight: Tensor, blocks: int, warps: int, most_rows: int | None = None) -> Plan:
    """Return the plan for W (N, K). It has one pass, unless a block has more than `most_rows` rows."""
    (N, K), itemsize = weight.shape, weight.itemsize
    rows = share = ceil(N / blocks)
    if most_rows and share > most_rows:  # the fewest rows of padding, then the fewest passes
        rows = min(range(most_rows // 2 + 1, most_rows + 1), key=lambda rows: (-share % rows, -rows))
    tiles = ceil(K * itemsize / TILE_ROW_BYTES)
    fitting = PIECE_BYTES // (TILE_ROW_BYTES * rows)
    if fitting < tiles:  # give all warps the same number of tiles, if possible in every piece
        even = [n for n in range(warps, fitting + 1, warps) if tiles % n == 0]
        tiles = max(even, default=max(1, fitting // warps) * warps)
    return Plan(rows, ceil(share / rows), tiles)


def make_plans(weights: Weights, blocks: int, warps: int) -> dict[str, Plan]:
    """Return {name of a product in persistent.cu: its plan}. All layers have the same sizes."""
    plans = {name: make_plan(weight, blocks, warps) for name, (weight, _) in products(weights.layers[0]).items()}
    return plans | {"HEAD": make_plan(weights.head, blocks, warps, MOST_HEAD_ROWS)}


def count_warps(weights: Weights, batch: int) -> int:
    """Return the warps of a block: if possible, a divisor of the tiles of a row. Every sequence needs one."""
    if weights.wte.device.type == "cpu":
        return max(4, batch)
    tiles = ceil(weights.wte.shape[1] * weights.wte.itemsize / TILE_ROW_BYTES)
    return max((warps for warps in range(8, 12) if tiles % warps == 0), default=11)


def sizes(weights: Weights, cache: Cache, blocks: int, warps: int, plans: dict[str, Plan]) -> dict[str, int]:
    """Return the sizes that persistent.cu needs, by their names there."""
    keys = cache.kv[0][0]
    return {
        "BLOCKS": blocks,
        "WARPS": warps,
        "BATCH": len(keys),
        "LAYERS": len(weights.layers),
        "WIDTH": weights.wte.shape[1],
        "HEADS": weights.heads,
        "KV_HEADS": weights.kv_heads,
        "HIDDEN": len(weights.layers[0].fc_weight),
        "VOCAB": len(weights.head),
        "ROPE": int(weights.wpe is None),
        "BF16": int(weights.wte.dtype == torch.bfloat16),
        "STREAM_BF16": int(weights.stream_dtype == torch.bfloat16),
        "KV_BITS": 8 * keys.itemsize,
        **{f"{name}_{part.upper()}": n for name, plan in plans.items() for part, n in plan._asdict().items()},
    }


def products(layer: Layer) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return {name of a product in persistent.cu: (weight, bias)}, in the order of a layer."""
    return {
        "QKV": (layer.qkv_weight, layer.qkv_bias),
        "PROJ": (layer.proj_weight, layer.proj_bias),
        "FC": (layer.fc_weight, layer.fc_bias),
        "FC_PROJ": (layer.fc_proj_weight, layer.fc_proj_bias),
    }


def arrange_weights(weights: Weights, plans: dict[str, Plan], blocks: int) -> Tensor:
    """Return all matrices as (blocks, elements): what each block multiplies, in the order of use."""
    matrices = [(plans[name], weight) for layer in weights.layers for name, (weight, _) in products(layer).items()]
    return torch.cat([arrange_matrix(*matrix, blocks) for matrix in [*matrices, (plans["HEAD"], weights.head)]], dim=1)


def arrange_matrix(plan: Plan, weight: Tensor, blocks: int) -> Tensor:
    """Return W (N, K) as (blocks, elements): pass, tile, row, column. Missing rows and columns are 0."""
    (N, K), tile = weight.shape, TILE_ROW_BYTES // weight.itemsize
    tiles = ceil(K / tile)
    padded = weight.new_zeros(blocks * plan.share, tiles * tile)
    padded[:N, :K] = weight
    return padded.view(blocks, plan.passes, plan.rows, tiles, tile).transpose(2, 3).reshape(blocks, -1)


def arrange_biases(weights: Weights, plans: dict[str, Plan], blocks: int) -> Tensor:
    """Return the biases as (blocks, elements): layer, product, row. Missing rows and biases are 0."""
    biases = []
    for layer in weights.layers:
        for name, (weight, bias) in products(layer).items():
            padded = weight.new_zeros(blocks * plans[name].share)
            if bias is not None:
                padded[: len(bias)] = bias
            biases.append(padded.view(blocks, -1))
    return torch.cat(biases, dim=1)


def stack_norms(weights: Weights) -> Tensor:
    """Return (4 layers + 2, C): gain and shift of ln_1 and ln_2 of each layer, and of ln_f. A missing shift is 0."""
    norms = [(layer.ln_1_weight, layer.ln_1_bias, layer.ln_2_weight, layer.ln_2_bias) for layer in weights.layers]
    flat = [*(vector for norm in norms for vector in norm), weights.ln_f_weight, weights.ln_f_bias]
    return torch.stack([torch.zeros_like(weights.ln_f_weight) if vector is None else vector for vector in flat])
