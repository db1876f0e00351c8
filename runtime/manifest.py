"""The manifest of a checkpoint: its step, the run's config, and the size and SHA-256 of each file."""

import errno
import hashlib
import os
import re
from pathlib import Path

from common.files import NotRegularFile, open_regular, read_json, write_json
from runtime.config import UserError, check, value_text

MANIFEST, WEIGHTS, TRAINING, SHARDS = "manifest.json", "model.safetensors", "training.pt", "shards"
METADATA, SHARD = f"{SHARDS}/.metadata", re.compile(rf"{SHARDS}/__\d+_\d+\.distcp", re.ASCII)
SHA256 = re.compile("[0-9a-f]{64}")
CONFIG_GROUPS = ("model", "data", "train", "optim", "kernels")  # of the run's config
CHOICE = "kernels", "attn", "precision"  # the keys of the run's config that decide what computes
# These errors mean that the file is missing or is none of ours. Other errors may be temporary
DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EFBIG}


class Unreadable(UserError):
    """A checkpoint cannot be read or has a file too many, which does not prove that it is damaged."""


def is_damage(error: OSError) -> bool:
    """Return whether the error proves that the file is missing or is none of ours."""
    return isinstance(error, NotRegularFile) or error.errno in DAMAGE


def unreadable(path: Path, error: OSError) -> Unreadable:
    reason = error.strerror or error
    advice = "make it readable, or name another checkpoint by its path and, to resume, another out_dir"
    return Unreadable(f"{path} cannot be read: {reason}; {advice}")


def step_number(path: Path) -> int:
    """Return the step of a checkpoint, which its name holds; -1 for a folder with another name."""
    match = re.fullmatch(r"step-(\d+)", path.name, re.ASCII)
    return int(match[1]) if match else -1


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


def fsync(path: Path) -> None:
    """Call fsync on a file or a folder."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without a wait for the writer of a FIFO
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path) -> dict:
    """Return the manifest of a checkpoint. Raises UserError if it is not valid, and Unreadable if it cannot be read."""
    path = folder / MANIFEST
    try:
        facts, problem = read_json(path), "it is a link" if path.is_symlink() else None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and not is_damage(error):
            raise unreadable(path, error) from error
        facts, problem = {}, getattr(error, "strerror", None) or str(error)
    check(problem is None, f"{folder} is not a valid checkpoint: {MANIFEST}: {problem}")
    version = facts.get("version")
    check(version == 1, f"{folder} has version {value_text(version)}, and this program reads version 1")
    wrong = find_wrong_key(facts)
    check(wrong is None, f"{folder} is not a valid checkpoint: {MANIFEST}: `{wrong}` is missing or wrong")
    step = step_number(folder.resolve())  # `best` is a link
    check(step in (-1, facts["step"]), f"{folder} is not a valid checkpoint: {MANIFEST} is of step {facts['step']}")
    return facts


def find_wrong_key(facts: dict) -> str | None:
    """Return the first key of a manifest that is missing or has a wrong value; None if all are right."""
    elapsed, val_loss, pauses, row = facts.get("elapsed"), facts.get("val_loss"), facts.get("pauses"), facts.get("row")
    config = facts.get("config")
    is_config = isinstance(config, dict) and all(isinstance(config.get(group, {}), dict) for group in CONFIG_GROUPS)
    rules = {
        "step": is_count(facts.get("step")),
        "elapsed": type(elapsed) in (int, float) and 0 <= elapsed < 1e18,
        "val_loss": "val_loss" in facts and isinstance(val_loss, float | None),
        "metrics_lines": is_count(facts.get("metrics_lines")),
        "config": is_config,
        "data": isinstance(facts.get("data"), dict),
        "files": isinstance(facts.get("files"), dict) and are_files(facts["files"]),
        "figures": isinstance(facts.get("figures"), dict),
        "pauses": isinstance(pauses, dict) and pauses.keys() >= {"last_ms", "median_ms"},
        "row": row is None or (is_row(row) and is_config and config.keys() >= set(CHOICE)),
    }
    return next((key for key, is_right in rules.items() if not is_right), None)


def is_row(row: object) -> bool:
    """Return whether this is the row of a run that has ended."""
    is_ended = isinstance(row, dict) and is_count(row.get("steps")) and isinstance(row.get("train/loss"), float | None)
    return is_ended and isinstance(row.get("name"), str) and isinstance(row.get("config"), dict)


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def are_files(files: dict) -> bool:
    """Return whether these are the files of a checkpoint, sharded or not, each with a size and a SHA-256."""
    entries = [entry if isinstance(entry, dict) else {} for entry in files.values()]
    sizes, digests = ([entry.get(key) for entry in entries] for key in ("size", "sha256"))
    shards = {name for name in files if SHARD.fullmatch(name)}
    return (
        files.keys() - shards in ({TRAINING, WEIGHTS}, {TRAINING, METADATA})
        and bool(shards) == (METADATA in files)
        and all(map(is_count, sizes))
        and all(isinstance(digest, str) and SHA256.fullmatch(digest) for digest in digests)
    )
