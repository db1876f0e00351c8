"""What a worker may do, and how it ends, under each isolation that works on this machine."""

import fcntl
import os
import re
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.channel import CHANNEL, FOLDER
from lab.judge import sandbox
from lab.judge.sandbox import PROCESSES, Ended, Sandbox, changed_files, digest_repo, prefixes
from runtime.folders import COMPILE_CACHES

NAMES = list(prefixes(Path("/")))
# A worker that does not import torch, which takes seconds
START = f"""
import json, os, pickle, subprocess, sys, time
from multiprocessing.connection import Connection
from pathlib import Path

channel, folder = Connection(int(os.environ["{CHANNEL}"])), Path(os.environ["{FOLDER}"])

def answer(**facts):
    channel.send_bytes(json.dumps(facts).encode())

def receive():
    return pickle.loads(channel.recv_bytes())
"""


def worker(folder, code, limit=20.0):
    return Sandbox(["-c", START + code], folder / "worker", limit)


@pytest.fixture
def process(monkeypatch):
    """Run the workers as plain processes, which works everywhere."""
    monkeypatch.setattr(sandbox, "isolation", lambda: PROCESSES)


@pytest.fixture(params=NAMES, ids=lambda name: name.partition(":")[0].replace("a process of its own, ", ""))
def isolated(request, monkeypatch):
    """Run the workers with this isolation. Returns whether it has namespaces."""
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "prefixes", lambda folder: {request.param: prefixes(folder)[request.param]})
        if sandbox.isolation.__wrapped__() != request.param:
            pytest.skip(f"{request.param}: not on this machine")
    monkeypatch.setattr(sandbox, "isolation", lambda: request.param)
    return request.param != PROCESSES


FACTS = """
import socket
import common.terminal

def attempt(work):
    try:
        work()
    except OSError as error:
        return type(error).__name__
    return "done"

outside, port, parent = receive()
Path("/dev/shm", Path(outside).name).touch()
answer(
    code=common.terminal.__file__,
    current=os.getcwd(),
    variables=dict(os.environ),
    inside=attempt((folder / "mine").touch),
    repo=attempt((folder / "repo/train.py").touch),
    outside=attempt(Path(outside).touch),
    network=attempt(lambda: socket.create_connection(("127.0.0.1", port), 5).close()),
    parent=attempt(lambda: os.kill(parent, 0)),
)
"""


def test_what_a_worker_sees_and_reaches(isolated, monkeypatch, tmp_path):
    secrets = "HF_TOKEN", "WANDB_API_KEY", "my_password"
    for name in (*secrets, "HARMLESS"):
        monkeypatch.setenv(name, "value")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    outside = tmp_path / f"outside-{os.getpid()}-{time.monotonic_ns()}"
    with socket.create_server(("127.0.0.1", 0)) as server, worker(tmp_path, FACTS) as started:
        started.send((str(outside), server.getsockname()[1], os.getpid()))
        facts = started.receive()
    assert Path(facts["code"]) == tmp_path / "worker/repo/common/terminal.py"
    assert facts["current"] == os.getcwd()
    assert (facts["inside"], facts["repo"], (tmp_path / "worker/mine").exists()) == ("done", "done", True)
    variables = facts["variables"]
    assert variables["HARMLESS"] == "value"
    assert not variables.keys() & set(secrets)
    assert variables["PYTHONPATH"].split(":") == [str(tmp_path / "worker/repo"), "/somewhere", os.getcwd()]
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", *(f"{name}_CACHE_DIR" for name in COMPILE_CACHES)):
        assert Path(variables[name]).parent == tmp_path / "worker"
    memory = Path("/dev/shm", outside.name)
    shared = memory.exists()
    memory.unlink(missing_ok=True)
    if isolated:
        assert (facts["outside"], outside.exists(), shared) == ("OSError", False, False)
        assert facts["network"] in ("OSError", "ConnectionRefusedError")  # without and with a loopback of its own
        assert facts["parent"] == "ProcessLookupError"
    else:
        assert (facts["outside"], facts["network"], facts["parent"]) == ("done", "done", "done")


