"""Train a GPT in which every hot operation is a choice: `python train.py kernels=compile attn=sdpa`.

Read it from the top: the config, the start of a run, the training loop, the end, and main(), which connects them.
lab/job.py prepares the parts of a run.
"""

if __name__ == "__main__":  # before the other imports, which take 3 s: for Ctrl-C and --help
    from lab.start import start_command

    start_command("config")

from dataclasses import asdict, dataclass
from pathlib import Path

from omegaconf import DictConfig

import data
from data import loader
from kernels import registry
from lab import commands, proof
from lab.generation.sample import write_sample
from lab.job import Job, prepare_job, restore, save
from lab.judge import supervise
from lab.recipe import Recipe
from lab.sweep import launcher
from model import cost, optim, parallel, pretrained
from model.config import PRECISIONS, GPTConfig
from model.divergence import check_losses
from model.executed import warn_of_uncalled_ops
from model.step import evaluate
from runtime import compiling, console, resume, schedule, trackers
from runtime import device as machine
from runtime.config import check
from runtime.meter import Meter
from runtime.ranks import join_ranks, rank_device
from runtime.run import open_run
from runtime.saver import Checkpoints
from runtime.signals import Signals

OOM_REMEDY = "train.batch_size (train.tokens_per_step stays), or choose leaner kernels, a smaller model, precision=bf16"
launcher.register_sweeps()  # for Hydra's -m and +sweep=NAME: see lab/sweep/launcher.py


@dataclass
class Config:
    out_dir: str | None  # the run's folder; null: out/<time>-<parameters>-<kernels>-<attn>-<precision>
    init_from: str | None  # initial weights and the shape of the model: see model/pretrained.py
    seed: int
    device: str  # auto | cpu | cuda | cuda:N
    precision: str  # fp32 | amp | bf16 | fp8
    parallel: str  # ddp | fsdp | zero2 | context, if torchrun starts several processes
    proof: bool  # compare with eager fp32, and profile a step: see lab/proof
    profile: bool  # write a trace and a memory snapshot of three steps
    kernels: registry.KernelsConfig
    attn: registry.AttnConfig
    model: GPTConfig
    data: data.DataConfig
    train: schedule.TrainConfig
    optim: optim.OptimConfig
    logger: trackers.LoggerConfig
    sweep: launcher.SweepConfig
    runtime: schedule.RuntimeConfig

    def __post_init__(self):
        optim.rename_impl(self.optim, self.kernels)
        check(self.precision in PRECISIONS, f"precision={self.precision}: choose {', '.join(PRECISIONS)}")
        parallel.divide_work(self.parallel, self.model, self.train)
        check(0 <= self.seed < 2**63, f"seed={self.seed}: it must be in [0, 2^63)")
        makes_checkpoints = bool(self.train.checkpoint_every) or not self.logger.artifacts
        check(makes_checkpoints, "logger.artifacts=true: there is no checkpoint to upload; set train.checkpoint_every")
        self.model.check_length(self.train.block_size, key="train.block_size: ")


def begin(job: Job, resume_from: Path | None, ended: dict | None) -> tuple[Checkpoints, Meter]:
    """Load the checkpoint, if any; complete the row; print the header. `ended` is resume.find_end()'s manifest."""
    t, run, ranks, device = job.train, job.run, job.ranks, job.device
    saved = restore(job, resume_from) if resume_from else {"step": 0, "elapsed": 0.0}
    run.truncate_metrics(saved["step"], saved.get("metrics_lines", 0), resume.logged_figures(saved))
    facts = job.recipe.kernel_facts((t.batch_size, t.block_size), device, job.step.optimizer)
    facts |= {"peak_flops": job.ceiling.peak, "measured_peak_flops": job.ceiling.measured}
    facts |= {"resumed_from": str(resume_from) if resume_from else None}
    if ended:
        facts = resume.saved_row(ended, job.config)
    checkpoints = Checkpoints(
        run.folder / "checkpoints",
        keep=t.keep_checkpoints,
        sharded=t.sharded_checkpoints,
        ranks=ranks,
        device=device,
        steps_before=saved["step"],
        replicate_to=t.replicate_to,
    )
    run.begin(**facts)
    if t.checkpoint_every and not ended:
        checkpoints.allocate_host_copies(job.step.optimizer.state_shapes())
    if ranks.is_main:
        run.add_files(job.dataset.tokenizer.files)  # its checkpoints then need no other folder
        print(console.header(run.row, *cost.describe(job.recipe.model, t.block_size), job.dataset.summary, run.folder))
    return checkpoints, Meter(device, t.tokens_per_step, job.ceiling, ranks, saved["step"], saved["elapsed"])


