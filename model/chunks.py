"""A block that computes everything but attention on one chunk of tokens after another: model.checkpointing=chunks.

Norm, linear layers and MLP compute each token by itself, so their tensors need not exist for the whole sequence (Arctic
Long Sequence Training, arXiv:2506.13996, does this for MLP and loss). Only q, k, v, attention's output and their
gradients exist for the whole sequence. The block's input waits in pinned host memory, and the backward recomputes the
rest from it: the norm and the product before attention twice, everything else once. GPT-2 124M in bf16 with
FlashAttention 4 takes 17.4 KB a token on an H100: 4,194,304 tokens take 69.7 GiB, and 77 GB on the host.

With precision=fp8, kernels/fp8.py derives the scale of dy from the number of rows of a call, so here from a chunk's.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from kernels.direct import refuse_second_derivative

CHUNK_BYTES = 2**26  # of a chunk of the block's input: 43,690 tokens of 768 channels in bf16. Pinned memory is
# allocated in powers of two


def run_in_chunks(block: nn.Module, x: Tensor, rope: Tensor | None, starts: Tensor | None) -> Tensor:
    """Return the stream after the block. x (B, T, C) is the stream before it."""
    if not torch.is_grad_enabled():
        return forward(block, x, rope, starts)
    weights = weights_before_attention(block) + weights_after_attention(block)
    return ChunkedBlock.apply(block, rope, starts, x, *trainable(weights))


def forward(block: nn.Module, x: Tensor, rope: Tensor | None, starts: Tensor | None) -> Tensor:
    q, k, v = join((qkv(block, x[:, chunk], part_of(rope, chunk)) for chunk in chunks(x)), x.shape[1])
    out = block.attn.attend(q, k, v, starts)
    del q, k, v
    [y] = join(([after_attention(block, out[:, chunk], x[:, chunk])] for chunk in chunks(x)), x.shape[1])
    return y


class ChunkedBlock(torch.autograd.Function):
    """forward() with a backward. The gradients of the weights are sums over the chunks, in fp32."""

    @staticmethod
    def forward(ctx, block: nn.Module, rope: Tensor | None, starts: Tensor | None, x: Tensor, *weights: Tensor):
        ctx.block, ctx.rope, ctx.starts = block, rope, starts
        ctx.parts = [to_host(x[:, chunk]) for chunk in chunks(x)]
        return forward(block, x, rope, starts)

    @staticmethod
    @refuse_second_derivative
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        block, rope, starts, parts = ctx.block, ctx.rope, ctx.starts, ctx.parts
        ctx.rope = ctx.starts = ctx.parts = None  # the loss, which may live on, holds ctx
        before, after = trainable(weights_before_attention(block)), trainable(weights_after_attention(block))
        sums = {weight: torch.zeros_like(weight, dtype=torch.float32) for weight in (*before, *after)}

        def inputs() -> Iterator[tuple[slice, Tensor]]:
            """Yield each chunk, and its part of x on the device."""
            for chunk, part in zip(chunks(dy), parts, strict=True):
                yield chunk, part.to(dy.device, non_blocking=True).requires_grad_()

        q, k, v = join((qkv(block, x, part_of(rope, chunk)) for chunk, x in inputs()), dy.shape[1])
        q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
        with torch.enable_grad():
            out = block.attn.attend(q, k, v, starts)
        dout = torch.empty_like(out)
        first_dx = []  # for each chunk the gradient of x except through attention, on the host
        for chunk, x in inputs():
            part = out[:, chunk].detach().requires_grad_()
            with torch.enable_grad():
                y = after_attention(block, part, x)
            dx_part, dout[:, chunk] = add_gradients(y, (x, part), dy[:, chunk], after, sums)
            first_dx.append(to_host(dx_part))
            del x, part, y, dx_part
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
        del out, dout, q, k, v
        dx = torch.empty_like(dy)
        for (chunk, x), on_host in zip(inputs(), first_dx, strict=True):
            with torch.enable_grad():
                y = qkv(block, x, part_of(rope, chunk))
            [dx_part] = add_gradients(y, (x,), [d[:, chunk] for d in (dq, dk, dv)], before, sums)
            dx[:, chunk] = dx_part + on_host.to(dy.device, non_blocking=True)
            del x, y, dx_part
        return None, None, None, dx, *(total.to(weight.dtype) for weight, total in sums.items())


def qkv(block: nn.Module, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the q, k and v of the block's attention for the stream x."""
    return block.attn.qkv(block.ln_1(x, None)[0], rope)


def after_attention(block: nn.Module, out: Tensor, x: Tensor) -> Tensor:
    """Return the stream after the block. `out` (B, T, H, D) is attention's output, and x the stream before."""
    h, residual = block.ln_2(block.attn.c_proj(out.flatten(2)), x)
    return residual + block.mlp(h)


def weights_before_attention(block: nn.Module) -> list[nn.Parameter]:
    norms = [norm.weight for norm in (block.attn.q_norm, block.attn.k_norm) if norm is not None]
    return [*block.ln_1.parameters(), *block.attn.c_attn.parameters(), *norms]


def weights_after_attention(block: nn.Module) -> list[nn.Parameter]:
    return [*block.attn.c_proj.parameters(), *block.ln_2.parameters(), *block.mlp.parameters()]


def trainable(weights: list[nn.Parameter]) -> list[nn.Parameter]:
    return [weight for weight in weights if weight.requires_grad]


def chunks(x: Tensor) -> Iterator[slice]:
    """Yield slices of the tokens of x (B, T, C)."""
    size = chunk_tokens(x.shape[0], x.shape[2], x.dtype)
    return (slice(start, min(start + size, x.shape[1])) for start in range(0, x.shape[1], size))


def chunk_tokens(B: int, C: int, dtype: torch.dtype) -> int:
    """Return how many tokens of each of B sequences a chunk has: CHUNK_BYTES at most, and at least one token."""
    return max(1, CHUNK_BYTES // (B * C * dtype.itemsize))


def join(chunked: Iterable[Sequence[Tensor]], T: int) -> list[Tensor]:
    """Copy tensors that come in chunks of tokens into whole ones, (B, T, ...).

    torch.cat() would need all chunks at once, beside the whole.
    """
    whole: list[Tensor] = []
    start = 0
    for parts in chunked:
        whole = whole or [part.new_empty(part.shape[0], T, *part.shape[2:]) for part in parts]
        end = start + parts[0].shape[1]
        for tensor, part in zip(whole, parts, strict=True):
            tensor[:, start:end] = part
        start = end
    return whole


def add_gradients(
    y: Tensor | Sequence[Tensor],
    inputs: tuple[Tensor, ...],
    dy: Tensor | Sequence[Tensor],
    weights: list[Tensor],
    sums: dict[Tensor, Tensor],
) -> list[Tensor]:
    """Add the gradients of the weights to `sums`, and return the gradients of the inputs."""
    gradients = torch.autograd.grad(y, (*inputs, *weights), dy)
    for weight, gradient in zip(weights, gradients[len(inputs) :], strict=True):
        sums[weight] += gradient
    return list(gradients[: len(inputs)])


def to_host(x: Tensor) -> Tensor:
    """Copy x into pinned memory. The host does not wait."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x, non_blocking=True)


def part_of(rope: Tensor | None, chunk: slice) -> Tensor | None:
    """Return the rotary positions of a chunk from the table, (2, T, 1, D/2)."""
    return None if rope is None else rope[:, chunk]
