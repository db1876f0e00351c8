"""The references of parity: the first steps of eager PyTorch, in fp32 and in the run's precision.

A reference is made once, in a process of its own, which leaves no memory occupied for the run. It is stored in
.cache/parity.
"""

import hashlib
import json
import multiprocessing
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from common.files import read_bytes, read_json, write_json
from common.terminal import warn
from data import DataConfig, Dataset, open_dataset
from data.loader import Loader, open_splits
from kernels.registry import AttnConfig, KernelsConfig
from lab.proof.parity import STEPS, FirstSteps, Recorder
from lab.recipe import Recipe
from model.config import PRECISIONS
from model.download import CONFIG, hub_folder, weight_files
from model.optim import learning_rate
from model.optimizers import make_reference_optimizer
from model.parallel import SHARDED
from model.pretrained import read_pretrained
from model.step import train_step
from runtime.device import device_name, select_device
from runtime.ranks import Ranks
from runtime.schedule import TrainConfig

ROOT = Path(__file__).parents[2]
CACHE = Path(".cache/parity")
# Files whose text is part of the cache key, because they decide the numbers of a reference
SOURCES = ["model/*.py", "lab/recipe.py", "lab/proof/parity.py", "lab/proof/references.py", "data/loader.py"]
SOURCES += ["kernels/fp8.py", *(f"kernels/*/{name}.py" for name in ("__init__", "eager", "sdpa"))]
MAX_TOKENS = 16384  # in a micro-step of a reference: fp32 logits of 50,304 ids then take 3.3 GB


def reason_against_parity(recipe: Recipe, train: TrainConfig, sharded: bool, start: Path | None) -> str | None:
    """Return why this run cannot be compared with eager PyTorch in fp32; None if it can.

    `start` is the checkpoint that the run resumes from.
    """
    if start:
        return "the run resumes from a checkpoint"
    if recipe.model.dropout > 0:
        return "with dropout, every backend draws random numbers of its own"
    if sharded:
        return "with parallel=fsdp or zero2, each rank has only a part of the gradients"
    if train.max_minutes is not None:
        return "with train.max_minutes, the schedule depends on the speed"
    return None


def make_references(
    recipe: Recipe,
    train: TrainConfig,
    data: DataConfig,
    init_from: str | None,
    parallel: str,
    start: Path | None,
    dataset: Dataset,
    device: torch.device,
    ranks: Ranks,
) -> tuple[list[FirstSteps], dict]:
    """Return ([the steps in fp32, the steps in the run's precision], the row's `parity` for now), on every rank.

    The list is empty if the run cannot be compared; `parity` then says why.
    """
    sharded = parallel in SHARDED and not ranks.single
    references, reason = [], reason_against_parity(recipe, train, sharded, start)
    if reason is None and ranks.is_main:
        try:
            references = read_or_make_references(recipe, data, train, init_from, dataset, device)
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())
    return ranks.broadcast((references, {"ok": None, "why": reason or "the run ended before its proof"}))


def read_or_make_references(
    recipe: Recipe, data: DataConfig, train: TrainConfig, init_from: str | None, dataset: Dataset, device: torch.device
) -> list[FirstSteps]:
    """Return the first steps of eager PyTorch in fp32 and in the run's precision.

    Both start from the run's weights. With precision=bf16 or fp8 the fp32 reference too rounds its weights to bf16
    after every step. Raises RuntimeError if eager PyTorch fails.
    """
    batch_size = reference_batch_size(train)
    facts = [asdict(recipe.model), asdict(recipe.optim), recipe.documents, recipe.seed, batch_size, train.block_size]
    facts += [train.tokens_per_step, train.max_steps, train.overfit, init_files(init_from), dataset.fingerprint]
    facts += [device_name(device), torch.__version__]
    sources = [file for pattern in SOURCES for file in ROOT.glob(pattern)]
    weight_dtype = PRECISIONS[recipe.precision][0]
    train = replace(train, batch_size=batch_size)
    CACHE.mkdir(parents=True, exist_ok=True)
    references = []
    for precision in ("fp32", recipe.precision):
        kernels = KernelsConfig(fp8=recipe.kernels.fp8 if precision == "fp8" else None)
        eager = replace(recipe, kernels=kernels, attn=AttnConfig("sdpa"), precision=precision)
        path = CACHE / f"{cache_key([*facts, precision, kernels.fp8, str(weight_dtype)], sources)}.json"
        steps = read_steps(path)
        if steps is None:
            with FileLock(path.with_suffix(".lock")):  # jobs on several GPUs may need the same reference at once
                if read_steps(path) is None:
                    if path.exists():
                        warn(f"{path} is damaged, and is made again")
                    print(f"parity   first eager PyTorch in {precision}, as the reference of this config", flush=True)
                    arguments = eager, data, train, init_from, weight_dtype, device, path
                    run_in_process(write_reference, arguments, f"eager PyTorch in {precision}")
            steps = read_steps(path)
        references.append(steps)
    return references


