"""attn=flash: how each version is called, by stand-ins that follow its documentation, and which one is taken.

The kernels themselves run where an NVIDIA GPU is: there the generic tests and the last ones here call them.
"""

import functools
import importlib
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch

from kernels import attention as contract
from kernels.attention import _flash, flash
from kernels.registry import AttnConfig, KernelError, KernelsConfig, Unavailable, describe, label, load, resolve
from tests.kernels.test_backends import assert_as_good_as_eager, case_inputs, evaluate

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CASES = [case for case in contract.CASES if "documents" not in contract.CASES[case]]


def documented(q, k, v, scale, causal, left=-1, right=-1, lengths=None):
    """out and lse. flash-attn's README: causal is aligned bottom right, and with a window "query at position i will
    only attend to keys between [i + seqlen_k - seqlen_q - window_size[0], i + seqlen_k - seqlen_q + window_size[1]]".
    """
    heads, queries = q.shape[2], q.shape[1]
    k, v = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    for b in range(len(q)):
        keys = k.shape[1] if lengths is None else int(lengths[b])
        for i in range(queries):
            here = i + keys - queries
            last = here if causal else here + right if right >= 0 else keys - 1
            scores[b, :, i, last + 1 :] = -math.inf
            scores[b, :, i, : max(0, here - left) if left >= 0 else 0] = -math.inf
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def gradients(dout, q, k, v, *limits):
    """dq, dk, dv; in a thread of its own, as a custom operator runs below autograd."""

    def differentiate():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(documented(*leaves, *limits)[0], leaves, dout)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(differentiate).result()


def checked(dout, out, lse):
    """What is handed to a backward is what its forward gave."""
    assert dout.shape == out.shape
    assert lse.shape == (out.shape[0], out.shape[2], out.shape[1])


def install(monkeypatch, name, **functions):
    """A module of this name, and packages above it."""
    for end in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:end])
        module = ModuleType(part)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, part, module)
    vars(module).update(functions)


def fa4(monkeypatch):
    """Signatures of flash_attn/cute/interface.py, 4.0.0b36, as far as they are used; its windows are ints or None."""

    def forward(q, k, v, *, seqused_k=None, softmax_scale=None, causal=False, window_size_left=None, return_lse=False):
        assert return_lse
        left = -1 if window_size_left is None else window_size_left
        return (*documented(q, k, v, softmax_scale, causal, left, -1, seqused_k), None, None, None)

    def backward(q, k, v, out, dout, lse, softmax_scale=None, causal=False, *, window_size_left=None, dq, dk, dv):
        checked(dout, out, lse)
        left = -1 if window_size_left is None else window_size_left
        for grad, value in zip((dq, dk, dv), gradients(dout, q, k, v, softmax_scale, causal, left), strict=True):
            grad.copy_(value)
        return dq, dk, dv

    install(monkeypatch, "flash_attn.cute.interface", _flash_attn_fwd=forward, _flash_attn_bwd=backward)


def fa3(monkeypatch):
    """The operators' schemas in hopper/flash_api.cpp, as far as they are used."""
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, *, Tensor? seqused_k=None, float? softmax_scale=None, bool is_causal=False, "
        "int window_size_left=-1, int window_size_right=-1, int num_splits=0) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    library.define(
        "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq=None, "
        "Tensor(b!)? dk=None, Tensor(c!)? dv=None, *, float? softmax_scale=None, bool is_causal=False, "
        "int window_size_left=-1, int window_size_right=-1) -> Tensor"
    )

    def forward(q, k, v, *, softmax_scale, is_causal=False, window_size_left=-1, seqused_k=None, num_splits=0):
        assert num_splits == (seqused_k is None)
        limits = window_size_left, -1, seqused_k
        return (*documented(q, k, v, softmax_scale, is_causal, *limits), q.new_empty(0), q.new_empty(0))

    def backward(dout, q, k, v, out, lse, dq, dk, dv, *, softmax_scale, is_causal=False, window_size_left=-1):
        checked(dout, out, lse)
        values = gradients(dout, q, k, v, softmax_scale, is_causal, window_size_left)
        for grad, value in zip((dq, dk, dv), values, strict=True):
            grad.copy_(value)
        return lse.clone()

    library.impl("fwd", forward, "CompositeExplicitAutograd")
    library.impl("bwd", backward, "CompositeExplicitAutograd")
    install(monkeypatch, "flash_attn_interface")
    return library


