"""Tensors of more than 2^31 numbers on a GPU of 80 GB: `python -m pytest tests/kernels/test_large_tensors.py`.

The last rows are compared with a computation of these rows alone. test_offsets.py does this for every kernel on a CPU.
"""

import importlib

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from kernels import quantize
from kernels.adamw.triton import BLOCK, adamw
from kernels.attention import _triton_backward
from kernels.registry import contract, load
from tests.kernels.offset_cases import DEVICE, DTYPE, after, half, needs_address_space, randn
from tests.kernels.test_backends import load_or_skip

attention = importlib.import_module("kernels.attention.triton")
LIMIT = 2**31
pytestmark = pytest.mark.gpu


def assert_near(got, expected, rounding=2**-7):
    """Compare tensors that are rounded to bf16. Wrong rows differ by about as much as the numbers themselves."""
    largest = expected.abs().max().item()
    assert largest > 0
    torch.testing.assert_close(got.double(), expected.double(), rtol=rounding, atol=rounding * largest)


@needs_address_space
@pytest.mark.parametrize("options", [{}, {"impl": "gluon"}, {"window": 128}, {"window": 128, "tma": False}], ids=str)
def test_attention_with_more_than_2_to_31_numbers(options, monkeypatch):
    """q, k and v are (B, 33 heads, T, 64) in memory. The last 256 queries of the last head agree with float64.

    With a window there are a million tokens.
    """
    function = load_or_skip("attention", options.get("impl", "triton"), DEVICE)
    window = options.get("window")
    if not options.get("tma", True):
        for module in (attention, _triton_backward):
            monkeypatch.setattr(module, "can_use_tma", lambda *tensors: False)
    B, T = (1, 2**20) if window else (32, 2**15)
    q, k, v = (torch.randn(B, 33, T, 64, dtype=DTYPE, device=DEVICE).transpose(1, 2).requires_grad_() for _ in range(3))
    out = function(q, k, v, **({"window": window} if window else {}))
    dout = torch.randn(B, T, 33, 64, dtype=DTYPE, device=DEVICE)
    got = out, *torch.autograd.grad(out, (q, k, v), dout)
    # no other query sees the last 256 keys, and these see no key before
    first = T - 512 if window else 0
    exact = [tensor.detach()[-1:, start:, 32:].double() for tensor, start in ((q, T - 256), (k, first), (v, first))]
    exact = [tensor.requires_grad_() for tensor in exact]
    expected = contract("attention").reference(*exact, window=window)
    expected = expected, *torch.autograd.grad(expected, exact, dout[-1:, -256:, 32:].double())
    for value, true in zip(got, expected, strict=True):
        assert_near(value[-1, -256:, 32], true[0, -256:, 0], rounding=2**-5)  # p and ds are bf16, too


def last_rows(function, rows, *tensors, **options):
    """Return two results for the rows of x: with `rows` other rows before x, and with x alone.

    x is the first tensor. The gradient of the rows before it is 0, so the other gradients agree.
    """
    results, (x, *others) = [], tensors
    for before in (rows, 0):
        large = torch.randn(before + len(x), x.shape[1], dtype=x.dtype, device=DEVICE)
        large[before:] = x
        leaves = [large.requires_grad_(), *(other.detach().requires_grad_() for other in others)]
        y = function(*leaves, **options)
        y = y if isinstance(y, torch.Tensor) else y[0]
        dy = torch.zeros_like(y)
        dy[before:] = randn(len(x), y.shape[1], seed=9).to(dy.dtype) / 2**14  # fp8 takes dy of up to 448 / rows
        dx, *grads = torch.autograd.grad(y, leaves, dy)
        results.append((y[before:].detach(), dx[before:], *grads))
        del large, leaves, y, dy, dx
    return zip(*results, strict=True)


@needs_address_space
@pytest.mark.parametrize("impl", ["triton", "triton_recompute"])
def test_norm_of_more_than_2_to_31_numbers(impl):
    """Each kernel has its rows beyond 2^31 numbers: _norm_fwd_kernel and _norm_bwd_kernel."""
    x, weight, bias = half(64, 1024), 1 + half(1024, seed=1) / 16, half(1024, seed=2) / 16
    residual = torch.randn(2**21 + 64, 1024, dtype=DTYPE, device=DEVICE)

    def norm(x, weight, bias):
        return load("norm", impl, DEVICE)(x, residual[-len(x) :], weight, bias)

    for got, expected in last_rows(norm, 2**21, x, weight, bias):
        assert_near(got, expected)


