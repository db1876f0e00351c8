"""What a row carries besides its speed, with proof=true: parity, a receipt, and its memory in parts.

train.py lends its build() and train_step(), so that what is proved is what was measured.
"""

import fcntl
import multiprocessing
import pickle
import textwrap
from collections.abc import Callable
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data import Dataset, open_dataset
from data.loader import Batch, Loader, Windows
from kernels.registry import AttnConfig, KernelsConfig, chosen, runs
from model import memory
from model.gpt import GPT, PRECISIONS
from model.optim import Optimizer, learning_rate
from runtime.config import UserError
from runtime.console import proof_lines
from runtime.device import GIB, pick
from runtime.device import name as device_name
from runtime.parity import STEPS, Steps, judged, key, refused, sketch
from runtime.ranks import Ranks
from runtime.receipt import missing, receipt

ROOT = Path(__file__).parents[1]
CACHE = Path(".cache/parity")
SOURCES = ["train.py", "model/*.py", "runtime/parity.py", "data/loader.py"]
SOURCES += [f"kernels/*/{name}.py" for name in ("__init__", "eager", "sdpa")]
EAGER = KernelsConfig("eager", "eager", "eager", compile=False), AttnConfig("sdpa")
KERNELS = 24  # of a receipt, in the row
TOKENS = 16384  # of the reference's micro-steps: fp32 logits of a vocabulary of 50,304 are 3.3 GB


class Wrong(UserError):
    """The run is complete, and does not do what its row says."""

    status = "wrong"


class Begun:
    """The first losses and the first gradient of a run, while it runs."""

    def __init__(self, optimizer: Optimizer, steps: int = STEPS):
        self.count, self.losses, self.gradient = steps, [], {}
        optimizer.observer = lambda name, gradient: self.gradient.update({name: sketch(name, gradient)})

    def see(self, loss: Tensor) -> None:
        if len(self.losses) < self.count:
            self.losses.append(loss)

    @property
    def steps(self) -> Steps:
        return {"losses": torch.stack(self.losses).double().cpu(), **self.gradient}


def without_parity(cfg: Any, ranks: Ranks, resumed: bool) -> str | None:
    """Why this run is not compared with eager PyTorch in fp32, or None."""
    reasons = {
        "it goes on from a checkpoint": resumed,
        "dropout draws its own numbers in every kernel": cfg.model.dropout > 0,
        "parallel=fsdp has its gradients in parts": cfg.parallel == "fsdp" and not ranks.alone,
        "train.max_minutes makes the schedule a matter of speed": cfg.train.max_minutes is not None,
    }
    return next((why for why, so in reasons.items() if so), None)


def prepared(
    cfg: Any, ranks: Ranks, resumed: bool, dataset: Dataset, device: torch.device, build: Callable, step: Callable
) -> tuple[list[Steps], str]:
    """The references, made by the rank that leads; or none, and why."""
    found, why = [], without_parity(cfg, ranks, resumed)
    if not why and ranks.leads:
        try:
            found = references(cfg, dataset, device, build, step)
        except (OSError, RuntimeError) as error:
            why = " ".join(str(error).split())
    return ranks.tell((found, why or "the run has not come to its proof"))