LEAVES_A_PROCESS = """
child = "import fcntl, time; file = open('lock', 'w'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); "
child = subprocess.Popen(
    [sys.executable, "-c", child + "time.sleep(600)"], cwd=folder, stdout=subprocess.PIPE, start_new_session=True
)
child.stdout.readline()
answer(started=True)
END
"""


@pytest.mark.parametrize("end", ["time.sleep(600)", "sys.exit()"])
def test_what_a_worker_leaves_behind_is_killed_at_its_end(isolated, tmp_path, end):
    """Its process has a session of its own. It holds a lock for as long as it lives."""
    with worker(tmp_path, LEAVES_A_PROCESS.replace("END", end)) as started:
        assert started.receive() == {"started": True}
        assert end == "sys.exit()" or not can_lock(tmp_path / "worker/lock")
    deadline = time.monotonic() + 5  # the kernel ends the processes of a namespace one after the other
    while not can_lock(tmp_path / "worker/lock") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert can_lock(tmp_path / "worker/lock")


def can_lock(path):
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_the_end_of_a_worker_is_described_with_its_last_line(isolated, tmp_path):
    code = "print('first'); print('no such kernel', file=sys.stderr); sys.exit(3)"
    with (
        worker(tmp_path, code) as started,
        pytest.raises(Ended, match=r"^the process ended, exit code 3: no such kernel$"),
    ):
        started.receive()


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os.kill(os.getpid(), 9)", "the process ended, killed by SIGKILL"),
        ("channel.close(); sys.exit()", "the process ended, exit code 0"),
        ("channel.send_bytes(b'{')", "its answer is not JSON"),
        ("channel.send_bytes(b'[1]')", "its answer is not JSON"),
        ("channel.send_bytes(bytes([255]))", "its answer is not JSON"),
        ("channel.send_bytes(b'[' * 1_000_000)", "its answer is not JSON"),
        ("answer(a=[[[[[[[[0]]]]]]]])", "its answer is not JSON"),
        ("answer(reason='\\udcff')", "its answer is not JSON"),  # the page could not be written
        ("os.write(channel.fileno(), (2**30).to_bytes(4))", "its answer is not JSON"),
        ("time.sleep(600)", "no answer within 0.5 s"),
        ("os.write(channel.fileno(), bytes(2)); time.sleep(600)", "no answer within 0.5 s"),
        ("os.write(channel.fileno(), (9).to_bytes(4)); time.sleep(600)", "no answer within 0.5 s"),
    ],
)
def test_a_worker_that_gives_no_answer_raises_ended(tmp_path, code, message):
    """It dies, writes nonsense, is silent, or stops within a message."""
    with worker(tmp_path, code) as started, pytest.raises(Ended, match=f"^{re.escape(message)}$"):
        started.receive(limit=0.5 if "no answer" in message else 20)


@pytest.mark.usefixtures("process")
def test_a_message_to_a_worker_that_has_ended_raises_ended(tmp_path):
    with worker(tmp_path, "sys.exit(4)") as started:
        started.process.wait()
        with pytest.raises(Ended, match=r"^the process ended, exit code 4$"):
            started.send("hello")


@pytest.mark.usefixtures("process")
def test_the_files_that_a_worker_changes_are_named(tmp_path):
    code = """
receive()
with open(folder / "repo/kernels/norm/eager.py", "a") as file:
    file.write("#")
(folder / "repo/train.py").unlink()
(folder / "repo/lab/new.py").touch()
(folder / "mine.py").touch()
answer()
"""
    with worker(tmp_path, code) as started:
        assert started.changed_files() == []
        started.send("change them")
        started.receive()
        assert started.changed_files() == ["kernels/norm/eager.py", "lab/new.py", "train.py"]


def test_a_copy_of_the_repo_has_its_code(tmp_path):
    sandbox.copy_repo(tmp_path)
    copy, original = digest_repo(tmp_path), digest_repo()
    assert changed_files(copy, original) == []
    assert {"train.py", "kernels/norm/eager.py", "configs/config.yaml", "lab/judge/sandbox.py"} <= copy.keys()
    assert not [path for path in copy if path.startswith(("tests", "out", "."))]
    assert not list(tmp_path.rglob("__pycache__"))


