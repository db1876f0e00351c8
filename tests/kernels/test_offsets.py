"""Offsets beyond 2^31 elements: a program that multiplies a row and a stride in int32 would read somewhere else.

On a CPU the tensors have gigabytes of addresses, but only the pages that a test touches take memory. There Triton's
interpreter raises an error if a sum or a product of int32 wraps around. compile_triton.py looks for such products in
every compiled kernel. test_large_tensors.py has large tensors on a GPU.
"""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime import interpreter

from kernels import decode as decode_contract
from kernels import matmul
from kernels.attention import _triton_backward, _triton_tiles, gluon
from kernels.check import outputs_and_gradients
from kernels.decode import _many, _sampling, persistent
from kernels.decode import triton as decode
from kernels.gpu import SHARED_BYTES
from kernels.norm import _triton_backward as norm_backward
from kernels.registry import Unavailable, contract, cpp_compiler, load
from kernels.sampling import Sampling, seeds_of
from tests.kernels.narrow_products import kernel_names
from tests.kernels.offset_cases import (
    CASES,
    DEVICE,
    DTYPE,
    GPU,
    after,
    attention,
    half,
    near_and_far,
    needs_address_space,
    randn,
)

LIMIT = 2**31
on_a_cpu = pytest.mark.skipif(GPU, reason="runs single programs in Triton's interpreter")
pytestmark = pytest.mark.usefixtures("fp8_on_a_cpu")


@pytest.fixture(autouse=True)
def int32_does_not_wrap(monkeypatch):
    """Let Triton's interpreter raise if a sum, a difference or a product of int32 is not exact."""
    original = interpreter.InterpreterBuilder.binary_op

    def binary_op(self, left, right, op):
        result = original(self, left, right, op)
        if op in (np.add, np.subtract, np.multiply) and result.data.dtype == np.int32:
            exact = op(left.data.astype(np.int64), right.data.astype(np.int64))
            if not np.array_equal(exact, result.data):
                raise OverflowError(f"{op.__name__} of int32 wraps around: {np.abs(exact).max()}")
        return result

    monkeypatch.setattr(interpreter.InterpreterBuilder, "binary_op", binary_op)


