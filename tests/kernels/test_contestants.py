"""Backends that wrap other people's kernels: the code around their functions, and the error if a package is missing.

The packages need a GPU. Here plain PyTorch replaces the functions that the backends call, with the signatures of
liger-kernel 0.8.5, quack-kernels 0.6.5 and flashinfer-python 0.6.12. On a GPU with the packages, test_backends.py and
test_decode.py test the real functions.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from kernels import decode
from kernels.check import broken_rule
from kernels.registry import Unavailable, backend, contract, load, unavailable
from tests.kernels.test_backends import DTYPES, assert_as_good_as_eager, case_inputs, outputs_and_gradients

CPU = torch.device("cpu")
WRAPPED = [("norm", "liger"), ("norm", "quack"), ("loss", "liger")]
CASES = {
    "norm": ["fp32_residual", "fp32_embedding", "no_bias", "non_contiguous"],
    "loss": ["some_ignored", "all_ignored", "non_contiguous"],
}


def _normalize(stream, weight, bias, eps):
    mean, variance = stream.float().mean(-1), stream.float().var(-1, unbiased=False)
    rstd = torch.rsqrt(variance + eps)
    y = (stream.float() - mean[:, None]) * rstd[:, None] * weight.float()
    return y if bias is None else y + bias.float(), mean, rstd


def _gradients(dy, stream, weight, mean, rstd):
    xhat, dy = (stream.float() - mean[:, None]) * rstd[:, None], dy.float()
    g = dy * weight.float()
    dstream = rstd[:, None] * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    return dstream, (dy * xhat).sum(0), dy.sum(0)


def layer_norm_forward(X, W, B, eps):
    y, mean, rstd = _normalize(X.view(-1, X.shape[-1]), W, B, eps)
    return y.to(X.dtype), X, mean, rstd, 1024, 4


def layer_norm_backward(dY, X, W, B, Mean, RSTD):
    results = _gradients(dY.view(-1, dY.shape[-1]), X, W, Mean, RSTD)
    return tuple(result.to(t.dtype) for result, t in zip(results, (X, W, B), strict=True))


def fused_linear_cross_entropy_forward(_input, weight, target, *, ignore_index, accum_dtype):
    counts = (target != ignore_index).unsqueeze(1)
    log_probs = (_input @ weight.T).float().log_softmax(-1)
    onehot = torch.arange(len(weight)) == target.unsqueeze(1)
    loss = -(log_probs * (onehot & counts)).sum() / max(1, counts.sum().item())
    if not _input.requires_grad:
        return loss, None, None, None, torch.zeros_like(_input), None, None
    dlogits = ((log_probs.exp() - onehot.float()) * counts / counts.sum().clamp(min=1)).to(_input.dtype)
    dweight = (dlogits.T.to(accum_dtype) @ _input.to(accum_dtype)).to(weight.dtype)
    return loss, None, None, None, dlogits @ weight, dweight, None


def _rmsnorm_fwd(x, weight, out, bias, rstd, mean, residual, residual_out, eps, is_layernorm):
    stream = x.float() if residual is None else x.float() + residual.float()
    for result, to in zip(_normalize(stream, weight, bias, eps), (out, mean, rstd), strict=True):
        to.copy_(result)
    if residual_out is not None:
        residual_out.copy_(stream)


def _rmsnorm_bwd(x, weight, dout, rstd, dx, dw_partial, db_partial, dresidual_out, dresidual, *, mean, is_layernorm):
    dstream, dweight, dbias = _gradients(dout, x, weight, mean, rstd)
    dstream = dstream if dresidual_out is None else dstream + dresidual_out.float()
    for result, to in ((dstream, dx), (dstream, dresidual), (dweight / 2, dw_partial), (dbias / 2, db_partial)):
        if to is not None:
            to.copy_(result)


@pytest.fixture
def packages(monkeypatch):
    """Install modules with the functions above in place of the packages."""
    for name, members in {
        "liger_kernel.ops.layer_norm": (layer_norm_forward, layer_norm_backward),
        "liger_kernel.ops.fused_linear_cross_entropy": (fused_linear_cross_entropy_forward,),
        "quack.rmsnorm": (_rmsnorm_fwd, _rmsnorm_bwd),
    }.items():
        module = SimpleNamespace(**{member.__name__: member for member in members}, layernorm_bwd=None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "quack.rmsnorm_config", SimpleNamespace(get_sm_count=lambda N, device: 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "impl", "case"), [(*pair, case) for pair in WRAPPED for case in CASES[pair[0]]])
def test_a_wrapped_kernel_follows_the_rule(op, impl, case, dtype, packages):
    """Outputs and gradients follow the rule of kernels/check.py, also in one graph of torch.compile."""
    function = getattr(backend(op, impl), op)
    inputs = case_inputs(op, case, dtype, CPU)
    truth = outputs_and_gradients(contract(op).reference, inputs, dtype=torch.float64)
    eager = outputs_and_gradients(load(op, "eager", CPU), inputs)
    torch.compiler.reset()
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        assert_as_good_as_eager(outputs_and_gradients(call, inputs), eager, truth, inputs, dtype)


def test_quack_needs_an_even_width_in_16_bits(packages):
    with pytest.raises(Unavailable, match=r"norm=quack needs an even width for 16-bit dtypes, not 769: choose"):
        backend("norm", "quack").norm(**case_inputs("norm", "769", torch.bfloat16, CPU))


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, packages):
    """The message is one line. It names a missing package before a missing GPU."""
    for op, impl in WRAPPED:
        assert unavailable(op, impl, CPU).startswith("it needs an NVIDIA GPU of compute capability")
    for name in list(sys.modules):
        if name.split(".")[0] in ("liger_kernel", "quack"):
            monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    for op, impl, package in (
        ("norm", "liger", "liger-kernel"),
        ("loss", "liger", "liger-kernel"),
        ("norm", "quack", "quack-kernels[cu13]>=0.6.2"),
        ("loss", "torch_chunked", "torch>=2.13"),
    ):
        with pytest.raises(Unavailable) as raised:
            load(op, impl, CPU)
        message = str(raised.value)
        assert message.startswith(f"{op}={impl} cannot run here: it needs ")
        assert message.endswith(f": pip install '{package}'")
        assert "\n" not in message


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


@pytest.mark.parametrize("case", ["one", "empty_cache", "ragged", "many_keys", "rope", "gqa", "no_bias", "ring"])
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
