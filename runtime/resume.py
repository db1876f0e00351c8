"""Going on with a run: from which checkpoint, in which folder, and whether it is the same run at all."""

import contextlib
import time
from pathlib import Path

from runtime.checkpoint import find, home, is_checkpoint, manifest, newest, number, steps, verified
from runtime.config import UserError, check
from runtime.run import new_folder, read_row


def place(out_dir: str | None, resume: str | None, name: str) -> tuple[Path, Path | None]:
    """(the run's folder, the verified checkpoint to go on from or None).

    `resume` is None, `auto` (the newest good checkpoint of out_dir, or none yet: a new run), or the path of a
    checkpoint or of a run; without out_dir the run goes on in that run's folder. UserError: there is no such
    checkpoint, or going on there would overwrite newer ones.
    """
    folder = home(out_dir) if out_dir else None
    if resume is None:
        return folder or new_folder(Path("out"), f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"), None
    if resume == "auto":
        check(folder is not None, "train.resume=auto needs out_dir=..., the folder of the run that is to go on")
        found = newest(folder / "checkpoints")
        check(
            found is not None or not steps(folder / "checkpoints"),
            f"train.resume=auto: no checkpoint in {folder} is good; name another with train.resume=PATH, or delete it "
            "to begin anew",
        )
        check(
            found is not None or (read_row(folder) or {}).get("status") != "ok",
            f"train.resume=auto: {folder} holds a finished run without a checkpoint; choose another out_dir",
        )
        return folder, found
    found = home(resume)
    if is_checkpoint(found):
        verified(found)
    else:
        found = find(found)
    found = found.parent / found.resolve().name  # `best` is a link; `checkpoints` may be one, too
    own = found.parent.parent if found.parent.name == "checkpoints" else None
    folder = folder or own
    check(folder is not None, f"train.resume={resume} lies in no run's folder: say with out_dir=... where to go on")
    if own is None or folder.resolve() != own.resolve():
        taken = [name for name in ("metrics.jsonl", "result.json", "checkpoints") if (folder / name).exists()]
        check(not taken, f"out_dir={folder} already holds a run ({', '.join(taken)}); give another out_dir")
    elif newer := newest(own / "checkpoints", after=number(found)):
        raise UserError(f"train.resume={resume} is older than {newer}, which would be lost: give another out_dir")
    return folder, found


def shape_of(out_dir: str | None, resume: str | None) -> dict | None:
    """The model's config as the checkpoint tells it that the run will go on from, unverified; None: from none."""
    if resume is None or (resume == "auto" and out_dir is None):
        return None
    folder = home(out_dir if resume == "auto" else resume)
    held = [folder] if is_checkpoint(folder) else [*steps(folder / "checkpoints"), *steps(folder)]
    for path in held:
        with contextlib.suppress(UserError):
            return manifest(path)["config"]["model"]
    return None


def same_run(saved: dict, config: dict, fingerprint: dict, path: Path) -> None:
    """UserError: `config` has another model, other data or another order of it than the checkpoint's manifest."""
    then = saved["config"]
    free = ("dropout", "checkpointing", "keep_attention")
    pairs = {f"model.{key}": (now, then["model"].get(key)) for key, now in config["model"].items() if key not in free}
    pairs |= {f"data.{key}": (now, saved["data"].get(key)) for key, now in fingerprint.items()}
    pairs |= {f"train.{key}": (config["train"][key], then["train"][key]) for key in ("block_size", "tokens_per_step")}
    masked = [each["data"].get("mask_documents", False) for each in (config, then)]
    pairs |= {"data.mask_documents": tuple(masked)}
    pairs["seed"] = config["seed"], then["seed"]
    if differ := [f"{key}={now} (there {before})" for key, (now, before) in pairs.items() if now != before]:
        raise UserError(
            f"train.resume={path} is of another run: {', '.join(differ)}; pass the same, or begin a new run from its "
            f"weights: init_from={path}"
        )
