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

Measured for batch 1 at contexts 128 to 255 (bf16, H200, commit 2b1cb41, in which one kernel computed all products). A
kernel's time is from its predecessor's end to its own:

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
of LayerNorm have the same order for any number of rows (product_launch()).

The same kernels compute Llama's, SmolLM2's and Qwen3's shapes: RMSNorm is a constant of the kernels, and so is the
activation. With swiglu, a program of fc has the same units of gate and up, so both products meet in registers, and only
their result is stored. If queries and keys are normalised (Qwen3), a sixth kernel follows qkv, normalises and rotates:
the sum over a head needs all of its 64 to 256 channels, and a program of qkv has 8 to 32 rows of W. With whole heads,
Qwen3-0.6B's qkv would have 32 programs for 132 multiprocessors, and each would have to hold 256 KB of W.

The kernels are in _few.py, in _many.py for more than FEW rows, in _qkv.py (of queries and keys), in _attention.py and
_vector_attention.py, and the draw in _sampling.py.
"""

import triton
from torch import Tensor

from kernels.cache import FP8, Cache
from kernels.decode import Model, Weights, _few, _many
from kernels.decode._attention import attend
from kernels.decode._qkv import norm_and_rotate
from kernels.decode._sampling import decode_token, sample_tokens  # noqa: F401
from kernels.decode._step import Step
from kernels.gpu import check_dtypes, gpu_unavailable
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.registry import Unavailable

RUNS = ("_product_kernel|_matmul_kernel",)
FAMILY = "^_((embed_|matmul_)?qkv|fc|product|matmul|(vector_)?attention|(embed_|qk_)?norm|summary|draw)_kernel"
MAX_HEAD_DIM = 256
OTHER = "choose kernels.decode=blocks"


def decode(weights: Weights, tokens: Tensor, cache: Cache) -> Tensor:
    """Return the logits (B, T, V). Each matrix of the layers, and the head, may be (W in int8, scales)."""
    step = Step(weights, tokens, cache)
    product = _few.product if step.few else _many.product
    x = None
    for (k, v), layer in zip(cache.kv, weights.layers, strict=True):
        x = step.add_norm(x, layer.ln_1_weight, layer.ln_1_bias)
        if weights.has_qk_norm:
            qk = product(step, "qkv", x, layer.qkv_weight, layer.qkv_bias, v_ptr=v)
            q = norm_and_rotate(step, qk, layer, k)
        else:
            q = product(step, "qkv", x, layer.qkv_weight, layer.qkv_bias, k_ptr=k, v_ptr=v, rope_ptr=step.rope)
        x = product(step, "proj", attend(step, q, k, v), layer.proj_weight, layer.proj_bias)
        x = step.add_norm(x, layer.ln_2_weight, layer.ln_2_bias)
        x = product(step, "fc", x, layer.fc_weight, layer.fc_bias)
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