def reference_batch_size(train: TrainConfig) -> int:
    """Return the largest divisor of the run's batch size whose micro-step has at most MAX_TOKENS tokens."""
    divisors = [size for size in range(1, train.batch_size + 1) if train.batch_size % size == 0]
    return max([size for size in divisors if size * train.block_size <= MAX_TOKENS], default=1)


def init_files(init_from: str | None) -> list:
    """Return the name, size and time of each file of init_from, which change when the weights change.

    For a model of the hub these are files in the hub's cache, whose names are hashes of their contents.
    """
    if not init_from:
        return []
    paths = [Path(init_from), *Path(init_from).rglob("*")]
    if not paths[0].exists():
        folder = hub_folder(init_from, weights=True)
        paths = [folder / CONFIG, *weight_files(folder)]
    files = sorted(path.resolve() for path in paths if path.is_file())
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def cache_key(facts: list, files: Iterable[Path]) -> str:
    """Return 16 hex digits that change with these facts and with the text of these files."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for file in sorted(files):
        digest.update(read_bytes(file))
    return digest.hexdigest()[:16]


def read_steps(path: Path) -> FirstSteps | None:
    """Return the steps in a file; None if the file is missing or damaged."""
    try:
        steps = read_json(path)
    except (OSError, ValueError):
        return None
    dtypes = {"losses": torch.float64}  # the sketches are in fp32
    return {name: torch.tensor(values, dtype=dtypes.get(name, torch.float32)) for name, values in steps.items()}


def run_in_process(work: Callable, arguments: tuple, name: str) -> None:
    """Run work(*arguments) in a process that never outlives this process. Raises RuntimeError if it fails."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_and_report, args=(sender, work, arguments), daemon=True)
    try:
        process.start()
        sender.close()
        process.join()
    finally:
        process.terminate()
    if process.exitcode:
        reason = receiver.recv() if receiver.poll() else f"exit code {process.exitcode}"
        raise RuntimeError(f"{name} did not run: {reason}")


def run_and_report(sender: Connection, work: Callable, arguments: tuple[Any, ...]) -> None:
    """Run work(*arguments). If it raises an exception, send the exception in one line and exit with 1."""
    try:
        work(*arguments)
    except Exception as error:
        sender.send(textwrap.shorten(f"{type(error).__name__}: {error}", 200))
        raise SystemExit(1) from None


def write_reference(
    recipe: Recipe,
    data: DataConfig,
    train: TrainConfig,
    init_from: str | None,
    weight_dtype: torch.dtype,
    device: torch.device,
    path: Path,
) -> None:
    """Run the first steps of `recipe` and write them to `path`.

    In fp32, every step rounds the weights to `weight_dtype`, as a step of the run does.
    """
    select_device(str(device))
    dataset = open_dataset(data)
    windows, _ = open_splits(dataset, train.block_size, recipe.documents)
    loader = Loader(windows, train.batch_size, train.tokens_per_step, recipe.seed, overfit=train.overfit)
    model = recipe.build(device, read_pretrained(init_from) if init_from else None)
    rounded = weight_dtype if recipe.precision == "fp32" else torch.float32
    optimizer = make_reference_optimizer(model, recipe.optim, rounded, PRECISIONS[recipe.precision][1])
    recorder = Recorder(optimizer)
    for step in range(1, min(STEPS, train.max_steps) + 1):
        batches = [tuple(tensor.to(device) for tensor in batch) for batch in loader(step)]
        loss, _ = train_step(model, optimizer, batches, learning_rate(recipe.optim, step, train.max_steps))
        recorder.add_loss(loss)
    write_json(path, {name: tensor.tolist() for name, tensor in recorder.steps.items()})
