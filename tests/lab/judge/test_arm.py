"""One run in a worker: which windows and states the judge chooses, and what it believes of the answers."""

import json
import math
import random
from itertools import accumulate, pairwise

import pytest
import torch
from safetensors.torch import load_file

from common.files import MOST_BYTES
from lab.judge import arm as arms
from lab.judge import sandbox
from lab.judge.arm import (
    ALL_STEPS,
    SEGMENT,
    WINDOW,
    Arm,
    Plan,
    arm_row,
    checksum,
    draw_plan,
    draw_prompts,
    growing_memory,
    read_losses,
    run_arm,
)
from lab.judge.sandbox import PROCESSES, Ended, Sandbox
from model.config import GPTConfig
from tests.lab.judge.test_sandbox import START

LONGEST = SEGMENT[1] + WINDOW[1]


@pytest.mark.parametrize("steps", [1, 4, 6, 13, 40, ALL_STEPS])
def test_the_segments_cover_all_steps_of_a_run(steps):
    for seed in range(50):
        plan = draw_plan(steps, random.Random(seed))
        assert sum(plan.windows) == plan.states[-1] == steps
        assert set(plan.states) <= set(accumulate(plan.windows))  # a state is that after a window
        assert plan.segments == list(pairwise([0, *plan.states]))
        assert max(last - first for first, last in plan.segments) <= LONGEST
        assert max(plan.windows[1:], default=1) <= WINDOW[1]


@pytest.mark.parametrize("steps", [ALL_STEPS + 1, 2000])
def test_a_longer_run_has_a_few_segments_at_random_places(steps):
    counts, places = [], set()
    for seed in range(50):
        plan = draw_plan(steps, random.Random(seed))
        assert sum(plan.windows) == plan.states[-1] == steps
        assert set(plan.states) <= set(accumulate(plan.windows))
        assert plan.segments[0][0] == 0  # the start of a run may differ: compilation, the first replay of a graph
        assert all(0 < last - first <= LONGEST for first, last in plan.segments)
        counts.append(len(plan.segments))
        places.update(first for first, _ in plan.segments)
    assert 1 <= min(counts) < max(counts) < 20
    assert len(places) > 50
    assert max(places) > 0.8 * steps


