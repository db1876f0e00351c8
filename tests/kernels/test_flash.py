"""attn=flash: how it calls each version of FlashAttention, and which version it chooses.

Here stand-ins replace the packages. On an NVIDIA GPU, test_backends.py and the last test of this file call the kernels.
"""

import functools
import importlib
import os
import sys

import pytest
import torch

from kernels import attention as contract
from kernels.attention import _flash, flash
from kernels.registry import OPS, AttnConfig, KernelError, KernelsConfig, Unavailable, describe, label, load, resolve
from tests.kernels.flash_packages import STAND_INS
from tests.kernels.test_backends import assert_as_good_as_eager, case_inputs, outputs_and_gradients

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def clear_caches():
    for cached in (_flash.version_unavailable, _flash.newest_version, flash.load_kernels):
        cached.cache_clear()


@pytest.fixture
def stand_in(monkeypatch):
    """stand_in("fa4", ...) installs these versions. Without it, no version is installed."""
    clear_caches()
    for package in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, package, None)
    libraries = []
    yield lambda *names: libraries.extend(STAND_INS[name](monkeypatch) for name in names)
    for library in filter(None, libraries):
        library._destroy()
    clear_caches()


@pytest.fixture
def capability(monkeypatch):
    """capability(8, 0) sets the compute capability of every GPU. It starts as 9.0."""

    def set_capability(major, minor):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        clear_caches()

    set_capability(9, 0)
    return set_capability


@functools.cache
def float64_truth(case):
    return outputs_and_gradients(contract.reference, case_inputs("attention", case, torch.float64, "cpu"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", contract.CASES)
@pytest.mark.parametrize("name", _flash.VERSIONS)
def test_each_version_is_called_as_documented(name, case, stand_in, monkeypatch):
    """The stand-in checks the call. Outputs and gradients in float64 agree with reference()."""
    stand_in(name)
    monkeypatch.setattr(flash, "choose_version", lambda version, q: version)
    inputs = case_inputs("attention", case, torch.float64, "cpu")
    got = outputs_and_gradients(functools.partial(flash.attention, version=name), inputs)
    for key, exact in float64_truth(case).items():
        torch.testing.assert_close(got[key], exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("same_strides", [True, False])
def test_a_cache_is_not_copied(stand_in, monkeypatch, rows, same_strides):
    """Generation passes the first keys of longer tensors. The built-in kernel reads them there if k and v allow it."""
    stand_in("torch")
    monkeypatch.setattr(flash, "choose_version", lambda version, q: version)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, n, 4, 8, generator=draw, dtype=torch.float64) for n in (1, 90, 90))
    k, v = k[:, :40], v[:, :40] if same_strides else v[:, :40].contiguous()
    lengths = torch.tensor([3, 17, 40][:rows], dtype=torch.int32)
    got = flash.attention(q, k, v, lengths=lengths, version="torch")
    torch.testing.assert_close(got, contract.reference(q, k, v, lengths=lengths))
    assert (_flash.pack_cache(k, v)[0].data_ptr() == k.data_ptr()) == (same_strides or rows == 1)


@pytest.mark.parametrize("case", ["64", "gqa", "lengths", "window", "packed", "documents"])
def test_torch_compile_gives_the_same_results(stand_in, monkeypatch, case):
    """One graph gives the outputs and gradients of the uncompiled function."""
    stand_in("fa4")
    monkeypatch.setattr(flash, "choose_version", lambda version, q: "fa4")
    inputs = case_inputs("attention", case, torch.float32, "cpu")
    torch.compiler.reset()
    got = outputs_and_gradients(torch.compile(flash.attention, fullgraph=True), inputs)
    for key, value in outputs_and_gradients(flash.attention, inputs).items():
        torch.testing.assert_close(got[key], value)


@pytest.mark.parametrize("compiled", [False, True])
def test_there_are_no_gradients_with_lengths(stand_in, monkeypatch, compiled):
    """The forward runs, and the backward raises instead of ignoring the lengths."""
    stand_in("fa4")
    monkeypatch.setattr(flash, "choose_version", lambda version, q: "fa4")
    torch.compiler.reset()
    function = torch.compile(flash.attention, backend="aot_eager") if compiled else flash.attention
    out = function(**case_inputs("attention", "lengths_chunk", torch.float32, "cpu"))
    with pytest.raises(Unavailable, match=r"^attention=flash has no gradients with lengths: choose attn=sdpa$"):
        out.sum().backward()


def test_documents_are_counted_once_a_batch(stand_in, monkeypatch):
    """Counting makes the host wait for the GPU. Two layers, their backward and the compiled function count once each.

    A batch that is written over the last one is counted again.
    """
    stand_in("torch")
    monkeypatch.setattr(flash, "choose_version", lambda version, q: "torch")
    inputs = case_inputs("attention", "documents", torch.float32, "cpu")
    calls, original = [], torch.Tensor.nonzero
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda tensor: calls.append(1) or original(tensor))

    def two_layers(q, k, v, causal, scale, starts):
        return flash.attention(flash.attention(q, k, v, starts=starts), k, v, starts=starts)

    first = outputs_and_gradients(two_layers, inputs)
    assert len(calls) == 1
    torch.compiler.reset()
    compiled = outputs_and_gradients(torch.compile(two_layers, fullgraph=True, backend="aot_eager"), inputs)
    torch.testing.assert_close(compiled, first)
    assert len(calls) == 2
    inputs["starts"].zero_()
    assert not torch.equal(outputs_and_gradients(two_layers, inputs)["out0"], first["out0"])
    assert len(calls) == 3


