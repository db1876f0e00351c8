"""Backends that wrap other people's kernels: the code around their functions, and the error if a package is missing.

The packages need a GPU. Here plain PyTorch replaces the functions that the backends call, with the signatures of
liger-kernel 0.8.5, quack-kernels 0.6.5, nvmath-python 1.0.0, gram-newton-schulz 0.1.6 and flashinfer-python 0.6.12, and
of our own kernels in Helion. On a GPU with the packages, test_backends.py and test_decode.py test the real functions.
If Helion is installed, test_backends.py also runs its LayerNorm in Triton's interpreter, and compile_helion.py compiles
its kernels. Our kernels in cuTile and TileLang run from their source, with fake_cutile.py as cuda.tile and
fake_tilelang.py as tilelang. If the packages are installed, compile_cutile.py and compile_tilelang.py compile them, and
emulate_tilelang.py runs the CUDA C++ of attention in TileLang.
"""

import importlib
import itertools
import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import gelu, pad, silu

from kernels import cutile, decode, quack, tilelang
from kernels.check import broken_rule, why_wrong
from kernels.gpu import align, package_unavailable, refused_widths
from kernels.loss import liger_cute
from kernels.mlp import nvmath
from kernels.muon import gram
from kernels.names import override_key
from kernels.registry import Unavailable, backend, contract, family_patterns, load, missing_argument, unavailable
from tests.kernels import fake_cutile, fake_tilelang
from tests.kernels.test_backends import DTYPES, assert_as_good_as_eager, case_inputs, outputs_and_gradients

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
WRAPPED = [
    *[(op, impl) for op in ("norm", "rms_norm", "rope", "glu") for impl in ("liger", "quack", "helion")],
    *[("loss", impl) for impl in ("liger", "liger_large", "liger_cute", "helion", "quack")],
    *[("mlp", impl) for impl in ("nvmath", "quack")],
    *[(op, "tilelang") for op in ("norm", "rms_norm", "linear", "attention")],
    ("linear", "quack"),
    *[(op, "cutile") for op in ("norm", "rms_norm", "linear", "attention", "loss")],
    ("muon", "gram"),
]
CASES = {
    "norm": ["fp32_residual", "fp32_embedding", "no_bias", "non_contiguous"],
    "rms_norm": ["fp32_residual", "fp32_embedding", "no_residual", "non_contiguous", "eps"],
    "loss": ["some_ignored", "all_ignored", "non_contiguous", "odd", "softcap"],
    "linear": ["many_rows", "one_row", "no_bias", "non_contiguous"],
    "mlp": ["many_rows", "one_row", "no_bias", "non_contiguous", "relu2"],
    "muon": ["wide", "tall", "square", "non_contiguous"],
    "rope": ["64", "80", "one_token", "positions_of_sequences"],
    "glu": ["many_rows", "one_row", "bias", "non_contiguous"],
    "attention": [
        case for case, given in contract("attention").CASES.items() if not {"lengths", "documents"} & {*given}
    ],
}
REFUSED = [("glu", "quack", "bias"), ("loss", "quack", "odd")]
ONE_DTYPE = {  # our kernels do not work in bf16 under TRITON_INTERPRET=1, which the tests set on a CPU
    **{(op, "helion"): torch.float32 for op in ("norm", "rms_norm", "rope", "glu")},
    **{("loss", impl): torch.float32 for impl in ("helion", "liger", "liger_large")},
    ("loss", "liger_cute"): torch.bfloat16,
    ("muon", "gram"): torch.bfloat16,
    ("attention", "tilelang"): torch.bfloat16,
}


def _normalize(stream, weight, bias, eps, centred=True):
    mean = stream.float().mean(-1) * centred
    centred = stream.float() - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred * rstd[:, None] * weight.float()
    return y if bias is None else y + bias.float(), mean, rstd


def _gradients(dy, stream, weight, mean, rstd):
    """LayerNorm's, and with mean=None RMSNorm's."""
    xhat = (stream.float() - (0 if mean is None else mean[:, None])) * rstd[:, None]
    dy = dy.float()
    g = dy * weight.float()
    mean_g = 0 if mean is None else g.mean(-1, keepdim=True)
    dstream = rstd[:, None] * (g - mean_g - xhat * (g * xhat).mean(-1, keepdim=True))
    return dstream, (dy * xhat).sum(0), dy.sum(0)


def layer_norm_forward(X, W, B, eps):
    y, mean, rstd = _normalize(X.view(-1, X.shape[-1]), W, B, eps)
    return y.to(X.dtype), X, mean, rstd, 1024, 4


def layer_norm_backward(dY, X, W, B, Mean, RSTD):
    results = _gradients(dY.view(-1, dY.shape[-1]), X, W, Mean, RSTD)
    return tuple(result.to(t.dtype) for result, t in zip(results, (X, W, B), strict=True))


def rms_norm_forward(X, W, eps, offset, casting_mode, row_mode):
    assert (offset, casting_mode, row_mode) == (0.0, 1, None)
    y, _, rstd = _normalize(X, W, None, eps, centred=False)
    return y.to(X.dtype), X, rstd, 1024, 4, casting_mode


def rms_norm_backward(dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode, needs_dw=None):
    assert (offset, casting_mode, BLOCK_SIZE, num_warps, in_place) == (0.0, 1, 1024, 4, False)
    dx, dweight, _ = _gradients(dY, X, W, None, RSTD)
    return dx.to(X.dtype), dweight.to(W.dtype)


def fused_add_rms_norm_forward(X, R, W, eps, offset, casting_mode):
    assert X.dtype == R.dtype
    y, _, rstd, *settings = rms_norm_forward(X + R, W, eps, offset, casting_mode, None)
    return y, X + R, rstd, *settings[:2], 2, casting_mode


def fused_add_rms_norm_backward(
    dY, dS_out, S, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, num_stages, in_place, needs_dw=None
):
    assert num_stages == 2
    dx, dweight = rms_norm_backward(
        dY.float(), S.float(), W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place, None
    )
    dx = (dx + dS_out.float()).to(S.dtype)
    return dx, dx, dweight


def calculate_settings(n):
    return 1024, 4


def fused_linear_cross_entropy_forward(
    _input, weight, target, *, ignore_index, reduction, accum_dtype, chunk_mem_const=1, softcap=None
):
    assert type(chunk_mem_const) is int
    assert chunk_mem_const >= 1
    assert reduction == "sum"
    counts = (target != ignore_index).unsqueeze(1)
    logits, slope = (_input @ weight.T).float(), 1.0
    if softcap is not None:
        tanh = torch.tanh(logits / softcap)
        logits, slope = softcap * tanh, 1 - tanh.square()
    log_probs = logits.log_softmax(-1)
    onehot = torch.arange(len(weight)) == target.unsqueeze(1)
    loss = -(log_probs * (onehot & counts)).sum()
    if not _input.requires_grad:
        return loss, None, None, None, torch.zeros_like(_input), None, None
    dlogits = ((log_probs.exp() - onehot.float()) * counts * slope).to(_input.dtype)
    dweight = (dlogits.T.to(accum_dtype) @ _input.to(accum_dtype)).to(weight.dtype)
    return loss, None, None, None, dlogits @ weight, dweight, None


