"""A running maximum and two running sums, of exp(x - m) and of exp(x - m) x. Rung 10 does this with a matmul."""

import triton
import triton.language as tl


@triton.jit
def entropy_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row, m, total, weighted = tl.program_id(0).to(tl.int64), -float("inf"), 0.0, 0.0
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * columns + c, c < columns, other=-float("inf"))
        larger = tl.maximum(m, tl.max(x, 0))
        e, rescale = tl.exp(x - larger), tl.exp(m - larger)
        total = total * rescale + tl.sum(e, 0)
        weighted = weighted * rescale + tl.sum(e * tl.where(c < columns, x, 0.0), 0)
        m = larger
    tl.store(out_ptr + row, m + tl.log(total) - weighted / total)


def solution(x):
    out = x.new_empty(x.shape[0])
    entropy_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=4096, num_warps=8)
    return out
