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

from kernels.decode._step import Step
from kernels.decode._tiles import launch_next_kernel, prefetch_keys, wait_for_earlier_kernels

LOG2E = math.log2(math.e)  # exp(x) = exp2(LOG2E x); the hardware has only exp2
LOWEST = tl.constexpr(-1e30)  # below every score, but finite, because -inf - -inf would be NaN
BLOCK_M = 16  # queries of a program: a matmul instruction has 16 rows
# With many rows, a program prefetches at most so many keys of its split. 64 sequences of 192 keys have 38 MB of keys
# and values in a layer, too many for the L2 cache: with all prefetched, a step took 432 us, and now it takes 414 (H200)
PREFETCHED = 64
IN_REGISTERS = 256 * 64  # most keys * channels of a split that _vector_attention_kernel keeps in registers
# Not specialised, so that another batch or cache compiles nothing
SIZES = ["N", "T", "cache_rows", "split_keys", "most_prefetched"]


@triton.jit
def _merge(largest, total, acc, lse, out):
    """Add the result `out` of one split, with its lse, to the sums of the online softmax."""
    before = largest
    largest = tl.maximum(before, lse)
    shrink, weight = tl.exp2(before - largest), tl.exp2(lse - largest)
    return largest, total * shrink + weight, acc * shrink[:, None] + out * weight[:, None]


@triton.jit
def _is_last_split(count_ptr, active):
    """Return, after all threads have stored the result of a split, whether the other active splits are done too."""
    tl.debug_barrier()
    is_last = tl.atomic_add(count_ptr, 1, sem="acq_rel") == active - 1
    if is_last:
        tl.store(count_ptr, 0)
    return is_last