def fa2(monkeypatch):
    """Signatures of flash_attn/flash_attn_interface.py, 2.8."""

    def forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0, 0, None, False)
        out, lse = documented(q, k, v, softmax_scale, causal, window_size_left, window_size_right)
        return out, lse, None, None

    def backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        checked(dout, out, softmax_lse)
        values = gradients(dout, q, k, v, softmax_scale, causal, window_size_left, window_size_right)
        for grad, value in zip((dq, dk, dv), values, strict=True):
            grad.copy_(value)

    def with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, softmax_scale, causal, window_size, return_softmax_lse=False
    ):
        assert return_softmax_lse
        return documented(q, k_cache, v_cache, softmax_scale, causal, *window_size, cache_seqlens)

    names = {"_flash_attn_forward": forward, "_flash_attn_backward": backward, "flash_attn_with_kvcache": with_kvcache}
    install(monkeypatch, "flash_attn.flash_attn_interface", **names)


def built_in(monkeypatch):
    """PyTorch's own operators, with a CPU kernel for the time of the test: what they are given passes their schemas."""
    library = torch.library.Library("aten", "IMPL")

    def forward(
        q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
        window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, **_,
    ):  # fmt: skip
        assert (dropout_p, return_debug_mask, alibi_slopes) == (0, False, None)
        limits = scale, is_causal, window_size_left, window_size_right
        empty = q.new_empty(0)
        if cum_seq_q is None:
            assert seqused_k is None  # it would not be read
            return (*documented(q, k, v, *limits), empty, empty, empty)
        outs, lses = [], []
        for b, (start, end, first) in enumerate(zip(cum_seq_q[:-1], cum_seq_q[1:], cum_seq_k[:-1], strict=True)):
            assert end - start == max_q
            keys = slice(first, first + max_k)
            given = (t[None] for t in (q[start:end], k[keys], v[keys]))
            out, lse = documented(*given, *limits, seqused_k[b : b + 1])
            outs.append(out[0])
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, 1), empty, empty, empty  # (B Tq, H, D), (H, B Tq)

    def backward(
        dout, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
        scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert cum_seq_q is None
        assert cum_seq_k is None
        checked(dout, out, lse)
        return gradients(dout, q, k, v, scale, is_causal, window_size_left, window_size_right)

    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    return library


STAND_INS = {"fa4": fa4, "fa3": fa3, "fa2": fa2, "torch": built_in}


def forget():
    for cached in (_flash.why_not, _flash.newest, flash.loaded):
        cached.cache_clear()


@pytest.fixture
def stand_in(monkeypatch):
    """stand_in("fa4", ...): these versions are installed."""
    forget()
    for package in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, package, None)
    kept = []
    yield lambda *names: kept.extend(STAND_INS[name](monkeypatch) for name in names)
    for library in filter(None, kept):
        library._destroy()
    forget()


