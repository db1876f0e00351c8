"""A first call is timed in a process of its own, with empty caches, and may crash there."""

import pytest
import torch

from lab.bench.first_call import absent_backends, first_calls
from runtime.folders import COMPILE_CACHES

CPU = torch.device("cpu")
SMALL = {"shape": (4, 8)}
HEAD = """
import os, sys, time
import torch
from kernels.norm.eager import norm as right

def norm(x, residual, weight, bias, eps=1e-5):
    {body}
    return right(x, residual, weight, bias, eps)
"""


@pytest.fixture
def backend(tmp_path):
    """backend(line) writes a backend that runs this line before eager's norm, and returns its path."""

    def write(line, top=""):
        path = tmp_path / "mine.py"
        path.write_text(HEAD.format(body=line) + top)
        return str(path)

    return write


def first_call(op, name, shape):
    [answer] = first_calls(op, [name], shape, "float32", CPU).values()
    return answer


def test_the_seconds_include_the_import_and_the_first_call(backend):
    seconds, status = first_call("norm", backend("time.sleep(0.3)", top="\ntime.sleep(0.4)"), SMALL)
    assert status == "ok"
    assert 0.7 < seconds < 5  # 0.02 s besides the two pauses, when nothing else runs


def test_the_process_has_no_compiler_and_empty_caches(backend, monkeypatch, tmp_path):
    """Triton and Inductor are not imported yet, and no cache is the user's."""
    for name in COMPILE_CACHES:
        monkeypatch.setenv(f"{name}_CACHE_DIR", str(tmp_path))
    line = f"assert not any(os.path.exists(os.environ[f'{{name}}_CACHE_DIR']) for name in {COMPILE_CACHES})"
    assert first_call("norm", backend(line), SMALL)[1] == "ok"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("os._exit(3)", "failed: the process ended, exit code 3"),
        ("raise RuntimeError('no such tile')", "failed: RuntimeError: no such tile"),
        ("torch.empty(10**15)", "undecided: RuntimeError: "),
    ],
)
def test_a_backend_that_fails_has_a_status_and_no_seconds(backend, line, status):
    seconds, answer = first_call("norm", backend(line), SMALL)
    assert seconds is None
    assert answer.startswith(status)


@pytest.mark.parametrize("failure", ["torch.empty(10**15)", "exit('CUBLAS_STATUS_ALLOC_FAILED')"])
def test_a_call_that_fails_beside_others_runs_again_alone(backend, monkeypatch, tmp_path, failure):
    """It may have lacked memory, whatever its error says. A call that was alone is not repeated."""
    monkeypatch.setattr("lab.bench.first_call.AT_A_TIME", 2)
    log = tmp_path / "log"
    # the first process finds no such file, and fails; the second one finds it
    mine = backend(f"os.path.exists('{log}') or open('{log}', 'w').close() or {failure}")
    answers = first_calls("norm", [mine, "eager"], SMALL, "float32", CPU)
    assert [*answers] == [mine, "eager"]
    assert [status for _, status in answers.values()] == ["ok", "ok"]
    log.unlink()
    assert first_call("norm", mine, SMALL)[1] != "ok"


def test_a_backend_that_cannot_take_the_call_says_why():
    seconds, status = first_call("attention", "flash", {"shape": (1, 8, 2, 8)})
    assert seconds is None
    assert status.startswith("unavailable: attention=flash cannot run here: it needs an NVIDIA GPU")


def test_absent_backends_have_a_status(monkeypatch):
    absent = absent_backends("attention", CPU)
    assert {"eager", "math"}.isdisjoint(absent)
    assert absent["cudnn"] == "unavailable: cuDNN needs an NVIDIA GPU; on a CPU choose attn=sdpa"
