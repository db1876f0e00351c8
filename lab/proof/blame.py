"""Find the op behind a step whose loss or gradient is not finite.

The run stored the batches of the step. They run again, forward and backward, without an update and without
torch.compile: first with the run's backends, then with one op at a time swapped to eager, then with all of them. Each
call of an op is watched. The first call that makes NaN or infinity out of finite tensors is the culprit. If the step is
finite with this op swapped to eager, its backend is to blame. If eager PyTorch gives the same, it is the weights, the
data or the learning rate. Before that, the step is replayed twice: if eager PyTorch does not repeat its bits, the
machine is to blame.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor, nn

from common.terminal import class_and_message, warn
from data.loader import IGNORED, Batch
from kernels.fp8 import InFp8
from kernels.registry import OPS, AttnConfig, KernelError, config_key, impl_by_op
from lab.proof.soak import checksum
from lab.recipe import Recipe
from model import step_file
from model.config import GPTConfig
from model.executed import called_kernels
from runtime.checkpoint import checkpoint_folders, read_weights, step_number
from runtime.config import UserError, check
from runtime.device import explain_out_of_memory


class BadStep(NamedTuple):
    """The batches of a step whose loss or gradient is not finite, and the weights that it started from."""

    number: int
    batches: list[Batch]
    weights: dict[str, Tensor]
    weights_step: int  # the weights after this step: step - 1, or older


class Replay(NamedTuple):
    """What one replay gave. `first` is the first call that is not finite; None if every call is finite."""

    swap: str
    loss: float | None
    first: str | None
    failure: str | None = None  # why the replay could not run
    bits: int = 0  # a checksum of the loss, the gradients and the outputs of all calls

    @property
    def result(self) -> str:
        return f"not run: {self.failure}" if self.failure else self.first or "every call is finite"


def read_step(run: Path, number: int | None) -> BadStep:
    """Return the bad step of the run's folder: step `number`, or the first one.

    If the run had train.on_nonfinite=skip or sharded weights, the file has no weights. Then the weights are
    read from the newest valid checkpoint before the step. Raises UserError if the file is damaged.
    """
    paths = {}
    for path in sorted(run.glob("nonfinite-step-*.pt")):
        digits = path.stem.rpartition("-")[2]
        if digits.isdecimal():
            paths[int(digits)] = path
    check(bool(paths), f"{run} has no nonfinite-step-*.pt: a run writes it when a loss or gradient is not finite")
    check(number is None or number in paths, f"--step {number}: {run} has the steps {', '.join(map(str, paths))}")
    number = min(paths) if number is None else number
    facts = step_file.read_step(paths[number])
    check(facts["step"] == number, f"{paths[number]} is of step {facts['step']}: it was renamed")
    if "weights" in facts:
        return BadStep(number, facts["batches"], facts["weights"], number - 1)
    for checkpoint in checkpoint_folders(run / "checkpoints"):  # the newest first
        if step_number(checkpoint) < number:
            try:
                return BadStep(number, facts["batches"], read_weights(checkpoint), step_number(checkpoint))
            except UserError as error:
                warn(error)
    raise UserError(f"{paths[number]} has no weights, and {run} has no valid checkpoint before step {number}")


def check_ids(step: BadStep, model: GPTConfig) -> None:
    """Raise UserError if the model cannot take the batches: an id would be read outside of its embedding."""
    for x, y, *starts in step.batches:
        ids_fit = bool(((x >= 0) & (x < model.vocab_size) & (y >= IGNORED) & (y < model.vocab_size)).all())
        starts_fit = all(bool(((start >= 0) & (start <= torch.arange(x.shape[1]))).all()) for start in starts)
        check(
            x.numel() > 0 and ids_fit and starts_fit,
            f"the batches of step {step.number} do not fit the run's model, which has model.vocab_size="
            f"{model.vocab_size}: they are damaged, or of another run",
        )
        model.check_length(x.shape[1], key=f"the batches of step {step.number}: ")


def swaps(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield (name, recipe): the run's, then one op at a time swapped to eager, then all of them."""
    recipe = replace(recipe, kernels=replace(recipe.kernels, compile=False))
    yield "as in the run", recipe
    called = called_kernels(recipe.model, recipe.kernels)
    names = {op: impl for op, impl in impl_by_op(called, recipe.attn).items() if impl != "eager"}
    for op in names:
        yield f"{config_key(op)}=eager", with_eager(recipe, op)
    if len(names) > 1:
        yield "all ops eager", functools.reduce(with_eager, names, recipe)


def with_eager(recipe: Recipe, op: str) -> Recipe:
    if op == "attention":
        return replace(recipe, attn=AttnConfig("eager"))
    return replace(recipe, kernels=replace(recipe.kernels, **{op: "eager"}))


def replay(swap: str, recipe: Recipe, step: BadStep, device: torch.device) -> Replay:
    """Run the batches forward and backward, up to the first call that is not finite.

    Raises KernelError if the code of a backend raises an error.
    """
    try:
        return run_batches(swap, recipe, step, device)
    except (UserError, KernelError):
        raise
    except Exception as error:  # a backend may raise any error
        raise KernelError(f"{swap}: a backend fails with {shorten(class_and_message(error), 200)}") from error


