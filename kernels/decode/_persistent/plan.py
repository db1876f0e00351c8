"""Which rows of each matrix a block multiplies, and the order in which the weights lie in memory for that."""

from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cache import Cache
from kernels.decode import Weights
from kernels.decode._step import split_scales

# Most bytes in one TMA copy. A copy has at least one tile for each warp, even if that is more. On an H200, a token of
# 12 layers of 1558M took 393 us with 14,000, and 355 us with 18,000 (with no limit of copies in flight)
PIECE_BYTES = 18_000
MOST_HEAD_ROWS = 24  # most rows of a block in one pass over the head
MOST_FC_ROWS = 64  # most rows of a block in one pass over fc: a thread needs a register for each row
LARGE_LAYER = 400_000  # bytes of a block's weights in a layer: copies_in_flight() is 2 for more, and otherwise 1
LARGE_VOCAB = 2**16  # group_size() is 32 for more logits than this, and otherwise 16
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


class Product(NamedTuple):
    """A matrix of a step, and what its results are multiplied by and added to."""

    name: str  # in persistent.cu
    weight: Tensor  # (N, K)
    scales: Tensor | None  # (N,) fp32 if W is in int8
    bias: Tensor | None  # (N,)
    pairs: bool = False  # the first half of the rows are those of swiglu's gate, and the second half those of up

    def arrange(self, field: str) -> Tensor | None:
        """Return a field in the order of the blocks: with `pairs`, gate of unit 0, up of unit 0, gate of unit 1, ..."""
        rows = getattr(self, field)
        return torch.stack(rows.chunk(2), dim=1).flatten(0, 1) if self.pairs and rows is not None else rows


def tile_columns(weights: Weights) -> int:
    return X_BYTES // weights.wte.itemsize


