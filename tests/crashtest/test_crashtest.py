"""`python -m tests.crashtest`: each fault happens where it should, and whatever a run loses is found."""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.files import add_crc32
from tests.crashtest import __main__ as script
from tests.crashtest import faults, inject, tracker
from tests.crashtest.damage import Damage
from tests.crashtest.faults import CHANGES, DAMAGES, ERRORS, FULL_LOG, KILL, KILL_AT, KINDS, REPLACEMENTS, Fault
from tests.crashtest.inject import CAN_FAIL, CHANGE, Operation
from tests.crashtest.judge import Disturbed, End, Hang
from tests.runtime.test_tracker_process import SHORT
from tests.test_train import ROOT

FIGURES = {step: (5.0 - step / 7, 1.0 + step / 3, None) for step in range(1, 16)}
LINES = list(FIGURES.items())
ROW = {
    "status": "ok",
    "config": {"train": {"checkpoint_every": 3, "max_steps": 15, "keep_checkpoints": 2}, "data": {"prepare": "auto"}},
}
UNDISTURBED = SimpleNamespace(figures={step: [figures] for step, figures in LINES}, row=ROW, names=set(), keep=2)


def write_run(folder, figures=LINES, steps=(9, 12)):
    """Write what a run leaves: metrics.jsonl, config.yaml, a row, checkpoints of these steps, and its data."""
    run = folder / "run"
    run.mkdir(parents=True, exist_ok=True)
    lines = [
        add_crc32(json.dumps({"step": step, "train/loss": loss, "train/grad_norm": norm}))
        for step, (loss, norm, _) in figures
    ]
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (run / "config.yaml").write_text("seed: 1\n")
    (run / "result.json").write_text(add_crc32(json.dumps(ROW)) + "\n")
    for step in steps:
        (run / f"checkpoints/step-{step:06d}").mkdir(parents=True, exist_ok=True)
        (run / f"checkpoints/step-{step:06d}/training.pt").write_bytes(bytes(1000))
    (folder / "data/train").mkdir(parents=True, exist_ok=True)
    (folder / "data/train/000000.bin").write_bytes(bytes(1000))


def without(*steps):
    return [(step, figures) for step, figures in LINES if step not in steps]


OPERATIONS = """
import os, shutil, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.crashtest import inject
folder = Path("watched").absolute()
def work():
    Path("other").write_bytes(bytes(10))
    (folder / "a").mkdir()
    descriptor = os.open(folder / "a", os.O_RDONLY)
    file = os.open("b", os.O_WRONLY | os.O_CREAT, dir_fd=descriptor)
    os.write(file, bytes(10))
    os.write(file, bytes(10))
    os.fsync(file)
    os.rename("watched/a/b", folder / "c")
    Path("watched/c").stat()
    Path("watched/c").read_bytes()
    os.remove("watched/c")
for words in map(str.split, sys.stdin):
    operations, at, error, forever = int(words[0]), int(words[1]), words[2], words[3] == "True"
    folder.mkdir()
    counts = inject.shared_counts()
    if os.fork() == 0:
        inject.arm(folder, inject.Operation(operations), at, None if error == "None" else error, forever, counts)
        try:
            work()
        except OSError as failed:
            os._exit(failed.errno)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    print([code, sizes, list(counts)])
    shutil.rmtree(folder)
"""
OPERATION_COUNTS = {
    Operation.MAKE: 1,
    Operation.OPEN: 2,
    Operation.RENAME: 1,
    Operation.REMOVE: 1,
    Operation.CREATE: 1,
    Operation.WRITE: 2,
    Operation.SYNC: 1,
    Operation.STAT: 1,
    Operation.READ: 2,
}
NEEDS_COMPILER = pytest.mark.skipif(not shutil.which("cc"), reason="needs the C compiler cc")


@pytest.fixture
def attempts(tmp_path):
    """Arm a program without torch, again and again: [exit code, sizes of the files that it left, counts].

    Its exit code is the errno of the operation that failed.
    """
    inject.compile_to(f"{tmp_path}/faults.so")
    environment = {**os.environ, "LD_PRELOAD": f"{tmp_path}/faults.so"}

    def run(*cases):
        lines = "".join(f"{int(kinds)} {at} {error} {forever}\n" for kinds, at, error, forever in cases)
        command = [sys.executable, "-c", OPERATIONS.format(root=str(ROOT))]
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        done = subprocess.run(command, input=lines, **options)
        assert done.stderr == ""
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@NEEDS_COMPILER
def test_each_operation_below_the_folder_fails_in_turn(attempts):
    """Operations on other files are not counted. The operation after the last one does not fail."""
    every = Operation(2 ** len(Operation) - 1)
    total = sum(OPERATION_COUNTS.values())
    [[code, _, counts], *results] = attempts(
        (every, -1, "EIO", False), *((every, n, "EIO", False) for n in range(total + 1))
    )
    assert (code, counts[0]) == (0, total)
    assert {kind: inject.count(counts, kind) for kind in Operation if inject.count(counts, kind)} == OPERATION_COUNTS
    assert [code for code, _, _ in results] == [errno.EIO] * total + [0]


