"""The fork server runs a program as Python itself does."""

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import fork_server as module

PROGRAM = """
import os, sys
print(sys.argv, os.getcwd(), sys.path[:2], sys.stdin.read(), os.environ.get("ONLY"), os.environ.get("HOME"), __name__)
print("error", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("how", ["script", "module", "code", "safe path"])
def test_a_program_has_the_arguments_folder_environment_and_streams_of_the_call(fork_server, tmp_path, how):
    (tmp_path / "program.py").write_text(PROGRAM)
    words = {"script": ["program.py"], "module": ["-m", "program"], "code": ["-c", PROGRAM]}
    words = (words | {"safe path": ["-P", "program.py"]})[how]
    environment = {"PYTHONPATH": "/a:/b", "ONLY": "this"}
    real, quick = (
        subprocess.run(
            [python, *words, "-m", "x y"], cwd=tmp_path, env=environment, input="in", text=True, capture_output=True
        )
        for python in (sys.executable, fork_server)
    )
    assert (quick.returncode, quick.stdout, quick.stderr) == (real.returncode, real.stdout, real.stderr)
    assert quick.returncode == 3


def wait_for_end(pid):
    """Wait until the process has ended. Fails after 60 s."""
    end = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_signals_reach_a_program_and_end_the_client_too(quick_python):
    program = "import os, signal, time; print(os.getpid(), flush=True); time.sleep(60)"
    for number in (signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
            pid = int(process.stdout.readline())
            process.send_signal(number)
            assert process.wait(60) == -number
        wait_for_end(pid)


def test_a_program_ends_with_a_client_that_was_killed_before_it_knew_the_program(fork_server):
    """On a busy machine a program may print something before its client runs again."""
    read, write = os.pipe()  # the program has the other end, until it ends
    files, environment = [0, 1, 2, write], {"PATH": os.environ["PATH"]}
    argv = [fork_server, "-c", "import time; time.sleep(120)"]
    request = json.dumps({"argv": argv, "folder": "/", "environment": environment, "files": files}).encode()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(Path(fork_server).with_name("socket")))
        socket.send_fds(client, [struct.pack("i", len(request))], files)
        client.sendall(request)
    os.close(write)
    assert select.select([read], [], [], 60)[0], "the program goes on"
    os.close(read)


def test_a_signal_reaches_a_program_that_the_client_does_not_know_yet(tmp_path):
    """A server of the test sends the number of the program after the signal."""
    with socket.socket(socket.AF_UNIX) as listener, subprocess.Popen(["sleep", "20"]) as program:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        client = subprocess.Popen([sys.executable, module.__file__, "client", tmp_path / "socket", "python"])
        connection, _ = listener.accept()
        with connection:
            socket.recv_fds(connection, 4, 500)
            client.send_signal(signal.SIGTERM)
            connection.sendall(struct.pack("i", program.pid))
            assert program.wait(60) == -signal.SIGTERM
            connection.sendall(struct.pack("i", program.returncode))
        assert client.wait(60) == -signal.SIGTERM


@pytest.mark.usefixtures("quick_python")
def test_an_unbuffered_program_has_written_its_output_when_it_is_killed():
    program = "import os; print('begin'); print('end', end=''); os.kill(os.getpid(), 9)"
    for words, output in ((["-u"], "begin\nend"), ([], "")):
        done = subprocess.run([sys.executable, *words, "-c", program], env={}, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (-9, output)


def test_a_program_starts_others_in_the_same_way(quick_python, tmp_path):
    """The processes of multiprocessing inherit open files by their number, and share the modules of one server."""
    (tmp_path / "program.py").write_text("""
import multiprocessing, sys
def work(queue):
    queue.put("torch._dynamo" in sys.modules)
if __name__ == "__main__":
    for method in "spawn", "forkserver":
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=work, args=(queue,))
        process.start()
        print(queue.get(), process.join(), process.exitcode)
""")
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, text=True, capture_output=True, timeout=300)
    assert (done.stdout, done.stderr) == ("True None 0\n" * 2, "")
