"""Attention of a decoding step: a few queries of each sequence read all of its cached keys (flash-decoding, Dao 2023).

A program takes one key head of one sequence, up to 16 queries of the query heads that share it, and one split of the
keys. With more than one split, each program stores its result in fp32. The last program to finish combines the results
in the order of the splits. Up to FEW rows, the splits do not depend on the numbers of sequences and tokens, so neither
do the bits of a result.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.decode._step import Step
from kernels.decode._tiles import launch_next_kernel, prefetch, wait_for_earlier_kernels

LOG2E = math.log2(math.e)  # exp(x) = exp2(LOG2E x); the hardware has only exp2
LOWEST = tl.constexpr(-1e30)  # below every score, but finite, because -inf - -inf would be NaN
BLOCK_M = 16  # queries of a program: a matmul instruction has 16 rows


@triton.jit
def _merge(largest, total, acc, lse, out):
    """Add the result `out` of one split, with its lse, to the sums of the online softmax."""
    before = largest
    largest = tl.maximum(before, lse)
    shrink, weight = tl.exp2(before - largest), tl.exp2(lse - largest)
    return largest, total * shrink + weight, acc * shrink[:, None] + out * weight[:, None]


@triton.jit(do_not_specialize=["N", "T", "cache_rows", "split_keys"])
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
    launch_next_kernel(PDL)
    GROUP: tl.constexpr = Q_WIDTH // KV_WIDTH
    HEADS: tl.constexpr = Q_WIDTH // D
    b, kv_head = tl.program_id(0) // (KV_WIDTH // D), tl.program_id(0) % (KV_WIDTH // D)
    split = tl.program_id(1)
    query = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    t, head = query // GROUP, kv_head * GROUP + query % GROUP
    keys, d = tl.arange(0, BLOCK_KEYS), tl.arange(0, BLOCK_D)
    length = tl.minimum(tl.load(positions_ptr + b) + T, cache_rows).to(tl.int32)  # keys of this sequence
    end = tl.minimum(length - (T - 1 - t), length)  # each query sees the keys before its `end`
    first = split * split_keys
    last = tl.minimum(first + split_keys, length)
    k_ptr += b.to(tl.int64) * cache_rows * KV_WIDTH + kv_head * D
    v_ptr += b.to(tl.int64) * cache_rows * KV_WIDTH + kv_head * D
    if PDL:  # an earlier kernel may still write these keys; the L2 cache is coherent, so this is harmless
        LINE: tl.constexpr = 1024 // k_ptr.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
        for n in range(first, last, BLOCK_KEYS):
            rows = tl.minimum(n + keys, last - 1).to(tl.int64) * KV_WIDTH
            for line in tl.static_range(0, D, LINE):
                prefetch(k_ptr + rows + line)
                prefetch(v_ptr + rows + line)
    wait_for_earlier_kernels(PDL)
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
    if SPLITS == 1:
        tl.store(out_ptr + offsets, out.to(q.dtype), mask)
    else:
        part = split.to(tl.int64) * N * HEADS
        tl.store(part_ptr + part * D + offsets, out, mask)
        tl.store(lse_ptr + part + row, largest + tl.log2(total), real)
        count_ptr += tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
        tl.debug_barrier()  # all threads have stored
        if tl.atomic_add(count_ptr, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(count_ptr, 0)
            largest = tl.full((BLOCK_M,), LOWEST, tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            for i in tl.static_range(SPLITS):
                lse = tl.load(lse_ptr + i * N * HEADS + row, real, other=0.0)
                out = tl.load(part_ptr + i * N * Q_WIDTH + offsets, mask, other=0.0)
                largest, total, acc = _merge(largest, total, acc, lse, out)
            tl.store(out_ptr + offsets, (acc / total[:, None]).to(q.dtype), mask)


def default_launch(D: int, dtype: torch.dtype) -> dict:
    """Return the default launch parameters."""
    width = max(16, triton.next_power_of_2(D))
    if dtype == torch.float32:  # for comparisons of results, not for speed
        return {"BLOCK_KEYS": max(16, 2048 // width), "num_warps": 4, "num_stages": 1}
    return {"BLOCK_KEYS": max(16, min(128, 8192 // width)), "num_warps": 4, "num_stages": 2}


def attend(step: Step, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention (N, H D) of queries q (N, H D) over a layer's cache k and v (B, rows, Hkv, D)."""
    B, _, kv_heads, D = k.shape
    heads, out = q.shape[1] // D, torch.empty_like(q)
    launch = step.parameters("attention", f"{D} {q.dtype} {k.dtype}", default_launch(D, q.dtype))
    scratch = {}
    if step.splits > 1:
        scratch["part_ptr"] = step.empty(step.splits, step.N, heads, D, dtype=torch.float32)
        scratch["lse_ptr"] = step.empty(step.splits, step.N, heads, dtype=torch.float32)
        scratch["count_ptr"] = step.counts
    step.launch(
        _attention_kernel,
        (B * kv_heads, step.splits, triton.cdiv(step.T * heads // kv_heads, BLOCK_M)),
        **{"q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, **scratch},
        scale=LOG2E / math.sqrt(D),
        split_keys=step.split_keys,
        SPLITS=step.splits,
        BLOCK_M=BLOCK_M,
        BLOCK_D=max(16, triton.next_power_of_2(D)),
        **launch,
    )
    return out
