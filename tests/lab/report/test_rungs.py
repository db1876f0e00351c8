"""The tables of rungs in README.md: from rows of one sitting, and from no others."""

import re
from types import SimpleNamespace

import pytest
import yaml
from hydra import compose, initialize_config_dir

from lab import rows as lab_rows
from lab.report.rungs import DECODING, TRAINING, choice_words, rungs
from lab.sweep.launcher import Sweeper
from runtime.config import UserError, parse
from scripts import generate, report
from tests.lab.report.sample_rows import ENV, make_generation_row, make_row
from tests.test_train import ROOT, config

VERSIONS = "torch 2.11.0+cu130"
EAGER = dict.fromkeys(("norm", "linear", "mlp", "loss"), f"eager ({VERSIONS})")
SDPA = {"attention": f"sdpa (cudnn, {VERSIONS}, cudnn 91900)"}
TRITON = dict.fromkeys(("norm", "linear", "mlp", "loss"), "triton (triton 3.6.0)")
GLUON = TRITON | dict.fromkeys(("mlp", "loss"), "gluon (triton 3.6.0, cuBLAS matmuls)")
OUR_LINES = {"norm": 574, "linear": 125, "attention": 700, "mlp": 632, "loss": 524}
COMPUTES = [  # for each rung of TRAINING: op -> what computed it, and its lines
    (EAGER | SDPA, dict.fromkeys(OUR_LINES, 0)),
    (EAGER | SDPA, dict.fromkeys(OUR_LINES, 0)),
    (TRITON | {"attention": "triton (triton 3.6.0)"}, OUR_LINES),
    (GLUON | {"attention": "gluon (triton 3.6.0)"}, OUR_LINES),
    (GLUON | {"attention": "flash (fa4, flash-attn-4 4.0.0b36)"}, OUR_LINES | {"attention": 0}),
    (GLUON | {"attention": "gluon (triton 3.6.0)"}, OUR_LINES),
]


def place(row, words, minute=0, **env):
    """Return the row as one of a sitting on an H100, started by a command with these words."""
    row = row | {
        "started": f"2026-11-27T10:{minute:02}:00+0000",
        "env": ENV | {"device": "NVIDIA H100", "gpu": "a"} | env,
    }
    return row | {"command": f"python train.py +experiment=throughput precision=bf16 {words} out_dir=out/rungs/1"}


def training_row(number, minute=0, **env):
    """Return the row of a rung of TRAINING: 20% faster than the rung before."""
    words, (kernels, lines) = list(TRAINING)[number], COMPUTES[number]
    row = make_row("triton", "flash", "fp8" if "fp8" in words else "bf16", scale=1.2**-number)
    row |= {"kernels": kernels | {"compile": "compile" in words}}
    row["receipt"] |= {"lines": lines}
    return place(row, words, minute, **env)


def decoding_row(decode, kernels, ms, minute=30, **env):
    row = make_generation_row(decode, kernels, ms=ms)
    row["kernels"] |= {"decode": f"{decode} (cuda 13.0, nvrtc)", "compile": kernels == "compile"}
    if decode == "blocks":
        row["kernels"] = EAGER | SDPA | {"decode": "blocks", "compile": kernels == "compile"}
        row["receipt"] |= {"lines": dict.fromkeys(["norm", "linear", "attention", "mlp", "loss"], 0)}
    else:
        row["receipt"] |= {"lines": {"decode": 1594}}
    if decode == "persistent_int8":
        row["proof"] |= {"ok": None, "why": "kernels.decode=persistent_int8 rounds the weights"}
    return place(row, f"kernels={kernels} attn=sdpa kernels.decode={decode}", minute, **env)


def whole_sitting():
    """Return (rows of training, rows of decoding): all rungs, in another order than the ladder's."""
    training = [training_row(number, number) for number in reversed(range(len(TRAINING)))]
    decoders = [("blocks", "compile", 0.5), ("persistent", "eager", 0.15), ("persistent_int8", "eager", 0.14)]
    decoders += [("triton", "eager", 0.2), ("blocks", "eager", 0.8)]
    return training, [decoding_row(*decoder) for decoder in decoders]