@NEEDS_COMPILER
def test_an_error_is_of_a_kind_of_operation(attempts):
    cases = [(kinds, 0, error, False) for error, kinds in CAN_FAIL.items() if error != "EINTR"]
    codes = [code for code, _, _ in attempts(*cases)]
    assert codes == [getattr(errno, error) for _, _, error, _ in cases]


@NEEDS_COMPILER
def test_a_kill_leaves_half_of_a_write_and_so_does_a_full_disk(attempts):
    cases = [(CHANGE, n, None, False) for n in range(6)] + [(Operation.WRITE, 0, "ENOSPC", True)]
    *kills, full = attempts(*cases)
    assert {code for code, _, _ in kills} == {-signal.SIGKILL}
    assert [sizes for _, sizes, _ in kills] == [[], [], [5], [15], [20], [20]]
    assert full[:2] == [errno.ENOSPC, [5]]


@NEEDS_COMPILER
def test_an_interrupted_call_is_repeated_by_python(attempts):
    [[code, _, _]] = attempts((Operation.WRITE | Operation.READ, 1, "EINTR", False))
    assert code == 0


@NEEDS_COMPILER
def test_a_program_starts_again_once_with_the_library(tmp_path):
    """The programs that it starts do not get the library, and its file is gone."""
    source = "from tests.crashtest.inject import *; preload(); ctypes.CDLL(None).arm_crashtest; "
    source += "print(os.environ.get('LD_PRELOAD'))"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("None\n", "")
    assert not [*tmp_path.iterdir()]


