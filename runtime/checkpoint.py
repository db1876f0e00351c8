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
import os
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from runtime.config import UserError, check

MANIFEST, WEIGHTS, TRAINING, SHARDS = "manifest.json", "model.safetensors", "training.pt", "shards"
FACTS = {"version", "step", "config", "data", "val_loss", "files"}  # that a manifest holds at least
State = dict[str, dict[str, Tensor]]  # {"model": {name: tensor}, "exp_avg": ..., ...}: (D)Tensors by parameter


def home(path: str | Path) -> Path:
    """The path, with the home folder for `~`. UserError: there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: there can be no such folder: {error}") from error


def steps(folder: Path) -> list[Path]:
    """The checkpoints in a `checkpoints` folder, the newest first."""
    found = (path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit())
    return sorted(found, key=number, reverse=True)


def number(path: Path) -> int:
    """The step of a checkpoint, by its name; -1 where it has another."""
    digits = path.name.removeprefix("step-")
    return int(digits) if digits.isdigit() else -1


def is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).exists()


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
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no good checkpoint: {MANIFEST} is missing or not JSON") from error
    lacks = FACTS - (facts.keys() if isinstance(facts, dict) else set())
    check(not lacks, f"{folder} is no good checkpoint: {MANIFEST} lacks {', '.join(sorted(lacks))}")
    check(facts["version"] == 1, f"{folder} has version {facts['version']}, and this program reads 1")
    return facts


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


def newest(folder: Path, after: int = -1) -> Path | None:
    """The newest good checkpoint in a `checkpoints` folder, later than step `after`, if there is any; those passed
    over are warned of."""
    for path in (path for path in steps(folder) if number(path) > after):
        try:
            verified(path)
            return path
        except UserError as error:
            print(f"warning: {error}", file=sys.stderr)
    return None


def find(path: str | Path) -> Path:
    """A checkpoint by its own folder, or the newest good one of a run's folder. UserError: there is none."""
    path = home(path)
    if is_checkpoint(path):
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