def keep(results, training, decoding=()):
    for name, rows in (("train", training), ("generate", decoding)):
        lab_rows.append_rows(results / f"h100-rungs/{name}.jsonl", list(rows))


def tables(text):
    """Return the cells of each Markdown table in a text, without its head."""
    lines = [line for line in text.splitlines() if not line.startswith("|--")]
    blocks = [block.splitlines() for block in "\n".join(lines).split("\n\n") if block.startswith("| ")]
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in block[1:]] for block in blocks]


def test_without_rows_the_section_names_the_command_that_measures_them(results):
    assert rungs("h100-rungs") == "Not measured yet: `scripts/measure.sh rungs`."


def test_a_sitting_becomes_two_tables_in_the_order_of_the_ladder(results):
    keep(results, *whole_sitting())
    training, decoding = tables(rungs("h100-rungs"))
    assert [line[0].strip("`") for line in training] == list(TRAINING)
    assert [line[0].strip("`") for line in decoding] == list(DECODING)
    assert [line[1] for line in training] == [
        "attention: sdpa (cudnn); the rest: eager",
        "torch.compile; attention: sdpa (cudnn); the rest: eager",
        "triton",
        "mlp, loss: gluon (cuBLAS matmuls); attention: gluon; norm, linear: triton",
        "mlp, loss: gluon (cuBLAS matmuls); attention: flash (fa4, flash-attn-4 4.0.0b36); norm, linear: triton",
        "mlp, loss: gluon (cuBLAS matmuls); attention: gluon; norm, linear: triton",
    ]
    assert [line[2] for line in training] == ["0", "0", "2,555", "2,555", "1,855 and a library", "2,555"]
    speeds = [float(line[3].strip("*").replace(",", "")) for line in training]
    assert speeds == sorted(speeds)
    text = rungs("h100-rungs")
    when = ", commit f3adfe0, 2026-11-27:\n\n| rung"
    assert text.startswith(f"Training `gpt2_124m`, 64 sequences of 1,024 tokens a step{when}")
    assert f"\n\nDecoding `gpt2_124m`, 1 sequence, 128 tokens after a prompt of 128{when}" in text
    assert [line[5:] for line in training] == [["18.7", "8.3 s", "5.800"]] * 6
    assert [line[2] for line in decoding] == ["0", "0", "1,594", "1,594", "1,594"]
    assert [line[5:] for line in decoding] == [["0.34", "21.2 s"]] * 5
    assert decoding[1][1] == "torch.compile; attention: sdpa (cudnn); the rest: eager"
    assert decoding[4][1] == "persistent_int8 (nvrtc); not exact: kernels.decode=persistent_int8 rounds the weights"


def test_the_gain_is_over_the_line_above_and_fp8_over_its_bf16(results):
    keep(results, *whole_sitting())
    training, decoding = tables(rungs("h100-rungs"))
    assert training[0][4] == decoding[0][4] == ""
    ratios = [float(line[4].split("x")[0]) for line in training[1:]]
    assert ratios == pytest.approx([1.2, 1.2, 1.2, 1.2, 1.44], rel=0.01)
    assert training[5][4].endswith("x of `kernels=gluon attn=gluon`")
    ratios = [float(line[4].removesuffix("x")) for line in decoding[1:]]
    assert ratios == pytest.approx([0.8 / 0.5, 0.5 / 0.2, 0.2 / 0.15, 0.15 / 0.14], rel=0.02)


