"""Train a GPT in which every hot operation is a choice: `python train.py kernels=compile attn=sdpa`.

Read it from the top: the config, what is built from it, one optimizer step, the loop, and what is said and written.
"""

import contextlib
import os
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from tqdm import tqdm

from data import DataConfig, DataError, Dataset, open_dataset
from data.loader import Batch, Loader, Windows, evaluation, prefetch
from kernels.registry import AttnConfig, KernelError, KernelsConfig, Unavailable, choices, chosen, impls, label, resolve
from model import cost, proof
from model.executed import executed
from model.generate import cannot_generate, generate
from model.gpt import GPT, PRECISIONS, GPTConfig, beyond_table
from model.optim import OptimConfig, Optimizer, learning_rate
from model.parallel import shard, whole
from model.pretrained import fitted, load, read, shape
from runtime import checkpoint, compiling, parity
from runtime.config import check, cli, command, given
from runtime.console import header, step_line, summary, val_line
from runtime.device import Ceiling, environment, out_of_memory, pick, reset_memory
from runtime.loop import TrainConfig, complete, due, last_step
from runtime.meter import Meter
from runtime.ranks import Ranks, joined, placed, world_size
from runtime.resume import place, same_run, shape_of
from runtime.run import Follower, Run
from runtime.saver import Checkpoints
from runtime.signals import STOPPED, Signals, Stopped
from runtime.sweep import SweepConfig, register_sweeps
from runtime.trackers import LoggerConfig, tracker

ROOT = Path(__file__).resolve().parent
ALONE = Ranks()
LEANER = (
    "train.batch_size (train.tokens_per_step keeps the step's size), or choose a leaner kernel, a smaller model or "
    "precision=bf16"
)


@dataclass
class Config:
    out_dir: str | None  # the run's folder; null: out/<time>-<parameters>-<kernels>-<attn>-<precision>
    init_from: str | None  # weights to begin with, and the model's shape: see model/pretrained.py
    seed: int
    device: str  # auto | cpu | cuda | cuda:N
    precision: str  # fp32 | amp | bf16
    parallel: str  # ddp | fsdp, of the processes that torchrun starts
    proof: bool
    kernels: KernelsConfig
    attn: AttnConfig
    model: GPTConfig
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig
    logger: LoggerConfig
    sweep: SweepConfig

    def __post_init__(self):
        check(self.precision in PRECISIONS, f"precision={self.precision}: choose {', '.join(PRECISIONS)}")
        check(self.parallel in ("ddp", "fsdp"), f"parallel={self.parallel}: choose ddp or fsdp")
        check(0 <= self.seed < 2**63, f"seed={self.seed}: it must be in [0, 2^63)")
        length = self.train.block_size
        check(
            self.model.pos == "rope" or length <= self.model.block_size,
            f"train.block_size: {beyond_table(length, self.model.block_size)}",
        )


def build(cfg: Config, device: torch.device, ranks: Ranks = ALONE) -> GPT:
    """The model on `device`, from seed, with the kernels and the precision that the config names."""
    stored, compute = PRECISIONS[cfg.precision]
    torch.set_float32_matmul_precision("highest")  # fp32 is the parity reference: no TF32
    torch.manual_seed(cfg.seed)
    if cfg.kernels.compile and cfg.model.checkpointing == "host":
        raise Unavailable("kernels.compile=true cannot run with model.checkpointing=host: choose block, or no compile")
    needs = cfg.model.needs + ["starts"] * cfg.data.mask_documents
    with device:
        model = GPT(cfg.model, resolve(cfg.kernels, cfg.attn, device, needs), compute).to(stored)
    if cfg.init_from:
        load(model, read(cfg.init_from))
    if ranks.rank:
        torch.manual_seed(cfg.seed + ranks.rank)  # dropout of its own; rank 0's is that of one process
    if cfg.parallel == "fsdp" and not ranks.alone:
        shard(model, cfg.kernels.compile, ranks, device)
    elif cfg.kernels.compile:
        model.compile(fullgraph=True)
    return model


def train_step(model: GPT, optimizer: Optimizer, batches: list[Batch], lr: float) -> tuple[Tensor, Tensor]:
    """One optimizer step over the micro-batches: (mean loss, gradient norm), on the device and not waited for.

    Both are of the whole job: of several ranks each brings its own batches.
    """
    total = torch.zeros((), device=batches[0][0].device)
    for batch in batches:
        loss = model(*batch) / len(batches)
        loss.backward()
        optimizer.accumulate()
        total += loss.detach()
    total = optimizer.ranks.mean(total)
    return total, optimizer.step(lr, total)


