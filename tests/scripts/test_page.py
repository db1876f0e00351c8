"""The page of a report in a real browser, from rows as train.py and the benchmarks write them."""

import json
import math
import random
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kernels.registry import impls
from runtime import compare, receipt
from runtime.config import UserError
from scripts import report
from scripts.page import choices, write
from scripts.page.colours import colours, parts
from scripts.page.panels import tradeoff

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ROOT = Path(__file__).resolve().parents[2]
ENV = {"device": "NVIDIA H200", "driver": "580.159.04", "cuda": "13.0", "cudnn": 91900, "torch": "2.11.0+cu130"}
ENV |= {"triton": "3.6.0", "python": "3.12.3", "git_commit": "f3adfe01"}
FAMILIES = "gemm", "attention", "loss", "norm", "mlp", "elementwise and sums", "copies and fills", "optimizer", "other"
COMMAND = "python train.py +experiment=throughput"
WEIGHTS = {"weights": 0.46, "gradients": 0.46, "optimizer": 0.93}

# kernels and attention: ms a step, GiB, first step, ms of each family
SPEEDS = {
    ("eager", "sdpa"): (163.5, 53.1, 0.6, (69, 19, 21, 20, 16, 9, 6, 1.5, 0.5)),
    ("compile", "sdpa"): (126.6, 28.5, 21.4, (68, 19, 9.7, 9, 11, 3, 3, 1.5, 0.4)),
    ("triton", "sdpa"): (126.9, 20.4, 6.9, (69, 19, 12, 7, 10, 3.2, 2.8, 1.5, 0.6)),
    ("triton", "flash"): (117.4, 18.7, 8.3, (68, 13, 9.5, 7, 10, 3.1, 2.8, 1.5, 0.6)),
    ("triton+compile", "flash"): (113.2, 19.4, 24.1, (68, 13, 9.4, 6.5, 9.5, 1.6, 1.6, 1.5, 0.5)),
}


def config(kernels="eager", attn="sdpa", precision="amp", **model):
    impl, compile = kernels.partition("+")[0], "compile" in kernels
    impl = "eager" if impl == "compile" else impl
    shape = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304, "pos": "learned"}
    return {
        "seed": 1337,
        "precision": precision,
        "kernels": {"norm": impl, "mlp": impl, "loss": impl, "compile": compile},
        "attn": {"impl": attn, "version": None},
        "model": shape | {"checkpointing": "none"} | model,
        "train": {"batch_size": 64, "block_size": 1024, "tokens_per_step": 65536, "max_steps": 60, "eval_every": 0},
        "logger": {"name": "none", "project": "hotswap"},
    }


def row(kernels="eager", attn="sdpa", precision="amp", scale=1.0, parameters=124_475_904, seed=0, **model):
    """That of a run, with all that train.py writes."""
    ms, peak, first, times = SPEEDS[kernels, attn]
    noise = random.Random(f"{kernels}{attn}{precision}{scale}{seed}")
    laps = [ms * scale * noise.gauss(1, 0.004) / 1e3 for _ in range(11)]
    laps = [lap * (1 + 0.003 * (seed - 0.5)) for lap in laps]
    middle, low, high = sorted(laps)[5], sorted(laps)[8], sorted(laps)[2]
    rates = {"": 65536 / middle, "/p20": 65536 / low, "/p80": 65536 / high}
    split = WEIGHTS | {"workspace": 0.22 * peak}
    split |= {"activations": peak - sum(split.values()), "peak": peak}
    foreseen = {key: value * 1.03 if key in ("activations", "peak") else value for key, value in split.items()}
    foreseen["activations"] += foreseen["peak"] - sum(value for key, value in foreseen.items() if key != "peak")
    reference = [10.9 - 5 * (1 - math.exp(-step / 9)) for step in range(20)]
    told = {family: each * scale for family, each in zip(FAMILIES, times, strict=True)}
    heaviest = [
        {"name": f"{family}_kernel<128, 64>", "family": family, "calls": 12, "ms": each / 2}
        for family, each in told.items()
    ]
    parity = {"steps": 20, "losses": [loss + noise.gauss(0, 0.002) for loss in reference], "reference": reference}
    parity |= {"loss_error": 0.0021, "loss_bound": 0.01, "gradient_error": 0.0034, "gradient_bound": 0.02, "ok": True}
    return {
        "name": f"124M-{kernels}-{attn}-{precision}",
        "status": "ok",
        "command": f"{COMMAND} kernels={kernels} attn={attn} precision={precision} out_dir=out/x/1",
        "config": config(kernels, attn, precision, **model),
        "kernels": {
            "norm": "eager (torch 2.11.0+cu130)",
            "attention": f"{attn} (torch 2.11.0+cu130)",
            "compile": False,
        },
        "env": ENV,
        "parameters": parameters,
        "world_size": 1,
        "steps": 60,
        **{f"perf/tokens_per_sec{p}": rate for p, rate in rates.items()},
        "perf/laps_s": laps,
        "perf/step_ms": 1e3 * middle,
        "perf/first_step_s": first,
        "perf/mfu": 0.346 * 163.5 / (ms * scale),
        "perf/recompiles": 0,
        "perf/graph_breaks": 0,
        "perf/cache": "cold",
        "mem/peak_allocated_gib": peak,
        "train/loss": 5.8,
        "parity": parity,
        "memory": {"predicted": foreseen, "measured": split},
        "receipt": {
            "families": told,
            "step_ms": ms * scale,
            "busy_ms": sum(told.values()),
            "kernels": heaviest,
            "wrong": None,
        },
    }


