"""Comparisons of made-up rows that are known to be faster, slower or a tie."""

import math
import random
from statistics import NormalDist

import pytest

from lab.sweep import compare


def make_run(step_ms, *, spread=0.002, process=0.001, drift=0.0, seed=0, intervals=12, **config_changes):
    """Return the row of a run. Its intervals vary by `spread`; `process` is how much runs differ from each other."""
    draw = random.Random(seed)
    level = step_ms / 1e3 * (1 + drift) * (1 + draw.gauss(0, process))
    row = {"status": "ok", "perf/laps_s": [level * (1 + draw.gauss(0, spread)) for _ in range(intervals)]}
    config = {"precision": "amp", "kernels": {"norm": "eager"}, "train": {"batch_size": 64}, **config_changes}
    return row | {"config": config, "env": {"device": "H200", "torch": "2.11.0"}, "perf/step_ms": step_ms}


def make_runs(step_ms, count, seed, **settings):
    return [make_run(step_ms, seed=1000 * seed + i, **settings) for i in range(count)]


COMPARISONS = 100


def count_ties(count, **noise):
    """Return how many of COMPARISONS comparisons of two equal programs, `count` runs each, are a tie."""
    runs = [make_runs(100, count, seed, **noise) for seed in range(2 * COMPARISONS)]
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return sum(compare.ratio(rows, bases).verdict == "tie" for rows, bases in pairs)


# Each 95% interval should contain 1. The probability that fewer than this many intervals do is 1 in 1,000
FEWEST_TIES = COMPARISONS * 0.95 + NormalDist().inv_cdf(0.001) * (COMPARISONS * 0.95 * 0.05) ** 0.5


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [2, 5])
def test_equal_programs_are_a_tie(count):
    """The noise is far above RESOLUTION, which would otherwise decide the verdict."""
    assert count_ties(count, process=0.02, spread=0.002) >= FEWEST_TIES


@pytest.mark.exhaustive
@pytest.mark.parametrize("intervals", [2, 5])
def test_equal_programs_are_a_tie_with_one_run_of_few_intervals(intervals):
    """The runs differ by their intervals only, because one run each shows no other noise."""
    assert count_ties(1, process=0.0, spread=0.02, intervals=intervals) >= FEWEST_TIES


def test_the_interval_has_95_percent():
    """It ends 1.96 standard errors from the mean. An interval of 90% would end 1.64 from it.

    The log ratios of 100 pairs have a spread of 10%. The quantiles of 1000 draws are off by up to 10%.
    """
    spread = 0.1
    logs = [spread * NormalDist().inv_cdf((i + 0.5) / 100) for i in range(100)]
    rows = [make_run(100, spread=0, process=0, intervals=1) | {"perf/laps_s": [math.exp(-log)]} for log in logs]
    ratio = compare.ratio(rows, [row | {"perf/laps_s": [1.0]} for row in rows])
    for end in (-math.log(ratio.low), math.log(ratio.high)):
        assert end - math.log1p(compare.RESOLUTION) == pytest.approx(1.96 * spread / 100**0.5, rel=0.1)


@pytest.mark.parametrize(
    ("runs", "t"), [(3, 4.303), (4, 3.182), (5, 2.776), (6, 2.571), (9, 2.306), (11, 2.228), (21, 2.086), (101, 1.984)]
)
def test_few_runs_have_the_interval_of_students_t(runs, t):
    """t is from a table, at 97.5%. A bootstrap's variance lacks the factor n / (n - 1), and it has 1.96 for t."""
    assert compare.widening(runs) == pytest.approx((runs / (runs - 1)) ** 0.5 * t / 1.96, rel=0.006)


def test_one_interval_each_has_no_ratio():
    """One interval does not show its noise, but one interval of each of two runs does."""
    assert compare.ratio([make_run(100, intervals=1)], [make_run(100, intervals=1)]) is None
    assert compare.ratio(make_runs(100, 2, 1, intervals=1), make_runs(100, 2, 2, intervals=1)) is not None


