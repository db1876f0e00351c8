"""Is it faster, slower, or can nobody tell: of rows made up with a known answer."""

import random
from statistics import NormalDist

import pytest

from runtime import compare


def run(step_ms, *, spread=0.002, process=0.001, drift=0.0, seed=0, laps=12, **changes):
    """The row of a run: its laps differ by `spread`, and all of them by what the process drew, `process`."""
    draw = random.Random(seed)
    level = step_ms / 1e3 * (1 + drift) * (1 + draw.gauss(0, process))
    row = {"status": "ok", "perf/laps_s": [level * (1 + draw.gauss(0, spread)) for _ in range(laps)]}
    config = {"precision": "amp", "kernels": {"norm": "eager"}, "train": {"batch_size": 64}, **changes}
    return row | {"config": config, "env": {"device": "H200", "torch": "2.11.0"}, "perf/step_ms": step_ms}


def runs(step_ms, count, seed, **how):
    return [run(step_ms, seed=1000 * seed + i, **how) for i in range(count)]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_same_program_twice_is_a_tie(count):
    """Of 200 comparisons of two that are alike, 95% of the intervals hold 1: at least 180 do but once in 1,000."""
    least = 200 * 0.95 + NormalDist().inv_cdf(0.001) * (200 * 0.95 * 0.05) ** 0.5
    noise = {"process": 0.02, "spread": 0.002}  # far beyond RESOLUTION, which would hide all else
    ties = sum(
        compare.ratio(runs(100, count, 2 * i, **noise), runs(100, count, 2 * i + 1, **noise)).verdict == "tie"
        for i in range(200)
    )
    assert ties >= least


@pytest.mark.parametrize("laps", [2, 3, 5])
def test_a_few_laps_of_one_run_are_a_tie(laps):
    """The same; here the laps are all that differs, as one run each knows of no other noise."""
    least = 200 * 0.95 + NormalDist().inv_cdf(0.001) * (200 * 0.95 * 0.05) ** 0.5
    noise = {"process": 0.0, "spread": 0.02, "laps": laps}
    ties = sum(
        compare.ratio(runs(100, 1, 2 * i, **noise), runs(100, 1, 2 * i + 1, **noise)).verdict == "tie"
        for i in range(200)
    )
    assert ties >= least
    assert compare.ratio([run(100, laps=1)], [run(100, laps=1)]) is None  # there is nothing to tell its noise from
    assert compare.ratio(runs(100, 2, 1, laps=1), runs(100, 2, 2, laps=1)) is not None


def test_five_percent_is_no_tie():
    for seed in range(20):
        found = compare.ratio(runs(105, 3, seed), runs(100, 3, seed + 100))
        assert found.verdict == "slower"
        assert found.low < 100 / 105 < found.high
        assert (found.runs, str(found)[:2]) == (3, "0.")
    assert compare.ratio(runs(100, 3, 1), runs(105, 3, 2)).verdict == "faster"


def test_less_than_the_resolution_is_a_tie():
    exact = {"process": 0.0, "spread": 0.0}
    assert compare.ratio(runs(100, 3, 1, **exact), runs(100.4, 3, 2, **exact)).verdict == "tie"
    assert compare.ratio(runs(100, 3, 1, **exact), runs(100.6, 3, 2, **exact)).verdict == "faster"


def test_a_drift_cancels_in_abba():
    """A machine that slows down by 1% a run: A B B A is a tie at 1, while A A B B looks 2% slower."""
    still = {"process": 0.0, "spread": 0.0}
    abba = [run(100, drift=0.01 * i, **still) for i in range(4)]
    assert compare.ratio([abba[1], abba[2]], [abba[0], abba[3]]).value == pytest.approx(1, abs=1e-3)
    assert compare.ratio(abba[2:], abba[:2]).value == pytest.approx(0.98, abs=2e-3)


def test_steps_that_differ_in_all_runs_alike_say_nothing():
    """Other batches take other times, by 4%: of 5 laps that hides what is 3% slower, unless a lap meets its own."""
    pattern = [1.0, 1.04, 1.01, 1.045, 1.005]

    def three(step_ms, seed):
        found = runs(step_ms, 3, seed, process=0.002, laps=5)
        for row in found:
            row["perf/laps_s"] = [a * b for a, b in zip(row["perf/laps_s"], pattern, strict=True)]
        return found

    for seed in range(20):
        found = compare.ratio(three(103, seed), three(100, seed + 100))
        assert found.verdict == "slower"
        assert found.value == pytest.approx(100 / 103, abs=4 * 0.002 * (2 * 1.57 / 5 / 3 + 2 / 3) ** 0.5)
    stopped = [row | {"perf/laps_s": row["perf/laps_s"][:4]} for row in three(115, 1)]  # no lap has its own
    assert compare.ratio(stopped, three(100, 2)).value == pytest.approx(100 / 115, abs=0.04)  # the pattern's range


def test_runs_of_two_gpus():
    """Each is compared with one on its own GPU, in whatever order they come; where there is none, it says so."""
    still = {"process": 0.0, "spread": 0.0}
    first, other = ({"env": {"device": "H200", "gpu": gpu}} for gpu in ("a", "b"))
    turns = [run(100, **still) | first, run(110, **still) | other]
    found = compare.ratio(turns, turns[::-1])
    assert (found.value, found.runs, found.gpus) == (pytest.approx(1), 2, False)
    assert compare.ratio(turns[1:], turns).value == pytest.approx(1)
    assert str(compare.ratio(turns[:1], turns[1:])).endswith(", 1 run, other GPU)")


def test_two_runs_that_have_nothing_in_common():
    assert str(compare.ratio([run(100), run(1)], [run(100), run(100)])) == "tie (0.000 to over 100)"


def test_a_row_without_a_speed_is_not_compared():
    wrong = run(50) | {"status": "wrong: losses"}
    assert compare.ratio([wrong], [run(100)]) is None
    assert compare.ratio([run(100)], [wrong]) is None
    assert compare.payback(wrong, run(100)) is None


def test_what_else_sets_rows_apart():
    base, other = run(100), run(100, kernels={"norm": "triton"}, out_dir="elsewhere")
    assert compare.differences(other, base) == []
    other = run(100, precision="bf16", train={"batch_size": 32}) | {"env": {"device": "H100", "torch": "2.11.0"}}
    assert compare.differences(other, base) == [
        "precision: bf16, and of the other amp",
        "train.batch_size: 32, and of the other 64",
        "device: H100, and of the other H200",
    ]


def test_when_a_longer_start_has_paid():
    eager, compiled = run(160) | {"perf/first_step_s": 1.0}, run(120) | {"perf/first_step_s": 21.0}
    assert compare.payback(compiled, eager) == pytest.approx(500)
    assert compare.payback(eager, compiled) == 0
    assert compare.payback(run(170) | {"perf/first_step_s": 9.0}, eager) is None
