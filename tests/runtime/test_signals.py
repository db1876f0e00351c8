"""The end of a command whose output nobody reads. The other tests of signals are beside the commands."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


def test_the_broken_pipe_of_another_process_is_an_error():
    program = f"import os\nfrom runtime.signals import exit_quietly\nwith exit_quietly(): {OTHER_PIPE}"
    code, err = pipe_into("cat", "-c", program)
    assert (code, err.splitlines()[-1]) == (1, "BrokenPipeError: [Errno 32] Broken pipe")


@pytest.mark.parametrize("command", [["train.py", "--help"], ["-m", "scripts.reproduce", "--help"]])
def test_the_help_of_a_command_may_be_cut_off(command):
    """`true` ends before the command prints anything. argparse itself ignores this and exits with 0."""
    code, err = pipe_into("true", *command)
    assert (code in (0, 141), err) == (True, "")
