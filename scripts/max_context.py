"""The longest context that fits: `python -m scripts.max_context kernels=triton attn=sdpa`

The longest T at batch 1 for which two full training steps run, and, apart, for which T tokens are prefilled and 64 new
ones follow. A prediction on fake tensors (model/memory.py) says where to begin, steps that double and a bisection find
the place, and every try is a process of its own (scripts/attempt.py), so that a full memory, a crash or a fragmented
allocator ends with it. This process never touches the GPU, where its context alone would take half a GiB.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from kernels.registry import KernelError, backend, choices, label, refusal
from kernels.tuned import slug
from model import cost
from model.executed import executed
from runtime.config import check, cli, command
from runtime.device import environment, pick
from runtime.resume import place
from runtime.run import Run, read_row
from runtime.signals import Signals, Stopped
from runtime.trackers import Tracker
from scripts.attempt import MODES, WINDOW, Config, capacity, predict, run, slides
from scripts.collect import RESULTS
from scripts.report import longest_table

ROOT = Path(__file__).resolve().parent.parent
OCTAVE = 128  # lengths from a power of two to the next
LAST = 23 * OCTAVE  # 2^30 tokens
SHORT = 2**20  # of which a sixteenth and an eighth are timed, at most; a quarter and half a million took 140 s
MOST = 2**24  # that a search begins with
PREDICT_MINUTES = 5  # at least, for some ten steps on fake tensors; the GPU has no part in them
REFUSED = "failed: error: "  # by a UserError or a KernelError
FULL = "out.of.memory|alloc(ation)?_failed|bad_alloc|cannot allocate|MemoryError|could not create a primitive"
FULL = re.compile(FULL, re.IGNORECASE)  # the last is oneDNN's


def length_of(index: int) -> int:
    """The lengths that are tried: 128, 129, ... 255, and their doubles; from one to the next it is 0.4 to 0.8%."""
    octave, step = divmod(index, OCTAVE)
    return (OCTAVE + step) << octave


def index_of(length: float) -> int:
    """Of the longest of them up to `length`, which is at least 128."""
    octave = int(length).bit_length() - OCTAVE.bit_length()
    return OCTAVE * octave + (int(length) >> octave) - OCTAVE


def search(fits: Callable[[int], bool], start: int, step: int) -> int | None:
    """An index that fits while the next one did not: by steps that double from `start` on, then bisection.

    None: not even 0 fits. Beyond what did not fit nothing is tried.
    """
    low, high, at = -1, LAST, start
    while high - low > 1:
        if fits(at):
            low = at
        else:
            high = at
        if low < 0:
            at = max(0, high - step)
        elif high == LAST:
            at = min(low + step, LAST - 1)
        else:
            at = (low + high) // 2
        step = min(2 * step, OCTAVE)
    return None if low < 0 else low


def full_at(rows: list[dict], gib: float) -> float:
    """The T whose peak is `gib`, as if memory were linear in T, through two lengths."""
    (near, low), (far, high) = sorted((row["T"], row["peak_gib"]) for row in rows)
    return near + (gib - low) * (far - near) / max(high - low, 1e-9)


def affordable(cfg: Config, usable: float, device: torch.device) -> dict | None:
    """The prediction for the longest T whose peak is within `usable` GiB. None: not even 128 tokens are."""
    found = {length: predict(cfg, length, device) for length in (8192, 16384)}

    def guess() -> int:
        """By the line through the last two; at millions the one of 8,192 and 16,384 was up to 31% off."""
        return index_of(min(max(full_at([*found.values()][-2:], usable), OCTAVE), MOST))

    def fits(index: int) -> bool:
        length = length_of(index)
        found[length] = found.get(length) or predict(cfg, length, device)
        return found[length]["peak_gib"] <= usable

    for _ in range(8):  # two, where memory is linear in T; the others are for attn=eager
        if length_of(guess()) not in found:
            fits(guess())
    index = search(fits, guess(), step=1)
    return None if index is None else found[length_of(index)]


def answer(cfg: Config) -> None:
    """What a try prints. UserError, KernelError: what was asked for cannot be."""

    def tell(**facts) -> None:
        print(json.dumps(facts), flush=True)

    device = pick(cfg.device)
    limit, usable = capacity(cfg, device)
    if cfg.probe == "run":
        tell(row=run(cfg, cfg.length, device))
        return
    tell(env=environment(device), limit_gib=limit, usable_gib=usable)
    shape = (1, cfg.length or 1024)
    tell(kernels=executed(cfg.model, cfg.kernels, cfg.attn, cfg.precision, shape, device))
    if cfg.length:
        tell(row=predict(cfg, cfg.length, device))
        return
    tell(row=(row := affordable(cfg, usable, device)))
    tell(slides=row is not None and row["T"] > WINDOW and cfg.model.window is None and slides(cfg, device))


def ask(cfg: Config, probe: str, length: int | None, window: int | None = None) -> dict:
    """What a process of its own answers to probe=...: facts, and `died`, why it did not come to its end, or None."""
    changes = {"probe": probe, "mode": cfg.mode, "length": length or "null"}
    changes |= {"model.window": window} if window else {}
    words = [*HydraConfig.get().overrides.task, *(f"{key}={value}" for key, value in changes.items())]
    command = [sys.executable, "-m", "scripts.max_context", *words]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, start_new_session=True)
        try:
            code = child.wait(60 * max(cfg.probe_minutes, PREDICT_MINUTES if probe == "predict" else 0))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # the compiler's workers, too
                child.wait()
        out.seek(0)
        err.seek(0)
        facts = [json.loads(line) for line in out if line.startswith("{")]
        said = [f"exit code {code}", *err.read().strip().splitlines()][-1]
    died = None if code == 0 else "timeout" if code is None else "oom" if FULL.search(said) else f"failed: {said}"
    return {"row": None, "died": died} | {key: value for fact in facts for key, value in fact.items()}


def pace(rows: list[dict]) -> Callable[[int], float]:
    """T -> seconds, in T and, for attention, in T^2, through the times of two lengths. 0 without them."""
    points = [(row["T"], row["seconds"]) for row in rows if row["status"] == "ok"]
    if len(points) < 2:
        return lambda length: 0.0
    (near, a), (far, b) = points
    quadratic = max(0.0, (b / far - a / near) / (far - near))
    linear = max(0.0, b / far - quadratic * far)
    return lambda length: (linear + quadratic * length) * length


def line(mode: str, row: dict) -> str:
    """For people, of one try."""
    why = row.get("why", "")
    cells = [f"{mode:<8} T {row['T']:>11,}", why if why.startswith("not run") else row["status"]]
    if row["status"] == "ok":
        cells.append(f"{row['seconds']:.3f} s")
    if row.get("peak_gib") is not None:
        reserved = f" ({row['reserved_gib']:.2f} reserved)" if row["reserved_gib"] else ""
        cells.append(f"peak {row['peak_gib']:.2f} GiB{reserved}")
    return " | ".join(cells + [f"window {row['window']}"] * bool(row.get("window")))


def earlier(folder: Path, cfg: Config, env: dict) -> list[dict]:
    """The tries of a search that was stopped in this folder, if it was this one on this machine."""
    row = read_row(folder)
    if not row or not row["status"].startswith("stopped"):
        return []
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in metrics] if row.get("env") == env and alike(row, cfg) else []


def alike(row: dict, cfg: Config) -> bool:
    """Whether the row is of this search, on whatever machine."""
    now = OmegaConf.to_container(OmegaConf.structured(cfg))
    return all(row["config"].get(key) == now[key] for key in now.keys() - {"out_dir", "keep"})


def longest(cfg: Config, told: dict, run: Run, before: Sequence[dict] = ()) -> dict:
    """The figures of cfg.mode; `told` is the answer to probe=predict, and the tries `before` are not made again."""
    tries, limit_s, name = [], 60 * cfg.probe_minutes, f"context/{cfg.mode}"

    def takes(seconds: float) -> float:
        """Of two steps; twice what was told, where a try outlasted its time nonetheless."""
        return 2 * seconds * 2 ** sum(row["status"] == "timeout" and "why" not in row for row in tries)

    def slow(seconds: float) -> bool:
        return takes(seconds) > 0.8 * limit_s  # a fifth of the time is for the start

    def tried(length: int, seconds: float = 0.0) -> dict:
        """Its row; `seconds` are what a step is expected to take."""
        late = any(row["status"] == "timeout" and row["T"] <= length for row in tries)
        window = WINDOW if told.get("slides") and (late or slow(seconds)) else None
        row = {"T": length, "window": window or cfg.model.window}
        known = [each for each in before if (row | {"mode": cfg.mode}).items() <= each.items()]
        if known:
            row = {key: value for key, value in known[0].items() if key not in ("mode", "step")}
        elif slow(seconds) and not window:
            row |= {"status": "timeout", "why": f"not run: two steps would take {takes(seconds):.0f} s"}
        else:
            answer = ask(cfg, "run", length, window)
            row = answer["row"] or {**row, "status": answer["died"]}
            check(tries or not row["status"].startswith(REFUSED), row["status"].removeprefix(REFUSED))
        tries.append(row)
        print(line(cfg.mode, row), flush=True)
        if not known:
            run.log(len(tries), {"mode": cfg.mode, **row})
        return tried(length) if row["status"] == "timeout" and told.get("slides") and not window else row

    predicted = told["row"] and told["row"]["T"]
    start = predicted or 1024
    short = [tried(min(start, SHORT) // part) for part in (16, 8)] if start > 4 * WINDOW else []
    expected = pace([row for row in short if row["window"] == cfg.model.window])
    unseen = cfg.kernels.compile or (told["row"] or {}).get("opaque")  # the uncompiled model takes twice as much
    if unseen and len(short) == 2 and all(row["status"] == "ok" for row in short):
        rough = min(max(full_at(short, told["usable_gib"]), OCTAVE), MOST)  # 1.4% off at 4.7 million tokens
        start = predicted if abs(rough / predicted - 1) < 0.05 else rough
    first = index_of(start)
    if not told.get("slides"):  # then where the time ends, if that is sooner
        first = next((index for index in range(first, 0, -1) if not slow(expected(length_of(index)))), 0)
    index = search(
        lambda index: tried(length_of(index), expected(length_of(index)))["status"] == "ok",
        first,
        step=(4 if cfg.kernels.compile else 1) if predicted else OCTAVE,  # on an H200 predictions were 0.05% off
    )
    found = None if index is None else length_of(index)
    failed = [row for row in tries if row["status"] != "ok" and row["T"] > (found or 0)]
    figures = {f"context/max_{cfg.mode}": found, f"{name}/predicted": predicted, f"{name}/tries": tries}
    figures[f"{name}/limit"] = min(failed[::-1], key=lambda row: row["T"])["status"] if failed else None
    if found:
        best = next(row for row in tries if row["T"] == found and row["status"] == "ok")
        figures |= {f"{name}/{key}": best[key] for key in ("seconds", "window", "peak_gib", "reserved_gib")}
        figures[f"{name}/headroom_gib"] = told["limit_gib"] - (best["reserved_gib"] or best["peak_gib"])
        if best["window"] != cfg.model.window:
            figures[f"{name}/seconds_of_full_attention"] = takes(expected(found)) / 2
        answer = ask(cfg, "predict", found)
        if cfg.mode == "train" and "kernels" in answer:
            figures["kernels"] = answer["kernels"]
        if answer["row"]:
            figures[f"{name}/prediction"] = answer["row"]
            figures[f"{name}/prediction_error"] = answer["row"]["peak_gib"] / best["peak_gib"] - 1
    print(verdict(cfg.mode, {key.removeprefix(f"{name}/"): value for key, value in figures.items()}, found))
    return figures


def verdict(mode: str, figures: dict, found: int | None) -> str:
    """For people, of a search."""
    if not found:
        return f"{mode:<8} not even {OCTAVE} tokens: {figures['limit']}"
    foreseen = figures.get("prediction")
    predicted = f", predicted {foreseen['peak_gib']:.2f} ({figures['prediction_error']:+.1%})" if foreseen else ""
    return (
        f"{mode:<8} the longest T is {found:,}: peak {figures['peak_gib']:.2f} GiB{predicted}, "
        f"{figures['headroom_gib']:.2f} to spare; the next length: {figures['limit']}"
    )


@cli(Config, configs=ROOT / "configs", name="max_context", groups=choices(), errors=(KernelError,))
def main(cfg: Config) -> None:
    if cfg.probe:
        answer(cfg)
        return
    with Signals():
        find(cfg)


def find(cfg: Config) -> None:
    """The search, in each mode that is asked for, its row and its table."""
    why = refusal(backend("attention", cfg.attn.impl).attention, "lengths")
    check(cfg.mode != "generate" or not why, f"mode=generate reads a cache, and {why}")
    modes = [cfg.mode] if cfg.mode else [mode for mode in MODES if mode == "train" or not why]
    name = f"max-context-{cost.parameters(cfg.model) / 1e6:.0f}M-{label(cfg.kernels, cfg.attn)}-{cfg.precision}"
    hydra = HydraConfig.get()
    sweep = bool(cfg.out_dir) and hydra.mode is RunMode.MULTIRUN
    out_dir = f"{cfg.out_dir}/{hydra.job.num}-{name}" if sweep else cfg.out_dir
    if sweep and (done := read_row(Path(out_dir))) and done["status"] == "ok" and alike(done, cfg):
        print(f"done     before: {out_dir}/result.json")
        return
    told = ask(replace(cfg, mode=modes[0]), "predict", None)
    died = told["died"] or ""
    check(not died.startswith(REFUSED), died.removeprefix(REFUSED))
    check("kernels" in told, f"nothing could be tried ({died}): probe=predict mode={modes[0]} shows why, by itself")
    folder, _ = place(out_dir, None, name)
    before = earlier(folder, cfg, told["env"])
    try:
        with Run(folder, name, cfg, Tracker(None), resume=bool(before)) as run:
            facts = {"env": told["env"], "memory_gib": told["limit_gib"], "parameters": cost.parameters(cfg.model)}
            facts["allocator"] = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
            run.begin(**facts, kernels=told["kernels"])
            for mode in modes:
                each = replace(cfg, mode=mode)
                told = told if mode == modes[0] else ask(each, "predict", None)
                if not told["row"]:
                    print(f"{mode:<8} no prediction: {told['died'] or f'not even {OCTAVE} tokens'}")
                run.row |= longest(each, told | {"limit_gib": run.row["memory_gib"]}, run, before)
    except Stopped:
        again = shlex.join(["python", "-m", "scripts.max_context", *sys.argv[1:]])
        print(f"stopped  go on with: {again if sweep else command(out_dir=str(folder))}")
        raise
    files = [folder / "result.json"] + [RESULTS / slug(run.row["env"]["device"]) / "context.jsonl"] * cfg.keep
    if cfg.keep:
        files[1].parent.mkdir(parents=True, exist_ok=True)
        with files[1].open("a") as kept:
            kept.write(json.dumps(run.row) + "\n")
    print(f"\n{longest_table([run.row])}\n\ndone     {', '.join(map(str, files))}")


if __name__ == "__main__":
    main()
