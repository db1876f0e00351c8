"""The first tables of results/README.md: what they select from rows of several sittings, and what they compute."""

from lab import rows as lab_rows
from lab.report import questions
from lab.report.colours import choice_colours
from lab.report.presets import presets
from lab.report.questions import CHOICES, decoding, draw_questions, fastest, label, longest, memory, time_text
from lab.report.source import read_source
from tests.lab.report.sample_rows import ENV, make_config, make_context_row, make_generation_row, make_row
from tests.lab.report.test_report import cells

SPEEDS = {"eager PyTorch": 400, "torch.compile": 500, "triton": 550, "gluon": 600, "fp8": 800}  # tokens/s


def make_run(choice, speed, model="gpt2_124m", *, gib=10.0, commit="a", day=27, gpu="a", status="ok", peer=None):
    """Return a row of training: 5 intervals of equal speed on one H200."""
    kernels, attn, precision = next(key for key, name in CHOICES.items() if name == choice)
    row = make_row("eager", "sdpa", "bf16", parameters={"tiny": 1_000_000, "gpt2_350m": 354_871_296}.get(model, 1.2e8))
    first, last = ("eager", "eager") if kernels == "compile" else (kernels.split("+")[0], kernels.split("+")[-1])
    config = make_config(precision=precision, attn=attn)
    config["model"] = presets()[model]
    config["kernels"] |= {"norm": first, "mlp": first, "loss": last, "compile": kernels == "compile"}
    row |= {"config": config, "status": status, "started": f"2026-11-{day}T10:00:00+0000"}
    row |= {"kernels": row["kernels"] | ({"peer": peer} if peer else {}), "mem/peak_allocated_gib": gib}
    row |= {"command": f"python train.py model={model} kernels={kernels}"}
    row |= {"env": ENV | {"git_commit": commit * 40, "gpu": gpu}}
    if status != "ok":
        return {key: value for key, value in row.items() if not key.startswith("perf/")}
    return row | {"perf/tokens_per_sec": speed, "perf/laps_s": [65536 / speed] * 5}


def keep(results, folder, rows, kind="train"):
    lab_rows.append_rows(results / folder / f"{kind}.jsonl", rows)