def test_a_state_may_be_larger_than_any_file_that_is_read_as_a_whole(tmp_path):
    """The state of GPT-2 124M has 12 bytes a parameter, 1.5 GB. This file is sparse, and the moments are not read."""
    moments = 12 * 124_439_808
    assert moments > MOST_BYTES
    tensors = {"model/w": ([2], 0, 8), "optimizer/m": ([moments // 4], 8, 8 + moments)}
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": ends} for name, (shape, *ends) in tensors.items()}
    text = json.dumps(header).encode()
    path = tmp_path / "state"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + torch.ones(2).numpy().tobytes())
        file.truncate(8 + len(text) + 8 + moments)
    assert checksum(path) == str(2 * 0x3F800000)


def test_two_plans_differ():
    """A backend that knew the windows could work between them."""
    plans = [draw_plan(40, random.Random(seed)) for seed in range(20)]
    assert len({tuple(plan.windows) for plan in plans}) == len({tuple(plan.states) for plan in plans[:3]}) + 17


@pytest.mark.parametrize(
    "losses",
    [None, 5.0, "5.0", [], [5.0], [5.0, 5.0, 5.0], [5.0, "nan"], [5.0, None], [5.0, 5], [5.0, True], [5.0, [5.0]]],
)
def test_losses_that_are_not_the_numbers_of_a_window_are_refused(losses):
    with pytest.raises(Ended, match=r"^it sent no 2 losses$"):
        read_losses({"losses": losses}, 2)


@pytest.mark.parametrize("loss", [1e154, -2e9, math.inf])
def test_losses_whose_squares_could_overflow_are_refused(loss):
    with pytest.raises(Ended, match=r"^it sent a loss of more than 1e\+09$"):
        read_losses({"losses": [5.0, loss]}, 2)


def test_the_losses_of_a_window_are_read():
    assert read_losses({"losses": [5.0, 4.5]}, 2) == [5.0, 4.5]
    assert math.isnan(read_losses({"losses": [math.nan]}, 1)[0])  # the comparison calls it wrong


@pytest.mark.parametrize(
    ("allocated", "growth"),
    [
        ([9, 10, 20, 30, 50], 10),
        ([9, 10, 20, 30], None),  # two changes may be chance
        ([9, 10, 20, 20, 30], None),
        ([9, 10, 20, 5, 30], None),
        ([0, 0, 0, 0, 0], None),
        ([], None),
    ],
)
def test_memory_grows_if_each_window_needs_more(allocated, growth):
    """The first window makes the moments and the caches."""
    assert growing_memory(Arm(allocated=allocated)) == growth


def test_the_speed_of_a_run_is_that_of_its_windows_by_the_judges_clock():
    """The first window compiles. Of itself the worker may say how much memory it took, and nothing else."""
    figures = {"mem/peak_rss_gib": 2.0, "kernels": {"norm": "mine"}, "mem/peak_allocated_gib": "none"}
    figures |= {"mem/peak_reserved_gib": None}
    forged = {
        "steps": 1e9,
        "status": None,
        "config": {},
        "perf/step_ms": 1e-9,
        "memory_growth": None,
    }
    arm = Arm(
        losses=[5.0, 4.0, 3.0, 2.0],
        seconds=[9.0, 1.0, 4.0],
        val_loss=3.5,
        figures=figures | forged,
    )
    row = arm_row(arm, Plan([1, 1, 2], [4], [0, 0, 0]), {"config": {"seed": 1}}, tokens_per_step=100)
    assert (row["perf/laps_s"], row["perf/step_ms"]) == ([1.0, 2.0], 1500.0)
    assert row["perf/tokens_per_sec"] == pytest.approx(100 / 1.5)
    assert row["perf/tokens_per_sec/p20"] < row["perf/tokens_per_sec"] < row["perf/tokens_per_sec/p80"]
    assert (row["train/loss"], row["val/loss"], row["losses"]) == (2.0, 3.5, [5.0, 4.0, 3.0, 2.0])
    assert (row["status"], row["steps"], row["config"]) == ("ok", 4, {"seed": 1})
    assert (row["mem/peak_rss_gib"], row["kernels"]) == (2.0, {"norm": "mine"})
    assert row["mem/peak_allocated_gib"] is row["mem/peak_reserved_gib"] is row["perf/first_step_s"] is None
    assert "memory_growth" not in row


def test_a_run_that_is_not_ok_has_no_speed():
    arm = Arm(status="failed: exit code 1", losses=[5.0], seconds=[9.0])
    row = arm_row(arm, Plan([1, 1, 2], [4], [0, 0, 0]), {"name": "mine"}, tokens_per_step=100)
    assert row == {"name": "mine", "status": "failed: exit code 1", "steps": 1}


def test_a_window_between_two_segments_is_in_no_figure():
    """No replay could contain it, and the worker knows that from its length."""
    plan = draw_plan(1000, random.Random(1))
    assert max(plan.windows) > LONGEST
    arm = Arm(
        losses=1000 * [5.0],
        seconds=[9.0, *(count * (1.0 if count <= WINDOW[1] else 0.1) for count in plan.windows[1:])],
    )
    laps = arm_row(arm, plan, {}, tokens_per_step=100)["perf/laps_s"]
    assert set(laps) == {1.0}
    assert len(laps) > 10
    short = Plan([5, 4, 3, 5], [9, 17], [0, 0, 0, 0])
    assert len(arm_row(Arm(losses=17 * [5.0], seconds=[9.0, 1.0, 1.0, 1.0]), short, {}, 100)["perf/laps_s"]) == 3


def test_a_run_learns_the_batches_of_a_window_when_the_window_begins():
    plan = Plan([5, 4, 3], [12], [20, 30, 40])
    assert plan.loader_shifts == [(1, 20), (6, 30), (10, 40)]
    shifts = [draw_plan(40, random.Random(seed)).shifts for seed in range(2)]
    assert len(set(shifts[0]) | set(shifts[1])) == len(shifts[0]) + len(shifts[1])


def test_prompts_fit_the_model():
    model = GPTConfig(1, 2, 32, block_size=12, vocab_size=97, pos="learned", bias=True, dropout=0.0)
    idx, lengths, new = draw_prompts(model, random.Random(1))
    assert (idx.shape, lengths.shape, new.shape) == ((4, 6), (4,), (4, 5))
    assert 3 <= lengths.min() <= lengths.max() <= 6
    assert max(idx.max(), new.max()) < 97
    assert not torch.equal(idx, draw_prompts(model, random.Random(2))[0])


# What a worker with this repo's train.py does, without a model. Each test replaces a line
ANSWERS = """
import struct

def state(bits):
    header = json.dumps({"model/w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + struct.pack("<2i", bits, -9)

answer(ready=True)
losses = 0
while True:
    kind, value, *shift = receive()
    if kind == "state":
        (folder / value).write_bytes(state(losses))
        answer(written=True)
    elif value is None:
        break
    else:
        losses += value
        answer(losses=value * [float(*shift)], weights=str(losses - 9), allocated=None, refused=0)
answer(replaced=[], val_loss=4.0, figures={"mem/peak_rss_gib": 1.0})
"""
PLAN = Plan([3, 2, 1], [5, 6], [7, 8, 9])


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a worker with this code in place of train.py: run(code) -> Arm."""
    monkeypatch.setattr(sandbox, "isolation", lambda: PROCESSES)
    codes = []

    def start(words, *arguments):
        assert words[0] == str(tmp_path / "worker/repo/train.py")
        assert words[1:] == ["model=tiny", f"out_dir={tmp_path / 'worker/run'}"]
        return Sandbox(["-c", START + codes.pop()], *arguments)

    monkeypatch.setattr(arms, "Sandbox", start)

    def call(code):
        codes.append(code)
        return run_arm(["model=tiny"], tmp_path / "run", tmp_path / "worker", PLAN, {6})

    return call


def test_a_run_gives_its_losses_and_the_states_that_are_kept(run, tmp_path):
    arm = run(ANSWERS)
    assert (arm.status, arm.losses, arm.val_loss) == ("ok", [7.0, 7.0, 7.0, 8.0, 8.0, 9.0], 4.0)
    assert (len(arm.seconds), arm.allocated, arm.figures) == (3, [0, 0, 0], {"mem/peak_rss_gib": 1.0})
    assert load_file(arm.state(6))["model/w"].view(torch.int32).tolist() == [6, -9]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["state-6"]
    assert not list((tmp_path / "worker").glob("state-*"))


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        ("answer(ready=True)", "sys.exit(3)", "failed: the process ended, exit code 3"),
        ("losses=value", "losses=1", "failed: it sent no 3 losses"),
        ("refused=0", "refused=2", "failed: it refused 2 steps, whose loss or gradient was not finite"),
        (
            "(folder / value).write_bytes",
            "os.mkfifo(folder / value); str",
            "failed: it wrote no readable file state-6: ",
        ),
        ("write_bytes(state(losses))", "write_text('{}')", "failed: it sent no state: "),
        ("state(losses)", "state(losses + 1)", "wrong: its weights changed after the window that ends with step 6"),
        (
            "weights=str(losses - 9)",
            "weights=losses - 9",
            "wrong: its weights changed after the window that ends with step 6",
        ),
        ("replaced=[]", "replaced=['time.time']", "wrong: it replaced time.time"),
        ("replaced=[]", "replaced=[], changed=['threads']", "wrong: it changes the process around it: threads"),
        ("replaced=[]", "replaced=True", "failed: 'bool' object is not iterable"),
        (
            "losses = 0",
            "losses = 0; (folder / 'repo/kernels/big').touch(); os.truncate(folder / 'repo/kernels/big', 2**31)",
            "wrong: it changed files",
        ),
        ('figures={"mem/peak_rss_gib": 1.0}', "figures=5", "failed: 'int' object is not iterable"),
        ("losses = 0", "losses = 0; open(folder / 'repo/train.py', 'a').write('#')", "wrong: it changed files of the "),
        ("losses = 0", "losses = 0; import shutil; shutil.rmtree(folder / 'repo')", "wrong: it changed files of the "),
        ("allocated=None", "allocated='much'", "ok"),
    ],
)
def test_what_a_worker_answers_decides_the_status(run, old, new, status):
    assert ANSWERS.count(old) == 1
    arm = run(ANSWERS.replace(old, new))
    assert arm.status.startswith(status)
    assert growing_memory(arm) is None