def train(job: Job, checkpoints: Checkpoints, meter: Meter, signals: Signals) -> schedule.Due:
    """Step, log, evaluate and save, until the run ends. Returns what was due after the last step."""
    t, device, ranks, run, optimizer = job.train, job.device, job.ranks, job.run, job.step.optimizer
    first_step = meter.steps_before + 1
    signals.start_loop(run.record)
    with ranks.watchdog, checkpoints, meter.power, console.progress_bar(t.max_steps, meter.steps_before) as bar:
        for step, (batches, data_wait) in enumerate(loader.prefetch(job.batches, first_step, device), first_step):
            [last_step] = ranks.max_over_ranks(schedule.predict_last_step(t, step, meter))
            lr = optim.learning_rate(job.recipe.optim, step, last_step)
            loss, norm = job.step(batches, lr)
            meter.data_wait += data_wait
            if job.recorder:
                job.recorder.add_loss(loss)
            bar.update()
            seconds, stop = ranks.max_over_ranks(meter.elapsed, signals.received is not None)
            due = schedule.due(t, step, meter.steps_before, seconds, stop)
            if due.nothing:
                continue
            figures = meter.end_interval(step)  # synchronises; nothing else in this loop does
            figures |= {"tokens": step * t.tokens_per_step, "train/loss": loss.item(), "train/lr": lr}
            figures |= {"train/grad_norm": norm.item(), "train/refused_steps": int(optimizer.refused)}
            bar.write(console.step_line(step, t.max_steps, figures, meter.is_warmup(step)))
            check_losses(job.step.model, optimizer, job.batches, run.folder, t)
            if meter.is_warmup(step):  # its speed is printed, but not recorded
                figures = {key: value for key, value in figures.items() if not key.startswith("perf/")}
            is_best = False
            if due.evaluate:
                val_loss = evaluate(job.step.model, job.held_out, t.batch_size, t.eval_samples, device, ranks)
                bar.write(console.val_line(step, t.max_steps, val_loss))
                figures["val/loss"], is_best = val_loss, val_loss < checkpoints.best
            if due.end:
                run.row |= {"steps": step, **figures, **job.step.figures, **meter.result()}
            if due.save or (is_best and t.checkpoint_every):
                facts = {"val_loss": figures.get("val/loss"), "elapsed": meter.elapsed, "metrics_lines": run.lines + 1}
                # so that a kill after the save loses neither the line of this step nor the row
                facts |= {"figures": {**figures}, "row": {**run.row} if due.finished else None}
                figures["checkpoint/pause_ms"] = 1e3 * save(job, checkpoints, step, facts)
            meter.start_interval(step)
            run.log(step, figures)
            if due.end:
                break
        run.row |= checkpoints.close()
    return due


