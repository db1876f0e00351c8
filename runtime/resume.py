"""Going on with a run: from which checkpoint, in which folder, and whether it is the same run at all."""

import json
import time
from pathlib import Path

from runtime.checkpoint import find, newest, steps, verified
from runtime.config import UserError, check
from runtime.run import new_folder


def place(out_dir: str | None, resume: str | None, name: str) -> tuple[Path, Path | None]:
    """(the run's folder, the verified checkpoint to go on from or None).

    `resume` is None, `auto` (the newest good checkpoint of out_dir, or none yet: a new run), or the path of a
    checkpoint or of a run; without out_dir the run goes on in that run's folder. UserError: there is no such
    checkpoint, or going on there would overwrite newer ones.
    """
    folder = Path(out_dir).expanduser() if out_dir else None
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
        row = folder / "result.json"
        check(
            found is not None or not row.exists() or json.loads(row.read_text())["status"] != "ok",
            f"train.resume=auto: {folder} holds a finished run without a checkpoint; choose another out_dir",
        )
        return folder, found
    found = find(resume)
    verified(found)
    home = found.resolve().parent
    folder = folder or (home.parent if home.name == "checkpoints" else None)
    check(folder is not None, f"train.resume={resume} lies in no run's folder: say with out_dir=... where to go on")
    if folder.resolve() == home.parent and (last := newest(home)) != found.resolve():
        raise UserError(f"train.resume={resume} is older than {last}, which would be overwritten: give another out_dir")
    return folder, found


def same_run(saved: dict, config: dict, fingerprint: dict, path: Path) -> None:
    """UserError: `config` has another model, other data or another order of it than the checkpoint's manifest."""
    then = saved["config"]
    pairs = {f"model.{key}": (now, then["model"].get(key)) for key, now in config["model"].items() if key != "dropout"}
    pairs |= {f"data.{key}": (now, saved["data"].get(key)) for key, now in fingerprint.items()}
    pairs |= {f"train.{key}": (config["train"][key], then["train"][key]) for key in ("block_size", "tokens_per_step")}
    pairs["seed"] = config["seed"], then["seed"]
    if differ := [f"{key}={now} (there {before})" for key, (now, before) in pairs.items() if now != before]:
        raise UserError(
            f"train.resume={path} is of another run: {', '.join(differ)}; pass the same, or begin a new run from its "
            f"weights: init_from={path}"
        )
