"""Checkpoints: read and verify them. A checkpoint is a folder that is either complete or not there.

out/<run>/checkpoints/step-000250/manifest.json      step, elapsed, config, data, val_loss; the size and SHA-256 of
                                                     each file; the SHA-256 of the manifest itself
                                  model.safetensors  the weights in fp32, under the model's names
                                  training.pt        the optimizer's moments, random states, the number of updates
                      best -> step-000250            the checkpoint with the lowest validation loss

runtime/saver.py writes a checkpoint under a hidden name, fsyncs it, and renames it when it is complete. So a kill at
any moment leaves the earlier checkpoints unchanged. Nothing in a checkpoint depends on the kernels that made it.

With FSDP a checkpoint may be sharded: weights and moments are then in shards/. Every rank writes its part through
torch.distributed.checkpoint, and any number of ranks can read them (runtime/sharded.py).

Only the files that the manifest lists are opened, and none of them can run code. A checkpoint that cannot be read
(no permission, an error of the disk, too many open files) may be good: nobody skips it, and nobody deletes it.
"""

import os
import random
import stat
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.files import check_regular, open_regular
from common.terminal import class_and_message, warn
from runtime.config import UserError, check
from runtime.manifest import (
    MANIFEST,
    SHARD,
    SHARDS,
    TRAINING,
    WEIGHTS,
    Unreadable,
    is_damage,
    read_manifest,
    sha256_of,
    step_number,
    unreadable,
)
from runtime.pickles import check_saved
from runtime.ranks import is_sharded

# {"model": {parameter name: tensor}, "exp_avg": {...}, "exp_avg_sq": {...}}, with Muon also "momentum"; with FSDP the
# tensors are DTensors
State = dict[str, dict[str, Tensor]]


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the checkpoints in a `checkpoints` folder, the newest first. Links and files are not checkpoints,
    whatever their name. Raises Unreadable if the folder cannot be listed."""
    folders = [path for path in list_steps(folder) if is_real_folder(path)]
    return sorted(folders, key=step_number, reverse=True)


def list_steps(folder: Path) -> list[Path]:
    """Return what has the name of a checkpoint; nothing if there is no folder. Raises Unreadable."""
    try:
        return [folder / name for name in sorted(os.listdir(folder)) if step_number(folder / name) >= 0]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(folder, error) from error


def is_real_folder(path: Path) -> bool:
    """Return whether the path is a folder and not a link, which may lead to files that we must not delete."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise unreadable(path, error) from error


def is_checkpoint(path: Path) -> bool:
    return os.path.lexists(path / MANIFEST)


def flatten(state: State) -> dict[str, Tensor]:
    """Return {"model.NAME": tensor, "exp_avg.NAME": tensor, ...}, the form that torch.distributed.checkpoint takes."""
    return {f"{group}.{name}": tensor for group, tensors in state.items() for name, tensor in tensors.items()}


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the mode that every new file gets; safetensors itself gives it 0600."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)
    path.chmod(mode)


def verify(folder: Path) -> dict:
    """Return the manifest. Raises UserError if a file differs from it, Unreadable if one cannot be read or is extra."""
    facts = read_manifest(folder)
    for name, expected in facts["files"].items():
        problem = find_damage(folder / name, expected)
        check(problem is None, f"{folder} is damaged: {name} {problem}; choose another checkpoint")
    others = sorted(map(ascii, list_files(folder) - facts["files"].keys() - {MANIFEST}))
    if others:
        names = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise Unreadable(
            f"{folder} holds {names}, which its {MANIFEST} does not list: move this out of the folder, or name another "
            "checkpoint by its path"
        )
    return facts


def list_files(folder: Path) -> set[str]:
    """Return the names of the files in a checkpoint. A file in the folder `shards` is shards/NAME."""
    try:
        names = set(os.listdir(folder))
        if SHARDS in names and is_real_folder(folder / SHARDS):
            shards = {f"{SHARDS}/{name}" for name in os.listdir(folder / SHARDS)}
            names = names - {SHARDS} | shards if shards else names
        return names
    except OSError as error:
        raise unreadable(folder, error) from error


def find_damage(path: Path, expected: dict) -> str | None:
    """Return how a file differs from `expected`, its entry in the manifest; None if it does not. Raises Unreadable."""
    try:
        if path.is_symlink():
            return "is a link"
        size = check_regular(path).st_size
        if size != expected["size"]:
            return f"has {size} of {expected['size']} bytes"
        return None if sha256_of(path) == expected["sha256"] else "has another SHA-256"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        if not is_damage(error):
            raise unreadable(path, error) from error
        return f"cannot be read: {error.strerror}"


