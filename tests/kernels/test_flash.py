"""attn=flash: how each version is called, by stand-ins for its package, and which one is taken.

The kernels themselves run where an NVIDIA GPU is: there the generic tests and the last ones here call them.
"""

import functools
import importlib
import sys

import pytest
import torch

from kernels import attention as contract
from kernels.attention import _flash, flash
from kernels.registry import AttnConfig, KernelError, KernelsConfig, Unavailable, describe, label, load, resolve
from tests.kernels.flash_packages import STAND_INS
from tests.kernels.test_backends import assert_as_good_as_eager, case_inputs, evaluate

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CASES = [case for case in contract.CASES if "documents" not in contract.CASES[case]]


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


def test_what_is_old_or_broken_is_not_taken(stand_in, capability, monkeypatch):
    stand_in("torch", "fa2")
    sys.modules["flash_attn"].__version__ = "2.6.3"
    assert _flash.newest(GPU) == "torch"
    assert _flash.why_not("fa2", GPU).startswith("fa2 is not installed (flash_attn is 2.6.3, older than 2.7): pip ")
    broken = _flash.VERSIONS["fa4"]._replace(kernels=lambda: torch.no_such_name)
    monkeypatch.setitem(_flash.VERSIONS, "fa4", broken)
    forget()
    assert "fa4 is not installed (module 'torch' has no attribute 'no_such_name')" in _flash.why_not("fa4", GPU)


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