def kernel(op, impl, shape, ms, tflops, tb_per_s):
    rate = {
        "both/ms": ms,
        "both/ms/p20": ms * 0.99,
        "both/ms/p80": ms * 1.01,
        "both/tflops": tflops,
        "both/tb_per_s": tb_per_s,
    }
    errors = {"error/out": 3e-3, "error/gradients": 3e-3, "both/of_floor": 0.8}
    return {"op": op, "impl": impl, "shape": shape, "dtype": "bfloat16", "env": ENV, **rate, **errors} | {
        "ceiling/tb_per_s": 4.1,
        "ceiling/tflops": 770.0,
    }


def context(kernels, attn, longest, generated, **model):
    found = {
        "context/max_train": longest,
        "context/max_generate": generated,
        "memory_gib": 139.8,
        "parameters": 124_475_904,
    }
    found |= {"context/train/seconds": 38.1, "context/train/peak_gib": 131.0, "context/train/prediction_error": 0.021}
    told = config(kernels, attn, "bf16", **model) | {"probe": None}
    command = f"python -m scripts.max_context kernels={kernels} attn={attn}"
    found |= {"kernels": {"attention": attn}, "command": command, "config": told, "env": ENV}
    return {"name": f"context-{kernels}", "status": "ok", **found}


def attended(impl, T):
    shape = {"batch": 1, "heads": 12, "kv_heads": None, "head_dim": 64, "window": None, "documents": None}
    found = {"impl": impl, "T": T, **shape, "dtype": "bfloat16", "env": ENV}
    if T > 4096 and impl == "eager":
        return found | {"status": "oom"}
    return found | {"status": "ok", "both/ms": T * T / 1e7 * (4 if impl == "eager" else 1), "both/peak_gib": 1.0}


