"""`python -m scripts.judge`: the exit code is the verdict."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from runtime.signals import Stopped
from scripts import judge as script
from tests.lab.judge.test_judge import CASES, bench, run

ARGUMENTS = "op=norm", "impl=triton", "against=eager", "device=cpu"


@pytest.fixture
def command(called, monkeypatch, tmp_path):
    """Run the command with made-up evidence: command(ms of a step, statuses of the cases, arguments).

    The baseline takes 100 ms a step. Returns (exit code, stdout, stderr, the arguments of train.py).
    """
    monkeypatch.chdir(tmp_path)

    def call(ms, statuses, *arguments, benchmark=lambda *_: [bench("triton", 0.5), bench("eager", 1.0)]):
        trained = []

        def train(words, folder):
            trained.extend(words)
            for impl, step_ms in (("eager", 100.0), ("triton", ms)):
                (folder / impl).mkdir()
                (folder / impl / "result.json").write_text(json.dumps(run(impl, step_ms)))

        monkeypatch.setattr(script, "probe_cases", lambda *_: statuses)
        monkeypatch.setattr(script, "train", train)
        monkeypatch.setattr(script, "benchmark_op", benchmark)
        return *called("judge.py", script.main_with_training, *ARGUMENTS, "out_dir=judged", *arguments), trained

    return call


@pytest.mark.parametrize(("ms", "code"), [(80, 0), (100, 2), (120, 3)])
def test_the_exit_code_is_the_verdict(command, tmp_path, ms, code):
    got, out, err, trained = command(ms, CASES, "--", "model=tiny", "train.max_steps=5")
    assert (got, err) == (code, "")
    assert trained[:3] == ["-m", "sweep.repeats=3", "sweep.own_caches=false"]
    assert trained[-3:] == ["model=tiny", "train.max_steps=5", "kernels.norm=eager,triton"]
    folder = tmp_path / "judged"
    assert (folder / "judge.md").read_text() in out
    [row] = map(json.loads, (folder / "judge.jsonl").read_text().splitlines())
    assert row["verdict"] == {0: "faster", 2: "tie", 3: "slower"}[code]
    words = "op=norm impl=triton against=eager device=cpu -- model=tiny train.max_steps=5"
    assert row["command"] == f"python judge.py {words}"
    assert (folder / "judge.png").exists()


def test_without_memory_for_the_op_alone_the_training_still_decides(command, tmp_path):
    def fill_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 79 GiB")

    code, out, err, _ = command(80, CASES, benchmark=fill_memory)
    assert (code, err) == (0, "")
    assert "note     no figures of norm alone: out of GPU memory with norm alone: Tried to allocate 20.00 GiB" in out
    assert "faster.**" in (tmp_path / "judged/judge.md").read_text()
    assert (tmp_path / "judged/judge.png").exists()


def test_a_wrong_backend_is_not_trained(command):
    code, out, err, trained = command(80, CASES | {"fp32 769": "wrong: out0: error 1"})
    assert (code, err, trained) == (4, "", [])
    assert "**norm=triton is wrong: fp32 769: wrong: out0: error 1**" in out


def test_a_case_without_an_answer_gives_no_verdict(command, tmp_path):
    code, _, err, trained = command(80, CASES | {"fp32 769": "undecided: no answer within 120 s"})
    assert (code, trained) == (1, [])
    reason = "fp32 769: undecided: no answer within 120 s; raise limit=SECONDS, or free memory"
    assert err == f"error: no verdict: {reason}\n"
    assert f"could not be judged: {reason}" in (tmp_path / "judged/judge.md").read_text()


def test_a_backend_that_cannot_run_here_is_an_error(command):
    nowhere = dict.fromkeys(("fp32 768", "fp32 training"), "unavailable: it needs an NVIDIA GPU")
    code, _, err, trained = command(80, nowhere)
    assert (code, trained) == (1, [])
    assert err == "error: norm=triton runs no case here: unavailable: it needs an NVIDIA GPU\n"


SWEEP = """
import signal, sys, time
from pathlib import Path
def end(number, frame):
    Path("signals").open("a").write(f"{number} ")
    if len(Path("signals").read_text().split()) == SIGNALS:
        sys.exit(75)
