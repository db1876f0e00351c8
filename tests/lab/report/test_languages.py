"""The tables of languages: from rows of one sitting, with a reason for every cell without figures."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from kernels import names
from kernels.names import ALL_OPS, TRAINING_OPS, by_language, decoding_overrides, impls, languages, training_overrides
from lab import rows as lab_rows
from lab.proof.source_lines import kernel_lines
from lab.report.language_panel import languages_figure
from lab.report.languages import ABSENT, MEASURE, SHAPES, language_tables
from lab.report.page import write_report
from lab.report.presets import presets
from lab.report.readmes import fill
from lab.report.tables import markdown_text
from runtime.config import UserError
from scripts import bench_kernels
from tests.lab.report.sample_rows import ENV, make_generation_row, make_kernel_row, make_row
from tests.test_train import ROOT, config

FOLDER = "h200-languages"
SITTING = {"started": "2026-11-29T10:00:00+0000", "env": ENV | {"gpu": "a"}}


def kernel_row(op="norm", impl="triton", shape="124m", ms=1.5, **facts):
    row = make_kernel_row(op, impl, shape, ms, 1.0, 1.0) | SITTING
    times = {"forward/ms": ms / 3, "backward/ms": 2 * ms / 3, "first_call_s": 4.25, "lines": 632}
    return row | {"status": "ok", "executed": f"{impl} (triton 3.6.0)"} | times | facts


def refused_row(op, impl, status, shape="124m"):
    return {"op": op, "impl": impl, "shape": shape, "dtype": "bfloat16", "status": status, **SITTING}


def step_row(language, model="gpt2_124m", scale=1.0, **facts):
    parameters = 134_515_008 if model == "smollm2_135m" else 124_475_904
    row = make_row("triton", "flash", "bf16", scale, parameters) | SITTING
    row["config"]["model"] |= presets()[model] | {"vocab_size": 50304}
    row["receipt"] |= {"lines": {"norm": 574, "attention": 0}}
    row["kernels"] = {"norm": "triton (triton 3.6.0)", "attention": "sdpa (cudnn, torch 2.11.0)", "compile": False}
    words = f"{' '.join(training_overrides()[language])} model={model} precision=bf16 train.max_steps=30"
    return row | {"command": f"python train.py +experiment=throughput {words} out_dir=out/languages/1"} | facts


def decoding_row(language, model="gpt2_124m"):
    words = f"{' '.join(decoding_overrides()[language])} model={model} attn=sdpa precision=bf16"
    row = make_generation_row() | SITTING | {"command": f"python -m scripts.generate {words}"}
    row["kernels"] = {"decode": "persistent (cuda 13.0, nvrtc)", "norm": "eager (torch 2.11.0)", "compile": False}
    row["receipt"] |= {"lines": {"decode": 1594}}
    return row


def keep(kernels=(), training=(), decoding=()):
    for name, rows in (("kernels", kernels), ("train", training), ("generate", decoding)):
        lab_rows.append_rows(lab_rows.RESULTS / FOLDER / f"{name}.jsonl", list(rows))


def tables(text):
    """Return {the line above a Markdown table, without commit and date: [its lines as {column: cell}]}."""
    found = {}
    for above, block in itertools.pairwise(text.split("\n\n")):
        if block.startswith("| "):
            head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
            found[re.sub(", commit .*:$", ":", above)] = [dict(zip(head, line, strict=True)) for line in lines]
    return found


@pytest.fixture(autouse=True)
def results(monkeypatch, tmp_path):
    monkeypatch.setattr(lab_rows, "RESULTS", tmp_path / "results")


def test_without_rows_the_section_names_the_command_that_measures_them():
    text = fill(f"<!-- languages: {FOLDER} -->\n<!-- end -->")
    assert text == f"<!-- languages: {FOLDER} -->\nNot measured yet: `{MEASURE}`.\n<!-- end -->"


def test_every_backend_has_one_language_and_every_listed_name_is_a_backend():
    for op in ALL_OPS:
        found = [impl for backends in by_language(op).values() for impl in backends]
        assert sorted(found) == sorted({*impls(op), "compile"} - {"auto"})
    listed = [impl for backends in names.LANGUAGES.values() for impl in backends]
    assert len(listed) == len(set(listed))
    assert {*listed} <= {impl for op in ALL_OPS for impl in [*impls(op), "compile"]}
    assert languages().keys() == names.LANGUAGES.keys()  # a new one may stand in LANGUAGES, or needs no edit: see below


def test_a_backend_with_a_new_name_is_a_language(monkeypatch):
    """Its variants are in its line, and the sweep trains with it alone."""
    new = {"norm": ["thunder"], "mlp": ["thunder", "thunder_recompute"], "decode": ["mojo"]}
    monkeypatch.setattr(names, "impls", lambda op: [*impls(op), *new.get(op, [])])
    assert [*languages()][-2:] == ["thunder", "mojo"]
    assert languages()["thunder"] == {"norm": ["thunder"], "mlp": ["thunder", "thunder_recompute"]}
    assert training_overrides()["thunder"] == ["kernels=thunder", "attn=sdpa"]
    assert decoding_overrides()["mojo"] == ["kernels=eager", "kernels.decode=mojo"]
    keep([kernel_row("mlp", "thunder_recompute", ms=2.0)])
    [kernels, *_] = tables(language_tables(FOLDER)).values()
    line = next(line for line in kernels if line["language"] == "thunder")
    assert line["mlp"].startswith("`thunder_recompute` 0.667 / **2**, 80%<br>")
    assert (line["norm"], line["loss"]) == ("not measured", "none")


@pytest.mark.parametrize("words", [*training_overrides().values()], ids=" ".join)
@pytest.mark.parametrize("model", SHAPES)
def test_the_words_of_a_language_choose_its_backends(words, model):
    """What the language lacks is eager, or Triton's with Gluon."""
    cfg = config(f"model={model}", *(re.sub("^attn=", "attn.impl=", word) for word in words))
    chosen = {op: getattr(cfg.kernels, op) for op in names.OPS if op != "attention"}
    language = next(name for name, each in training_overrides().items() if each == words)
    for op, impl in chosen.items():
        own = [name for name in by_language(op).get(language, []) if name != "compile"]
        assert impl == (own[0] if own else "triton" if language == "Gluon" and "triton" in impls(op) else "eager")
    assert cfg.kernels.compile == (language == "Inductor")


