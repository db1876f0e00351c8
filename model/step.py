"""Build the model, make one optimizer step, evaluate.

train.py, the scripts and lab/ all import these functions, so what they measure is what trains.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from data.loader import Batch, Windows, count_targets, evaluation_batches
from kernels.registry import AttnConfig, KernelsConfig, Ops, Unavailable, check_available, resolve
from model.config import PRECISIONS, GPTConfig
from model.executed import called_kernels, called_ops, name_backends
from model.gpt import GPT
from model.modes import in_eval_mode
from model.optim import Optimizer
from model.parallel import free_gathered
from model.pretrained import load_weights
from model.sources import Pretrained
from runtime.ranks import Ranks


def load_ops(
    config: GPTConfig,
    kernels: KernelsConfig,
    attn: AttnConfig,
    precision: str,
    device: torch.device,
    needs: Sequence[str] = (),
) -> Ops:
    """Return the functions that the model calls. It allocates nothing. Raises Unavailable as build() does."""
    if kernels.compile and config.checkpointing in ("host", "chunks"):
        where = f"model.checkpointing={config.checkpointing}"
        raise Unavailable(f"kernels.compile=true cannot run with {where}: choose block, or no compile")
    kernels = called_kernels(config, kernels)
    check_available(kernels, attn, device)  # for `auto`, this reads the tables
    named = name_backends(config, kernels, precision, device)
    needs, called = config.needs(attention=needs), called_ops(config)
    return resolve(named, attn, device, needs, in_fp8=precision == "fp8", called=called)


def build(
    config: GPTConfig,
    kernels: KernelsConfig,
    attn: AttnConfig,
    precision: str,
    device: torch.device,
    *,
    seed: int | None = None,
    weights: Pretrained | None = None,
    needs: Sequence[str] = (),
) -> GPT:
    """Build the model on `device`, in training mode and not compiled, with the chosen kernels and precision.

    The parameters are drawn from `seed`; without a seed they are not initialised. Then `weights` replace them. `needs`
    names optional arguments that attention must take, such as `starts`. No state of the process changes. Raises
    Unavailable if a kernel cannot run here, and UserError if `weights` are of another model.
    """
    ops = load_ops(config, kernels, attn, precision, device, needs)
    stored, compute = PRECISIONS[precision]
    if seed is None:
        with torch.device("meta"):
            model = GPT(config, ops, compute).to(stored)
        model.to_empty(device=device)
    else:
        with device, draw_from(seed, device):
            model = GPT(config, ops, compute).to(stored)
    if weights:
        load_weights(model, weights)
    return model


@contextmanager
def draw_from(seed: int, device: torch.device) -> Iterator[None]:
    """Within this context, random numbers on `device` are those after torch.manual_seed(seed)."""
    generator = torch.default_generator
    if device.type == "cuda":
        torch.cuda.init()  # makes the generators
        generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def train_step(model: GPT, optimizer: Optimizer, batches: list[Batch], lr: float | Tensor) -> tuple[Tensor, Tensor]:
    """Make one optimizer step over the micro-batches of this rank: (mean loss, gradient norm) over all ranks.

    Both are scalars on the device. Nothing here waits for the device.
    """
    total = torch.zeros((), device=batches[0][0].device)
    for i, batch in enumerate(batches, start=1):
        loss = model(*batch) / len(batches)
        optimizer.backward(loss, last=i == len(batches))
        total += loss.detach()
    total = optimizer.ranks.mean(total)
    return total, optimizer.step(lr, total)


@torch.no_grad()
@in_eval_mode
def evaluate(
    model: GPT, windows: Windows, batch_size: int, samples: int, device: torch.device, ranks: Ranks | None = None
) -> float:
    """Return the mean loss over a fixed set of validation samples, whose batches are divided among the ranks.

    The set depends only on `samples`, so the loss depends on the batch size and on the ranks only by rounding.
    """
    ranks = ranks or Ranks()
    batches = list(evaluation_batches(windows, batch_size, samples))
    weights = [count_targets(batch) / batch[1].numel() for batch in batches]  # 1 for a full batch
    total = torch.zeros((), device=device)
    for first in range(0, len(batches), ranks.batch_ranks):
        group = batches[first : first + ranks.batch_ranks]  # one batch a rank; the last group may be smaller
        batch = group[min(ranks.batch_rank, len(group) - 1)]  # under FSDP every rank must run the model for every group
        loss = model(*(tensor.to(device) for tensor in batch))
        if ranks.batch_rank < len(group):
            total += loss * weights[first + ranks.batch_rank]
    free_gathered(model)
    # With parallel=context each rank has the total of all batches, and otherwise of its share
    return ranks.mean(total).item() * ranks.batch_ranks / sum(weights)
