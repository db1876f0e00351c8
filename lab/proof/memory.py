"""Predict the memory of a training step on fake tensors, which allocate nothing, and measure it on a GPU.

A fake tensor has a shape, a dtype and a device, and no memory. Operators, autograd, the optimizer and
torch.utils.checkpoint run on fake tensors unchanged, and create the same tensors as on real ones. So no backend needs a
formula: activation checkpoints, a sliding window, and attention that writes T x T scores are counted without further
code. A model under torch.compile is predicted as if it were not compiled, which takes more memory.

    with simulate(device) as usage:
        model = recipe.build(device)
    print(usage.now, usage.peak)

The simulation runs the Python function of a custom op that launches Triton kernels, and so counts all that the op
allocates. For any other custom op it runs the op's fake, which may also allocate a workspace (attention/flash.py). It
does not count the workspaces that cuBLAS and cuDNN allocate inside an operator, nor the allocator's gaps between
tensors. Its peak for a step in fp32 on a CPU equals PyTorch's allocator to the byte (tests/lab/proof/test_memory.py).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from data.loader import Batch
from kernels.compat import TorchDispatchMode, storage_id
from kernels.registry import AttnConfig, KernelsConfig
from kernels.sampling import Sampling
from lab import compat
from lab.recipe import Recipe
from model.chunks import chunk_tokens
from model.config import PRECISIONS, GPTConfig
from model.decoder import Decoder
from model.generate_config import GenerateConfig
from model.gpt import GPT
from model.optim import Optimizer
from model.parallel import prepare
from model.step import build, train_step
from runtime.device import GIB, OutOfMemory
from runtime.ranks import Ranks
from runtime.schedule import TrainConfig

FEW_LAYERS = 2, 3
FEW_CHUNKS = 8, 16  # with fewer than 6 chunks, the peak of GPT-2 124M is not in a block
USABLE = 0.9  # of a GPU's memory: predictions miss the CUDA context, cuBLAS's workspace and gaps between tensors


class MemoryUsage(TorchDispatchMode):
    """Counts the bytes of the tensors that are created on `device` while the mode is active.

    `now` is the number of bytes alive, and `peak` its maximum so far. A storage counts once, however many tensors view
    it, until the last of them is freed. `opaque` names the custom ops of which only the fakes' allocations were
    counted.
    """

    supports_higher_order_operators = True  # such as flex_attention

    def __init__(self, device: torch.device):
        super().__init__()
        self.device, self.now, self.peak = device.type, 0, 0
        self.storages: set[int] = set()
        self.opaque: set[str] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # without it, Dynamo does not compile while this mode is active

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if function := compat.custom_op_function(func.name()):
            try:
                if compat.uses_triton(function):
                    with self:
                        return function(*args, **(kwargs or {}))
            except RuntimeError:  # the function reads values or addresses, and a fake tensor has none
                pass
            self.opaque.add(func.name())
            if fake := compat.custom_op_fake(func.name()):
                with self:
                    return fake(*args, **(kwargs or {}))
        if kwargs and "out" in kwargs:  # creates nothing. PyTorch 2.11 cannot run addmm with out_dtype on fake tensors
            return kwargs["out"]
        out = func(*args, **(kwargs or {}))
        for tensor in compat.tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device:
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage_id(storage), storage.nbytes()
        if key not in self.storages:
            self.storages.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.remove, key, size)  # the finalizer keeps `self` alive

    def remove(self, key: int, size: int) -> None:
        self.storages.discard(key)
        self.now -= size


@contextmanager
def simulate(device: torch.device) -> Iterator[MemoryUsage]:
    """Make all new tensors fake, and yield the memory that the tensors on `device` would take."""
    # attn=flex calls torch.compile itself; aot_eager then runs the operators one by one
    with compat.fake_tensors(), compat.compile_with("aot_eager"), MemoryUsage(device) as usage:
        yield usage


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def split_peak(usage: MemoryUsage, model: nn.Module, optimizer: Optimizer, batches: list[Batch]) -> dict[str, float]:
    """Run one simulated step. Return the bytes of weights, gradients, optimizer state, activations, and the peak.

    Activations are the tensors that the forward of the last micro-batch saves for its backward.
    """
    optimizer.state()  # creates the moments, which exist from the first step on
    before, backward = usage.now, optimizer.backward
    parts = {"weights": tensor_bytes(model.parameters()), "gradients": 0}
    parts["optimizer"] = before - parts["weights"] - tensor_bytes(batches[0])

    def observed_backward(loss: Tensor, last: bool) -> None:
        nonlocal before
        parts["activations"] = usage.now - before
        backward(loss, last)
        before = usage.now  # the gradients of this micro-batch stay

    optimizer.backward = observed_backward
    optimizer.observer = lambda _, gradient: parts.update(gradients=parts["gradients"] + gradient.nbytes)
    train_step(model, optimizer, batches, 0.0)
    return parts | {"peak": usage.peak}


def predict_parts(
    recipe: Recipe, device: torch.device, start: Callable[[Recipe, int], tuple], length: int, chunk: int
) -> tuple[dict[str, float], set[str]]:
    """Return split_peak() of one step without torch.compile, and the opaque ops.

    start(recipe, length) returns the step's model, optimizer and batches. With model.checkpointing=chunks, a chunk has
    `chunk` tokens of a sequence. 24 chunks in 12 layers take 75 s, so with many chunks only FEW_CHUNKS are simulated,
    in FEW_LAYERS. Each layer and each chunk adds the same.
    """
    recipe = replace(recipe, kernels=replace(recipe.kernels, compile=False))
    many_chunks = recipe.model.checkpointing == "chunks" and length > FEW_CHUNKS[1] * chunk
    if many_chunks and recipe.model.n_layer > FEW_LAYERS[1]:

        def predict_layers(count: int) -> tuple[dict[str, float], set[str]]:
            smaller = replace(recipe, model=replace(recipe.model, n_layer=count))
            return predict_parts(smaller, device, start, length, chunk)

        return extrapolate(predict_layers, FEW_LAYERS, recipe.model.n_layer)
    if many_chunks:
        return extrapolate(
            lambda count: predict_parts(recipe, device, start, count * chunk, chunk), FEW_CHUNKS, length / chunk
        )
    with simulate(device) as usage:
        return split_peak(usage, *start(recipe, length)), usage.opaque


def extrapolate(
    predict: Callable[[int], tuple[dict[str, float], set[str]]], sizes: tuple[int, int], size: float
) -> tuple[dict[str, float], set[str]]:
    """Return what predict(size) would return if the bytes of each part are linear, from predict() at two sizes."""
    small, opaque = predict(sizes[0])
    large, _ = predict(sizes[1])
    steps = (size - sizes[0]) / (sizes[1] - sizes[0])
    return {part: small[part] + steps * (large[part] - small[part]) for part in small}, opaque


def predict_step(
    recipe: Recipe, batch_size: int, block_size: int, micro_steps: int, device: torch.device
) -> dict[str, float]:
    """Predict the GiB of a training step by part."""

    def start(recipe: Recipe, length: int) -> tuple[GPT, Optimizer, list[Batch]]:
        model = prepare(recipe.build(device), "ddp", recipe.kernels, recipe.seed, Ranks())
        batch = torch.zeros(2, batch_size, length, dtype=torch.int64, device=device).unbind()
        if recipe.documents:
            batch = *batch, torch.zeros(batch_size, length, dtype=torch.int32, device=device)
        # the second batch adds to the gradients of the first
        return model, recipe.make_optimizer(model), [batch] * min(2, micro_steps)

    return in_gib(predict_parts(recipe, device, start, block_size, recipe_chunk(recipe, batch_size))[0])


def predict_generation(
    groups: tuple[GPTConfig, KernelsConfig, AttnConfig, str],
    options: GenerateConfig,
    shape: tuple[int, int],
    new_tokens: int,
    device: torch.device,
    kept: int = 0,
    draft: GPTConfig | None = None,
) -> tuple[dict[str, float], set[str]]:
    """Return the bytes of weights, KV cache and peak of a prefill of `shape` and a step, and the opaque ops.

    The step is one of blocks. For any other decoder there is none: all share the prefill, which takes more memory. The
    prefill leaves out the first `kept` tokens. `draft` is the shape of the model that drafts.
    """
    config, kernels, attn, precision = groups
    prefill_only = kernels.decode != "blocks"
    kernels = replace(kernels, compile=False, decode="blocks")
    with simulate(device) as usage:
        shapes = [config] if draft is None else [config, draft]
        models = [build(each, kernels, attn, precision, device, seed=0).eval() for each in shapes]
        settings = {"options": options, "prefill_only": prefill_only, "draft": models[-1] if draft else None}
        ids = min(each.vocab_size for each in shapes)  # those that both models have; the rest is padding
        decoder = Decoder(models[0], shape[0], shape[1] + new_tokens, Sampling(ids, 0), **settings)
        decoder.prefill(torch.zeros(shape, dtype=torch.int64, device=device), kept=kept)
        if not prefill_only:
            decoder.step()
        parts = {part: tensor_bytes(tensors) for part, tensors in decoder.memory().items()}
        return parts | {"peak": usage.peak}, usage.opaque


def recipe_chunk(recipe: Recipe, batch_size: int) -> int:
    """Return how many tokens of a sequence a chunk has with model.checkpointing=chunks."""
    return chunk_tokens(batch_size, recipe.model.n_embd, PRECISIONS[recipe.precision][0])


def measure_step(model: GPT, optimizer: Optimizer, batches: list[Batch], peak_gib: float) -> dict[str, float]:
    """Measure the GiB of a training step on a GPU by part, in forward and backward of at most two micro-batches.

    `peak_gib` is the peak of the run.
    """
    parts = {"weights": tensor_bytes(model.parameters())}
    state = optimizer.state()
    if model.wte.weight.dtype == torch.float32:
        del state["model"]  # the optimizer updates the weights themselves
    parts["optimizer"] = sum(tensor_bytes(group.values()) for group in state.values())
    for batch in batches[:2]:  # the second one adds to the gradients of the first
        before = torch.cuda.memory_allocated()
        loss = model(*batch)
        parts["activations"] = torch.cuda.memory_allocated() - before
        loss.backward()
        optimizer.accumulate()
    parts["gradients"] = tensor_bytes(optimizer.gradients)
    optimizer.clear_gradients()
    return in_gib(parts | {"peak": peak_gib * GIB})


def in_gib(parts: dict[str, float]) -> dict[str, float]:
    """Return the parts in GiB, and as `workspace` the rest of the peak, which includes the logits.

    The parts are not all alive at the same moment. With a small batch their sum may exceed the peak, and the workspace
    is then 0.
    """
    rest = parts["peak"] - sum(size for name, size in parts.items() if name != "peak")
    return {name: size / GIB for name, size in {**parts, "workspace": max(0, rest)}.items()}


def largest_batch_size(recipe: Recipe, train: TrainConfig, device: torch.device, gib: float) -> int | None:
    """Return the largest divisor of train.batch_size, below it, whose predicted peak is at most `gib`.

    None if no such batch size fits.
    """
    for size in range(train.batch_size // 2, 0, -1):
        if train.batch_size % size == 0:
            micro_steps = train.tokens_per_step // (size * train.block_size)
            if predict_step(recipe, size, train.block_size, micro_steps, device)["peak"] <= gib:
                return size
    return None


def usable_gib(device: torch.device) -> float | None:
    """Return the GiB that a prediction may reach on this GPU; None on a CPU."""
    return USABLE * torch.cuda.mem_get_info(device)[1] / GIB if device.type == "cuda" else None


@contextmanager
def suggest_batch_size(recipe: Recipe, train: TrainConfig, device: torch.device, ranks: Ranks) -> Iterator[None]:
    """If the GPU runs out of memory, add the largest batch size that is predicted to fit to the error message.

    Nothing is predicted for a model that is not ours.
    """
    try:
        yield
    except OutOfMemory as full:
        gib = usable_gib(device) if recipe.is_ours else None
        size = largest_batch_size(recipe, train, device, gib) if gib and ranks.single else None
        if size is None:
            raise
        raise OutOfMemory(f"{full}; train.batch_size={size} is predicted to fit") from full