@pytest.fixture
def run_one_program(monkeypatch):
    """Let each launch run only its last program, or program numbers[name] of a kernel. Return the dict `numbers`."""
    numbers, builder, original = {}, interpreter.interpreter_builder, interpreter.GridExecutor.__call__

    def call(self, *arguments, **named):
        grid, self.grid = (*self.grid, 1, 1)[:3], (1,)
        program = numbers.get(self.fn.__name__, tuple(n - 1 for n in grid))
        with pytest.MonkeyPatch.context() as patch:
            set_grid_dim, set_grid_idx = builder.set_grid_dim, builder.set_grid_idx
            patch.setattr(builder, "set_grid_dim", lambda *_: set_grid_dim(*grid))
            patch.setattr(builder, "set_grid_idx", lambda *_: set_grid_idx(*program))
            original(self, *arguments, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", call)
    for module in (matmul, norm_backward):
        monkeypatch.setattr(module, "multiprocessors", lambda device: LIMIT)  # a program for each tile
    for module in (matmul, norm_backward):
        monkeypatch.setattr(module, "add_partial_sums", lambda partial, dtype: partial[-1])
    return numbers


def assert_same_bits(near, got):
    for expected, value in zip(near, got, strict=True):
        assert expected.float().abs().max() > 0
        assert torch.equal(*(tensor.detach().flatten().view(torch.uint8) for tensor in (expected, value)))


@on_a_cpu
@pytest.mark.parametrize("kernel", CASES)
@needs_address_space
@torch.no_grad()
def test_the_last_program_of_a_large_tensor(kernel, run_one_program, monkeypatch):
    """Its results have the bits that the same rows give in a small tensor."""
    for module in (attention, _triton_backward):
        monkeypatch.setattr(module, "heads_in_l2", lambda k: 1)
    results = []
    for before in (lambda C: 0, lambda C: LIMIT // C):
        tiles = (384 + before(2048)) // 128  # of queries; the last one has rank 0
        run_one_program |= dict.fromkeys(("_fwd_kernel", "_dq_kernel"), (32 * tiles, 0, 0))
        run_one_program["_maxima_kernel"] = 0, 0, 0
        results.append([tensor.clone() for tensor in CASES[kernel](before)])
    assert_same_bits(*results)


@on_a_cpu
@torch.no_grad()
def test_many_queries_of_one_key(run_one_program):
    """So many heads with one key fit in the L2 that their number times the tiles of a head passes 2^31."""
    q, k, v = half(1, 1, 1, 16).expand(1, 2**23, 1, 16), half(1, 1, 1, 16), half(1, 1, 1, 16, seed=1)
    run_one_program["_fwd_kernel"] = 0, 0, 0  # it takes the last queries
    out, _ = attention.attention_fwd(q, k, v, None, None, False, 0.25, None)
    assert torch.equal(out[:, -128:], v.expand(1, 128, 1, 16))


STRIDES = {  # of q, k and v (3, 19, 3, 16): from one sequence, one token and one head to the next
    "sequences": (2**30 + 64, 48, 16, 1),
    "tokens": (48, 2**27 + 192, 16, 1),
    "heads": (304, 16, 2**30 + 1024, 1),
}


@pytest.mark.parametrize("strides", STRIDES.values(), ids=STRIDES)
@pytest.mark.parametrize("window", [None, 5])
@needs_address_space
def test_attention_with_far_strides(strides, window):
    """The results are those of contiguous tensors."""
    inputs = contract("attention").inputs((3, 19, 3, 16), window=window, dtype=DTYPE, device=DEVICE)
    results = []
    for move in near_and_far(*strides):
        q, k, v = (move(inputs[name].detach()).requires_grad_() for name in "qkv")
        out = load("attention", "triton", DEVICE)(q, k, v, window=window)
        results.append((out, *torch.autograd.grad(out, (q, k, v), out.detach())))
    assert_same_bits(*results)


@pytest.mark.parametrize("strides", STRIDES.values(), ids=STRIDES)
@needs_address_space
def test_gradients_of_attention_with_far_strides(strides, monkeypatch):
    q, k, v, dout, out = (half(3, 19, 3, 16, seed=seed) for seed in range(5))
    lse, results = 4 + randn(3, 3, 20), []
    for move in near_and_far(*strides):
        grads = [move(torch.zeros_like(q)) for _ in range(3)]
        monkeypatch.setattr(_triton_backward, "gradient_views", lambda *_, grads=grads: grads)
        options = {"starts": None, "causal": True, "scale": 0.25, "window": None}
        with torch.no_grad():
            _triton_backward.attention_bwd(dout, q, k, v, out=out, lse=lse, **options)
        results.append(grads)
    assert_same_bits(*results)


@pytest.mark.parametrize("residual", [True, False])
@needs_address_space
def test_norm_with_far_rows(residual):
    tensors = [half(3, 64, seed=seed) for seed in range(4)]
    weight, bias = half(2, 64, seed=4).requires_grad_()
    results = []
    for move in near_and_far(2**30 + 64, 1):
        x, stream, dy, dstream = (move(tensor).requires_grad_() for tensor in tensors)
        inputs = (x, *([stream] if residual else []), weight, bias)
        outputs = load("norm", "triton", DEVICE)(x, stream if residual else None, weight, bias)
        grads = torch.autograd.grad(outputs, inputs, (dy.detach(), dstream.detach()), allow_unused=True)
        results.append((*outputs, *grads))
    assert_same_bits(*results)


@needs_address_space
def test_drawing_from_far_rows():
    logits, seeds, positions = half(3, 1000), seeds_of(3, 3, DEVICE), torch.arange(3, device=DEVICE)
    for sampling in (Sampling(1000), Sampling(1000, top_k=20, top_p=0.9), Sampling(1000, temperature=0)):
        moved = (move(logits) for move in near_and_far(2**30 + 64, 1))
        assert_same_bits(*([_sampling.sample_tokens(rows, seeds, positions, sampling)] for rows in moved))


def in_cache(tensor, rows):
    """Return a cache of so many rows that begins with `tensor`."""
    cache = torch.empty(len(tensor), rows, *tensor.shape[2:], dtype=tensor.dtype, device=tensor.device)
    cache[:, : tensor.shape[1]] = tensor
    return cache


DECODERS = {
    "a vector for each head": {"batch": 3},
    "groups of heads": {"batch": 3, "heads": 4, "kv_heads": 2, "rope": True},
    "many rows": {"batch": 20, "rope": True},
}


@pytest.mark.parametrize("sizes", DECODERS.values(), ids=DECODERS)
@needs_address_space
@torch.no_grad()
def test_decoding_with_a_far_cache(sizes):
    """The keys and values of the last sequence, and the embeddings of all tokens, lie beyond 2^31 elements."""
    arguments = decode_contract.inputs(**sizes, lengths=[5], n_layer=1, rows=16, dtype=DTYPE, device=DEVICE)
    weights, tokens, cache = arguments.values()
    B, _, heads, D = cache.kv[0][0].shape
    rows = 2**31 // ((B - 1) * heads * D) + 1
    results = []
    for before in (0, 2**31 // weights.wte.shape[1]):
        kv = [in_cache(tensor, rows if before else 16) for tensor in cache.kv[0]]
        moved = weights._replace(wte=after(before, weights.wte))
        logits = decode.decode(moved, tokens + before, cache._replace(kv=[tuple(kv)]))
        results.append((logits, *(tensor[:, :16] for tensor in kv)))
    assert_same_bits(*results)


@needs_address_space
@torch.no_grad()
def test_decoding_at_a_far_position():
    """The cache is a ring of 16 rows, and the position's embedding lies beyond 2^31 elements."""
    arguments = decode_contract.inputs(batch=2, lengths=[20, 33], n_layer=1, rows=16, dtype=DTYPE, device=DEVICE)
    weights, tokens, cache = arguments.values()
    results = []
    for before in (0, 2**31 // weights.wte.shape[1]):
        kv = [tuple(tensor.clone() for tensor in cache.kv[0])]
        moved = weights._replace(wpe=after(before, weights.wpe))
        results.append([decode.decode(moved, tokens, cache._replace(kv=kv, positions=cache.positions + before))])
    assert_same_bits(*results)


@pytest.mark.skipif(not GPU and not cpp_compiler(), reason="the emulator needs a C++ compiler")
@needs_address_space
@torch.no_grad()
def test_persistent_decoder_with_a_far_cache(monkeypatch):
    sizes = {"batch": 3, "width": 32, "heads": 2, "lengths": [5], "rows": 16, "kv_dtype": torch.float8_e4m3fn}
    weights, tokens, cache = decode_contract.inputs(**sizes, dtype=torch.float32, device=DEVICE).values()
    if not GPU:
        monkeypatch.setattr(persistent, "multiprocessors", lambda device: 2)
    packed, results = persistent.Packed(weights, cache), []
    for rows in (16, 2**30 // 32 + 1):
        kv = [in_cache(tensor, rows) for tensor in cache.kv[0]]
        logits = persistent.decode(packed, tokens, cache._replace(kv=[tuple(kv)]))
        results.append((logits, *(tensor[:, :16] for tensor in kv)))
    assert_same_bits(*results)


def test_every_kernel_has_a_case():
    """A new kernel needs one in CASES, unless another test has offsets of it beyond 2^31."""
    decoding = {"_attention_kernel", "_vector_attention_kernel", "_summary_kernel", "_draw_kernel"}  # in this file
    in_gluon = {"_attention_fwd_gluon_kernel", "_attention_bwd_gluon_kernel"}  # test_large_tensors.py
    in_gluon |= {"_mlp_gluon_kernel", "_glu_fwd_gluon_kernel", "_glu_bwd_gluon_kernel", "_cross_entropy_gluon_kernel"}
    assert kernel_names() == decoding | in_gluon | set(re.findall(r"\w+_kernel", " ".join(CASES)))


def test_strides_that_tma_takes(monkeypatch):
    monkeypatch.setattr(_triton_tiles, "has_tma", lambda device: True)
    q = torch.empty(1, 128, 4, 64, dtype=torch.bfloat16)
    assert _triton_tiles.can_use_tma(q, q.as_strided(q.shape, (2**39 - 64, 256, 64, 1)))
    assert not _triton_tiles.can_use_tma(q, q.as_strided(q.shape, (2**39, 256, 64, 1)))


@pytest.mark.parametrize(("batch", "supported"), [(2**17 - 1, True), (2**17, False)])
def test_attention_in_gluon_refuses_coordinates_of_33_bits(batch, supported):
    """_attention_bwd_gluon_kernel reads lse and delta by TMA, and a tile of 64 queries of a head has 128 numbers."""
    with FakeTensorMode():
        q = torch.empty(batch, 1024, 8, 64, dtype=DTYPE, device="cuda")
    expected = None if supported else f"fewer than 2^30 queries in all heads, not {batch * 2**13:,}"
    assert gluon.refusal(q, q) == expected


def test_a_vocabulary_beyond_the_grid_is_refused():
    """_matmul_kernel has its tiles of rows of W along y."""
    weights, tokens, cache = decode_contract.inputs(batch=20, lengths=[5], dtype=DTYPE, device=DEVICE).values()
    step = decode.Step(weights, tokens, cache)
    most = 65_535 * _many.matmul_launch("head", 20, 10**6, 64, DTYPE, 132, SHARED_BYTES)["BLOCK_N"]
    head = torch.empty(1, 1, dtype=DTYPE, device=DEVICE).expand(most + 1, 64)
    message = f"head has {most + 1:,} rows, and with more than .* take at most {most:,}: choose kernels.decode=blocks"
    with pytest.raises(Unavailable, match=message):
        _many.product(step, "head", half(20, 64), head)


@pytest.mark.parametrize("queries", [9, 12])
def test_the_largest_window_is_no_window(queries):
    """Sums with a window of 2^31 - 1 do not wrap around."""
    inputs = contract("attention").inputs((2, queries, 2, 16), keys=12, dtype=DTYPE, device=DEVICE)
    function = load("attention", "triton", DEVICE)
    expected, got = (outputs_and_gradients(function, inputs | {"window": window}) for window in (None, LIMIT - 1))
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0, equal_nan=True)
