"""Each private part of PyTorch in kernels/compat.py still works and is still needed; a failure names the change."""

import ctypes
import inspect
import itertools
import re
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version
from torch._dynamo.testing import CompileCounter
from torch._inductor import config, exc
from torch._inductor.codegen.common import SizeArg
from torch._inductor.codegen.triton_utils import signature_of
from torch._inductor.virtualized import V
from torch.cuda._utils import _CudaKernel

from kernels import compat
from kernels.registry import COMPILE_MODES, KernelError
from lab.bench.machine import read_tested_versions
from runtime.compiling import graphs


class CountsFormatting:
    """An argument of an operator that counts how often it is formatted."""

    count = 0

    def __repr__(self) -> str:
        self.count += 1
        return "an argument"


def public_names(owner, part: str) -> list[str]:
    return [name for name in dir(owner) if part in name and not name.startswith("_")]


def test_a_condition_about_an_open_size_makes_no_graph():
    """Unlike `if size % 16 == 0`."""

    def multiply(x):
        return 2 * x if compat.is_statically_true(x.shape[0] % 16 == 0) else 3 * x

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(multiply, backend=counter, dynamic=True, fullgraph=True)
    for size in (16, 17, 32):
        assert compiled(torch.ones(size)).sum() == 3 * size
        assert multiply(torch.ones(size)).sum() == (3 if size == 17 else 2) * size
    assert counter.frame_count == 1


def test_fake_mode_is_the_active_mode():
    assert compat.fake_mode() is None
    with compat.FakeTensorMode() as mode:
        assert compat.fake_mode() is mode
    assert not public_names(torch.compiler, "fake_mode"), "use the public name in place of fake_mode()"


@pytest.mark.parametrize("name", ["FakeTensorMode", "TorchDispatchMode"])
def test_modes_still_have_no_public_name(name):
    public = [module.__name__ for module in (torch, torch.utils, torch.library) if hasattr(module, name)]
    assert not public, f"{name} is public in {public}: import it from there"


def test_nothing_observes_a_plain_call():
    assert not compat.is_observed()


def test_fake_tensor_mode_observes():
    with compat.FakeTensorMode():
        assert compat.is_observed()
    assert not compat.is_observed()


@pytest.mark.parametrize("profile", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_a_profiler_observes(profile):
    with profile():
        assert compat.is_observed()
    assert not compat.is_observed()


def test_torch_compile_observes():
    """The query itself must be in the graph: fullgraph=True raises if it is not."""
    compiled = torch.compile(lambda x: x + compat.is_observed(), fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)).item() == 1


def test_there_are_still_no_public_queries_for_profilers_and_modes():
    queries = public_names(torch.profiler, "enabled") + public_names(torch.autograd.profiler, "enabled")
    for module in (torch, torch.utils, torch.overrides, torch.library):
        queries += public_names(module, "dispatch_mode")
    assert not queries, f"PyTorch has the public queries {queries}: use them in is_observed()"


@pytest.mark.parametrize("fake", [True, False])
def test_storage_id_is_equal_for_tensors_that_share_memory(fake):
    with compat.FakeTensorMode() if fake else torch.no_grad():
        a, b = torch.zeros(4), torch.zeros(4)
        id_of_a, id_of_view, id_of_b = (compat.storage_id(tensor.untyped_storage()) for tensor in (a, a[1:], b))
        assert id_of_a == id_of_view != id_of_b


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_storage_id_is_still_needed():
    with compat.FakeTensorMode():
        addresses = {torch.zeros(4).untyped_storage().data_ptr() for _ in range(2)}
    assert addresses == {0}, f"fake tensors have addresses ({addresses}): use data_ptr() in place of storage_id()"


def test_operator_errors_do_not_format_arguments(monkeypatch):
    monkeypatch.setattr(exc.OperatorIssue, "operator_str", exc.OperatorIssue.operator_str)  # restored after the test
    compat.shorten_operator_errors()
    argument = CountsFormatting()
    error = exc.LoweringException(ValueError("too large"), "the target", [argument], {"key": argument})
    assert "too large" in str(error)
    assert "the target" in str(error)
    assert argument.count == 0, "PyTorch formats arguments elsewhere: change shorten_operator_errors()"


def test_shorten_operator_errors_is_still_needed():
    """A fresh copy of PyTorch's module has no patch."""
    spec = find_spec("torch._inductor.exc")
    fresh = module_from_spec(spec)
    spec.loader.exec_module(fresh)
    argument = CountsFormatting()
    fresh.LoweringException(ValueError("too large"), "the target", [argument], {})
    assert argument.count, "PyTorch no longer formats the arguments: remove shorten_operator_errors()"