NO_RESULTS = {
    "missing": "pass",
    "a FIFO": "os.mkfifo(folder / 'results')",
    "a folder": "(folder / 'results').mkdir()",
    "a link to nothing": "(folder / 'results').symlink_to(folder / 'nothing')",
    "a link to itself": "(folder / 'results').symlink_to(folder / 'results')",
    "a device": "(folder / 'results').symlink_to('/dev/zero')",
    "too large": "(folder / 'results').write_bytes(bytes(1001))",
}


@pytest.mark.usefixtures("process")
def test_what_is_no_file_of_results_is_refused(tmp_path):
    """One worker puts each of them in the place of its results."""
    code = f"for code in {list(NO_RESULTS.values())}:\n    exec(code)\n    answer()\n    receive()\n"
    target = tmp_path / "target"
    with worker(tmp_path, code) as started:
        for name in NO_RESULTS:
            assert started.receive() == {}
            with pytest.raises(Ended, match=r"^it wrote no readable file results: "):
                started.read_file("results", 1000)
            if name != "too large":  # the state of a large model is copied whatever its size
                with pytest.raises(Ended, match=r"^it wrote no readable file results: "):
                    started.copy_file("results", target)
            results = started.folder / "results"
            if results.is_dir():
                results.rmdir()
            elif name != "too large":
                results.unlink(missing_ok=True)
            started.send("next")
        assert len(started.read_file("results", 1001)) == 1001


@pytest.mark.usefixtures("process")
def test_files_that_a_worker_adds_to_its_copy_are_named_and_not_read(tmp_path):
    """It may add thousands of large ones, and give them any name."""
    code = "new = os.fsencode(folder / 'repo/kernels') + b'/a\\xff'; os.truncate(os.open(new, 66), 2**40); answer()"
    with worker(tmp_path, code) as started:
        started.receive()
        assert started.changed_files() == ["kernels/a\ufffd"]


@pytest.mark.usefixtures("process")
def test_a_file_that_grows_is_copied_up_to_its_first_size(tmp_path, monkeypatch):
    with worker(tmp_path, "(folder / 'results').write_text('text'); answer()") as started:
        started.receive()
        disk_usage = shutil.disk_usage

        def grow(path):
            (started.folder / "results").write_text("text that grows")
            return disk_usage(path)

        monkeypatch.setattr(shutil, "disk_usage", grow)
        started.copy_file("results", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "text"


@pytest.mark.usefixtures("process")
def test_a_file_that_would_fill_the_disk_is_not_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * 10**6))
    with worker(
        tmp_path, "os.truncate(os.open(folder / 'results', os.O_CREAT | os.O_RDWR), 10**6 + 1); answer()"
    ) as started:
        started.receive()
        with pytest.raises(Ended, match=r"^its file results has 0.001 GB, more than half of the free disk$"):
            started.copy_file("results", tmp_path / "copy")


