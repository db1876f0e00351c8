"""`python -m scripts.doctor speed=true` times each backend beside eager at a model's shapes, and stores the times."""

import re

import pytest
import torch

from common.files import read_json
from kernels import speeds
from lab.bench import speed
from model.config import GPTConfig
from runtime.schedule import DEFAULT_TOKENS
from scripts import doctor

CPU = torch.device("cpu")
GPT2 = GPTConfig(12, 12, 768, 1024, 50304, "learned", True, 0.0)


@pytest.fixture
def measured(called, monkeypatch, tables):
    """Run doctor speed=true with fake statuses and times: measured({backend: ms}, *arguments) -> what called() does."""

    def run(ms, *arguments, statuses=None):
        def times(works, device, rounds):
            names = {work: work.split()[0] for work in works}
            for work in works.values():
                work()
            return {work: [1e-3 * scale * ms[name] for scale in (0.9, 1, 1, 1.1)] for work, name in names.items()}

        def probe(groups, device, limit):
            ok = dict.fromkeys(ms, "ok: torch") | (statuses or {})
            return [[ok.get(probe.impl, "unavailable: no")] for [probe] in groups]

        monkeypatch.setattr(speed, "run_probes", probe)
        monkeypatch.setattr(speed, "time_in_turns", times)
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
        words = "speed=true", "model=tiny", "device=cpu"
        return called("doctor.py", doctor.main, *words, *arguments)

    return run


def lines(out):
    """(op, backend) -> the rest of the line, of the training step and of the decoding step."""
    steps = out.split("\nop  ")[1:]
    return [{(op, name): rest for op, name, rest in re.findall(r"^(\w+) +(\w+) +(.*)$", step, re.M)} for step in steps]


def test_each_backend_stands_beside_eager(measured):
    """The sdpa is slower, math a tie and mem_efficient unavailable, in training and in decoding."""
    ms = {"eager": 2.0, "sdpa": 4.0, "math": 2.05, "compile": 1.0, "triton": 3.0}
    statuses = {"triton": "wrong: out0: error 1", "flash": "failed: RuntimeError: two lines"}
    code, out, err = measured(ms, "op=attention", statuses=statuses)
    assert code == 1
    assert err.splitlines() == 2 * [
        "error: attention=flash failed: RuntimeError: two lines",
        "error: attention=triton wrong: out0: error 1",
    ]
    assert "cpu      a small step of 64 tokens: its times say nothing about a GPU\n" in out
    training, decoding = lines(out)
    assert training["attention", "at"] == "1 x 64 x 4 x 32"
    assert decoding["attention", "at"] == "1 x 1 x 4 x 32, 64 keys"
    for step in (training, decoding):
        assert step["attention", "eager"] == "2.000 ms (1.920 to 2.080)"
        assert step["attention", "sdpa"].endswith(" 2.00x of eager, slower than eager")
        assert step["attention", "math"].endswith(" 1.02x of eager, a tie with eager")
        assert step["attention", "compile"].endswith(" 0.50x of eager, faster")
        assert step["attention", "mem_efficient"].split() == ["unavailable", "no"]
        assert step["attention", "triton"].split() == ["wrong", "out0:", "error", "1"]
    table = read_json(speeds.table_paths(CPU)[0])
    assert {name.split()[0] for name in table} == {"attention=sdpa", "attention=math"}
    assert f"done     {speeds.table_paths(CPU)[0]}" in out
    assert len(table) == 4


