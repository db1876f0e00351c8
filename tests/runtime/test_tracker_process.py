"""A tracker that is killed, stopped or mute, or whose library does anything, never ends or stops a run.

Most tests replace W&B by a small package, whose faults are quick. The exhaustive tests hurt W&B itself.
"""

import contextlib
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from runtime import trackers
from runtime.signals import Signals
from runtime.trackers import LoggerConfig, Tracker
from tests.runtime.test_signals import ANSWER
from tests.test_repo import ROOT

OFFLINE = "wandb", "offline", "hotswap", None, None, None, [], None, False
ROW = {"name": "a", "config": {"lr": 0.1}, "status": "ok", "command": "python train.py"}
SMALL = "+experiment=smoke", "logger=wandb", "out_dir=run", "train.max_steps=6", "train.eval_every=6", "model.n_layer=1"
SMALL += "train.log_every=1", "train.sample_tokens=0"
SHORT = {"ANSWER_SECONDS": 5, "FINISH_SECONDS": 4, "GRACE": 3, "INIT_SECONDS": 3, "IMPORT_SECONDS": 20}
END = ", and the command continues without it; its own files have all figures\n"
PACKAGE = '''
"""The parts of W&B that are used here. It writes each call to the file CALLS. FAULT is "PLACE FAULT"."""
import json, os, signal, subprocess, sys, time


def sleep():
    subprocess.Popen(["sleep", "1000"], start_new_session=True)  # as W&B starts its process
    time.sleep(1000)


FAULTS = {
    "raises": lambda: 1 / 0,
    "raises lines": lambda: exec("raise RuntimeError('no\\\\nway')"),
    "raises BaseException": lambda: exec("raise BaseException"),
    "exits": lambda: sys.exit(3),
    "exits at once": lambda: os._exit(3),
    "crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleeps": sleep,
    "closes all files": lambda: os.closerange(0, 100),
    "prints": lambda: [os.write(number, b"noise\\n" * 9999) for number in (1, 2)] and print("noise" * 9999),
    "reads stdin": lambda: sys.stdin.read(),
}


def call(place, *arguments, **options):
    with open(os.environ["CALLS"], "a") as file:
        print(json.dumps([place, arguments, options], default=str), file=file)
    where, _, fault = os.environ.get("FAULT", "").partition(" ")
    if where == place:
        FAULTS[fault]()


class Settings(dict):
    def __init__(self, **values):
        self.update(values)


class Run:
    offline, dir, summary = True, "run/files", {}

    def __getattr__(self, name):
        return lambda *arguments, **options: call(name, *arguments, **options)


class Table:
    def __init__(self, columns, data):
        self.rows = [columns, *data]

    def __str__(self):
        return str(self.rows)


def setup(settings):
    call("setup")


def init(**options):
    call("init", **options)
    return Run()


call("import")
'''
FAILURES = {  # fault -> the reason in the warning, or None without one
    "raises": "division by zero",
    "raises lines": "no way",
    "raises BaseException": "BaseException",
    "exits": "3",
    "exits at once": "its process ended with exit code 3",
    "crashes": "its process ended with exit code -11 (Segmentation fault)",
    "is killed": "its process ended with exit code -9 (Killed)",
    "is stopped": "its process did not answer within 1 s",
    "sleeps": "its process did not answer within 1 s",
    "closes all files": "its process ended with exit code ",
    "prints": None,
    "reads stdin": None,
}


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A tracker whose process imports PACKAGE."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake/wandb.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(trackers, "find_spec", lambda name: True)
    tracker = Tracker(LoggerConfig(*OFFLINE))
    yield tracker
    tracker._end()


def calls():
    return [json.loads(line) for line in Path("calls").read_text().splitlines()]


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def answered(tracker):
    """Wait until the tracker has answered all calls so far."""

    def is_idle():
        tracker._exchange()
        return not tracker.limits

    wait_until(is_idle)


