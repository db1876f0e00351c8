"""Requeueing, and the end of a command whose output nobody reads. Other tests of signals are beside the commands."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runtime.row import status_of
from runtime.signals import STOPPED, Signals, Stopped, exit_quietly, requeue_slurm_job

ROOT = Path(__file__).parents[2]
ANSWER = "SIGINT   ends the run after its step, or at its end; a second Ctrl-C ends it at once\n"
LONG = "print('line\\n' * 100_000)"
SHORT = "print('line'); time.sleep(0.5); print('line')"  # stays in the buffer until the end
OTHER_PIPE = "read, write = os.pipe(); os.close(read); os.write(write, b'x')"


def pipe_into(reader: str, *command: str) -> tuple[int, str]:
    """Run Python in a shell as `command | reader`. Return its exit code, and what it wrote to stderr."""
    words = "'" + "' '".join([sys.executable, *(word.replace("'", "'\\''") for word in command)]) + "'"
    shell = f"{words} | {reader} > /dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=120)
    return int(done.stdout), done.stderr


@pytest.mark.parametrize("work", [LONG, SHORT, LONG + "; sys.exit(1)"])
def test_a_reader_that_ends_early_ends_the_program_without_a_traceback(work):
    program = f"import os, sys, time\nfrom runtime.signals import exit_quietly\nwith exit_quietly(): {work}"
    assert pipe_into("head -c 1", "-c", program) == (141, "")


COMMAND = """
import os
from dataclasses import dataclass
from pathlib import Path
from runtime.config import cli

@dataclass
class Config:
    lines: int

os.chdir({folder!r})  # for the files that Hydra writes
cli(Config, Path({folder!r}), "command")(lambda cfg: print("line\\n" * cfg.lines))()
"""


def test_a_command_of_hydra_ends_without_a_line_when_its_reader_ends(tmp_path):
    (tmp_path / "command.yaml").write_text("lines: 100_000")
    assert pipe_into("head -c 1", "-c", COMMAND.format(folder=str(tmp_path))) == (141, "")


def test_the_broken_pipe_of_another_process_is_an_error():
    program = f"import os\nfrom runtime.signals import exit_quietly\nwith exit_quietly(): {OTHER_PIPE}"
    code, err = pipe_into("cat", "-c", program)
    assert (code, err.splitlines()[-1]) == (1, "BrokenPipeError: [Errno 32] Broken pipe")


@pytest.mark.parametrize("command", [["train.py", "--help"], ["-m", "scripts.reproduce", "--help"]])
def test_the_help_of_a_command_may_be_cut_off(command):
    """`true` ends before the command prints anything. argparse itself ignores this and exits with 0."""
    code, err = pipe_into("true", *command)
    assert (code in (0, 141), err) == (True, "")


@pytest.mark.parametrize(
    ("name", "code", "requeued"), [("SIGUSR1", STOPPED, True), ("SIGTERM", STOPPED, False), ("SIGUSR1", 1, False)]
)
def test_only_slurms_warning_requeues_and_only_a_run_that_can_resume(
    monkeypatch, tmp_path, capsys, name, code, requeued
):
    """scancel sends SIGTERM, too. If scontrol fails, a warning says what to do."""
    calls = []
    failed = subprocess.CompletedProcess([], 1, stderr="slurm_requeue error: Job is disabled\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: calls.append(command) or failed)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.delenv("RANK", raising=False)
    signals = Signals(requeue=True)
    with contextlib.suppress(Stopped), signals:
        signals.looping = True
        os.kill(os.getpid(), signal.Signals[name])
        raise Stopped(code, "after step 4")
    assert calls == [["scontrol", "requeue", "42"]] * requeued
    warning = "warning: `scontrol requeue 42` failed, so submit the job again: slurm_requeue error: Job is disabled\n"
    assert capsys.readouterr().err == warning * requeued


def test_outside_a_slurm_job_nothing_is_requeued(monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(subprocess, "run", None)
    requeue_slurm_job()
    message = "requeues nothing outside a SLURM job: SLURM_JOB_ID is not set; start the run again"
    assert capsys.readouterr().err == f"warning: runtime.requeue=true {message}\n"


ON_A_TERMINAL = """
import signal, time
from runtime.signals import Signals, exit_quietly
signal.signal(signal.SIGHUP, signal.{handler})
with exit_quietly(), Signals() as signals:
    signals.looping = True
    print("started", flush=True)
    while not signals.received:
        time.sleep(0.01)
    print("one more line", flush=True)
    signals.stop("after step 4")