def sweep(folder):
    """A sweep's folder: five choices in two runs each and in bf16, 355M, what fell, and the benchmarks beside them."""
    rows = {}
    for number, (kernels, attn) in enumerate(SPEEDS, 1):
        for run in (0, 1):
            rows[f"{number:02}-{kernels}-{attn}{'.2' * run}"] = row(kernels, attn, seed=run)
        rows[f"{number + 10}-{kernels}-{attn}-bf16"] = row(kernels, attn, "bf16", 0.965)
    for number, (kernels, attn) in enumerate((("eager", "sdpa"), ("triton", "flash")), 21):
        rows[f"{number}-355m-{kernels}"] = row(kernels, attn, "bf16", 2.6, 354_871_296, n_layer=24, n_embd=1024)
    bare = {key: row()[key] for key in ("command",)}
    rows["31-full"] = row(attn="sdpa") | {
        "status": "oom",
        "parity": None,
        "config": config("eager", "eager"),
        "name": "124M-eager-eager-amp",
    }
    rows["32-gone"] = bare | {
        "name": "32-gone",
        "status": "unavailable: attn=fa3 <needs> a GPU of compute capability 9.0",
    }
    wrong = row("triton", "sdpa") | {
        "config": config("triton", "triton"),
        "status": "wrong: loss error 3.1e-01, bound 1.0e-02",
    }
    rows["33-wrong"] = wrong
    for name, each in rows.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "result.json").write_text(json.dumps(each))
    benches = {
        "kernels": [
            kernel("norm", "eager", "124m", 0.9, 1.6, 1.7),
            kernel("norm", "triton", "124m", 0.4, 3.4, 3.8),
            kernel("mlp", "eager", "124m", 3.8, 488, 0.35),
            kernel("mlp", "triton", "1558m", 6.4, 590, 0.3),
        ],
        "context": [
            context("triton", "flash", 2_129_920, 6_291_456, pos="rope", checkpointing="block"),
            context("compile", "sdpa", 196_608, 1_048_576, pos="rope"),
        ],
        "attention": [attended(impl, T) for T in (1024, 2048, 4096, 8192) for impl in ("eager", "flash")],
    }
    for name, found in benches.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A sweep's folder with its report."""
    folder = sweep(tmp_path_factory.mktemp("report") / "mine")
    files, source = write(folder)
    assert [file.name for file in files] == ["report.html", "report.md", "speed.png", "roofline.png", "attention.png"]
    assert all(file.stat().st_size for file in files)
    assert files[0].stat().st_size < 6e6
    return source


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture
def opened(browser):
    """opened(folder, ...) -> its report in a tab, all filters off. Nothing may be asked of a network, or go wrong."""
    contexts, asked, wrong = [], [], []

    def go(folder, width=1280, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.goto((folder / "report.html").as_uri())
        for filtered in ("#model", "#precision"):
            if tab.is_visible(filtered):
                tab.select_option(filtered, "")
        return tab

    yield go
    for context in contexts:
        context.close()
    assert all(url.startswith(("file:", "data:", "blob:")) for url in asked), asked
    assert not wrong


def drawn(tab):
    """Panel -> its traces as Plotly has them."""
    return tab.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll(".plot")].map((plot) => [
            plot.parentElement.id,
            (plot.parentElement.classList.contains("empty") ? [] : plot.data).map(
                ({ name, x, y, text, customdata, meta, marker }) => ({ name, x, y, text, customdata, meta, marker })),
        ]))"""
    )


def test_every_panel_holds_its_rows(source, opened):
    found = drawn(opened(source.folder))
    timed, rows = source.timed, [choice.row for choice in source.timed]
    assert len(timed) == 12
    assert found["speed"][0]["x"] == [choice.speed for choice in timed]
    twice = timed[0]
    assert twice.speed == statistics.fmean(row["perf/tokens_per_sec"] for row in twice.rows)
    assert sorted(twice.interval) == sorted(row["perf/tokens_per_sec"] for row in twice.rows)

    peaks = [row["memory"][side]["peak"] for row in rows for side in ("predicted", "measured")]
    assert sum(sum(trace["x"]) for trace in found["memory"][:-1]) == pytest.approx(sum(peaks))
    assert found["memory"][-1]["text"] == [" +3.0%"] * 12
    points = {
        (x, y)
        for trace in found["tradeoff"]
        if trace["customdata"]
        for x, y in zip(trace["x"], trace["y"], strict=True)
    }
    assert points == {(choice.memory, choice.speed) for choice in timed}
    ms = sum(sum(row["receipt"]["families"].values()) for row in rows)
    assert sum(sum(trace["x"]) for trace in found["families"] if trace["name"] != "idle") == pytest.approx(ms)
    losses = [trace["y"] for trace in found["parity"]]
    assert all(row["parity"]["losses"] in losses and row["parity"]["reference"] in losses for row in rows)
    apart = [a - b for a, b in zip(rows[0]["parity"]["losses"], rows[0]["parity"]["reference"], strict=True)]
    assert apart in losses

    crossings = [trace for trace in found["payback"] if trace["name"] == "crossing"]
    pairs = [(choice.row, choice.against.base.row) for choice in timed if choice.against.base is not choice]
    assert sorted(trace["x"][0] for trace in crossings) == sorted(compare.payback(*pair) for pair in pairs)
    lengths = {trace["name"]: trace["x"] for trace in found["context"]}
    assert lengths["training"] == [2_129_920, 196_608]
    assert lengths["generation"] == [6_291_456, 1_048_576]
    assert lengths["nanoGPT"] == [131_072, 196_608, 1_900_000]
    assert sorted(y for trace in found["roofline"][1:] for y in trace["y"]) == [1.6, 3.4, 488, 590]
    assert {trace["name"]: len(trace["x"]) for trace in found["attention"]} == {"eager": 3, "flash": 4}


def test_a_choice_has_one_colour(source, opened):
    found = drawn(opened(source.folder))
    ids = dict(
        zip((each[0] for each in found["speed"][0]["customdata"]), found["speed"][0]["marker"]["color"], strict=True)
    )
    for trace in found["tradeoff"]:
        assert {ids[each[0]] for each in trace["customdata"] or []} <= {(trace["marker"] or {}).get("color")}
    assert len(set(ids.values())) == len(SPEEDS)


def test_forty_choices_look_different(tmp_path):
    """As many as all presets with all attentions: there are 14 colours, and then other symbols."""
    for number in range(40):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "result.json").write_text(json.dumps(row() | {"config": config(attn=f"attention{number}")}))
    timed = choices.read(tmp_path).timed
    traces = tradeoff(timed, colours(choice.name for choice in timed))["data"]
    looks = [(trace["marker"]["color"], trace["marker"]["symbol"]) for trace in traces if trace["mode"] == "markers"]
    assert len(looks) == len(set(looks)) == 40


def test_backends_and_families_have_colours_of_their_own():
    """However many choices there are; a backend that a choice is made of has that choice's."""
    taken = colours((f"triton · {number}" for number in range(20)), impls("attention"))
    assert taken["triton"] == taken["triton · 0"]
    assert len({taken[impl] for impl in impls("attention")}) == len(impls("attention"))
    assert len(set(parts(receipt.FAMILIES).values())) == len(receipt.FAMILIES) + 1