def members(group, command=""):
    """Return the living processes of a process group whose command has this word."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, its_group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX" and command in (path / "cmdline").read_text():
                found.append(int(path.name))
    return found


def wait_for_end(group):
    """Wait until no process of the group lives."""
    wait_until(lambda: not members(group))


def test_the_library_gets_each_call_in_order(fake, tmp_path, capfd, monkeypatch):
    """And the arguments and the program of this process, of which W&B shows the command."""
    monkeypatch.setattr("sys.argv", ["train.py", "seed=2"])
    fake.start(tmp_path, ROW)
    fake.log(1, {"perf/tokens_per_sec": 2.5, "gone": None})
    fake.log_table("sample", ["text"], [["é\n"]])
    answered(fake)
    [process] = members(fake.process.pid)
    words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
    variables = Path(f"/proc/{process}/environ").read_text().split("\0")
    fake.finish(ROW)
    assert (words[-2], "WANDB_PROGRAM=train.py" in variables) == ("seed=2", True)
    assert capfd.readouterr() == ("", "")
    (setup, init, *rest), options = zip(*[(place, options) for place, _, options in calls()][1:], strict=True)
    assert (setup, init, options[1]["config"]["lr"], options[1]["name"]) == ("setup", "init", 0.1, "a")
    assert rest == ["define_metric", "log", "log", "finish"]
    figures = {"perf/tokens_per_sec": 2.5, "gone": None}
    assert [arguments for place, arguments, _ in calls() if place == "log"] == [
        [figures],
        [{"sample": "[['text'], ['é\\n']]"}],
    ]
    assert options[-1] == {"exit_code": 0}
    wait_for_end(fake.process.pid)


@pytest.fixture
def impatient(monkeypatch):
    """A process has 1 s for each call."""
    limits = {"ANSWER_SECONDS": 1, "IMPORT_SECONDS": 1, "INIT_SECONDS": 0, "FINISH_SECONDS": 1, "GRACE": 0}
    for name, seconds in limits.items():
        monkeypatch.setattr(trackers, name, seconds)


def cases():
    """Yield each fault in each place, of which most are exhaustive."""
    for place, fault in itertools.product(("import", "init", "log", "finish"), FAILURES):
        is_quick = place == "log" or fault in ("raises", "is stopped")
        yield pytest.param(place, fault, marks=[] if is_quick else pytest.mark.exhaustive)


@pytest.mark.parametrize(("place", "fault"), cases())
def test_no_fault_of_a_library_ends_or_stops_the_run(fake, tmp_path, capfd, monkeypatch, request, place, fault):
    """It is one warning, no process is left, and the library gets no further calls."""
    monkeypatch.setenv("FAULT", f"{place} {fault}")
    if fault in ("is stopped", "sleeps"):
        request.getfixturevalue("impatient")
    start = time.monotonic()
    fake.start(tmp_path, ROW)
    fake.log(1, {"loss": 2.5})
    fake.finish(ROW)
    assert time.monotonic() - start < 30
    out, err = capfd.readouterr()
    reason = FAILURES[fault]
    if reason is None:
        assert err == ""
    elif place == "init" and fault in ("raises", "raises lines"):
        assert err == f"warning: the run continues without W&B: {reason}\n"
    else:
        assert err.startswith(f"warning: W&B failed ({reason}")
        assert err.endswith(END)
    assert (out, err.count("\n")) == ("", 0 if reason is None else 1)
    wait_for_end(fake.process.pid)
    if fault != "closes all files":  # the process has read the other calls before
        assert calls()[-1][0] == ("finish" if reason is None else place)


def test_a_stopped_process_takes_no_time_of_the_loop(fake, tmp_path, capfd):
    """10,000 lines of 1 KB are more than a socket holds."""
    fake.start(tmp_path, ROW)
    answered(fake)
    os.kill(fake.process.pid, signal.SIGSTOP)
    seconds = []
    for step in range(10_000):
        start = time.perf_counter()
        fake.log(step, {"text": "a" * 1000})
        seconds.append(time.perf_counter() - start)
    assert sum(seconds) < 10
    os.kill(fake.process.pid, signal.SIGCONT)
    fake.finish(ROW)
    assert [arguments[0]["text"] for place, arguments, _ in calls() if place == "log"] == 10_000 * ["a" * 1000]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_for_a_tracker(fake, tmp_path, capfd, monkeypatch, number):
    """The run itself goes on to its end, as after any signal in its last step."""
    monkeypatch.setenv("FAULT", "finish sleeps")
    fake.start(tmp_path, ROW)
    answered(fake)
    with Signals() as signals:
        signals.start_loop(print)
        timer = threading.Timer(0.5, os.kill, (os.getpid(), number))
        timer.start()
        start = time.monotonic()
        fake.finish(ROW)
        assert 0.4 < time.monotonic() - start < 10
        timer.join()
    lines = [f"warning: W&B failed (a signal ended the wait for it){END}"]
    if number == signal.SIGINT:
        lines.append(ANSWER)  # a thread prints it, before or after the warning
    assert sorted(capfd.readouterr().err.splitlines(keepends=True)) == sorted(lines)
    wait_for_end(fake.process.pid)


def test_a_run_that_a_signal_has_ended_waits_a_short_time_for_its_tracker(fake, tmp_path, capfd, monkeypatch):
    """SLURM and Kubernetes kill it 30 s after the signal."""
    assert trackers.SIGNAL_SECONDS <= 15
    monkeypatch.setattr(trackers, "SIGNAL_SECONDS", 1)
    monkeypatch.setattr(Signals, "count", 1)
    monkeypatch.setenv("FAULT", "finish sleeps")
    fake.start(tmp_path, ROW)
    answered(fake)
    start = time.monotonic()
    fake.finish(ROW)
    assert 0.9 < time.monotonic() - start < 10
    assert capfd.readouterr().err == f"warning: W&B failed (its process did not answer within 1 s){END}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_the_process_of_the_tracker_does_nothing(fake, tmp_path, capfd, number):
    """SLURM sends SIGUSR1 and SIGTERM to each process of a job."""
    fake.start(tmp_path, ROW)
    answered(fake)
    os.kill(fake.process.pid, number)
    fake.finish(ROW)
    assert (calls()[-1][0], capfd.readouterr()) == ("finish", ("", ""))


def test_the_button_that_stops_a_run_in_wandb_stops_it_after_its_step(fake, tmp_path):
    fake.start(tmp_path, ROW)
    answered(fake)
    with Signals() as signals:
        signals.start_loop(print)
        fake._do("stop", None)
        assert signals.received == "SIGINT"


@pytest.mark.parametrize(("fault", "pause"), [("", 0), ("", 0.5), ("finish sleeps", 0), ("log sleeps", 0)])
def test_the_tracker_of_a_killed_run_ends_it_as_failed(fake, tmp_path, monkeypatch, fault, pause):
    """And its process ends within some time, also if its library does not."""
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}/fake")
    source = f"""
