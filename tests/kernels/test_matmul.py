"""The matmuls of kernels/matmul.py, and the one with exponentials of the loss, against float64.

On a CPU they run in Triton's interpreter. On a GPU they also run in bf16, and with TMA where there is TMA.
"""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from kernels import matmul
from kernels.loss import cap_logits
from kernels.loss._exponentials import exponentials
from kernels.loss._unnormalised import HEADROOM_BITS
from kernels.split import MOST_SPLITS, split_sum
from kernels.tuned import override_tables

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * GPU  # Triton's interpreter rounds to bf16 wrongly
SIZES = [(70, 40, 72), (129, 131, 65), (1, 16, 8), (257, 264, 200)]  # N, F, C; TMA takes none of the second
LOG2E = 1.4426950408889634


def randn(*size, dtype, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(got, a, b, dtype, bias=None):
    """Check a product a @ b + bias, with the bound on a sum of K products in fp32 and the rounding of the result."""
    a, b = a.double(), b.double()
    exact, size = a @ b, a.abs() @ b.abs()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    rounding = torch.finfo(dtype).eps / 2 * exact.abs()
    bound = (a.shape[1] + 2) * torch.finfo(torch.float32).eps * size + rounding
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("N", "F", "C"), SIZES)
def test_matmul(N, F, C, with_bias, dtype):
    x, w = randn(N, C, dtype=dtype), randn(F, C, dtype=dtype, seed=1)
    bias = randn(F, dtype=dtype, seed=2) if with_bias else None
    assert_close(matmul.matmul("linear_fwd", x, w, bias), x, w.T, dtype, bias)
    w = w.T.contiguous()
    assert_close(matmul.matmul("linear_dx", x, w, bias, w_by_rows=False), x, w, dtype, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("N", "F", "C"), SIZES)
def test_a_sum_over_rows_in_parts(N, F, C, splits, dtype, monkeypatch):
    """Also if the last parts are empty: with 3 parts, every part has a third of the blocks or none."""
    a, b = randn(N, F, dtype=dtype), randn(N, C, dtype=dtype, seed=1)
    monkeypatch.setattr(matmul, "split_sum", lambda steps, *_: (splits, -(-steps // splits)))
    result = matmul.matmul_transposed("linear_dw", a, b)
    assert_close(result, a.T, b, dtype)
    assert torch.equal(result, matmul.matmul_transposed("linear_dw", a, b))


@pytest.mark.parametrize("kernel", ["linear_fwd", "linear_dw"])
def test_every_candidate_of_the_search_is_right(kernel):
    a, b = (randn(160, columns, dtype=torch.float16, seed=columns) for columns in (72, 136))

    def product():
        if kernel == "linear_dw":
            return matmul.matmul_transposed(kernel, a, b)
        return matmul.matmul(kernel, a.T.contiguous(), b.T.contiguous())

    with override_tables({}) as requests:
        product()
    _, default = requests[kernel]
    for change in matmul.candidates(kernel, default):
        with override_tables({kernel: change}):
            assert_close(product(), a.T, b, torch.float16)


@pytest.mark.parametrize("programs", [1, 8, 132])
@pytest.mark.parametrize("tiles", [1, 18, 54, 400])
@pytest.mark.parametrize("steps", [1, 2, 63, 1024])
def test_the_parts_of_a_sum(steps, tiles, programs):
    splits, blocks = split_sum(steps, tiles, programs)
    assert (splits - 1) * blocks < steps <= splits * blocks
    assert splits <= MOST_SPLITS
    rounds = -(-tiles * splits // programs)
    assert rounds * blocks <= steps * -(-tiles // programs)  # at most as many blocks in turn as without parts


def test_the_sum_of_qkvs_gradient_keeps_an_h200_busy():
    """54 tiles on 132 multiprocessors: whole sums would keep 59% of them idle."""
    splits, blocks = split_sum(1024, 54, 132)
    assert -(-54 * splits // 132) * blocks * 132 <= 1.1 * 54 * 1024


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "V", "C"), SIZES)
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_exponentials(N, V, C, dtype, softcap):
    """An error in a logit is a factor of its exponential, so the bound on a sum of products bounds the ratio.

    The sums are those of the exponentials before they are multiplied by the slope of the cap. The slope is at most 1.
    """
    x, w = randn(N, C, dtype=dtype) / 8, randn(V, C, dtype=dtype, seed=1) / 8
    shifts = randn(N, dtype=torch.float32, seed=2)
    p = torch.full((N, V), torch.nan, dtype=dtype, device=DEVICE)
    sums = exponentials(x, w, shifts - HEADROOM_BITS.value, p, softcap)
    size = x.double().abs() @ w.double().abs().T + shifts.double().abs()[:, None]
    logits = cap_logits(x.double() @ w.double().T, softcap)
    slope = 1 - (logits / softcap).square() if softcap else 1
    exact = torch.exp2(logits * LOG2E - shifts.double()[:, None])
    bound = (C + 8) * torch.finfo(torch.float32).eps * (1 + size)
    assert ((p.double() / exact - slope).abs() <= bound + torch.finfo(dtype).eps).all()
    assert ((sums.double().sum(0) / exact.sum(1) - 1).abs() <= bound.amax(1) + V * torch.finfo(torch.float32).eps).all()


def test_what_tma_takes(monkeypatch):
    monkeypatch.setattr(matmul, "has_tma", lambda device: True)
    assert matmul.can_use_tma(*(torch.empty(3, columns, dtype=torch.bfloat16) for columns in (8, 768)))
    for columns, dtype in itertools.product((769, 4), (torch.bfloat16, torch.float16)):
        assert not matmul.can_use_tma(torch.empty(3, 8, dtype=dtype), torch.empty(3, columns, dtype=dtype))
    assert not matmul.can_use_tma(torch.empty(3, 8))  # fp32
    assert not matmul.can_use_tma(torch.empty(25, dtype=torch.bfloat16)[1:].view(3, 8))
