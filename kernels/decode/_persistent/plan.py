"""Which rows of each matrix a block multiplies, and the order in which the weights lie in memory for that.

A matrix is W (N, K), or (W in int8, its scales (N,) fp32).
"""

from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cache import Cache
from kernels.decode import Weights
from kernels.decode._step import Matrix, split_scales

# Most bytes in one TMA copy. A copy has at least one tile for each warp, even if that is more. On an H200, a token of
# 12 layers of 1558M took 393 us with 14,000, and 355 us with 18,000 (measured before FLYING limited the copies)
PIECE_BYTES = 18_000
MOST_HEAD_ROWS = 24  # most rows of a block in one pass over the head
X_BYTES = 64  # the bytes of x that a tile multiplies: it has 32 columns in bf16
# How 8 columns lie in memory if tensor cores multiply them: pair() in numbers.cuh and multiply_tile() say why
ORDERS = {torch.bfloat16: [0, 1, 4, 5, 2, 3, 6, 7], torch.int8: [0, 4, 1, 5, 2, 6, 3, 7]}


class Plan(NamedTuple):
    """How a block multiplies its rows of W (N, K): `rows` rows in each pass, which comes in pieces of `tiles` tiles."""

    rows: int
    passes: int
    tiles: int

    @property
    def share(self) -> int:
        """The rows of a block."""
        return self.rows * self.passes


def elements(weight: Matrix) -> Tensor:
    """Return W (N, K) without its scales."""
    return split_scales(weight)[0]


def tile_columns(weights: Weights) -> int:
    return X_BYTES // weights.wte.itemsize


def make_plan(weight: Tensor, columns: int, blocks: int, warps: int, most_rows: int | None = None) -> Plan:
    """Return the plan for W (N, K), whose tiles have `columns` columns.

    It has one pass, unless a block has more than `most_rows` rows.
    """
    N, K = weight.shape
    rows = share = ceil(N / blocks)
    if most_rows and share > most_rows:  # the fewest rows of padding, then the fewest passes
        rows = min(range(most_rows // 2 + 1, most_rows + 1), key=lambda rows: (-share % rows, -rows))
    tiles = ceil(K / columns)
    fitting = PIECE_BYTES // (columns * weight.itemsize * rows)
    if fitting < tiles:  # give all warps the same number of tiles, if possible in every piece
        even = [n for n in range(warps, fitting + 1, warps) if tiles % n == 0]
        tiles = max(even, default=max(1, fitting // warps) * warps)
    return Plan(rows, ceil(share / rows), tiles)


def make_plans(weights: Weights, blocks: int, warps: int) -> dict[str, Plan]:
    """Return {name of a product in persistent.cu: its plan}. All layers have the same sizes."""
    columns = tile_columns(weights)
    layer = products(weights)[:4]
    plans = {name: make_plan(elements(weight), columns, blocks, warps) for name, weight, _ in layer}
    return plans | {"HEAD": make_plan(elements(weights.head), columns, blocks, warps, MOST_HEAD_ROWS)}


def count_warps(weights: Weights, batch: int) -> int:
    """Return the warps of a block: if possible, a divisor of the tiles of a row. Every sequence needs one."""
    if weights.wte.device.type == "cpu":
        return max(4, batch)
    tiles = ceil(weights.wte.shape[1] / tile_columns(weights))
    return max((warps for warps in range(8, 12) if tiles % warps == 0), default=11)


def hidden_units(weights: Weights) -> int:
    return len(elements(weights.layers[0].fc_weight))


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
        "HIDDEN": hidden_units(weights),
        "VOCAB": len(weights.wte),
        "ROPE": int(weights.wpe is None),
        "BF16": int(weights.wte.dtype == torch.bfloat16),
        "INT8": int(elements(weights.head).dtype == torch.int8),
        "STREAM_BF16": int(weights.stream_dtype == torch.bfloat16),
        "KV_BITS": 8 * keys.itemsize,
        **{f"{name}_{part.upper()}": n for name, plan in plans.items() for part, n in plan._asdict().items()},
    }


def products(weights: Weights) -> list[tuple]:
    """Return (name of the product in persistent.cu, matrix, bias) of each matrix, in the order of use."""
    found = []
    for layer in weights.layers:
        found.append(("QKV", layer.qkv_weight, layer.qkv_bias))
        found.append(("PROJ", layer.proj_weight, layer.proj_bias))
        found.append(("FC", layer.fc_weight, layer.fc_bias))
        found.append(("FC_PROJ", layer.fc_proj_weight, layer.fc_proj_bias))
    return [*found, ("HEAD", weights.head, None)]


def arrange_weights(weights: Weights, plans: dict[str, Plan], blocks: int) -> Tensor:
    """Return all matrices as (blocks, elements): what each block multiplies, in the order of use."""
    columns = tile_columns(weights)
    order = ORDERS[elements(weights.head).dtype] if weights.wte.dtype == torch.bfloat16 else list(range(8))
    matrices = [(plans[name], elements(weight)) for name, weight, _ in products(weights)]
    return torch.cat([arrange_matrix(plan, weight, columns, order, blocks) for plan, weight in matrices], dim=1)


def arrange_matrix(plan: Plan, weight: Tensor, columns: int, order: list[int], blocks: int) -> Tensor:
    """Return W (N, K) as (blocks, elements): pass, tile, row, column. Missing rows and columns are 0.

    `order` permutes each 8 columns.
    """
    N, K = weight.shape
    tiles = ceil(K / columns)
    padded = weight.new_zeros(blocks * plan.share, tiles * columns)
    padded[:N, :K] = weight
    padded = padded.view(-1, 8)[:, order]
    return padded.view(blocks, plan.passes, plan.rows, tiles, columns).transpose(2, 3).reshape(blocks, -1)


def arrange_rows(vectors: list[tuple[Plan, Tensor | None]], blocks: int, like: Tensor) -> Tensor:
    """Return one number of each row, such as its bias, as (blocks, rows of a block). Missing ones are 0."""
    parts = []
    for plan, vector in vectors:
        padded = like.new_zeros(blocks * plan.share)
        if vector is not None:
            padded[: len(vector)] = vector
        parts.append(padded.view(blocks, -1))
    return torch.cat(parts, dim=1)


def arrange_biases(weights: Weights, plans: dict[str, Plan], blocks: int) -> Tensor:
    """Return the biases as (blocks, elements), in the order of arrange_weights()."""
    return arrange_rows([(plans[name], bias) for name, _, bias in products(weights)], blocks, weights.wte)


def arrange_scales(weights: Weights, plans: dict[str, Plan], blocks: int) -> Tensor:
    """Return the scales of the integers as (blocks, elements) fp32, in the order of arrange_weights()."""
    scales = [(plans[name], split_scales(weight)[1]) for name, weight, _ in products(weights)]
    return arrange_rows(scales, blocks, split_scales(weights.head)[1])


def stack_norms(weights: Weights) -> Tensor:
    """Return (4 layers + 2, C): gain and shift of ln_1 and ln_2 of each layer, and of ln_f. A missing shift is 0."""
    norms = [(layer.ln_1_weight, layer.ln_1_bias, layer.ln_2_weight, layer.ln_2_bias) for layer in weights.layers]
    flat = [*(vector for norm in norms for vector in norm), weights.ln_f_weight, weights.ln_f_bias]
    return torch.stack([torch.zeros_like(weights.ln_f_weight) if vector is None else vector for vector in flat])