def table(text):
    """Return the cells of the table in a text, with its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in lines[0].strip("|").split("|")], *cells("\n".join(lines))]


def test_without_rows_a_section_names_the_command_that_measures_them(results):
    for section in (fastest, memory, longest, decoding):
        assert section("h200") == "Not measured yet: `scripts/measure.sh ladder`."
    assert draw_questions("h200") == []


def test_a_column_is_the_sitting_with_the_most_choices_and_of_these_the_newest(results):
    """The rows of other sittings, of a tiny model, of two GPUs and of another device do not count."""
    keep(results, "h200-rungs", [make_run(name, speed, day=20, commit="b") for name, speed in SPEEDS.items()])
    keep(results, "h200-rungs", [make_run(name, speed) for name, speed in SPEEDS.items()])
    keep(results, "h200", [make_run("gluon", 9000, commit="c", day=28), make_run("gluon", 1e5, "tiny")])
    keep(results, "h200-rungs", [make_run("gluon", 7000, gpu="another"), make_run("gluon", 1) | {"world_size": 2}])
    keep(results, "h200x2", [make_run("gluon", 8000, "gpt2_350m")])
    text = fastest("h200")
    assert table(text) == [
        ["choice", "gpt2_124m"],
        ["eager PyTorch", "400, 0.800x"],
        ["torch.compile", "500"],
        ["triton", "550, 1.100x"],
        ["gluon", "600, 1.200x"],
        ["fp8", "**800, 1.600x**"],
    ]
    assert "\n\n64 x 1024 tokens a step on one H200, commit aaaaaaa, 2026-11-27.\n\n" in text


def test_repeats_have_an_interval_and_columns_of_other_sittings_are_named(results):
    """A choice without memory has its status, and a model without torch.compile has no ratios."""
    runs = [make_run(name, speed * factor) for factor in (0.99, 1.0, 1.01) for name, speed in SPEEDS.items()]
    keep(results, "h200-rungs", runs)
    keep(results, "h200-fp8", [make_run("gluon", 200, "gpt2_350m", commit="b", day=26)])
    keep(results, "h200-fp8", [make_run("triton", 0, "gpt2_350m", commit="b", day=26, status="oom: no memory")])
    text = fastest("h200")
    head, eager, compiled, triton, gluon, fp8 = table(text)
    assert head == ["choice", "gpt2_124m", "gpt2_350m"]
    assert gluon[1].startswith("600, 1.200x (1.19")
    assert [eager[2], compiled[2], triton[2], gluon[2], fp8[2]] == ["", "", "oom", "**200**", ""]
    commits = "aaaaaaa, 2026-11-27 (`gpt2_124m`); bbbbbbb, 2026-11-26 (`gpt2_350m`)"
    assert "64 x 1024 tokens a step on one H200. All rows of a column were" in text
    assert f"compare within a column. Commits: {commits}.\n\n" in text


def test_the_models_that_a_reader_knows_are_shown_and_those_without_torch_compile_come_last(results):
    """Of five models, four are shown. SmolLM2 has more parameters than GPT-2 124M, and 1558M no torch.compile."""
    for model in ("gpt2_350m", "gpt2_774m", "smollm2_135m", "gpt2_124m"):
        keep(results, "h200-rungs", [make_run(name, speed, model) for name, speed in SPEEDS.items()])
    keep(results, "h200-fp8", [make_run("gluon", 100, "gpt2_1558m")])
    assert table(fastest("h200"))[0] == ["choice", "gpt2_124m", "smollm2_135m", "gpt2_350m", "gpt2_774m"]


def test_the_best_choice_has_the_highest_ratio(results):
    """It is the median over the same steps. triton has more tokens/s, because gluon paused, where torch.compile did."""
    base, ours, other = (make_run(name, 100) for name in ("torch.compile", "gluon", "triton"))
    base["perf/laps_s"] = [1.0, 1.0, 1.0, 3.0, 3.0]
    ours |= {"perf/laps_s": [0.5, 0.5, 0.5, 1.5, 1.5], "perf/tokens_per_sec": 200}
    other |= {"perf/laps_s": [0.6, 0.6, 0.6, 0.6, 0.6], "perf/tokens_per_sec": 210}
    keep(results, "h200-rungs", [base, ours, other])
    cells = {line[0]: line[1] for line in table(fastest("h200"))[1:]}
    assert cells["gluon"] == "**200, 2.000x**"
    assert cells["triton"].startswith("210, 1.6")


def test_the_baseline_is_the_fastest_mode_of_torch_compile(results):
    """Each mode then has a line of its own. A mode that failed, or of another sitting, is not the baseline."""
    modes = {"max-autotune-no-cudagraphs": 520, "max-autotune-cutlass": 510}

    def run(mode, speed, model="gpt2_124m", **settings):
        row = make_run("torch.compile", speed, model, **settings)
        row["config"]["kernels"] |= {"compile_mode": mode}
        assert label(row) == f"torch.compile, {mode}"
        return row

    def lines(model):
        start, end = f"- `{model}`: torch.compile, ", " tokens/s and 10.0 GiB; gluon is 1."
        return [line.removeprefix(start).partition(end)[0] for line in fastest("h200").splitlines() if start in line]

    keep(results, "h200-rungs", [run(mode, speed) for mode, speed in modes.items()])
    keep(results, "h200-rungs", [make_run(name, speed) for name, speed in SPEEDS.items()])
    column = ["400, 0.769x", "520", "550, 1.058x", "600, 1.154x", "**800, 1.538x**"]
    shown = [f"{mode} in bf16 reaches {speed}" for mode, speed in (modes | {"default": 500}).items()]
    assert [line[1] for line in table(fastest("h200"))[1:]] == column
    assert lines("gpt2_124m") == shown
    keep(results, "h200", [run("max-autotune-no-cudagraphs", 590, day=28)])
    keep(results, "h200-rungs", [run("max-autotune-cutlass", 0, "gpt2_350m", status="error: no nvcc")])
    keep(results, "h200-rungs", [make_run(name, speed, "gpt2_350m") for name, speed in SPEEDS.items()])
    assert [line[1] for line in table(fastest("h200"))[1:]] == column
    assert table(fastest("h200"))[2] == ["torch.compile", "520", "500"]
    assert (lines("gpt2_124m"), lines("gpt2_350m")) == (shown, [])
    keep(results, "a100", [run(mode, speed) for mode, speed in modes.items()])  # no other choice to compare with
    assert table(fastest("a100"))[1:] == [["torch.compile", "**520**"]]
    assert "- `" not in fastest("a100")


def test_memory_is_the_largest_peak_beside_torch_compiles(results):
    peaks = {"eager PyTorch": 50.0, "torch.compile": 20.0, "triton": 12.0, "gluon": 10.0, "fp8": 11.0}
    runs = [make_run(name, 1, gib=peaks[name] - less) for less in (0, 1) for name in SPEEDS]
    keep(results, "h200-rungs", runs)
    assert [line[1] for line in table(memory("h200"))[1:]] == [
        "50.0 GiB, 2.50x",
        "20.0 GiB",
        "12.0 GiB, 0.60x",
        "**10.0 GiB, 0.50x**",
    ]


def test_memory_is_beside_the_leanest_mode_of_torch_compile(results, monkeypatch):
    """The fastest mode may need more. The pictures show what the tables do."""
    fastest_mode = make_run("torch.compile", 520, gib=30.0)
    fastest_mode["config"]["kernels"] |= {"compile_mode": "max-autotune-no-cudagraphs"}
    keep(results, "h200-rungs", [make_run("torch.compile", 500, gib=20.0), make_run("gluon", 600, gib=10.0)])
    keep(results, "h200-rungs", [fastest_mode])
    assert table(memory("h200"))[1:] == [["torch.compile", "20.0 GiB"], ["gluon", "**10.0 GiB, 0.50x**"]]
    assert table(fastest("h200"))[1] == ["torch.compile", "520"]
    drawn = {}
    monkeypatch.setattr(questions, "draw_figures", lambda figures, path: drawn.update({path.name: figures}) or [path])
    draw_questions("h200")
    shown = {name: {point.y: point.x for point in drawn[name][0].series[0].points} for name in drawn if drawn[name][0]}
    assert shown["memory.png"] == {"torch.compile": 20.0, "gluon": 10.0}
    assert shown["fastest.png"] == {"torch.compile": 520, "gluon": 600}


def test_a_choice_of_several_backends_is_known_by_its_words():
    """Its kernels differ with the model: SwiGLU has no backend in Gluon."""
    row = make_run("fp8", 1)
    assert label(row) == "fp8"
    row["config"]["kernels"] |= dict.fromkeys(("norm", "mlp", "loss"), "triton")
    assert label(row) != "fp8"
    words = "kernels=gluon kernels.loss=triton kernels.glu=triton attn=gluon precision=fp8"
    row["command"] = f"python train.py model=smollm2_135m {words}"
    assert label(row) == "fp8"


def test_another_system_of_the_sitting_stands_beside_our_fastest_exact_choice(results):
    """A peer's command has model= inside training=[...], so the model is that of the row's config."""
    model, name = "gpt2_350m", "transformers 5.17.0 + torch.compile"
    command = {"command": f"python -m scripts.peers 'training=[\"model={model}\"]'"}
    keep(results, "h200-rungs", [make_run(choice, speed, model) for choice, speed in SPEEDS.items()])
    keep(results, "h200-rungs", [make_run("torch.compile", 480, model, gib=30.0, peer=name) | command])
    keep(results, "h200-rungs", [make_run("torch.compile", 1, model, peer=name, commit="b") | command])
    *_, line = fastest("h200").splitlines()
    assert line == f"- `{model}`: {name} in bf16 reaches 480 tokens/s and 30.0 GiB; gluon is 1.250x as fast"


def test_each_other_system_has_its_newest_sitting_with_rows_of_ours_and_the_fastest_comes_first(results):
    """A newer sitting of ours had hidden the strongest system. A sitting without ours compares nothing."""
    model, slow, fast, alone = "modern_124m", "transformers + torch.compile", "transformers + Liger", "nanoGPT"

    def keep_sitting(day, factor, *peers):
        rows = [make_run(choice, speed * factor, model, commit=str(day), day=day) for choice, speed in SPEEDS.items()]
        rows += [make_run("gluon", speed, model, commit=str(day), day=day, peer=name) for name, speed in peers]
        keep(results, "h200-rungs", rows)

    keep_sitting(22, 1, (fast, 100))
    keep_sitting(24, 1, (slow, 400), (fast, 500))
    keep_sitting(26, 2, (slow, 480))
    other_gpu = [make_run("gluon", 900, model, commit="26", day=28, gpu="another", peer=name) for name in (fast, alone)]
    keep(results, "h200-rungs", other_gpu)
    *_, first, second = fastest("h200").splitlines()
    text = f"- `{model}`: {fast} in bf16 reaches 500 tokens/s and 10.0 GiB; gluon is 1.200x as fast"
    assert first == f"{text}, at commit 2424242, 2026-11-24"
    assert second == f"- `{model}`: {slow} in bf16 reaches 480 tokens/s and 10.0 GiB; gluon is 2.500x as fast"


def test_the_longest_contexts_are_the_newest_of_each_choice(results):
    """There are five, and torch.compile's is always one of them. A search in generation alone is not there."""

    def search(longest, day, kernels="eager", **model):
        row = make_context_row(kernels, "sdpa", longest, None, **model)
        return row | {"started": f"2026-11-{day}T10:00:00+0000", "env": ENV | {"git_commit": str(day) * 4}}

    blocks = [search(3000, 22, checkpointing="block"), search(2000, 24, checkpointing="block")]
    extrapolated = search(9000, 22, "triton") | {"context/train/seconds_of_full_attention": 1234.5}
    others = [
        search(5000, 23, checkpointing="host"),
        search(1000, 22),
        search(None, 22, "triton", checkpointing="host"),
    ]
    keep(results, "h200", [*blocks, extrapolated, *others], "context")
    keep(results, "h200-rungs", [search(500, 24, "compile"), search(600, 24, "triton+compile")], "context")
    text = longest("h200")
    assert [line[:4] for line in table(text)[1:]] == [
        ["triton, sdpa", "**9,000**", "21 minutes (extrapolated)", "131.0"],
        ["checkpointing=host", "**5,000**", "38 s", "131.0"],
        ["checkpointing=block", "**2,000**", "38 s", "131.0"],
        ["eager PyTorch", "**1,000**", "38 s", "131.0"],
        ["torch.compile", "**500**", "38 s", "131.0"],
    ]
    assert [time_text(seconds) for seconds in (119.4, 120, 7199, 10_737)] == [
        "119 s",
        "2 minutes",
        "120 minutes",
        "3.0 hours",
    ]
    assert "\n\nThe rows are of several sittings, each on one H200: the last column names them.\n\n" in text
    assert [line[4] for line in table(text)[1:]][:2] == ["2222222, 2026-11-22", "2323232, 2026-11-23"]