def inductor_type_of_a_float() -> str:
    """Return the type of an argument 0.125 of a Triton kernel."""
    with V.set_graph_handler(SimpleNamespace(current_device=torch.device("cuda"))):
        return signature_of(SizeArg("scale", 0.125), size_dtype=None)


def test_inductor_options_pass_floats_as_fp32():
    assert inductor_type_of_a_float() == "fp64", "PyTorch passes fp32: remove inductor_options()"
    with config.patch(compat.inductor_options()):
        assert inductor_type_of_a_float() == "fp32", "the option has no effect: change inductor_options()"


@pytest.fixture
def cutlass(monkeypatch, tmp_path):
    """A Hopper GPU, a CUDA toolkit, and files as in the package nvidia-cutlass 4.2."""
    for name in ("__init__.py", "generator.py", "source/include/cutlass/cutlass.h", "source/tools/util/util.h"):
        path = tmp_path / "site/cutlass_library" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", "/cuda")


def test_cutlass_is_a_candidate_with_the_files_of_its_package(cutlass, tmp_path):
    """Inductor looks for a checkout: python/cutlass_library, include and tools. A second call finds the links."""
    for _ in range(2):
        options = compat.inductor_options(compat.CUTLASS_MODE)
    assert options["max_autotune"]
    assert options["max_autotune_gemm_backends"] == "ATEN,TRITON,CUTLASS"
    [operators] = [value for name, value in options.items() if name.endswith(".cutlass_enabled_ops")]
    assert operators == "mm", "addmm, a product with a bias, ends the process"
    [folder] = [Path(value) for name, value in options.items() if name.endswith(".cutlass_dir")]
    assert folder.is_relative_to(tmp_path / "cache/hotswap")
    for name in ("python/cutlass_library/generator.py", "include/cutlass/cutlass.h", "tools/util/util.h"):
        assert (folder / name).is_file()


def test_the_tiles_of_cutlass_are_six_of_its_names():
    """Names of CUTLASS 4.2's kernels for x @ W.T in bf16 on Hopper, as its generator makes them."""
    tiles = "64x256x64", "128x128x64", "128x256x64", "256x128x64", "256x256x64"
    schedules = [
        f"{kind}_epi_{end}"
        for kind in ("warpspecialized_pingpong", "warpspecialized_cooperative", "stream_k_warpspecialized_cooperative")
        for end in ("tma", "nosmem")
    ]
    names = [
        f"cutlass3x_sm90_tensorop_gemm_bf16_bf16_f32_void_bf16_{tile}_{cluster}_0_tnn_align8_{schedule}"
        for tile, cluster, schedule in itertools.product(tiles, ("2x1x1", "1x2x1"), schedules)
    ]
    chosen = [name for name in names if re.search(compat.CUTLASS_TILES, name)]
    assert len(chosen) == 6
    assert all("stream_k" not in name and "nosmem" not in name for name in chosen)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("torch.cuda.is_available", lambda: False, "has matmuls for Hopper GPUs only: choose max-autotune-no-cudag"),
        ("torch.cuda.get_device_capability", lambda: (8, 0), "has matmuls for Hopper GPUs only: choose max-autotune"),
        ("torch.utils.cpp_extension.CUDA_HOME", None, "needs nvcc, CUDA's compiler: set CUDA_HOME to the CUDA toolkit"),
        ("kernels.compat.find_spec", lambda name: None, "needs CUTLASS: pip install nvidia-cutlass"),
    ],
)
def test_a_missing_part_of_cutlass_is_named(cutlass, monkeypatch, place, value, message):
    monkeypatch.setattr(place, value)
    with pytest.raises(KernelError, match=f"^kernels.compile_mode=max-autotune-cutlass {message}"):
        compat.inductor_options(compat.CUTLASS_MODE)


def test_every_mode_has_options_of_inductor(cutlass):
    options = {mode: compat.inductor_options(mode) for mode in COMPILE_MODES}
    assert options["max-autotune-no-cudagraphs"].items() >= {"max_autotune": True}.items()
    assert [name for name, each in options.items() if "max_autotune" not in each] == ["default"]
    assert not any(each.get("triton.cudagraphs") for each in options.values())
    for each in options.values():
        with config.patch(each):  # raises for a name that Inductor does not know
            assert all(config.get_config_copy()[name] == value for name, value in each.items())


