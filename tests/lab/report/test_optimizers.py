"""Short runs with AdamW and with Muon become the table and the figure of `scripts/measure.sh muon_curves`."""

import json
import struct
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from common.files import read_line
from lab import rows
from lab.report import loss_curves
from lab.report.optimizers import muon_steps
from lab.report.presets import presets
from runtime.row import read_row
from scripts import collect
from tests.lab.report.sample_rows import make_row
from tests.lab.report.test_report import cells

TRAINING = [
    *("data=text", "data.path=a.txt", "data.tokenizer=bytes", "device=cpu", "precision=bf16", "model=tiny"),
    *("model.n_layer=1", "train.block_size=32", "train.batch_size=8", "train.tokens_per_step=256"),
    *("train.max_steps=24", "train.log_every=2", "train.eval_every=2", "train.eval_batches=1"),
    *("train.checkpoint_every=0", "train.sample_tokens=0", "optim.warmup_steps=2", "optim.learning_rate=0.005"),
]
TOKENS = 256  # of a step
MODELS = [("gpt2_124m", "bf16"), ("gpt2_124m", "amp"), ("modern_124m", "amp")]


def train_and_collect(hotswap):
    """Train with both optimizers and two seeds, and collect the rows: (optimizer, seed) -> (row, {step: loss})."""
    Path("a.txt").write_text("".join(f"{i} to be or not to be, {i * i}\n" for i in range(2000)))
    found = {}
    for seed in (2, 1):
        for optimizer in ("muon", "adamw"):
            folder = Path(f"out/{optimizer}-{seed}")
            code, _, err = hotswap(*TRAINING, f"optim={optimizer}", f"seed={seed}", f"out_dir={folder}")
            assert (code, err) == (0, "")
            row = read_row(folder)
            collect.collect(folder, row, curves=True, beside="muon")
            lines = map(read_line, (folder / "metrics.jsonl").read_bytes().splitlines())
            found[optimizer, seed] = row, {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}
    return found


def first_step_below(losses, loss):
    """Return the first point of a fine grid over the straight lines between the losses that is not above `loss`."""
    grid = np.linspace(min(losses), max(losses), 100_001)
    return grid[np.argmax(np.interp(grid, list(losses), list(losses.values())) <= loss)]


def test_rows_become_the_table_and_the_figure(hotswap, monkeypatch, tmp_path):
    """What they show is recomputed from metrics.jsonl. Without AdamW's rows there is no loss to reach, so no table."""
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    runs = train_and_collect(hotswap)
    check_table(runs)
    check_figure(runs, tmp_path / "curves.png")
    path = tmp_path / "results/muon/train.jsonl"
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["config"]["optim"]["name"] == "muon"]
    path.write_text("\n".join(kept) + "\n")
    assert (loss_curves.optimizers("muon"), loss_curves.optimizers("nothing")) == 2 * ("Not measured yet.",)


def test_the_last_run_of_a_seed_counts():
    def run(precision, seed, status="ok", model="gpt2_124m"):
        row = {"status": status, "config": {"precision": precision, "model": presets()[model]}}
        return SimpleNamespace(row=row, optimizer="Muon", seed=seed)

    runs = [run("amp", 1), run("bf16", 1), run("bf16", 2), run("bf16", 1), run("bf16", 2, "oom")]
    runs.append(run("amp", 1, model="modern_124m"))
    choices = loss_curves.by_optimizer(runs)
    assert list(choices) == [(*choice, "Muon") for choice in MODELS]
    assert list(choices.values()) == [[runs[3], runs[2]], [runs[0]], [runs[5]]]


def check_table(runs):
    """Tokens and minutes come from a grid of 1/4000 of a step."""
    text = loss_curves.optimizers("muon")
    assert text.startswith("![losses over tokens and over minutes](muon/curves.png)\n\n| model")
    adamw, muon = cells(text.partition("\n\n")[2])
    reached = {name: [] for name in ("adamw", "muon")}
    for name, seed in runs:
        row, losses = runs[name, seed]
        reached[name].append((first_step_below(losses, runs["adamw", seed][1][24]), row["perf/step_ms"] / 60_000))
    last = {name: [losses[24] for (key, _), (_, losses) in runs.items() if key == name] for name in reached}
    for name, line in (("adamw", adamw), ("muon", muon)):
        assert line[1:4] == ["bf16", {"adamw": "AdamW", "muon": "Muon"}[name], "2"]
        assert line[4].startswith(f"**{np.mean(last[name]):.4f}** (sd ")
    assert all(below < above for below, above in zip(last["muon"], last["adamw"], strict=True))  # so both have figures
    tokens, share, minutes, share_of_minutes = map(float, muon[6:])
    steps, own_steps = (np.mean([step for step, _ in reached[name]]) for name in ("muon", "adamw"))
    time, own_time = (np.mean([step * minute for step, minute in reached[name]]) for name in ("muon", "adamw"))
    assert tokens == pytest.approx(steps * TOKENS / 1e6, abs=0.051)
    assert share == pytest.approx(steps / own_steps, abs=0.006)
    assert minutes == pytest.approx(time, abs=0.006)
    assert share_of_minutes == pytest.approx(time / own_time, abs=0.006)
    assert (adamw[7], adamw[9]) == ("1.00", "1.00")


