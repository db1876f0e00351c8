"""`python -m scripts.generate` without a prompt, on a terminal."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from common.terminal import printable
from lab.generation.interactive import answer_line
from lab.generation.writing import Arrival
from scripts.generate import main_with_exact_prompt
from tests.scripts.test_generate import save_model

ROOT = Path(__file__).parents[3]
MODEL = "checkpoint=random", "model=tiny", "model.n_layer=1", "model.n_embd=16", "model.n_head=1", "device=cpu"
FIGURES = r"\[(\d+) tokens?(, [\d,]+ tok/s)?, first token [\d.]+ ms\]"


class Session:
    """The command on a terminal of its own, in an empty folder."""

    def __init__(self, folder, *arguments):
        self.terminal, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "scripts.generate", *arguments],
            stdin=other,
            stdout=other,
            stderr=other,
            cwd=folder,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb"},
            preexec_fn=lambda: fcntl.ioctl(other, termios.TIOCSCTTY, 0),  # Ctrl-C then reaches the process
        )
        os.close(other)
        self.output = ""

    def type(self, text):
        os.write(self.terminal, text.encode())

    def read(self, until, seconds=60.0):
        """Return the output up to the first match of a pattern."""
        end = time.monotonic() + seconds
        while not (match := re.search(until, self.output)):
            ready, _, _ = select.select([self.terminal], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {until!r} in {self.output!r}"
            self.output += os.read(self.terminal, 65536).decode(errors="replace").replace("\r", "")
        text, self.output = self.output[: match.end()], self.output[match.end() :]
        return text

    def close(self):
        """Wait for the end of the process, kill it after 60 s, and return its exit code."""
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            raise
        finally:
            os.close(self.terminal)


@pytest.mark.usefixtures("quick_python")
def test_a_conversation(tmp_path):
    """Each answer has its figures. Ctrl-C stops an answer. A prompt is too long. Ctrl-D ends with exit code 0.

    An answer of 100,000 tokens would take a minute.
    """
    session = Session(tmp_path, *MODEL, "precision=fp32", "model.pos=rope", "max_new_tokens=100000")
    try:
        start = session.read("\n> ")
        assert "model    random weights" in start
        assert "Ctrl-C stops an answer, Ctrl-D ends." in start
        answers = []
        for prompt in ("Hello (world", ""):
            session.type(f"{prompt}\n")
            session.read(rf"{re.escape(prompt)}\n(?s:.{{100}})")  # a token has at most 4 characters here: \x1b
            session.type("\x03")
            answers.append(session.read("\n> "))
        for answer in answers:
            assert int(re.search(FIGURES, answer)[1]) > 10
        session.type("x\x7fyz\x15" + 4097 // 64 * ("a" * 64) + "ab\n")  # backspace and Ctrl-U edit the line
        assert "\nerror: the prompt has 4098 tokens: shorten it to 4096\n" in session.read("\n> ")
        session.type("\x04")
        assert session.close() == 0
    finally:
        session.process.kill()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_answers_are_the_texts_of_runs(tmp_path, called):
    """Answer n has the draws of seed + n, and ends with the 80th position. Ctrl-C at the prompt ends the program."""
    save_model(tmp_path)
    arguments = f"checkpoint={tmp_path}/ckpt.pt", "precision=fp32", "device=cpu", "temperature=2"
    session = Session(tmp_path, *arguments, "seed=7")
    session.read("\n> ")
    for n in range(2):
        session.type("abcd\n")
        answer = session.read(rf"\n{FIGURES}\n> ")
        run = f"seed={7 + n}", "prompt=abcd", f"out_dir={tmp_path}/{n}"
        assert called("generate.py", main_with_exact_prompt, *arguments, *run)[0] == 0
        sample = json.loads((tmp_path / f"{n}/samples.jsonl").read_text())
        assert answer.startswith(f"abcd\n{printable(sample['text'])}\n[{sample['tokens']} tokens, ")
    session.type("\x03")
    assert session.close() == 0


@pytest.mark.parametrize(
    ("times", "counts", "line"),
    [
        ([], [], "stopped before the first token"),
        ([1.5], [1], "1 token, first token 500.0 ms"),
        ([1.001, 2.001, 3.001], [1, 6, 21], "21 tokens, 10 tok/s, first token 1.0 ms"),
    ],
)
def test_figures_of_an_answer(times, counts, line):
    assert answer_line(1.0, [Arrival(time, 1, 1) for time in times], counts) == line