def finish(job: Job, due: schedule.Due, signals: Signals) -> None:
    """After the loop: print the summary and how to resume, write a sample of text, and add the proof to the row."""
    row, run, t = job.run.row, job.run, job.train
    print(console.summary(row))
    if not due.finished:
        print(f"stopped  after step {row['steps']}; resume with: {resume.command(run.folder)}")
    elif row["steps"] < (t.max_steps or 0):
        print(f"ended    after step {row['steps']} of {t.max_steps}, by train.max_minutes={t.max_minutes}")
    if due.interrupted:
        signals.stop(f"after step {row['steps']}")
    needs_proof = due.finished and "parity" in row
    run.record(f"stopped: before its {'proof' if needs_proof else 'end'}")  # a kill from here on loses no figure
    if t.sample_tokens:
        write_sample(run, job.step.model, job.dataset.tokenizer, t.sample_tokens, job.recipe.seed)
    schedule.check_overfit(t, due, row["steps"], row["train/loss"])
    batches = [tuple(tensor.to(job.device) for tensor in batch) for batch in job.batches(row["steps"] + 1)]
    if job.config["profile"]:
        proof.write_trace(job.step, batches, run.folder)
    if needs_proof:
        proof.prove(row, job.recipe, t, job.step, batches, job.recorder, job.references)
        run.record("stopped: before its end")
    if job.config["profile"]:  # after the proof, whose receipt is of the captured steps
        proof.write_memory_snapshot(job.step, batches, run.folder)


def complete_config(cfg: DictConfig) -> None:
    """Refuse sweep=wandb, and with init_from take the shape of the model from its source."""
    check("program" not in cfg.sweep, "sweep=wandb is W&B's: run `wandb sweep configs/sweep/wandb.yaml`")
    pretrained.take_model_config(cfg)


def run_recipe(cfg: Config, recipe: Recipe) -> None:
    """Train as the config says. The recipe builds the model and the optimizer: `Recipe.of(cfg)`, or a peer's."""
    t, device = cfg.train, machine.select_device(rank_device(cfg.device))
    compiling.reset()
    with Signals(cfg.runtime.requeue) as signals, join_ranks(device, cfg.parallel, cfg.runtime.hang_minutes) as ranks:
        sizes = cost.figures(cfg.model, t.block_size) | {"world_size": ranks.world_size}
        speed = {"dtype": PRECISIONS[cfg.precision][1], "flops_per_token": sizes["flops_per_token"]}
        speed |= {"device": device, "devices": ranks.world_size}
        ranks.run_on_rank0(lambda: machine.check_step(cfg.device, t.tokens_per_step, **speed))
        processes = "" if ranks.single else f"-{cfg.parallel}{ranks.world_size}"
        name = f"{sizes['parameters'] / 1e6:.0f}M-{recipe.label}{processes}"
        folder, resume_from = ranks.run_on_rank0(lambda: resume.choose_folder(cfg.out_dir, t.resume, name))
        ranks.run_on_rank0(lambda: warn_of_uncalled_ops(recipe.ops, registry.TRAINING_OPS))
        parallel.warn_of_one_process(cfg.parallel, ranks)
        line, ended = ranks.run_on_rank0(lambda: resume.find_end(folder, resume_from, t, name))
        if line:
            print(line)
            return
        tried = f"train.batch_size={t.batch_size} x {t.block_size} tokens, {recipe.label}"
        with (
            proof.suggest_batch_size(recipe, t, device, ranks),
            open_run(folder, name, cfg, cfg.logger, t.resume is not None, ranks) as run,
            ranks.share_failure(),
            machine.explain_out_of_memory(tried, OOM_REMEDY),
        ):
            run.row |= sizes | {"kernels": recipe.chosen_kernels, "env": machine.environment(device)}
            run.row["checks"] = ranks.run_on_rank0(lambda: recipe.check_kernels(device))
            parts = {"device": device, "ranks": ranks, "run": run, "ceiling": machine.Ceiling(**speed)}
            job = prepare_job(recipe, t, cfg.data, config=asdict(cfg), resume_from=resume_from, **parts)
            checkpoints, meter = begin(job, resume_from, ended)
            due = resume.end_run(run, ended, checkpoints, signals) if ended else train(job, checkpoints, meter, signals)
            finish(job, due, signals)
        print(f"done     {run.folder / 'result.json'}")


@commands.command(Config, "config", errors=(data.DataError,), complete=complete_config)
def main(cfg: Config) -> None:
    if supervise.takes_over(cfg):  # kernels that are not of this repo cannot prove themselves: see lab/judge/README.md
        return
    run_recipe(cfg, Recipe.of(cfg))


if __name__ == "__main__":
    main()