def test_autograd_saves_the_inputs_the_output_and_lse():
    """lse takes 4 bytes a query and head."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(2, 40, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (6, 2, 2))
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.shape, t), lambda t: t):
            out = flash.attention(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert {shape: t.dtype for shape, t in saved.items()} == {
        q.shape: torch.bfloat16, k.shape: torch.bfloat16, (2, 6, 40): torch.float32
    }  # fmt: skip
    assert [(grad.shape, grad.dtype) for grad in grads] == [(t.shape, t.dtype) for t in (q, k, v)]


def test_the_newest_version_that_runs_is_chosen(stand_in, capability):
    """It must be installed, and support the head dim and the compute capability."""
    stand_in("torch")
    assert _flash.newest_version(GPU) == "torch"
    for name in ("fa2", "fa3"):
        stand_in(name)
        clear_caches()
        assert _flash.newest_version(GPU) == name
    stand_in("fa4")
    clear_caches()
    assert _flash.newest_version(GPU, 64) == "fa4"
    assert _flash.newest_version(GPU, 80) == "fa3"  # FlashAttention-4 computes a wrong dq at D = 80
    for other_gpu in ((8, 0), (12, 0)):
        capability(*other_gpu)
        assert _flash.newest_version(GPU) == "fa2"
    capability(7, 5)
    assert flash.unavailable(GPU) == (
        "torch needs a GPU of compute capability 8.0 or newer, and this one has 7.5: choose attn=sdpa"
    )


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("fa4", r'fa4 cannot be imported \(.*flash_attn.*\): pip install "flash-attn-4\[cu13\]>=4.0.0b36"'),
        ("fa3", r'fa3 cannot be imported \(.*flash_attn_interface.*\): pip install .*#subdirectory=hopper"'),
        ("fa2", r'fa2 cannot be imported \(.*flash_attn.*\): pip install --no-build-isolation "flash-attn>=2.7"'),
    ],
)
def test_a_pinned_version_that_is_missing_raises_with_the_command_to_install_it(stand_in, capability, version, message):
    stand_in("torch")
    with pytest.raises(Unavailable, match=f"^attention=flash cannot run here: {message}$"):
        load("attention", "flash", GPU, version=version)


def test_an_old_or_broken_package_is_not_chosen(stand_in, capability, monkeypatch):
    """version_unavailable() gives the reason."""
    stand_in("torch", "fa2")
    sys.modules["flash_attn"].__version__ = "2.6.3"
    assert _flash.newest_version(GPU) == "torch"
    too_old = "fa2 cannot be imported (flash_attn is 2.6.3, older than 2.7): pip "
    assert _flash.version_unavailable("fa2", GPU).startswith(too_old)
    broken = _flash.VERSIONS["fa4"]._replace(load=lambda: torch.no_such_name)
    monkeypatch.setitem(_flash.VERSIONS, "fa4", broken)
    clear_caches()
    no_name = "fa4 cannot be imported (module 'torch' has no attribute 'no_such_name')"
    assert no_name in _flash.version_unavailable("fa4", GPU)

    def fail():
        raise RuntimeError("two\nlines")

    monkeypatch.setitem(_flash.VERSIONS, "fa4", broken._replace(load=fail))
    clear_caches()
    assert _flash.version_unavailable("fa4", GPU).startswith("fa4 cannot be imported (two lines): pip install ")
    assert "head dims that are multiples of 32" in _flash.version_unavailable("fa4", GPU, 80)
    assert _flash.newest_version(GPU) == "torch"


def test_fa4_keeps_its_kernels_in_the_cache_of_the_user(stand_in, capability, monkeypatch, tmp_path):
    """A variable that the user has set stays. A folder that cannot be made leaves FA4 as it is."""
    names = [f"FLASH_ATTENTION_CUTE_DSL_CACHE_{end}" for end in ("ENABLED", "DIR")]
    stand_in("fa4")

    def variables_after(cache, **user):
        for name in names:
            monkeypatch.setenv(name, "")  # otherwise monkeypatch would not take back what load_fa4() sets
            monkeypatch.delenv(name)
        for name, value in {"XDG_CACHE_HOME": str(cache), **user}.items():
            monkeypatch.setenv(name, value)
        _flash.load_fa4()
        return [os.environ.get(name) for name in names]

    assert variables_after(tmp_path) == ["1", str(tmp_path / "hotswap/flash-attn-4")]
    assert variables_after(tmp_path, **{names[0]: "0"})[0] == "0"
    (tmp_path / "file").touch()
    assert variables_after(tmp_path / "file") == [None, None]


def test_fa2_is_not_installed_if_only_fa4_is(stand_in, capability):
    """Both are in the package flash_attn, so `import flash_attn` succeeds with either."""
    stand_in("fa4")
    assert _flash.version_unavailable("fa4", GPU) is None
    assert "fa2 cannot be imported" in _flash.version_unavailable("fa2", GPU)


def test_devices_dtypes_and_head_dims_that_cannot_run(stand_in, capability):
    """Each message names the reason and what to choose instead."""
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
    assert _flash.version_unavailable("fa4", GPU, 80) == (
        "fa4 supports head dims that are multiples of 32, up to 128, not 80: choose attn.version=null, or attn=sdpa"
    )
    assert "head dims that are multiples of 8, up to 256, not 20" in _flash.version_unavailable("torch", GPU, 20)


def test_describe_names_the_version_that_runs(stand_in, capability, monkeypatch):
    stand_in("torch", "fa4")
    versions = {"flash-attn-4": "4.0.0b36"}
    monkeypatch.setattr(importlib.metadata, "version", versions.get)
    monkeypatch.setattr(contract, "inputs", lambda shape, **_: {"q": FakeQ(shape), "k": None, "v": None})
    descriptions = {v: describe("attention", "flash", v, shape=(2, 64, 4, 64)) for v in (None, "fa4", "torch")}
    assert descriptions[None] == descriptions["fa4"] == "flash (fa4, flash-attn-4 4.0.0b36)"
    assert descriptions["torch"] == f"flash (PyTorch's fa2, torch {torch.__version__})"


def test_describe_names_the_package_for_lack_of_which_version_2_runs(stand_in, capability, monkeypatch):
    """So a row of attn=flash says why FlashAttention 2 ran on a GPU for which there is a newer version."""
    stand_in("torch")
    monkeypatch.setattr(contract, "inputs", lambda shape, **_: {"q": FakeQ(shape), "k": None, "v": None})
    built_in = f"flash (PyTorch's fa2, torch {torch.__version__}"
    for gpu, head_dim, lacks in (
        ((9, 0), 64, ", flash-attn-4 cannot be imported)"),
        ((9, 0), 80, ", flash-attn-3 cannot be imported)"),  # FlashAttention 4 computes a wrong dq at D = 80
        ((10, 0), 64, ", flash-attn-4 cannot be imported)"),
        ((10, 0), 80, ")"),
        ((8, 0), 64, ")"),
        ((12, 0), 64, ")"),
    ):
        capability(*gpu)
        assert describe("attention", "flash", shape=(2, 64, 4, head_dim)) == f"{built_in}{lacks}"
    capability(9, 0)
    assert describe("attention", "flash", "torch", shape=(2, 64, 4, 64)) == f"{built_in})"
    stand_in("fa3")
    clear_caches()
    monkeypatch.setattr(importlib.metadata, "version", {"flash-attn-3": "3.0"}.get)
    for head_dim in (64, 80):
        assert describe("attention", "flash", shape=(2, 64, 4, head_dim)) == "flash (fa3, flash-attn-3 3.0)"


class FakeQ:
    """A bf16 tensor on a GPU that does not exist."""

    device, dtype = GPU, torch.bfloat16

    def __init__(self, shape):
        self.shape = shape


def test_attn_version_pins_a_version(stand_in, capability, monkeypatch):
    """The config refuses unknown versions, the label names the version, and resolve() returns its function."""
    with pytest.raises(KernelError, match=r"^attn.version=fa5: choose fa4, fa3, fa2, torch, or null$"):
        AttnConfig("flash", "fa5")
    with pytest.raises(KernelError, match=r"^attn.version=fa4: attn=sdpa has no versions$"):
        AttnConfig("sdpa", "fa4")
    plain = KernelsConfig(norm="eager", mlp="eager", loss="eager", compile=False)
    assert label(plain, AttnConfig("flash", "fa4"), OPS) == "eager-flash.fa4"
    stand_in("torch")
    needs = {"attention": ["lengths", "window", "starts"]}
    function = resolve(plain, AttnConfig("flash", "torch"), GPU, needs).attention
    monkeypatch.setattr(flash, "choose_version", lambda version, q: version)
    q = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(function, fullgraph=True)(q, q, q), contract.reference(q, q, q))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", contract.CASES)
@pytest.mark.parametrize("version", _flash.VERSIONS)
def test_every_version_against_float64(version, case, dtype):
    """Outputs and gradients follow the rule of kernels/check.py."""
    if reason := flash.unavailable(GPU, version):
        pytest.skip(reason)
    inputs = case_inputs("attention", case, dtype, "cuda")
    if reason := _flash.version_unavailable(version, inputs["q"].device, inputs["q"].shape[-1]):
        pytest.skip(reason)
    truth = outputs_and_gradients(contract.reference, inputs, dtype=torch.float64)
    eager = outputs_and_gradients(load("attention", "eager", GPU), inputs)
    got = outputs_and_gradients(load("attention", "flash", GPU, version=version), inputs)
    assert_as_good_as_eager(got, eager, truth, inputs, dtype)