def run_batches(swap: str, recipe: Recipe, step: BadStep, device: torch.device) -> Replay:
    """Do what replay() does. A backend's own error is not caught."""
    found: list[str] = []
    sums: list[Tensor] = []  # of the outputs: once a number is NaN, the loss and the gradients are NaN, too
    with explain_out_of_memory(f"the batch of step {step.number}, {swap}", "the use of this GPU by other programs"):
        model = recipe.build(device)
        try:
            model.load_state_dict(step.weights)
        except RuntimeError as error:
            reason = shorten(str(error), 200)
            raise UserError(f"the weights of step {step.weights_step} do not fit the run's config: {reason}") from None
        watch_ops(model, found, sums)
        for batch in step.batches:
            loss = model(*(tensor.to(device) for tensor in batch))
            loss.backward()
            if found:
                break
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    bad = [name for name, gradient in gradients.items() if not all_finite([gradient])]
    if not found and not all_finite([loss]):
        found = ["the loss, outside of every op"]
    if not found and bad:
        found = [f"the gradient of {bad[0]}, outside of every op"]
    if not found and not all_finite([nn.utils.get_total_norm([gradient.float() for gradient in gradients.values()])]):
        found = ["the gradient norm: it overflows, and every gradient is finite"]
    bits = int(checksum([loss, *gradients.values(), *sums]))
    return Replay(swap, loss.item(), found[0] if found else None, bits=bits)


def check_repeatable(step: BadStep, device: torch.device, recipe: Recipe, eager: Recipe) -> str | None:
    """Replay the step twice. If the bits differ, replay it twice with all ops eager.

    Returns a line if only the run's backends differ. Raises UserError if eager PyTorch differs: its kernels are
    deterministic, so it is the machine.
    """

    def is_repeated(recipe: Recipe) -> bool:
        first, again = (replay("replayed twice", recipe, step, device) for _ in range(2))
        return first.bits == again.bits

    if is_repeated(recipe):
        return None
    check(
        is_repeated(eager),
        f"the machine is to blame: two replays of step {step.number} with eager PyTorch give different bits; test "
        "it with python -m scripts.doctor soak=10",
    )
    return "Two replays differ in their bits, and with all ops eager they do not: a backend is not deterministic."


def watch_ops(model: nn.Module, found: list[str], sums: list[Tensor]) -> None:
    """Let every call of an op append a line to `found` if it is the first to make a non-finite tensor.

    Every call appends the checksum of its outputs to `sums`.
    """
    for name, module in model.named_modules():
        for op in OPS:
            if op in vars(module):  # the op's function; a submodule of this name is not in vars()
                called = getattr(module, "op", op)  # a norm may be rms_norm
                where = f"{called} in {name}" if name else called
                setattr(module, op, watch_function(vars(module)[op], where, found, sums))


def watch_function(function: Callable, where: str, found: list[str], sums: list[Tensor]) -> Callable:
    """Return the function with a test of its tensors, forward and backward, and a checksum of its outputs."""

    def call(*arguments, **options):
        if not all_finite(arguments):
            found.append(f"the inputs of {where}")
        aliases = [alias(x) for x in arguments]  # so that the gradient of each input is of this call alone
        result = function(*aliases, **options)
        outputs = result if isinstance(result, tuple) else (result,)
        sums.append(checksum(float_tensors(outputs)))
        if not all_finite(outputs):
            found.append(f"{where}, its output")
        for values, what in ((outputs, f"the gradient that reaches {where}"), (aliases, f"{where}, its gradient")):
            for value in values:
                tensor = value.tensor if isinstance(value, InFp8) else value
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(functools.partial(check_gradient, what, found))
        return result

    return call


def alias(value: Any) -> Any:
    """Return the value, or a view of a tensor that requires a gradient."""
    if isinstance(value, InFp8):
        return replace(value, tensor=alias(value.tensor))
    return value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value


def check_gradient(what: str, found: list[str], gradient: Tensor) -> None:
    if not all_finite([gradient]):
        found.append(what)


def all_finite(values: Iterable) -> bool:
    """Return whether all tensors among the values are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in float_tensors(values))


def float_tensors(values: Iterable) -> list[Tensor]:
    """Return the floating-point tensors among the values. InFp8 counts once, because both layouts hold the same."""
    tensors = [value.rows.float() if isinstance(value, InFp8) else value for value in values]
    return [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_floating_point()]


def verdict(replays: list[Replay], step: BadStep) -> str:
    """Return the page: a table with a line for each replay, and the first op and layer that is not finite."""
    run, *swapped = replays
    lines = [[one.swap, "" if one.loss is None else f"{one.loss:.4g}", one.result] for one in replays]
    table = tabulate(lines, ["backends", "loss", "first that is not finite"], tablefmt="github", disable_numparse=True)
    repaired = [one.swap for one in swapped if one.first is None and not one.failure]
    if run.first is None:
        sentence = "The step does not go wrong in this replay, which has no torch.compile, CUDA graph or other ranks."
    elif repaired:
        sentence = f"The first is {run.first}. The step is finite with {' or with '.join(repaired)}."
    elif any(one.failure for one in swapped):
        sentence = f"The first is {run.first}. No swap that could run here repairs the step."
    else:
        sentence = f"The first is {run.first}. Eager PyTorch goes wrong, too: look at the weights and the batch."
    weights = f"The weights are those after step {step.weights_step}, the batches are of step {step.number}."
    return f"{table}\n\n{sentence}\n{weights}"