def references(cfg: Any, dataset: Dataset, device: torch.device, build: Callable, step: Callable) -> list[Steps]:
    """What eager PyTorch computes in the run's first steps: in fp32, from the weights that the run has, which
    precision=bf16 rounds after every step; and in the run's precision.

    Made once, by a process that takes no memory from this one, and kept in .cache/parity. RuntimeError: it cannot be.
    """
    t, found = cfg.train, []
    sizes = [size for size in range(1, t.batch_size + 1) if t.batch_size % size == 0]
    size = max([size for size in sizes if size * t.block_size <= TOKENS], default=1)
    facts = [asdict(cfg.model), asdict(cfg.optim), cfg.data.mask_documents, cfg.seed, size, t.block_size]
    facts += [t.tokens_per_step, t.max_steps, weights(cfg.init_from), dataset.fingerprint]
    facts += [device_name(device), torch.__version__]
    sources = [file for name in SOURCES for file in ROOT.glob(name)]
    kernels, attn = EAGER
    stored = PRECISIONS[cfg.precision][0]
    CACHE.mkdir(parents=True, exist_ok=True)
    for precision in ("fp32", cfg.precision):
        plain = replace(cfg, precision=precision, kernels=kernels, attn=attn, train=replace(t, batch_size=size))
        path = CACHE / f"{key(*facts, precision, str(stored), files=sources)}.pt"
        if (steps := kept(path)) is None:
            with path.with_suffix(".lock").open("w") as held:
                fcntl.flock(held, fcntl.LOCK_EX)  # jobs of a sweep on several GPUs want the same at once
                if kept(path) is None:
                    alone(reference, plain, stored, device, path, build, step)
            steps = torch.load(path, weights_only=True)
        found.append(steps)
    return found


def weights(init_from: str | None) -> list:
    """What tells the weights to begin with from others of that name."""
    files = [Path(init_from), *Path(init_from).rglob("*")] if init_from else []
    stats = [(str(path), path.stat()) for path in files if path.is_file()]
    return [init_from, *sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)]


def kept(path: Path) -> Steps | None:
    try:
        return torch.load(path, weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError):  # not there, or cut short
        return None


