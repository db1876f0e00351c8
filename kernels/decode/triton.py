"""A decoding step in five Triton kernels a layer, which load their weights before they wait for each other.

A step of GPT-2 124M reads 247 MB of weights, which takes 59 us at a copy's 4.2 TB/s. But the step is a chain of
kernels, and each kernel needs the results of its predecessor. If a kernel starts only when its predecessor is complete,
most time is lost at the ends of kernels: the last programs leave most multiprocessors idle, and the first load of the
next kernel takes 0.7 us. Three measures shorten the step:

1.  Few kernels, 62 a step, and two for the draw. All elementwise work is in the prologue or the epilogue of a matmul
    or of attention:

        qkv         prologue: embedding, or residual += x; LayerNorm    epilogue: bias, rotary positions, store k and v
        attention                                                       epilogue: combine the splits of the keys
        proj                                                            epilogue: bias
        fc          prologue: residual += x; LayerNorm                  epilogue: bias, GELU
        fc_proj                                                         epilogue: bias

    LayerNorm needs whole rows, so each of qkv's 144 programs reads all rows (3 KB a row from the L2 cache) and
    normalises them. That takes less time than one more kernel. Program 0 also stores the new stream, into a new buffer,
    because the other programs still read the old stream.
2.  Programmatic dependent launch (compute capability 9.0): a kernel may start when all programs of its predecessor have
    started. A program loads its rows of W into registers, in the layout of the matmul, and only then waits for the
    predecessor's results. So the next kernel's weights arrive while this kernel computes. proj starts later, when all
    programs of attention have the results of qkv.
3.  A program multiplies 8 to 32 whole rows of W, so each product of a layer has 96 to 144 programs. In the matmul its
    warps take different columns and add their results at the end, so the chains of dependent instructions are short.

Measured for batch 1 at contexts 128 to 255 (bf16, H200). A kernel's time is from its predecessor's end to its own:

    kernel        programs    weights          at 4.2 TB/s    measured
    qkv                144    3.5 MB                0.8 us      2.6 us
    attention           24    0.4 MB of k, v        0.1 us      3.7 us
    proj                96    1.2 MB                0.3 us      1.9 us
    fc                  96    4.7 MB                1.1 us      2.9 us
    fc_proj             96    4.7 MB                1.1 us      1.8 us
    all 12 layers             170 MB                 40 us      159 us: the first ones are slower
    ln_f, head        1572    77 MB                  18 us       19 us
    the draw                                                      9 us
    step                      247 MB                 59 us      187 us, or 194 if its buffers lie elsewhere

Each kernel must fit beside its neighbours, or it cannot load early: when the programs of fc_proj took half of a
multiprocessor's registers, fc_proj took 4.4 us.

Up to FEW rows, the bits of a row's result do not depend on the other rows, so steps of one token and of several tokens
give the same text. The matmul instruction always has 16 rows. The splits of the keys depend only on the cache. The sums
of LayerNorm have the same order for any number of rows (product_launch()). _many.py has the kernels for more rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cache import FP8, Cache
from kernels.decode import Model, Weights, _many
from kernels.decode._attention import attend
from kernels.decode._many import COUNTS
from kernels.decode._sampling import decode_token, sample_tokens  # noqa: F401
from kernels.decode._step import FEW, Step, matrix
from kernels.decode._tiles import (
    cache_places,
    launch_next_kernel,
    load_packed,
    load_stream,
    load_vector,
    load_weights,
    normalise,
    store_result,
    wait_for_earlier_kernels,
    weight_rows,
    zero_counts,
)
from kernels.gpu import check_dtypes, gpu_unavailable, multiprocessors
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.registry import Unavailable

RUNS = ("_product_kernel|_matmul_kernel",)
FAMILY = "^_(product|matmul|attention|vector_attention|norm|summary|draw)_kernel"
MAX_HEAD_DIM = 256
OTHER = "choose kernels.decode=blocks"


@triton.jit(do_not_specialize=COUNTS)
def _product_kernel(
    x_ptr,  # (N, K); with ln_weight_ptr, an argument of load_stream()
    residual_ptr,
    stream_ptr,
    tokens_ptr,
    wpe_ptr,
    positions_ptr,
    ln_weight_ptr,  # (K,) if the rows are LayerNorm of the stream, otherwise None
    ln_bias_ptr,
    weight_ptr,  # (OUT, K)
    scale_ptr,  # (OUT,) fp32 if W is in int8
    bias_ptr,  # (OUT,)
    out_ptr,  # an argument of store_result(), like the next three
    rope_ptr,
    k_ptr,
    v_ptr,
    count_ptr,  # (COUNTS,) int32 or None: see zero_counts()
    N,
    T,
    wpe_rows,
    cache_rows,
    COUNTS: tl.constexpr,
    OUT: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    Q_WIDTH: tl.constexpr,  # H D
    KV_WIDTH: tl.constexpr,  # Hkv D
    GELU: tl.constexpr,
    ROWS: tl.constexpr,  # N or more
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply all rows with BLOCK_N rows of W. Each warp multiplies its slices of K. Then the slices are added."""
    launch_next_kernel(PDL)
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.arange(0, ROWS).to(tl.int64)
    n = weight_rows(tl.program_id(0), BLOCK_N, D, rope_ptr is not None)
    weights, gains, shifts = (), (), ()
    for step in tl.static_range(STEPS):
        weights += (load_weights(weight_ptr, n, step, OUT, K, BLOCK_K, SLICES, dtype),)
        if ln_weight_ptr is not None:
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            gains += (load_packed(ln_weight_ptr, k, K),)
            shifts += (load_packed(ln_bias_ptr, k, K),)
    scale, bias = load_vector(scale_ptr, n, OUT, 1.0), load_vector(bias_ptr, n, OUT, 0.0)
    place = row
    if k_ptr is not None:
        place = cache_places(row, positions_ptr, N, T, cache_rows)
    wait_for_earlier_kernels(PDL)
    zero_counts(count_ptr, COUNTS)
    if ln_weight_ptr is not None:
        stream = load_stream(
            *(x_ptr, None, residual_ptr, stream_ptr, tokens_ptr, wpe_ptr, positions_ptr),
            *(row[:, None], tl.program_id(0) == 0, N, T, wpe_rows, K, BLOCK_K, 0, dtype),
        )
        rows = normalise(stream, gains, shifts, K, BLOCK_K, dtype)
    acc = tl.zeros((SLICES, ROWS, BLOCK_N), tl.float32)
    for step in tl.static_range(STEPS):
        if ln_weight_ptr is not None:
            x = rows[step]
        else:
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            mask = (row < N)[:, None] & (k < K)[None, :]
            x = tl.load(x_ptr + row[:, None] * K + k[None, :], mask, other=0.0)
        x = tl.permute(tl.reshape(x, (ROWS, SLICES, BLOCK_K // SLICES)), (1, 0, 2))
        acc = tl.dot(x, weights[step], acc, input_precision=PRECISION)
    store_result(
        *(tl.sum(acc, 0), row, n, scale, bias, place, out_ptr, rope_ptr, k_ptr, v_ptr),
        *(N, OUT, GELU, Q_WIDTH, KV_WIDTH, D),
    )


def product_launch(OUT: int, K: int, dtype: torch.dtype, processors: int) -> dict:
    """Return the default launch parameters of _product_kernel for a GPU with `processors` multiprocessors.

    For a K of up to 1024 a warp takes whole rows of x, 256 columns at a time, 8 a thread. So LayerNorm needs no sum
    over warps, and K = 768 no padding: a thread holds 48 registers of W for qkv, and 96 for fc. Otherwise several warps
    share a row, also in proj, which has no LayerNorm. These are the fastest of 46 choices for 124M, one row, on an H200
    (190 us a step then; 16 rows of W for fc 193, 16 slices and 8 warps for fc_proj 194, 256 columns for proj 193), and
    among the fastest of 172 for 1558M that leave registers for 16 rows. For any ROWS, the same threads add a row's
    numbers in the same order; tests/kernels/compile_triton.py compares the layouts. A warp has two slices, except for K
    from 1025 to 2048, so that two chains of matmul instructions run independently.

    Programs of neighbouring kernels share the 65,536 registers of a multiprocessor. If one kernel takes too many, the
    next one cannot start early; the module's docstring has an example.
    """
    if dtype == torch.float32:  # for comparisons of results, not for speed
        return {"BLOCK_N": 16, "BLOCK_K": 128, "SLICES": 8, "num_warps": 4}
    rows = 8 if 16 * processors > OUT else 16
    if K <= 1024:
        if OUT == K > 512:  # proj
            return {"BLOCK_N": rows, "BLOCK_K": 1024, "SLICES": 8, "num_warps": 4}
        return {"BLOCK_N": 32 if 20 * processors < OUT else rows, "BLOCK_K": 256, "SLICES": 8, "num_warps": 4}
    if K <= 2048:
        return {"BLOCK_N": rows, "BLOCK_K": 2048, "SLICES": 8, "num_warps": 8}
    if K <= 4096:
        return {"BLOCK_N": 8, "BLOCK_K": 1024, "SLICES": 8, "num_warps": 4}
    return {"BLOCK_N": 8, "BLOCK_K": 2048, "SLICES": 16, "num_warps": 8}


def padded_rows(N: int, dtype: torch.dtype) -> int:
    """Return ROWS. In fp32 it is the same for all N, because there no matmul instruction fixes the order of sums.

    It is at least 4, so that each of 4 warps has a row of 256 columns in the same layout for any number of rows.
    """
    return FEW if dtype == torch.float32 else max(4, triton.next_power_of_2(N))


def product(step: Step, name: str, x: Tensor | dict, weight, bias: Tensor | None = None, **result):
    """Return x W^T + bias, (N, OUT); with k_ptr and v_ptr only the queries, (N, H D).

    x is (N, K), or the result of add_norm(). weight is W, or (W in int8, scales). `result` has more arguments of
    store_result(). For many rows, a product of BRANCHES may return (sums over parts of K, bias): see _many.py.
    """
    W, scale = matrix(weight)
    OUT, K = W.shape
    width = step.shared["Q_WIDTH"] if "k_ptr" in result else OUT
    result = {"GELU": False, **result}
    if not step.few:
        rows = _many.norm(step, x) if isinstance(x, dict) else x
        return _many.matmul(step, name, rows, weight, bias, width, **result)
    default = product_launch(OUT, K, step.dtype, multiprocessors(step.device))
    launch = step.parameters(name, f"{OUT} {K} {W.dtype}", default)
    out = step.empty(step.N, width)
    step.launch(
        _product_kernel,
        (triton.cdiv(OUT, launch["BLOCK_N"]),),
        **(x if isinstance(x, dict) else {"x_ptr": x}),
        weight_ptr=W,
        scale_ptr=scale,
        bias_ptr=bias,
        out_ptr=out,
        **{"OUT": OUT, "K": K, "ROWS": padded_rows(step.N, step.dtype), **result, **launch},
    )
    return out


def decode(weights: Weights, tokens: Tensor, cache: Cache) -> Tensor:
    """Return the logits (B, T, V). Each matrix of the layers, and the head, may be (W in int8, scales)."""
    step = Step(weights, tokens, cache)
    x = None
    for (k, v), layer in zip(cache.kv, weights.layers, strict=True):
        x = step.add_norm(x, layer.ln_1_weight, layer.ln_1_bias)
        q = product(step, "qkv", x, layer.qkv_weight, layer.qkv_bias, k_ptr=k, v_ptr=v, rope_ptr=step.rope)
        x = product(step, "proj", attend(step, q, k, v), layer.proj_weight, layer.proj_bias)
        x = step.add_norm(x, layer.ln_2_weight, layer.ln_2_bias)
        x = product(step, "fc", x, layer.fc_weight, layer.fc_bias, GELU=True)
        x = product(step, "fc_proj", x, layer.fc_proj_weight, layer.fc_proj_bias)
    # the head has thousands of programs, too many for each to normalise the rows
    x = _many.norm(step, step.add_norm(x, weights.ln_f_weight, weights.ln_f_bias))
    return product(step, "head", x, weights.head).view(*tokens.shape, -1)


def check(weights: Weights, cache: Cache) -> None:
    """Raise Unavailable if the kernels cannot run this model with this cache."""
    D, caches = weights.head_dim, [t for pair in cache.kv for t in pair]
    tensors = [t for t in (weights.wte, weights.head, weights.wpe, weights.ln_f_weight) if t is not None]
    tensors += [t for layer in weights.layers for t in layer if t is not None]
    check_dtypes("decode", *tensors, *(t for t in caches if t.dtype != FP8))
    if caches[0].dtype == FP8 and (reason := gpu_unavailable(caches[0].device, (8, 9))):
        raise Unavailable(f"our Triton decoders cannot read a cache in fp8 here: {reason}; choose generate.kv=auto")
    if D > MAX_HEAD_DIM:
        raise Unavailable(f"our Triton decoders take heads of up to {MAX_HEAD_DIM} channels, not {D}: {OTHER}")
    if not all(t.is_contiguous() for t in (*tensors, *caches)):
        raise Unavailable(f"our Triton decoders need contiguous weights and a contiguous cache: {OTHER}")


def pack(model: Model, cache: Cache) -> Weights:
    """Return the model's own weights: no copies, no other layout."""
    weights = model.weights()
    check(weights, cache)
    return weights


def detail() -> str:
    return f"triton {triton.__version__}"


def candidates(kernel: str, default: dict) -> list[dict]:
    """Return the launch parameters that scripts/tune.py tries."""
    if "BLOCK_KEYS" in default:
        tiles = [{"BLOCK_KEYS": keys, "num_warps": warps} for keys in (32, 64, 128) for warps in (2, 4)]
        if "num_stages" not in default:
            return tiles
        return [tile | {"num_stages": stages} for tile in tiles for stages in (2, 3, 4)]
    if "SLICES" in default:  # BLOCK_K and num_warps fix the order of sums over a row
        slices = [n * default["num_warps"] for n in (1, 2, 4) if 16 * n * default["num_warps"] <= default["BLOCK_K"]]
        return [{"BLOCK_N": rows, "SLICES": n} for rows in (8, 16, 32) for n in slices]
    parts = sorted({1, default["PARTS"]})
    return [{"BLOCK_N": n, "BLOCK_K": k, "PARTS": p} for n in (32, 64) for k in (64, 128) for p in parts]
