"""Rounding a matrix to fp8 in both layouts, against kernels/fp8.py."""

import pytest
import torch

from kernels import fp8
from kernels.compat import FakeTensor, FakeTensorMode
from kernels.fp8 import E4M3, E5M2, weight_scale

pytest.importorskip("triton", reason="Triton is for Linux")

from kernels.quantize import quantize, quantize_weight, unit_tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if torch.cuda.is_available() else [torch.float32]
pytestmark = pytest.mark.usefixtures("fp8_on_a_cpu")


def bits(x):
    """Return the bits of fp8 numbers, with one code for every NaN."""
    return x.view(torch.uint8).where(x.float() == x.float(), 0x7F)


def padded(x):
    """Return x with zeros at the end of its rows, up to a multiple of 16."""
    return torch.nn.functional.pad(x.view(torch.uint8), (0, -x.shape[1] % 16)).view(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", [(128, 64), (1, 16), (131, 65), (7, 200), (300, 48)])
def test_both_layouts_have_the_bits_of_fp8_quantize(shape, target, dtype):
    x = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    x.view(-1)[:5] = torch.tensor([1e6, -1e6, torch.inf, -torch.inf, torch.nan])
    rows, columns, sums = quantize(x.to(DEVICE), torch.tensor(1 / 8, device=DEVICE), target, sums=True)
    expected = fp8.quantize(x, target, 8.0)
    assert torch.equal(bits(rows.cpu()), bits(padded(expected)))
    assert torch.equal(bits(columns.cpu()), bits(padded(expected.T.contiguous())))
    exact, size = x.double().sum(0), x.double().abs().sum(0)
    error = (sums.cpu().double() - exact).abs()
    rounding = torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(torch.float32).eps * len(x) * size
    assert ((error <= rounding) | ~size.isfinite()).all()
    assert (sums.cpu().isfinite() == exact.isfinite()).all()


@pytest.mark.parametrize("largest", [0.0, 1e-30, 3e-4, 0.4375, 0.43750003, 0.4376, 1.0, 448.0, 449.0, 1e4])
def test_a_weight_gets_the_scale_of_fp8_weight_scale(largest):
    weight = torch.rand(70, 80, generator=torch.Generator().manual_seed(2)) - 0.5
    weight *= 2 * largest
    weight[69, 3] = -largest
    rows, columns, unit = (tensor.cpu() for tensor in quantize_weight(weight.to(DEVICE)))
    scale = weight_scale(weight)
    assert unit == 1 / scale
    expected = fp8.quantize(weight, E4M3, scale)
    assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(columns[:, :70].view(torch.uint8), expected.T.contiguous().view(torch.uint8))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_weight_that_is_not_finite_gives_no_finite_number(bad):
    weight = torch.ones(32, 32, device=DEVICE)
    weight[3, 4] = bad
    rows, _, unit = quantize_weight(weight)
    assert not (rows.float() * unit).isfinite().any()


def test_a_unit_is_kept_but_never_a_fake_one():
    with FakeTensorMode():
        assert isinstance(unit_tensor(8.0, DEVICE), FakeTensor)
    unit = unit_tensor(8.0, DEVICE)
    assert unit.item() == 1 / 8
    assert unit_tensor(8.0, DEVICE) is unit
    with FakeTensorMode():
        assert isinstance(unit_tensor(8.0, DEVICE), FakeTensor)