def test_the_command_ends_with_one_line_without_a_compiler(tmp_path):
    environment = {**os.environ, "PATH": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "from tests.crashtest.inject import preload; preload()"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: the crash test compiles faults.c and finds no cc: apt install gcc\n"
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", CHANGES)
def test_a_damage_changes_one_place_of_one_file(tmp_path, kind):
    """Only the newest checkpoint is damaged, never an older one. A damage can be undone."""
    how, what = kind.split(" in ")
    for seed in range(20):
        write_run(tmp_path)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        damage = Damage(Fault(kind, seed), tmp_path)
        assert damage.description.startswith(f"{how} in ")
        [path] = [path for path, content in before.items() if path.read_bytes() != content]
        assert path == damage.path
        assert "step-000009" not in str(path)
        assert path.relative_to(tmp_path).parts[:2] == {
            "checkpoint": ("run", "checkpoints"),
            "data": ("data", "train"),
        }.get(what, ("run", path.name))
        old, new = before[path], path.read_bytes()
        if how == "cut":
            assert old.startswith(new)
        else:
            assert [(a ^ b).bit_count() for a, b in zip(old, new, strict=True) if a != b] == [1]
        damage.undo()
        assert path.read_bytes() == old


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_an_odd_file_takes_the_place_of_any_file(tmp_path, kind):
    places = set()
    for seed in range(60):
        write_run(tmp_path)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        damage = Damage(Fault(kind, seed), tmp_path)
        places.add(damage.path.relative_to(tmp_path).as_posix())
        assert not os.access(damage.path, os.R_OK) or not damage.path.is_file()
        damage.undo()
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    files = {"metrics.jsonl", "config.yaml", "result.json", "checkpoints/step-000012/training.pt"}
    assert places == {"data/train/000000.bin", *(f"run/{name}" for name in files)}


def test_the_only_checkpoint_is_not_damaged(tmp_path):
    write_run(tmp_path, steps=[9])
    assert Damage(Fault("flip in checkpoint", 0), tmp_path).description is None


def test_a_difference_in_one_bit_a_missing_and_a_doubled_step_are_found(tmp_path):
    run = Disturbed(tmp_path, UNDISTURBED)
    write_run(tmp_path)
    assert run.find_difference() is None
    loss, norm, _ = FIGURES[7]
    write_run(tmp_path, (FIGURES | {7: (loss + 2**-50, norm, None)}).items())
    assert run.find_difference().startswith("step 7 has [(4.0")
    write_run(tmp_path, [*LINES, (7, (loss + 2**-50, norm, None))])
    assert run.find_difference().startswith("step 7 has [(4.0")
    write_run(tmp_path, [*LINES, LINES[6]])
    assert run.find_difference().startswith("step 7 has [(4.0")
    write_run(tmp_path, without(4))
    assert run.find_difference().startswith("step 4 has None instead of ")


def test_only_a_line_that_was_damaged_may_be_missing(tmp_path):
    """A flip in the end of a line damages two. A line may be damaged again."""
    write_run(tmp_path)
    run = Disturbed(tmp_path, UNDISTURBED)
    for seed in range(60):
        run.damage(Fault("flip in run", seed))
        (tmp_path / "run/result.json").write_text(add_crc32(json.dumps(ROW)) + "\n")
    assert run.find_difference() is None  # with the damaged lines, as in a run that was already done
    assert 3 < len(run.damaged_steps) < 15
    other = min({*FIGURES} - run.damaged_steps)
    write_run(tmp_path, without(*run.damaged_steps))
    assert run.find_difference() is None
    write_run(tmp_path, (FIGURES | dict.fromkeys(run.damaged_steps, (1.0, 1.0, None))).items())
    assert run.find_difference().startswith(f"step {min(run.damaged_steps)} has [(1.0")
    write_run(tmp_path, without(*run.damaged_steps, other))
    assert run.find_difference().startswith(f"step {other} has None")


def test_another_row_and_a_temporary_file_are_found(tmp_path):
    run, result = Disturbed(tmp_path, UNDISTURBED), tmp_path / "run/result.json"
    for row, problem in (
        (ROW | {"status": "failed: no"}, "the row has the status failed: no"),
        (ROW | {"more": 1}, "the row has other keys: more"),
        (ROW | {"perf/more": 1}, None),
    ):
        write_run(tmp_path)
        result.write_text(add_crc32(json.dumps(row)) + "\n")
        assert run.find_difference() == problem
    (tmp_path / "run/.result.json-71-0").touch()
    assert run.find_difference().startswith("temporary files are left: ")


def test_a_link_to_another_checkpoint_than_the_best_one_is_found(tmp_path, monkeypatch):
    write_run(tmp_path)
    losses = {"step-000009": 1.0, "step-000012": 2.0}
    monkeypatch.setattr("tests.crashtest.judge.read_manifest", lambda path: {"val_loss": losses[path.name]})
    best = tmp_path / "run/checkpoints/best"
    for name in losses:
        best.symlink_to(name)
        problem = Disturbed(tmp_path, UNDISTURBED).find_difference()
        assert problem is None if name == "step-000009" else problem.startswith("`best` leads to ")
        best.unlink()


REFUSED = End(1, "step 00001/00015 | loss 5\nerror: no\n")
GOES_ON = End(0, "step 00013/00015 | loss 5\n")


@pytest.mark.parametrize(
    ("kind", "end", "problem"),
    [
        (KILL, GOES_ON, None),
        (KILL_AT, End(-9, ""), None),
        (FULL_LOG, End(-9, ""), "exit code -9: it printed nothing"),
        (KILL, End(None, ""), "it hangs"),
        ("EIO at an operation", End(1, "error: no\n"), None),
        ("EINTR at an operation", End(1, "error: no\n"), "exit code 1: no"),
        (FULL_LOG, End(1, "error: no\n"), "exit code 1: no"),
        (KILL, End(1, "error: no\n"), "exit code 1: no"),
        ("EIO at an operation", End(1, "error: no\nerror: no\n"), "exit code 1: no"),
        ("EIO at an operation", End(1, "no\n"), "exit code 1: no"),
        (
            "EIO at an operation",
            End(1, "Traceback (most recent call last):\nOSError: no\n"),
            "a traceback: OSError: no",
        ),
        (KILL, End(0, "Traceback (most recent call last):\nOSError: no\n"), "a traceback: OSError: no"),
        (KILL, REFUSED._replace(code=0), "it went on with step 1, and the newest valid checkpoint was 12"),
        ("stopped tracker", End(1, "error: no\n"), "exit code 1: no"),
    ],
)
def test_what_is_wrong_with_the_end_of_a_process_is_found(tmp_path, monkeypatch, kind, end, problem):
    monkeypatch.setattr("tests.crashtest.judge.verify", lambda path: True)
    write_run(tmp_path)
    assert Disturbed(tmp_path, UNDISTURBED).check_end(kind, end, [12, 9]) == problem


def test_a_lost_checkpoint_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.crashtest.judge.verify", lambda path: True)
    write_run(tmp_path)
    run = Disturbed(tmp_path, UNDISTURBED)
    for before, problem in (
        ([12, 9, 5], None),  # the best one became the newest
        ([15, 12], "of the valid checkpoints [15, 12] there are [12, 9]"),
    ):
        assert run.check_end(KILL, End(-9, ""), before) == problem
    shutil.rmtree(tmp_path / "run/checkpoints/step-000009")
    assert run.check_end(KILL, End(-9, ""), [12, 9]) == "of the valid checkpoints [12, 9] there are [12]"


def test_a_refusal_is_allowed_after_a_damage_but_not_of_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.crashtest.judge.verify", lambda path: True)
    write_run(tmp_path)
    run = Disturbed(tmp_path, UNDISTURBED)
    for kind, problem in (("flip in data", None), ("flip in checkpoint", "exit code 1: no")):
        damage, _ = run.damage(Fault(kind, 0))
        assert run.check_end(kind, End(1, "error: no\n"), [12, 9], damage) == problem
        assert run.check_end(kind, End(-9, ""), [12, 9], damage) is not None


def test_a_reader_that_hangs_does_not_hang_the_judge(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.crashtest.judge.READ_SECONDS", 1)
    monkeypatch.setattr("tests.crashtest.judge.read_figures", lambda folder: time.sleep(100))
    with pytest.raises(Hang, match="hangs"):
        Disturbed(tmp_path, UNDISTURBED).find_difference()


def test_the_processes_of_a_tracker_are_stopped_and_killed():
    """And no other process that a run has started."""

    def states():
        """Return the name and the state of each process of the tracker, and then of the other children."""
        tracker_processes = tracker.tracker_of(process.pid)
        others = sorted(set(tracker.children_of(process.pid)) - set(tracker_processes))
        stats = [Path(f"/proc/{child}/stat").read_text() for child in [*tracker_processes, *others]]
        return [re.search(r"\((.*)\) (.)", stat).groups() for stat in stats]

    def wait_for(state):
        deadline = time.monotonic() + 20
        while states() != [("sh", state), ("sleep", state), ("sleep", "S")]:
            assert time.monotonic() < deadline, states()
            time.sleep(0.01)

    program = f"sleep 60 & sh -c 'sleep 50; true' {tracker.PROGRAM}; true"
    process = subprocess.Popen(["sh", "-c", program], start_new_session=True)
    try:
        wait_for("S")  # between vfork() and exec() a stopped child blocks its parent, which then cannot stop
        assert tracker.signal_tracker(process.pid, signal.SIGSTOP, 0, 20)
        wait_for("T")
        [other] = set(tracker.children_of(process.pid)) - set(tracker.tracker_of(process.pid))
        assert not tracker.signal_tracker(other, signal.SIGKILL, 0, 0.1)  # it has no tracker
        assert tracker.send(tracker.open_all(tracker.tracker_of(process.pid)), signal.SIGKILL)
        process.wait(20)
        assert not tracker.signal_tracker(process.pid, signal.SIGKILL, 0, 20)  # the run has ended
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


KILLED_IN_A_BAR = """
import os, signal
from runtime.console import progress_bar
with progress_bar(1, 0) as bar:
    bar.write("before")
if (process := os.fork()) == 0:
    bar.get_lock().acquire()
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(process, 0)
with progress_bar(1, 0) as bar:
    bar.write("after")
"""


@pytest.mark.usefixtures("quick_python")
def test_a_fork_that_is_killed_while_it_draws_a_bar_blocks_no_other_bar(tmp_path):
    """A bar of the parent or of a later fork would wait for ever: tqdm's lock is shared with forks."""
    command = [sys.executable, "-c", KILLED_IN_A_BAR]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "before\nafter\n"), done.stderr


def test_every_kind_is_drawn_and_a_seed_draws_the_same():
    drawn, again = ([faults.draw_faults(rng, kind, KINDS) for kind in KINDS] for rng in map(random.Random, (7, 7)))
    assert drawn == again
    assert all(kind in [fault.kind for fault in both] for kind, both in zip(KINDS, drawn, strict=True))
    assert {len(both) for both in drawn} == {1, 2}
    errors = [Fault(kind, seed) for kind in ERRORS for seed in range(2)]
    assert {fault.is_forever() for fault in errors} == {True, False}


@pytest.fixture
def command(called, monkeypatch, tmp_path):
    """Run the command with a made-up train.py: it ends with `codes[kind]`, and leaves `figures[kind]`.

    The kind of a run without a fault is that of the fault before it.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tests.crashtest.judge.verify", lambda path: True)

    def call(*arguments, codes=(), figures=()):
        commands, before = [], {}

        def train(self, folder, fault=faults.NO_FAULT):
            commands.append(self.words)
            before[folder] = kind = fault.kind or before.get(folder)
            shutil.rmtree(folder, ignore_errors=True)  # a FIFO would hang write_run()
            write_run(folder, dict(figures).get(kind, FIGURES).items())
            (folder / "log.txt").touch()
            code = dict(codes).get(kind, -9 if fault.kind in (KILL, KILL_AT, *DAMAGES) else 0)
            return End(code, "error: it failed\n"), fault.kind or None

        monkeypatch.setattr(script.Trainer, "train", train)
        return *called("crashtest", script.main, "--out_dir", "out", *arguments), commands

    return call


def test_a_table_of_what_was_tried_and_survived(command):
    code, out, err, commands = command("--runs", len(KINDS), "--", "kernels=mine")
    assert (code, err) == (0, "")
    assert all({"kernels=mine", "train.resume=auto"} <= {*words} for words in commands)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("| ")]
    assert [row[0] for row in cells[1:]] == [*KINDS, "all"]
    assert all(int(tried) >= 1 and tried == survived and lost == "0" for _, tried, survived, lost in cells[1:])
    assert {path.name for path in Path("out").iterdir()} == {"undisturbed", "again", "text.txt"}


@pytest.mark.parametrize("how", ["codes", "figures"])
def test_a_lost_run_is_named_and_the_exit_code_is_1(command, how):
    """A run that was killed does not resume, or resumes with another loss."""
    lost = {"codes": {KILL: 1}, "figures": {KILL: FIGURES | {5: (0.0, 0.0, None)}}}[how]
    code, out, err, _ = command("--runs", 10, "--kinds", "kill", "full log", **{how: lost})
    assert code == 1
    [line, *_] = [line for line in out.splitlines() if " | lost: " in line]
    reason = {"codes": "exit code 1: it failed", "figures": "step 5 has [(0.0, 0.0, None)] instead of "}[how]
    assert f" | lost: {reason}" in line
    assert f"of 10 runs were lost: see {line[:3]}" in err
    assert Path("out", line[:3], "log.txt").exists()


def test_a_folder_is_used_once(command, tmp_path):
    assert command("--runs", 1)[0] == 0
    error = f"error: {tmp_path}/out already holds a crashtest; choose another folder\n"
    assert command("--runs", 1)[2] == error


WORDS = ["device=cpu", "precision=fp32", "model.dropout=0.1"]
PROGRAM = """
from tests.crashtest.inject import preload
preload()
{change}
from tests.crashtest.__main__ import main
main()
"""
SAVE_THE_NEXT_STEP = """
from runtime.saver import Checkpoints
save = Checkpoints.save
Checkpoints.save = lambda self, step, *arguments: save(self, step + 1, *arguments)
"""
SHORT_DEADLINES = f"""
from runtime import trackers
vars(trackers).update({SHORT})
"""


def run_program(folder, change, *arguments):
    """Run the command with changed modules, in a new process into which faults.c is preloaded."""
    command = [sys.executable, "-c", PROGRAM.format(change=change), *arguments, "--out_dir", "out", "--", *WORDS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)


@NEEDS_COMPILER
def test_a_saver_that_loses_a_step_is_found(tmp_path):
    """Its checkpoint says that one more step is done. Nothing else in the run is wrong."""
    done = run_program(tmp_path, SAVE_THE_NEXT_STEP, "--runs", "1", "--seed", "40", "--kinds", KILL_AT)
    assert done.returncode == 1
    assert re.search(r" \| lost: step \d+ has ", done.stdout), done.stderr


@NEEDS_COMPILER
@pytest.mark.exhaustive
def test_a_sample_of_the_kinds_loses_nothing(tmp_path):
    """Every eighth kind of fault, each together with random others. All kinds take 3 minutes on one core."""
    kinds = KINDS[0::8]
    done = run_program(tmp_path, SHORT_DEADLINES, "--runs", str(len(kinds)), "--seed", "1", "--kinds", *kinds)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"done     {len(kinds)} runs, ")