def alone(work: Callable, cfg: Any, *rest: Any) -> None:
    """In a process of its own, which ends with this one. RuntimeError: it failed."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=told, args=(sender, work, cfg, *rest), daemon=True)
    try:
        process.start()
        sender.close()
        process.join()
    finally:
        process.terminate()
    if process.exitcode:
        why = receiver.recv() if receiver.poll() else f"exit code {process.exitcode}"
        raise RuntimeError(f"eager PyTorch in {cfg.precision} did not run: {why}")


def told(sender: Connection, work: Callable, *arguments: Any) -> None:
    """Do it, and say in a line why it failed."""
    try:
        work(*arguments)
    except Exception as error:
        sender.send(textwrap.shorten(f"{type(error).__name__}: {error}", 200))
        raise SystemExit(1) from None


def reference(cfg: Any, stored: torch.dtype, device: torch.device, path: Path, build: Callable, step: Callable) -> None:
    """In a process of its own: the first steps of `cfg` with weights as in `stored`, written to `path`."""
    pick(str(device))
    dataset = open_dataset(cfg.data)
    eot = dataset.tokenizer.eot if cfg.data.mask_documents else None
    windows = Windows(dataset.train, cfg.train.block_size, "training", eot=eot)
    loader = Loader(windows, cfg.train.batch_size, cfg.train.tokens_per_step, cfg.seed)
    model = build(cfg, device)
    optimizer = Optimizer(model, cfg.optim, rounded=stored if cfg.precision == "fp32" else torch.float32)
    begun = Begun(optimizer)
    for number in range(1, min(STEPS, cfg.train.max_steps) + 1):
        batches = [tuple(t.to(device) for t in batch) for batch in loader(number)]
        begun.see(step(model, optimizer, batches, learning_rate(cfg.optim, number, cfg.train.max_steps))[0])
    temporary = path.with_suffix(".partial")
    torch.save(begun.steps, temporary)
    temporary.replace(path)


def split(cfg: Any, device: torch.device, build: Callable, step: Callable) -> dict[str, float] | None:
    """GiB that a step will take, by part: model/memory.py's, of the model without torch.compile. None: FlexAttention
    is in it, which runs under torch.compile alone."""
    plain = replace(cfg, kernels=replace(cfg.kernels, compile=False), init_from=None)
    t = cfg.train
    with memory.simulated(device) as held:
        model = build(plain, device)
        optimizer = Optimizer(model, cfg.optim)
        count = min(2, t.tokens_per_step // (t.batch_size * t.block_size))  # the second adds to gradients
        batch = torch.zeros(2, t.batch_size, t.block_size, dtype=torch.int64, device=device).unbind()
        if cfg.data.mask_documents:
            batch = *batch, torch.zeros(t.batch_size, t.block_size, dtype=torch.int32, device=device)
        try:
            parts = memory.parts(held, model, optimizer, batch, lambda: step(model, optimizer, [batch] * count, 0.0))
        except RuntimeError as error:
            if "HigherOrderOperator" not in str(error):
                raise
            return None
    return in_gib(parts)


def fitting(cfg: Any, device: torch.device, ranks: Ranks, build: Callable, step: Callable) -> str:
    """For the error of a GPU whose memory is full: a micro-batch that would take nine tenths of it at most."""
    if device.type == "cpu" or not ranks.alone:
        return ""
    # A tenth is for what a prediction does not see: the context, what cuBLAS takes, gaps between tensors
    size = would_fit(cfg, device, 0.9 * torch.cuda.mem_get_info(device)[1] / GIB, build, step)
    return f"; by prediction train.batch_size={size} fits" if size else ""


def would_fit(cfg: Any, device: torch.device, gib: float, build: Callable, step: Callable) -> int | None:
    """The largest micro-batch below the config's whose peak is predicted within `gib`; None: there is none."""
    for size in range(cfg.train.batch_size // 2, 0, -1):
        if cfg.train.batch_size % size == 0:
            parts = split(replace(cfg, train=replace(cfg.train, batch_size=size)), device, build, step)
            if parts is None or parts["peak"] <= gib:
                return parts and size
    return None


def weighed(model: GPT, optimizer: Optimizer, batch: Batch, peak_gib: float) -> dict[str, float]:
    """The same, measured on a GPU in one more forward and backward, which update nothing."""
    parts = {"weights": memory.nbytes(model.parameters())}
    held = [tensor for state in optimizer.adamw.state.values() for tensor in state.values()]
    held += optimizer.masters if optimizer.masters is not optimizer.weights else []
    parts["optimizer"] = memory.nbytes(held)
    before = torch.cuda.memory_allocated()
    loss = model(*batch)
    parts["activations"] = torch.cuda.memory_allocated() - before
    loss.backward()
    optimizer.accumulate()
    parts["gradients"] = memory.nbytes(master.grad for master in optimizer.masters)
    optimizer.adamw.zero_grad(set_to_none=True)
    return in_gib(parts | {"peak": peak_gib * GIB})


def in_gib(parts: dict[str, float]) -> dict[str, float]:
    """With `workspace`: what the peak is more than all the others, the logits among it. They are not all held at the
    same time, so of a small batch it may be 0."""
    rest = parts["peak"] - sum(size for name, size in parts.items() if name != "peak")
    return {name: size / GIB for name, size in {**parts, "workspace": max(0, rest)}.items()}


def prove(job: Any, begun: Begun | None, build: Callable, step: Callable) -> None:
    """Put the proof into the row of train.py's job, which is done. Wrong: the run is not what its row says."""
    cfg, device, row = job.cfg, job.device, job.run.row
    if begun:
        row["parity"] = judged(begun.steps, *job.references)
    batches = [tuple(t.to(device) for t in batch) for batch in job.loader(row["steps"] + 1)]
    row["memory"] = {"predicted": None, "measured": None}
    if job.ranks.alone:
        row["memory"]["predicted"] = split(cfg, device, build, step)
        if device.type == "cuda":
            row["memory"]["measured"] = weighed(job.model, job.optimizer, batches[0], row["mem/peak_allocated_gib"])
    found = receipt(lambda: step(job.model, job.optimizer, batches, 0.0), device)
    names, who = chosen(cfg.kernels, cfg.attn), row["kernels"]
    claims = {op: (who[op], runs(op, impl, who[op])) for op, impl in names.items()}
    found["wrong"] = missing(found, claims)
    found["unchecked"] = [op for op, (_, patterns) in claims.items() if not patterns]
    del found["kernels"][KERNELS:]
    row["receipt"] = {"step_ms": row.get("perf/step_ms"), **found}
    print(proof_lines(row))
    if wrong := refused(row["parity"]) or found["wrong"]:
        raise Wrong(wrong)