@pytest.fixture
def capability(monkeypatch):
    """capability(9, 0): that of every GPU."""

    def having(major, minor):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        forget()

    having(9, 0)
    return having


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", _flash.VERSIONS)
def test_each_version_is_called_as_documented(name, case, stand_in, monkeypatch):
    """In float64 the contract's formula, outputs and gradients, through the custom operators."""
    stand_in(name)
    monkeypatch.setattr(flash, "chosen", lambda version, q: version)
    inputs = case_inputs("attention", case, torch.float64, "cpu")
    truth = evaluate(contract.reference, inputs)
    got = evaluate(functools.partial(flash.attention, version=name), inputs)
    for key, exact in truth.items():
        torch.testing.assert_close(got[key], exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("alike", [True, False])
def test_a_cache_is_not_copied(stand_in, monkeypatch, rows, alike):
    """Generation gives the first keys of longer tensors: the built-in kernel reads them where they are."""
    stand_in("torch")
    monkeypatch.setattr(flash, "chosen", lambda version, q: version)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, n, 4, 8, generator=draw, dtype=torch.float64) for n in (1, 90, 90))
    k, v = k[:, :40], v[:, :40] if alike else v[:, :40].contiguous()
    lengths = torch.tensor([3, 17, 40][:rows], dtype=torch.int32)
    got = flash.attention(q, k, v, lengths=lengths, version="torch")
    torch.testing.assert_close(got, contract.reference(q, k, v, lengths=lengths))
    assert (_flash.packed(k, v)[0].data_ptr() == k.data_ptr()) == (alike or rows == 1)


@pytest.mark.parametrize("case", ["64", "gqa", "lengths", "window", "packed"])
def test_compiled_is_uncompiled(stand_in, monkeypatch, case):
    stand_in("fa4")
    monkeypatch.setattr(flash, "chosen", lambda version, q: "fa4")
    inputs = case_inputs("attention", case, torch.float32, "cpu")
    torch.compiler.reset()
    got = evaluate(torch.compile(flash.attention, fullgraph=True), inputs)
    for key, value in evaluate(flash.attention, inputs).items():
        torch.testing.assert_close(got[key], value)