def test_a_cell_has_the_figures_of_the_fastest_backend():
    keep([kernel_row(ms=1.5), kernel_row(impl="triton_recompute", ms=1.2), kernel_row(impl="eager", ms=3.0, lines=0)])
    keep([kernel_row("adamw", ms=2.0) | {"backward/ms": None}, kernel_row("attention", **{"both/of_floor": None})])
    text = language_tables(FOLDER)
    kernels = {line["language"]: line for line in tables(text)["Kernels at the shapes of `model=gpt2_124m`, in bf16:"]}
    assert kernels["Triton"]["norm"] == "`triton_recompute` 0.4 / **1.2**, 80%<br>3.0e-03, 4.2 s, 632 lines"
    assert kernels["PyTorch"]["norm"] == "`eager` 1 / **3**, 80%<br>3.0e-03, 4.2 s, 0 lines"
    assert kernels["Triton"]["attention"] == "`triton` 0.5 / **1.5**<br>3.0e-03, 4.2 s, 632 lines"
    assert "CUDA C++" not in kernels
    assert list(kernels["Triton"]) == ["language", *SHAPES["gpt2_124m"]]
    assert "one H200 (driver 580.159.04, torch 2.11.0+cu130, triton 3.6.0): `" in text


def test_a_cell_says_what_a_backend_ran_and_the_note_has_the_versions():
    keep([kernel_row("attention", "flash", executed="flash (fa4, flash-attn-4 4.0.0b36)")])
    keep([kernel_row("attention", "sdpa", executed="sdpa (cudnn, torch 2.11.0+cu130, cudnn 91900)")])
    keep([kernel_row("attention", "xla", executed="xla (jax 0.11.2, XLA 0.11.2, cuBLAS matmuls)")])
    text = language_tables(FOLDER)
    [kernels, *_] = tables(text).values()
    cells = {line["language"]: line["attention"].partition(" 0.5")[0] for line in kernels}
    assert (cells["CuTe DSL"], cells["PyTorch"]) == ("`flash` (fa4)", "`sdpa` (cudnn)")
    assert cells["XLA"] == "`xla` (cuBLAS matmuls)"
    versions = "torch 2.11.0+cu130, triton 3.6.0, flash-attn-4 4.0.0b36, cudnn 91900, jax 0.11.2, XLA 0.11.2): "
    assert versions in text


