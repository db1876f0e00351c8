"""The operators and the autograd of rotary positions without a norm: the backward is the inverse rotation."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op


def define_rope(name: str, rotate: Callable) -> Callable:
    """Define the operators hotswap::NAME_rope_fwd and hotswap::NAME_rope_bwd. Return a function like rope().

    rotate(qkv, table, kv_heads, inverse) returns a new tensor like qkv (B, T, H + 2 Hkv, D) with rotated queries and
    keys. With `inverse` they turn back. qkv and table (2, rows, D/2) are contiguous. There are T rows for all
    sequences, or B T.
    """

    def launch_forward(qkv: Tensor, table: Tensor, kv_heads: int) -> Tensor:
        return rotate(qkv, table, kv_heads, inverse=False)

    def launch_backward(dout: Tensor, table: Tensor, kv_heads: int) -> Tensor:
        return rotate(dout, table, kv_heads, inverse=True)

    def empty_output(qkv: Tensor, table: Tensor, kv_heads: int) -> Tensor:
        return torch.empty_like(qkv)

    def setup_context(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
        _, table, ctx.kv_heads = inputs
        ctx.save_for_backward(table)

    def backward(ctx: FunctionCtx, dout: Tensor) -> tuple[Tensor, None, None]:
        return rope_bwd(dout.contiguous(), *ctx.saved_tensors, ctx.kv_heads), None, None

    rope_bwd = custom_op(f"hotswap::{name}_rope_bwd", launch_backward, empty_output)
    rope_fwd = custom_op(f"hotswap::{name}_rope_fwd", launch_forward, empty_output, backward, setup_context)

    def rope(qkv: Tensor, table: Tensor, kv_heads: int) -> Tensor:
        rows = table.reshape(2, -1, table.shape[-1]).contiguous()
        return rope_fwd(qkv.contiguous(), rows, kv_heads)

    return rope
