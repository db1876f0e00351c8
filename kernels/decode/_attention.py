"""Attention of a decoding step: a few queries of each sequence read all of its cached keys (flash-decoding, Dao 2023).

A program takes one key head of one sequence, the queries of the query heads that share it, and one split of the keys.
If more than one split has keys, each program stores its result in fp32. The last program to finish combines the results
in the order of the splits. Up to FEW rows, the splits do not depend on the numbers of sequences and tokens, so neither
do the bits of a result.

There are two kernels. If several query heads share a key head, or for many rows, tensor cores multiply 16 queries at a
time. Otherwise a program multiplies keys and one query at a time in registers: a matmul instruction would waste 15 of
16 rows, and its operands would go through shared memory. If a split is short, the program loads its keys and values
into registers before it waits for the new ones, so after the wait it only loads the query and the new keys: 3.3 us a
layer for one row, instead of the 4.9 us that tensor cores take (H200, 130 keys in a bucket of 320).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.decode._splits import LOWEST, combine_splits, is_last_split
from kernels.decode._step import NOT_SPECIALISED, Step
from kernels.decode._tiles import launch_next_kernel, prefetch_keys, wait_for_earlier_kernels
from kernels.decode._vector_attention import _vector_attention_kernel

LOG2E = math.log2(math.e)  # exp(x) = exp2(LOG2E x); the hardware has only exp2
BLOCK_M = 16  # queries of a program: a matmul instruction has 16 rows
# With many rows, a program prefetches at most so many keys of its split. 64 sequences of 192 keys have 38 MB of keys
# and values in a layer, too many for the L2 cache: with all prefetched, a step took 432 us, and now it takes 414 (H200)
PREFETCHED = 64
IN_REGISTERS = 256 * 64  # most keys * channels of a split that _vector_attention_kernel keeps in registers


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _attention_kernel(
    q_ptr,  # (N, H, D)
    k_ptr,  # (B, cache_rows, Hkv, D)
    v_ptr,
    out_ptr,  # (N, H, D)
    part_ptr,  # (SPLITS, N, H, D) fp32, None if SPLITS = 1
    lse_ptr,  # (SPLITS, N, H) fp32
    count_ptr,  # (B Hkv tiles of queries,) int32: the splits that are done; 0 before and after the kernel
    positions_ptr,  # (B,) int64
    scale,  # 1 / sqrt(D) log2(e)
    N,
    T,
    cache_rows,
    split_keys,
    most_prefetched,  # keys of a split that a program prefetches into the L2 cache
    D: tl.constexpr,
    Q_WIDTH: tl.constexpr,  # H D
    KV_WIDTH: tl.constexpr,  # Hkv D
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries
    BLOCK_KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of BLOCK_M queries of the heads that share a key head, on tensor cores."""
    launch_next_kernel(PDL)
    GROUP: tl.constexpr = Q_WIDTH // KV_WIDTH
    HEADS: tl.constexpr = Q_WIDTH // D
    b, kv_head = tl.program_id(0) // (KV_WIDTH // D), tl.program_id(0) % (KV_WIDTH // D)
    split = tl.program_id(1)
    query = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    t, head = query // GROUP, kv_head * GROUP + query % GROUP
    keys, d = tl.arange(0, BLOCK_KEYS), tl.arange(0, BLOCK_D)
    length = tl.minimum(tl.load(positions_ptr + b) + T, cache_rows).to(tl.int32)  # keys of this sequence
    active = tl.cdiv(length, split_keys)  # the splits that have keys
    end = tl.minimum(length - (T - 1 - t), length)  # each query sees the keys before its `end`
    first = split * split_keys
    last = tl.minimum(first + split_keys, length)
    k_ptr += b.to(tl.int64) * cache_rows * KV_WIDTH + kv_head * D
    v_ptr += b.to(tl.int64) * cache_rows * KV_WIDTH + kv_head * D
    if PDL:  # an earlier kernel may still write these keys; the L2 cache is coherent, so this is harmless
        prefetch_keys(k_ptr, v_ptr, first, tl.minimum(first + most_prefetched, last), D, KV_WIDTH, BLOCK_KEYS)
    wait_for_earlier_kernels(PDL)
    if split >= active:
        return
    real = t < T
    row = (b * T + t).to(tl.int64) * HEADS + head  # of (N H, D)
    offsets, mask = row[:, None] * D + d[None, :], real[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + offsets, mask, other=0.0)
    largest = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for n in range(first, last, BLOCK_KEYS):
        key = n + keys
        key_offsets = key.to(tl.int64)[:, None] * KV_WIDTH + d[None, :]
        key_mask = (key < last)[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + key_offsets, key_mask, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + key_offsets, key_mask, other=0.0).to(q.dtype)
        s = tl.dot(q, k.T, input_precision=PRECISION) * scale
        s = tl.where(key[None, :] < tl.minimum(end, last)[:, None], s, -float("inf"))
        before = largest
        largest = tl.maximum(before, tl.max(s, 1))
        p = tl.exp2(s - largest[:, None])
        shrink = tl.exp2(before - largest)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    total = tl.where(total > 0, total, 1.0)  # 0 if the query sees no key of this split
    out = acc / total[:, None]
    if SPLITS == 1 or active == 1:  # with SPLITS = 1 Triton does not compile the rest
        tl.store(out_ptr + offsets, out.to(q.dtype), mask)
    else:
        part = split.to(tl.int64) * N * HEADS
        tl.store(part_ptr + part * D + offsets, out, mask)
        tl.store(lse_ptr + part + row, largest + tl.log2(total), real)
        if is_last_split(count_ptr + tl.program_id(0).to(tl.int64) * tl.num_programs(2) + tl.program_id(2), active):
            out = combine_splits(part_ptr, lse_ptr, row, real, d, active, N, HEADS, D, SPLITS)
            tl.store(out_ptr + offsets, out.to(q.dtype), mask)


