"""Repeat parts of a run with eager PyTorch, in a process that never imports the judged backend.

A segment of a run goes from one state to the next. The replay starts from the run's weights and moments at the start of
the segment; the first segment starts from the seed. It makes the same steps, and compares every loss and, at the end,
AdamW's moments and the weights. The first moments are a weighted sum of the segment's gradients, so they show an error
in one gradient of one step. The bounds are those of parity (lab/proof/parity.py): eager PyTorch makes the same steps in
fp32 and in the row's precision.

After the segments, eager PyTorch evaluates the run's last weights, and computes the logits of the run's generation.
"""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from common.files import read_json, write_json
from data import DataConfig, open_dataset
from data.loader import Loader, open_splits
from kernels.registry import AttnConfig, KernelsConfig
from lab.judge.arm import Arm, Plan, read_state
from lab.proof.generation import reference_logits
from lab.proof.parity import ROUNDING, FirstSteps, judge, sketch
from lab.proof.references import reference_batch_size, run_in_process
from lab.proof.witness import flat_state
from lab.recipe import Recipe
from model.config import PRECISIONS
from model.gpt import GPT
from model.optim import TorchAdamW, learning_rate
from model.pretrained import read_pretrained
from model.step import evaluate, train_step
from runtime.device import select_device
from runtime.schedule import TrainConfig

# Bounds of the errors of the weights and second moments, relative to their change. Measured: 1e-4 in fp32 (tiny model),
# 8e-4 to 2.2e-3 in bf16 (the weights of 124M on an H200, six runs)
CHANGE_FACTOR, CHANGE_ROUNDING, CHANGE_ROUNDING_FP32 = 3.0, 0.02, 2.0**-7
CHANGES = {"weights": "model", "second moments": "exp_avg_sq"}  # what a run changes besides the first moments -> group
# A parameter's change may be so many times as long or as short, if its elements change by more than LIVELY of the mean.
# Others have gradients of rounding errors only, as the key part of a bias, and their length depends on the kernel
UNLIKE, LIVELY = 2.0, 0.3
VAL_ROUNDING = 2.0**-11  # of the validation loss in a precision below fp32, relative to the loss


class Question(NamedTuple):
    """The segments of a run that the replay repeats, and the folder with the run's states and logits."""

    recipe: Recipe
    train: TrainConfig
    data: DataConfig
    init_from: str | None
    device: str
    segments: list[tuple[int, int]]
    shifts: list[tuple[int, int]]  # of the run's Loader
    losses: list[float]  # of all steps of the run
    folder: Path  # with state-<step> and logits
    val_loss: float | None
    prompts: tuple[Tensor, Tensor, Tensor] | None  # None: the run gave no logits


def draw_segments(plan: Plan, device: torch.device, source: random.Random, is_first_run: bool) -> list[tuple[int, int]]:
    """Draw the segments of a run that will be repeated: on a CPU all of them, on a GPU two.

    In the first run on a GPU, one of them is the start, whose steps compile kernels and are not in a CUDA graph.
    """
    if device.type == "cpu":
        return plan.segments
    first, *others = plan.segments
    if is_first_run:
        return [first, *source.sample(others, min(1, len(others)))]
    return sorted(source.sample(plan.segments, min(2, len(plan.segments))))


def needed_states(segments: list[tuple[int, int]], plan: Plan) -> set[int]:
    """Return the steps whose states the replay of these segments reads."""
    return {step for segment in segments for step in segment if step} | {plan.states[-1]}


def audit(question: Question, arm: Arm) -> dict:
    """Return the row's `parity` of a run: its bounds and errors, `ok`, and in `why` the first thing that is wrong.

    Raises RuntimeError if the replay fails.
    """
    path = arm.folder / "audit.json"
    run_in_process(write_audit, (question, path), "the replay with eager PyTorch")
    return read_json(path)


def write_audit(question: Question, path: Path) -> None:
    write_json(path, replay(question))


