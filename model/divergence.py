"""Warn of steps whose loss is not finite, or a spike, and keep their batches for scripts.blame."""

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torch import Tensor

from common.terminal import shell_command, warn
from data.loader import Loader
from model.gpt import GPT, Attention
from model.layers import Norm, cast
from model.optim import HISTORY, Optimizer
from model.step_file import write_step
from runtime.config import check
from runtime.ranks import is_sharded
from runtime.schedule import TrainConfig

MOST_KEPT = 10  # files of one kind in a run's folder: batches of refused steps, or of spikes
MIN_LOSSES = 10  # with fewer, no median is computed


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
    """Write the batches of all ranks in this step, and `facts`, to `path`. Return where they are, for a message."""
    ranks = optimizer.ranks
    all_batches = ranks.gather(batches(step))[: ranks.batch_ranks]  # the loader is a pure function of the step
    kept = list(path.parent.glob(path.name.replace(f"{step:06d}", "*")))
    if len(kept) >= MOST_KEPT and "weights" not in facts:
        return f"its batch is not kept, after {MOST_KEPT} others"
    if ranks.is_main:
        try:
            write_step(path, {"step": step, "batches": [batch for part in all_batches for batch in part], **facts})
        except (OSError, RuntimeError):  # torch.save raises RuntimeError on a full disk
            return f"its batch cannot be written to {path}"
    return f"batch in {path}"


def why_nan(model: GPT) -> str | None:
    """Return why the gradients of a norm are NaN, with the norm's name, if its backend can say that. Synchronises."""
    for name, norm, parameters in norms(model):
        explain = getattr(sys.modules[norm.__module__], "why_nan", lambda *_: None)
        if reason := explain(*(p.full_tensor() if is_sharded(p) else p for p in parameters)):
            return f"in {name}, {reason}"
    return None


def norms(model: GPT) -> Iterator[tuple[str, Callable, Iterable[Tensor]]]:
    """Yield the name of each module that normalises, its function, and the norm's parameters in the compute dtype."""
    for name, module in model.named_modules():
        if isinstance(module, Norm):
            yield name, module.norm, module.parameters_in_dtype()
        elif isinstance(module, Attention) and module.q_norm:
            weights = module.q_norm.weight, module.k_norm.weight
            yield name, module.rope, (cast(weight, model.ln_f.dtype) for weight in weights)