def test_filters_act_on_every_panel(source, opened):
    tab = opened(source.folder)
    tab.select_option("#precision", "bf16")
    tab.select_option("#model", "355M")
    found, shown = drawn(tab), {choice.id for choice in source.timed if choice.model == "355M"}
    assert len(shown) == 2
    for panel in ("speed", "memory", "tradeoff", "families", "parity", "payback"):
        points = [each[0] for trace in found[panel] for each in trace["customdata"] or [trace["meta"]]]
        assert set(points) <= shown, panel
        assert points, panel
    assert found["context"] == []
    assert tab.locator("#context.empty").count() == 1
    assert tab.locator("#choices tr[data-id]:visible").count() == 2
    assert "355M in bf16" in tab.inner_text(".hero:visible")
    tab.select_option("#model", "")
    tab.select_option("#precision", "")
    assert f"{source.timed[0].speed:,.0f}" in tab.inner_text(".hero:visible")
    assert "2,129,920 tokens" in tab.inner_text(".hero:visible")
    assert tab.locator("#choices tr[data-id]:visible").count() == 12
    assert len(drawn(tab)["speed"][0]["x"]) == 12


def test_a_hover_says_all_and_a_click_copies(source, opened):
    tab = opened(source.folder)
    bar = tab.locator("#speed .barlayer .point path").first.bounding_box()
    at = bar["x"] + 0.8 * bar["width"], bar["y"] + bar["height"] / 2
    tab.mouse.move(*at)
    tab.wait_for_selector("#speed .hoverlayer .hovertext")
    said = tab.locator("#speed .hoverlayer .hovertext").text_content()
    best = source.timed[0]
    for part in (
        f"{best.speed:,.0f} tokens/s",
        "2 runs",
        "GiB at the peak",
        "parity holds",
        "cold caches",
        "kernels=triton+compile",
    ):
        assert part.replace(" ", "") in said.replace(" ", "")
    tab.mouse.click(*at)
    tab.wait_for_selector("#toast.on")
    assert best.command in tab.inner_text("#toast")
    assert best.command == "python train.py +experiment=throughput kernels=triton+compile attn=flash precision=amp"
    button = tab.locator("#choices tr[data-id] .copy").nth(3)
    assert button.get_attribute("data-command") == source.timed[3].command
    button.click()
    tab.wait_for_function(
        "command => document.querySelector('#toast').textContent.includes(command)", arg=source.timed[3].command
    )


