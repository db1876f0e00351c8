"""Rung 9: a matmul in tiles, y = x W^T + b.

A program computes a tile of y, 128 x 128. In steps of 64 along K, the dimension that the matmul sums, it loads a tile
of x and one of W^T, and `tl.dot` multiplies them on the tensor cores, units that multiply small matrices in bf16 and
add in fp32. Meanwhile `num_stages=3` copies the next tiles to shared memory. The epilogue is what follows the last
product: the bias and the store. Two programs share a multiprocessor, so one can multiply during the other's epilogue.

A step loads 33 KB and does 2 x 128 x 128 x 64 FLOP: 64 FLOP a byte. The ridge is at 186, so most bytes must come from
the L2 cache. Programs with close numbers run at the same time, so the order of the tiles decides what L2 has. In
GPT-2's QKV layer x is 65,536 x 768, 100 MB, and W is 2304 x 768, so y has 18 columns of tiles. "naive" goes down a
whole column, so memory sends x again for each column. "grouped" goes 8 tiles down, then one to the right, as Triton's
tutorial does: 8 rows of tiles of x stay in L2 until they have met all of W. In both, another kernel adds the bias: it
reads and writes y, 2 x 302 MB. "epilogue" needs no such kernel.

The backward is two matmuls, dx = dy W and dW = dy^T x. A transposed matrix is the same memory with its strides in the
other order, so the kernel takes strides. The three matmuls do 6 M K N FLOP: the floor is 0.9 ms on an H200. The kernels
reach 45, 50 and 62% of it, and PyTorch (cuBLAS) 86%. dW has only 18 x 6 tiles: 24 of 132 multiprocessors idle.

Exercise: write `solution(x, weight, bias)`: y = relu(x W^T + b)^2, the activation of Primer (So et al. 2021,
arXiv:2109.08668). Its forward is one kernel that stores only y. The backward needs relu(x W^T + b), and nothing may
store it: how does it follow from y? PyTorch may do the backward's matmuls. Run `python course/09_matmul.py mine.py`.
"""

from functools import partial

import torch
import triton
import triton.language as tl


@triton.jit  # out (M, N) = a (M, K) b (K, N) + bias (N,), with the strides of a and b along M, K and N
def matmul_kernel(
    a_ptr, b_ptr, bias_ptr, out_ptr, a_m, a_k, b_k, b_n, M, N, K, GROUP, SIZE: tl.constexpr, BLOCK_K: tl.constexpr
):
    tiles_m, tiles_n = tl.cdiv(M, SIZE), tl.cdiv(N, SIZE)
    band, within = tl.program_id(0) // (GROUP * tiles_n), tl.program_id(0) % (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)  # a band is GROUP rows of tiles; the last may have fewer
    m = ((band * GROUP + within % height) * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    n = (within // height * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs, b_ptrs = a_ptr + m[:, None] * a_m + k[None, :] * a_k, b_ptr + k[:, None] * b_k + n[None, :] * b_n
    acc = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, (m < M)[:, None] & (k < K - start)[None, :], other=0.0)  # a product with 0 adds nothing
        b = tl.load(b_ptrs, (k < K - start)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")  # acc + a b; by default fp32 factors lose 13 bits (TF32)
        a_ptrs, b_ptrs = a_ptrs + BLOCK_K * a_k, b_ptrs + BLOCK_K * b_k
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc, (m < M)[:, None] & (n < N)[None, :])


def matmul(a, b, bias, group):
    (M, K), N = a.shape, b.shape[1]
    out, tiles_m, tiles_n = a.new_empty(M, N), triton.cdiv(M, 128), triton.cdiv(N, 128)
    sizes = {"M": M, "N": N, "K": K, "GROUP": group or tiles_m, "SIZE": 128, "BLOCK_K": 64}  # None: one band
    matmul_kernel[(tiles_m * tiles_n,)](a, b, bias, out, *a.stride(), *b.stride(), **sizes, num_warps=8, num_stages=3)
    return out


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return matmul(x, weight.T, bias, group)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("kernels.linear=course/09_matmul.py has no second derivative: choose kernels=eager")
        x, weight = ctx.saved_tensors
        dx, dweight = matmul(dy, weight, None, ctx.group), matmul(dy.T, x, None, ctx.group)
        return dx, dweight, dy.sum(0) if ctx.needs_input_grad[2] else None, None


def linear(x, weight, bias, group=8, fuse=True):
    y = Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias if fuse else None, group).view(*x.shape[:-1], -1)
    return y if fuse else y + bias


OP = "linear"
KERNELS = {"naive": partial(linear, group=None, fuse=False), "grouped": partial(linear, fuse=False), "epilogue": linear}
SHAPES = {"gpu": {"shape": (65536, 768), "out": 2304}, "cpu": {"shape": (150, 96), "out": 160}}


def exercise(x, weight, bias):
    return torch.relu(x @ weight.T + bias).square()


if __name__ == "__main__":
    from climb import climb

    climb(__file__)