def _dlogits(x, weight, target, lse, ignore_index):
    onehot = torch.arange(len(weight)) == target.unsqueeze(1)
    return ((x @ weight.T).float() - lse[:, None]).exp().sub(onehot.float()) * (target != ignore_index).unsqueeze(1)


def fused_scaled_cross_entropy_forward(_input, weight, target, *, ignore_index):
    assert _input.dtype == weight.dtype == torch.bfloat16
    assert _input.shape[1] % 64 == 0
    logits, counts = (_input @ weight.T).float(), target != ignore_index
    losses = logits.logsumexp(1) - logits.gather(1, target.where(counts, 0)[:, None])[:, 0]
    return losses * counts, None, logits.logsumexp(1), _input, weight, _input.shape[1]


def fused_scaled_cross_entropy_backward(
    grad_output, x_padded, weight_padded, target, lse, *, temperature, ignore_index, hidden_size
):
    assert grad_output.shape == lse.shape == target.shape
    assert (temperature, hidden_size) == (1.0, x_padded.shape[1])
    dlogits = _dlogits(x_padded, weight_padded, target, lse, ignore_index) * grad_output[:, None]
    dlogits = dlogits.to(x_padded.dtype)
    return dlogits @ weight_padded, dlogits.T @ x_padded


def helion_cross_entropy(logits, targets, losses, ignore_index, write):
    counts = targets != ignore_index
    loss = logits.float().logsumexp(1) - logits.float().gather(1, targets.where(counts, 0)[:, None])[:, 0]
    losses.copy_(loss * counts)
    if write:
        onehot = torch.arange(logits.shape[1]) == targets[:, None]
        logits.copy_((logits.float().softmax(1) - onehot.float()) * counts[:, None])


def helion_norm_fwd(x, residual, weight, bias, eps, y, stream, mean, rstd):
    out = None if residual is None else stream
    _rmsnorm_fwd(x, weight, y, bias, rstd, mean, residual, out, eps, is_layernorm=mean is not None)


def helion_norm_bwd(dy, dstream, stream, weight, mean, rstd, dx, dresidual, dweight, dbias):
    options = {"mean": mean, "is_layernorm": mean is not None}
    _rmsnorm_bwd(stream, weight, dy, rstd, dx, dweight, dbias, dstream, dresidual, programs=len(dweight), **options)


def rotate_(x, cos, sin, sign):
    """Rotate x (B, T, heads, D) in place. cos and sin are (1 or B, T, D/2) in fp32."""
    cos, sin = cos.unsqueeze(2), sign * sin.unsqueeze(2)
    a, b = x.float().chunk(2, -1)
    x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))


def rope_forward(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None, sign=1):
    """Like Liger's, overwrite q and k (B, heads, T, D) if their storage is contiguous as (B, T, heads, D)."""
    assert rotary_dim == q.shape[3] == 2 * cos.shape[-1]
    q, k = (x.transpose(1, 2).contiguous() for x in (q, k))
    rotate_(q, cos, sin, sign)
    rotate_(k, cos, sin, sign)
    return q.transpose(1, 2), k.transpose(1, 2), cos, sin


