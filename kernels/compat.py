"""The private parts of PyTorch that kernels/ uses, and why.

tests/kernels/test_compat.py fails if one of them stops working or is no longer needed. pyproject.toml lists the tested
versions. PyTorch has no public names for what this file imports from modules with a `_`.
"""

import ctypes
import hashlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode as fake_mode  # noqa: F401  the active FakeTensorMode, or None
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: F401
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode  # noqa: F401

from common.files import read_text
from kernels.lookup import KernelError
from kernels.tuned import user_cache

CUTLASS_MODE = "max-autotune-cutlass"
# CUTLASS 4.2 has 52 kernels for a product in bf16, and nvcc compiles each. These are the six with large tiles, and with
# clusters of two blocks, as cuBLAS's nvjet kernels have. The epilogue through shared memory (tma) is the usual one
CUTLASS_TILES = r"_(128x128|128x256|256x128)x64_2x1x1_.*align\d+_warpspecialized_(cooperative|pingpong)_epi_tma"


def is_observed() -> bool:
    """Return whether torch.compile, a dispatch mode such as FakeTensorMode, or a profiler must see operators.

    PyTorch has no public query for dispatch modes and profilers.
    """
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or profiler._is_profiler_enabled


def is_statically_true(condition: bool) -> bool:
    """Return `condition`, which is about the size of a tensor; False for a size that torch.compile leaves open.

    `if condition` would make torch.compile add a graph for the other sizes. The import costs 0.25 s.
    """
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that is equal for two storages if they are the same memory.

    It works for fake tensors too, while data_ptr() is 0 for every fake storage.
    """
    return storage._cdata


def forget_functions() -> None:
    """Clear Dynamo's table of torch's functions: the first compilation may have met other functions in their place.

    A function that is not in the table cannot be compiled. It takes 0.04 s to make again.
    """
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.trace_rules.clear_lru_cache()


def inductor_options(mode: str = "default") -> dict[str, Any]:
    """Return torch.compile's options for `mode`, one of COMPILE_MODES.

    They also pass a Python float to a Triton kernel as fp32. Triton itself does so, but Inductor passes fp64. A tile
    times an fp64 scale is fp64, too: rung 12 of course/ did not compile (torch 2.11). The import takes a second, which
    torch.compile needs anyway.
    """
    from torch._inductor import config, list_mode_options

    if mode == CUTLASS_MODE:
        options = list_mode_options("max-autotune-no-cudagraphs") | cutlass_options()
    else:
        options = list_mode_options(mode)
    name = "_use_fp64_for_unbacked_floats"
    return options | {name: False} if hasattr(config, name) else options


def cutlass_options() -> dict[str, Any]:
    """Return Inductor's options that add CUTLASS's matmuls to the candidates of max-autotune.

    A product with a bias gets none, because CUTLASS's x @ W.T + b reads memory that is not its own, and the process
    ends (pytorch/pytorch#171094; H200, torch 2.11). kernels/README.md says how fast the others are.

    Inductor reads a checkout of CUTLASS. The package nvidia-cutlass has the same files in other places, so a folder of
    links takes the checkout's place. Raises KernelError if a part is missing. Inductor itself would only log it.
    """
    from torch._inductor import config
    from torch.utils.cpp_extension import CUDA_HOME

    package, what = find_spec("cutlass_library"), f"kernels.compile_mode={CUTLASS_MODE}"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise KernelError(f"{what} has matmuls for Hopper GPUs only: choose max-autotune-no-cudagraphs")
    if CUDA_HOME is None:
        raise KernelError(f"{what} needs nvcc, CUDA's compiler: set CUDA_HOME to the CUDA toolkit")
    if package is None or package.origin is None:
        raise KernelError(f"{what} needs CUTLASS: pip install nvidia-cutlass")
    source = Path(package.origin).parent
    folder = user_cache() / "cutlass" / hashlib.sha256(str(source).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    links = {"python": source.parent, "include": source / "source/include", "tools": source / "source/tools"}
    for name, target in links.items():
        with suppress(FileExistsError):
            (folder / name).symlink_to(target)
    group = "cutlass" if hasattr(config, "cutlass") else "cuda"  # in older versions: pytorch/pytorch#150314
    options = {"cutlass_dir": str(folder), "cutlass_op_allowlist_regex": CUTLASS_TILES, "cutlass_enabled_ops": "mm"}
    backends = {"max_autotune_gemm_backends": "ATEN,TRITON,CUTLASS"}
    return backends | {f"{group}.{name}": value for name, value in options.items()}


def shorten_operator_errors() -> None:
    """Stop Inductor from writing all arguments of a custom op into an error message, which it never shows.

    The message doubles in length with every layer before the op. With custom ops in 12 layers, the compilation did not
    finish (torch 2.11). torch 2.13 still writes the arguments.
    """
    from torch._inductor.exc import OperatorIssue

    OperatorIssue.operator_str = staticmethod(lambda target, args, kwargs: f"  target: {target}")


def allow_graphs(count: int) -> AbstractContextManager:
    """Within it, torch.compile may make `count` graphs of one function. By default it stops after 8.

    torch 2.13 has a public way, torch.compile(recompile_limit=...).
    """
    limits = {"recompile_limit": max(8, count), "accumulated_recompile_limit": max(256, 8 * count)}
    return torch._dynamo.config.patch(**limits)


def chunked_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, class_weight: Tensor, ignore_index: int, rows: int, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, dx, dweight) of torch.nn.functional.linear_cross_entropy(reduction="sum"), in the dtype of x.

    x is (N, C), weight (V, C), targets (N,) and class_weight (V,). A chunk has `rows` tokens. If `gradients` is False,
    dx and dweight are empty. The public function returns the gradients only to autograd, which an operator of ours
    cannot call. So this calls PyTorch's operator, and resolves the options as the function does.
    """
    from torch.nn.modules.linear_cross_entropy import _linear_cross_entropy_batch_chunked as operator

    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows, allow_retain_graph=True)
    options = options._adjust(len(x), x.shape[1], len(weight), x.dtype, x.device)
    loss, dx, dweight, _ = operator(
        x.detach(),
        weight.detach(),
        targets,
        linear_bias=None,
        weight=class_weight,
        reduction="sum",
        ignore_index=ignore_index,
        label_smoothing=0.0,
        batch_chunk_size=options.batch_chunk_size,
        acc_policy=options.acc_policy,
        acc_dtype=options.acc_dtype,
        allow_retain_graph=options.allow_retain_graph,
        compute_input_grad=gradients,
        compute_linear_weight_grad=gradients,
        compute_linear_bias_grad=False,
    )
    return loss, dx, dweight


