import json

import pytest

from kernels import tuned
from scripts import collect, figures, report


@pytest.fixture
def results(monkeypatch, tmp_path):
    """An empty results/ of its own."""
    for module in (collect, report):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def run(folder, tokens_per_sec=500_000.0, losses=(5.0, 4.0), status="ok", impl="eager", compile=False):
    """A finished run's folder, as train.py leaves it."""
    row = {
        "name": folder.name,
        "status": status,
        "parameters": 124_475_904,
        "measured_peak_flops": 8e14,
        "config": {
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
    (folder / "result.json").write_text(json.dumps(row))
    lines = [json.dumps({"step": i, "train/loss": loss, "tokens": 1}) for i, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def test_rows_become_a_table(results, tmp_path):
    """Grouped and fastest first, a failed run with its reason, and a run that is collected twice once."""
    slow, fast = run(tmp_path / "slow", 400_000.0), run(tmp_path / "fast", compile=True)
    full = run(tmp_path / "full", status="oom", impl="triton", compile=True)
    for folder in (slow, fast, full, slow):
        assert collect.collect(folder, curves=False) == results / "h200" / "train.jsonl"
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in report.throughput("h200").splitlines()]
    speed = ["45.6%", "28.5", "20.0 s", "4.000", "60", "5918f41"]
    place = ["124M", "64 x 1024", "amp"]
    attention = "sdpa (cudnn, cudnn 91900)"
    assert table[2:] == [
        [*place, "compile", attention, "**500,000** (499,999 to 500,001)", "1.000x", *speed],
        [*place, "eager", attention, "**400,000** (399,999 to 400,001)", "0.800x", *speed],
        [*place, "eager+triton+compile", attention, "oom", "", "", "", "", "", "60", "5918f41"],
    ]


def test_repeats_are_a_line_with_an_interval(results, tmp_path):
    """The run in the middle stands for the others; runs of a turn are compared, whichever of them have failed."""
    for turn, factor in enumerate((1.0, 1.5, 2.0)):  # three GPUs, say
        for impl, compile, speed in (("eager", True, 500_000), ("triton", True, 600_000)):
            status = "oom" if (impl, turn) == ("eager", 1) else "ok"
            path = run(tmp_path / f"{impl}{turn}", speed * factor, impl=impl, compile=compile, status=status)
            row = json.loads((path / "result.json").read_text())
            laps = [0.1 / speed / factor] * 5 if status == "ok" else None
            row |= {"perf/laps_s": laps, "env": row["env"] | {"gpu": str(turn)}}
            (path / "result.json").write_text(json.dumps(row))
            collect.collect(path, curves=False)
    table = [line.strip("| ").split(" | ") for line in report.throughput("h200").splitlines()[2:]]
    assert [(cells[3], cells[5].split()[0], cells[6]) for cells in table] == [
        ("eager+triton+compile", "**900,000**", "1.200x (1.194 to 1.206)"),
        ("compile", "**500,000**", "1.000x"),
    ]


def test_what_was_measured_again_goes(results, tmp_path):
    """But for the row that others of its session stand beside."""
    eager, triton, compiled = ("eager", False), ("triton", False), ("eager", True)
    sessions = {"1": [eager, compiled], "2": [eager, triton, compiled], "3": [triton, compiled]}
    for commit, choices in sessions.items():
        for impl, compile in choices:
            path = run(tmp_path / f"{commit}{impl}{compile}", compile=compile, impl=impl) / "result.json"
            row = json.loads(path.read_text())
            path.write_text(json.dumps(row | {"env": row["env"] | {"git_commit": commit * 40}}))
            collect.collect(path.parent, curves=False)
    table = [line.strip("| ").split(" | ") for line in report.throughput("h200").splitlines()[2:]]
    assert [(cells[3], cells[-1]) for cells in table] == [
        ("eager+triton", "3" * 7),
        ("compile", "3" * 7),
        ("eager", "2" * 7),
        ("compile", "2" * 7),
    ]


def test_generation_has_a_table_of_its_own(results, tmp_path):
    folder = run(tmp_path / "generate-124M-eager-sdpa-bf16")
    row = json.loads((folder / "result.json").read_text())
    row["config"] = {key: row["config"][key] for key in ("precision", "kernels")} | {"batch": 2}
    row |= {f"gen/decode_tokens_per_sec{p}": 2000 + d for p, d in (("/p20", -1), ("", 0), ("/p80", 1))}
    row |= {"gen/ttft_ms": 7.25, "gen/bandwidth_utilisation": 0.1294, "mem/peak_allocated_gib": 0.34}
    (folder / "result.json").write_text(json.dumps(row))
    assert collect.collect(folder, curves=False) == results / "h200" / "generate.jsonl"
    cells = ["124M", "amp", "eager", "sdpa (cudnn, cudnn 91900)", "2", "7.2 ms", "**2,000** (1,999 to 2,001)"]
    assert report.generation("h200").splitlines()[2:] == [f"| {' | '.join([*cells, '12.9%', '0.34'])} |"]


def test_several_gpus_beside_one(results, tmp_path):
    """Efficiency is a GPU's throughput over that of the one-GPU row with the same settings."""
    for name, gpus, batch, rate in (("one", 1, 64, 100.0), ("two", 2, 64, 190.0), ("other", 2, 32, 150.0)):
        path = run(tmp_path / name, rate) / "result.json"
        row = json.loads(path.read_text()) | {"world_size": gpus, "perf/tokens_per_sec_per_device": rate / gpus}
        row["config"] |= {"parallel": "ddp", "train": row["config"]["train"] | {"batch_size": batch}}
        path.write_text(json.dumps(row))
        beside = "h200x2" if gpus == 1 else None
        assert collect.collect(path.parent, False, beside) == results / "h200x2" / "train.jsonl"
    assert report.scaling("h200x2").splitlines()[2:] == [
        "| 124M | 1 |  | 64 | eager | **100** | 100 | 1.000 | 28.5 |",
        "| 124M | 2 | ddp | 64 | eager | **190** | 95 | 0.950 | 28.5 |",
        "| 124M | 2 | ddp | 32 | eager | **150** | 75 |  | 28.5 |",
    ]


def test_curves_are_compared_and_drawn(results, tmp_path):
    collect.collect(run(tmp_path / "a", losses=(5.0, 4.0, 3.0)), curves=True)
    collect.collect(run(tmp_path / "b", losses=(5.0, 4.25, 2.5)), curves=True)
    assert "over 3 steps: they differ by 0.2500 in the mean, by 0.5000 at most" in report.agreement("h200")
    path = figures.curves_plot(report.curves("h200"), tmp_path / "curves.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_row_without_figures_and_a_cpu(results, tmp_path):
    """A run that ended in its warm-up; a device with a hyphen, without driver, MFU and allocator."""
    row = json.loads((run(tmp_path / "a") / "result.json").read_text())
    row |= {
        "env": row["env"] | {"device": "AMD EPYC", "driver": None},
        "perf/mfu": None,
        "mem/peak_allocated_gib": None,
    }
    row |= {"mem/peak_rss_gib": 1.5}
    (tmp_path / "a/result.json").write_text(json.dumps(row))
    collect.collect(tmp_path / "a", curves=False)
    row["config"]["attn"]["impl"] = "math"
    (tmp_path / "a/result.json").write_text(json.dumps(row | {"perf/tokens_per_sec": None}))
    collect.collect(tmp_path / "a", curves=False)
    filled = report.fill("<!-- throughput: amd-epyc -->\n<!-- end -->\n<!-- environment: amd-epyc -->\n<!-- end -->")
    assert "**500,000** (499,999 to 500,001) |  |  | 1.5 |" in filled
    assert "| too short |  |  | 1.5 |" in filled
    assert "AMD EPYC, cuda 1, cudnn 1" in filled


def test_only_marked_sections_change(results, tmp_path):
    collect.collect(run(tmp_path / "a"), curves=False)
    text = "before\n<!-- throughput: h200 -->\nold\n<!-- end -->\nafter\n<!-- throughput: h200 -->\n<!-- end -->\n"
    filled = report.fill(text)
    assert filled.startswith("before\n<!-- throughput: h200 -->\n| model | batch")
    assert "|\n<!-- end -->\nafter\n<!-- throughput: h200 -->\n| model" in filled
    assert filled.count("| model") == 2
    assert "old" not in filled
    assert report.fill(filled) == filled


@pytest.mark.parametrize(("device", "slug"), [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb")])
def test_the_hardware_is_in_the_path(device, slug):
    assert tuned.slug(device) == slug


def test_kernels_in_a_table_and_under_their_roof(results, tmp_path):
    """The newest row of each; without any, how to make one."""
    assert "No rows yet" in report.kernels("h200")
    row = {
        "env": {"git_commit": None},
        "op": "norm",
        "dtype": "bfloat16",
        "shape": "124m",
        "impl": "eager",
    }
    row |= {f"{way}/tflops": 2.0 for way in ("forward", "backward", "both")}
    row |= {"forward/tb_per_s": 1.5, "backward/tb_per_s": 2.25, "both/tb_per_s": 2.0}
    row |= {"forward/ms": 1.0, "both/ms": 2.0, "both/ms/p20": 1.9, "both/ms/p80": 2.1, "both/of_floor": 0.5}
    row |= {
        "error/out": 1e-3,
        "error/gradients": 2e-3,
        "extra_gib": 0.25,
        "ceiling/tb_per_s": 4.0,
        "ceiling/tflops": 700.0,
    }
    faster = row | {"impl": "triton", "both/ms": 1.0, "both/of_floor": 1.0, "extra_gib": None}
    (results / "h200").mkdir(parents=True)
    file = results / "h200" / "kernels.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (row | {"both/ms": 9.0}, faster, row)))
    line = "| norm bfloat16 | 124m | {} | 1.000 | **{}** (1.900 to 2.100) | 2.00 (1.50, 2.25) | {} | unknown |"
    assert report.kernels("h200").splitlines()[2:] == [
        line.format("triton", "1.000", "100.0% | 2.0e-03 | "),
        line.format("eager", "2.000", "50.0% | 2.0e-03 | 0.25"),
    ]
    assert figures.roofline([row, faster], tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")
