"""Checkpoints: read and verify them. A checkpoint is a folder that is either complete or not there.

out/<run>/checkpoints/step-000250/manifest.json      step, elapsed, config, data, val_loss; the size and SHA-256 of
                                                     each file; the SHA-256 of the manifest itself
                                  model.safetensors  the weights in fp32, under the model's names
                                  training.pt        AdamW's moments, random states, the number of updates
                      best -> step-000250            the checkpoint with the lowest validation loss

runtime/saver.py writes a checkpoint under a hidden name, fsyncs it, and renames it when it is complete. So a kill at
any moment leaves the earlier checkpoints unchanged. Nothing in a checkpoint depends on the kernels that made it.

With FSDP a checkpoint may be sharded: weights and moments are then in shards/. Every rank writes its part through
torch.distributed.checkpoint, and any number of ranks can read them.
"""

import hashlib
import os
import random
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from files import read_json, write_json
from runtime.config import UserError, check
from runtime.ranks import is_sharded
from terminal import warn

MANIFEST, WEIGHTS, TRAINING, SHARDS = "manifest.json", "model.safetensors", "training.pt", "shards"
# {"model": {parameter name: tensor}, "exp_avg": {...}, "exp_avg_sq": {...}}; with FSDP the tensors are DTensors
State = dict[str, dict[str, Tensor]]


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the checkpoints in a `checkpoints` folder, the newest first. Links and files are not checkpoints,
    whatever their name."""
    folders = [path for path in folder.glob("step-*") if step_number(path) >= 0 and is_real_folder(path)]
    return sorted(folders, key=step_number, reverse=True)


def is_real_folder(path: Path) -> bool:
    """Return whether the path is a folder and not a link, which may lead to files that we must not delete."""
    return path.is_dir() and not path.is_symlink()


def step_number(path: Path) -> int:
    """Return the step of a checkpoint, which its name holds; -1 for a folder with another name."""
    digits = path.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else -1


def is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).exists()


def flatten(state: State) -> dict[str, Tensor]:
    """Return {"model.NAME": tensor, "exp_avg.NAME": tensor, ...}, the form that torch.distributed.checkpoint takes."""
    return {f"{group}.{name}": tensor for group, tensors in state.items() for name, tensor in tensors.items()}


def write_manifest(folder: Path, facts: dict) -> None:
    """Complete a checkpoint: fsync its files, and write the manifest with `facts` and the files' sizes and SHA-256."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        fsync(path)
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    for path in [path for path in folder.rglob("*") if path.is_dir()]:
        fsync(path)
    write_json(folder / MANIFEST, {"version": 1, **facts, "files": files}, indent=1)
    fsync(folder)


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the mode that every new file gets; safetensors itself gives it 0600."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)
    path.chmod(mode)


def fsync(path: Path) -> None:
    """Call fsync on a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path) -> dict:
    """Return the manifest of a checkpoint. Raises UserError if it is missing or damaged, or of another folder."""
    try:
        facts = read_json(folder / MANIFEST)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{folder} is not a valid checkpoint: {MANIFEST}: {reason}") from error
    check(facts["version"] == 1, f"{folder} has version {facts['version']}, and this program reads version 1")
    step = step_number(folder.resolve())  # `best` is a link
    check(step in (-1, facts["step"]), f"{folder} is not a valid checkpoint: {MANIFEST} is of step {facts['step']}")
    return facts


def progress(folder: Path) -> tuple[int, float]:
    """Return (a checkpoint's step, the seconds that the run had taken by then)."""
    facts = read_manifest(folder)
    return facts["step"], facts["elapsed"]


def verify(folder: Path) -> dict:
    """Compare every file with the manifest, and return the manifest. Raises UserError if a file differs."""
    facts = read_manifest(folder)
    for name, expected in facts["files"].items():
        problem = find_damage(folder / name, expected)
        check(problem is None, f"{folder} is damaged: {name} {problem}; choose another checkpoint")
    return facts


def find_damage(path: Path, expected: dict) -> str | None:
    """Return how a file differs from its entry `expected` in the manifest, or None if it is the same."""
    if not path.exists():
        return "is missing"
    size = path.stat().st_size
    if size != expected["size"]:
        return f"has {size} of {expected['size']} bytes"
    try:
        return None if sha256_of(path) == expected["sha256"] else "has another SHA-256"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def newest_valid(folder: Path, after: int = -1) -> Path | None:
    """Return the newest valid checkpoint in a `checkpoints` folder whose step is greater than `after`.

    None if there is none. Prints a warning for each invalid checkpoint that it skips.
    """
    for path in sorted(folder.glob("step-*")):
        if step_number(path) > after and not is_real_folder(path):
            warn(f"{path} is a link or a file and not a checkpoint; it is skipped")
    for path in checkpoint_folders(folder):
        if step_number(path) <= after:
            break
        try:
            verify(path)
            return path
        except UserError as error:
            warn(error)
    return None


def find_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, or the newest valid checkpoint of a run's folder.

    Raises UserError if there is none.
    """
    if is_checkpoint(path):
        return path
    newest = newest_valid(path / "checkpoints") or newest_valid(path)
    check(
        newest is not None,
        f"{path} holds no valid checkpoint; name a run's folder (out/RUN) or one of its checkpoints",
    )
    return newest


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the model's weights by name, fp32, on the CPU."""
    if (folder / WEIGHTS).exists():
        return load_file(folder / WEIGHTS)
    from torch.distributed.checkpoint import FileSystemReader  # takes 1.5 s to import

    metadata = FileSystemReader(folder / SHARDS).read_metadata().state_dict_metadata
    weights = {name: torch.empty(metadata[name].size) for name in metadata if name.startswith("model.")}
    load_shards(weights, folder)
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def load_shards(state: dict[str, Tensor], folder: Path) -> None:
    """Fill the tensors of `state` from a sharded checkpoint, on any number of ranks."""
    from torch.distributed.checkpoint import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process")  # that is the intent
        load(state, checkpoint_id=folder / SHARDS, no_dist=not dist.is_initialized())


@torch.no_grad()
def load_state(folder: Path, state: State) -> dict:
    """Fill the tensors of `state`, on any number of ranks, and return the other entries of training.pt."""
    rest = torch.load(folder / TRAINING, map_location="cpu", weights_only=True, mmap=True)
    if (folder / SHARDS).exists():
        load_shards(flatten(state), folder)
        return rest
    saved = {"model": load_file(folder / WEIGHTS), **{group: rest.pop(group) for group in state if group != "model"}}
    for group, tensors in state.items():
        for name, tensor in tensors.items():
            whole = saved[group][name]
            if is_sharded(tensor):  # each rank copies its own part of the file
                from torch.distributed.tensor import distribute_tensor

                part = distribute_tensor(
                    whole.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
                )
                tensor.to_local().copy_(part.to_local())
            else:
                tensor.copy_(whole)
    return rest


def random_state(device: torch.device) -> dict:
    """Return all random states of this process, in types that torch.load(weights_only=True) accepts."""
    generator, keys, *position = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (generator, keys.tolist(), *position),
        "python": random.getstate(),
    }


def restore_random_state(state: dict, device: torch.device) -> None:
    """Set all random states of this process to `state`, which random_state() returned."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