def nvrtc_unavailable() -> str | None:
    """Return why compile_cuda() cannot run here, or None.

    torch.cuda._compile_kernel adds the headers in CUDA_HOME to the search path, and raises without this folder. Our
    kernels include no header, so any folder will do.
    """
    from torch.utils.cpp_extension import CUDA_HOME

    return None if CUDA_HOME else "torch.cuda._compile_kernel needs CUDA_HOME: set it to the CUDA toolkit or any folder"


def compile_cuda(path: Path, name: str, options: Sequence[str]) -> object:
    """Return the kernel `name` of a CUDA C++ file, compiled by NVRTC for the current GPU. It takes 2 s.

    torch.cuda._compile_kernel has no public name. torch.utils.cpp_extension is public, but it needs nvcc and a C++
    compiler. Raises RuntimeError, with the compiler's messages, if the file does not compile.
    """
    folders = [str(path.parent)]
    source = read_text(path)
    return torch.cuda._compile_kernel(source, name, cuda_include_dirs=folders, nvcc_options=list(options))


def launch_cooperatively(
    kernel: object, blocks: int, threads: int, shared_bytes: int, device: torch.device, arguments: ctypes.Structure
) -> None:
    """Launch a kernel of compile_cuda() so that all blocks run at the same time. `arguments` is its only parameter.

    Calling the kernel object launches it without this guarantee, and passes no structures. So this passes the object's
    private handle to the driver's public cuLaunchCooperativeKernel. Raises RuntimeError if the driver refuses.
    """
    driver, handle = ctypes.CDLL("libcuda.so.1"), kernel.func
    max_dynamic_shared_bytes = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    with torch.cuda.device(device):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = driver.cuFuncSetAttribute(handle, max_dynamic_shared_bytes, shared_bytes)
        if not error:
            shape = (blocks, 1, 1, threads, 1, 1, shared_bytes)
            error = driver.cuLaunchCooperativeKernel(handle, *shape, stream, parameters)
    if error:
        message = ctypes.c_char_p(b"")
        driver.cuGetErrorString(error, ctypes.byref(message))
        raise RuntimeError(f"the driver does not launch {blocks} blocks of {threads} threads: {message.value.decode()}")
