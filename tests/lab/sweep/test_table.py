"""The table of a sweep has columns for training or for generation, and compares choices at equal settings."""

import statistics

import pytest

from lab.sweep.table import median_run, speed, sweep_table


def make_run(decode="blocks", tokens_per_sec=2000.0, batch=1, status="ok", **changes):
    """Return the row of a generation in which every step takes equally long."""
    step_s = batch / tokens_per_sec
    config = {"batch": batch, "max_new_tokens": 128, "kernels": {"decode": decode}, "generate": {"speculate": None}}
    speeds = {
        f"gen/decode_tokens_per_sec{part}": tokens_per_sec + d for part, d in (("", 0), ("/p20", -5), ("/p80", 5))
    }
    figures = {"gen/token_ms/p50": 1e3 * step_s, "gen/token_ms/p99": 1.5e3 * step_s, "gen/laps_s": [step_s] * 8}
    figures |= {"gen/bandwidth_utilisation": 0.125, "gen/ttft_ms": 7.25, "gen/warmup_s": 21.25}
    figures |= {"mem/peak_allocated_gib": 0.344, "gen/accepted_tokens": 1.0}
    return {"status": status, "config": config, "env": {"device": "H200"}, **speeds, **figures, **changes}


def cells(table):
    """Return the cells of each line, which two or more spaces separate. Empty cells are left out."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table.splitlines()]


HEAD = ["job", "tokens/s", "of the first", "p20 to p80", "ms a token p50 / p99", "of the bound", "first token"]
HEAD += ["peak GiB", "start"]


def test_generation_has_columns_of_its_own():
    table = cells(sweep_table({"1-blocks": [make_run()], "2-triton": [make_run("triton", 4000.0)]}))
    rest = ["12.5%", "7.2 ms", "0.34", "21.2 s"]
    assert table == [
        HEAD,
        ["2-triton", "4,000", "2.000x (1.990 to 2.010, 1 run)", "3,995 to 4,005", "0.25 / 0.38", *rest],
        ["1-blocks", "2,000", "1,995 to 2,005", "0.50 / 0.75", *rest],
    ]


@pytest.mark.parametrize(("speeds", "median"), [([5.0], 5), ([1.0, 9.0, 5.0], 5), ([9.0, 1.0], 1), ([7, 1, 9, 5], 5)])
def test_the_median_run_is_the_slower_of_two(speeds, median):
    """A table must not show the faster of two runs."""
    assert speed(median_run([make_run(tokens_per_sec=value) for value in speeds])) == median


def test_each_choice_is_compared_with_the_first_of_its_settings():
    """The jobs are two decoders at three batches. The first job at batch 64 has no speed, and so no ratio."""
    choices = {
        "1-blocks-1": [make_run()],
        "2-blocks-8": [make_run(batch=8, tokens_per_sec=10_000.0)],
        "3-blocks-64": [make_run(batch=64, status="oom")],
        "4-triton-1": [make_run("triton", 3000.0)],
        "5-triton-8": [make_run("triton", 15_000.0, batch=8)],
        "6-triton-64": [make_run("triton", 30_000.0, batch=64)],
    }
    ratios = {line[0]: line[2].split(" ")[0] for line in cells(sweep_table(choices))[1:-1]}
    assert ratios == {
        "1-blocks-1": "1,995",  # the next column, because the cell of the ratio is empty
        "2-blocks-8": "9,995",
        "4-triton-1": "1.500x",
        "5-triton-8": "1.500x",
        "6-triton-64": "29,995",
    }
    assert cells(sweep_table(choices))[-1] == ["3-blocks-64", "oom"]


def make_laps(*laps):
    """Return the row of a generation with these seconds for a token, whose speed is their median, as in a real row."""
    return make_run(tokens_per_sec=1 / statistics.median(laps), **{"gen/laps_s": laps})


def test_the_order_follows_the_ratio():
    """A ratio compares intervals in pairs, so it may contradict the medians that are the tokens/s."""
    laps = {"1": [0.1] * 4 + [0.2] * 5, "2": [0.06] * 5 + [0.14] * 4, "3": [0.07] * 9}
    table = cells(sweep_table({name: [make_laps(*seconds)] for name, seconds in laps.items()}))
    assert [line[:2] for line in table[1:]] == [["3", "14"], ["2", "17"], ["1", "5"]]
    assert [line[2].split(" ")[0] for line in table[1:3]] == ["2.857x", "1.667x"]


def make_training(tokens_per_sec, **figures):
    """Return the row of a training in which every step takes equally long."""
    keys = [f"perf/tokens_per_sec{part}" for part in ("", "/p20", "/p80")]
    row = {"status": "ok", "config": {"seed": 1}, "env": {}, **dict.fromkeys(keys, tokens_per_sec)}
    return row | {"perf/laps_s": [1 / tokens_per_sec] * 8, "train/loss": 3.0, **figures}


LOSSES = {
    "1-fast": [make_training(4000.0, **{"val/loss": 2.5, "val/loss/min": 2.25})],
    "2-old": [make_training(1000.0, **{"val/loss": 2.125})],  # of a version without the lowest loss
    "3-best": [make_training(2000.0, **{"val/loss": 2.75, "val/loss/min": 2.0})],
    "4-none": [make_training(3000.0)],
    "5-wrong": [make_training(9000.0, **{"val/loss/min": 1.0}) | {"status": "wrong: losses"}],
}


@pytest.mark.parametrize(("sort", "order"), [("speed", "1432"), ("val/loss", "3214")])
def test_the_lowest_validation_loss_is_marked_and_may_decide_the_order(sort, order):
    """The run's lowest loss counts, as for `best` in checkpoints/. A wrong run has none."""
    head, *lines = cells(sweep_table(LOSSES, sort))
    assert head[-1] == "val loss"
    assert "".join(line[0][0] for line in lines) == f"{order}5"
    losses = {line[0]: line[-1] for line in lines}
    assert losses == {"1-fast": "2.2500", "2-old": "2.1250", "3-best": "best 2.0000", "4-none": "3.000"} | {
        "5-wrong": "wrong: losses"
    }