def check_figure(runs, path):
    """It has the mean and the band of the seeds, over tokens and over minutes."""
    curves = loss_curves.curves("muon")
    over_tokens, over_minutes = loss_curves.optimizer_figures(curves, "validation loss")
    assert [series.name for series in over_tokens.series] == ["bf16, AdamW", "bf16, Muon"]
    step_ms = np.mean([runs["muon", seed][0]["perf/step_ms"] for seed in (1, 2)])
    for figure, of_a_step in ((over_tokens, TOKENS / 1e6), (over_minutes, step_ms / 60_000)):
        for point, step in zip(figure.series[1].points, range(2, 25, 2), strict=True):
            losses = [runs["muon", seed][1][step] for seed in (1, 2)]
            assert point.x == pytest.approx(step * of_a_step)
            assert (point.y, point.spread) == (pytest.approx(np.mean(losses)), (min(losses), max(losses)))
    assert loss_curves.draw_curves("muon", path)[0].read_bytes().startswith(b"\x89PNG")


def test_the_loss_to_reach_is_of_the_same_model_and_precision(monkeypatch, tmp_path):
    """Each model has its lines, and its two figures in a row of the picture."""

    def run(model, precision, optimizer, loss):
        config = {"precision": precision, "seed": 1, "optim": {"name": optimizer}, "train": {"tokens_per_step": 10**6}}
        row = {"status": "ok", "perf/step_ms": 60_000.0, "config": config | {"model": presets()[model]}}
        return loss_curves.Curve(row, f"{model} {precision} {optimizer}", *2 * ({1: 4.0, 3: loss},))

    losses = {("gpt2_124m", "bf16"): (2.0, 1.0), ("gpt2_124m", "amp"): (3.0, 2.0), ("modern_124m", "amp"): (1.0, 0.0)}
    runs = [run(*c, *pair) for c in MODELS for pair in zip(("adamw", "muon"), losses[c], strict=True)]
    monkeypatch.setattr(loss_curves, "curves", lambda device: runs)
    lines = cells(loss_curves.optimizers("any").partition("\n\n")[2])
    assert [tuple(line[:2]) for line in lines] == [choice for choice in MODELS for _ in range(2)]
    reached = [["3.0", "1.00"], ["2.3", "0.78"], ["3.0", "1.00"], ["2.0", "0.67"], ["3.0", "1.00"], ["2.5", "0.83"]]
    assert [line[6:8] for line in lines] == reached
    figures = loss_curves.optimizer_figures(runs, "loss")
    assert [(figure.title, figure.x) for figure in figures] == list(
        product(("gpt2_124m", "modern_124m"), ("million tokens", "minutes"))
    )
    assert loss_curves.draw_curves("any", tmp_path / "curves.png")
    width, height = struct.unpack(">II", (tmp_path / "curves.png").read_bytes()[16:24])
    assert 1.2 < width / height < 1.5  # two rows of two; in one row it would be 5


def test_a_loss_that_one_seed_does_not_reach_has_no_tokens():
    row = {"perf/step_ms": 1.0}
    low, high = (loss_curves.Curve(row | {"config": {"seed": 1}}, "a", {}, {1: 4.0, 2: loss}) for loss in (2.0, 3.0))
    assert loss_curves.reach_cells([high], {1: low}) == ["0 of 1 seeds reach it", "", "", ""]
    assert loss_curves.reach_cells([high], {2: low})[0] == "0 of 0 seeds reach it"


def test_a_step_of_muon_beside_one_of_adamw_on_the_same_gpu(monkeypatch, tmp_path):
    """A line has the newest sitting with both optimizers. A wrong run has no speed, so it does not count."""
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    assert muon_steps("h200") == "Not measured yet: `scripts/measure.sh muon_steps`."

    def line(optimizer, ms, update, gpu="a", started="1", status="ok", model="gpt2_124m"):
        row = make_row(precision="bf16") | {"perf/step_ms": ms, "started": f"2026-12-01T0{started}", "status": status}
        row["config"] = row["config"] | {"optim": {"name": optimizer}, "model": presets()[model]}
        row["receipt"] = row["receipt"] | ({"optimizer_ms": update} if update else {})
        return row | {"env": row["env"] | {"gpu": gpu}}

    written = [line("adamw", 90.0, 1.0), line("muon", 99.0, 5.0), line("muon", 80.0, 9.0, status="wrong: x")]
    written += [
        line("adamw", 100.0, 2.0, "b", "2"),
        line("muon", 102.0, 4.0, "b", "2"),
        line("muon", 50, 4.0, "c", "3"),
    ]
    written += [line("muon", 106.0, 6.0, "b", "3"), line("muon", 103.0, 5.15, "b", "3")]
    written.append(line("adamw", 70.0, 3.0, model="modern_124m"))
    rows.append_rows(tmp_path / "h200-optimizers" / "train.jsonl", written)
    text = muon_steps("h200")
    assert cells(text.partition("\n\n")[0]) == [
        ["gpt2_124m", "bf16", "100.00", "103.00", "1.030", "2.00 ms", "5.15 ms", "5.0%"]
    ]
    assert "H200" in text.partition("\n\n")[2]
    for row in written:
        row["receipt"] = None  # without proof=true
    path = tmp_path / "h200-optimizers" / "train.jsonl"
    path.unlink()
    rows.append_rows(path, written)
    assert cells(muon_steps("h200").partition("\n\n")[0])[0][2:] == ["100.00", "103.00", "1.030", "", "", ""]
