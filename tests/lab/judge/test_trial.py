"""The runs of both backends in turns, and what they must have in common."""

import math
from types import SimpleNamespace

import pytest
import torch

from lab.judge import trial
from lab.judge.arm import Arm
from lab.judge.claim import Claim
from lab.judge.trial import (
    compare_losses,
    impossible_speed,
    judge_run,
    slower_than_before,
    train_in_turns,
    why_incomplete,
)
from lab.recipe import Recipe
from lab.rows import append_rows
from model import cost
from runtime.config import UserError
from tests.test_train import config

CPU = torch.device("cpu")
CLAIM = Claim("norm", "mine.py", "eager")
TINY = "model=tiny", "train.batch_size=2", "train.tokens_per_step=256", "train.max_steps=24", "device=cpu"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], None),
        (["model.dropout=0.1"], "model.dropout > 0 lets every backend draw random numbers of its own"),
        (["train.on_nonfinite=skip"], "train.on_nonfinite=skip hides steps"),
        (["train.max_minutes=5"], "with train.max_minutes the schedule depends on the speed"),
        (["train.max_steps=null", "train.max_minutes=5"], "with train.max_minutes the schedule depends on the speed"),
        (["train.resume=auto"], "train.resume and train.stop_after make a part of a run"),
        (["train.stop_after=5"], "train.resume and train.stop_after make a part of a run"),
        (["train.overfit=true"], "train.overfit repeats a batch"),
        (["parallel=fsdp"], "sharded weights are not compared"),
    ],
)
def test_a_training_that_cannot_be_compared_is_named(words, reason):
    assert why_incomplete(config(*TINY, *words)) == reason


class Turns:
    """Takes the place of run_arm() and judge_run(): it notes their arguments, and answers."""

    def __init__(self, monkeypatch, status="ok", fails_at=None):
        self.runs, self.questions, self.status, self.fails_at = [], [], status, fails_at
        monkeypatch.setattr(trial, "run_arm", self.run_arm)
        monkeypatch.setattr(trial, "judge_run", self.judge_run)

    def run_arm(self, words, folder, inside, plan, kept, prompts):
        folder.mkdir(parents=True)
        (folder / "state-24").touch()
        self.runs.append(
            SimpleNamespace(words=words, folder=folder, plan=plan, kept=kept, prompts=prompts, inside=inside)
        )
        status = "failed: exit code 1" if len(self.runs) == self.fails_at else "ok"
        return Arm(
            status, losses=24 * [5.0], seconds=[0.1 * count for count in plan.windows], val_loss=5.0, folder=folder
        )

    def judge_run(self, question, arm):
        self.questions.append(question)
        return {"ok": self.status == "ok"}, self.status


def turns(folder, claim=CLAIM, repeats=3):
    cfg = config(*TINY, "+experiment=throughput", "train.max_steps=24")
    return train_in_turns(claim, ["model=tiny"], cfg, Recipe.of(cfg), {"env": {}}, CPU, repeats, folder)


def test_the_runs_take_turns_and_a_repeat_has_one_seed_and_one_plan(monkeypatch, tmp_path):
    mocked = Turns(monkeypatch)
    runs = turns(tmp_path)
    names = ["1-norm-baseline", "2-norm-judged", "3-norm-judged", "4-norm-baseline", "5-norm-baseline", "6-norm-judged"]
    assert [run.folder.name for run in mocked.runs] == names
    assert {name: len(rows) for name, rows in runs.items()} == {"eager": 3, "mine.py": 3}
    seeds = [word for run in mocked.runs for word in run.words if word.startswith("seed=")]
    assert (seeds[0::2], len(set(seeds))) == (seeds[1::2], 3)
    for first, second in zip(mocked.runs[0::2], mocked.runs[1::2], strict=True):
        assert first.plan == second.plan  # the batches, too
    for run in mocked.runs:
        is_judged = run.folder.name.endswith("judged")
        assert run.words[:2] == ["model=tiny", f"kernels.norm={'mine.py' if is_judged else 'eager'}"]
        fixed = dict(word.split("=") for word in run.words[2:])
        assert (fixed["proof"], fixed["kernels.check"], fixed["train.checkpoint_every"]) == ("false", "false", "0")
        assert fixed["train.eval_every"] == ("24" if is_judged else "0")
        assert run.kept == (set(run.plan.states) if is_judged else set())  # on a CPU all steps are repeated
        assert run.inside == tmp_path / f"worker-{'judged' if is_judged else 'baseline'}"
        assert not list(run.folder.glob("state-*"))
    assert [run.prompts is not None for run in mocked.runs] == [False, True, False, False, False, False]