@pytest.mark.parametrize(("width", "options"), [(390, {"is_mobile": True, "has_touch": True}), (800, {})])
def test_nothing_is_wider_than_a_phone(source, opened, width, options):
    tab = opened(source.folder, width, **options)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    parts = "[...document.querySelectorAll('.plot, td, .hero div, #speed text')]"
    right = tab.evaluate(f"Math.max(...{parts}.map(e => e.getBoundingClientRect().right))")
    assert right <= width


def test_dark_and_light(source, opened):
    tab = opened(source.folder, color_scheme="dark")
    colours = (
        "[getComputedStyle(document.body).backgroundColor, document.querySelector('#speed .plot').layout.font.color]"
    )
    assert tab.evaluate(colours) == ["rgb(17, 18, 20)", "#ececee"]
    tab.emulate_media(color_scheme="light")
    tab.wait_for_function("document.querySelector('#speed .plot').layout.font.color === '#1c1d20'")
    assert tab.evaluate(colours)[0] == "rgb(246, 246, 244)"


def test_what_failed_and_what_is_missing(source, opened, tmp_path):
    told = opened(source.folder).inner_text("#failures")
    for part in (
        "eager · eager",
        "oom",
        "unavailable: attn=fa3 <needs> a GPU",
        "wrong: loss error 3.1e-01, bound",
        "attention eager, T = 8,192",
    ):
        assert part in told
    (tmp_path / "1-old").mkdir()
    bare = {key: value for key, value in row().items() if key not in ("parity", "memory", "receipt", "perf/laps_s")}
    (tmp_path / "1-old/result.json").write_text(json.dumps(bare))
    write(tmp_path)
    tab = opened(tmp_path)
    assert set(drawn(tab)) == {"speed", "tradeoff"}
    lines = tab.locator("#missing li").all_inner_texts()
    assert len(lines) == 7
    assert all("python " in line for line in lines)


def test_the_kept_rows_of_a_device_are_a_source(opened, tmp_path):
    """Older rows, without laps, parity, memory and receipt."""
    folder = shutil.copytree(ROOT / "results/h200", tmp_path / "h200")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "perf/laps_s" not in row]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, kept = write(folder)
    found = drawn(opened(folder))
    ran = [row for row in rows if row["status"] == "ok" and not row["config"]["train"]["eval_every"]]
    speeds = [row["perf/tokens_per_sec"] for row in ran if row["perf/tokens_per_sec"]]  # one had but one step
    assert sorted(found["speed"][0]["x"]) == sorted(speeds)
    assert max(found["parity"][0]["x"]) == 300
    assert all(choice.against.interval is None for choice in kept.timed)
    assert {each.against.base.name for each in kept.timed if each.name.startswith("eager ·")} == {"compile · sdpa"}
    assert {trace["name"] for trace in found["roofline"]} >= {"eager", "triton", "liger", "quack"}


def test_a_picture_of_kept_rows_is_of_one_comparison(monkeypatch, tmp_path):
    """That of most choices, of all that was ever measured on a device."""
    from matplotlib.axes import Axes

    shown, barh = [], Axes.barh
    monkeypatch.setattr(Axes, "barh", lambda *args, **named: shown.append(args[1]) or barh(*args, **named))
    folder = tmp_path / "h200"
    folder.mkdir()
    shutil.copy(ROOT / "results/h200/train.jsonl", folder)
    _, kept = write(folder)
    base, count = Counter(choice.against.base.title for choice in kept.timed).most_common(1)[0]
    assert count < len(kept.timed)
    assert [*shown[0]] == [choice.title for choice in kept.timed if choice.against.base.title == base][::-1]
    assert len(shown[0]) == count


def test_markdown(source):
    text = (source.folder / "report.md").read_text()
    assert text.startswith("# mine\n\nA choice stands beside the baseline of its settings")
    line = next(line for line in text.splitlines() if line.startswith("| triton + compile · flash (124M · amp)"))
    assert str(source.timed[0].against.interval) in line
    assert "2 runs" in line
    assert "24.1 s, cold caches | holds, loss 2.1e-03 | gemm 68.0 ms, attention 13.0 ms, mlp 9.5 ms" in line
    assert "![speed](speed.png)" in text
    assert "- eager · eager" in text
    assert "| longest T, training |" in text
    assert text.count("| **2,129,920** |") == 1


