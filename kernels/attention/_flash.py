"""The implementations of FlashAttention that flash.py chooses from: how to call each one, and where each one runs.

q, out, dout and dq are (B, Tq, H, D); k, v, dk and dv are (B, Tk, Hkv, D); lse is (B, H, Tq) fp32. All implementations
support heads that share keys, and align the causal mask bottom right, or to `lengths` if given. Their window counts the
keys before the query's own position; the contract's `window` includes that position. With `documents`, which excludes
`lengths`, all tensors are packed: (N, H, D) and (N, Hkv, D), and lse is (H, N).
"""

import functools
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from common.terminal import one_line
from kernels.gpu import IMPORT_ERRORS
from kernels.tuned import user_cache


class Documents(NamedTuple):
    """The documents in packed tensors (N, H, D)."""

    bounds: Tensor  # (documents + 1,) int32: the first row of each document, then N
    longest: int  # the number of rows of the longest document


class Options(NamedTuple):
    """The arguments of attention() besides q, k and v."""

    causal: bool
    scale: float
    window: int | None
    documents: Documents | None
    lengths: Tensor | None = None  # no backward has lengths


class BackwardTensors(NamedTuple):
    """What a backward reads, and dq, dk and dv, to which it writes."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Kernels(NamedTuple):
    """An implementation's two functions. Each load_*() below imports a package and returns them."""

    forward: Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor]]  # q, k, v -> out, lse
    backward: Callable[[BackwardTensors, Options], None]


def varlen_options(documents: Documents | None) -> dict:
    """Return the keyword arguments for packed tensors: the versions give them the same names."""
    if documents is None:
        return {}
    bounds, longest = documents
    return {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}


def load_fa4() -> Kernels:
    """Import FlashAttention-4: kernels in the CuTe DSL, which compiles them on first use.

    On Hopper a single multiprocessor reads all keys of a (sequence, head) pair, so few multiprocessors read a long
    cache. torch.compile cannot trace the package's autograd.Function, so this calls the two functions that the
    autograd.Function wraps.
    """
    keep_compiled_kernels()
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    warnings.filterwarnings("ignore", "Argument aux_data")  # FA4's own compiler warns about an argument that FA4 passes

    def keywords(options: Options) -> dict:
        left = None if options.window is None else options.window - 1
        mask = {"causal": options.causal, "window_size_left": left}
        return {"softmax_scale": options.scale, **mask, **varlen_options(options.documents)}

    def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        return _flash_attn_fwd(q, k, v, seqused_k=options.lengths, return_lse=True, **keywords(options))[:2]

    def backward(t: BackwardTensors, options: Options) -> None:
        _flash_attn_bwd(t.q, t.k, t.v, t.out, t.dout, t.lse, dq=t.dq, dk=t.dk, dv=t.dv, **keywords(options))

    return Kernels(forward, backward)