@triton.jit(do_not_specialize=SIZES)
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
        if _is_last_split(count_ptr + tl.program_id(0).to(tl.int64) * tl.num_programs(2) + tl.program_id(2), active):
            largest = tl.full((BLOCK_M,), LOWEST, tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            for i in tl.static_range(SPLITS):
                part = tl.cast(N, tl.int64) * i * HEADS
                lse = tl.load(lse_ptr + part + row, real & (i < active), other=LOWEST)
                out = tl.load(part_ptr + part * D + offsets, mask & (i < active), other=0.0)
                largest, total, acc = _merge(largest, total, acc, lse, out)
            tl.store(out_ptr + offsets, (acc / total[:, None]).to(q.dtype), mask)


@triton.jit(do_not_specialize=SIZES)
def _vector_attention_kernel(
    q_ptr,  # the arguments of _attention_kernel, with Hkv = H
    k_ptr,
    v_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    count_ptr,  # (B H,)
    positions_ptr,
    scale,
    N,
    T,
    cache_rows,
    split_keys,
    D: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    TILES: tl.constexpr,  # tiles of a split, if it is short enough for registers; otherwise 0
    BLOCK_KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of the T queries of a head, one after the other. Each thread multiplies its keys with the query.

    With TILES, all keys and values of a split are in registers. Query t adds its own key, so its later keys are zero.
    Otherwise a loop reads the tiles. A place of a tile is an element of tl.arange(0, BLOCK_KEYS). Each place has its
    own online softmax, so no thread waits for another one before all tiles are done.
    """
    HEADS: tl.constexpr = Q_WIDTH // D
    b, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    split = tl.program_id(1)
    places, d = tl.arange(0, BLOCK_KEYS), tl.arange(0, BLOCK_D)
    position = tl.load(positions_ptr + b)
    length = tl.minimum(position + T, cache_rows).to(tl.int32)
    active = tl.cdiv(length, split_keys)
    first = split * split_keys
    last = tl.minimum(first + split_keys, length)
    k_ptr += b * cache_rows * Q_WIDTH + head * D
    v_ptr += b * cache_rows * Q_WIDTH + head * D
    tile = places[:, None] * Q_WIDTH + d[None, :]
    in_head = (d < D)[None, :]
    ks, vs, ages = (), (), ()
    if TILES > 0:
        for i in tl.static_range(TILES):
            n = first + i * BLOCK_KEYS
            age = n + places - (position % cache_rows).to(tl.int32)
            age = tl.where(age < 0, age + cache_rows, age)  # this step writes the keys with 0 <= age < T
            old = ((n + places < last) & (age >= T))[:, None] & in_head
            ks += (tl.load(k_ptr + n.to(tl.int64) * Q_WIDTH + tile, old, other=0.0),)
            vs += (tl.load(v_ptr + n.to(tl.int64) * Q_WIDTH + tile, old, other=0.0),)
            ages += (age,)
    elif PDL:
        prefetch_keys(k_ptr, v_ptr, first, last, D, Q_WIDTH, BLOCK_KEYS)
    wait_for_earlier_kernels(PDL)
    # After the wait: before it, programs of proj took multiprocessors from the last programs of this kernel. A step of
    # one sequence with 1088 keys took 222 us, and now takes 212 (H200)
    launch_next_kernel(PDL)
    if split >= active:
        return
    for t in range(T):
        row = (b * T + t) * HEADS + head  # of (N H, D)
        end = tl.minimum(length - (T - 1 - t), last)
        q = tl.load(q_ptr + row * D + d, d < D, other=0.0).to(tl.float32) * scale
        if TILES > 0:
            new = (position + t) % cache_rows * Q_WIDTH + d
            new_k, new_v = tl.load(k_ptr + new, d < D, other=0.0), tl.load(v_ptr + new, d < D, other=0.0)
            all_k, all_v, scores = (), (), ()
            most = tl.full((BLOCK_KEYS,), LOWEST, tl.float32)
            for i in tl.static_range(TILES):
                is_new = (ages[i] == t)[:, None]
                all_k += (tl.where(is_new, new_k[None, :], ks[i]),)
                all_v += (tl.where(is_new, new_v[None, :], vs[i]),)
                s = tl.sum(all_k[i].to(tl.float32) * q[None, :], 1)
                s = tl.where(first + i * BLOCK_KEYS + places < end, s, -float("inf"))
                most = tl.maximum(most, s)
                scores += (s,)
            ks, vs = all_k, all_v
            largest = tl.max(most, 0)
            sums = tl.zeros((BLOCK_KEYS,), tl.float32)
            outs = tl.zeros((BLOCK_KEYS, BLOCK_D), tl.float32)
            for i in tl.static_range(TILES):
                p = tl.exp2(scores[i] - largest)
                sums += p
                outs += vs[i].to(tl.float32) * p[:, None]
            total = tl.sum(sums, 0)
            acc = tl.sum(outs, 0)
        else:
            most = tl.full((BLOCK_KEYS,), LOWEST, tl.float32)
            sums = tl.zeros((BLOCK_KEYS,), tl.float32)
            outs = tl.zeros((BLOCK_KEYS, BLOCK_D), tl.float32)
            mask = (first + places < last)[:, None] & in_head
            k_tile, v_tile = k_ptr + first.to(tl.int64) * Q_WIDTH, v_ptr + first.to(tl.int64) * Q_WIDTH
            next_k, next_v = tl.load(k_tile + tile, mask, other=0.0), tl.load(v_tile + tile, mask, other=0.0)
            for n in range(first, last, BLOCK_KEYS):
                k, v = next_k.to(tl.float32), next_v.to(tl.float32)
                # the next tile arrives while this one is multiplied
                mask = (n + BLOCK_KEYS + places < last)[:, None] & in_head
                k_tile += BLOCK_KEYS * Q_WIDTH
                v_tile += BLOCK_KEYS * Q_WIDTH
                next_k, next_v = tl.load(k_tile + tile, mask, other=0.0), tl.load(v_tile + tile, mask, other=0.0)
                s = tl.where(n + places < end, tl.sum(k * q[None, :], 1), -float("inf"))
                before = most
                most = tl.maximum(before, s)
                shrink, p = tl.exp2(before - most), tl.exp2(s - most)
                sums = sums * shrink + p
                outs = outs * shrink[:, None] + v * p[:, None]
            largest = tl.max(most, 0)
            weights = tl.exp2(most - largest)
            total = tl.sum(sums * weights, 0)
            acc = tl.sum(outs * weights[:, None], 0)
        total = tl.where(total > 0, total, 1.0)
        out = acc / total
        if SPLITS == 1 or active == 1:
            tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), d < D)
        else:
            part = split.to(tl.int64) * N * HEADS + row
            tl.store(part_ptr + part * D + d, out, d < D)
            tl.store(lse_ptr + part, largest + tl.log2(total))
    if SPLITS > 1 and active > 1:
        is_last = _is_last_split(count_ptr + tl.program_id(0), active)
        if is_last:
            for t in range(T):
                row = (b * T + t) * HEADS + head
                largest = tl.full((1,), LOWEST, tl.float32)
                total = tl.zeros((1,), tl.float32)
                acc = tl.zeros((1, BLOCK_D), tl.float32)
                for i in tl.static_range(SPLITS):
                    done = tl.full((1,), i, tl.int32) < active
                    part = tl.cast(N, tl.int64) * i * HEADS + row + tl.zeros((1,), tl.int64)
                    lse = tl.load(lse_ptr + part, done, other=LOWEST)
                    out = tl.load(part_ptr + part[:, None] * D + d[None, :], done[:, None] & in_head, other=0.0)
                    largest, total, acc = _merge(largest, total, acc, lse, out)
                out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + row * D + d[None, :], out, in_head)


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