@torch.no_grad()
def evaluate(model: GPT, windows: Windows, cfg: TrainConfig, device: torch.device, ranks: Ranks = ALONE) -> float:
    """Mean loss over the fixed validation batches, which the ranks share out."""
    model.eval()
    samples, n = cfg.eval_batches * cfg.tokens_per_step // cfg.block_size, ranks.world_size
    batches = list(evaluation(windows, cfg.batch_size, samples))
    total = torch.zeros((), device=device)
    for turn in (batches[i : i + n] for i in range(0, len(batches), n)):
        batch = turn[min(ranks.rank, len(turn) - 1)]  # all take part in every turn, as FSDP asks
        total += model(*(each.to(device) for each in batch)) * (ranks.rank < len(turn))
    model.train()
    return ranks.total(total).item() / len(batches)


class Job(NamedTuple):
    """What a run is made of."""

    cfg: Config
    device: torch.device
    ranks: Ranks
    run: Run
    dataset: Dataset
    loader: Loader
    held_out: Windows | None
    ceiling: Ceiling
    model: GPT
    optimizer: Optimizer
    references: list[parity.Steps]  # what it is compared with; none where it is not


def assemble(cfg: Config, device: torch.device, ranks: Ranks, run: Run, start: Path | None) -> Job:
    """Build everything, and say in the row what it is; weights to begin with are read where there is no `start`."""
    t, flops_per_token = cfg.train, cost.flops_per_token(cfg.model, cfg.train.block_size)
    run.row |= {"kernels": chosen(cfg.kernels, cfg.attn) | {"compile": cfg.kernels.compile}, "env": environment(device)}
    run.row |= {"parameters": cost.parameters(cfg.model), "position_parameters": cost.positions(cfg.model)}
    run.row |= {"flops_per_token": flops_per_token}
    run.row |= {"world_size": ranks.world_size}
    dataset = ranks.first(lambda: open_dataset(cfg.data))
    check_vocabulary(cfg, dataset)
    eot = dataset.tokenizer.eot if cfg.data.mask_documents else None
    windows = Windows(dataset.train, t.block_size, "training", eot=eot)
    loader = Loader(windows, t.batch_size, t.tokens_per_step, cfg.seed, ranks.rank, ranks.world_size)
    held_out = Windows(dataset.val, t.block_size, "validation", eot=eot) if t.eval_every else None
    references = []
    if cfg.proof:
        references, why = proof.prepared(cfg, ranks, start is not None, dataset, device, build, train_step)
        run.row["parity"] = {"ok": None, "why": why}
    ceiling = Ceiling(device, PRECISIONS[cfg.precision][1], flops_per_token, ranks.world_size)
    reset_memory(device)
    model = build(replace(cfg, init_from=None) if start else cfg, device, ranks)
    optimizer = Optimizer(model, cfg.optim, ranks, stop=t.on_nonfinite == "stop")
    return Job(cfg, device, ranks, run, dataset, loader, held_out, ceiling, model, optimizer, references)


