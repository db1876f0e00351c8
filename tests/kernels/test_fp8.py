"""Rounding to fp8 against a table of all its numbers, and the linear layer against formulas in float64."""

import os

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kernels import fp8
from kernels.fp8 import E4M3, E5M2, X_SCALE, gradient_scale, pad, product, quantize, weight_scale
from kernels.gpu import check_dtypes
from kernels.registry import AttnConfig, KernelsConfig, Unavailable, backend, contract, resolve

GPU = torch.device("cuda")
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or fp8.unavailable(GPU) is not None, reason="needs a GPU with products in fp8"
)


def numbers(dtype):
    """Return all finite numbers of an fp8 dtype in float64, sorted, by the formula of their bits."""
    mantissa_bits, bias, largest = {E4M3: (3, 7, 448), E5M2: (2, 15, 57344)}[dtype]
    values = set()
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, (code & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
        value = 2.0 ** (exponent - bias) * (1 + mantissa) if exponent else 2.0 ** (1 - bias) * mantissa
        values |= {value, -value} if value <= largest else set()
    return torch.tensor(sorted(values), dtype=torch.float64)


def rounded(x, dtype, scale):
    """Return x in float64, rounded to the nearest number / scale; a tie goes to the even mantissa, as in IEEE 754."""
    values, x = numbers(dtype), x.double() * scale
    after = torch.searchsorted(values, x).clamp(1, len(values) - 1)
    below, above = values[after - 1], values[after]
    is_even = (after - 1 - len(values) // 2) % 2 == 0  # 0 is in the middle, and its neighbours are odd
    takes_below = (x - below < above - x) | ((x - below == above - x) & is_even)
    return torch.where(takes_below, below, above) / scale


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("spread", [1e-6, 1e-3, 1.0, 1e3, 1e6])
def test_quantize_takes_the_nearest_number(dtype, spread):
    x = (spread * torch.randn(4096, generator=torch.Generator().manual_seed(1))).to(torch.bfloat16)
    assert torch.equal(quantize(x, dtype, 8.0).double() / 8, rounded(x, dtype, 8.0))


@pytest.mark.parametrize("largest", [1e-30, 3e-4, 0.4375, 0.43750003, 0.4376, 1.0, 448.0, 449.0, 1e4])
def test_weight_scale_is_the_largest_power_of_two_that_fits(largest):
    weight = torch.tensor([[0.0, -largest], [largest / 3, 0.1 * largest]])
    scale = weight_scale(weight).item()
    assert scale == 2.0 ** round(torch.tensor(scale).log2().item())
    assert scale * max(largest, 2**-60) <= 448 < 2 * scale * max(largest, 2**-60)


def test_gradient_scale():
    assert gradient_scale(torch.tensor([65536, 65537, 1])).tolist() == [2.0**22, 2.0**23, 64.0]


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_numbers_saturate_and_infinities_do_not(dtype):
    x = torch.tensor([1e6, -1e6, torch.inf, -torch.inf, torch.nan])
    assert quantize(x, dtype, 8.0).float()[:2].tolist() == [torch.finfo(dtype).max, -torch.finfo(dtype).max]
    assert not quantize(x, dtype, 8.0).float()[2:].isfinite().any()


def test_no_rows():
    assert fp8.linear(torch.randn(2, 0, 16), torch.randn(8, 16)).shape == (2, 0, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_equals_products_of_rounded_tensors(dtype, bias):
    """Each result is off by at most half a unit of its dtype, and by the rounding of a sum in fp32."""
    draw = torch.Generator().manual_seed(2)
    x, weight, b, dy = (
        (std * torch.randn(*size, generator=draw)).to(dtype).requires_grad_()
        for size, std in (((2, 19, 48), 1.0), ((40, 48), 0.02), ((40,), 0.1), ((2, 19, 40), 1 / 38))
    )
    b = b if bias else None
    y = fp8.linear(x, weight, b)
    got = y, *torch.autograd.grad(y, [t for t in (x, weight, b) if t is not None], dy)
    x8, weight8 = rounded(x, E4M3, X_SCALE).view(38, 48), rounded(weight, E4M3, weight_scale(weight).item())
    dy8 = rounded(dy, E5M2, gradient_scale(torch.tensor(38)).item()).view(38, 40)
    exact = [x8 @ weight8.T + (b.double() if bias else 0), dy8 @ weight8, dy8.T @ x8]
    sums = [x8.abs() @ weight8.T.abs() + 1, dy8.abs() @ weight8.abs(), dy8.T.abs() @ x8.abs()]
    if bias:
        exact.append(dy.double().sum((0, 1)))
        sums.append(dy.double().abs().sum((0, 1)))
    for result, truth, size in zip(got, exact, sums, strict=True):
        error = (result.double().view(truth.shape) - truth).abs()
        assert (error <= torch.finfo(dtype).eps / 2 * truth.abs() + 64 * torch.finfo(torch.float32).eps * size).all()


def test_gradients_of_a_linear_layer_keep_their_direction():
    """Each rounding adds noise of at most 1/16 (e4m3) or 1/8 (e5m2) of an element: 3% and 6% of the norm, or less."""
    draw = torch.Generator().manual_seed(3)
    x, weight, dy = (torch.randn(*size, generator=draw) for size in ((512, 256), (128, 256), (512, 128)))
    leaves = [t.requires_grad_() for t in (x, weight)]
    plain = torch.autograd.grad(x @ weight.T, leaves, dy / 512)
    rounded_grads = torch.autograd.grad(fp8.linear(x, weight), leaves, dy / 512)
    for grad, exact in zip(rounded_grads, plain, strict=True):
        assert (grad - exact).norm() <= (0.03**2 + 0.06**2) ** 0.5 * exact.norm()


def test_pad_adds_zeros():
    x = torch.arange(15.0).view(3, 5).to(E4M3)
    padded = pad(x)
    assert (padded.shape, padded.dtype) == ((16, 16), E4M3)
    assert torch.equal(padded[:3, :5].float(), x.float())
    assert padded.float().sum() == x.float().sum()
    assert pad(x, rows=1).shape == (3, 16)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("sizes", [(64, 128, 48), (1, 768, 768), (33, 65, 7), (4096, 768, 3072)])
@pytest.mark.parametrize("bias", [True, False])
def test_product_of_a_gpu_equals_the_emulation(sizes, bias):
    """With fast accumulation, a tensor core adds 32 products at a time to a sum. It keeps 14 bits of the sum."""
    (M, K, N), draw = sizes, torch.Generator().manual_seed(4)
    a, b = (torch.randn(rows, K, generator=draw).to(dtype) for rows, dtype in ((M, E5M2), (N, E4M3)))
    c = torch.randn(N, generator=draw).to(torch.bfloat16) if bias else None
    units = torch.tensor(1 / 2), torch.tensor(1 / 4)
    exact = product(a, b, units, torch.float64, c)
    size = a.double().abs() @ b.double().abs().T / 8
    lost = 2**-13 * -(-K // 32)
    on_gpu = product(
        a.to(GPU), b.to(GPU), tuple(unit.to(GPU) for unit in units), torch.bfloat16, c.to(GPU) if bias else None
    )
    assert ((on_gpu.cpu().double() - exact).abs() <= 2**-8 * exact.abs() + lost * size).all()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("K", "fast"), [(65536, True), (4096, False)])
def test_a_gpu_does_not_cut_off_sums_without_fast_accumulation(K, fast):
    """All products are positive. By a model of 14 bits, fast accumulation loses 4% of 65,536 and 0.27% of 4096."""
    draw = torch.Generator().manual_seed(4)
    a, b = (torch.rand(16, K, generator=draw).to(E4M3) for _ in range(2))
    one = torch.ones(())
    exact = product(a, b, (one, one), torch.float64)
    on_gpu = product(a.to(GPU), b.to(GPU), (one.to(GPU), one.to(GPU)), torch.float32, fast=fast)
    torch.testing.assert_close(on_gpu.cpu().double(), exact, rtol=2**-9, atol=0)


@pytest.fixture
def ptxas(monkeypatch, tmp_path):
    """ptxas(version) -> the path of a script that prints this version of ptxas. Triton's two tools print 12.8."""
    pytest.importorskip("triton", reason="Triton is for Linux")

    def program(version):
        path = tmp_path / version / "bin" / "ptxas"
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.93'\n")
        path.chmod(0o755)
        return path

    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    old = str(program("12.8"))
    monkeypatch.setenv("TRITON_PTXAS_PATH", old)
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", old)
    return program


def test_torch_compile_gets_a_ptxas_that_stores_the_right_bytes(ptxas, monkeypatch):
    cuda = torch.device("cuda")
    assert "ptxas 13.0 or newer, and the versions here are 12.8, 12.8: set" in fp8.choose_ptxas(cuda)
    newer = ptxas("13.0")
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(newer.parents[1]))
    assert fp8.choose_ptxas(cuda) is None
    assert os.environ["TRITON_PTXAS_PATH"] == str(newer)
    mine = ptxas("13.4")  # the user's ptxas comes first
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(mine))
    assert fp8.choose_ptxas(cuda) is None
    assert os.environ["TRITON_PTXAS_PATH"] == str(mine)


def test_compile_in_fp8_is_refused_without_such_a_ptxas(ptxas, monkeypatch):
    settings = KernelsConfig(norm="eager", linear="eager", mlp="eager", loss="eager", decode="blocks", compile=True)
    with pytest.raises(Unavailable, match="precision=fp8 cannot run here: it needs ptxas"):
        resolve(settings, AttnConfig("eager"), torch.device("cuda"), in_fp8=True)


def test_torch_compile_takes_a_gpu_product_whose_sizes_change():
    """The tensors are fake, so no GPU is needed. bench_kernels op=mlp calls a compiled product with two sizes."""
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
        compiled = torch.compile(product, backend="eager", fullgraph=True, dynamic=True)
        unit = torch.empty((), device=GPU)
        for columns in (64, 128):
            a, b = (torch.empty(rows, columns, dtype=E4M3, device=GPU) for rows in (32, 16))
            assert compiled(a, b, (unit, unit), torch.bfloat16).shape == (32, 16)


@pytest.mark.parametrize(("op", "key"), [("norm", "kernels.norm"), ("attention", "attn")])
def test_the_interpreter_refuses_bf16_and_names_the_key_of_the_op(op, key, monkeypatch):
    """A trial of precision=fp8 on a CPU cannot choose fp32, but it can choose eager for this op."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(Unavailable, match=f"^{op}=triton in .* in bfloat16: choose fp32, or {key}=eager$"):
        check_dtypes(op, torch.empty(1, dtype=torch.bfloat16))


@pytest.mark.parametrize("op", ["linear", "mlp"])
def test_torchao_refuses_an_odd_width_and_names_the_keys(op):
    pytest.importorskip("torchao")
    arguments = contract(op).inputs(**contract(op).CASES["fp8_odd"], dtype=torch.float32)
    with pytest.raises(Unavailable, match=r"multiples of 16, not 131 x 65: choose kernels\.linear=eager and kernels"):
        getattr(backend(op, "torchao"), op)(**arguments)