@pytest.mark.usefixtures("process")
def test_a_link_in_place_of_results_is_copied_as_a_file(tmp_path):
    """The worker can read the linked file anyway. What is done to the copy later does not reach it."""
    (tmp_path / "other").write_text("text")
    with worker(tmp_path, f"(folder / 'results').symlink_to({str(tmp_path / 'other')!r}); answer()") as started:
        started.receive()
        started.copy_file("results", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "text"
    assert not (tmp_path / "copy").is_symlink()


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("name", ["log.txt", "cache", "repo"])
def test_the_next_worker_writes_through_no_link_that_an_earlier_one_left(monkeypatch, tmp_path, name):
    """This process opens the log and fills the caches, so a link would lead out of the folder."""
    tables, cache = tmp_path / "home/tuned", tmp_path / "outside/home"
    for folder in (tables, cache):
        folder.mkdir(parents=True)
    (tables / "table.json").write_text("{}")
    monkeypatch.setattr(sandbox, "user_cache", lambda: tables.parent)
    victim = tmp_path / "outside/file"
    victim.write_text("mine")
    target = victim if name == "log.txt" else victim.parent
    code = "import shutil; path = folder / receive()\n"
    code += "path.unlink() if path.is_file() else shutil.rmtree(path)\n"
    with worker(tmp_path, code + "path.symlink_to(receive()); answer()") as first:
        first.send(name)
        first.send(str(target))
        first.receive()
    with worker(tmp_path, "print('written by the worker', file=sys.stderr); answer()") as second:
        second.receive()
    assert victim.read_text() == "mine"
    assert sorted(path.name for path in victim.parent.rglob("*")) == ["file", "home"]
    assert (tmp_path / "worker/log.txt").read_text() == "written by the worker\n"


def test_the_strongest_isolation_that_works_is_in_force(monkeypatch):
    """One that lets a process write outside of its folder does not work, and one that is not installed neither."""
    works = {"not installed": ["no-such-program"], "useless": ["env"], PROCESSES: []}
    monkeypatch.setattr(sandbox, "prefixes", lambda folder: works)
    assert sandbox.isolation.__wrapped__() == PROCESSES
    strong = 'for file in "$@"; do last=$file; done; eval "touch() { case \\$1 in $0/*) >\\$1;; esac; }; $last"'
    monkeypatch.setattr(sandbox, "prefixes", lambda folder: works | {"strong": ["sh", "-c", strong, str(folder)]})
    assert sandbox.isolation.__wrapped__() == "strong"


@pytest.mark.usefixtures("process")
def test_what_a_worker_prints_is_shown_if_asked(capfd, tmp_path):
    code = "print('to the terminal', flush=True); print('to the log', file=sys.stderr); answer()"
    with Sandbox(["-c", START + code], tmp_path / "worker", 20, shows_output=True) as started:
        started.receive()
    assert capfd.readouterr() == ("to the terminal\n", "")
    assert started.log.read_text() == "to the log\n"


@pytest.mark.usefixtures("process")
def test_a_mark_finds_the_processes_of_one_worker(tmp_path):
    waiting = "answer(pid=os.getpid()); time.sleep(600)"
    with worker(tmp_path, waiting) as started, worker(tmp_path / "other", waiting) as other:
        pid, _ = started.receive()["pid"], other.receive()
        assert list(sandbox.marked_processes(started.mark)) == [pid]
    assert list(sandbox.marked_processes(started.mark)) == []


@pytest.mark.usefixtures("process")
def test_only_compiled_kernels_are_left_to_the_next_worker(tmp_path):
    code = "(folder / 'tmp/file').touch(); (folder / 'triton/file').touch(); answer()"
    for _ in range(2):
        with worker(tmp_path, "answer(files=sorted(str(path) for path in folder.glob('*/file')));" + code) as started:
            files = started.receive()["files"]
            started.receive()
    assert files == [str(tmp_path / "worker/triton/file")]


def test_packages_are_watched_where_workers_may_write_to_them(monkeypatch, tmp_path):
    """Also a change that was undone, with the old time of the last write."""
    monkeypatch.setattr(sandbox.sysconfig, "get_path", lambda name: str(tmp_path / name))
    (tmp_path / "purelib/torch").mkdir(parents=True)
    files = [tmp_path / "purelib/torch" / name for name in ("kept.py", "restored.py", "removed.py")]
    for file in files:
        file.write_text("x = 1")
    monkeypatch.setattr(sandbox, "isolation", lambda: NAMES[0])
    assert sandbox.stamp_packages() == {}
    monkeypatch.setattr(sandbox, "isolation", lambda: PROCESSES)
    before = sandbox.stamp_packages()
    assert sandbox.changed_packages(before) == []
    time.sleep(0.02)
    written = files[1].stat()
    files[1].write_text("x = 2")
    files[1].write_text("x = 1")
    os.utime(files[1], ns=(written.st_atime_ns, written.st_mtime_ns))
    files[2].unlink()
    (tmp_path / "purelib/new.py").touch()
    assert sandbox.changed_packages(before) == sorted(map(str, files[1:]))