def test_an_op_without_gradients_has_one_time():
    row = kernel_row("adamw", ms=2.0)
    del row["backward/ms"]
    keep([row])
    [kernels, *_] = tables(language_tables(FOLDER)).values()
    assert next(line["adamw"] for line in kernels if line["language"] == "Triton").startswith("`triton` **2**, 80%<br>")


def test_every_cell_without_figures_has_a_reason():
    """Equal reasons have one number, and a backend that runs hides the refusals of its language's others."""
    package = "unavailable: it needs helion: pip install 'x[y]'"
    keep([kernel_row(), refused_row("norm", "triton_recompute", "failed: no tile")])
    keep([refused_row("norm", "helion", package), refused_row("loss", "helion", package)])
    keep([refused_row("norm", "xla", "failed: the process ended, exit code 3"), kernel_row("norm", "gone")])
    text = language_tables(FOLDER)
    [kernels, smollm] = tables(text).values()
    lines = {line["language"]: line for line in kernels}
    assert lines["Triton"]["norm"].startswith("`triton` ")
    assert (lines["Helion"]["norm"], lines["Helion"]["loss"]) == ("unavailable (1)", "unavailable (1)")
    assert (lines["XLA"]["norm"], lines["XLA"]["adamw"], lines["XLA"]["mlp"]) == ("failed (2)", "none", "not measured")
    notes = "1. `norm=helion`, `loss=helion`: it needs helion: pip install 'x\\[y]'\n"
    assert f"{notes}2. `norm=xla`: the process ended, exit code 3\n" in text
    for line in [*kernels, *smollm]:
        assert all(line.values())


def test_every_none_has_a_reason():
    """A language that lacks an op of a table is in ABSENT, and one that lacks none is not."""
    lacking = set()
    for language, backends in languages().items():
        for shapes in SHAPES.values():
            if backends.keys() & shapes.keys() and shapes.keys() - backends.keys():
                lacking.add(language)
    assert lacking == ABSENT.keys()
    keep([kernel_row()])
    text = language_tables(FOLDER)
    assert all(f"- {markdown_text(language)}: {why}\n" in text for language, why in ABSENT.items())


def test_the_steps_of_each_model_and_the_decoders_have_tables():
    reason = "unavailable: rms_norm=helion cannot run here: it needs helion"
    refused = {"status": reason, "command": step_row("Helion")["command"], "started": SITTING["started"]}
    keep(training=[step_row("PyTorch", scale=2), step_row("Triton"), refused, step_row("XLA", status="oom")])
    keep(training=[step_row("CuTe DSL", model="smollm2_135m")], decoding=[decoding_row("CUDA C++")])
    text = language_tables(FOLDER)
    found = tables(text)
    work = "64 sequences of 1,024 tokens a step:"
    lines = {line["language"]: line for line in found[f"Training `smollm2_135m`, {work}"]}
    assert lines["CuTe DSL"]["words"] == "`kernels=quack attn=flash`"
    assert lines["CuTe DSL"]["peak GiB"] == "18.7"
    lines = {line["language"]: line for line in found[f"Training `gpt2_124m`, {work}"]}
    assert list(lines) == [language for language in training_overrides() if language != "Pallas"]  # no kernel of GPT-2
    assert lines["Triton"]["peak GiB"] == "18.7"
    assert re.fullmatch(r"\*\*5\d\d,\d{3}\*\* \(.+ to .+\)", lines["Triton"]["tokens/s (p20 to p80)"])
    assert (lines["Triton"]["kernel lines"], lines["Triton"]["first step"]) == ("574", "8.3 s")
    assert lines["Helion"]["tokens/s (p20 to p80)"] == "unavailable (1)"
    assert lines["XLA"]["tokens/s (p20 to p80)"] == "oom (2)"
    assert "Without a CUDA graph" not in text
    keep(
        training=[step_row("XLA", cuda_graph="kernels.norm.xla runs in XLA"), step_row("Triton", cuda_graph="captured")]
    )
    assert "\n\nWithout a CUDA graph: XLA.\n\n" in language_tables(FOLDER)
    assert lines["Gluon"]["tokens/s (p20 to p80)"] == "not measured"
    assert "1. `kernels=helion attn=sdpa`: rms_norm=helion cannot run here: it needs helion\n" in text
    lines = {
        line["language"]: line for line in found["Decoding `gpt2_124m`, 1 sequence, 128 tokens after a prompt of 128:"]
    }
    assert "Decoding `model=smollm2_135m`: not measured.\n\n" in text
    assert list(lines) == [*decoding_overrides()]
    assert lines["CUDA C++"]["kernel lines"] == "1,594"