def train(job: Job, start: Path | None, signals: Signals) -> None:
    """The run, from nothing or from a checkpoint: step, log, save, and leave the figures in the row."""
    cfg, device, ranks, run, optimizer, t = job.cfg, job.device, job.ranks, job.run, job.optimizer, job.cfg.train
    made, before = restore(job, start) if start else (0, 0.0)
    run.rewind(made)
    size, documents = (t.batch_size, t.block_size), cfg.data.mask_documents
    who = executed(cfg.model, cfg.kernels, cfg.attn, cfg.precision, size, device, documents=documents)
    peaks = {"peak_flops": job.ceiling.peak, "measured_peak_flops": job.ceiling.measured}
    run.begin(kernels=who, **peaks, resumed_from=str(start) if start else None)
    home, keep = run.folder / "checkpoints", t.keep_checkpoints
    checkpoints = Checkpoints(home, keep, t.sharded_checkpoints, ranks, device, made)
    if t.checkpoint_every:
        checkpoints.prepare({name: weight.shape for name, weight in job.model.named_parameters()})
    tokens = [f"{sum(map(len, shards)):,}" for shards in (job.dataset.train, job.dataset.val)]
    data = (
        f"{job.dataset.name}, {job.dataset.tokenizer.name}: {tokens[0]} training tokens, {tokens[1]} validation tokens"
    )
    print(header(cfg, run.row, data, job.ceiling, run.folder))
    begun = proof.Begun(optimizer) if job.references else None
    meter = Meter(device, t.tokens_per_step, job.ceiling, ranks, made, before)
    terminal = {"disable": not sys.stdout.isatty(), "leave": False, "file": sys.stdout}
    signals.looping = True
    with checkpoints, tqdm(total=t.max_steps, initial=made, unit="step", **terminal) as bar:
        for step, (batches, waited) in enumerate(prefetch(job.loader, made + 1, device), made + 1):
            [lr] = ranks.agree(learning_rate(cfg.optim, step, last_step(t, step, meter)) * ranks.leads)
            loss, norm = train_step(job.model, optimizer, batches, lr)
            meter.waited += waited
            if begun:
                begun.see(loss)
            bar.update()
            seconds, asked = ranks.agree(meter.elapsed, signals.received is not None)
            now = due(t, step, made, seconds, asked)
            if not (now.logged or now.judged or now.saved or now.ends):
                continue
            figures = meter.lap(step)  # synchronises; nothing else does
            figures |= {"tokens": step * t.tokens_per_step, "train/loss": loss.item(), "train/lr": lr}
            figures |= {"train/grad_norm": norm.item(), "train/refused_steps": int(optimizer.refused)}
            bar.write(step_line(step, t.max_steps, figures, meter.warming(step)), file=sys.stdout)
            check_finite(job)
            if meter.warming(step):  # printed, but in no throughput
                figures = {key: value for key, value in figures.items() if not key.startswith("perf/")}
            saved = now.saved
            if now.judged:
                figures["val/loss"] = evaluate(job.model, job.held_out, t, device, ranks)
                bar.write(val_line(step, t.max_steps, figures["val/loss"]), file=sys.stdout)
                saved |= t.checkpoint_every > 0 and figures["val/loss"] < checkpoints.best
            if saved:
                pause = save(job, checkpoints, step, meter.elapsed, figures.get("val/loss"))
                figures["checkpoint/pause_ms"] = 1e3 * pause
            meter.restart(step)
            run.log(step, figures)
            if now.ends:
                break
        run.row |= {"steps": step, **figures, **meter.result(), **checkpoints.close()}

    print(summary(run.row))
    if not now.done:
        print(f"stopped  after step {step}; go on with: {command(out_dir=str(run.folder), **{'train.resume': 'auto'})}")
    if asked and not now.done:
        raise Stopped(STOPPED, f"{signals.received or 'a signal'} after step {step}")
    proved = cfg.proof and now.done
    run.record("stopped: before its proof" if proved else "ok")  # a kill in the sample takes nothing away
    if t.sample_tokens:
        print(sample(job))
    if proved:
        proof.prove(job, begun, build, train_step)
        run.record("ok")


def save(job: Job, checkpoints: Checkpoints, step: int, elapsed: float, val_loss: float | None) -> float:
    """Start saving a checkpoint, with all that restore() needs. Returns the seconds that the loop was held up."""
    facts = {"val_loss": val_loss, "elapsed": elapsed, "config": asdict(job.cfg), "data": job.dataset.fingerprint}
    states = job.ranks.gather(checkpoint.random_state(job.device))
    rest = {"updates": job.optimizer.updates, "random": states}
    pause, job.optimizer.being_copied = checkpoints.save(step, job.optimizer.state(), rest, facts)
    return pause


def restore(job: Job, path: Path) -> tuple[int, float]:
    """Go on from a checkpoint of the same run: (its steps, the seconds that they took). UserError: it is of another."""
    saved = checkpoint.manifest(path)
    same_run(saved, asdict(job.cfg), job.dataset.fingerprint, path)
    rest = checkpoint.load(path, job.optimizer.state())
    job.optimizer.load(saved["step"], rest["updates"])
    if job.ranks.rank < len(rest["random"]):  # a rank that the job did not have keeps its own
        checkpoint.restore_random_state(rest["random"][job.ranks.rank], job.device)
    return saved["step"], saved["elapsed"]


def check_vocabulary(cfg: Config, dataset: Dataset) -> None:
    ids = dataset.tokenizer.n_vocab
    check(
        ids <= cfg.model.vocab_size,
        f"data.tokenizer={cfg.data.tokenizer} has {ids} ids, and model.vocab_size={cfg.model.vocab_size} is less: "
        f"pass model.vocab_size={-(-ids // 64) * 64}",
    )