def test_decoders_stand_beside_torch_compile(results):
    decoders = {("blocks", "eager"): 0.8, ("blocks", "compile"): 0.5, ("persistent", "eager"): 0.25}
    rows = []
    for (decode, kernels), ms in decoders.items():
        words = f"python -m scripts.generate kernels={kernels} kernels.decode={decode} attn=sdpa precision=bf16"
        row = make_generation_row(decode, kernels, ms=ms) | {"parameters": 124_475_904, "command": words}
        rows.append(row | {"gen/laps_s": [ms / 1e3] * 5, "started": "2026-11-27T10:00:00+0000"})
    keep(results, "h200-rungs", rows, "generate")
    text = decoding("h200")
    assert [line[0] for line in table(text)[1:]] == ["eager PyTorch", "torch.compile", "persistent"]
    assert [line[2:] for line in table(text)[1:]] == [
        ["0.625x", "0.80 / 0.96", "0.34"],
        ["", "0.50 / 0.60", "0.34"],
        ["2.000x", "0.25 / 0.30", "0.34"],
    ]
    where = "commit f3adfe0, 2026-11-27, on one H200:\n\n|"
    assert f"\n\nDecoding `gpt2_124m`, 1 sequence, 128 tokens after a prompt of 128, {where}" in text


def test_the_pictures_show_the_tables(results, monkeypatch):
    drawn = {}
    monkeypatch.setattr(questions, "draw_figures", lambda figures, path: drawn.update({path.name: figures}) or [path])
    keep(results, "h200-rungs", [make_run("gluon", 200, "gpt2_350m"), make_run("torch.compile", 150, "gpt2_350m")])
    keep(results, "h200-rungs", [make_run(name, speed) for name, speed in SPEEDS.items()])
    paths = draw_questions("h200")
    assert [path.name for path in paths] == ["fastest.png", "memory.png", "longest.png", "decoding.png"]
    full, medium = drawn["fastest.png"]
    assert (full.title, medium.title) == ("gpt2_124m", "gpt2_350m")
    assert {point.y: point.x for point in full.series[0].points} == SPEEDS
    assert {point.y: point.x for point in medium.series[0].points} == {"torch.compile": 150, "gluon": 200}
    colours = {point.y: point.colour for point in full.series[0].points}
    assert all(point.colour == colours[point.y] for point in medium.series[0].points)
    assert drawn["longest.png"] == [None]


