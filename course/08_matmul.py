"""Rung 8: a matmul in tiles, y = x W^T + b.

A program computes one tile of y, 128 x 128. It walks along K, the dimension that is summed, 64 columns at a time: it
loads a tile of x and a tile of W^T, and `tl.dot` multiplies them and adds the product to `acc`. `tl.dot` runs on the
tensor cores, which multiply small matrices in bf16 and add in fp32. With `num_stages=3`, Triton copies the tiles of the
next steps to shared memory while the tensor cores multiply those of this step.

A step loads 2 x 128 x 64 numbers, 33 KB in bf16, and does 2 x 128 x 128 x 64 FLOP: 64 FLOP a byte. A tile of 32 x 32
does 16. An H200's ridge is at 186, so most of these bytes must come from the L2 cache. The order of the tiles decides
how many do, because programs with close numbers run at the same time. "naive" goes down a whole column of tiles. x has
100 MB, too much for the L2, so memory sends x again for each of the 18 columns of QKV: 1.8 GB. "grouped" has the order
of Triton's tutorial: 8 tiles down, then one to the right. So 8 tiles of x stay in the L2 until they have met all of W.

In both, another kernel adds the bias and reads and writes y, 2 x 302 MB. "epilogue" adds it while the tile is in
registers. The epilogue of a matmul is a program's work between the last product and the store.

The backward is two matmuls, dx = dy W and dW = dy^T x. A transposed matrix is the same memory with its strides in the
other order, so the kernel takes strides, and nothing is copied. The floor is 6 N C F FLOP: 0.9 ms for QKV on an H200.

Exercise: y = relu(x W^T + b)^2, the activation of Primer (So et al. 2021, arXiv:2109.08668). Write `solution(x, weight,
bias)`, whose forward is one kernel that stores only y. The backward needs relu(h) of h = x W^T + b, and nothing may
store h: what does y tell you? The matmuls of the backward may be PyTorch's.

    python course/08_matmul.py mine.py
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Two programs share a multiprocessor: one multiplies while the other is in its epilogue
TILE = {"SIZE": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, bias_ptr, out_ptr, M, N, K, a_strides, b_strides, GROUP, SIZE: tl.constexpr, BLOCK_K: tl.constexpr
):  # out (M, N) = a (M, K) b (K, N) + bias (N,)
    tiles_m, tiles_n = tl.cdiv(M, SIZE), tl.cdiv(N, SIZE)
    band, within = tl.program_id(0) // (GROUP * tiles_n), tl.program_id(0) % (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)  # the last band may have fewer than GROUP rows of tiles
    m = ((band * GROUP + within % height) * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    n = (within // height * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a_ptr + m[:, None] * a_strides[0] + k[None, :] * a_strides[1]
    b_ptrs = b_ptr + k[:, None] * b_strides[0] + n[None, :] * b_strides[1]
    acc = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, (m < M)[:, None] & (k < K - start)[None, :], other=0.0)  # a product with 0 adds nothing
        b = tl.load(b_ptrs, (k < K - start)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")  # if a and b are fp32, do not round them to TF32
        a_ptrs += BLOCK_K * a_strides[1]
        b_ptrs += BLOCK_K * b_strides[0]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, n < N, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + m[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


@torch.library.custom_op("course::matmul", mutates_args=())  # torch.compile does not look inside an operator
def matmul(a: Tensor, b: Tensor, bias: Tensor | None, group: int | None) -> Tensor:
    (M, K), N = a.shape, b.shape[1]
    out = a.new_empty(M, N)
    tiles_m, tiles_n = triton.cdiv(M, TILE["SIZE"]), triton.cdiv(N, TILE["SIZE"])
    tile_order = {"GROUP": group or tiles_m}
    matmul_kernel[(tiles_m * tiles_n,)](a, b, bias, out, M, N, K, a.stride(), b.stride(), **tile_order, **TILE)
    return out


matmul.register_fake(lambda a, b, *_: a.new_empty(len(a), b.shape[1]))  # the result for torch.compile: its shape


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.group = bias is not None, group
        return matmul(x, weight.T, bias, group)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("this matmul has no second derivative")
        x, weight = ctx.saved_tensors
        dx, dweight = matmul(dy, weight, None, ctx.group), matmul(dy.T, x, None, ctx.group)
        return dx, dweight, dy.sum(0) if ctx.has_bias else None, None


def linear(x, weight, bias, group=8):
    y = Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, group)
    return y.view(*x.shape[:-1], len(weight))


def naive(x, weight, bias):
    return linear(x, weight, None, group=None) + bias


def grouped(x, weight, bias):
    return linear(x, weight, None) + bias


OP = "linear"
KERNELS = {"naive": naive, "grouped": grouped, "epilogue": linear}
SHAPES = {"gpu": {"shape": (65536, 768), "out": 2304}, "cpu": {"shape": (150, 96), "out": 160}}


def exercise(x, weight, bias):
    return torch.relu(x @ weight.T + bias).square()


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