import os, time
from pathlib import Path
from runtime import trackers
trackers.IMPORT_SECONDS = trackers.INIT_SECONDS = trackers.GRACE = trackers.FINISH_SECONDS = 0.5
tracker = trackers.Tracker(trackers.LoggerConfig(*{OFFLINE}))
tracker._open()
trackers.IMPORT_SECONDS = 60  # for this process
tracker.start(Path("."), {ROW})
while tracker.limits:
    time.sleep(0.02)
    tracker._exchange()
tracker.log(1, {{"loss": 2.5}})
print(tracker.process.pid, flush=True)
time.sleep({pause})  # long enough for an answer, which is not read
os.kill(os.getpid(), 9)
"""
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (-signal.SIGKILL, "")
    wait_for_end(int(run.stdout))
    place, _, options = calls()[-1]
    assert (place, options.get("exit_code")) == (("log", None) if fault == "log sleeps" else ("finish", 1))


def test_a_process_that_cannot_be_started_is_a_warning(fake, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    fake.start(tmp_path, ROW)
    fake.log(1, {"loss": 2.5})
    fake.finish(ROW)
    err = capfd.readouterr().err
    assert err.startswith("warning: W&B failed ([Errno 2] No such file or directory")
    assert err.count("\n") == 1


def test_a_report_that_wandb_does_not_take_is_a_warning(fake, impatient, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("FAULT", "init sleeps")
    assert fake.publish_report(tmp_path, "a", [["column"], [1]], []) is None
    assert capfd.readouterr().err == f"warning: W&B failed (its process did not answer within 2 s){END}"


def assert_ends_well(result):
    """The run has all of its figures, and at most one warning."""
    code, _, err = result
    assert (code, err.count("\n")) == (0, err.count("warning: "))
    assert err.count("\n") <= 1
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 6
    assert json.loads(Path("run/result.json").read_text())["status"] == "ok"


@pytest.fixture
def process(monkeypatch):
    """A function that returns the tracker of the run, which has answered all calls so far."""
    made, start = [], Tracker.start

    def record(self, *arguments):
        made.append(self)
        start(self, *arguments)

    monkeypatch.setattr(Tracker, "start", record)

    def get():
        answered(made[0])
        return made[0]

    yield get
    wait_for_end(made[0].process.pid)


@pytest.fixture
def after_step_3(monkeypatch):
    """after_step_3(function) calls the function between two steps of a run."""
    from model import capture

    step = capture.train_step

    def use(function):
        def hooked_step(model, optimizer, batches, lr):
            if optimizer.steps == 3:
                function()
            return step(model, optimizer, batches, lr)

        monkeypatch.setattr(capture, "train_step", hooked_step)

    return use


def test_a_run_whose_tracker_is_killed_ends_well(fake, hotswap, process, after_step_3):
    after_step_3(lambda: os.kill(process().process.pid, signal.SIGKILL))
    result = hotswap(*SMALL)
    assert_ends_well(result)
    assert result[2] == f"warning: W&B failed (its process ended with exit code -9 (Killed)){END}"


HURTS = {
    "kill": lambda number: os.kill(number, signal.SIGKILL),
    "stop": lambda number: os.kill(number, signal.SIGSTOP),
    "full disk": lambda number: resource.prlimit(number, resource.RLIMIT_FSIZE, (100, 100)),
}


@pytest.fixture
def real(monkeypatch):
    """W&B itself. Its process has 5 s for a call."""
    pytest.importorskip("wandb", reason="W&B is not installed")
    for name, seconds in SHORT.items():
        monkeypatch.setattr(trackers, name, seconds)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("victim", "hurt"), [*(("wandb-core", hurt) for hurt in HURTS), ("tracker_process", "full disk")]
)
@pytest.mark.parametrize("when", ["training", "finish"])
def test_a_run_ends_well_when_its_tracker_is_hurt(
    real, hotswap, process, after_step_3, monkeypatch, hurt, victim, when
):
    """The faults of the small package above kill and stop tracker_process in each of its calls."""

    def hurt_victim():
        for number in members(process().process.pid, victim):
            HURTS[hurt](number)

    def finish(self, row, original=Tracker.finish):
        hurt_victim()
        original(self, row)

    if when == "training":
        after_step_3(hurt_victim)
    else:
        monkeypatch.setattr(Tracker, "finish", finish)
    result = hotswap(*SMALL)
    assert_ends_well(result)
    assert result[2] or hurt == "full disk"


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", ["wandb-core", "tracker_process"])
def test_a_run_ends_well_when_its_tracker_is_killed_at_any_time(real, tmp_path, capfd, victim):
    """Also while W&B starts, and at its end."""
    kills = 0
    for moment in range(0, 30, 4):
        tracker = Tracker(LoggerConfig(*OFFLINE))
        (tmp_path / str(moment)).mkdir()
        tracker.start(tmp_path / str(moment), ROW)
        end, step = time.monotonic() + moment / 10, 0
        while time.monotonic() < end:
            tracker.log(step := step + 1, {"loss": 2.5})
            time.sleep(0.01)
        found = members(tracker.process.pid, victim)
        for number in found:
            os.kill(number, signal.SIGKILL)
        kills += len(found)
        tracker.finish(ROW)
        wait_for_end(tracker.process.pid)
        err = capfd.readouterr().err
        assert err.count("\n") == err.count("warning: ") <= len(found)
    assert kills >= 3


@pytest.mark.exhaustive
def test_two_interrupts_end_a_run_whose_tracker_is_stopped(real, tmp_path):
    """W&B alone would wait for ever, and ignore them."""
    command = [sys.executable, ROOT / "train.py", *SMALL, "train.max_steps=100000", "data.cache=tokens"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    wait_until(lambda: any(members(int(child), "wandb-core") for child in children.read_text().split()))
    [group] = [int(child) for child in children.read_text().split() if members(int(child), "wandb-core")]
    wait_until(lambda: len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) > 100)
    for number in members(group):
        os.kill(number, signal.SIGSTOP)
    start = time.monotonic()
    run.send_signal(signal.SIGINT)
    time.sleep(2)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=20)
    assert time.monotonic() - start < 10
    wait_for_end(group)


class Server(BaseHTTPRequestHandler):
    """W&B's server, as far as the start of a run needs it, until it is mute."""

    mute = threading.Event()

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.mute.is_set():
            time.sleep(60)
            return
        project = {"id": "1", "name": "hotswap", "entity": {"id": "1", "name": "me"}}
        name = request.get("variables", {}).get("name")
        bucket = {"id": "1", "name": name, "displayName": "", "config": "{}", "historyLineCount": 0, "project": project}
        is_start = "upsertBucket" in request.get("query", "")
        data = {"upsertBucket": {"bucket": bucket, "inserted": True}} if is_start else {"model": None}
        body = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.exhaustive