def replay(question: Question) -> dict:
    """Return the row's `parity`. This function runs in a process of its own, whose memory is free afterwards."""
    device = select_device(question.device)
    # Products in TF32 err by 2^-11, in bf16 by 2^-8, and are 4 times as fast as in fp32
    torch.backends.cuda.matmul.allow_tf32 = question.recipe.precision != "fp32"
    recipe, train = question.recipe, replace(question.train, batch_size=reference_batch_size(question.train))
    dataset = open_dataset(question.data)
    windows, held_out = open_splits(dataset, train.block_size, recipe.documents, evaluate=True)
    loader = Loader(windows, train.batch_size, train.tokens_per_step, recipe.seed, overfit=train.overfit)
    loader.shifts = question.shifts
    last_state = read_state(question.folder / f"state-{len(question.losses)}")
    references: dict[str, Replayed] = {}
    val_losses, logits = {}, {}
    for precision in dict.fromkeys(("fp32", recipe.precision)):
        fp8 = recipe.kernels.fp8 if precision == "fp8" else None
        eager = replace(recipe, kernels=KernelsConfig(fp8=fp8), attn=AttnConfig("sdpa"), precision=precision)
        references[precision] = replay_segments(question, eager, train, loader, device)
        if question.val_loss is not None:
            model = model_with(last_state, eager, device)
            val_losses[precision] = evaluate(model, held_out, train.batch_size, train.eval_samples, device)
    truth, rounded = references["fp32"], references[recipe.precision]
    run, run_ends = collect_run(question)
    parity = judge(run, truth.steps, rounded.steps)
    parity["segments"] = question.segments
    problems = [] if parity["ok"] else [describe_parity(parity)]
    if val_losses:
        val = {"val_loss": question.val_loss, "reference": val_losses["fp32"]}
        rounding = ROUNDING if recipe.precision == "fp32" else VAL_ROUNDING
        val["bound"] = 3 * abs(val_losses[recipe.precision] - val["reference"]) + rounding * val["reference"]
        if not abs(question.val_loss - val["reference"]) <= val["bound"]:
            problems.append(
                f"it reports a validation loss of {question.val_loss}, but with its last weights eager PyTorch has "
                f"{val['reference']:.5f} (bound {val['bound']:.1e})"
            )
        parity["validation"] = val
    elif train.eval_every:
        problems.append("it reports no validation loss")
    if question.prompts:
        model = model_with(last_state, replace(recipe, kernels=KernelsConfig(), attn=AttnConfig("sdpa")), device)
        parity["generation"] = logits = compare_logits(model, recipe.precision, question, device)
        if not logits["error"] <= logits["bound"]:
            problems.append(
                f"the logits of its generation are off by {logits['error']:.2g} (bound {logits['bound']:.2g})"
            )
    parity["changes"] = unlike = most_unlike(run_ends, truth, rounded)
    if not unlike["error"] <= unlike["bound"]:
        problems.append(
            f"its change of {unlike['parameter']} is {unlike['error']:.3g} times as long, or as short, as eager "
            f"PyTorch's (bound {unlike['bound']:g})"
        )
    for name, group in CHANGES.items():
        parity[name.replace(" ", "_")] = changes = compare_changes(group, run_ends, truth, rounded, recipe.precision)
        if not changes["error"] <= changes["bound"]:
            problems.append(
                f"its {name} are not those that its gradients give: they are off by {changes['error']:.1e} of their "
                f"change (bound {changes['bound']:.1e})"
            )
    return parity | {"ok": not problems, "why": problems[0] if problems else None}


class Replayed(NamedTuple):
    """The losses and first moments of all segments, and sketches of the groups of CHANGES at each start and end."""

    steps: FirstSteps
    starts: dict[str, Tensor]
    ends: dict[str, Tensor]


def replay_segments(
    question: Question, eager: Recipe, train: TrainConfig, loader: Loader, device: torch.device
) -> Replayed:
    """Make the steps of all segments."""
    stored = PRECISIONS[question.recipe.precision][0]
    losses, moments, starts, ends = [], {}, {}, {}
    for first, last in question.segments:
        weights = read_pretrained(question.init_from) if question.init_from else None
        model = eager.build(device, weights)
        optimizer = TorchAdamW(model, eager.optim, rounded=stored if eager.precision == "fp32" else torch.float32)
        if first:
            copy_state(read_state(question.folder / f"state-{first}"), flat_state(optimizer))
            optimizer.load(first, first)
        starts |= sketch_changes(flat_state(optimizer), last)
        for step in range(first + 1, last + 1):
            batches = [tuple(tensor.to(device) for tensor in batch) for batch in loader(step)]
            loss, _ = train_step(model, optimizer, batches, learning_rate(eager.optim, step, train.max_steps))
            losses.append(loss.item())
        moments |= sketch_moments(flat_state(optimizer), last)
        ends |= sketch_changes(flat_state(optimizer), last)
    return Replayed({"losses": torch.tensor(losses, dtype=torch.float64), **moments}, starts, ends)


def collect_run(question: Question) -> tuple[FirstSteps, dict[str, Tensor]]:
    """Return (steps, ends) of the run itself, in the form of Replayed."""
    steps = [step for first, last in question.segments for step in range(first, last)]
    run = {"losses": torch.tensor([question.losses[step] for step in steps], dtype=torch.float64)}
    ends = {}
    for _, last in question.segments:
        state = read_state(question.folder / f"state-{last}")
        state = {name: tensor.to(question.device) for name, tensor in state.items()}
        run |= sketch_moments(state, last)
        ends |= sketch_changes(state, last)
    return run, ends