def test_five_percent_is_no_tie():
    for seed in range(20):
        ratio = compare.ratio(make_runs(105, 3, seed), make_runs(100, 3, seed + 100))
        assert ratio.verdict == "slower"
        assert ratio.low < 100 / 105 < ratio.high
        assert (ratio.runs, str(ratio)[:2]) == (3, "0.")
    assert compare.ratio(make_runs(100, 3, 1), make_runs(105, 3, 2)).verdict == "faster"


def test_a_difference_below_the_resolution_is_a_tie():
    exact = {"process": 0.0, "spread": 0.0}
    assert compare.ratio(make_runs(100, 3, 1, **exact), make_runs(100.4, 3, 2, **exact)).verdict == "tie"
    assert compare.ratio(make_runs(100, 3, 1, **exact), make_runs(100.6, 3, 2, **exact)).verdict == "faster"


def test_a_drift_cancels_in_the_order_abba():
    """The machine slows down by 1% a run: in A B B A the ratio is 1, and in A A B B it is 0.98."""
    exact = {"process": 0.0, "spread": 0.0}
    in_order = [make_run(100, drift=0.01 * i, **exact) for i in range(4)]
    assert compare.ratio([in_order[1], in_order[2]], [in_order[0], in_order[3]]).value == pytest.approx(1, abs=1e-3)
    assert compare.ratio(in_order[2:], in_order[:2]).value == pytest.approx(0.98, abs=2e-3)


@pytest.mark.parametrize("intervals", [12, 13])
def test_a_pause_in_one_interval_does_not_count(intervals):
    """The median of the intervals' ratios counts, also for runs of different lengths."""
    exact = {"process": 0.0, "spread": 0.0}
    rows = make_runs(100, 2, 1, intervals=intervals, **exact)
    for row in rows:
        row["perf/laps_s"][3] *= 10
    assert compare.ratio(rows, make_runs(100, 2, 2, **exact)).value == pytest.approx(1)


def test_each_interval_is_compared_with_the_interval_of_the_same_steps():
    """In every run, the same batches take 4% longer. With 5 intervals this would hide a difference of 3%."""
    pattern = [1.0, 1.04, 1.01, 1.045, 1.005]

    def three_runs(step_ms, seed):
        rows = make_runs(step_ms, 3, seed, process=0.002, intervals=5)
        for row in rows:
            row["perf/laps_s"] = [a * b for a, b in zip(row["perf/laps_s"], pattern, strict=True)]
        return rows

    for seed in range(20):
        ratio = compare.ratio(three_runs(103, seed), three_runs(100, seed + 100))
        assert ratio.verdict == "slower"
        # 4 standard deviations: two choices of 3 runs, each a median of 5 intervals (pi / 2 times a mean's variance)
        assert ratio.value == pytest.approx(100 / 103, abs=4 * 0.002 * (2 * 1.57 / 5 / 3 + 2 / 3) ** 0.5)
    # runs of different lengths are compared by their medians, which may be off by the range of the pattern
    stopped = [row | {"perf/laps_s": row["perf/laps_s"][:4]} for row in three_runs(115, 1)]
    assert compare.ratio(stopped, three_runs(100, 2)).value == pytest.approx(100 / 115, abs=0.04)


def test_runs_are_compared_on_the_same_gpu():
    """The order of the runs does not matter. If no GPU ran both choices, the ratio says so."""
    exact = {"process": 0.0, "spread": 0.0}
    first, other = ({"env": {"device": "H200", "gpu": gpu}} for gpu in ("a", "b"))
    rows = [make_run(100, **exact) | first, make_run(110, **exact) | other]
    ratio = compare.ratio(rows, rows[::-1])
    assert (ratio.value, ratio.runs, ratio.other_gpu) == (pytest.approx(1), 2, False)
    assert compare.ratio(rows[1:], rows).value == pytest.approx(1)
    assert str(compare.ratio(rows[:1], rows[1:])).endswith(", 1 run, other GPU)")


def test_very_different_runs_give_a_wide_interval():
    ratio = compare.ratio([make_run(100), make_run(1)], [make_run(100), make_run(100)])
    assert str(ratio) == "tie (0.000 to over 100)"


def test_a_row_without_a_speed_is_not_compared():
    wrong = make_run(50) | {"status": "wrong: losses"}
    assert compare.ratio([wrong], [make_run(100)]) is None
    assert compare.ratio([make_run(100)], [wrong]) is None
    assert compare.payback_steps(wrong, make_run(100)) is None