def kernel_folder() -> Path:
    """Return the folder in which FA4 keeps what it compiles. It may not exist."""
    return Path(os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR") or user_cache() / "flash-attn-4")


def keep_compiled_kernels() -> None:
    """Let FA4 keep what it compiles on the disk, unless the user has said otherwise or the disk does not allow it.

    FA4 reads the variables when it is imported. With its kernels on the disk, the first step of GPT-2 124M (16 x 1024)
    took 0.9 s on an H100 instead of 4.8 s.
    """
    folder = kernel_folder()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def load_fa3() -> Kernels:
    """Import FlashAttention-3: written in CUDA for Hopper (Shah et al. 2024, arXiv:2407.08608)."""
    import flash_attn_interface  # noqa: F401  # registers the operators

    ops = torch.ops.flash_attn_3
    if not (hasattr(ops, "fwd") and hasattr(ops, "bwd")):
        raise ImportError("flash_attn_interface does not register flash_attn_3::fwd and flash_attn_3::bwd")

    def keywords(options: Options) -> dict:
        mask = {"is_causal": options.causal, "window_size_left": window_left(options.window)}
        return {"softmax_scale": options.scale, **mask, **varlen_options(options.documents)}

    def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        # num_splits = 0 lets FA3 distribute the keys of one query over all multiprocessors
        splits = 1 if options.lengths is None else 0
        return ops.fwd(q, k, v, seqused_k=options.lengths, num_splits=splits, **keywords(options))[:2]

    def backward(t: BackwardTensors, options: Options) -> None:
        ops.bwd(t.dout, t.q, t.k, t.v, t.out, t.lse, t.dq, t.dk, t.dv, **keywords(options))

    return Kernels(forward, backward)


def load_fa2() -> Kernels:
    """Import FlashAttention-2: written in CUDA for Ampere (Dao 2023, arXiv:2307.08691).

    Raises ImportError for versions before 2.7, which pass the window in one argument instead of two.
    """
    from flash_attn import __version__
    from flash_attn.flash_attn_interface import (
        _flash_attn_backward,
        _flash_attn_forward,
        _flash_attn_varlen_backward,
        _flash_attn_varlen_forward,
        flash_attn_with_kvcache,
    )

    if [int(part) for part in __version__.split(".")[:2]] < [2, 7]:
        raise ImportError(f"flash_attn is {__version__}, older than 2.7")

    def keywords(options: Options) -> dict:
        window = {"window_size_left": window_left(options.window), "window_size_right": -1}
        mask = {"causal": options.causal, **window, **varlen_options(options.documents)}
        return {"dropout_p": 0.0, "softmax_scale": options.scale, "softcap": 0.0, "alibi_slopes": None, **mask}

    def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        if options.documents:
            return _flash_attn_varlen_forward(q, k, v, **keywords(options))[:2]
        if options.lengths is None:
            return _flash_attn_forward(q, k, v, **keywords(options), return_softmax=False)[:2]
        mask = {"causal": options.causal, "window_size": (window_left(options.window), -1)}
        arguments = {"cache_seqlens": options.lengths, "softmax_scale": options.scale, **mask}
        return flash_attn_with_kvcache(q, k, v, **arguments, return_softmax_lse=True)

    def backward(t: BackwardTensors, options: Options) -> None:
        backward_kernel = _flash_attn_varlen_backward if options.documents else _flash_attn_backward
        arguments = {**keywords(options), "deterministic": False}
        backward_kernel(t.dout, t.q, t.k, t.v, t.out, t.lse, t.dq, t.dk, t.dv, **arguments)

    return Kernels(forward, backward)


def load_built_in() -> Kernels:
    """Return the FlashAttention-2 that PyTorch contains, through the operators below scaled_dot_product_attention."""
    if not torch.backends.cuda.is_flash_attention_available():
        raise ImportError("this PyTorch was built without FlashAttention")
    aten = torch.ops.aten

    def keywords(options: Options) -> dict:
        window = {"window_size_left": window_left(options.window), "window_size_right": -1}
        return {"dropout_p": 0.0, "is_causal": options.causal, "scale": options.scale, **window}

    def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        arguments = {"return_debug_mask": False, **keywords(options)}
        if options.documents or options.lengths is None:
            sequences = sequence_arguments(q, k, options.documents)
            return aten._flash_attention_forward(q, k, v, **sequences, **arguments)[:2]
        # The operator supports lengths only for packed sequences. A cache can be read as packed sequences: each
        # sequence occupies Tk rows and uses only the first of them
        B, queries, H, D = q.shape
        arguments |= {"max_q": queries, "max_k": k.shape[1], "seqused_k": options.lengths}
        arguments["cum_seq_q"] = torch.arange(0, (B + 1) * queries, queries, dtype=torch.int32, device=q.device)
        k, v, arguments["cum_seq_k"] = pack_cache(k, v)
        out, lse, *_ = aten._flash_attention_forward(q.reshape(B * queries, H, D), k, v, **arguments)
        return out.view(B, queries, H, D), lse.view(H, B, queries).transpose(0, 1).contiguous()

    def backward(t: BackwardTensors, options: Options) -> None:
        random_state = t.lse.new_empty(0)  # for dropout; the operator does not read it
        arguments = {"rng_state": random_state, "unused": random_state, **keywords(options)}
        arguments |= sequence_arguments(t.q, t.k, options.documents)
        gradients = aten._flash_attention_backward(t.dout, t.q, t.k, t.v, t.out, t.lse, **arguments)
        for target, gradient in zip((t.dq, t.dk, t.dv), gradients, strict=True):
            target.copy_(gradient)

    return Kernels(forward, backward)


def sequence_arguments(q: Tensor, k: Tensor, documents: Documents | None) -> dict:
    """Return the keyword arguments that tell PyTorch's operators where sequences begin, and how long they are."""
    if documents is None:
        return {"cum_seq_q": None, "cum_seq_k": None, "max_q": q.shape[1], "max_k": k.shape[1]}
    bounds, longest = documents
    return {"cum_seq_q": bounds, "cum_seq_k": bounds, "max_q": longest, "max_k": longest}


def window_left(window: int | None) -> int:
    """Return FlashAttention's window_size_left: how many keys before its own position a query sees, or -1 for all."""
    return -1 if window is None else window - 1


def pack_cache(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return k and v (B, T, Hkv, D) as packed (N, Hkv, D), and the first row of each sequence, (B + 1,) int32.

    Copies k and v only if their strides differ, or if the distance between two sequences is not a whole number of rows.
    """
    B, T = k.shape[:2]
    if k.stride() != v.stride() or k.stride(0) % k.stride(1):
        k, v = k.contiguous(), v.contiguous()
    rows_per_sequence = T if B == 1 else k.stride(0) // k.stride(1)
    size = (B - 1) * rows_per_sequence + T, *k.shape[2:]
    starts = torch.arange(0, (B + 1) * rows_per_sequence, rows_per_sequence, dtype=torch.int32, device=k.device)
    return k.as_strided(size, k.stride()[1:]), v.as_strided(size, v.stride()[1:]), starts


class Version(NamedTuple):
    """An implementation of FlashAttention, and what it needs."""

    load: Callable[[], Kernels]
    package: str  # as pip names it
    install: str  # the command that installs it
    min_major: int = 8  # the GPU's smallest major compute capability
    max_major: int | None = None  # the GPU's largest major compute capability; None for no limit
    head_multiple: int = 8  # the head dim must be a multiple of this
    max_head_dim: int = 256


# On Hopper, FlashAttention-4 pads the head dim to a multiple of 16 in one place and of 32 in another. Its dq is wrong
# for a head dim such as 80 (Dao-AILab/flash-attention#2896, as of 4.0.0b36). Its kernels for compute capability 12.x
# are newer still (#2553), so max_major excludes them
VERSIONS = {
    "fa4": Version(
        load_fa4,
        "flash-attn-4",
        'pip install "flash-attn-4[cu13]>=4.0.0b36"',
        min_major=9,
        max_major=11,
        head_multiple=32,
        max_head_dim=128,
    ),
    "fa3": Version(
        load_fa3,
        "flash-attn-3",
        'pip install --no-build-isolation "git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"',
        min_major=9,
        max_major=9,
    ),
    "fa2": Version(load_fa2, "flash-attn", 'pip install --no-build-isolation "flash-attn>=2.7"'),
    "torch": Version(load_built_in, "torch", "pip install torch"),
}


@functools.lru_cache
def version_unavailable(name: str, device: torch.device, head_dim: int | None = None) -> str | None:
    """Return why version `name` cannot run on `device`, or None if it can. Checks the head dim only if it is given."""
    if why := unsupported(name, device, head_dim):
        return why
    version = VERSIONS[name]
    try:
        version.load()
    except IMPORT_ERRORS as error:
        return f"{name} cannot be imported ({one_line(error)}): {version.install}"
    return None


def unsupported(name: str, device: torch.device, head_dim: int | None) -> str | None:
    """Return why version `name` must not run on `device` or with the head dim, whether it is installed or not."""
    version = VERSIONS[name]
    if device.type != "cuda":
        return "it needs an NVIDIA GPU of compute capability 8.0 or newer; on a CPU choose attn=sdpa"
    major, minor = torch.cuda.get_device_capability(device)
    if not version.min_major <= major <= (version.max_major or major):
        upper = "or newer" if version.max_major is None else f"to {version.max_major}.x"
        needed = f"compute capability {version.min_major}.0 {upper}"
        return f"{name} needs a GPU of {needed}, and this one has {major}.{minor}: choose attn=sdpa"
    if head_dim is not None and (head_dim % version.head_multiple or head_dim > version.max_head_dim):
        supported = f"head dims that are multiples of {version.head_multiple}, up to {version.max_head_dim}"
        return f"{name} supports {supported}, not {head_dim}: choose attn.version=null, or attn=sdpa"
    return None


@functools.lru_cache
def newest_version(device: torch.device, head_dim: int | None = None) -> str:
    """Return the name of the newest version that can run on `device`, or "torch" if none can."""
    return next((name for name in VERSIONS if not version_unavailable(name, device, head_dim)), "torch")


def missing_package(device: torch.device, head_dim: int) -> str | None:
    """Return the package that cannot be imported, if FlashAttention 2 runs on a GPU for which there is a newer version.

    On an H200, GPT-2 124M then trains at 0.88 of the speed of attn=gluon, and with version 4 at 0.97 (two sittings).
    """
    if newest_version(device, head_dim) not in ("fa2", "torch"):
        return None
    return next((VERSIONS[name].package for name in ("fa4", "fa3") if not unsupported(name, device, head_dim)), None)