def test_repeats_of_a_sitting_give_an_interval(results):
    """The first step is of the first run, because the others find compiled kernels."""
    rows = [training_row(number, minute) for minute in (0, 20, 40) for number in (0, 1)]
    for minute, row in zip((0, 0, 20, 20, 40, 40), rows, strict=True):
        row["perf/first_step_s"] = 30.0 - minute / 2
    keep(results, reversed(rows))
    [training] = tables(rungs("h100-rungs"))
    assert [line[6] for line in training] == ["30.0 s", "30.0 s"]
    assert "x (1.1" in training[1][4]
    assert "Several runs of a rung give the 95% interval" in rungs("h100-rungs")
    assert training[1][4].startswith("1.2")


def test_the_note_has_the_machine_and_the_rungs_that_are_missing(results):
    """The gain of a rung is then over the rung before the missing one."""
    rows = [training_row(number) for number in (0, 1, 3, 5)]
    missing = {"status": "unavailable: attention=flash cannot run here: pip install 'x[<y>]'"}
    flash = {key: value for key, value in training_row(4).items() if not key.startswith(("perf/", "mem/"))} | missing
    keep(results, [*rows, flash])
    text = rungs("h100-rungs")
    [training] = tables(text)
    assert [line[0].strip("`") for line in training] == [list(TRAINING)[number] for number in (0, 1, 3, 5)]
    assert float(training[2][4].split("x")[0]) == pytest.approx(1.44, rel=0.01)
    assert training[3][4].endswith("x")  # its bf16 is the line above
    assert "of one sitting on one H100 (driver 580.159.04, torch 2.11.0+cu130, triton 3.6.0): `scripts/" in text
    reason = r"unavailable: attention=flash cannot run here: pip install 'x\[&lt;y>]'"
    assert f"`kernels=gluon attn=flash` is left out: {reason}." in text
    assert "`kernels=triton attn=triton` is left out: it was not measured." in text
    assert "adamw" not in text


def test_the_note_names_the_optimizers_backend_and_no_line_counts_it(results):
    rows = [training_row(number) for number in (0, 1)]
    for row in rows:
        row["kernels"]["adamw"] = "auto (triton: triton 3.6.0)"
        row["receipt"]["lines"]["adamw"] = 100
    keep(results, rows)
    text = rungs("h100-rungs")
    [training] = tables(text)
    assert training[0][1:3] == ["attention: sdpa (cudnn); the rest: eager", "0"]
    assert "All lines of training update the weights with adamw=triton." in text


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"gpu": "b"}, "gpu: b, baseline a"),
        ({"driver": "590"}, "driver: 590, baseline 580.159.04"),
        ({"torch": "2.13.0"}, "torch: 2.13.0, baseline 2.11.0+cu130"),
        ({"git_commit": "0" * 40}, f"git_commit: {'0' * 40}, baseline f3adfe01"),
        ({"device": "NVIDIA H200"}, "device: NVIDIA H200, baseline NVIDIA H100"),
    ],
)
@pytest.mark.parametrize("kind", ["training", "decoding"])
def test_rungs_of_two_machines_or_commits_are_refused(results, env, reason, kind):
    """Also if the older rows of the rung are of the sitting: only the newest row counts."""
    training, decoding = whole_sitting()
    if kind == "training":
        training += [training_row(3, **env)]
    else:
        decoding += [decoding_row("triton", "eager", 0.2, **env)]
    keep(results, training, decoding)
    with pytest.raises(UserError, match=r"^results/h100-rungs: the rungs are not of one sitting") as error:
        rungs("h100-rungs")
    assert reason in str(error.value)
    assert str(error.value).endswith(": measure them together: scripts/measure.sh rungs")


def test_each_table_may_be_of_a_sitting_of_its_own(results):
    """No line compares the two. Each title names its commit, and the note the versions of both."""
    training, decoding = whole_sitting()
    for row in decoding:
        row["env"] |= {"gpu": "b", "git_commit": "a" * 40, "driver": "581.1"}
        row["started"] = "2026-12-01T10:00:00+0000"
    keep(results, training, decoding)
    text = rungs("h100-rungs")
    assert len(tables(text)) == 2
    assert "tokens a step, commit f3adfe0, 2026-11-27:" in text
    assert "a prompt of 128, commit aaaaaaa, 2026-12-01:" in text
    versions = [f"one H100 (driver {driver}, torch 2.11.0+cu130, triton 3.6.0)" for driver in ("580.159.04", "581.1")]
    assert f"of one sitting on {versions[0]}, or {versions[1]}: `scripts/measure.sh rungs`" in text