def test_a_row_has_the_config_of_its_run(monkeypatch, tmp_path):
    mocked = Turns(monkeypatch)
    runs = turns(tmp_path, repeats=1)
    [row], [base] = runs["mine.py"], runs["eager"]
    assert (row["config"]["kernels"]["norm"], base["config"]["kernels"]["norm"]) == ("mine.py", "eager")
    assert f"seed={row['config']['seed']}" in mocked.runs[1].words
    assert (row["parity"], row["status"], row["steps"]) == ({"ok": True}, "ok", 24)
    assert row["perf/step_ms"] == pytest.approx(100)
    assert "parity" not in base
    [question] = mocked.questions
    assert (question.recipe.seed, question.device) == (row["config"]["seed"], "cpu")
    assert (question.train.eval_every, question.train.eval_batches) == (24, 1)
    assert question.segments == mocked.runs[1].plan.segments
    assert question.shifts == mocked.runs[1].plan.loader_shifts


def test_the_judged_attention_and_a_loss_have_their_keys(monkeypatch, tmp_path):
    """No generation calls a loss, so there is none to compare."""
    mocked = Turns(monkeypatch)
    [row] = turns(tmp_path / "a", Claim("attention", "mine.py", "sdpa"), repeats=1)["mine.py"]
    assert (mocked.runs[1].words[1], row["config"]["attn"]["impl"]) == ("attn=mine.py", "mine.py")
    turns(tmp_path / "b", Claim("loss", "mine.py", "eager"), repeats=1)
    assert mocked.runs[-1].words[1] == "kernels.loss=mine.py"
    assert mocked.runs[-1].prompts is None


@pytest.mark.parametrize(
    ("options", "count"), [({"fails_at": 1}, 1), ({"fails_at": 4}, 4), ({"status": "wrong: x"}, 2)]
)
def test_the_first_run_that_is_not_ok_is_the_last_one(monkeypatch, tmp_path, options, count):
    mocked = Turns(monkeypatch, **options)
    runs = turns(tmp_path)
    assert len(mocked.runs) == sum(map(len, runs.values())) == count
    last = runs["mine.py" if mocked.runs[-1].folder.name.endswith("judged") else "eager"][-1]
    assert last["status"] == options.get("status", "failed: exit code 1")
    assert [row["status"] for rows in runs.values() for row in rows].count("ok") == count - 1


def test_the_runs_of_another_verdict_are_not_overwritten(monkeypatch, tmp_path):
    Turns(monkeypatch)
    (tmp_path / "2-norm-judged").mkdir()
    with pytest.raises(UserError, match=r"2-norm-judged exists: choose another out_dir for this verdict$"):
        turns(tmp_path)


def test_a_run_that_cannot_be_compared_is_neither_right_nor_wrong(monkeypatch):
    def fail(question, arm):
        raise RuntimeError("the replay with eager PyTorch did not run: ValueError: other tensors")

    monkeypatch.setattr(trial, "audit", fail)
    assert judge_run(None, Arm())[1] == "failed: it sent no validation loss"
    status = "failed: it was not compared: the replay with eager PyTorch did not run: ValueError: other tensors"
    assert judge_run(None, Arm(val_loss=5.0))[1] == status
    for parity, status in (({"ok": True}, "ok"), ({"ok": False, "why": "it is off"}, "wrong: it is off")):
        monkeypatch.setattr(trial, "audit", lambda *_, parity=parity: parity)
        assert judge_run(None, Arm(val_loss=5.0)) == (parity, status)


