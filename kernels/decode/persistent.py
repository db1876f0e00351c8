"""The whole decoder as one kernel: one launch makes many tokens of up to 8 sequences, and draws them.

decode=blocks loses most of a step at the ends of its 125 to 250 kernels. persistent.cu explains how one kernel loads
weights while it waits for results. NVRTC compiles it for the model's sizes and the batch, in 2 s.

The kernel needs its own copy of the weights, in another order: 247 MB for 124M. It also decodes Llama, SmolLM2 and
Qwen3. Generation on an H200 in bf16, in tokens/s, and the share of what the memory's bandwidth allows:

                    sequences    decode=triton    here      share
    GPT-2 124M      1            5,155            6,944
    GPT-2 124M      8            34,016           33,277
    GPT-2 1558M     1            543              906
    SmolLM2-135M    1            2,102            3,629     24%
    Qwen3-0.6B      1            1,293            2,296     69%
    Llama-3.2-1B    1            1,083            1,517     92%

The rows of GPT-2 are older. Since then only the kernel was timed, in loops of greedy tokens: 133 us for 124M and 1,056
us for 1558M. The other rows are greedy.

Constants choose the norm, the activation and the norm of queries and keys, so GPT-2's instructions are the same as
without them.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from kernels import compat
from kernels.cache import FP8, Cache
from kernels.decode import FAILED_LAUNCH, Model, Weights
from kernels.decode._persistent import emulator
from kernels.decode._persistent.plan import (
    Plan,
    arrange_rows,
    arrange_weights,
    count_blocks,
    count_warps,
    group_size,
    make_plans,
    sizes,
    stack_norms,
    stack_qk_norms,
)
from kernels.gpu import SHARED_BYTES, gpu_unavailable, multiprocessors
from kernels.registry import KernelError, Unavailable, cpp_compiler
from kernels.rope import scale_frequencies
from kernels.sampling import HASH_FACTORS, ID_FACTOR, NO_TOKEN, POSITION_FACTOR, Sampling  # noqa: F401

FAMILY = "persistent_decode"
RUNS = {"nvrtc": ("persistent_decode",)}
SOURCE = Path(__file__).with_name("persistent.cu")
MOST_SEQUENCES = 8
COPIES = 4  # of the words that all blocks poll: with one, the polls queue for the same lines of the L2
SPLIT_KEYS = 64  # in a split, or more if the blocks are too few: a block takes one split of one head of one sequence
TIMEOUT_NS = 2_000_000_000  # of a block's wait for another one
FIRST_FACTOR, SECOND_FACTOR = HASH_FACTORS
CONSTANTS = (  # of persistent.cu
    *("COPIES", "SPLIT_KEYS", "SHARED_BYTES", "TIMEOUT_NS"),
    *("ID_FACTOR", "POSITION_FACTOR", "FIRST_FACTOR", "SECOND_FACTOR", "NO_TOKEN"),
)
TIMING = False  # record in tensors["timeline"] the cycle at which block 0 begins a token and ends each interval
INTERVALS = "ln_1", "qkv", "attend", "combine", "proj", "ln_2", "fc", "hidden", "fc_proj"  # of a layer
LAST_INTERVALS = "ln_f", "head", "summarize", "draw", "token"  # of a token; embed is part of the first ln_1


def unavailable(device: torch.device) -> str | None:
    """Return why the kernel cannot run on `device`, or None. With TRITON_INTERPRET=1 a CPU emulates it, for tests."""
    if device.type == "cuda":
        return gpu_unavailable(device, (9, 0)) or compat.nvrtc_unavailable()
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None if cpp_compiler() else "its emulator needs g++ or clang++; install one"
    return f"{gpu_unavailable(device, (9, 0))}; for a trial on a CPU set TRITON_INTERPRET=1"


def detail() -> str:
    return f"cuda {torch.version.cuda}, nvrtc" if torch.version.cuda else "emulated"


def check_sizes(weights: Weights, cache: Cache) -> None:
    """Raise Unavailable for a model or a cache that the kernel cannot take."""
    keys, C, D, dtype = cache.kv[0][0], weights.wte.shape[1], weights.head_dim, weights.wte.dtype
    reason = None
    if len(keys) > MOST_SEQUENCES:
        reason = f"decodes up to {MOST_SEQUENCES} sequences, not {len(keys)}"
    elif dtype not in (torch.float32, torch.bfloat16) or keys.dtype not in (torch.float32, torch.bfloat16, FP8):
        reason = f"supports float32 and bfloat16, and a cache in float8_e4m3fn, not {dtype} with {keys.dtype}"
    elif D % 8 or D > 256:
        reason = f"needs a multiple of 8 channels a head, and up to 256 channels, not {D}"
    elif C % 8:
        reason = f"needs a multiple of 8 channels, not {C}"
    elif not all(tensor.is_contiguous() for pair in cache.kv for tensor in pair):
        reason = "needs a contiguous cache"
    if reason:
        raise Unavailable(f"the persistent decoder {reason}: choose kernels.decode=blocks")


@functools.lru_cache
def compile_for_gpu(options: tuple[str, ...], device: torch.device, blocks: int, threads: int) -> Callable:
    """Return persistent.cu as a function of its arguments."""
    with torch.cuda.device(device):
        # --ftz flushes subnormal numbers to 0. Without it, each exp2 takes three more instructions
        kernel = compat.compile_cuda(SOURCE, "persistent_decode", ("--std=c++17", "--ftz=true", *options))
    return functools.partial(compat.launch_cooperatively, kernel, blocks, threads, SHARED_BYTES, device)


@functools.lru_cache
def arguments_type(layers: int) -> type[ctypes.Structure]:
    """Return `struct Arguments` of persistent.cu."""
    groups = [
        (ctypes.c_void_p, "weights biases scales norms qk_norms wte wpe frequencies"),
        (ctypes.c_void_p * layers, "keys values"),
        (ctypes.c_void_p, "tokens positions seeds stops drawn logits"),
        (ctypes.c_void_p, "qkv partial proj fc fc_proj groups token failed timeline"),
        (ctypes.c_int, "wpe_rows rows steps epoch stop_count n_vocab top_k"),
        (ctypes.c_float, "temperature top_p"),
    ]
    fields = [(name, kind) for kind, names in groups for name in names.split()]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


@functools.lru_cache
def ids_tensor(device: torch.device, ids: tuple[int, ...]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=device)


class Packed:
    """The kernel for a model and a batch, its weights, and the global memory for the words of the blocks."""

    def __init__(self, weights: Weights, cache: Cache) -> None:
        check_sizes(weights, cache)
        self.batch = len(cache.kv[0][0])
        self.wpe_rows = 0 if weights.wpe is None else len(weights.wpe)
        device = weights.wte.device
        self.blocks = count_blocks(weights, multiprocessors(device))
        warps = count_warps(weights, self.batch)
        plans = make_plans(weights, self.blocks, warps)
        constants = {name: globals()[name] for name in CONSTANTS}
        defined = sizes(weights, cache, self.blocks, warps, plans) | constants
        options = tuple(f"-D{name}={value}" for name, value in defined.items())
        if TIMING:
            options += ("-DTIMING",)
        try:
            if device.type == "cpu":
                self.run = emulator.compile_for_cpu(options)
            else:
                self.run = compile_for_gpu(options, device, self.blocks, 32 * (warps + 1))
        except RuntimeError as error:
            if "too little shared memory" not in str(error):
                raise
            raise Unavailable(
                f"the persistent decoder: {SHARED_BYTES} bytes of shared memory are too few for {self.batch} "
                "sequences of this model: use fewer sequences, or choose kernels.decode=blocks"
            ) from error
        self.tensors = self.parameters(weights, plans) | self.exchange_memory(weights, plans)
        self.arguments = arguments_type(len(weights.layers))()
        for name, tensor in self.tensors.items():
            setattr(self.arguments, name, tensor.data_ptr())

    def parameters(self, weights: Weights, plans: dict[str, Plan]) -> dict[str, Tensor]:
        """Return the weights by their names in `struct Arguments`."""
        blocks, D = self.blocks, weights.head_dim
        matrices = arrange_weights(weights, plans, blocks)
        vectors = {"biases": arrange_rows(weights, plans, blocks, "bias", weights.wte.dtype)}
        if matrices.dtype == torch.int8:
            vectors["scales"] = arrange_rows(weights, plans, blocks, "scales", torch.float32)
        if weights.wpe is None:
            exponents = torch.arange(0, D, 2, device=weights.wte.device, dtype=torch.float32) / D
            frequencies = weights.rope_theta**-exponents
            if weights.rope_scaling is not None:
                frequencies = scale_frequencies(frequencies, weights.rope_scaling)
            positions = {"frequencies": frequencies}
        else:
            positions = {"wpe": weights.wpe.contiguous()}
        vectors |= {"norms": stack_norms(weights), "wte": weights.wte.contiguous()}
        if weights.has_qk_norm:
            vectors["qk_norms"] = stack_qk_norms(weights)
        return {"weights": matrices, **vectors, **positions}

    def exchange_memory(self, weights: Weights, plans: dict[str, Plan]) -> dict[str, Tensor]:
        """Return the memory of the words, by its names in `struct Arguments`. A word has 4 x 4 bytes."""
        heads, per_word = self.batch * weights.heads, 12 // weights.wte.itemsize
        group = group_size(weights)
        groups = self.batch * self.blocks * ceil(plans["HEAD"].share / group)
        words = {"groups": groups * (1 + ceil(group / per_word)), "token": self.batch}
        # as many as an fp32 model's splits need, and more than publish_split() in bf16 and publish_output() need
        words["partial"] = COPIES * heads * max(1, self.blocks // heads) * weights.head_dim // 2
        for name in ("qkv", "proj", "fc", "fc_proj"):
            copies = 1 if name == "qkv" else COPIES  # only the blocks of one head poll the words of q, k and v
            plan = plans[name.upper()]  # swiglu's fc publishes half as many results as it has rows
            words[name] = copies * self.batch * self.blocks * plan.passes * ceil(plan.rows / per_word)
        shapes = {name: (count, 4) for name, count in words.items()} | {"failed": (1,)}
        zeros = functools.partial(torch.zeros, dtype=torch.int32, device=weights.wte.device)
        timeline = zeros(2**17 if TIMING else 0)
        return {name: zeros(shape) for name, shape in shapes.items()} | {"timeline": timeline}

    def launch(self, tokens: Tensor, cache: Cache, steps: int, sampling: Sampling, **tensors: Tensor) -> Tensor:
        """Start `steps` steps. Return whether a block waited too long for another one, (1,) bool, on the device."""
        a = self.arguments
        tensors |= {"tokens": tokens.contiguous(), "positions": cache.positions.contiguous()}
        for name in ("tokens", "positions", "seeds", "stops", "drawn", "logits"):
            setattr(a, name, tensors[name].data_ptr() if name in tensors else None)
        for layer, (keys, values) in enumerate(cache.kv):
            a.keys[layer], a.values[layer] = keys.data_ptr(), values.data_ptr()
        a.wpe_rows, a.rows, a.steps = self.wpe_rows, cache.rows, steps
        a.stop_count = len(tensors.get("stops", ()))
        a.n_vocab, a.temperature, a.top_k, a.top_p = sampling
        # at least 1e-30, so logits / temperature is finite for logits up to 3e8
        a.temperature = max(a.temperature, 1e-30) if a.temperature else 0
        self.run(a)
        a.epoch = (a.epoch + steps * len(cache.kv)) % 2**31
        failed = self.tensors["failed"] > 0
        self.tensors["failed"].zero_()
        return failed


def pack(model: Model, cache: Cache) -> Packed:
    return Packed(model.weights(), cache)


def decode(packed: Packed, tokens: Tensor, cache: Cache) -> Tensor:
    if tokens.shape[1] != 1:
        raise Unavailable(
            f"the persistent decoder makes one token at a time, not {tokens.shape[1]}: choose kernels.decode=blocks"
        )
    wte = packed.tensors["wte"]
    logits = torch.empty(packed.batch, 1, len(wte), dtype=wte.dtype, device=wte.device)
    if packed.launch(tokens, cache, 1, Sampling(len(wte)), logits=logits).item():
        raise KernelError(
            f"the persistent decoder: a block waited {TIMEOUT_NS / 1e9:g} s for another one, so the logits are wrong: "
            "try again, or choose kernels.decode=blocks"
        )
    return logits


def generate_tokens(
    packed: Packed, tokens: Tensor, cache: Cache, seeds: Tensor, sampling: Sampling, steps: int, stops: tuple[int, ...]
) -> Tensor:
    """Do what the contract says. The host does not wait for the GPU, except to copy new `stops`."""
    drawn = torch.empty(packed.batch, steps, dtype=torch.int64, device=tokens.device)
    ids = ids_tensor(tokens.device, stops)
    failed = packed.launch(tokens, cache, steps, sampling, seeds=seeds, stops=ids, drawn=drawn)
    return drawn.masked_fill_(failed, FAILED_LAUNCH)