@pytest.mark.parametrize("end", ["gone", "mute"])
def test_the_end_of_a_run_does_not_wait_for_a_server(real, hotswap, process, after_step_3, monkeypatch, end):
    """W&B alone would wait without a limit. The rest of its data stays on the disk."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.handle_error = lambda *_: None  # the connections break when the server ends
    server.daemon_threads = True
    monkeypatch.setattr(Server, "mute", threading.Event())
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def end_server():
        process()
        if end == "mute":
            Server.mute.set()
        else:
            server.shutdown()
            server.server_close()

    after_step_3(end_server)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    result = hotswap(*SMALL, "logger.mode=online")
    server.server_close()
    assert_ends_well(result)
    [run] = Path("run/wandb").glob("run-*")
    assert "wandb    uploading what is left, for at most 4 s\n" in result[1]
    reason = f"the upload took more than 4 s; to upload the rest: wandb sync {run.resolve()}"
    assert result[2] == f"warning: W&B failed ({reason}){END}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("server", ["refuses", "mute"])
def test_the_run_continues_offline_when_the_server_does_not_answer(real, hotswap, process, monkeypatch, server):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        if server == "mute":
            unused.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        result = hotswap(*SMALL, "logger.mode=online")
    assert_ends_well(result)
    assert result[2].startswith("warning: the run continues offline; `wandb sync` uploads it: ")
    assert list(Path("run/wandb").glob("offline-run-*"))