def rows(*losses):
    return [{"losses": each} for each in losses]


def test_losses_are_compared_over_the_last_half_of_the_steps():
    """The bound is the distance of two seeds of the baseline."""
    bases = rows([9.0, 8.0, 5.0, 5.0], [9.0, 8.0, 5.5, 5.5])
    near = compare_losses(rows([1.0, 1.0, 5.1, 4.9], [9.0, 8.0, 5.5, 5.5]), bases)
    assert near["gap"] == pytest.approx(0.1)
    assert near["bound"] == pytest.approx(0.5 + 2.0**-14 * 6.75)
    far = compare_losses(rows([9.0, 8.0, 5.0, 5.0], [9.0, 8.0, 6.5, 5.5]), bases)
    assert far["gap"] == pytest.approx(math.sqrt(1 / 2))


def test_one_seed_is_compared_with_the_change_from_step_to_step():
    losses = compare_losses(rows([4.0, 3.0]), rows([5.0, 3.0]))
    assert losses == {"gap": 0.0, "bound": 2.0 + 2.0**-14 * 4}


@pytest.mark.parametrize("place", [0, 1])
def test_a_loss_that_is_no_number_is_out_of_bounds_in_any_repeat(place):
    judged = rows([5.0, 5.0], [5.0, 5.0])
    judged[place]["losses"][1] = math.nan
    losses = compare_losses(judged, rows([5.0, 5.0], [5.0, 6.0]))
    assert not losses["gap"] <= losses["bound"]


def test_a_step_cannot_be_faster_than_its_matmuls():
    cfg = config(*TINY)
    flops = cost.figures(cfg.model, cfg.train.block_size)["flops_per_token"]
    row = {"status": "ok", "perf/laps_s": [1.0], "perf/tokens_per_sec": 1e12 / flops}
    assert impossible_speed(row, cfg, matmul_flops=1.01e12) is None
    text = "it trains at 1 TFLOP/s, and a matmul alone reaches 0.99 on this machine"
    assert impossible_speed(row, cfg, matmul_flops=0.99e12) == text


def test_a_baseline_that_is_slower_than_in_a_stored_row_is_a_note(results):
    """The seed, the commit and the length of the run may differ, but not the kernels, the model or the machine."""
    config = {"kernels": {"norm": "eager"}, "attn": {"impl": "sdpa"}, "seed": 1, "train": {"max_steps": 60}}
    row = {"status": "ok", "config": config | {"model": "tiny"}, "env": {"device": "GPU", "git_commit": "a"}}
    row |= {"perf/laps_s": [1.0], "perf/tokens_per_sec": 89.0}
    assert slower_than_before(row, "gpu") is None
    faster = {"perf/tokens_per_sec": 1000.0}
    append_rows(
        results / "gpu" / "train.jsonl",
        [
            row | faster | {"config": row["config"] | {"kernels": {"norm": "triton"}}},
            row | faster | {"config": row["config"] | {"attn": {"impl": "flash"}}},
            row | faster | {"config": row["config"] | {"model": "large"}},
            row | faster | {"config": row["config"] | {"train": {"batch_size": 64}}},
            row | faster | {"env": {"device": "GPU", "git_commit": "a", "torch": "3"}},
            row | faster | {"status": "wrong: it is off"},
        ],
    )
    assert slower_than_before(row, "gpu") is None
    other = row | {"config": row["config"] | {"seed": 2, "train": {"max_steps": 40}}, "perf/tokens_per_sec": 100.0}
    append_rows(results / "gpu" / "train.jsonl", [other | {"env": {"device": "GPU", "git_commit": "b"}}])
    note = "the baseline trained at 100 tokens/s in a stored row, and here at 89"
    assert slower_than_before(row, "gpu") == note
    assert slower_than_before(row | {"perf/tokens_per_sec": 90.0}, "gpu") is None
    assert slower_than_before(row, "another-gpu") is None
