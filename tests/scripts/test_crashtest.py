"""`python -m scripts.crashtest`: each fault happens where it should, and whatever a run loses is found."""

import json
import multiprocessing
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from files import add_crc32
from lab import crashtest
from lab.crashtest import DAMAGES, FULL_DISK, KILL, KILL_BETWEEN_FILES, KILL_IN_FILE, KINDS, Disturbed, Fault
from scripts import crashtest as script
from tests.test_train import ROOT

FIGURES = {step: (5.0 - step / 7, 1.0 + step / 3, None) for step in range(1, 16)}
LINES = list(FIGURES.items())
EXPECTED = {step: [figures] for step, figures in FIGURES.items()}


def write_run(folder, figures=LINES, steps=(9, 12)):
    """Write what a run leaves: metrics.jsonl, config.yaml, a row, and checkpoints of these steps."""
    folder.mkdir(exist_ok=True)
    lines = [
        add_crc32(json.dumps({"step": step, "train/loss": loss, "train/grad_norm": norm}))
        for step, (loss, norm, _) in figures
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "config.yaml").write_text("seed: 1\n")
    (folder / "log.txt").write_text("error: it failed\n")
    row = {"status": "ok", "config": {"train": {"checkpoint_every": 3, "max_steps": 15}}}
    (folder / "result.json").write_text(json.dumps(row))
    for step in steps:
        (folder / f"checkpoints/step-{step:06d}").mkdir(parents=True, exist_ok=True)
        (folder / f"checkpoints/step-{step:06d}/training.pt").write_bytes(bytes(1000))


def without(*steps):
    return [(step, figures) for step, figures in LINES if step not in steps]


def save(fault, folder):
    """What the child does: three steps of a run, whose saves have a file of 1000 bytes each."""
    crashtest.arm(fault, folder, 1000)
    for step in (3, 6, 9):
        temporary = folder / f"checkpoints/.step-{step:06d}"
        temporary.mkdir(parents=True)
        (temporary / "training.pt").write_bytes(bytes(1000))
        temporary.rename(folder / f"checkpoints/step-{step:06d}")


@pytest.mark.parametrize("kind", [KILL_BETWEEN_FILES, KILL_IN_FILE, FULL_DISK, DAMAGES[0]])
def test_a_fault_begins_with_its_save(tmp_path, kind):
    """The save of step 3 is complete. A file of the save of step 6 ends at the limit that the seed draws."""
    fault = Fault(kind, 6, next(seed for seed in range(99) if 0.03 < Fault(kind, 6, seed).share() < 0.05))
    process = multiprocessing.get_context("fork").Process(target=save, args=(fault, tmp_path))
    process.start()
    process.join()
    code = {KILL_IN_FILE: -signal.SIGXFSZ, FULL_DISK: 1}.get(kind, -signal.SIGKILL)
    assert process.exitcode == code
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-000003"]
    partial = tmp_path / "checkpoints/.step-000006/training.pt"
    if kind in (KILL_IN_FILE, FULL_DISK):
        assert partial.stat().st_size == int(1000 * fault.share())
    elif kind == KILL_BETWEEN_FILES:  # mkdir is the first operation, and the kill comes before the second one
        assert partial.parent.exists()
        assert not partial.exists()
    else:
        assert not partial.parent.exists()


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damage_changes_one_place_of_one_file(tmp_path, kind):
    """Only the newest checkpoint is damaged, never an older one."""
    for seed in range(20):
        write_run(tmp_path)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert Disturbed(tmp_path, EXPECTED).damage(Fault(kind, 9, seed)).startswith(kind.partition(" in ")[0])
        [path] = [path for path, content in before.items() if path.read_bytes() != content]
        assert path.name == {"checkpoint": "training.pt"}.get(kind.partition(" in ")[2], path.name)
        assert "step-000009" not in str(path)
        old, new = before[path], path.read_bytes()
        if kind.startswith("cut"):
            assert old.startswith(new)
        else:
            assert [(a ^ b).bit_count() for a, b in zip(old, new, strict=True) if a != b] == [1]


def test_the_only_checkpoint_is_not_damaged(tmp_path):
    write_run(tmp_path, steps=[9])
    assert Disturbed(tmp_path, EXPECTED).damage(Fault("flip in checkpoint", 9, 0)) is None


def test_a_difference_in_one_bit_a_missing_and_a_doubled_step_are_found(tmp_path):
    run = Disturbed(tmp_path, EXPECTED)
    write_run(tmp_path)
    assert run.find_loss() is None
    loss, norm, _ = FIGURES[7]
    write_run(tmp_path, (FIGURES | {7: (loss + 2**-50, norm, None)}).items())
    assert run.find_loss().startswith("step 7 has [(4.0")
    write_run(tmp_path, [*LINES, (7, (loss + 2**-50, norm, None))])
    assert run.find_loss().startswith("step 7 has [(4.0")
    write_run(tmp_path, [*LINES, LINES[6]])
    assert run.find_loss().startswith("step 7 has [(4.0")
    write_run(tmp_path, without(4))
    assert run.find_loss().startswith("step 4 has None instead of ")