def test_the_calls_are_those_of_a_training_step_on_a_gpu_and_of_a_decoding_step():
    gpu = torch.device("cuda")
    calls = {op: call.arguments for op, call in speed.model_calls(GPT2, "amp", gpu, trains=True).items()}
    rows = DEFAULT_TOKENS["cuda"]
    assert {op: arguments["shape"] for op, arguments in calls.items()} == {
        "norm": (rows, 768),
        "linear": (rows, 768),
        "attention": (rows // 1024, 1024, 12, 64),
        "mlp": (rows, 768),
        "loss": (rows, 768),
    }
    assert calls["norm"]["residual_dtype"] == torch.float32
    assert (calls["linear"]["out"], calls["loss"]["vocab"], calls["attention"]["packed"]) == (2304, 50304, True)
    decoding = speed.model_calls(GPT2, "bf16", gpu, trains=False)
    assert "loss" not in decoding
    assert (decoding["attention"].size, decoding["mlp"].size) == ("1 x 1 x 12 x 64, 1,024 keys", "1 x 768")
    fp8 = speed.model_calls(GPT2, "fp8", gpu, trains=True)
    assert [op for op, call in fp8.items() if call.arguments.get("fp8")] == ["linear", "mlp", "loss"]


@pytest.mark.parametrize("op", ["norm", "attention"])
def test_a_call_has_half_as_many_rows_until_eager_fits(measured, monkeypatch, op):
    """Another backend that does not fit is a line."""
    prepare_works, tried = speed.prepare_works, []

    def fill(call, name, inputs, device):
        rows = inputs["x" if op == "norm" else "q"].shape[0]
        tried.append((name, rows))
        if rows > 4 or name == "compile":
            raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")
        return prepare_works(call, name, inputs, device)

    monkeypatch.setattr(speed, "prepare_works", fill)
    monkeypatch.setattr(speed, "step_shape", lambda config, device: (16, 1))
    code, out, err = measured({"eager": 1.0, "compile": 1.0}, f"op={op}")
    assert (code, err) == (0, "")
    assert tried[:4] == [("eager", 16), ("eager", 8), ("eager", 4), ("compile", 4)]
    step = lines(out)[0]
    assert step[op, "at"].startswith("4 x ")
    assert step[op, "at"].endswith(", the largest that fits")
    assert step[op, "compile"].startswith("oom          out of memory at 4 x ")
    assert step[op, "eager"].startswith("1.000 ms")


def test_an_op_whose_eager_never_fits_has_lines_and_no_times(measured, monkeypatch):
    def fill(*_):
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")

    monkeypatch.setattr(speed, "prepare_works", fill)
    code, out, _ = measured({"eager": 1.0, "compile": 1.0}, "op=[norm,mlp]")
    assert code == 0
    assert {step[op, "eager"].split()[0] for step in lines(out) for op in ("norm", "mlp")} == {"oom"}
    assert not speeds.table_paths(CPU)[0].exists()


def test_a_backend_that_fails_at_the_size_of_the_step_is_a_line(measured, monkeypatch):
    prepare_works = speed.prepare_works

    def fail(call, name, inputs, device):
        if name == "compile":
            raise AssertionError("two\nlines")
        return prepare_works(call, name, inputs, device)

    monkeypatch.setattr(speed, "prepare_works", fail)
    code, out, err = measured({"eager": 1.0, "compile": 1.0, "liger": 2.0}, "op=norm", "impl=[compile]")
    assert (code, err) == (1, 2 * "error: norm=compile failed: AssertionError: two lines\n")
    assert [step["norm", "compile"] for step in lines(out)] == ["failed       AssertionError: two lines"] * 2


@pytest.mark.usefixtures("quick_python")
def test_a_file_outside_the_repo_is_really_timed(called, monkeypatch, tables, tmp_path):
    """The kernel computes its result 20 times, so it is slower than eager."""
    monkeypatch.chdir(tmp_path)
    body = "    for _ in range(20):\n        y = reference(x, residual, weight, bias, eps)\n    return y\n"
    code = f"from kernels.norm import reference\ndef norm(x, residual, weight, bias, eps=1e-5):\n{body}"
    (tmp_path / "mine.py").write_text(code)
    words = "op=norm", "impl=mine.py", "speed=true", "model=tiny", "device=cpu", "rounds=3"
    status, out, err = called("doctor.py", doctor.main, *words)
    assert (status, err) == (0, "")
    assert len(re.findall(r"^norm +mine\.py .*x of eager, slower than eager$", out, re.MULTILINE)) == 2
    call = speed.model_calls(doctor_model(), "fp32", CPU, trains=True)["norm"]
    found = speeds.find_slower("norm", "mine.py", call.inputs(CPU), CPU, "both")
    assert found["ms"] > found["baseline_ms"] > 0
    assert found["at"] is None


def doctor_model():
    return GPTConfig(4, 4, 128, 128, 320, "learned", True, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["matrix=true"], "matrix=true and speed=true: choose one of them"),
        (["op=decode"], "op=decode with speed=true: choose norm, linear, attention, mlp, loss"),
        (["rounds=0"], "rounds=0: it must be at least 1"),
        (["precision=fp64"], "precision=fp64: choose fp32, amp, bf16, fp8, or null"),
        (["keep=true"], "speed=true keep=true needs a GPU: the repo's tables are for GPUs"),
    ],
)
def test_a_mistake_prints_one_line(measured, arguments, message):
    code, _, err = measured({"eager": 1.0}, *arguments)
    assert (code, err) == (1, f"error: {message}\n")


def test_a_broken_table_is_an_error_before_the_measurement(measured):
    path, _ = speeds.table_paths(CPU)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    code, out, err = measured({"eager": 1.0}, "op=norm")
    assert (code, "norm       eager" in out) == (1, False)
    assert err.startswith(f"error: {path} is not a table of speeds (")