def test_the_first_job_may_have_been_refused():
    refused = {"status": "unavailable: no attn=sdpa", "command": step_row("PyTorch")["command"]}
    keep(training=[refused | {"started": SITTING["started"]}])
    assert language_tables(FOLDER) == "Not measured yet: `scripts/measure.sh languages`."
    keep(training=[step_row("Triton"), step_row("XLA")])
    lines = tables(language_tables(FOLDER))["Training `gpt2_124m`, 64 sequences of 1,024 tokens a step:"]
    assert [line["tokens/s (p20 to p80)"][:12] for line in lines[:2]] == ["unavailable ", "not measured"]


def test_a_job_that_was_refused_has_the_benchmarks_reason():
    """Such a job of a sweep leaves no row in results/, because it ends before it knows its machine."""
    refused = [refused_row("norm", "helion", "unavailable: it needs helion"), refused_row("loss", "xla", "failed: how")]
    keep(refused, [step_row("PyTorch"), step_row("XLA")])
    lines = tables(language_tables(FOLDER))["Training `gpt2_124m`, 64 sequences of 1,024 tokens a step:"]
    cells = {line["language"]: line["tokens/s (p20 to p80)"] for line in lines}
    assert (cells["Helion"], cells["Triton"]) == ("unavailable (1)", "not measured")
    assert cells["XLA"].startswith("**")


def test_a_table_of_two_sittings_is_refused_and_a_whole_new_one_is_not():
    keep([kernel_row(), kernel_row(impl="eager")], [step_row("PyTorch")])
    keep([kernel_row(impl="eager") | {"env": SITTING["env"] | {"driver": "590"}}])
    refusal = f"^results/{FOLDER}: the rows of languages are not of one sitting, because norm 124m .*driver: "
    with pytest.raises(UserError, match=refusal) as error:
        language_tables(FOLDER)
    assert str(error.value).endswith(f": measure them together: {MEASURE}")
    later = {"env": SITTING["env"] | {"driver": "590", "git_commit": "1" * 40}}
    keep([kernel_row() | later])
    keep([kernel_row(impl="eager") | later])
    text = language_tables(FOLDER)  # a table may be of another sitting than the next one, and each names its own
    assert "Kernels at the shapes of `model=gpt2_124m`, in bf16, commit 1111111, 2026-11-29:" in text
    assert "64 sequences of 1,024 tokens a step, commit f3adfe0, 2026-11-29:" in text
    assert f"driver 590, driver {SITTING['env']['driver']}, " in text
    keep(training=[step_row("PyTorch") | later])
    keep(training=[step_row("Triton") | {"env": later["env"] | {"git_commit": "0" * 40 + "-dirty"}}])
    with pytest.raises(UserError, match="not of one sitting"):
        language_tables(FOLDER)


