"""Checkpoints: folders that are whole, or not there.

out/<run>/checkpoints/step-000250/manifest.json      step, config, data, val_loss; size and SHA-256 of every file
                                  model.safetensors  the weights in fp32, under the model's names
                                  training.pt        AdamW's moments, random states, the clock
                      best -> step-000250            the one with the lowest validation loss

One is written under a hidden name, fsynced, and renamed when whole, so a kill at any moment leaves the ones before as
they were. Nothing in it depends on the kernels that made it. In a sharded one (FSDP) weights and moments lie in
shards/, written by every rank through torch.distributed.checkpoint and readable on any number of ranks.
"""

import hashlib
import json
import math
import os
import random
import shutil
import statistics
import sys
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, distribute_tensor

from runtime.config import UserError, check
from runtime.ranks import Ranks

MANIFEST, WEIGHTS, TRAINING, SHARDS = "manifest.json", "model.safetensors", "training.pt", "shards"
State = dict[str, dict[str, Tensor]]  # {"model": {name: tensor}, "exp_avg": ..., ...}: (D)Tensors by parameter


class Checkpoints:
    """The checkpoints of one run: saves them, keeps the last `keep` and the best. On all ranks; rank 0 writes."""

    def __init__(self, folder: Path, keep: int, sharded: bool, ranks: Ranks, device: torch.device):
        self.folder, self.keep, self.sharded, self.ranks = folder, keep, sharded, ranks
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future | None = None
        self.pauses: list[float] = []
        best = folder / "best"
        self.best = manifest(best)["val_loss"] if best.exists() else math.inf  # lowest validation loss so far
        self.host: dict[str, Tensor] = {}  # pinned for a GPU, and used again: to pin 1.5 GB takes half a second
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # a group of its own: the thread's collectives would mix with those of the training loop
        self.group = dist.new_group(backend="gloo") if sharded else None
        if ranks.leads:
            for leftover in folder.glob(".step-*"):  # of a run that was killed in the middle of a save
                shutil.rmtree(leftover)

    def save(self, step: int, state: State, rest: dict, facts: dict) -> tuple[float, torch.cuda.Event | None]:
        """Start saving: (seconds that this took, an event before which no tensor of `state` may change).

        `rest` goes into training.pt, `facts` (with val_loss) into the manifest. The rest is done by a thread.
        """
        start = time.perf_counter()
        self.finish()
        temporary = self.folder / f".step-{step:06d}"
        written, copied = None, None
        if self.sharded:
            if self.ranks.leads:
                temporary.mkdir(parents=True, exist_ok=True)
            self.ranks.gather(None)
            written = dcp.async_save(flat(state), checkpoint_id=temporary / SHARDS, process_group=self.group)
            state = {}
        else:
            state, copied = self._to_host(state)
        facts = {"step": step, **facts}
        is_best = facts["val_loss"] is not None and facts["val_loss"] < self.best
        self.best = facts["val_loss"] if is_best else self.best
        if self.ranks.leads:
            self.pending = self.thread.submit(self._write, temporary, state, rest, facts, written or copied, is_best)
        else:
            self.pending = written
        self.pauses.append(time.perf_counter() - start)
        return self.pauses[-1], copied

    def finish(self) -> None:
        """Wait until the last save is on the disk; one that failed is a warning, and the ones before it stay."""
        try:
            self._wait()
        except UserError as error:
            print(f"warning: {error}", file=sys.stderr)

    def close(self) -> dict[str, float]:
        """Wait for the last save; what saving cost, for the row. UserError: the last one failed."""
        self.thread.shutdown()
        self._wait()
        return {"checkpoint/pause_ms": 1e3 * statistics.median(self.pauses)} if self.pauses else {}

    def _wait(self) -> None:
        pending, self.pending = self.pending, None
        if pending and (error := pending.exception()) and self.ranks.leads:  # it speaks for all
            raise error

    def _to_host(self, state: State) -> tuple[State, torch.cuda.Event | None]:
        """Copies in host memory, on rank 0; on a GPU they are under way until the event, beside the computation."""
        copies: State = {group: {} for group in state}
        for group, tensors in state.items():
            for name, tensor in tensors.items():
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if not self.ranks.leads:
                    continue
                if (key := f"{group}.{name}") not in self.host:
                    self.host[key] = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=whole.is_cuda)
                copies[group][name] = self.host[key]
                if self.stream:
                    self.stream.wait_stream(torch.cuda.current_stream())
                    whole.record_stream(self.stream)
                with torch.cuda.stream(self.stream):  # of None: does nothing
                    copies[group][name].copy_(whole, non_blocking=True)
        return copies, self.stream.record_event() if self.stream else None

    def _write(self, temporary: Path, state: State, rest: dict, facts: dict, ready: Any, is_best: bool) -> None:
        final = temporary.with_name(temporary.name[1:])
        try:
            if isinstance(ready, Future):
                ready.result()  # rank 0's is done when every rank's shards are written
            elif ready:
                ready.synchronize()
            temporary.mkdir(parents=True, exist_ok=True)
            if state:
                save_file(state.pop("model"), temporary / WEIGHTS)
            torch.save({**state, **rest}, temporary / TRAINING)
            seal(temporary, facts)
            discard(final)  # a damaged one, before which the run began again
            temporary.rename(final)
            sync(self.folder)
            self._prune(final, is_best)
        except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:  # a full disk has many names
            shutil.rmtree(temporary, ignore_errors=True)
            why = getattr(error, "strerror", None) or str(error).splitlines()[0]
            free = shutil.disk_usage(next(parent for parent in self.folder.parents if parent.is_dir())).free
            raise UserError(
                f"{final} could not be written: {why}; those before it stay, and {free / 2**30:.1f} GiB are free"
            ) from error

    def _prune(self, newest: Path, is_best: bool) -> None:
        """Point `best` at the newest if it is, and delete what is neither best nor among the last `keep`."""
        best = self.folder / "best"
        if is_best:
            link = self.folder / ".best"
            link.unlink(missing_ok=True)
            link.symlink_to(newest.name)
            link.replace(best)
        for path in steps(self.folder)[self.keep :]:
            if path.resolve() != best.resolve():
                discard(path)