@needs_address_space
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("impl", ["triton", "gluon"])
def test_mlp_of_more_than_2_to_31_numbers(impl, fp8):
    """In fp8, the scale of dy depends on the number of rows."""
    mlp = load_or_skip("mlp", impl, DEVICE)
    if fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with fp8")
    C, F = 512, 2048
    w_fc, w_proj = half(F, C, seed=1) / C**0.5, half(C, F, seed=3) / F**0.5
    tensors = half(128, C), w_fc, half(F, seed=2), w_proj, half(C, seed=4)
    options = {"fp8": True} if fp8 else {}
    for got, expected in last_rows(mlp, 2**20, *tensors, **options):
        if fp8:
            assert (got - expected).float().norm() < 0.1 * expected.float().norm()
        else:
            assert_near(got, expected)


@needs_address_space
def test_glu_of_more_than_2_to_31_numbers():
    """In Gluon: offset_cases.py has the kernels in Triton."""
    glu = load_or_skip("glu", "gluon", DEVICE)
    C, F = 512, 1024
    w_fc, w_proj = half(2 * F, C, seed=1) / C**0.5, half(C, F, seed=3) / F**0.5
    tensors = half(128, C), w_fc, half(2 * F, seed=2), w_proj, half(C, seed=4)
    for got, expected in last_rows(glu, 2**20, *tensors):
        assert_near(got, expected)


@needs_address_space
@pytest.mark.parametrize("impl", ["triton", "triton_whole", "gluon_whole"])
def test_loss_of_more_than_2_to_31_logits(impl):
    """All targets but the last 64 are ignored."""
    function = load_or_skip("loss", impl, DEVICE)
    rows, V, C = LIMIT // 50304 + 1, 50304, 128
    x, weight = half(rows + 64, C), half(V, C, seed=1) / 4
    targets = torch.full((rows + 64,), -1, device=DEVICE)
    targets[rows:] = torch.arange(64, device=DEVICE) + V - 64
    results = []
    for start in (0, rows):
        leaves = x[start:].detach().requires_grad_(), weight.detach().requires_grad_()
        loss = function(*leaves, targets[start:])
        dx, dweight = torch.autograd.grad(loss, leaves)
        results.append((loss.detach(), dx[rows - start :], dweight))
    for got, expected in zip(*results, strict=True):
        assert_near(got, expected)


@needs_address_space
@torch.no_grad()
def test_rounding_more_than_2_to_31_numbers_to_fp8():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with fp8")
    x = half(128, 1024)
    large = torch.zeros(2**21 + 128, 1024, dtype=DTYPE, device=DEVICE)
    large[2**21 :] = x
    unit = torch.full((), 0.25, device=DEVICE)
    (rows, columns, total), (near_rows, near_columns, near_total) = (
        quantize.quantize(tensor, unit, sums=True) for tensor in (large, x)
    )
    assert torch.equal(rows[2**21 :].view(torch.uint8), near_rows.view(torch.uint8))
    assert torch.equal(columns[:, 2**21 :].view(torch.uint8), near_columns.view(torch.uint8))
    assert_near(total, near_total)
    assert torch.equal(quantize.quantize_weight(large)[2], quantize.quantize_weight(x)[2])


@needs_address_space
@torch.no_grad()
def test_adamw_of_more_than_2_to_31_weights():
    results = []
    for before in (LIMIT, 0):
        master, exp_avg, exp_avg_sq = (after(before, randn(BLOCK, seed=seed).abs()) for seed in range(3))
        weight, gradient = torch.zeros_like(master, dtype=DTYPE), after(before, half(BLOCK, seed=3))
        scalars = (*torch.full((2,), 0.1, device=DEVICE), torch.full((), 3.0, device=DEVICE))
        refuse = torch.zeros((), dtype=torch.bool, device=DEVICE)
        state = master, exp_avg, exp_avg_sq, weight
        adamw(*state, gradient, *scalars, refuse, len(weight), 0.9, 0.99, 1e-8, 0.1)
        results.append([tensor[before:].clone() for tensor in state])
        del state, master, exp_avg, exp_avg_sq, weight, gradient
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)