def check_finite(job: Job) -> None:
    """Say which step was refused, and keep its batch. UserError: train.on_nonfinite=stop. Reads from the device."""
    if not (step := int(job.optimizer.first_refused)):
        return
    job.optimizer.first_refused.zero_()
    path = job.run.folder / f"nonfinite-step-{step:06d}.pt"
    batches = job.ranks.gather(job.loader(step))  # a pure function of the step: here they are again
    kept = f"batch in {path}"
    if job.ranks.leads:
        try:
            torch.save({"step": step, "batches": [batch for each in batches for batch in each]}, path)
        except (OSError, RuntimeError):  # which torch.save says of a full disk
            kept = f"its batch cannot be written to {path}"
    what = f"loss or gradient norm of step {step} is not finite"
    check(
        job.cfg.train.on_nonfinite == "skip",
        f"the run has diverged: {what}, and its update was not made ({kept}); lower optim.learning_rate, or pass over "
        "such steps with train.on_nonfinite=skip",
    )
    if job.ranks.leads:
        print(f"warning: {what}; skipped ({int(job.optimizer.refused)} so far); {kept}", file=sys.stderr)


def sample(job: Job) -> str:
    """Some text of the model's own, also kept as sample.txt."""
    cfg, model, dataset, device = job.cfg, job.model, job.dataset, job.device
    if why := cannot_generate(model):
        return f"sample   none: {why}"
    whole(model)
    start = torch.tensor([[dataset.tokenizer.eot]], device=device)
    n_vocab = dataset.tokenizer.n_vocab
    drawn = {"n_vocab": n_vocab, "temperature": 0.8, "top_k": 200, "seed": cfg.seed}
    try:
        ids = generate(model, start, cfg.train.sample_tokens, **drawn)
    except Unavailable as why:  # cuDNN's attention takes no single key, which is what a text begins with
        return f"sample   none: {why}"
    text = dataset.tokenizer.decode(ids[0].tolist())
    if job.ranks.leads:
        (job.run.folder / "sample.txt").write_text(text, encoding="utf-8")
    return f"sample   {text!r}"


def composed(cfg: DictConfig) -> None:
    """What the files and the command line cannot say by themselves."""
    check("program" not in cfg.sweep, "sweep=wandb is W&B's: run `wandb sweep configs/sweep/wandb.yaml`")
    from_source(cfg)


def from_source(cfg: DictConfig) -> None:
    """With init_from the model's shape is the source's. UserError: the command line asks for another, or other ids.

    A run that goes on has it from its checkpoint: the source may be gone.
    """
    if not cfg.init_from:
        return
    if saved := shape_of(cfg.out_dir, cfg.train.resume):
        cfg.model.update({**saved, **given(cfg, "model", ROOT / "configs")})
        return
    found = shape(cfg.init_from)
    cfg.model.update(fitted(found, given(cfg, "model", ROOT / "configs")))
    check(
        found.tokenizer in (None, cfg.data.tokenizer),
        f"init_from={cfg.init_from} knows the ids of the tokenizer {found.tokenizer}, and data.tokenizer is "
        f"{cfg.data.tokenizer}: pass data.tokenizer={found.tokenizer}",
    )


OmegaConf.register_new_resolver("backends", lambda op: ", ".join(impls(op)), replace=True)  # for --help and sweeps
register_sweeps()


@cli(
    Config,
    configs=ROOT / "configs",
    name="config",
    groups=choices(),
    errors=(KernelError, DataError),
    complete=composed,
)
def main(cfg: Config) -> None:
    device = pick(placed(cfg.device))
    choice = f"{label(cfg.kernels, cfg.attn)}-{cfg.precision}"
    name = f"{cost.parameters(cfg.model) / 1e6:.0f}M-{choice}" + f"-{cfg.parallel}{world_size()}" * (world_size() > 1)
    compiling.watch()
    torch.compiler.reset()  # hydra/launcher=basic: jobs share GPT.forward, of which Dynamo compiles 8 versions at most
    with Signals() as signals, joined(device) as ranks, contextlib.ExitStack() as stack:
        if not ranks.leads:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        folder, start = ranks.tell(place(cfg.out_dir, cfg.train.resume, name) if ranks.leads else None)
        if start and complete(cfg.train, *itemgetter("step", "elapsed")(checkpoint.manifest(start))):
            print(f"done     already: {start} is of the run's last step")
            return
        resuming = cfg.train.resume is not None
        run = Run(folder, name, cfg, tracker(cfg.logger), resuming) if ranks.leads else Follower(folder)
        ranks.rescue = lambda why: run.close(f"failed: {why}")
        tried = f"train.batch_size={cfg.train.batch_size} x train.block_size={cfg.train.block_size}, {choice}"
        fitting = partial(proof.fitting, cfg, device, ranks, build, train_step)
        with run, ranks.failing_together(), out_of_memory(tried, LEANER, fitting):
            train(assemble(cfg, device, ranks, run, start), start, signals)
        print(f"done     {run.folder / 'result.json'}")


if __name__ == "__main__":
    main()
