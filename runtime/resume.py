"""Resume a run: from which checkpoint, in which folder, and whether it is the same run."""

import contextlib
import math
import os
from collections.abc import Collection
from pathlib import Path

from common.terminal import override, printable, shell_command
from runtime.checkpoint import checkpoint_folders, find_checkpoint, is_checkpoint, newest_valid, verify
from runtime.command import command_line
from runtime.config import UserError, check, value_text
from runtime.folders import make_unique_folder
from runtime.manifest import CHOICE, read_manifest, step_number
from runtime.row import KILLED, read_known_row
from runtime.run import Run
from runtime.saver import Checkpoints
from runtime.schedule import Due, TrainConfig, is_finished
from runtime.signals import Signals


def choose_folder(out_dir: str | None, resume: str | None, name: str) -> tuple[Path, Path | None]:
    """Return (the run's folder, the checkpoint to resume from or None). The checkpoint is verified.

    `resume` is None for a new run, `auto`, or the path of a checkpoint or of a run. `auto` is the newest valid
    checkpoint of out_dir; if out_dir has no checkpoint, the run is new. With a path but no out_dir, the run resumes in
    the folder of the checkpoint's run.

    Raises UserError if there is no valid checkpoint, if the resumed run would delete newer checkpoints, or if a newer
    one cannot be read.
    """
    folder = Path(out_dir) if out_dir else None
    if resume is None:
        return folder or make_unique_folder(name), None
    if resume == "auto":
        check(folder is not None, "train.resume=auto needs out_dir=..., the folder of the run to resume")
        newest = newest_valid(folder / "checkpoints")
        check(
            newest is not None or not checkpoint_folders(folder / "checkpoints"),
            f"train.resume=auto: no checkpoint in {folder} is valid; name another one with train.resume=PATH, or "
            "delete the folder to start a new run",
        )
        if newest is None:
            row = read_known_row(folder, ": restore the file, or delete it to start a new run") or {}
            finished = f"train.resume=auto: {folder} holds a finished run without a checkpoint; choose another out_dir"
            check(row.get("status") != "ok", finished)
        return folder, newest
    path = Path(resume)
    if is_checkpoint(path):
        verify(path)
    else:
        path = find_checkpoint(path)
    path = path.parent / path.resolve().name  # `best` is a link; its folder `checkpoints` may be a link, too
    run_folder = path.parent.parent if path.parent.name == "checkpoints" else None
    folder = folder or run_folder
    check(folder is not None, f"train.resume={resume} is not in a run's folder; name a new folder with out_dir=...")
    if run_folder is None or folder.resolve() != run_folder.resolve():
        existing = [name for name in ("metrics.jsonl", "result.json", "checkpoints") if os.path.lexists(folder / name)]
        check(not existing, f"out_dir={folder} already holds a run ({', '.join(existing)}); choose another out_dir")
    elif newer := newest_valid(run_folder / "checkpoints", after=step_number(path)):
        raise UserError(f"train.resume={resume} is older than {newer}, which would be lost; choose another out_dir")
    return folder, path


def find_end(folder: Path, path: Path | None, t: TrainConfig, name: str) -> tuple[str | None, dict | None]:
    """Return (line, None) if the run is ok, (None, manifest) if only its end is missing, (None, None) if it must train.

    `path` is the checkpoint to resume from. end_run() takes the manifest. `name` is for the row of a run without one.
    """
    if path is None:
        return None, None
    manifest = read_manifest(path)
    if not is_finished(t, manifest["step"], manifest["elapsed"]):
        return None, None
    check(
        folder.resolve() == path.parent.parent.resolve(),
        f"train.resume={path} is of the run's last step; to train longer in {folder}, raise train.max_steps or "
        "train.max_minutes",
    )
    advice = "restore the file, or delete it to complete the run from its checkpoint"
    row = read_known_row(folder, f", so the end of the run is not known: {advice}")
    row = row or {"name": name, "command": command_line(), "status": KILLED}
    # The training loop has succeeded, so everything after it runs again, also if it failed. Parity stays, and so does a
    # row whose proof is wrong, because a second process cannot repeat the first steps
    if manifest.get("row") and row["status"] != "ok" and not row["status"].startswith("wrong"):
        manifest["row"]["parity"] = row.get("parity")
        return None, manifest
    if row["status"].startswith(KILLED) and manifest["step"] < (t.max_steps or math.inf):
        return None, None  # its time is over: it ends after one more step
    check(
        row["status"] == "ok",
        f"{path} is of the run's last step, and the run's status is {row['status']}; start it again in another folder",
    )
    return printable(f"done     already: {path} is of the run's last step"), None


def logged_figures(manifest: dict) -> dict | None:
    """Return the figures of the checkpoint's step for metrics.jsonl; None for a new run, which has no manifest."""
    if "figures" not in manifest:
        return None
    return manifest["figures"] | {"checkpoint/pause_ms": manifest["pauses"]["last_ms"]}