def test_a_choice_has_one_colour_in_the_pictures_and_on_the_page(results, monkeypatch):
    """eager, compile, triton, gluon and fp8. A decoder or a checkpointing has none of these colours."""
    drawn = {}
    monkeypatch.setattr(questions, "draw_figures", lambda figures, path: drawn.update({path.name: figures}) or [path])
    rows = [make_run(name, speed) for name, speed in SPEEDS.items()]
    keep(results, "h200-rungs", rows)
    keep(results, "h200", [make_run("gluon", 1)])
    decoders = []
    for decode, kernels in (("blocks", "eager"), ("blocks", "compile"), ("persistent", "eager")):
        words = f"python -m scripts.generate kernels={kernels} kernels.decode={decode} attn=sdpa precision=bf16"
        decoders.append(make_generation_row(decode, kernels) | {"parameters": 124_475_904, "command": words})
    keep(results, "h200-rungs", [row | {"started": "2026-11-27T10:00:00+0000"} for row in decoders], "generate")
    searches = [("triton", {"checkpointing": "block"}), ("eager", {"checkpointing": "host"}), ("compile", {})]
    contexts = [make_context_row(kernels, "sdpa", 4096, None, **model) for kernels, model in searches]
    keep(results, "h200", [row | {"started": "2026-11-27T10:00:00+0000"} for row in contexts], "context")
    draw_questions("h200")
    shown = {
        name: {point.y: point.colour for point in drawn[f"{name}.png"][0].series[0].points}
        for name in ("fastest", "longest", "decoding")
    }
    choices = read_source(results / "h200").measured_choices
    page = choice_colours(choice.name for choice in choices)
    assert len(set(shown["fastest"].values())) == 5
    for choice in choices:
        assert page[choice.colour_key] == shown["fastest"][label(choice.row)]
    for name, others in (("longest", 2), ("decoding", 1)):
        own = {text: colour for text, colour in shown[name].items() if colour not in shown["fastest"].values()}
        assert len(own) == len(set(own.values())) == others
    assert shown["longest"]["torch.compile"] == shown["decoding"]["torch.compile"] == shown["fastest"]["torch.compile"]
    assert shown["decoding"]["eager PyTorch"] == shown["fastest"]["eager PyTorch"]


def test_a_table_of_results_has_at_most_five_rows_and_columns():
    for section in (fastest, memory, longest, decoding):
        lines = table(section("h200"))
        assert len(lines) <= 6
        assert all(len(line) <= 5 for line in lines)