def sketch_moments(state: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Return {"parameter in step N": sketch()} of the first moments."""
    moments = {name: tensor for name, tensor in state.items() if name.startswith("exp_avg/")}
    return {f"{name.partition('/')[2]} in step {step}": sketch(name, tensor) for name, tensor in moments.items()}


def sketch_changes(state: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Return {"group/parameter in step N": sketch()} of the groups of CHANGES."""
    groups = tuple(f"{group}/" for group in CHANGES.values())
    return {f"{name} in step {step}": sketch(name, tensor) for name, tensor in state.items() if name.startswith(groups)}


def compare_changes(
    group: str, run: dict[str, Tensor], truth: Replayed, rounded: Replayed, precision: str
) -> dict[str, float]:
    """Return {"error", "bound"}: how far a group of the run is from the replay's, relative to what the steps changed.

    AdamW's steps are as long for small gradients as for large ones, so rounding changes many small ones.
    """
    names = [name for name in truth.ends if name.startswith(f"{group}/")]
    change = length(truth.ends, truth.starts, names)
    error, rounding = (length(ends, truth.ends, names) for ends in (run, rounded.ends))
    if not change:
        return {"error": math.inf if error else 0.0, "bound": 0.0}
    least = CHANGE_ROUNDING_FP32 if precision == "fp32" else CHANGE_ROUNDING
    return {"error": error / change, "bound": CHANGE_FACTOR * rounding / change + least}


def most_unlike(run: dict[str, Tensor], truth: Replayed, rounded: Replayed) -> dict:
    """Return the parameter whose change differs most in length from both replays: {"parameter", "error", "bound"}.

    The error is the longer length divided by the shorter one.
    """
    names = [name for name in truth.ends if name.startswith("model/")]
    mean = length(truth.ends, truth.starts, names) / math.sqrt(sum(len(truth.ends[name]) for name in names))
    worst = {"parameter": None, "error": 1.0, "bound": UNLIKE}
    for name in names:
        mine = length(run, truth.starts, [name])
        others = [length(replayed.ends, replayed.starts, [name]) for replayed in (truth, rounded)]
        if min(others) > LIVELY * mean * math.sqrt(len(truth.ends[name])):
            error = max(mine / max(others), min(others) / max(mine, 1e-30))
            if not error <= worst["error"] < math.inf:  # a NaN, too
                worst |= {"parameter": name.partition("/")[2], "error": error}
    return worst


def length(a: dict[str, Tensor], b: dict[str, Tensor], names: list[str]) -> float:
    """Return the length of the difference of two sets of sketches, over these names."""
    return math.sqrt(sum((a[name].double() - b[name]).square().sum().item() for name in names))


def copy_state(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    """Copy the tensors of a run's state into `target`. Raises ValueError if names or shapes differ."""
    shapes = [{name: tuple(tensor.shape) for name, tensor in state.items()} for state in (source, target)]
    if shapes[0] != shapes[1]:
        raise ValueError("the state that the run sent has other tensors than this model")
    for name, tensor in target.items():
        tensor.copy_(source[name])


def model_with(state: dict[str, Tensor], recipe: Recipe, device: torch.device) -> GPT:
    """Return the model with the weights of a state."""
    model = recipe.build(device)
    weights = dict(model.named_parameters())
    copy_state(
        {name.partition("/")[2]: tensor for name, tensor in state.items() if name.startswith("model/")},
        {name: weight.data for name, weight in weights.items()},
    )
    return model


@torch.no_grad()
def compare_logits(model: GPT, precision: str, question: Question, device: torch.device) -> dict[str, float]:
    """Return {"error", "bound"}: the largest error of the run's logits against float64, and its bound.

    The bound is four times the error of eager PyTorch in the row's precision, plus rounding.
    """
    idx, lengths, new = (tensor.to(device) for tensor in question.prompts)
    given = read_state(question.folder / "logits")["logits"].to(device)
    errors, eager_errors, scales = [], [], []
    for place, (_, *references) in enumerate(reference_logits(model, precision, idx, lengths, new)):
        truth, rounded = (reference[1:] for reference in references)  # the run sends no logits of the prefill
        errors.append((given[place] - truth).abs().max())
        eager_errors.append((rounded - truth).abs().max())
        scales.append(truth.abs().max())
    error, eager_error, scale = (torch.stack(values).max().item() for values in (errors, eager_errors, scales))
    return {"error": error, "bound": 4 * eager_error + torch.finfo(model.ln_f.dtype).eps * scale}


def describe_parity(parity: dict) -> str:
    """Return one line that says how far the run is from eager PyTorch."""
    return (
        f"against eager PyTorch from the run's own states, the losses of {parity['steps']} steps are off by "
        f"{parity['loss_error']:.1e} (bound {parity['loss_bound']:.1e}) and the gradients by "
        f"{parity['gradient_error']:.1e} (bound {parity['gradient_bound']:.1e}); the gradient of "
        f"{parity['gradient_worst']} is off by {parity['gradient_worst_of_bound']:.2g} times its bound"
    )
