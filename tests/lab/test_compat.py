"""Each private part in lab/compat.py still works, and is still needed. A failure says what to change there."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from kernels.attention import flash
from kernels.compat import FakeTensorMode, TorchDispatchMode
from lab import compat
from lab.proof.memory import MemoryUsage

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

if find_spec("triton"):
    import triton
    from triton import language as tl
    from triton.runtime.jit import KernelInterface

    @triton.jit
    def store_one_kernel(pointer):
        tl.store(pointer, 1.0)


@torch.library.custom_op("hotswap_test::compat_double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


@double.register_fake
def fake_double(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.fixture
def every_warning():
    """PyTorch repeats the warnings that it otherwise gives once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


def check_it_fails(work: Callable[[], object], otherwise: str) -> None:
    """Fail with `otherwise` if work() raises nothing."""
    try:
        work()
    except RuntimeError:
        return
    pytest.fail(otherwise)


def test_fake_parameters_can_be_converted():
    FakeTensorMode.cache_clear()
    with compat.fake_tensors():
        module = nn.Linear(3, 5).to(torch.bfloat16)
    assert isinstance(module.weight, nn.Parameter)
    assert (module.weight.dtype, module.weight.shape) == (torch.bfloat16, (5, 3))


def test_the_patch_of_swap_tensors_is_still_needed():
    """FakeTensorMode holds references to the tensors of an operator that is not in its cache yet."""
    FakeTensorMode.cache_clear()
    with FakeTensorMode():
        module = nn.Linear(3, 5)
        otherwise = "Module.to() converts fake parameters: remove the patch of swap_tensors from fake_tensors()"
        check_it_fails(lambda: module.to(torch.bfloat16), otherwise)


@needs_triton
def test_triton_launches_nothing_on_fake_tensors():
    with compat.fake_tensors():
        assert store_one_kernel[(1,)](torch.zeros(1, device=DEVICE)) is None
    x = torch.zeros(1, device=DEVICE)
    store_one_kernel[(1,)](x)
    assert x.item() == 1, "Triton still launches nothing after fake_tensors() has ended"


@needs_triton
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a launch at address 0 would end the GPU's context")
def test_the_patch_of_triton_is_still_needed():
    with FakeTensorMode():
        x = torch.zeros(1)
        otherwise = "Triton accepts fake tensors: remove the patch of KernelInterface from fake_tensors()"
        check_it_fails(lambda: store_one_kernel[(1,)](x), otherwise)


def test_addresses_of_fake_tensors_give_no_warning(every_warning):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with compat.fake_tensors():
            assert torch.zeros(1).data_ptr() == 0


def test_the_filter_of_warnings_is_still_needed(every_warning):
    with warnings.catch_warnings(record=True) as caught, FakeTensorMode():
        warnings.simplefilter("always")
        torch.zeros(1).data_ptr()
    messages = [str(warning.message) for warning in caught]
    assert any(message.startswith("Accessing the data pointer of FakeTensor") for message in messages), (
        f"PyTorch warns otherwise or not at all ({messages}): change or remove the filter in fake_tensors()"
    )


def test_patches_end_with_the_context():
    before = torch.utils.swap_tensors
    launch = KernelInterface.__getitem__ if find_spec("triton") else None
    with compat.fake_tensors():
        assert torch.utils.swap_tensors is not before
    assert torch.utils.swap_tensors is before
    assert (KernelInterface.__getitem__ if find_spec("triton") else None) is launch
    assert torch.zeros(1).item() == 0  # a real tensor


def test_there_is_still_no_public_pytree():
    """Torch has torch.utils._pytree only."""
    assert find_spec("torch.utils.pytree") is None, "import tree_leaves from it instead of lab/compat.py"


def test_inductor_compiles_without_workers():
    """get_compile_threads() is what Inductor reads before it starts its pool."""
    get_compile_threads = import_module("torch._inductor.async_compile").get_compile_threads
    with import_module(compat.INDUCTOR_CONFIG).patch(compile_threads=2):
        assert get_compile_threads() == 2
        compat.compile_without_workers()
        assert get_compile_threads() == 1


def test_inductor_compiles_without_workers_if_it_is_imported_later():
    program = (
        "import sys; from lab import compat; compat.compile_without_workers(); "
        f"assert '{compat.INDUCTOR_CONFIG}' not in sys.modules; "
        "from torch._inductor.async_compile import get_compile_threads; assert get_compile_threads() == 1"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_COMPILE_THREADS"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_there_is_still_no_public_option_for_the_workers():
    options = [name for name in dir(torch.compiler.config) if "thread" in name or "worker" in name]
    assert not options, f"torch.compiler.config has {options}: use them in compile_without_workers()"


def test_function_of_a_custom_op():
    function = compat.custom_op_function("hotswap_test::compat_double")
    assert function is double._init_fn, "OPDEFS no longer has the custom ops: change custom_op_function()"
    assert function(torch.ones(2)).tolist() == [2, 2]
    assert compat.custom_op_function("aten::add.Tensor") is None
    assert torch.ops.hotswap_test.compat_double.default.name() == "hotswap_test::compat_double"


def test_fake_of_a_custom_op():
    fake = compat.custom_op_fake("hotswap_test::compat_double")
    assert fake is fake_double, "a custom op no longer keeps its fake: change custom_op_fake()"
    assert compat.custom_op_fake("aten::add.Tensor") is None


def test_there_is_still_no_public_lookup_of_a_custom_op():
    operator, functions = torch.ops.hotswap_test.compat_double.default, (double._init_fn, fake_double)
    public = [name for name in dir(operator) if not name.startswith("_") and getattr(operator, name, None) in functions]
    assert not public, f"an operator has its Python functions in {public}: use them in custom_op_function()"


@needs_triton
def test_uses_triton_looks_for_kernels_in_the_module_of_the_function():
    """This module has a Triton kernel. FlashAttention's custom ops call another library."""
    assert isinstance(store_one_kernel, KernelInterface), "triton.jit returns no KernelInterface: change uses_triton()"
    assert compat.uses_triton(double._init_fn)
    assert not compat.uses_triton(flash.attention)


class Passive(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def backend_calls(mode) -> int:
    """Return how often torch.compile calls its backend under a dispatch mode, on fake tensors."""
    calls = []
    torch.compiler.reset()
    with compat.fake_tensors(), compat.compile_with(lambda graph, _: calls.append(graph) or graph), mode:
        torch.compile(lambda x: x + 1)(torch.zeros(2))
    return len(calls)


def test_dynamo_compiles_under_a_mode_only_if_the_mode_says_so():
    """MemoryUsage.ignore_compile_internals() says so."""
    assert backend_calls(MemoryUsage(torch.device("cpu"))) == 1
    assert backend_calls(Passive()) == 0


def test_compile_with_ends_with_the_context():
    with compat.compile_with("aot_eager"):
        pass
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1)).item() == 1