def test_rungs_of_another_day_or_other_settings_are_refused(results):
    training, decoding = whole_sitting()
    late = training_row(3) | {"started": "2026-11-27T16:20:00+0000"}
    keep(results, [*training, late], decoding)
    with pytest.raises(UserError, match=r"started: 2026-11-27T16:20:00\+0000, baseline 2026-11-27T10:00:00"):
        rungs("h100-rungs")
    longer = training_row(3)
    longer["config"]["train"] |= {"batch_size": 32}
    keep(results, [longer])
    with pytest.raises(UserError, match=r"train\.batch_size: 32, baseline 64"):
        rungs("h100-rungs")


def test_a_sitting_with_changes_that_no_commit_has_is_refused(results):
    for sha in ("0" * 40 + "-dirty", None):
        keep(results, [training_row(number, git_commit=sha) for number in (0, 1)])
        with pytest.raises(UserError, match=f"is of the commit {sha}, with changes that no commit has"):
            rungs("h100-rungs")


def test_a_later_sitting_replaces_an_earlier_one(results, called, monkeypatch, tmp_path):
    """An incomplete one is an error of scripts.report, in one line."""
    training, decoding = whole_sitting()
    keep(results, training, decoding)
    later = [row | {"env": row["env"] | {"gpu": "b"}} for row in [*training, *decoding]]
    monkeypatch.setattr("lab.report.readmes.ROOT", tmp_path)
    (tmp_path / "README.md").write_text("<!-- rungs: h100-rungs -->\n<!-- end -->\n")
    keep(results, later[:3])
    code, out, err = called("report.py", report.main)
    assert (code, out) == (1, "")
    assert err.startswith("error: results/h100-rungs: the rungs are not of one sitting")
    assert err.count("\n") == 1
    keep(results, later[3:6], later[6:])
    assert len(tables(rungs("h100-rungs"))) == 2


@pytest.mark.parametrize(("name", "ladder"), [("rungs", TRAINING), ("decoding_rungs", DECODING)])
def test_the_sweep_measures_every_rung(name, ladder):
    """Its jobs are the rungs, in their order. train.py or scripts.generate takes each of them."""
    text = yaml.safe_load((ROOT / f"configs/sweep/{name}.yaml").read_text())
    jobs = sweep_jobs(**text["hydra"]["sweeper"])
    for job, words in zip(jobs, ladder, strict=True):
        row = {"command": " ".join(job), "config": {"max_new_tokens": 128} if ladder is DECODING else {}}
        assert choice_words(row) == set(words.split())
        if ladder is TRAINING:
            # the program adds choices to attn=
            cfg = config(*(re.sub("^attn=", "attn.impl=", word) for word in job))
            assert (cfg.train.batch_size, cfg.train.block_size, cfg.proof) == (64, 1024, True)
            continue
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            cfg = parse(compose("generate", overrides=job), generate.Config)
        assert (cfg.batch, cfg.prompt_tokens, cfg.max_new_tokens, cfg.model.n_layer) == (1, 128, 128, 12)
    assert text["sweep"] == {"own_caches": True}


def sweep_jobs(params, ablations):
    """Return the overrides of each job of a sweep, without composing a config."""
    jobs = []
    sweeper = Sweeper(params, ablations)
    sweeper.hydra_context = SimpleNamespace(config_loader=None)
    sweeper.uncalled_keys = lambda words: set()
    sweeper.validate_batch_is_legal = lambda _: None
    sweeper.launcher = SimpleNamespace(launch=lambda found, initial_job_idx: jobs.extend(found) or [])
    sweeper.sweep([])
    return jobs
