"""The kernels of pallas.py. Importing this file imports JAX."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton

from kernels.norm.triton import forward_launch

load, store = pallas_triton.load, pallas_triton.store
WARPS = 32  # of a multiprocessor, in the backward: a thread takes up to 64 registers


def pallas_rms_norm_fwd(
    x: Any, residual: Any, weight: Any, y: Any, stream: Any, rstd: Any, *, eps: float, rows: int, width: int
) -> None:
    """Write y, the new stream (if there is a residual) and rstd for `rows` rows of x and residual (N, C)."""
    N, C = x.shape
    r = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    c = jnp.arange(width, dtype=jnp.int32)
    tile, mask = (r[:, None], c[None, :]), (r < N)[:, None] & (c < C)[None, :]
    h = load(x.at[tile], mask=mask, other=0.0).astype(jnp.float32)
    if residual is not None:
        h += load(residual.at[tile], mask=mask, other=0.0).astype(jnp.float32)
        # normalise the rounded sum, because the backward starts from the rounded sum
        rounded = h.astype(stream.dtype)
        store(stream.at[tile], rounded, mask=mask)
        h = rounded.astype(jnp.float32)
    row_rstd = jax.lax.rsqrt((h * h).sum(1) / C + eps)
    store(rstd.at[r], row_rstd, mask=r < N)
    h = h * row_rstd[:, None] * load(weight.at[c], mask=c < C, other=0.0).astype(jnp.float32)[None, :]
    store(y.at[tile], h.astype(y.dtype), mask=mask)


def pallas_rms_norm_bwd(
    stream: Any,
    weight: Any,
    rstd: Any,
    dy: Any,
    dstream: Any,
    dx: Any,
    dresidual: Any,
    dweight: Any,
    *,
    rows: int,
    width: int,
) -> None:
    """Write dx, dresidual (if it differs from dx in dtype), and the sum of dweight over the program's rows."""
    (N, C), (programs, _) = stream.shape, dweight.shape
    program = pl.program_id(0)
    c = jnp.arange(width, dtype=jnp.int32)
    w = load(weight.at[c], mask=c < C, other=0.0).astype(jnp.float32)[None, :]

    def add_rows(step: Any, total: Any) -> Any:
        r = (step * programs + program) * rows + jnp.arange(rows, dtype=jnp.int32)
        tile, mask = (r[:, None], c[None, :]), (r < N)[:, None] & (c < C)[None, :]
        # start all loads before any arithmetic, so that a row waits for memory once
        g = load(dy.at[tile], mask=mask, other=0.0).astype(jnp.float32)
        xhat = load(stream.at[tile], mask=mask, other=0.0).astype(jnp.float32)
        added = None if dstream is None else load(dstream.at[tile], mask=mask, other=0.0).astype(jnp.float32)
        row_rstd = load(rstd.at[r], mask=r < N, other=0.0)[:, None]
        xhat *= row_rstd
        total += (g * xhat).sum(0)
        g *= w
        g = row_rstd * (g - xhat * ((g * xhat).sum(1) / C)[:, None])
        if added is not None:
            g += added
        store(dx.at[tile], g.astype(dx.dtype), mask=mask)
        if dresidual is not None:
            store(dresidual.at[tile], g.astype(dresidual.dtype), mask=mask)
        return total

    steps = pl.cdiv(pl.cdiv(N, rows), programs)
    total = jax.lax.fori_loop(0, steps, add_rows, jnp.zeros(width, jnp.float32))
    store(dweight.at[program, c], total, mask=c < C)


def call(kernel: Callable, programs: int, launch: dict, out_shape: tuple, interpret: bool, **options: Any) -> Callable:
    """Return a function that runs so many programs of the kernel; with `interpret`, without a GPU."""
    return pl.pallas_call(
        functools.partial(kernel, rows=launch["ROWS"], width=launch["BLOCK_C"], **options),
        grid=programs,
        out_shape=out_shape,
        # otherwise JAX takes Mosaic GPU, which has no masks for odd widths: see pallas.py
        compiler_params=pallas_triton.CompilerParams(num_warps=launch["num_warps"]),
        interpret=interpret,
    )


def forward(x: Any, residual: Any, weight: Any, *, eps: float, interpret: bool) -> tuple:
    """Return y, the new stream (None without a residual) and rstd for x and residual (N, C)."""
    (N, C), launch = x.shape, forward_launch(x.shape[1])
    out_shape = (
        jax.ShapeDtypeStruct((N, C), weight.dtype),
        None if residual is None else jax.ShapeDtypeStruct((N, C), residual.dtype),
        jax.ShapeDtypeStruct((N,), jnp.float32),
    )
    programs = pl.cdiv(N, launch["ROWS"])
    return call(pallas_rms_norm_fwd, programs, launch, out_shape, interpret, eps=eps)(x, residual, weight)


def backward(
    stream: Any, weight: Any, rstd: Any, dy: Any, dstream: Any, *, x_dtype: str, multiprocessors: int, interpret: bool
) -> tuple:
    """Return dx in x_dtype, dresidual in the stream's dtype (None if that is x_dtype), and dweight."""
    (N, C), launch = stream.shape, forward_launch(stream.shape[1], program_elements=1024, thread_elements=8)
    programs = min(WARPS // launch["num_warps"] * multiprocessors, pl.cdiv(N, launch["ROWS"]))
    out_shape = (
        jax.ShapeDtypeStruct((N, C), x_dtype),
        None if stream.dtype == x_dtype else jax.ShapeDtypeStruct((N, C), stream.dtype),
        jax.ShapeDtypeStruct((programs, C), jnp.float32),
    )
    kernel = call(pallas_rms_norm_bwd, programs, launch, out_shape, interpret)
    dx, dresidual, partial = kernel(stream, weight, rstd, dy, dstream)
    return dx, dresidual, partial.sum(0).astype(weight.dtype)