def compile_12_lengths():
    """Compile 12 graphs of one function. fullgraph=True raises at the limit."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x + 1, fullgraph=True, dynamic=False, backend="eager")
    for length in range(2, 14):
        compiled(torch.zeros(length))


def test_allow_graphs_allows_12_graphs():
    before = graphs()
    with compat.allow_graphs(12):
        compile_12_lengths()
    assert graphs() - before == 12


def test_allow_graphs_is_still_needed():
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        compile_12_lengths()


def test_the_oldest_supported_torch_has_no_public_limit():
    """torch 2.13 has torch.compile(recompile_limit=...)."""
    oldest = Version(read_tested_versions()["torch"][0])
    assert oldest < Version("2.13"), "use torch.compile(recompile_limit=...), and remove allow_graphs()"


def test_compile_cuda_compiles_a_file_and_finds_its_neighbours(monkeypatch, tmp_path):
    """It passes the folder of the file, for its includes. torch.cuda._compile_kernel still has these parameters."""
    path, calls = tmp_path / "kernel.cu", []
    path.write_text("// a kernel")
    signature = inspect.signature(torch.cuda._compile_kernel)
    monkeypatch.setattr(
        torch.cuda, "_compile_kernel", lambda *args, **kwargs: calls.append(signature.bind(*args, **kwargs))
    )
    compat.compile_cuda(path, "name", ("-DA=1",))
    expected = {"kernel_source": "// a kernel", "kernel_name": "name", "nvcc_options": ["-DA=1"]}
    assert calls[0].arguments == expected | {"cuda_include_dirs": [str(tmp_path)]}


def test_compile_cuda_is_still_needed():
    public = public_names(torch.cuda, "compile_kernel") + public_names(torch, "compile_kernel")
    assert not public, f"PyTorch has the public {public}: use it in compile_cuda()"


def test_a_compiled_kernel_has_its_handle_and_no_cooperative_launch():
    """launch_cooperatively() passes the handle to the driver."""
    handle = ctypes.c_void_p(1)
    assert _CudaKernel(handle, ctypes.c_void_p(2)).func is handle
    assert "ooperative" not in inspect.getsource(_CudaKernel), "PyTorch launches cooperatively: use that"


def test_nvrtc_needs_a_folder(monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    assert "CUDA_HOME" in compat.nvrtc_unavailable()
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", "/usr/local/cuda")
    assert compat.nvrtc_unavailable() is None


@pytest.mark.gpu
def test_launch_cooperatively(tmp_path):
    """Every block waits for the last one, so all of them run together. The driver refuses more than fit."""

    class Arguments(ctypes.Structure):
        _fields_ = [("count", ctypes.c_void_p), ("blocks", ctypes.c_int)]

    path, device = tmp_path / "meet.cu", torch.device("cuda")
    path.write_text(
        """struct Arguments { int* count; int blocks; };
        extern "C" __global__ void meet(const Arguments a) {
          if (threadIdx.x > 0) return;
          atomicAdd(a.count, 1);
          while (*(volatile int*)a.count < a.blocks) {}
        }"""
    )
    kernel, count = compat.compile_cuda(path, "meet", ()), torch.zeros(1, dtype=torch.int32, device=device)
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    compat.launch_cooperatively(kernel, blocks, 64, 200_000, device, Arguments(count.data_ptr(), blocks))
    assert count.item() == blocks
    with pytest.raises(RuntimeError, match=f"does not launch {2 * blocks} blocks"):
        compat.launch_cooperatively(kernel, 2 * blocks, 64, 200_000, device, Arguments(count.data_ptr(), 1))


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="it needs torch 2.13")
def test_chunked_cross_entropy_is_the_public_function():
    """It has the loss and the gradients of the public function, whose gradients only autograd returns."""
    draw = torch.Generator().manual_seed(0)
    x, weight, class_weight = (torch.randn(*size, generator=draw) for size in ((7, 5), (9, 5), (9,)))
    targets = torch.tensor([3, -1, 8, 0, 3, -1, 2])
    got = compat.chunked_cross_entropy(x, weight, targets, class_weight, -1, rows=3, gradients=True)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=3, allow_retain_graph=True)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    arguments = {"weight": class_weight, "reduction": "sum", "ignore_index": -1, "options": options}
    loss = torch.nn.functional.linear_cross_entropy(x, weight, targets, **arguments)
    torch.testing.assert_close(got, (loss.detach(), *torch.autograd.grad(loss, (x, weight))))