def make_plan(product: Product, columns: int, blocks: int, warps: int, most_rows: int | None = None) -> Plan:
    """Return the plan for W (N, K) in tiles of `columns` columns: one pass, or several of at most `most_rows` rows."""
    N, K = product.weight.shape
    step = 2 if product.pairs else 1
    rows = share = ceil(N / step / blocks) * step
    if most_rows and share > most_rows:  # the fewest rows of padding, then the fewest passes
        choices = [rows for rows in range(most_rows // 2 + 1, most_rows + 1) if rows % step == 0]
        rows = min(choices, key=lambda rows: (-share % rows, -rows))
    tiles = ceil(K / columns)
    fitting = PIECE_BYTES // (columns * product.weight.itemsize * rows)
    if fitting < tiles:  # give all warps the same number of tiles, if possible in every piece
        even = [n for n in range(warps, fitting + 1, warps) if tiles % n == 0]
        tiles = max(even, default=max(1, fitting // warps) * warps)
    return Plan(rows, ceil(share / rows), tiles)


def make_plans(weights: Weights, blocks: int, warps: int) -> dict[str, Plan]:
    """Return {name of a product in persistent.cu: its plan}. All layers have the same sizes."""
    columns, most_rows = tile_columns(weights), {"FC": MOST_FC_ROWS, "HEAD": MOST_HEAD_ROWS}
    *layers, head = products(weights)
    return {
        product.name: make_plan(product, columns, blocks, warps, most_rows.get(product.name))
        for product in (*layers[:4], head)
    }


def count_blocks(weights: Weights, multiprocessors: int) -> int:
    """Return the blocks of a launch: one on each multiprocessor, without those that would have no rows of fc."""
    fc = products(weights)[2]
    most = make_plan(fc, tile_columns(weights), multiprocessors, warps=1, most_rows=MOST_FC_ROWS)
    return ceil(len(fc.weight) / most.share)


def count_warps(weights: Weights, batch: int) -> int:
    """Return the warps of a block: if possible, a divisor of the tiles of a row. Every sequence needs one."""
    if weights.wte.device.type == "cpu":
        return max(4, batch)
    tiles = ceil(weights.wte.shape[1] / tile_columns(weights))
    return max((warps for warps in range(8, 12) if tiles % warps == 0), default=11)


def group_size(weights: Weights) -> int:
    """Return how many logits are in a group of the draw. A thread keeps the summaries of its groups in registers.

    Of Qwen3's 151,936 logits a thread has 38 groups of 16. They take 76 registers, and the compiler spills 356 bytes.
    """
    return 32 if len(weights.wte) > LARGE_VOCAB else 16


def copies_in_flight(weights: Weights, plans: dict[str, Plan]) -> int:
    """Return how many TMA copies a block has in flight, except for the norms and the head.

    Words wait for the copies on their way through the L2 cache: a token of Qwen3-0.6B takes 461 us with 1 copy, and
    499 with 2 (H200). But one copy after the other reads only 2.5 TB/s, which is too slow for large layers:
    Llama-3.2-1B takes 794 us with 1, 664 with 2 and 681 with 3, and 1558M 1,075 with 1 and 1,056 with 2.
    """
    *layers, _ = products(weights)
    layer_bytes = sum(plans[each.name].share * each.weight.shape[1] * each.weight.itemsize for each in layers[:4])
    return 2 if layer_bytes > LARGE_LAYER else 1


def sizes(weights: Weights, cache: Cache, blocks: int, warps: int, plans: dict[str, Plan]) -> dict[str, int | str]:
    """Return the sizes and choices that persistent.cu needs, by their names there."""
    keys = cache.kv[0][0]
    fc_proj, _ = split_scales(weights.layers[0].fc_proj_weight)
    return {
        "BLOCKS": blocks,
        "WARPS": warps,
        "BATCH": len(keys),
        "LAYERS": len(weights.layers),
        "WIDTH": weights.wte.shape[1],
        "HEADS": weights.heads,
        "KV_HEADS": weights.kv_heads,
        "HEAD_DIM": weights.head_dim,
        "HIDDEN": fc_proj.shape[1],
        "VOCAB": len(weights.wte),
        "GROUP": group_size(weights),
        "FLYING": copies_in_flight(weights, plans),
        "ROPE": int(weights.wpe is None),
        "QK_NORM": int(weights.has_qk_norm),
        "RMS_NORM": int(weights.norm == "rmsnorm"),
        "NORM_EPS": f"{weights.norm_eps}f",
        "RELU2": int(weights.mlp == "relu2"),
        "SWIGLU": int(weights.mlp == "swiglu"),
        "BF16": int(weights.wte.dtype == torch.bfloat16),
        "INT8": int(split_scales(weights.head)[0].dtype == torch.int8),
        "STREAM_BF16": int(weights.stream_dtype == torch.bfloat16),
        "KV_BITS": 8 * keys.itemsize,
        **{f"{name}_{part.upper()}": n for name, plan in plans.items() for part, n in plan._asdict().items()},
    }


def products(weights: Weights) -> list[Product]:
    """Return the products of a step in their order."""
    found = []
    for layer in weights.layers:
        for name in ("qkv", "proj", "fc", "fc_proj"):
            weight, scales = split_scales(getattr(layer, f"{name}_weight"))
            pairs = name == "fc" and weights.mlp == "swiglu"
            found.append(Product(name.upper(), weight, scales, getattr(layer, f"{name}_bias"), pairs))
    weight, scales = split_scales(weights.head)
    return [*found, Product("HEAD", weight, scales, bias=None)]


def arrange_weights(weights: Weights, plans: dict[str, Plan], blocks: int) -> Tensor:
    """Return all matrices as (blocks, elements): what each block multiplies, in the order of use."""
    columns, all_products = tile_columns(weights), products(weights)
    order = ORDERS[all_products[0].weight.dtype] if weights.wte.dtype == torch.bfloat16 else list(range(8))
    parts = [arrange_matrix(plans[each.name], each.arrange("weight"), columns, order, blocks) for each in all_products]
    return torch.cat(parts, dim=1)


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


def arrange_rows(weights: Weights, plans: dict[str, Plan], blocks: int, field: str, dtype: torch.dtype) -> Tensor:
    """Return the field "bias" or "scales" of all products as (blocks, elements), in the order of arrange_weights().

    Missing numbers are 0.
    """
    parts = []
    for product in products(weights):
        plan, vector = plans[product.name], product.arrange(field)
        padded = torch.zeros(blocks * plan.share, dtype=dtype, device=weights.wte.device)
        if vector is not None:
            padded[: len(vector)] = vector
        parts.append(padded.view(blocks, -1))
    return torch.cat(parts, dim=1)


def stack_norms(weights: Weights) -> Tensor:
    """Return (4 layers + 2, C): gain and shift of ln_1 and ln_2 of each layer, and of ln_f. A missing shift is 0.

    RMSNorm has no shift, so then it is (2 layers + 1, C).
    """
    norms = [(layer.ln_1_weight, layer.ln_1_bias, layer.ln_2_weight, layer.ln_2_bias) for layer in weights.layers]
    flat = [*(vector for norm in norms for vector in norm), weights.ln_f_weight, weights.ln_f_bias]
    if weights.norm == "rmsnorm":
        flat = flat[::2]
    return torch.stack([torch.zeros_like(weights.ln_f_weight) if vector is None else vector for vector in flat])


def stack_qk_norms(weights: Weights) -> Tensor:
    """Return (2 layers, D): the gains of the norms of queries and of keys of each layer."""
    return torch.stack([gain for layer in weights.layers for gain in (layer.q_norm_weight, layer.k_norm_weight)])