def test_only_a_line_that_was_damaged_may_be_missing(tmp_path):
    for seed in range(20):
        write_run(tmp_path)
        run = Disturbed(tmp_path, EXPECTED)
        run.damage(Fault("flip in metrics.jsonl", 9, seed))
        assert run.find_loss() is None  # with the damaged line, as in a run that was already done
        assert len(run.gone) in (1, 2)  # 2: the flip was in the end of a line
        other = min({3, 4, 5} - run.gone)
        write_run(tmp_path, without(*run.gone))
        assert run.find_loss() is None
        write_run(tmp_path, (FIGURES | dict.fromkeys(run.gone, (1.0, 1.0, None))).items())
        assert run.find_loss().startswith(f"step {min(run.gone)} has [(1.0")
        write_run(tmp_path, without(*run.gone, other))
        assert run.find_loss().startswith(f"step {other} has None")


def test_a_damaged_line_may_be_damaged_again(tmp_path):
    for seed in range(20):
        write_run(tmp_path)
        run = Disturbed(tmp_path, EXPECTED)
        for kind in ("flip in metrics.jsonl", "flip in metrics.jsonl", "cut in metrics.jsonl"):
            run.damage(Fault(kind, 9, seed))
        assert run.find_loss() is None


def test_every_kind_is_drawn_and_a_seed_draws_the_same():
    faults = [crashtest.draw_faults(random.Random(7), kind, [3, 6, 9, 12]) for kind in KINDS]
    assert faults == [crashtest.draw_faults(random.Random(7), kind, [3, 6, 9, 12]) for kind in KINDS]
    assert [first.kind for first, *_ in faults] == KINDS
    assert all(fault.step >= 9 for both in faults for fault in both if fault.kind in DAMAGES)


@pytest.fixture
def command(called, monkeypatch, tmp_path):
    """Run the command with a made-up train.py: it ends with `codes[kind]`, and leaves `figures[kind]`.

    The kind of a run without a fault is None.
    """
    monkeypatch.chdir(tmp_path)

    def call(*arguments, codes=(), figures=()):
        commands, before = [], {}

        def train_in_fork(words, folder, fault=None, *_):
            commands.append(words)
            kind = fault.kind if fault else before.get(folder)
            before[folder] = kind
            write_run(folder, dict(figures).get(kind, FIGURES).items())
            return dict(codes).get(kind, -9 if fault else 0)

        monkeypatch.setattr(script, "train_in_fork", train_in_fork)
        return *called("crashtest.py", script.main, "out_dir=out", *arguments), commands

    return call


def test_a_table_of_what_was_tried_and_survived(command):
    code, out, err, commands = command("runs=10", 'training=["kernels=mine"]')
    assert (code, err) == (0, "")
    assert all(words[-2:] == ["kernels=mine", "train.resume=auto"] for words in commands)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("| ")]
    assert [row[0] for row in cells[1:]] == [*KINDS, "all"]
    assert all(int(tried) >= 1 and tried == survived and lost == "0" for _, tried, survived, lost in cells[1:])
    assert len([*Path("out").iterdir()]) == 2  # the two undisturbed runs


@pytest.mark.parametrize("how", ["codes", "figures"])
def test_a_lost_run_is_named_and_the_exit_code_is_1(command, how):
    """A run that was killed does not resume, or resumes with another loss."""
    lost = {"codes": {KILL: 1}, "figures": {KILL: FIGURES | {5: (0.0, 0.0, None)}}}[how]
    code, out, err, _ = command("runs=10", **{how: lost})
    assert code == 1
    [line, *_] = [line for line in out.splitlines() if " | lost: " in line]
    reason = {"codes": "it failed", "figures": "step 5 has [(0.0, 0.0, None)] instead of "}[how]
    assert f" | lost: {reason}" in line
    assert f"of 10 runs were lost: see {line[:3]}" in err
    assert Path("out", line[:3], "log.txt").exists()


def test_a_folder_is_used_once(command):
    assert command("runs=1")[0] == 0
    assert command("runs=1")[2] == "error: out_dir=out already holds a crashtest; choose another folder\n"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_small(tmp_path):
    """Three real runs, each with two faults or one."""
    (tmp_path / "book.txt").write_text("All work and no play makes Jack a dull boy.\n" * 400)
    words = [
        "device=cpu",
        "precision=fp32",
        "data=text",
        "data.path=book.txt",
        "data.cache=tokens",
        "model.dropout=0.1",
    ]
    command = [sys.executable, "-m", "scripts.crashtest", "runs=3", "seed=1", "out_dir=out", "--", *words]
    environment = {**script.os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("done     3 runs, ")
