"""Rows that scripts.collect puts into results/ become the tables and the figures of the READMEs."""

import json

import pytest

from kernels import tuned
from lab import rows
from lab.report import bench_panels, loss_curves, readmes, tables
from lab.report.readmes import fill
from runtime.row import read_row
from scripts import collect, report


def write_run(folder, tokens_per_sec=500_000.0, losses=(5.0, 4.0), status="ok", impl="eager", compile=False, seed=1):
    """Write the folder of a finished run, with the files of train.py, and return it."""
    row = {
        "name": folder.name,
        "status": status,
        "parameters": 124_475_904,
        "measured_peak_flops": 8e14,
        "config": {
            "seed": seed,
            "precision": "amp",
            "kernels": {"norm": impl, "mlp": "eager", "loss": "eager", "compile": compile},
            "attn": {"impl": "sdpa"},
            "train": {"batch_size": 64, "block_size": 1024, "eval_every": 0},
        },
        "kernels": {"attention": "sdpa (cudnn, torch 2.11.0+cu130, cudnn 91900)"},
        "env": dict.fromkeys(("driver", "cuda", "cudnn", "torch", "triton"), "1")
        | {"device": "NVIDIA H200", "git_commit": "5918f41a4eb37d063a85a187505e41749d5699d2"},
        "steps": 60,
    }
    if status == "ok":
        row |= {f"perf/tokens_per_sec{p}": tokens_per_sec + d for p, d in (("/p20", -1), ("", 0), ("/p80", 1))}
        row |= {"perf/mfu": 0.456, "perf/first_step_s": 20.0, "mem/peak_allocated_gib": 28.48, "train/loss": losses[-1]}
    folder.mkdir()
    write_row(folder, row)
    lines = [json.dumps({"step": i, "train/loss": loss, "tokens": 1}) for i, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def write_row(folder, row):
    (folder / "result.json").write_text(json.dumps(row))


def collect_run(folder, curves=False, beside=None):
    """Append the folder's row to a file in results/, and return the file."""
    return collect.collect(folder, read_row(folder), curves, beside)


def cells(text):
    """Return the cells of a Markdown table, without its head. Above the table there may be a title."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_rows_become_a_table_fastest_first(results, tmp_path):
    """A failed run has its reason in the table. A run that is collected twice is there once."""
    slow, fast = write_run(tmp_path / "slow", 400_000.0), write_run(tmp_path / "fast", compile=True)
    full = write_run(tmp_path / "full", status="oom", impl="triton", compile=True)
    for folder in (slow, fast, full, slow):
        assert collect_run(folder) == results / "h200" / "train.jsonl"
    figure_cells, shared = ["45.6%", "28.5", "20.0 s", "4.000"], "attn: sdpa (cudnn, cudnn 91900), step: 60"
    title = f"**gpt2_124m, 64 x 1024, amp**, {shared}, commit: 5918f41\n\n| kernels "
    assert tables.throughput("h200").startswith(title)
    assert cells(tables.throughput("h200")) == [
        ["compile", "**500,000** (499,999 to 500,001)", "1.000x", *figure_cells],
        ["eager", "**400,000** (399,999 to 400,001)", "0.800x", *figure_cells],
        ["eager+triton+compile", "oom", "", "", "", "", ""],
    ]


def test_several_runs_are_one_line_with_an_interval(results, tmp_path):
    """The line shows the median run. Runs of the same turn are compared, although others have failed."""
    for turn, factor in enumerate((1.0, 1.5, 2.0)):  # as on three GPUs
        for impl, compile, speed in (("eager", True, 500_000), ("triton", True, 600_000)):
            status = "oom" if (impl, turn) == ("eager", 1) else "ok"
            folder = write_run(tmp_path / f"{impl}{turn}", speed * factor, impl=impl, compile=compile, status=status)
            row = read_row(folder)
            intervals = [0.1 / speed / factor] * 5 if status == "ok" else None
            write_row(folder, row | {"perf/laps_s": intervals, "env": row["env"] | {"gpu": str(turn)}})
            collect_run(folder)
    table = cells(tables.throughput("h200"))
    assert [(line[0], line[1].split()[0], line[2]) for line in table] == [
        ("eager+triton+compile", "**900,000**", "1.200x (1.194 to 1.206)"),
        ("compile", "**500,000**", "1.000x"),
    ]


def test_a_choice_measured_again_replaces_its_old_row(results, tmp_path):
    """An old baseline stays in the table if another row of its session stays."""
    eager, triton, compiled = ("eager", False), ("triton", False), ("eager", True)
    sessions = {"1": [eager, compiled], "2": [eager, triton, compiled], "3": [triton, compiled]}
    for commit, choices in sessions.items():
        for impl, compile in choices:
            folder = write_run(tmp_path / f"{commit}{impl}{compile}", compile=compile, impl=impl)
            row = read_row(folder)
            write_row(folder, row | {"env": row["env"] | {"git_commit": commit * 40}})
            collect_run(folder)
    assert [(line[0], line[-1]) for line in cells(tables.throughput("h200"))] == [
        ("eager+triton", "3" * 7),
        ("compile", "3" * 7),
        ("eager", "2" * 7),
        ("compile", "2" * 7),
    ]


def test_several_gpus_are_compared_with_one(results, tmp_path):
    """Efficiency is a GPU's throughput over the throughput of the one-GPU row with the same settings."""
    for name, gpus, batch, rate in (("one", 1, 64, 100.0), ("two", 2, 64, 190.0), ("other", 2, 32, 150.0)):
        folder = write_run(tmp_path / name, rate)
        row = read_row(folder) | {"world_size": gpus, "perf/tokens_per_sec_per_device": rate / gpus}
        row["config"] |= {"parallel": "ddp", "train": row["config"]["train"] | {"batch_size": batch}}
        write_row(folder, row)
        beside = "h200x2" if gpus == 1 else None
        assert collect_run(folder, beside=beside) == results / "h200x2" / "train.jsonl"
    assert cells(tables.scaling("h200x2")) == [
        ["gpt2_124m", "1", "", "64", "eager", "**100**", "100", "1.000", "28.5"],
        ["gpt2_124m", "2", "ddp", "64", "eager", "**190**", "95", "0.950", "28.5"],
        ["gpt2_124m", "2", "ddp", "32", "eager", "**150**", "75", "", "28.5"],
    ]


def test_choices_are_compared_seed_by_seed_and_drawn(results, tmp_path):
    """`b` is at most 0.5 away from `a` of its seed. At step 3 its mean, 2.75, is above the band of `a`: 2.5 to 2.7."""
    assert loss_curves.agreement("h200").startswith("Not measured yet")
    curves = {
        ("a", 1): (5.0, 4.0, 2.5),
        ("a", 2): (5.0, 4.4, 2.7),
        ("b", 1): (5.0, 4.1, 3.0),
        ("b", 2): (5.0, 4.3, 2.5),
    }
    for (name, seed), losses in curves.items():
        (tmp_path / str(seed)).mkdir(exist_ok=True)
        impl = {"a": "eager", "b": "triton"}[name]
        folder = write_run(tmp_path / str(seed) / name, losses=losses, impl=impl, seed=seed)
        write_row(folder, read_row(folder) | {"started": "2026-11-29T10:00:00+0000"})
        collect_run(folder, curves=True)
    text = loss_curves.agreement("h200")
    assert text.startswith("![losses of each choice](h200/curves.png)\n\n60 steps on one H200, commit 5918f41, ")
    assert cells(text.rpartition("\n\n")[2]) == [
        ["eager, sdpa, amp", "1, 2", "", "", ""],
        ["eager+triton, sdpa, amp", "1, 2", "", "0.1500, 0.5000", "67% of the steps"],
    ]
    [path] = loss_curves.draw_curves("h200", tmp_path / "curves.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_rows_without_losses_give_no_table_and_no_figure(results, tmp_path):
    """Nothing to compare is an ordinary state of a new folder in results/."""
    assert cells(loss_curves.long_runs("h200")) == []
    for name, seed, lines in (("empty", 1, []), ("a", 1, [(1, 5.0)]), ("b", 2, [(2, 4.0)])):
        (tmp_path / name).mkdir()
        folder = write_run(tmp_path / name / name, impl={"b": "triton"}.get(name, "eager"), seed=seed)
        text = "\n".join(json.dumps({"step": step, "train/loss": loss}) for step, loss in lines)
        (folder / "metrics.jsonl").write_text(text)
        collect_run(folder, curves=True)
        if name == "empty":
            assert list(readmes.draw_results()) == []
    assert list(readmes.draw_results()) == [results / "h200/curves.png"]
    assert cells(loss_curves.long_runs("h200")) == []


@pytest.mark.parametrize(
    ("losses", "loss", "minutes"),
    [
        ({}, 3.0, None),
        ({100: 4.0}, 3.0, None),
        ({100: 3.0}, 3.0, 1.0),
        ({100: 2.0, 200: 1.0}, 3.0, 1.0),  # below the loss at the first evaluation: this step counts
        ({100: 3.0, 200: 3.0}, 3.0, 1.0),
        ({100: 4.0, 200: 4.0, 300: 2.0}, 3.0, 2.5),
    ],
)
def test_the_minutes_to_a_loss_have_an_answer_for_every_curve(losses, loss, minutes):
    """A step takes 0.6 s, so 100 steps take a minute."""
    run = loss_curves.Curve({"perf/step_ms": 600.0}, "a", {}, losses)
    assert run.minutes_to(loss) == (minutes and pytest.approx(minutes))
    assert loss_curves.Curve({"perf/step_ms": None}, "a", {}, losses).minutes_to(loss) is None


def test_a_long_run_stands_beside_the_first_run_of_its_seed(results, tmp_path):
    """`b` has steps of half the time, and ends at a loss that `a` reaches in the middle of its last 100 steps.

    So `a` takes 250 steps to this loss, and `b` takes 300 of half the time: `b` is 250 / 150 = 1.67 times as fast.
    """
    for name, seed, step_ms, losses in (
        ("a", 1, 100.0, (4.0, 3.0, 2.0)),
        ("b", 1, 50.0, (4.5, 3.5, 2.5)),
        ("a", 2, 100.0, (4.0, 3.0, 2.0)),
        ("b", 2, 50.0, (4.5, 2.5, 1.5)),  # reaches 2.0, where a ends, after 250 steps: 300 / 125
    ):
        (tmp_path / f"{seed}").mkdir(exist_ok=True)
        folder = write_run(tmp_path / f"{seed}" / name, impl={"a": "eager", "b": "triton"}[name], seed=seed)
        write_row(folder, read_row(folder) | {"perf/step_ms": step_ms, "steps": 300})
        lines = [{"step": 100 * i, "train/loss": 0.0, "val/loss": loss} for i, loss in enumerate(losses, 1)]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        collect_run(folder, curves=True)
    assert cells(loss_curves.long_runs("h200")) == [
        ["amp", "eager", "1", "2.0000", "", "500,000", ""],
        ["amp", "eager+triton", "1", "2.5000", "+0.5000", "500,000", "1.67x"],
        ["amp", "eager", "2", "2.0000", "", "500,000", ""],
        ["amp", "eager+triton", "2", "1.5000", "-0.5000", "500,000", "2.40x"],
        ["amp", "eager", "mean", "**2.0000** (sd 0.0000)", "", "", ""],
        ["amp", "eager+triton", "mean", "**2.0000** (sd 0.7071)", "**+0.0000** (sd 0.7071)", "", "2.03x"],
    ]


def test_rows_of_a_cpu_and_of_a_short_run_are_shown(results, tmp_path):
    """A CPU's row has no driver, no MFU and no allocator peaks. A run that ended in its warm-up is "too short"."""
    folder = write_run(tmp_path / "a")
    row = read_row(folder)
    row |= {"env": row["env"] | {"device": "AMD EPYC", "driver": None}}
    row |= {"perf/mfu": None, "mem/peak_allocated_gib": None, "mem/peak_rss_gib": 1.5}
    write_row(folder, row)
    collect_run(folder)
    row["config"]["attn"]["impl"] = "math"
    write_row(folder, row | {"perf/tokens_per_sec": None})
    collect_run(folder)
    filled = fill("<!-- throughput: amd-epyc -->\n<!-- end -->\n<!-- environment: amd-epyc -->\n<!-- end -->")
    measured, too_short = cells(tables.throughput("amd-epyc"))
    assert measured[:2] == ["**500,000** (499,999 to 500,001)", "1.5"]  # no ratio and no MFU, so no such columns
    assert too_short[:2] == ["too short", "1.5"]
    assert tables.throughput("amd-epyc") in filled
    assert "AMD EPYC, cuda 1, cudnn 1" in filled


def test_fill_changes_marked_sections_alone(results, tmp_path):
    collect_run(write_run(tmp_path / "a"))
    text = "before\n<!-- throughput: h200 -->\nold\n<!-- end -->\nafter\n<!-- throughput: h200 -->\n<!-- end -->\n"
    filled = fill(text)
    assert filled.startswith("before\n<!-- throughput: h200 -->\n**gpt2_124m, 64 x 1024, amp**\n\n| kernels")
    assert "|\n<!-- end -->\nafter\n<!-- throughput: h200 -->\n**gpt2_124m" in filled
    assert filled.count("| kernels") == 2
    assert "old" not in filled
    assert fill(filled) == filled


def test_the_command_fills_every_readme_that_has_sections(called, monkeypatch, results, tmp_path):
    """It fills README.md and */README.md, draws the figures in results/, and prints the name of each file."""
    for name in ("run1", "run2"):
        collect_run(write_run(tmp_path / name), curves=True)
    monkeypatch.setattr(readmes, "ROOT", tmp_path)
    section = "<!-- environment: h200 -->\n<!-- end -->\n"
    for name, text in {"README.md": section, "b/README.md": section, "c/README.md": "no section\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    code, out, err = called("report.py", report.main)
    assert (code, err) == (0, "")
    written = [tmp_path / "README.md", tmp_path / "b/README.md", results / "h200/curves.png"]
    assert out.splitlines() == list(map(str, written))
    assert "NVIDIA H200, driver 1" in (tmp_path / "b/README.md").read_text()
    assert (tmp_path / "c/README.md").read_text() == "no section\n"


@pytest.mark.parametrize(("device", "slug"), [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb")])
def test_the_folder_is_named_after_the_device(device, slug):
    assert tuned.device_slug(device) == slug


def test_kernels_have_a_table_and_a_roofline(results, tmp_path):
    """The table has the newest row of each kernel. Without rows it names the command that measures them."""
    assert "No rows yet" in tables.kernel_benchmarks("h200")
    row = {"env": {"git_commit": None}, "op": "norm", "dtype": "bfloat16", "shape": "124m", "impl": "eager"}
    row |= {f"{way}/tflops": 2.0 for way in ("forward", "backward", "both")}
    row |= {"forward/tb_per_s": 1.5, "backward/tb_per_s": 2.25, "both/tb_per_s": 2.0}
    row |= {"forward/ms": 1.0, "both/ms": 2.0, "both/ms/p20": 1.9, "both/ms/p80": 2.1, "both/of_floor": 0.5}
    row |= {"error/out": 1e-3, "error/gradients": 2e-3, "extra_gib": 0.25}
    row |= {"ceiling/tb_per_s": 4.0, "ceiling/tflops": 700.0}
    faster = row | {"impl": "triton", "both/ms": 1.0, "both/of_floor": 1.0, "extra_gib": None}
    faster |= {"env": {"git_commit": "5918f41a4eb37d063a85a187505e41749d5699d2-dirty"}}
    update = {key: value for key, value in row.items() if not key.startswith("backward/")} | {"op": "adamw"}
    rows.append_rows(results / "h200" / "kernels.jsonl", [row | {"both/ms": 9.0}, faster, row, update])
    kernel, rates = ["norm bfloat16", "124m"], "2.00 (1.50, 2.25)"
    optimizer, *norms = cells(tables.kernel_benchmarks("h200"))
    assert optimizer[:3] + optimizer[5:6] == ["adamw bfloat16", "124m", "eager", "2.00"]
    assert norms == [
        [*kernel, "triton", "1.000", "**1.000** (1.900 to 2.100)", rates, "100.0%", "2.0e-03", "", "5918f41+"],
        [*kernel, "eager", "1.000", "**2.000** (1.900 to 2.100)", rates, "50.0%", "2.0e-03", "0.25", "unknown"],
    ]
    [path] = bench_panels.draw_roofline([row, faster, update], tmp_path / "roof.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert bench_panels.draw_roofline([row | {"both/tflops": None}], tmp_path / "none.png") == []