def test_the_group_measures_what_the_tables_show(tmp_path):
    """Its benchmarks have the columns of SHAPES, and its sweeps the models."""
    log = tmp_path / "bin" / "log"
    log.parent.mkdir()
    python = log.with_name("python")
    python.write_text(f'#!/bin/sh\necho "$@" >>{log}\n')
    python.chmod(0o755)
    environment = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    subprocess.run([ROOT / "scripts/measure.sh", "languages"], check=True, env=environment)
    lines = log.read_text().splitlines()
    commands = [dict(word.split("=", 1) for word in shlex.split(line) if "=" in word) for line in lines]
    benches = {(words["op"], words["shape"]) for words in commands if "op" in words}
    assert benches == {column for shapes in SHAPES.values() for column in shapes.items()}
    assert all(words["suffix"] == "languages" and words["first_call"] == "true" for words in commands if "op" in words)
    sweeps = {(words["+sweep"], words["model"]) for words in commands if "+sweep" in words}
    assert sweeps == {(sweep, model) for sweep in ("languages", "decoding_languages") for model in SHAPES}
    assert sum("collect" in line for line in lines) == 1


def test_rows_of_the_benchmark_make_a_line(called, monkeypatch, tmp_path):
    """Real rows of a CPU at a tiny shape, from the command to the table."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SHAPES["gpt2_124m"], "norm", "narrow")
    monkeypatch.setenv("HOTSWAP_COMMIT", "0" * 40)
    words = "op=norm", "shape=narrow", "dtype=float32", "rounds=2", "impl=[eager]", "keep=true", "first_call=true"
    assert called("bench_kernels.py", bench_kernels.main, *words, "suffix=languages")[0] == 0
    [folder] = [path.name for path in lab_rows.RESULTS.glob("*-languages")]
    [row] = lab_rows.read_rows(folder, "kernels")
    [kernels, *_] = tables(language_tables(folder)).values()
    line = next(line for line in kernels if line["language"] == "PyTorch")
    share, error = f"{row['both/of_floor']:.0%}", f"{max(row['error/out'], row['error/gradients']):.1e}"
    times = f"{row['forward/ms']:.3g} / **{row['both/ms']:.3g}**"
    assert line["norm"] == f"`eager` {times}, {share}<br>{error}, {row['first_call_s']:.2g} s, 0 lines"
    assert row["lines"] == kernel_lines({"norm": "eager"})["norm"] == 0
    assert {*SHAPES["gpt2_124m"], *SHAPES["smollm2_135m"]} <= {*TRAINING_OPS}
    assert json.loads(json.dumps(row)) == row
    assert sys.modules["torch"].__version__ in language_tables(folder)


def test_the_panel_has_the_fastest_backend_of_each_language_in_the_newest_benchmark(tmp_path):
    """Times of two benchmarks are not compared, and a benchmark without eager has no point.

    Rows without times, without a start, of `auto` and of an op that is gone are left out.
    """
    old = SITTING | {"started": "2026-11-28T10:00:00+0000"}
    rows = [kernel_row(impl="eager", ms=9.0) | old, kernel_row(impl="xla", ms=1.0) | old]
    rows += [kernel_row(impl="eager", ms=3.0), kernel_row(ms=2.0), kernel_row(impl="triton_recompute", ms=1.5)]
    rows += [kernel_row(impl="auto", ms=1.0), refused_row("norm", "helion", "failed: how"), kernel_row("mlp", ms=1.0)]
    rows += [make_kernel_row("norm", "gluon", "124m", 1.0, 1.0, 1.0), kernel_row(impl="thunder", ms=6.0)]
    rows += [kernel_row(impl="mine", ms=1.0, started="2026-11-30T10:00:00+0000"), kernel_row("an_old_op", "eager")]
    figure = languages_figure(rows)
    points = {series.name: [(point.x, point.y) for point in series.points] for series in figure.series}
    norm = "norm 124m"
    assert points == {"PyTorch": [(1, norm)], "Triton": [(2, norm)], "thunder": [(0.5, norm)]}
    hover = next(series.points[0].origin for series in figure.series if series.name == "Triton").hover
    assert "triton_recompute, 1.5 ms" in hover
    assert languages_figure([make_kernel_row("norm", "eager", "124m", 1.0, 1.0, 1.0)]) is None
    for folder in ("h200-languages", "h200"):  # a device's page has the panel, too
        (tmp_path / folder).mkdir()
        if folder == "h200-languages":
            (tmp_path / folder / "kernels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_report(tmp_path / folder)
        assert '<section class="card" id="languages">' in (tmp_path / folder / "report.html").read_text()