def saved_row(ended: dict, config: dict) -> dict:
    """Return the row in find_end()'s manifest `ended`. Raises UserError if this process should prove other kernels."""
    saved = {key: value for key, value in ended["row"].items() if key not in ("status", "parity", "val/loss/min")}
    parity = ended["row"].get("parity")
    if config["proof"] and isinstance(parity, dict) and parity.get("ok") is not None:
        saved["parity"] = parity
    changed = [key for key in CHOICE if has_changed(ended["config"][key], config[key])]
    check(
        not (changed and config["proof"]),
        f"this run has ended, and only its proof is left, but {', '.join(changed)} changed since: pass the run's own "
        "choice, or proof=false",
    )
    return saved | {"checkpoint/pause_ms": ended["pauses"]["median_ms"]}


def has_changed(saved: object, now: object) -> bool:
    """Return whether a value of the config changed. An old run lacks the keys of newer ops, which it did not call."""
    if isinstance(saved, dict) and isinstance(now, dict):
        return any(now.get(key) != value for key, value in saved.items())
    return saved != now


def end_run(run: Run, ended: dict, checkpoints: Checkpoints, signals: Signals) -> Due:
    """Complete a run whose loop had ended; `ended` is find_end()'s manifest. Returns what is due after it."""
    signals.start_loop(run.record)
    print(f"resumed  after the last step, {ended['step']}: what follows it is missing")
    with checkpoints:  # waits for the copy of the last checkpoint
        pass
    return Due(log=True, evaluate=False, save=False, end=True, finished=True, interrupted=False)


def checkpoint_model_config(out_dir: str | None, resume: str | None) -> dict | None:
    """Return the model's config in the checkpoint that the run will resume from, unverified; None if there is none."""
    if resume is None or (resume == "auto" and out_dir is None):
        return None
    folder = Path(out_dir if resume == "auto" else resume)
    candidates = [folder]
    if not is_checkpoint(folder):
        candidates = [*checkpoint_folders(folder / "checkpoints"), *checkpoint_folders(folder)]
    for path in candidates:
        with contextlib.suppress(UserError):
            return read_manifest(path)["config"]["model"]
    return None


def check_same_run(
    manifest: dict,
    config: dict,
    fingerprint: dict,
    path: Path,
    may_differ: Collection[str] = (),
    defaults: dict[str, dict] | None = None,
) -> None:
    """Raise UserError if the checkpoint at `path`, with this manifest, is of another run than `config`.

    The model, the data and the order of the data must be the same. `fingerprint` identifies the data of this run. The
    keys of the config group `model` in `may_differ` may differ. `defaults` is group -> the values of its keys that an
    old checkpoint lacks. The schedule and the optimizer's settings may differ, too, but not optim.name: then a line is
    printed.
    """
    saved_config = {"model": {}, "train": {}, "data": {}, "optim": {}, **manifest["config"]}
    for group, values in (defaults or {}).items():
        saved_config[group] = values | saved_config[group]
    pairs = {}  # key -> (value now, value in the checkpoint)
    for key, value in config["model"].items():
        if key not in may_differ:
            pairs[f"model.{key}"] = value, saved_config["model"].get(key)
    for key, value in fingerprint.items():
        pairs[f"data.{key}"] = value, manifest["data"].get(key)
    required = ("optim", "name"), ("train", "block_size"), ("train", "tokens_per_step"), ("train", "overfit")
    required += (("data", "mask_documents"),)
    for group, key in required:
        pairs[f"{group}.{key}"] = config[group][key], saved_config[group].get(key)
    pairs["seed"] = config["seed"], saved_config.get("seed")
    if differences := describe_differences(pairs):
        raise UserError(
            f"train.resume={path} is of another run: {differences}; pass the checkpoint's values, or start "
            f"a new run from its weights: {shell_command(override('init_from', path))}"
        )
    if changes := schedule_changes(saved_config, config):
        print(f"changed  from here on: {changes}")


def schedule_changes(saved: dict, config: dict) -> str:
    """Return how the schedule and the optimizer differ from `saved`, on purpose or by mistake."""
    keys = [("optim", key) for key in config["optim"] if key != "impl"]
    keys += [("train", "max_steps"), ("train", "max_minutes")]
    return describe_differences({f"{group}.{key}": (config[group][key], saved[group].get(key)) for group, key in keys})


def describe_differences(pairs: dict[str, tuple]) -> str:
    """Return the keys with (value now, value in the checkpoint) that differ; an empty text if none does."""
    differences = [f"{key}={now} (checkpoint: {value_text(then)})" for key, (now, then) in pairs.items() if now != then]
    return ", ".join(differences)


def command(folder: Path) -> str:
    """Return the command that resumes the run in this folder, for a terminal."""
    return printable(command_line(out_dir=str(folder), **{"train.resume": "auto"}))