def newest_valid(folder: Path, after: int = -1) -> Path | None:
    """Return the newest valid checkpoint in a `checkpoints` folder whose step is greater than `after`; None if none is.

    Prints a warning for each invalid checkpoint that it skips. Raises Unreadable if a newer one cannot be read.
    """
    for path in list_steps(folder):
        if step_number(path) > after and not is_real_folder(path):
            warn(f"{path} is a link or a file and not a checkpoint; it is skipped")
    for path in checkpoint_folders(folder):
        if step_number(path) <= after:
            break
        try:
            verify(path)
            return path
        except Unreadable:
            raise
        except UserError as error:
            warn(error)
    return None


def find_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, or a run's newest valid checkpoint. Raises UserError if there is none."""
    if is_checkpoint(path):
        return path
    newest = newest_valid(path / "checkpoints") or newest_valid(path)
    check(newest is not None, f"{path} holds no valid checkpoint; name a run's folder or one of its checkpoints")
    return newest


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Verify a checkpoint, and return the model's weights by name, fp32, on the CPU. Raises UserError as verify()."""
    files = verify(folder)["files"]
    if WEIGHTS in files:
        return read_tensors(folder / WEIGHTS)
    reader = open_shards(folder, files)
    weights = {name: torch.empty(size) for name, size in reader.sizes.items() if name.startswith("model.")}
    reader.load(weights)
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def open_shards(folder: Path, files: dict):
    """Return the ShardReader of a sharded checkpoint whose manifest has these files."""
    from runtime.sharded import ShardReader  # takes 1.5 s to import

    return ShardReader(folder / SHARDS, {Path(name).name for name in files if SHARD.fullmatch(name)})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises UserError if it is damaged or cannot be read."""
    try:
        check_regular(path)
        return load_file(path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or class_and_message(error)
        raise UserError(f"{path} cannot be read: {reason}; choose another checkpoint") from error


def read_training(folder: Path) -> dict:
    """Return what training.pt holds: `updates`, `random`, and, if the checkpoint is not sharded, AdamW's moments.

    Raises UserError if it is damaged, cannot be read, or holds more than tensors and plain values.
    """
    path = folder / TRAINING
    try:
        with open_regular(path) as file:
            check_saved(file)
        training = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        has_updates = isinstance(training, dict) and type(training.get("updates")) is int
    except Exception as error:  # the unpickler may raise any exception
        reason = "it is damaged, or holds more than tensors and plain values"
        if isinstance(error, OSError):
            reason = error.strerror or error
        raise UserError(f"{path} cannot be read: {reason}; choose another checkpoint") from error
    check(has_updates, f"{path} is not of a run: `updates` is missing or wrong; choose another checkpoint")
    return training


@torch.no_grad()
def load_state(folder: Path, state: State) -> dict:
    """Fill the tensors of `state`, on any number of ranks. Returns the rest of training.pt. May raise UserError."""
    manifest, rest = read_manifest(folder), read_training(folder)
    is_whole = isinstance(rest.get("random"), list) and 0 <= rest["updates"] <= manifest["step"]
    check(is_whole, f"{folder / TRAINING} has a wrong `random` or `updates`; choose another checkpoint")
    if WEIGHTS not in manifest["files"]:
        open_shards(folder, manifest["files"]).load(flatten(state))
        return rest
    saved = {group: rest.pop(group, None) for group in state}
    saved["model"] = read_tensors(folder / WEIGHTS)
    for group, tensors in state.items():
        for name, tensor in tensors.items():
            whole = pick(saved, group, name, tensor.shape, folder)
            if is_sharded(tensor):  # each rank copies its own part of the file
                from torch.distributed.tensor import distribute_tensor

                part = distribute_tensor(
                    whole.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
                )
                tensor.to_local().copy_(part.to_local())
            else:
                tensor.copy_(whole)
    return rest


def pick(saved: dict, group: str, name: str, shape: torch.Size, folder: Path) -> Tensor:
    """Return the tensor saved[group][name]. Raises UserError if there is none of this shape."""
    tensors = saved.get(group)
    tensor = tensors.get(name) if isinstance(tensors, dict) else None
    is_right = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.shape == shape
    check(is_right, f"{folder} has no {group} of {name} in the shape {tuple(shape)}; choose another checkpoint")
    return tensor


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
    """Set all random states of this process to what random_state() returned. Raises UserError if it did not."""
    try:
        torch.set_rng_state(state["torch"])
        if device.type == "cuda" and state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"], device)
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(f"the random states of the checkpoint are wrong: {class_and_message(error)}") from error
