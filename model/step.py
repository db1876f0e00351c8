"""Build the model and its optimizer, make one optimizer step, evaluate.

train.py, the scripts and lab/ all import these functions, so what they measure is what trains.
"""

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from data.loader import Batch, Loader, Windows, count_targets, evaluation_batches
from kernels.adamw import MULTIPLE, auto
from kernels.registry import AttnConfig, KernelsConfig, Ops, Unavailable, check_available, describe, load, resolve
from model.executed import name_backends
from model.flat_adamw import FlatAdamW
from model.gpt import GPT, PRECISIONS, GPTConfig, LayerNorm, in_eval_mode
from model.kept import write_kept
from model.optim import HISTORY, OptimConfig, Optimizer, TorchAdamW
from model.parallel import free_gathered
from model.pretrained import load_weights
from model.sources import Pretrained
from runtime.config import check
from runtime.ranks import Ranks, is_sharded
from runtime.schedule import TrainConfig
from terminal import shell_command, warn

MOST_KEPT = 10  # files of a run with the batch of a refused step, or of a spike
MIN_LOSSES = 10  # with fewer, no median is computed


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
    check_available(kernels, attn, device)  # for `auto`, this reads the tables
    named = name_backends(config, kernels, precision, device)
    return resolve(named, attn, device, [*config.attention_needs, *needs], in_fp8=precision == "fp8")


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


def make_optimizer(
    model: nn.Module, config: OptimConfig, ranks: Ranks | None = None, impl: str = "auto", **options: bool
) -> Optimizer:
    """Return the optimizer for the backend `impl` of the op adamw: TorchAdamW for eager, FlatAdamW for all others.

    `auto` is eager for weights that FlatAdamW does not take. `options` are Optimizer's. Raises Unavailable if the
    backend cannot run here.
    """
    weight = next(model.parameters())
    name, reason = impl, flat_unavailable(weight)
    if impl == "auto":
        name = "eager" if reason else auto.choose(weight.device)
    if name == "eager":
        optimizer = TorchAdamW(model, config, ranks, **options)
    elif reason:
        raise Unavailable(f"adamw={name} cannot run here: {reason}")
    else:
        optimizer = FlatAdamW(model, config, load("adamw", name, weight.device), ranks, **options)
    shape = {"shape": (MULTIPLE,), "dtype": weight.dtype, "device": weight.device}
    optimizer.kernel = describe("adamw", impl, chosen=name, **shape)
    return optimizer


def flat_unavailable(weight: Tensor) -> str | None:
    """Return why FlatAdamW cannot update a model with such weights, or None if it can."""
    if is_sharded(weight):
        return "only kernels.adamw=eager updates sharded weights (parallel=fsdp or zero2)"
    if weight.dtype == torch.float32:
        return "only kernels.adamw=eager updates fp32 weights: choose it, or precision=bf16"
    return None


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


def check_losses(model: GPT, optimizer: Optimizer, batches: Loader, folder: Path, t: TrainConfig) -> None:
    """Print a warning for a refused step, and for a spike of the loss, since the last call. Synchronises.

    The batch of the step goes to `folder`. If t.on_nonfinite is "stop", a refused step raises UserError instead, and
    its file also has the weights, unless they are sharded: scripts.blame reads it. With "skip" it raises UserError
    after t.max_skips refused steps in a row, or if why_nan() has a reason: then all later steps would be refused, too.
    """
    if t.spike_factor:
        warn_of_spike(optimizer, batches, folder, t.spike_factor)
    step = int(optimizer.first_refused)
    if not step:
        return
    optimizer.first_refused.zero_()
    weights = {}
    if t.on_nonfinite == "stop" and not any(is_sharded(weight) for weight in model.parameters()):
        weights = {"weights": model.state_dict()}  # no later step has changed them
    where = keep_batch(optimizer, batches, step, folder / f"nonfinite-step-{step:06d}.pt", weights)
    what = f"loss or gradient norm of step {step} is not finite"
    reason = why_nan(model)
    check(not reason, f"{what}, and its update was not made ({where}): {reason}")
    blame = shell_command("python", "-m", "scripts.blame", folder)
    check(
        t.on_nonfinite == "skip",
        f"the run has diverged: {what}, and its update was not made ({where}): {blame} names "
        "the op; lower optim.learning_rate, or pass over such steps with train.on_nonfinite=skip",
    )
    in_a_row = int(optimizer.refused_in_a_row)
    check(
        in_a_row < t.max_skips,
        f"the run has diverged: the last {in_a_row} steps had a loss or gradient norm that is not finite, and "
        f"train.max_skips={t.max_skips}: {blame} names the op, or lower optim.learning_rate",
    )
    if optimizer.ranks.is_main:
        warn(f"{what}; skipped ({int(optimizer.refused)} so far); {where}")


def warn_of_spike(optimizer: Optimizer, batches: Loader, folder: Path, factor: float) -> None:
    """Keep the batch of the first new loss that is beyond `factor` times the median of the last HISTORY steps."""
    steps, history = int(optimizer.steps), optimizer.history.tolist()
    first_new = max(optimizer.checked_steps, steps - HISTORY) + 1
    optimizer.checked_steps = steps
    finite = [loss for loss, _ in history if math.isfinite(loss)]
    if len(finite) < MIN_LOSSES:
        return
    median = statistics.median(finite)
    for step in range(first_new, steps + 1):
        loss, norm = history[step % HISTORY]
        if factor * median < loss < math.inf:
            facts = {"loss": loss, "grad_norm": norm}
            where = keep_batch(optimizer, batches, step, folder / f"spike-step-{step:06d}.pt", facts)
            if optimizer.ranks.is_main:
                what = f"loss {loss:.4g} of step {step} is beyond {factor:g} times {median:.4g}, the recent median"
                warn(f"{what}; gradient norm {norm:.4g}; {where}")
            return


def keep_batch(optimizer: Optimizer, batches: Loader, step: int, path: Path, facts: dict) -> str:
    """Write the batches of all ranks in this step, and `facts`, to `path`. Returns where they are, for a message.

    At most MOST_KEPT files of a kind are kept.
    """
    ranks = optimizer.ranks
    all_batches = ranks.gather(batches(step))[: ranks.batch_ranks]  # the loader is a pure function of the step
    kept = list(path.parent.glob(path.name.replace(f"{step:06d}", "*")))
    if len(kept) >= MOST_KEPT and "weights" not in facts:
        return f"its batch is not kept, after {MOST_KEPT} others"
    if ranks.is_main:
        try:
            write_kept(path, {"step": step, "batches": [batch for part in all_batches for batch in part], **facts})
        except (OSError, RuntimeError):  # torch.save raises RuntimeError on a full disk
            return f"its batch cannot be written to {path}"
    return f"batch in {path}"


def why_nan(model: GPT) -> str | None:
    """Return why the gradients of a norm are NaN, with the norm's name, if its backend can say that. Synchronises."""
    for name, module in model.named_modules():
        if not isinstance(module, LayerNorm):
            continue
        explain = getattr(sys.modules[module.norm.__module__], "why_nan", lambda *_: None)
        parameters = (p.full_tensor() if is_sharded(p) else p for p in module.parameters_in_dtype())
        if reason := explain(*parameters):
            return f"in {name}, {reason}"
    return None