def steps(folder: Path) -> list[Path]:
    """The checkpoints in a `checkpoints` folder, the newest first."""
    return sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def discard(path: Path) -> None:
    """Delete a checkpoint, under a hidden name: killed half-way, it must not look like a damaged one."""
    if path.exists():
        hidden = path.with_name(f".{path.name}-old")
        path.rename(hidden)
        shutil.rmtree(hidden)


def flat(state: State) -> dict[str, Tensor]:
    return {f"{group}.{name}": tensor for group, tensors in state.items() for name, tensor in tensors.items()}


def seal(folder: Path, facts: dict) -> None:
    """Make what was written last, and write the manifest over it."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sync(path)
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": digest(path)}
    for path in [path for path in folder.rglob("*") if path.is_dir()]:
        sync(path)
    (folder / MANIFEST).write_text(json.dumps({"version": 1, **facts, "files": files}, indent=1) + "\n")
    sync(folder / MANIFEST)
    sync(folder)


def sync(path: Path) -> None:
    """fsync of a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest(folder: Path) -> dict:
    """UserError: there is none, or it cannot be read."""
    try:
        facts = json.loads((folder / MANIFEST).read_text())
        check(facts.get("version") == 1, f"{folder} has version {facts.get('version')}, and this program reads 1")
        return facts
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder} is no good checkpoint: {MANIFEST} is missing or not JSON") from error


def verified(folder: Path) -> dict:
    """The manifest, after every file was compared with it. UserError: one differs."""
    facts = manifest(folder)
    for name, told in facts["files"].items():
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        check(size is not None, f"{folder} is damaged: {name} is missing; choose another checkpoint")
        check(
            size == told["size"], f"{folder} is damaged: {name} has {size} of {told['size']} bytes; choose another one"
        )
        check(digest(path) == told["sha256"], f"{folder} is damaged: {name} has another SHA-256; choose another one")
    return facts


def newest(folder: Path) -> Path | None:
    """The newest good checkpoint in a `checkpoints` folder, if there is any; those passed over are warned of."""
    for path in steps(folder):
        try:
            verified(path)
            return path
        except UserError as error:
            print(f"warning: {error}", file=sys.stderr)
    return None


def find(path: str | Path) -> Path:
    """A checkpoint by its own folder, or the newest good one of a run's folder. UserError: there is none."""
    path = Path(path).expanduser()
    if (path / MANIFEST).exists():
        return path
    found = newest(path / "checkpoints") or newest(path)
    check(
        found is not None, f"{path} holds no good checkpoint; name a run's folder (out/RUN) or one of its checkpoints"
    )
    return found


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The model's weights, fp32, on the CPU."""
    if (folder / WEIGHTS).exists():
        return load_file(folder / WEIGHTS)
    reader = dcp.FileSystemReader(folder / SHARDS)
    held = reader.read_metadata().state_dict_metadata
    weights = {name: torch.empty(held[name].size) for name in held if name.startswith("model.")}
    load_shards(weights, reader)
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def load_shards(state: dict[str, Tensor], reader: dcp.FileSystemReader) -> None:
    """Fill the tensors of `state`, on however many ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process")  # it is
        dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())


@torch.no_grad()
def load(folder: Path, state: State) -> dict:
    """Fill the tensors of `state`, on however many ranks, and return the rest of training.pt."""
    rest = torch.load(folder / TRAINING, map_location="cpu", weights_only=True, mmap=True)
    if (folder / SHARDS).exists():
        load_shards(flat(state), dcp.FileSystemReader(folder / SHARDS))
        return rest
    saved = {"model": load_file(folder / WEIGHTS), **{group: rest.pop(group) for group in state if group != "model"}}
    for group, tensors in state.items():
        for name, tensor in tensors.items():
            whole = saved[group][name]
            if isinstance(tensor, DTensor):  # each rank cuts its own part out of the file
                part = distribute_tensor(
                    whole.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
                )
                tensor.to_local().copy_(part.to_local())
            else:
                tensor.copy_(whole)
    return rest


def random_state(device: torch.device) -> dict:
    """All random states of this process, of types that torch.load(weights_only=True) knows."""
    kind, keys, *position = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (kind, keys.tolist(), *position),
        "python": random.getstate(),
    }


def restore_random_state(state: dict, device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
