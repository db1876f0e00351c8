"""`python -m tests.hotswap.state` uses all public functions of hotswap, and prints what they change in its process."""

import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import torch

SHAPE = {"n_layer": 1, "n_embd": 32, "n_head": 2, "block_size": 16, "vocab_size": 64}
SIZES = {**SHAPE, "bias": True}
OPTIONS = {"device": "cuda" if torch.cuda.is_available() else "cpu", "precision": "fp32"}
# Imports of other projects may change the process. They come before the first snapshot. The configs of torch.compile,
# too, are part of a snapshot
IMPORTS = (
    "torch._dynamo.config",
    "torch._inductor.config",
    "torch._functorch.config",
    "torch.utils.cpp_extension",
    "hydra",
    "transformers.models.gpt2.modeling_gpt2",
    "helion",
    "tilelang",
    "torchao",
    "jax",
)


def count_threads() -> int:
    """Return the number of threads, without PyTorch's own, in which autograd calls Python on a GPU."""
    return sum(not thread.name.startswith("Dummy") for thread in threading.enumerate())


def snapshot() -> dict:
    """Return the state of the process, by the name of its part."""
    backends, cuda = torch.backends, torch.cuda.is_available()
    matmul, deterministic = backends.cuda.matmul, torch.utils.deterministic
    return {
        "seed of random": random.getstate(),
        "seed of numpy": repr(np.random.get_state()),
        "seed of torch": torch.get_rng_state().tolist(),
        "seed of CUDA": [state.tolist() for state in torch.cuda.get_rng_state_all()] if cuda else None,
        "current GPU": torch.cuda.current_device() if cuda else None,
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), count_threads()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "TF32": (matmul.allow_tf32, backends.cudnn.allow_tf32),
        "reduced precision": (
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_accumulation,
        ),
        "cuDNN": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "oneDNN": (backends.mkldnn.enabled, backends.mkldnn.deterministic),
        "SDPA": (
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.cuda.cudnn_sdp_enabled(),
        ),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            deterministic.fill_uninitialized_memory,
        ),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "torch.compile": {name: sys.modules[name].get_config_copy() for name in IMPORTS if name.endswith(".config")},
        "variables": dict(os.environ),
        "sys.path": list(sys.path),
        "sys.argv": list(sys.argv),
        "folder": os.getcwd(),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "hooks": (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook),
        "garbage": (gc.isenabled(), gc.get_threshold(), gc.callbacks[:]),
        "faulthandler": faulthandler.is_enabled(),
        "recursion": sys.getrecursionlimit(),
        "numpy": (np.geterr(), np.get_printoptions()),
    }


@contextlib.contextmanager
def report(action: str) -> Iterator[None]:
    """Print the parts of the state that `action` changes."""
    before = snapshot()
    yield
    after = snapshot()
    for part, value in before.items():
        if value == after[part]:
            continue
        print(f"{action} changes {part}", end="")
        if isinstance(value, dict):
            print(
                ":", sorted(str(key) for key in value | after[part] if value.get(key) != after[part].get(key)), end=""
            )
        print()


def set_unusual_state() -> None:
    """Change what a library would reset to its default."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(2)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)


def use_models() -> None:
    """Build a model of every preset that runs here, and train it, load it and generate with it."""
    from hotswap.kernels.names import config_groups
    from hotswap.kernels.registry import Unavailable

    import hotswap

    idx = torch.arange(16, device=OPTIONS["device"]).view(2, 8)
    presets = config_groups()
    for choice in [{group: name} for group in ("kernels", "attn") for name in presets[group] if name != "*"]:
        # tests/hotswap/test_compile.py compiles every preset
        with report(f"a model with {choice}"), contextlib.suppress(Unavailable):
            model = hotswap.build("tiny", seed=3, **choice, **SHAPE, **OPTIONS)
            if choice != {"kernels": "compile"}:
                model(idx, idx).backward()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/ckpt.pt"
        torch.save({"model": hotswap.build("tiny", **SHAPE, **OPTIONS).state_dict(), "model_args": SIZES}, path)
        with report("load()"):
            model = hotswap.load(path, **OPTIONS)
    with report("generate()"):
        hotswap.generate(model, idx, 12, n_vocab=64, top_k=5)


def use_op() -> None:
    from hotswap.kernels.registry import ALL_OPS, Unavailable, contract, impls

    import hotswap

    for op in ALL_OPS:
        case = next(iter(contract(op).CASES.values()))
        inputs = contract(op).inputs(**case, dtype=torch.float32, device=OPTIONS["device"])
        for impl in impls(op):
            with report(f"op({op!r}, {impl!r})"), contextlib.suppress(Unavailable):
                function = hotswap.op(op, impl, OPTIONS["device"])
                if op != "decode":
                    function(**inputs)


USES = {"build": use_models, "load": use_models, "generate": use_models, "op": use_op}


def main() -> None:
    for name in IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if torch.cuda.is_available():  # the first compilation raises Python's limit of recursion
        torch.compile(torch.sin)(torch.ones(1, device="cuda"))
    set_unusual_state()
    with report("import hotswap"):
        import hotswap
    functions = {name for name in hotswap.__all__ if not isinstance(getattr(hotswap, name), type)}
    assert functions == USES.keys(), "USES lacks a public function"
    for use in dict.fromkeys(USES.values()):
        use()
    print("done")


if __name__ == "__main__":
    main()