def test_a_run_too_short_for_a_speed_has_its_loss():
    short = make_training(1.0, **{"val/loss/min": 1.5}) | {"perf/tokens_per_sec": None, "perf/laps_s": []}
    lines = cells(sweep_table(LOSSES | {"6-short": [short]}, "val/loss"))
    assert lines[1] == ["6-short", "too short", "3.000", "best 1.5000"]
    assert cells(sweep_table(LOSSES | {"6-short": [short]}))[5][:2] == ["6-short", "too short"]


def test_among_equal_losses_the_fastest_is_first():
    equal = {str(speed): [make_training(speed, **{"val/loss/min": 2.0})] for speed in (1000.0, 3000.0, 2000.0)}
    lines = cells(sweep_table(equal, "val/loss"))[1:]
    assert [line[1] for line in lines] == ["3,000", "2,000", "1,000"]
    assert [line[-1] for line in lines] == ["best 2.0000"] * 3


def test_a_sweep_without_evaluations_has_no_such_column():
    assert "val loss" not in sweep_table({name: LOSSES[name] for name in ("4-none", "5-wrong")})


def test_accepted_tokens_have_a_column_if_any_row_drafts():
    draft = make_run(tokens_per_sec=3000.0, **{"gen/accepted_tokens": 1.625, "gen/speedup": 1.25})
    draft["config"] = draft["config"] | {"generate": {"speculate": "ngram"}}
    table = cells(sweep_table({"1-plain": [make_run()], "2-draft": [draft]}))
    assert table[0] == [*HEAD, "accepted", "speed-up by drafts"]
    assert [line[-1] for line in table[1:]] == ["1.25x", "21.2 s"]
    assert table[1][-2] == "1.62"
    assert table[1][2].startswith("1.500x")


@pytest.mark.parametrize("key", ["gen/token_ms/p50", "gen/laps_s", "gen/sequences", "gen/accepted_tokens"])
def test_old_and_short_runs_lack_some_figures(key):
    """A missing figure empties at most one cell, and a run of a single step has no speed."""
    old = {name: value for name, value in make_run("triton", 4000.0).items() if name != key}
    complete, table = (
        cells(sweep_table({"1": [make_run()], "2": [row]}))[1] for row in (make_run("triton", 4000.0), old)
    )
    assert len(complete) - len(table) == (key in ("gen/token_ms/p50", "gen/laps_s"))
    short = make_run() | {"gen/decode_tokens_per_sec": None, "gen/laps_s": []}
    assert cells(sweep_table({"1": [short]}))[-1] == ["1", "too short"]


def test_a_repeat_that_died_before_it_had_an_environment_has_no_part_in_the_table():
    dead = {"name": "1-blocks.2", "command": "python train.py", "status": "failed: exit code -9 (Killed)"}
    runs = {"1-blocks": [make_run(), dead], "2-triton": [make_run("triton", 4000.0), make_run("triton", 4000.0)]}
    assert [line[:3] for line in cells(sweep_table(runs))[1:]] == [
        ["2-triton", "4,000", "2.000x (1.990 to 2.010, 1 run)"],
        ["1-blocks", "2,000", "1,995 to 2,005"],
    ]


def test_the_rest_of_a_line_is_the_median_run():
    runs = [make_run(tokens_per_sec=speed, **{"gen/ttft_ms": speed / 1000}) for speed in (5000.0, 2000.0, 3000.0)]
    [line] = cells(sweep_table({"1": runs}))[1:]
    assert (line[1], line[2], line[5]) == ("3,000", "2,995 to 3,005", "3.0 ms")


def test_a_backend_that_is_slower_than_eager_is_marked():
    """The column appears if a row has such a backend. Older rows have no key `slower`."""
    known = {"ms": 7.29, "baseline": "eager", "baseline_ms": 3.42, "at": None, "date": "2026-11-27"}
    compiled = known | {"ms": 3.42, "baseline": "compile", "baseline_ms": 3.1}
    marked = make_run("triton", 1000.0, slower={"mlp": known, "norm": compiled})
    table = cells(sweep_table({"1-old": [make_run()], "2-fast": [make_run(slower={})], "3-slow": [marked]}))
    assert table[0] == [*HEAD, "slower than eager"]
    assert [line[-1] for line in table[1:]] == ["21.2 s", "21.2 s", "mlp 2.13x, norm 1.10x of compile"]
    assert cells(sweep_table({"1-old": [make_run()], "2-fast": [make_run(slower={})]}))[0] == HEAD
