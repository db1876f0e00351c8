"""The parts of a training run: prepare them, save them in a checkpoint, and load them from one."""

from dataclasses import dataclass
from pathlib import Path

import torch

import data
from data import loader
from lab import channel, proof
from lab.recipe import Recipe
from model import capture, parallel, pretrained
from model.config import GPTConfig
from model.optim import OptimConfig
from runtime import checkpoint, resume, schedule
from runtime import device as machine
from runtime.config import field_defaults
from runtime.ranks import Ranks
from runtime.run import Run
from runtime.saver import Checkpoints


@dataclass
class Job:
    """The parts of a run, on one rank."""

    config: dict  # the whole config; a checkpoint records it
    recipe: Recipe
    train: schedule.TrainConfig
    device: torch.device
    ranks: Ranks
    run: Run
    dataset: data.Dataset
    batches: loader.Loader  # step -> its micro-batches
    held_out: loader.Windows | None  # for evaluation
    ceiling: machine.Ceiling  # the peak FLOP/s of the device
    step: capture.StepRunner  # with the model and the optimizer
    references: list[proof.FirstSteps]  # empty: without parity
    recorder: proof.Recorder | proof.Witness | None  # of the first steps, for parity; a witness, for a judge


def prepare_job(
    recipe: Recipe,
    t: schedule.TrainConfig,
    sources: data.DataConfig,
    *,
    config: dict,
    resume_from: Path | None,
    device: torch.device,
    ranks: Ranks,
    run: Run,
    ceiling: machine.Ceiling,
) -> Job:
    """Open the data, take the reference's first steps, and build the model and the optimizer."""
    dataset = ranks.run_on_rank0_first(lambda: data.open_dataset(sources))
    recipe.model.check_vocabulary(sources.tokenizer, dataset.tokenizer.n_vocab)
    windows, held_out = loader.open_splits(dataset, t.block_size, recipe.documents, t.eval_every > 0)
    batches = loader.Loader(
        windows,
        t.batch_size,
        t.tokens_per_step,
        seed=recipe.seed,
        rank=ranks.batch_rank,
        world_size=ranks.batch_ranks,
        overfit=t.overfit,
    )
    references, init_from, layout = [], config["init_from"], config["parallel"]
    if channel.is_worker():
        run.row["parity"] = {"ok": None, "why": "this run is a judge's worker, and the judge compares it"}
    elif config["proof"]:
        references, run.row["parity"] = proof.make_references(
            recipe, t, sources, init_from, layout, start=resume_from, dataset=dataset, device=device, ranks=ranks
        )
    machine.reset_peak_memory(device)
    weights = pretrained.read_pretrained(init_from) if init_from and not resume_from else None
    model = parallel.prepare(recipe.build(device, weights), layout, recipe.kernels, recipe.seed, ranks)
    optimizer = recipe.make_optimizer(model, ranks, stop=t.on_nonfinite == "stop", history=t.spike_factor is not None)
    recorder = None
    if channel.is_worker():
        recorder = proof.Witness(optimizer, batches)
    elif references:
        recorder = proof.Recorder(optimizer)
    return Job(
        config=config,
        recipe=recipe,
        train=t,
        device=device,
        ranks=ranks,
        run=run,
        dataset=dataset,
        batches=batches,
        held_out=held_out,
        ceiling=ceiling,
        step=capture.StepRunner(model, optimizer, t.cuda_graph),
        references=references,
        recorder=recorder,
    )


def save(job: Job, checkpoints: Checkpoints, step: int, facts: dict) -> float:
    """Start to save a checkpoint with all that restore() needs. Returns the seconds that the loop had to wait."""
    facts = facts | {"config": job.config, "data": job.dataset.fingerprint}
    rest = {"updates": job.step.optimizer.updates, "random": job.ranks.gather(checkpoint.random_state(job.device))}
    pause, copied = checkpoints.save(step, job.step.optimizer.state(), rest, facts)
    job.step.optimizer.being_copied = copied
    return pause


def restore(job: Job, path: Path) -> dict:
    """Load a checkpoint, and return its manifest. Raises UserError if it is of another run."""
    saved = checkpoint.read_manifest(path)
    defaults = {"model": field_defaults(GPTConfig), "optim": field_defaults(OptimConfig)}
    options = {"may_differ": pretrained.TRAINING, "defaults": defaults}
    resume.check_same_run(saved, job.config, job.dataset.fingerprint, path, **options)
    rest = checkpoint.load_state(path, job.step.optimizer.state())
    job.step.optimizer.load(saved["step"], rest["updates"])
    if job.ranks.rank < len(rest["random"]):  # a rank that the saved job did not have keeps its own random state
        checkpoint.restore_random_state(rest["random"][job.ranks.rank], job.device)
    return saved