def test_only_what_is_alike_is_compared(source):
    groups = {}
    for choice in source.timed:
        groups.setdefault((choice.model, choice.precision), []).append(choice)
        assert (choice.against.base.model, choice.against.base.precision) == (choice.model, choice.precision)
        assert not choice.against.differs
        assert choice.against.interval == compare.ratio(choice.rows, choice.against.base.rows)
    assert [len(group) for group in groups.values()] == [5, 5, 2]
    near = next(choice for choice in source.timed if (choice.name, choice.precision) == ("triton · sdpa", "bf16"))
    assert near.against.base.name == "eager · sdpa"

    forced = choices.read(source.folder, force=True)
    other = next(choice for choice in forced.timed if choice.precision == "bf16" and choice.model == "124M")
    assert other.against.base is forced.choices[0]
    assert other.against.differs == ["precision: bf16, and of the other amp"]
    assert other.against.brief.endswith(", other precision")


def test_a_choice_alone_is_not_compared(tmp_path):
    for name, each in (("1", row()), ("2", row(seed=1) | {"world_size": 2})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(each))
    assert {choice.versus for choice in choices.read(tmp_path).timed} == {"baseline", "not compared: other GPUs"}
    assert {choice.apart for choice in choices.read(tmp_path).timed} == {"1 GPU", "2 GPUs"}


def test_a_copied_command_makes_a_folder_of_its_own():
    """Whatever the name of the one that it ran in."""
    words = "python train.py seed=2", """'out_dir="out/w 1/2 (a=b)"'""", """'logger.group="w 1"'""", "train.resume=auto"
    assert choices.again({"command": " ".join(words)}) == "python train.py seed=2"


def test_what_cannot_be_read_is_named(called, tmp_path):
    for name, text in {"1": json.dumps(row()), "2": json.dumps(row())[:99], "3": "[1]"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(text)
    assert called("report.py", report.main, tmp_path)[0] == 0
    left = f"Left out, as it cannot be read: {tmp_path}/2/result.json, {tmp_path}/3/result.json."
    assert left in (tmp_path / "report.md").read_text()
    (tmp_path / "kernels.jsonl").write_bytes(b"\xff\xfe\x00")
    code, _, err = called("report.py", report.main, tmp_path)
    assert (code, err) == (
        1,
        f"error: {tmp_path}/kernels.jsonl: line 1 is no row, but cut short or changed; delete it\n",
    )


def test_mistakes_are_one_line(called, tmp_path):
    with pytest.raises(UserError, match="name the folder of a sweep"):
        choices.read(tmp_path)
    code, out, err = called("report.py", report.main, tmp_path / "none")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert called("report.py", report.main, "--wandb")[0] > 0


def test_a_report_in_wandb(called, tmp_path, monkeypatch):
    """Offline, and read back with W&B's own command: the table, its rows, and the page as an artifact."""
    pytest.importorskip("wandb", reason="W&B is not installed")
    for key, value in {"HOME": tmp_path, "NETRC": tmp_path / "netrc", "WANDB_DATA_DIR": tmp_path / "data"}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    folder = sweep(tmp_path / "mine")
    code, out, err = called("report.py", report.main, folder, "--wandb")
    assert (code, err) == (0, "")
    run = Path(out.splitlines()[-1])
    assert run.parent == folder / "wandb"
    wandb = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(folder / "wandb")]
    lines = subprocess.run(wandb, capture_output=True, text=True, check=True).stdout.splitlines()
    records = [json.loads(line) for line in lines]
    begun = next(record["run"] for record in records if record["type"] == "run")
    assert (begun["job_type"], begun["run_group"], begun["project"]) == ("report", "mine", "hotswap")
    kept = next(r["artifact"] for r in records if r["type"] == "artifact" and r["artifact"]["name"] == "mine-report")
    files = {content["path"]: Path(content["local_path"]) for content in kept["manifest"]["contents"]}
    assert files["report.html"].read_bytes() == (folder / "report.html").read_bytes()
    [path] = run.glob("files/media/table/*.json")
    table = json.loads(path.read_text())
    speeds = [line[table["columns"].index("perf/tokens_per_sec")] for line in table["data"]]
    rows = [json.loads(path.read_text()) for path in folder.glob("*/result.json")]
    measured = [row["perf/tokens_per_sec"] for row in rows if row["status"] == "ok"]
    assert sorted(filter(None, speeds)) == pytest.approx(sorted(measured))
    assert len(speeds) == len(rows)
