"""The fork server runs a program as Python itself does."""

import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import os, sys
print(sys.argv, os.getcwd(), sys.path[:2], sys.stdin.read(), os.environ.get("ONLY"), os.environ.get("HOME"), __name__)
print("error", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("how", ["script", "module", "code"])
def test_a_program_has_the_arguments_folder_environment_and_streams_of_the_call(fork_server, tmp_path, how):
    (tmp_path / "program.py").write_text(PROGRAM)
    words = {"script": ["program.py"], "module": ["-m", "program"], "code": ["-c", PROGRAM]}[how]
    environment = {"PYTHONPATH": "/a:/b", "ONLY": "this"}
    real, quick = (
        subprocess.run(
            [python, *words, "-m", "x y"], cwd=tmp_path, env=environment, input="in", text=True, capture_output=True
        )
        for python in (sys.executable, fork_server)
    )
    assert (quick.returncode, quick.stdout, quick.stderr) == (real.returncode, real.stdout, real.stderr)
    assert quick.returncode == 3


def test_signals_reach_a_program_and_end_the_client_too(quick_python):
    program = "import os, signal, time; print(os.getpid(), flush=True); time.sleep(60)"
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(20) == -number
        end = time.monotonic() + 20
        while os.path.exists(f"/proc/{pid}"):
            assert time.monotonic() < end
            time.sleep(0.01)


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
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, text=True, capture_output=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True None 0\n" * 2, "")