def default_launch(D: int, dtype: torch.dtype, in_registers: bool) -> dict:
    """Return the default launch parameters of _vector_attention_kernel (`in_registers`) or _attention_kernel.

    A thread of _vector_attention_kernel keeps a split of SPLIT_KEYS keys in 64 registers (bf16, D = 64).
    """
    width = max(16, triton.next_power_of_2(D))
    if in_registers:
        return {"BLOCK_KEYS": max(16, 4096 // width), "num_warps": 8}
    if dtype == torch.float32:  # for comparisons of results, not for speed
        return {"BLOCK_KEYS": max(16, 2048 // width), "num_warps": 4, "num_stages": 1}
    # 64 sequences with 192 keys: a step takes 421 us, and 439 with tiles of 128 keys, 4 warps and 2 stages (H200)
    return {"BLOCK_KEYS": max(16, min(64, 4096 // width)), "num_warps": 2, "num_stages": 3}


def attend(step: Step, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention (N, H D) of queries q (N, H D) over a layer's cache k and v (B, rows, Hkv, D)."""
    B, _, kv_heads, D = k.shape
    heads, out = q.shape[1] // D, torch.empty_like(q)
    # 256 sequences with 130 to 290 keys: a step takes 946 us with tensor cores, and 1091 us or more without (H200)
    in_registers = step.few and heads == kv_heads
    name = "vector_attention" if in_registers else "attention"
    launch = step.parameters(name, f"{D} {q.dtype} {k.dtype}", default_launch(D, q.dtype, in_registers))
    arguments = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, "scale": LOG2E / math.sqrt(D)}
    arguments |= {"split_keys": step.split_keys, "SPLITS": step.splits, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    if step.splits > 1:
        arguments["part_ptr"] = step.empty(step.splits, step.N, heads, D, dtype=torch.float32)
        arguments["lse_ptr"] = step.empty(step.splits, step.N, heads, dtype=torch.float32)
        arguments["count_ptr"] = step.counts
    grid = B * kv_heads, step.splits
    if not in_registers:
        grid = *grid, triton.cdiv(step.T * heads // kv_heads, BLOCK_M)
        arguments["most_prefetched"] = step.split_keys if step.few else PREFETCHED
        step.launch(_attention_kernel, grid, **arguments, BLOCK_M=BLOCK_M, **launch)
    else:
        tiles = triton.cdiv(step.split_keys, launch["BLOCK_KEYS"])
        fits = tiles * launch["BLOCK_KEYS"] * arguments["BLOCK_D"] <= IN_REGISTERS
        step.launch(_vector_attention_kernel, grid, **arguments, TILES=tiles if fits else 0, **launch)
    return out