def rope_backward(dq, dk, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    return rope_forward(dq, dk, cos, sin, rotary_dim=rotary_dim, sign=-1)[:2]


def _resolve_rotary_dim():
    raise NotImplementedError


def _rotary_fwd_out(x, cos, sin, seqlen_offsets, cu_seqlens, out, max_seqlen, interleaved, conjugate):
    assert (seqlen_offsets, cu_seqlens, interleaved) == (None, None, False)
    assert x.shape[1] == max_seqlen == len(cos)
    out.copy_(x)
    rotate_(out, cos[None], sin[None], -1 if conjugate else 1)


def helion_rope(x, table, out, turned, sign):
    (N, heads, _, half), rows = x.shape, table.shape[1]
    out.copy_(x)
    rotate_(out.view(N // rows, rows, heads, 2 * half)[:, :, :turned], *table[:, None], sign)


def swiglu_fused_gate_up_forward(y):
    gate, up = y.chunk(2, 1)
    return y, (silu(gate.float()) * up).to(y.dtype)


def swiglu_fused_gate_up_backward(y, dc, in_place):
    assert not in_place
    assert y.is_contiguous()
    assert dc.is_contiguous()
    gate, up, dc = *y.float().chunk(2, 1), dc.float()
    s = gate.sigmoid()
    return torch.cat((dc * up * s * (1 + gate * (1 - s)), dc * gate * s), 1).to(y.dtype)


def helion_swiglu_fwd(h, a):
    a.copy_(swiglu_fused_gate_up_forward(h.flatten(1))[1])


def helion_swiglu_bwd(da, h, dh):
    dh.copy_(swiglu_fused_gate_up_backward(h.flatten(1), da, in_place=False).view_as(h))


def for_tma(*matrices):
    """Return whether the rows, or the columns, of each matrix are contiguous and begin at multiples of 16 bytes."""
    return all(1 in m.stride() and max(m.stride()) % 8 == 0 for m in matrices)


def gemm(A, B, out=None, bias=None, *, dynamic_scheduler=False, tuned=True, concat_layout=None):
    """QuACK's matmul. A has gate and up in turns. What concat_layout names has all rows of the gate first."""
    assert not tuned
    assert for_tma(A, B)
    if concat_layout:
        A = halves(A) if concat_layout == ("B",) else halves(A.T).T
    product = A.float() @ B.float() + (0 if bias is None else bias.float())
    if out is None:
        return product.to(A.dtype)
    assert for_tma(out)
    width = out.shape[1]  # TMA's last store of a row has 16 bytes
    out.as_strided((len(out), -width % 8), out.stride(), out.storage_offset() + width).zero_()
    return out.copy_(product)


def gemm_add_inplace(A, B, out, *, tuned):
    assert out.dtype == torch.float32
    out += gemm(A, B, torch.empty_like(out), tuned=tuned)


def gemm_act(A, B, *, bias=None, activation, tuned, concat_layout=None):
    assert concat_layout == {"swiglu": ("B",)}.get(activation)
    h = gemm(A.float(), B.float(), bias=bias, tuned=tuned)
    if activation == "swiglu":
        return in_turns(h).to(A.dtype), swiglu_fused_gate_up_forward(h)[1].to(A.dtype)
    return h.to(A.dtype), ACTIVATIONS[activation](h).to(A.dtype)


def gemm_dact(A, B, PreAct, activation, *, dynamic_scheduler, tuned):
    da = gemm(A.float(), B.float(), dynamic_scheduler=dynamic_scheduler, tuned=tuned)
    if activation == "swiglu":
        h = halves(PreAct)
        dh = swiglu_fused_gate_up_backward(h, da, in_place=False)
        return in_turns(dh), swiglu_fused_gate_up_forward(h)[1]
    h = PreAct.float()
    dh = da * 2 * h.relu() if activation == "relu_sq" else torch.ops.aten.gelu_backward(da, h, approximate="tanh")
    return dh.to(A.dtype), ACTIVATIONS[activation](h).to(A.dtype)


ACTIVATIONS = {"gelu_tanh_approx": partial(gelu, approximate="tanh"), "relu_sq": lambda h: h.relu().square()}


def cross_entropy_fwd_out(x, target, target_logit, loss, lse, dx, weight, ignore_index=-100):
    assert target_logit is lse is weight is None
    assert dx is None or dx is x
    assert x.shape[1] % 8 == 0
    helion_cross_entropy(x, target, loss, ignore_index, dx is not None)


def scaled_exp_lce_supported(x, weight, chunk_size, reduction):
    assert (chunk_size % 128, reduction) == (0, "sum")
    return x.dtype == torch.bfloat16 and len(weight) % 128 == 0


def _scaled_exp_lce_loss_only(x, weight, target, ignore_index):
    losses, logits = x.new_empty(len(x), dtype=torch.float32), (x @ weight.T).float()
    helion_cross_entropy(logits, target, losses, ignore_index, write=False)
    return losses


def scaled_exp_linear_cross_entropy_fwd(x, weight, target, chunk_size, ignore_index=-100):
    """Like QuACK's, return the losses and dx of a multiple of 128 rows."""
    if x.shape[1] in [len(chunk) + -len(chunk) % 128 for chunk in x.split(chunk_size)]:
        raise ValueError("operand 'v': m == n makes row/col inference ambiguous")
    more = -len(x) % 128
    x, target = pad(x, (0, 0, 0, more)), pad(target, (0, more), value=ignore_index)
    losses, logits = x.new_empty(len(x), dtype=torch.float32), (x @ weight.T).float()
    helion_cross_entropy(logits, target, losses, ignore_index, write=True)
    dlogits = logits.to(x.dtype)
    return losses, dlogits @ weight, dlogits.float().T @ x.float()


def in_turns(h):
    return h.unflatten(1, (2, -1)).mT.flatten(1)


def halves(h):
    return h.unflatten(1, (-1, 2)).mT.flatten(1)


class Matmul:
    """nvmath's planned matmul: the operands are fixed in shape, and results are stored by columns."""

    made = 0

    def __init__(self, a, b, options):
        assert options == {"memory_limit": "32 MiB"}
        Matmul.made += 1
        self.a, self.b = a, b

    def plan(self, epilog, epilog_inputs):
        self.epilog, self.inputs = epilog, epilog_inputs

    def reset_operands_unchecked(self, a, b, epilog_inputs):
        self.a, self.b, self.inputs = a, b, epilog_inputs

    def release_operands(self):
        self.a = self.b = self.inputs = None

    def execute(self, release_workspace):
        assert release_workspace
        product, dtype = self.a.float() @ self.b.float(), self.a.dtype
        if self.epilog in ("GELU_AUX", "GELU_AUX_BIAS"):
            h = product if self.epilog == "GELU_AUX" else product + self.inputs["bias"].float()[:, None]
            result, others = gelu(h, approximate="tanh"), {"gelu_aux": by_columns(h.to(dtype))}
        else:
            h = self.inputs["gelu_aux"].float()
            assert h.stride(0) == 1
            result = torch.ops.aten.gelu_backward(product, h, approximate="tanh")
            others = {"dgelu_bgrad": result.sum(1).to(dtype)} if self.epilog == "DGELU_BGRAD" else {}
        result = by_columns(result.to(dtype))
        return (result, others) if others else result


class GramNewtonSchulz:
    """The same polynomial, from the Gram matrix, in float16. It computes the Gram matrix again after three steps."""

    def __init__(self, ns_coefficients, gram_newton_schulz_reset_iterations, compile_kwargs):
        assert (gram_newton_schulz_reset_iterations, compile_kwargs) == ([3], {"fullgraph": True})
        self.coefficients = ns_coefficients

    def __call__(self, matrices):
        assert matrices.is_contiguous()
        x = (matrices.float() / (matrices.float().norm(dim=(1, 2), keepdim=True) + 1e-7)).half()
        is_tall = x.shape[1] > x.shape[2]
        x, eye = x.mT if is_tall else x, torch.eye(min(x.shape[1:]), dtype=x.dtype)
        for steps in (self.coefficients[:3], self.coefficients[3:]):
            gram, q = x @ x.mT, eye
            for a, b, c in steps:
                z = torch.baddbmm(gram, gram, gram, beta=b, alpha=c) + a * eye
                q, gram = q @ z, z @ gram @ z
            x = q @ x
        return (x.mT if is_tall else x).to(matrices.dtype)


def by_columns(matrix):
    return matrix.T.contiguous().T


def _rmsnorm_fwd(x, weight, out, bias, rstd, mean, residual, residual_out, eps, is_layernorm):
    assert (mean is not None) == is_layernorm
    stream = x.float() if residual is None else x.float() + residual.float()
    for result, to in zip(_normalize(stream, weight, bias, eps, is_layernorm), (out, mean, rstd), strict=True):
        if to is not None:
            to.copy_(result)
    if residual_out is not None:
        residual_out.copy_(stream)


def _rmsnorm_bwd(
    x, weight, dout, rstd, dx, dw_partial, db_partial, dresidual_out, dresidual, *, mean, is_layernorm, programs=2
):
    assert (mean is not None) == is_layernorm
    dstream, dweight, dbias = _gradients(dout, x, weight, mean, rstd)
    dstream = dstream if dresidual_out is None else dstream + dresidual_out.float()
    for result, to in (
        (dstream, dx),
        (dstream, dresidual),
        (dweight / programs, dw_partial),
        (dbias / programs, db_partial),
    ):
        if to is not None:
            to.copy_(result)


@pytest.fixture
def packages(monkeypatch):
    """Install modules with the functions above in place of the packages."""
    for name, members in {
        "liger_kernel.ops.layer_norm": (layer_norm_forward, layer_norm_backward),
        "liger_kernel.ops.rms_norm": (rms_norm_forward, rms_norm_backward),
        "liger_kernel.ops.fused_add_rms_norm": (fused_add_rms_norm_forward, fused_add_rms_norm_backward),
        "liger_kernel.ops.utils": (calculate_settings,),
        "liger_kernel.ops.fused_linear_cross_entropy": (fused_linear_cross_entropy_forward,),
        liger_cute.MODULE: (fused_scaled_cross_entropy_forward, fused_scaled_cross_entropy_backward),
        "liger_kernel.ops.rope": (rope_forward, rope_backward, _resolve_rotary_dim),
        "liger_kernel.ops.swiglu": (swiglu_fused_gate_up_forward, swiglu_fused_gate_up_backward),
        "quack.rmsnorm": (_rmsnorm_fwd, _rmsnorm_bwd),
        "quack.rotary": (_rotary_fwd_out,),
        "quack.gemm_interface": (gemm, gemm_act, gemm_dact, gemm_add_inplace),
        "quack.cross_entropy": (cross_entropy_fwd_out,),
        "quack.linear_cross_entropy": (
            scaled_exp_lce_supported,
            scaled_exp_linear_cross_entropy_fwd,
            _scaled_exp_lce_loss_only,
        ),
        "nvmath.linalg.advanced": (Matmul,),
        "gram_newton_schulz": (GramNewtonSchulz,),
    }.items():
        module = SimpleNamespace(**{member.__name__: member for member in members}, layernorm_bwd=None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["liger_kernel.ops.fused_linear_cross_entropy"]._CHUNK_MEM_CONST = 1
    names = "GELU_AUX", "GELU_AUX_BIAS", "DGELU", "DGELU_BGRAD"
    sys.modules["nvmath.linalg.advanced"].MatmulEpilog = dict(zip(names, names, strict=True))
    monkeypatch.setattr(nvmath, "plans", {})
    sys.modules["quack.gemm_interface"].gemm_symmetric = None
    gram.newton_schulz.cache_clear()
    monkeypatch.setitem(sys.modules, "helion.language", SimpleNamespace(register_block_size=None))
    norms = {"norm_fwd": helion_norm_fwd, "norm_bwd": helion_norm_bwd}
    norm_kernels = SimpleNamespace(**norms, kernel=lambda function, block_sizes, num_warps: function)
    loss_kernels = SimpleNamespace(kernel=lambda columns, write, num_warps: helion_cross_entropy)
    rope_kernels = SimpleNamespace(kernel=lambda block_sizes, num_warps: helion_rope)
    swiglus = {"swiglu_fwd": helion_swiglu_fwd, "swiglu_bwd": helion_swiglu_bwd}
    glu_kernels = SimpleNamespace(**swiglus, kernel=norm_kernels.kernel)
    all_kernels = {"norm": norm_kernels, "loss": loss_kernels, "rope": rope_kernels, "glu": glu_kernels}
    for op, kernels in all_kernels.items():
        monkeypatch.setitem(sys.modules, f"kernels.{op}._helion", kernels)
        # if an earlier test has imported the real one, `from kernels.norm import _helion` takes this attribute
        monkeypatch.setattr(contract(op), "_helion", kernels, raising=False)
    fake_cutile.install(monkeypatch)
    fake_tilelang.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "quack.rmsnorm_config", SimpleNamespace(get_sm_count=lambda N, device: 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("op", "impl", "case"),
    [(*pair, case) for pair in WRAPPED for case in CASES[pair[0]] if (*pair, case) not in REFUSED],
)
def test_a_wrapped_kernel_follows_the_rule(op, impl, case, dtype, packages):
    """Outputs and gradients follow the rule of kernels/check.py. The first case is also compiled, as one graph."""
    if dtype != ONE_DTYPE.get((op, impl), dtype):
        pytest.skip(f"{op}={impl} takes only {ONE_DTYPE[op, impl]} here")
    if op == "loss" and torch.cuda.is_available():
        pytest.skip("our Triton kernel scales the gradients, and takes no tensor of a CPU beside a GPU")
    function = getattr(backend(op, impl), op)
    inputs = case_inputs(op, case, dtype, CPU)
    for option in inputs.keys() & {"softcap", "activation"}:
        if missing_argument(function, option, op):
            pytest.skip(f"{op}={impl} takes no {option}")
    truth = outputs_and_gradients(contract(op).reference, inputs, dtype=torch.float64)
    eager = outputs_and_gradients(load(op, "eager", CPU), inputs)
    calls = [function]
    if case == CASES[op][0]:
        torch.compiler.reset()
        calls.append(torch.compile(function, fullgraph=True, backend="aot_eager"))
    for call in calls:
        assert_as_good_as_eager(outputs_and_gradients(call, inputs), eager, truth, inputs, dtype)


def test_quack_needs_an_even_width_in_16_bits(packages):
    with pytest.raises(Unavailable, match=r"norm=quack takes an even width for 16-bit dtypes, not 769: choose"):
        backend("norm", "quack").norm(**case_inputs("norm", "769", torch.bfloat16, CPU))


@pytest.mark.parametrize(
    ("shape", "chunk", "vocab", "dtype"),
    [
        ((33, 64), 128, 384, torch.bfloat16),
        ((33, 64), 8, 257, torch.bfloat16),
        ((33, 64), 8, 384, torch.float16),
        ((33, 64), 8, 257, torch.float16),  # seven zeros beside 257 logits would change the loss by 0.02
        *((shape, 128, 384, torch.bfloat16) for shape in ((128, 128), (100, 128), (33, 128), (256, 128))),
        ((228, 128), 256, 384, torch.bfloat16),
        ((300, 128), 256, 384, torch.bfloat16),
        ((256, 256), 256, 384, torch.bfloat16),
        ((100, 256), 256, 384, torch.bfloat16),
    ],
    ids=str,
)
def test_both_ways_of_quacks_loss(shape, chunk, vocab, dtype, packages, monkeypatch):
    """With exponentials and with logits. Some last chunks have one token, and some are square after padding.

    A target outside the vocabulary makes the loss NaN.
    """
    module = backend("loss", "quack")
    monkeypatch.setattr(module, "CHUNK", chunk)
    monkeypatch.setattr(sys.modules["quack.linear_cross_entropy"], "scaled_exp_lce_supported", lambda *_: chunk >= 128)
    inputs = contract("loss").inputs(shape, vocab=vocab, ignored=0.3, dtype=dtype)
    truth = outputs_and_gradients(contract("loss").reference, inputs, dtype=torch.float64)
    eager = outputs_and_gradients(load("loss", "eager", CPU), inputs)
    got = outputs_and_gradients(module.loss, inputs)
    assert_as_good_as_eager(got, eager, truth, inputs, dtype)
    with torch.no_grad():
        torch.testing.assert_close(module.loss(**inputs), got["out0"], rtol=1e-6, atol=0)
    for wrong in (vocab, -7):
        targets = inputs["targets"].clone()
        targets[5] = wrong
        results = outputs_and_gradients(module.loss, inputs | {"targets": targets})
        assert results["out0"].isnan()
        assert results["d_weight"].isfinite().all()


def test_what_quacks_matmuls_refuse(packages):
    for op, case, widths in (("linear", "769", "769 and 1025"), ("mlp", "odd", "65 and 131"), ("loss", "odd", "65")):
        message = f"^{op}=quack takes widths that are multiples of 8, not {widths}: choose kernels.{op}=eager$"
        with pytest.raises(Unavailable, match=message):
            getattr(backend(op, "quack"), op)(**case_inputs(op, case, torch.float32, CPU))


@pytest.mark.parametrize(
    ("op", "impl"), [("linear", "tilelang"), *((op, "quack") for op in ("linear", "mlp", "glu", "loss"))]
)
def test_the_dtypes_of_matmuls_that_load_by_tma(op, impl, packages):
    """Otherwise float64 would end inside the package, and float32 would be rounded to TF32."""
    inputs = case_inputs(op, {"loss": "some_ignored"}.get(op, "many_rows"), torch.float64, CPU)
    message = f"^{op}={impl} takes bfloat16 and float16, not torch.float64: choose kernels.{op}=eager$"
    with pytest.raises(Unavailable, match=message):
        getattr(backend(op, impl), op)(**inputs)
    on_a_gpu = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    assert refused_widths(on_a_gpu, 8) == "bfloat16 and float16, because its matmuls round float32 to TF32"
    assert refused_widths(torch.empty(8, dtype=torch.bfloat16), 8) is None


def test_what_tilelang_refuses(packages):
    with pytest.raises(Unavailable, match=r"^linear=tilelang takes widths that are multiples of 8, not 769 and 1025: "):
        backend("linear", "tilelang").linear(**case_inputs("linear", "769", torch.bfloat16, CPU))
    for op in ("norm", "rms_norm"):
        function = getattr(backend(op, "tilelang"), op)
        message = f"^{op}=tilelang takes float32, bfloat16 and float16, not torch.float64: choose kernels.{op}=eager$"
        with pytest.raises(Unavailable, match=message):
            function(**case_inputs(op, "768", torch.float64, CPU))
        message = f"^{op}=tilelang takes widths up to 16384, not 16392: choose kernels.{op}=eager$"
        with pytest.raises(Unavailable, match=message):
            function(**contract(op).inputs((1, 16392), dtype=torch.bfloat16))
    widths = "heads of up to 128 channels, in multiples of 16"
    check_what_attention_refuses(
        "tilelang",
        ({"shape": (1, 8, 1, 144)}, f"{widths}, not 144"),
        ({"shape": (1, 8, 1, 40)}, f"{widths}, not 40"),
        ({"shape": (1, 8, 1, 64), "dtype": torch.float32}, "bfloat16 and float16, not torch.float32"),
    )


def check_what_attention_refuses(impl, *refused):
    attention, make = backend("attention", impl).attention, contract("attention").inputs
    window = {"shape": (1, 8, 1, 64), "causal": False, "window": 4}, "windows only in causal attention"
    for options, reason in (*refused, window):
        with pytest.raises(Unavailable, match=f"^attention={impl} takes {reason}: choose attn=sdpa$"):
            attention(**make(**{"dtype": torch.bfloat16, **options}))
    for argument in ("lengths", "starts"):
        assert f"takes no {argument} (kernels/attention/__init__.py): choose attn=" in missing_argument(
            attention, argument
        )


@pytest.mark.parametrize("op", ["norm", "rms_norm", "linear", "attention"])
def test_tilelang_needs_a_compiler_and_for_its_matmuls_hopper(op, packages, monkeypatch, tmp_path):
    gpu, env = torch.device("cuda"), SimpleNamespace(CUDA_HOME="")
    monkeypatch.setitem(sys.modules, "tilelang.env", SimpleNamespace(env=env))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(tilelang, "compiler_unavailable", tilelang.compiler_unavailable.__wrapped__)
    monkeypatch.setattr(tilelang, "ffi_unavailable", lambda: None)
    remedy = "set CUDA_HOME to the CUDA toolkit, or pip install 'tilelang[nvcc]==0.1.15'"
    assert unavailable(op, "tilelang", gpu) == f"it needs nvcc, CUDA's compiler: {remedy}"
    env.CUDA_HOME = tmp_path
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch()
    hopper = f"it needs a Hopper GPU (compute capability 9.0): choose {override_key(op)}=triton"
    assert unavailable(op, "tilelang", gpu) == (hopper if op in ("linear", "attention") else None)


@pytest.mark.parametrize("found", ["0.1.10", "0.1.11", "0.1.12rc1", "0.1.12.post1", "0.1.13", "0.1.15.post2", "1.0"])
def test_tilelang_names_the_ffi_that_it_needs(found, packages, monkeypatch):
    """With a newer one, importing TileLang raises RuntimeError, so unavailable() does not import it."""
    monkeypatch.setattr(tilelang, "version", lambda name: {"tilelang": "0.1.15", "apache-tvm-ffi": found}[name])
    fits = found in ("0.1.11", "0.1.12rc1", "0.1.12.post1")
    reason = f"it needs apache-tvm-ffi 0.1.11 or 0.1.12, not {found}: pip install 'apache-tvm-ffi<0.1.13'"
    assert (unavailable("norm", "tilelang", CPU) == reason) != fits


@pytest.mark.parametrize("C", [5, 64, 576, 768, 769, 770, 1600, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("size", [2, 4])
def test_the_threads_of_a_row_in_tilelang(C, size):
    """They hold all of it, in vectors of 16 bytes where the width allows, and their registers fit."""
    module = backend("norm", "tilelang")
    vec = tilelang.vector_width(C, torch.empty(0, dtype={2: torch.bfloat16, 4: torch.float32}[size]))
    assert C % vec == 0
    assert vec * size == 16 or (vec * size < 16 and C % (2 * vec))
    for launch in (module.forward_launch(C, vec), module.backward_launch(C, vec, size)):
        threads = launch.lanes * launch.rows
        assert launch.vec == vec
        assert launch.lanes & (launch.lanes - 1) == 0
        assert 128 <= threads <= 512
        held = -(-C // (vec * launch.lanes)) * vec
        assert held <= (40 if launch.programs else 72)
        assert threads * (launch.programs or 1) <= 512


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 11, 64, 128, 1000])
@pytest.mark.parametrize("C", [5, 768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_thread_has_rows_of_a_sum_in_tilelang(rows, C, dtype):
    """A thread loads four rows at once, 16 bytes of each where the width allows; a tile has at most 128 rows."""
    tile = tilelang.sum_tile(torch.empty(rows, C, dtype=dtype, device="meta"))
    assert tile.vec * dtype.itemsize == (16 if C == 768 else dtype.itemsize)
    assert tile.rows * tile.lanes == 4 * 256
    assert 4 <= tile.rows <= 128
    assert tile.rows == 4 or tile.rows < 2 * rows


def test_quack_outside_of_site_packages_says_so(packages, monkeypatch):
    """There it cannot import its epilogues: it identifies CuTe DSL's functions by what they use, such as a logger."""

    def import_module(name):
        raise TypeError("epilogue fn depends on <Logger CUTE_DSL (Level 51)> (type logging.Logger), which has no key")

    monkeypatch.setattr(importlib, "import_module", import_module)
    reason = quack.location_unavailable.__wrapped__()
    assert reason == (
        "it needs QuACK and CuTe DSL in a folder site-packages (epilogue fn depends on <Logger CUTE_DSL (Level 51)> "
        "...): move them, or pip install 'quack-kernels[cu13]>=0.6.5'"
    )


def test_a_quack_that_lacks_what_a_backend_needs_says_so(packages, monkeypatch):
    """Its epilogues, and of the loss each symbol."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(quack, "location_unavailable", quack.location_unavailable.__wrapped__)
    gpu, loss, install = torch.device("cuda"), backend("loss", "quack"), ": pip install 'quack-kernels[cu13]>=0.6.5'"
    monkeypatch.setitem(sys.modules, "quack.epilogue.library", None)
    for op in ("linear", "mlp", "glu", "loss"):
        reason = unavailable(op, "quack", gpu)
        assert "quack.epilogue.library" in reason
        assert reason.endswith(install)
    monkeypatch.setitem(sys.modules, "quack.epilogue.library", SimpleNamespace(identity_epi=None))
    assert unavailable("loss", "quack", gpu) is None
    for symbol in loss.SYMBOLS:
        module, _, name = symbol.rpartition(".")
        with monkeypatch.context() as without:
            without.delattr(sys.modules[module], name)
            reason = unavailable("loss", "quack", gpu)
            assert name in reason
            assert reason.endswith(install)
            assert unavailable("mlp", "quack", gpu) is None


def test_what_quack_refuses_of_glu_and_rope(packages):
    for case, reason in (("bias", "no biases"), ("odd", "widths that are multiples of 8, not 65 and 131")):
        with pytest.raises(Unavailable, match=f"^glu=quack takes {reason}: choose kernels.glu=eager$"):
            backend("glu", "quack").glu(**case_inputs("glu", case, torch.float32, CPU))
    with pytest.raises(Unavailable, match=r"^rope=quack takes a multiple of 8 channels a head, .* not 30: choose"):
        backend("rope", "quack").rope(**case_inputs("rope", "D=30", torch.float32, CPU))


@pytest.mark.parametrize("case", ["768", "1025", "8192", "narrow", "many_rows", "769"])
def test_other_widths_in_cutile(case, packages):
    """The rows and the columns beyond a tensor's edge, and the parts of a sum."""
    for op in ("norm", "rms_norm", "linear"):
        for dtype in (torch.float32, torch.bfloat16) if case in contract(op).CASES else ():
            inputs = case_inputs(op, case, dtype, CPU)
            truth = outputs_and_gradients(contract(op).reference, inputs, dtype=torch.float64)
            eager = outputs_and_gradients(load(op, "eager", CPU), inputs)
            got = outputs_and_gradients(getattr(backend(op, "cutile"), op), inputs)
            assert_as_good_as_eager(got, eager, truth, inputs, dtype)


@pytest.mark.parametrize("impl", ["cutile", "tilelang"])
@pytest.mark.parametrize(("keys", "window"), [(128, 1), (300, 2)])
def test_queries_beyond_the_last_one(impl, keys, window, packages):
    """Rows beyond the last query must add nothing. With window=1 their only key would be beyond Tk.

    With 300 keys no query sees a key of the first tile.
    """
    inputs = contract("attention").inputs((1, 5, 2, 64), keys=keys, window=window, dtype=torch.float16)
    assert why_wrong("attention", impl, backend("attention", impl).attention, inputs, torch.float16) is None


@pytest.mark.parametrize("options", [{}, {"keys": 200, "window": 70}, {"causal": False, "keys": 150}], ids=str)
@pytest.mark.parametrize("D", [16, 48, 64, 128])
def test_tiles_of_attention_in_tilelang(D, options, packages):
    """Several tiles of queries and of keys, of every size, for heads that share keys."""
    inputs = contract("attention").inputs(
        (1, 131, 4, D), kv_heads=2, packed=not options, **options, dtype=torch.float16
    )
    assert why_wrong("attention", "tilelang", backend("attention", "tilelang").attention, inputs, torch.float16) is None


@pytest.mark.parametrize("language", [fake_cutile, fake_tilelang])
def test_a_kernel_is_of_one_op(language, packages):
    """A run's proof finds the kernels of an op by their names. In commit 839da668 linear's were also the loss's."""
    impl, names = language.__name__.rpartition("_")[2], {}
    for op in sorted({op for op, name in WRAPPED if name == impl} - {"rms_norm"}):  # it has the kernels of norm
        language.launched.clear()
        inputs = case_inputs(op, CASES[op][0], torch.bfloat16, CPU)
        outputs_and_gradients(getattr(backend(op, impl), op), inputs)
        names[op] = set(language.launched)
        family = "|".join(family_patterns({op: impl})[op])
        assert all(re.search(family, name) for name in names[op])
    for op, other in itertools.permutations(names, 2):
        runs = "|".join(backend(op, impl).RUNS)
        assert any(re.search(runs, name) for name in names[op])
        assert not any(re.search(runs, name) for name in names[other]), (op, other)


def test_only_what_tma_cannot_read_is_copied():
    """A single row may have any stride for is_contiguous(), but not for TMA. 4 bytes are no multiple of 16."""
    for shape in ((5,), (3, 8), (2, 5, 2, 64)):
        tensor = torch.empty(shape)
        assert align(tensor) is tensor
    for tensor in (torch.empty(1, 16)[:, :8], torch.empty(9)[1:], torch.empty(2, 5, 2, 64).transpose(1, 2)):
        assert align(tensor).is_contiguous()
        assert align(tensor).data_ptr() != tensor.data_ptr()


def test_scores_far_below_zero_in_tilelang(packages):
    """exp2(0 - lse) of a key beyond Tk, whose score would be 0, is inf: it must be masked in dq without causal=True."""
    inputs = contract("attention").inputs((1, 5, 2, 64), causal=False, dtype=torch.float16)
    with torch.no_grad():
        inputs["q"].copy_(4 + inputs["q"] / 8)
        inputs["k"].copy_(-4 + inputs["k"] / 8)
    assert why_wrong("attention", "tilelang", backend("attention", "tilelang").attention, inputs, torch.float16) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [case for case, given in contract("loss").CASES.items() if "fp8" not in given])
def test_the_loss_in_cutile_in_chunks(case, dtype, packages, monkeypatch):
    """Chunks have one token, or of many tokens 1024, and add up to dweight. Without gradients the loss is the same."""
    module, inputs = backend("loss", "cutile"), case_inputs("loss", case, dtype, CPU)
    tokens, given = inputs["targets"].numel(), contract("loss").CASES[case]
    chunk = 1024 if tokens > 1024 else 1
    monkeypatch.setattr(module, "LOGITS_BYTES", chunk * given["vocab"] * dtype.itemsize)
    monkeypatch.setattr(backend("linear", "cutile"), "multiprocessors", lambda device: 132)  # of an H200
    truth = outputs_and_gradients(contract("loss").reference, inputs, dtype=torch.float64)
    eager = outputs_and_gradients(load("loss", "eager", CPU), inputs)
    got = outputs_and_gradients(module.loss, inputs)
    assert_as_good_as_eager(got, eager, truth, inputs, dtype)
    with torch.no_grad():
        assert torch.equal(module.loss(**inputs), got["out0"])


def test_targets_outside_the_vocabulary_in_cutile(packages):
    """They make the loss NaN. A target that is ignored may be any number, also a word's."""
    loss = backend("loss", "cutile").loss
    inputs = contract("loss").inputs((5, 64), vocab=257, dtype=torch.bfloat16)
    for wrong in (257, 2**32 + 3, -7):
        inputs["targets"][3] = wrong
        assert loss(**inputs).isnan()
    for wrong in (-7, 257):
        inputs["targets"][3] = wrong
        counted = {name: tensor[[0, 1, 2, 4]] for name, tensor in inputs.items() if name != "weight"}
        expected = loss(**counted, weight=inputs["weight"])
        torch.testing.assert_close(loss(**inputs, ignore_index=wrong), expected, rtol=1e-6, atol=0)
    inputs["targets"][:] = torch.tensor([7, 8, 7, 9, 10])
    others = outputs_and_gradients(contract("loss").reference, inputs | {"ignore_index": 7}, dtype=torch.float64)
    got = outputs_and_gradients(loss, inputs | {"ignore_index": 7})
    assert not got["d_x"][[0, 2]].any()
    torch.testing.assert_close(got["out0"].double(), others["out0"], rtol=2e-3, atol=0)


def test_what_cutile_refuses(packages, monkeypatch):
    for op, options in {"norm": {}, "rms_norm": {}, "linear": {"out": 64}, "loss": {"vocab": 64}}.items():
        inputs = contract(op).inputs((2, 64), **options, dtype=torch.float64)
        message = f"^{op}=cutile takes float32, bfloat16 and float16, not torch.float64: choose kernels.{op}=eager$"
        with pytest.raises(Unavailable, match=message):
            getattr(backend(op, "cutile"), op)(**inputs)
    with pytest.raises(Unavailable, match=r"^norm=cutile takes widths up to 16384, not 16385: choose "):
        backend("norm", "cutile").norm(**contract("norm").inputs((1, 16385), dtype=torch.float32))
    check_what_attention_refuses(
        "cutile",
        ({"shape": (1, 8, 1, 136)}, "heads of up to 128 channels, not 136"),
        ({"shape": (1, 8, 1, 64), "dtype": torch.float64}, "float32, bfloat16 and float16, not torch.float64"),
    )
    install = "pip install 'nvidia-cuda-tileiras>=13.3'"
    for version, reason in (
        (None, f"it needs tileiras of CUDA 13.3 or newer, and cuda.tile finds none: {install}"),
        ("13.2", f"it needs tileiras of CUDA 13.3 or newer, and this is 13.2: {install}"),
        ("13.3", None),
        ("14.0", None),
    ):
        monkeypatch.setattr(cutile, "compiler_version", lambda version=version: version)
        assert cutile.compiler_unavailable() == reason


@pytest.mark.parametrize(
    ("text", "version"), [("Cuda compilation tools, release 13.4, V13.4.92", "13.4"), ("tileiras", None), (None, None)]
)
def test_the_version_of_tileiras(text, version, tmp_path, monkeypatch, packages):
    compiler = tmp_path / "tileiras"

    def find():
        if text is None:
            raise FileNotFoundError("'tileiras' compiler not found")
        compiler.write_text(f"#!/bin/sh\necho '{text}'\n")
        compiler.chmod(0o755)
        return SimpleNamespace(path=str(compiler))

    monkeypatch.setitem(sys.modules, "cuda.tile._compile", SimpleNamespace(_find_compiler_bin=find))
    assert cutile.compiler_version.__wrapped__() == version


@pytest.mark.parametrize("impl", ["liger", "quack", "helion"])
def test_a_rotation_without_a_norm_says_so(impl, packages):
    message = rf"^kernels\.rope\.{impl} takes no q_weight \(kernels/rope/__init__\.py\): choose kernels\.rope=.*triton"
    assert re.match(message, missing_argument(backend("rope", impl).rope, "q_weight", "rope"))


def test_nvmath_plans_each_shape_once(packages):
    """A plan works for new tensors of its shape, and keeps no tensors. Widths must be multiples of 8."""
    made = Matmul.made
    for case in ("no_bias", "many_rows"):
        inputs = case_inputs("mlp", case, torch.float32, CPU)
        for _ in range(2):
            inputs["x"].detach().normal_()
            torch.testing.assert_close(nvmath.mlp(**inputs), contract("mlp").reference(**inputs))
    assert Matmul.made - made == 2
    assert all(plan.a is None and plan.inputs is None for plan in nvmath.plans.values())
    for case in ("769", "odd"):
        with pytest.raises(
            Unavailable, match=r"^mlp=nvmath takes widths that are multiples of 8, not \d+ and \d+: choose"
        ):
            nvmath.mlp(**case_inputs("mlp", case, torch.float32, CPU))


def test_liger_cute_takes_bfloat16(packages):
    with pytest.raises(Unavailable, match=r"^loss=liger_cute takes bfloat16, not torch.float32: choose "):
        liger_cute.loss(**case_inputs("loss", "odd", torch.float32, CPU))


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, packages):
    """The message is one line. It names a missing package before a missing GPU."""
    for op, impl in WRAPPED:
        if impl != "helion" or op == "loss":  # the others in Helion also run in Triton's interpreter
            assert re.match(r"it needs (an NVIDIA|a Hopper) GPU .*compute capability", unavailable(op, impl, CPU))
    packages = ("liger_kernel", "quack", "nvmath", "helion", "gram_newton_schulz", "cuda", "tilelang")
    for name in list(sys.modules):
        if name.split(".")[0] in packages:
            monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    for op, impl, package in (
        ("norm", "liger", "liger-kernel"),
        ("norm", "helion", "helion==1.5.0"),
        ("rms_norm", "liger", "liger-kernel"),
        ("rms_norm", "helion", "helion==1.5.0"),
        ("rms_norm", "quack", "quack-kernels[cu13]>=0.6.5"),
        ("rope", "liger", "liger-kernel>=0.8.5"),
        ("rope", "helion", "helion==1.5.0"),
        ("rope", "quack", "quack-kernels[cu13]>=0.6.5"),
        ("glu", "liger", "liger-kernel>=0.8.5"),
        ("glu", "helion", "helion==1.5.0"),
        *((op, "quack", "quack-kernels[cu13]>=0.6.5") for op in ("glu", "linear", "mlp", "loss")),
        ("loss", "helion", "helion==1.5.0"),
        *((op, "cutile", "cuda-tile>=1.7,<1.8") for op in ("norm", "rms_norm", "linear", "attention", "loss")),
        *((op, "tilelang", "tilelang==0.1.15") for op in ("norm", "rms_norm", "linear", "attention")),
        ("mlp", "nvmath", "nvmath-python>=1.0"),
        ("loss", "liger", "liger-kernel"),
        ("loss", "liger_large", "liger-kernel>=0.8.5"),
        ("loss", "liger_cute", "liger-kernel[cutedsl]>=0.8.5"),
        ("norm", "quack", "quack-kernels[cu13]>=0.6.5"),
        ("loss", "torch_chunked", "torch>=2.13"),
        ("muon", "gram", "gram-newton-schulz==0.1.6"),
    ):
        with pytest.raises(Unavailable) as raised:
            load(op, impl, CPU)
        message = str(raised.value)
        assert message.startswith(f"{op}={impl} cannot run here: it needs ")
        assert message.endswith(f": pip install '{package}'")
        assert "\n" not in message


def test_a_helion_that_cannot_be_imported_is_named_with_the_version_that_can(monkeypatch):
    """Helion 1.5.1 imports IntelGPUError, which torch 2.11 does not have."""
    error = ImportError("cannot import name 'IntelGPUError' from 'torch._inductor.runtime.triton_compat'")

    class Broken:
        def find_spec(self, name, *_):
            if name == "helion":
                raise error

    for name in [name for name in sys.modules if name.split(".")[0] == "helion"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    for op in ("norm", "loss"):
        with pytest.raises(Unavailable) as raised:
            load(op, "helion", CPU)
        assert str(raised.value) == (
            f"{op}=helion cannot run here: it needs helion==1.5.0 ({error}): pip install 'helion==1.5.0'"
        )


@pytest.mark.exhaustive
@pytest.mark.skipif(package_unavailable("", "cuda.tile.compilation.export_kernel") is not None, reason="no cuda.tile")
def test_our_kernels_in_cutile_compile_for_hopper():
    command = [sys.executable, "-m", "tests.kernels.compile_cutile"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("registers") == 151


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("helion") is None, reason="Helion is not installed")
@pytest.mark.parametrize(("interpret", "word", "lines"), [("0", "registers", 29), ("1", "are right", 3)])
def test_helions_kernels_compile_for_hopper_and_its_loss_is_right(interpret, word, lines):
    command = [sys.executable, "-m", "tests.kernels.compile_helion"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "HELION_INTERPRET": interpret}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(word) == lines


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("tilelang") is None, reason="TileLang is not installed")
@pytest.mark.parametrize(("program", "lines"), [("compile_tilelang", 119), ("emulate_tilelang", 11)])
def test_tilelangs_kernels_compile_for_hopper_and_attention_is_right_on_a_cpu(program, lines):
    command = [sys.executable, "-m", f"tests.kernels.{program}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("tilelang") == lines


def xqa_batch_decode_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, *, bmm1_scale, bmm2_scale, kv_layout
):
    """One query of each sequence, (B, H, D), over keys and values in pages, (pages, rows, Hkv, D) each."""
    assert kv_layout == "NHD"
    assert (workspace_buffer.dtype, block_tables.dtype, seq_lens.dtype) == (torch.uint8, torch.int32, torch.uint32)
    assert not workspace_buffer[: 8 << 20].any()
    assert query.is_contiguous()
    out = torch.empty_like(query)
    for b, (pages, length) in enumerate(zip(block_tables.tolist(), seq_lens.tolist(), strict=True)):
        assert length <= max_seq_len
        keys, values = (
            torch.cat([cache[page] for page in pages])[:length].repeat_interleave(query.shape[1] // cache.shape[2], 1)
            for cache in kv_cache
        )
        scores = torch.einsum("hd,nhd->hn", query[b].float(), keys.float()) * bmm1_scale
        out[b] = bmm2_scale * torch.einsum("hn,nhd->hd", scores.softmax(-1), values.float())
    return out


@pytest.fixture
def flashinfer(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(__version__="0.6.12"))
    stand_in = SimpleNamespace(xqa_batch_decode_with_kv_cache=xqa_batch_decode_with_kv_cache)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", stand_in)
    return backend("decode", "flashinfer")


@pytest.mark.parametrize(
    "case", ["one", "empty_cache", "ragged", "many_keys", "rope", "gqa", "no_bias", "ring", "llama", "qwen3_ring"]
)
def test_attention_of_flashinfer(case, flashinfer):
    """The logits follow the rule of kernels/check.py, and the cache of the first layer gets the same rows."""
    arguments = decode.inputs(**decode.CASES[case], dtype=torch.bfloat16)
    weights, tokens, cache = arguments.values()
    exact = decode.to_float64(arguments)
    own = cache._replace(kv=[tuple(tensor.clone() for tensor in pair) for pair in cache.kv])
    truth = {"logits": decode.reference(**exact)}
    expected = {"logits": decode.reference(**arguments)}
    packed = flashinfer.pack(decode.Model(None, lambda: weights), own)
    got = {"logits": flashinfer.decode(packed, tokens, own)}
    assert broken_rule(got, expected, truth, {"w": weights.wte}, torch.bfloat16) is None
    assert all(torch.equal(*rows) for rows in zip(own.kv[0], cache.kv[0], strict=True))


def test_what_flashinfer_cannot_do(flashinfer, monkeypatch):
    def reason(case, dtype=torch.bfloat16, **changes):
        weights, tokens, cache = decode.inputs(**decode.CASES[case] | changes, dtype=dtype).values()
        with pytest.raises(Unavailable) as error:
            flashinfer.decode(flashinfer.pack(decode.Model(None, lambda: weights), cache), tokens, cache)
        return str(error.value)

    assert "takes a cache in bfloat16 or float16, not in torch.float32" in reason("one", torch.float32)
    assert "takes a cache in bfloat16 or float16, not in torch.float8_e4m3fn" in reason("fp8")
    assert "needs a multiple of 16 channels a head, and up to 256 channels, not 20" in reason("odd_width")
    assert "needs a cache of a multiple of 16 rows, not of 40" in reason("one", rows=40)
    assert "makes one token at a time, not 4" in reason("several_tokens")
    assert unavailable("decode", "flashinfer", CPU).startswith("it needs an NVIDIA GPU of compute capability")
    monkeypatch.setitem(sys.modules, "flashinfer.decode", None)
    assert "pip install 'flashinfer-python'" in unavailable("decode", "flashinfer", CPU)