signal.signal(signal.SIGINT, end)
Path("started").touch()
while True:
    time.sleep(0.01)
"""


def test_a_baseline_that_cannot_run_here_is_an_error_before_the_probes(command):
    code, out, err, trained = command(80, CASES, "op=attention", "impl=math", "against=cudnn")
    assert (code, out, trained) == (1, "", [])
    assert err == "error: attention=cudnn cannot run here: cuDNN needs an NVIDIA GPU; on a CPU choose attn=sdpa\n"


def test_a_backend_that_cannot_run_the_training_is_not_trained(command):
    """The arguments after the dashes decide what the training calls, so they also decide what is tested."""
    statuses = CASES | {"fp8 training": "unavailable: mlp takes no fp8"}
    code, out, err, trained = command(80, statuses, "--", "precision=fp8")
    assert (code, trained) == (1, [])
    assert err == "error: norm=triton cannot run this training: unavailable: mlp takes no fp8\n"
    assert "note     precision=fp8 changes no product of norm, which computes in bf16 in this training\n" in out


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("precision=int4", "precision=int4: choose fp32, amp, bf16, fp8"),
        ("train.step=5", "unknown key train.step; did you mean train.max_steps?"),
    ],
)
def test_a_wrong_argument_of_the_training_is_an_error_before_the_probes(command, word, message):
    code, _, err, trained = command(80, None, "--", word)
    assert (code, err, trained) == (1, f"error: {message}\n", [])


@pytest.mark.parametrize(
    ("number", "count"), [(signal.SIGTERM, 1), (signal.SIGHUP, 1), (signal.SIGINT, 1), (signal.SIGINT, 2)]
)
def test_a_signal_ends_the_training_and_names_the_command_that_continues(called, monkeypatch, tmp_path, number, count):
    """The sweep gets every signal as Ctrl-C, and this command waits until the sweep has ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "probe_cases", lambda *_: CASES)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it
    Path("train.py").write_text(SWEEP.replace("SIGNALS", str(count)))

    def send() -> None:
        for sent in range(count):
            while not Path("signals" if sent else "started").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    code, out, err = called("judge.py", script.main_with_training, *ARGUMENTS, "out_dir=judged", "--", "model=tiny")
    sender.join()
    assert (code, err) == (75, "")
    assert Path("signals").read_text().split() == ["2"] * count
    words = "op=norm impl=triton against=eager device=cpu out_dir=judged -- model=tiny"
    assert out.endswith(f"stopped  before the verdict; continue with: python judge.py {words}\n")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_a_tiny_training_on_a_cpu(called, monkeypatch, tmp_path):
    """Every part is real. The verdict is the machine's."""
    monkeypatch.chdir(tmp_path)
    arguments = "op=loss", "impl=torch_chunked", "against=eager", "device=cpu", "repeats=1", "rounds=1"
    small = "model.n_layer=1", "train.batch_size=2", "train.tokens_per_step=256", "train.max_steps=22"
    small += "train.log_every=1", "proof=false"
    code, out, err = called("judge.py", script.main_with_training, *arguments, "out_dir=judged", "--", *small)
    assert (code in (0, 2, 3), err) == (True, "")
    assert "loss=torch_chunked is right. Training with it runs at " in out


def test_no_training_is_left_if_a_signal_comes_while_another_is_forwarded(monkeypatch):
    class Child:
        returncode, ended = None, False

        def wait(self):
            raise Stopped(130, "SIGINT")

        def send_signal(self, number):
            raise Stopped(143, "SIGTERM")

        def poll(self):
            return None

        def terminate(self):
            self.ended = True

    child = Child()
    monkeypatch.setattr(script.subprocess, "Popen", lambda *_, **__: child)
    with pytest.raises(Stopped, match="SIGTERM"):
        script.train([], Path("out"))
    assert child.ended