def test_differences_name_everything_but_the_kernels_and_the_folder():
    base, other = make_run(100), make_run(100, kernels={"norm": "triton"}, out_dir="elsewhere")
    assert compare.differences(other, base) == []
    other = make_run(100, precision="bf16", train={"batch_size": 32}) | {"env": {"device": "H100", "torch": "2.11.0"}}
    assert compare.differences(other, base) == [
        "precision: bf16, baseline amp",
        "train.batch_size: 32, baseline 64",
        "device: H100, baseline H200",
    ]
    old, new = make_run(100), make_run(100, proof=True, train={"batch_size": 64, "overfit": True})  # two versions' keys
    assert compare.differences(new, old) == ["proof: True, baseline None", "train.overfit: True, baseline None"]
    assert compare.differences(old, new) == ["proof: None, baseline True", "train.overfit: None, baseline True"]
    other = base | {"world_size": 2, "env": base["env"] | {"git_commit": "b"}}
    base["env"]["git_commit"] = "a"
    assert compare.differences(other, base) == ["GPUs: 2, baseline 1", "git_commit: b, baseline a"]


def make_generation(step_ms, *, accepted=1.0, batch=4, intervals=9, **generate):
    """Return the row of a generation whose steps take exactly `step_ms`, and add `accepted` tokens a sequence."""
    row = {"status": "ok", "env": {"device": "H200"}, "gen/laps_s": [step_ms / 1e3 / accepted] * intervals}
    row |= {"gen/accepted_tokens": accepted, "gen/sequences": batch}
    options = {"kv": "auto", "speculate": None, "draft_tokens": 4, **generate}
    config = {"batch": batch, "max_new_tokens": 128, "kernels": {"decode": "blocks"}, "generate": options}
    return row | {"config": config}


def test_generations_are_compared_by_their_tokens_per_second():
    """With a draft, a step takes longer and adds more tokens, so the run has fewer steps."""
    plain = make_generation(0.5)
    assert compare.ratio([make_generation(0.4)], [plain]).value == pytest.approx(1.25)
    draft = make_generation(0.6, accepted=1.8, intervals=5, speculate="ngram")
    assert compare.ratio([draft], [plain]).value == pytest.approx(1.8 * 0.5 / 0.6)
    # --force also compares other batches: 2,000 and 8,000 tokens/s
    assert compare.ratio([make_generation(0.5, batch=4)], [make_generation(0.5, batch=1)]).value == pytest.approx(4)
    without_counts = {key: value for key, value in plain.items() if key not in ("gen/accepted_tokens", "gen/sequences")}
    assert compare.ratio([without_counts], [plain]).value == pytest.approx(1)
    without_intervals = {key: value for key, value in plain.items() if key != "gen/laps_s"}
    assert compare.ratio([without_intervals], [plain]) is None
    assert compare.ratio([plain], [plain | {"status": "wrong: 3 tokens"}]) is None


def test_a_draft_and_the_dtype_of_the_cache_are_choices_and_a_batch_is_not():
    plain = make_generation(0.5)
    for choice in ({"speculate": "ngram"}, {"kv": "fp8"}, {"draft_tokens": 2}):
        assert compare.differences(make_generation(0.5, **choice), plain) == []
    assert compare.differences(make_generation(0.5, batch=8), plain) == ["batch: 8, baseline 4"]
    longer = make_generation(0.5)
    longer["config"]["max_new_tokens"] = 256
    assert compare.differences(longer, plain) == ["max_new_tokens: 256, baseline 128"]


def test_a_run_that_never_started_matches_any_machine():
    unavailable = {key: value for key, value in make_run(100).items() if key != "env"}
    assert compare.differences(unavailable, make_run(100)) == compare.differences(make_run(100), unavailable) == []


def test_payback_of_a_longer_start():
    eager, compiled = make_run(160) | {"perf/first_step_s": 1.0}, make_run(120) | {"perf/first_step_s": 21.0}
    assert compare.payback_steps(compiled, eager) == pytest.approx(500)
    assert compare.payback_steps(eager, compiled) == 0
    assert compare.payback_steps(make_run(170) | {"perf/first_step_s": 9.0}, eager) is None