def test_what_is_kept_for_the_backward():
    """q, k, v and out, and 4 bytes a query and head."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(2, 40, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (6, 2, 2))
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.shape, t), lambda t: t):
            out = flash.attention(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert {shape: t.dtype for shape, t in kept.items()} == {
        q.shape: torch.bfloat16, k.shape: torch.bfloat16, (2, 6, 40): torch.float32
    }  # fmt: skip
    assert [(grad.shape, grad.dtype) for grad in grads] == [(t.shape, t.dtype) for t in (q, k, v)]


def test_the_newest_that_is_there_is_taken(stand_in, capability):
    stand_in("torch")
    assert _flash.newest(GPU) == "torch"
    for name in ("fa2", "fa3"):
        stand_in(name)
        forget()
        assert _flash.newest(GPU) == name
    stand_in("fa4")
    forget()
    assert _flash.newest(GPU, 64) == "fa4"
    assert _flash.newest(GPU, 80) == "fa3"  # of 80 channels FlashAttention-4 gets dq wrong
    for old_or_young in ((8, 0), (12, 0)):
        capability(*old_or_young)
        assert _flash.newest(GPU) == "fa2"
    capability(7, 5)
    assert flash.unavailable(GPU) == (
        "torch needs a GPU of compute capability 8.0 or newer, and this one has 7.5: choose attn=sdpa"
    )


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("fa4", r'fa4 is not installed \(.*flash_attn.*\): pip install "flash-attn-4\[cu13\]>=4.0.0b36"'),
        ("fa3", r'fa3 is not installed \(.*flash_attn_interface.*\): pip install .*#subdirectory=hopper"'),
        ("fa2", r'fa2 is not installed \(.*flash_attn.*\): pip install --no-build-isolation "flash-attn>=2.7"'),
    ],
)
def test_a_pinned_version_that_is_missing(stand_in, capability, version, message):
    stand_in("torch")
    with pytest.raises(Unavailable, match=f"^attention=flash cannot run here: {message}$"):
        load("attention", "flash", GPU, version=version)


def test_flash_attn_with_version_4_alone(stand_in, capability, monkeypatch):
    """Its package is in the namespace of version 2, whose import succeeds up to there."""
    stand_in("fa4")
    assert _flash.why_not("fa4", GPU) is None
    assert "fa2 is not installed" in _flash.why_not("fa2", GPU)


def test_what_cannot_run(stand_in, capability):
    stand_in("torch", "fa4")
    q = torch.empty(1, 4, 2, 64)
    for version in (None, "fa4"):
        assert flash.unavailable(CPU, version) == (
            "it needs an NVIDIA GPU of compute capability 8.0 or newer; on a CPU choose attn=sdpa"
        )
    with pytest.raises(
        Unavailable, match=r"^attention=flash takes bfloat16 and float16, and not torch.float32: .*sdpa$"
    ):
        flash.attention(q, q, q)
    with pytest.raises(Unavailable, match=r"^attention=flash cannot run this: it needs an NVIDIA GPU"):
        flash.attention(q.bfloat16(), q.bfloat16(), q.bfloat16())
    assert _flash.why_not("fa4", GPU, 80) == (
        "fa4 takes a multiple of 32 channels a head, 128 at most, and these have 80: choose attn.version=null, or "
        "attn=sdpa"
    )
    assert "a multiple of 8 channels a head, 256 at most, and these have 20" in _flash.why_not("torch", GPU, 20)


def test_detail_names_what_runs(stand_in, capability, monkeypatch):
    stand_in("torch", "fa4")
    versions = {"flash-attn-4": "4.0.0b36"}
    monkeypatch.setattr(importlib.metadata, "version", versions.get)
    monkeypatch.setattr(contract, "inputs", lambda shape, **_: {"q": FakeQ(shape), "k": None, "v": None})
    told = {v: describe("attention", "flash", v, shape=(2, 64, 4, 64)) for v in (None, "fa4", "torch")}
    assert told[None] == told["fa4"] == "flash (fa4, flash-attn-4 4.0.0b36)"
    assert told["torch"] == f"flash (PyTorch's fa2, torch {torch.__version__})"
    assert describe("attention", "flash", shape=(2, 64, 4, 80)) == told["torch"]


class FakeQ:
    """A bf16 tensor on a GPU, where there is none."""

    device, dtype = GPU, torch.bfloat16

    def __init__(self, shape):
        self.shape = shape


def test_versions_in_the_config(stand_in, capability, monkeypatch):
    with pytest.raises(KernelError, match=r"^attn.version=fa5: choose fa4, fa3, fa2, torch, or null$"):
        AttnConfig("flash", "fa5")
    with pytest.raises(KernelError, match=r"^attn.version=fa4: attn=sdpa has no versions$"):
        AttnConfig("sdpa", "fa4")
    plain = KernelsConfig(norm="eager", mlp="eager", loss="eager", compile=False)
    assert label(plain, AttnConfig("flash", "fa4")) == "eager-flash.fa4"
    stand_in("torch")
    with pytest.raises(Unavailable, match=r"kernels.attention.flash takes no starts .*choose attn=.*eager"):
        resolve(plain, AttnConfig("flash", "torch"), GPU, ["starts"])
    function = resolve(plain, AttnConfig("flash", "torch"), GPU, ["lengths", "window"]).attention
    monkeypatch.setattr(flash, "chosen", lambda version, q: version)
    q = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(function, fullgraph=True)(q, q, q), contract.reference(q, q, q))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", _flash.VERSIONS)
def test_every_version_against_float64(version, case, dtype):
    if why := flash.unavailable(GPU, version):
        pytest.skip(why)
    inputs = case_inputs("attention", case, dtype, "cuda")
    if why := _flash.why_not(version, inputs["q"].device, inputs["q"].shape[-1]):
        pytest.skip(why)
    truth = evaluate(contract.reference, inputs, dtype=torch.float64)
    eager = evaluate(load("attention", "eager", GPU), inputs)
    got = evaluate(load("attention", "flash", GPU, version=version), inputs)
    assert_as_good_as_eager(got, eager, truth, inputs, dtype)