"""


@pytest.mark.parametrize(("handler", "code"), [("SIG_DFL", STOPPED), ("SIG_IGN", None)])
def test_a_loop_ends_after_its_step_when_its_terminal_closes(handler, code):
    """It prints a line to the closed terminal. Under nohup, which ignores SIGHUP, it goes on."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", ON_A_TERMINAL.format(handler=handler)])
    while not os.read(terminal, 100).endswith(b"\n"):
        pass  # the print has not ended
    os.close(terminal)
    if code is None:
        time.sleep(0.2)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (code or -signal.SIGKILL)


# an interrupt within __set_name__, which Python 3.11 turns into a RuntimeError
IN_A_CLASS = "type('C', (), {'a': type('D', (), {'__set_name__': lambda *_: interrupt()})()})"


@pytest.mark.parametrize(
    "moment",
    [
        "exit_on_early_interrupt(); interrupt(); interrupt()",
        "exit_on_early_interrupt()\nwith exit_quietly(): interrupt()",
        "atexit.register(interrupt)\nwith exit_quietly(): interrupt()",  # the second Ctrl-C comes at the very end
        "threading._register_atexit(interrupt)\nwith exit_quietly(): interrupt()",  # Python waits for its threads
        f"with exit_quietly(): {IN_A_CLASS}",
    ],
)
def test_two_interrupts_are_one_line(moment):
    program = "import atexit, os, signal, threading\n"
    program += "from runtime.interrupt import exit_on_early_interrupt\nfrom runtime.signals import exit_quietly\n"
    program += f"def interrupt(): os.kill(os.getpid(), signal.SIGINT)\n{moment}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_signal_that_became_another_error_is_the_reason():
    """The row names the signal, and the exit code is the signal's. An error during the clean-up stays an error."""
    error = RuntimeError("Error calling __set_name__")
    error.__cause__ = Stopped(143, "SIGTERM")
    assert status_of(error) == "stopped: SIGTERM"
    with pytest.raises(SystemExit) as stopped, exit_quietly():
        raise error
    assert stopped.value.code == 143
    error = OSError("the disk is full")
    error.__context__ = Stopped(143, "SIGTERM")
    assert status_of(error) == "failed: the disk is full"
    with pytest.raises(OSError, match="full"), exit_quietly():
        raise error


# the first slow import, the first of another package, and the slowest
@pytest.mark.parametrize("module", ["subprocess", "hydra", "torch"])
@pytest.mark.parametrize("command", [["train.py"], ["-m", "scripts.doctor"], ["-m", "scripts.blame"]])
def test_a_command_answers_an_interrupt_while_it_imports(tmp_path, command, module):
    """Here the import of this module is the interrupt."""
    (tmp_path / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise KeyError")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


IN_ONE_INSTRUCTION = """
import hashlib
from runtime.signals import Signals
with Signals() as signals:
    if {looping}:
        signals.start_loop(lambda status: print(status, flush=True))
    print("started", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes in C, as a backward on a CPU: Python calls no handler
"""


@pytest.mark.parametrize("looping", [True, False])
def test_ctrl_c_is_answered_within_an_instruction_of_minutes(looping):
    """In a loop, the first one prints a line, and the second one ends the process and writes its status."""
    command = [sys.executable, "-c", IN_ONE_INSTRUCTION.format(looping=looping)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"started\n"
    time.sleep(0.3)  # until the instruction has begun
    process.send_signal(signal.SIGINT)
    if looping:
        assert process.stderr.readline() == ANSWER.encode()
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    expected = b"stopped: SIGINT twice\n" if looping else b""
    assert (process.returncode, out, err) == (130, expected, b"interrupted\n")


def test_the_answer_to_ctrl_c_is_printed_before_the_program_ends(capfd, monkeypatch):
    """On a busy machine, the thread that prints it begins late."""
    answer = Signals._answer_interrupt
    monkeypatch.setattr(Signals, "_answer_interrupt", lambda *given: time.sleep(0.5) or answer(*given))
    with Signals() as signals:
        signals.start_loop(print)
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == ANSWER


def test_ctrl_c_counts_once_with_a_forked_child(monkeypatch):
    """The terminal sends it to the child, too."""
    ends, threads = [], set(threading.enumerate())
    monkeypatch.setattr("runtime.signals.exit_at_once", lambda: ends.append("exit"))
    monkeypatch.setattr("runtime.signals.HANDLER_SECONDS", 0)
    with Signals() as signals:
        signals.start_loop(ends.append)
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGINT)
            os._exit(0)
        os.waitpid(child, 0)
        signal.raise_signal(signal.SIGINT)
        assert signals.received == "SIGINT"
        [reader] = set(threading.enumerate()) - threads
    reader.join(60)
    assert ends == []


def test_the_wakeup_descriptor_of_the_process_is_restored():
    threads = set(threading.enumerate())
    with Signals():
        [reader] = set(threading.enumerate()) - threads
    assert signal.set_wakeup_fd(-1) == -1
    reader.join(60)
    assert not reader.is_alive()
