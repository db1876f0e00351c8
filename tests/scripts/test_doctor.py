"""`python -m scripts.doctor`: it believes what it ran, and nothing that a backend does takes it down."""

import json
import re
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from kernels.attention.auto import FILL
from kernels.registry import OPS, Unavailable, backend, contract, impls
from kernels.tuned import slug, write
from runtime.device import name
from scripts import bench_kernels, doctor, probe, report
from scripts.probe import Probe, answer, examine
from scripts.support import cell, tables

CPU = torch.device("cpu")
NORM = Probe("norm", "eager", {"shape": (3, 64)}, torch.float32)


def test_a_machine_and_its_backends(called):
    """What runs is ok, what cannot says why; together exit code 0."""
    code, out, err = called("doctor.py", doctor.main, "op=norm", "device=cpu")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    machine, backends, done = out.split("\n\n")
    assert machine.startswith("gpu      ")
    for label in ("host", "versions", "packages", "compiler", "disk", "tuned"):
        assert re.search(rf"^{label:<8} \S", machine, re.MULTILINE)
    assert f"torch {torch.__version__}" in machine
    assert re.search(
        rf"^norm       eager             ok           fp32, torch {re.escape(torch.__version__)}$", out, re.M
    )
    assert re.search(r"^norm       quack             unavailable  it needs ", backends, re.MULTILINE)
    assert re.findall(r"^norm +(\w+)", backends, re.MULTILINE) == impls("norm")
    assert done.startswith(f"done     {len(impls('norm'))} answers of {len(impls('norm'))} backends: ")


BROKEN = {
    "wrong": "    y, stream = reference(x, residual, weight, bias, eps)\n    return 1.001 * y, stream\n",
    "raises": "    raise RuntimeError('two\\nlines')\n",
    "killed": "    os.kill(os.getpid(), signal.SIGKILL)\n",
    "leaves": "    os.write(2, b'LLVM ERROR: no\\n')\n    os._exit(3)\n",
    "hangs": "    time.sleep(600)\n",
    "chatters": "    os.write(1, b'{}')\n    print('hello')\n    return reference(x, residual, weight, bias, eps)\n",
}


def test_what_is_broken_is_told_and_the_rest_still_runs(checkout):
    for path in (checkout / "kernels" / "norm").glob("[!_]*.py"):
        if path.stem != "eager":
            path.unlink()
    for impl, body in BROKEN.items():
        code = "import os, signal, time\nfrom kernels.norm import reference\n"
        code += f"def norm(x, residual, weight, bias, eps=1e-5):\n{body}"
        (checkout / "kernels" / "norm" / f"{impl}.py").write_text(code)
    command = [sys.executable, "-m", "scripts.doctor", "op=norm", "device=cpu", "limit=10"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=120)
    told = dict(re.findall(r"^norm +(\w+) +(\w+)  ", done.stdout, re.MULTILINE))
    failed = dict.fromkeys(("hangs", "killed", "leaves", "raises"), "failed")
    assert told == {"eager": "ok", "chatters": "ok", "wrong": "wrong", **failed}
    assert done.stderr.splitlines() == [
        "error: norm=hangs fp32 768 failed: no answer within 10 s",
        "error: norm=killed fp32 768 failed: the process ended, killed by SIGKILL",
        "error: norm=leaves fp32 768 failed: the process ended, exit code 3: LLVM ERROR: no",
        "error: norm=raises fp32 768 failed: RuntimeError: two lines",
        done.stderr.splitlines()[-1],
    ]
    assert re.fullmatch(r"error: norm=wrong fp32 768 wrong: out0: error \S+, eager's .*", done.stderr.splitlines()[-1])
    assert "hello" not in done.stdout
    assert done.returncode == 1


def test_after_a_failure_the_next_process_goes_on():
    bad = NORM._replace(shape={"shapes": (3, 64)})
    first, second = examine([[NORM, bad, NORM], [NORM]], CPU, limit=60)
    assert [status.partition(":")[0] for status in first] == ["ok", "failed", "ok"]
    assert re.match(r"failed: TypeError: .* 'shapes'", first[1])
    assert len(second) == 1


class Half(torch.autograd.Function):
    """Halves the gradient alone."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx / 2


def test_eager_is_held_against_the_formula(monkeypatch):
    """It is the yardstick of the others, and would be right by its own."""
    module = backend("norm", "eager")
    right = module.norm
    assert answer(NORM, CPU) == f"ok: torch {torch.__version__}"
    monkeypatch.setattr(module, "norm", lambda x, residual, weight, bias: right(x, residual, weight, bias, eps=0.1))
    assert answer(NORM, CPU).startswith("wrong: out0: error ")
    monkeypatch.setattr(module, "norm", lambda x, *rest, **more: right(Half.apply(x), *rest, **more))
    assert answer(NORM, CPU).startswith("wrong: d_x: error ")
    assert answer(NORM._replace(backward=False), CPU).startswith("ok: ")


def test_a_backend_says_no(monkeypatch):
    """By raising, or by leaving an argument out."""

    def refuses(*inputs, **more):
        raise Unavailable("norm=eager takes no such thing")

    monkeypatch.setattr(backend("norm", "eager"), "norm", refuses)
    assert answer(NORM, CPU) == "unavailable: norm=eager takes no such thing"
    monkeypatch.setattr(backend("attention", "eager"), "attention", lambda q, k, v, *, causal=True, scale=None: q)
    told = answer(Probe("attention", "eager", {"shape": (1, 8, 2, 16), "window": 3}, torch.float32), CPU)
    assert re.match(r"unavailable: attention=eager cannot run this: .* takes no window .*: choose attn=", told)


def test_the_matrix_in_small(called, monkeypatch, tmp_path):
    """Kept as rows, from which the README's section is made."""
    monkeypatch.setattr(probe, "WIDTHS", (5, 64))
    monkeypatch.setattr(doctor, "impls", lambda op: ["eager", "quack"])
    for module in (bench_kernels, report):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    device = slug(name(CPU))
    assert "No rows yet" in report.support(device)
    arguments = "op=norm", "device=cpu", "matrix=true", "keep=true", f"out_dir={tmp_path / 'out'}"
    code, out, err = called("doctor.py", doctor.main, *arguments)
    assert (code, err) == (0, "")
    eager, quack = map(json.loads, (tmp_path / "results" / device / "support.jsonl").read_text().splitlines())
    assert set(eager["answers"]["fp16"]) == {"5", "64"}
    assert list(eager["answers"]) == [*probe.DTYPES, *probe.FEATURES["norm"], "forward", "backward", "compile"]
    assert (eager["impl"], quack["impl"], eager["env"]["torch"]) == ("eager", "quack", torch.__version__)
    section = report.fill(f"<!-- support: {device} -->\n<!-- end -->").splitlines()[1:-1]
    assert "\n".join(section) in out
    assert section[2] == "| eager | yes  | yes  | yes  | yes           | yes     | yes     | yes      | yes     |"
    assert section[4].startswith("- `norm=quack`: it needs ")


@pytest.mark.parametrize("op", OPS)
def test_the_matrix_asks_what_the_op_can_be_asked(op):
    columns = probe.matrix(op, "eager", torch.device("cuda"))
    sizes = probe.HEAD_DIMS if op == "attention" else probe.WIDTHS
    assert [int(size) for size in columns["bf16"]] == list(sizes)
    assert columns["compile"]["bf16"].compiled
    asked = [each for values in columns.values() for each in values.values()]
    assert {each.shape["shape"][-1] for each in asked} >= set(sizes)
    for each in asked:
        if each.shape["shape"][-1] <= 768:
            assert contract(op).inputs(**each.shape, dtype=each.dtype)


def test_cells():
    ok, no = "ok: torch 2.11.0", "unavailable: it takes none"
    assert cell({"64": ok, "80": ok}) == "yes"
    assert cell({"64": no, "80": no}) == "no"
    assert cell({"64": ok, "80": no, "96": ok}) == "64, 96"
    assert cell({"64": ok, "80": "wrong: out0: ...", "96": "failed: ..."}) == "64; **wrong** 80; **failed** 96"
    assert cell({"bf16": "failed: ..."}) == "**failed** bf16"


def test_a_table_an_op():
    """The newest row of a backend; below, what it says no to, and why."""
    ok, no, bad = "ok: torch 2.11.0", "unavailable: it takes even widths", "wrong: out0: error 1"

    def row(op, impl, fp32, compiled):
        answers = {"fp32": dict(zip(("64", "769"), fp32, strict=True)), "compile": {"bf16": compiled}}
        return {"op": op, "impl": impl, "answers": answers}

    rows = [row("norm", "mine", (ok, ok), ok), row("norm", "eager", (ok, ok), ok), row("norm", "mine", (ok, no), bad)]
    rows += [row("loss", "mine", (no, no), no)]
    assert tables(rows).splitlines() == [
        "| norm  | fp32 | compile        |",
        "| ----- | ---- | -------------- |",
        "| eager | yes  | yes            |",
        "| mine  | 64   | **wrong** bf16 |",
        "",
        "- `norm=mine` fp32 769: it takes even widths",
        "- `norm=mine` compile: wrong: out0: error 1",
        "",
        "| loss | fp32 | compile |",
        "| ---- | ---- | ------- |",
        "",
        "- `loss=mine`: it takes even widths",
    ]


def test_what_was_measured_here(tables):
    """Whose tables there are; and one that is none is a line like any other."""
    mine, ours = tables
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert list(doctor.tuned(device)) == [
        "tuned    launch parameters: none on this device: python -m scripts.tune op=norm",
        f"auto     choices for attn=auto: none on this device: {FILL}",
    ]
    write(mine, {"norm_fwd 5": {"parameters": {}}, "attention causal float32 64 x1": {"parameters": {}}})
    write(ours, {"norm_fwd 6": {"parameters": {}}, "norm_fwd 7": {"parameters": {}}})
    assert list(doctor.tuned(device)) == [
        f"tuned    launch parameters: 1 in {mine}, 2 in {ours}",
        f"auto     choices for attn=auto: 1 in {mine}",
    ]
    mine.write_text("{")
    [line] = doctor.tuned(device)
    assert line.startswith(f"tuned    {mine} is no table of launch parameters")


def test_the_gpu_in_a_line(monkeypatch):
    found = SimpleNamespace(name="NVIDIA H200", total_memory=139.5 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    line = "NVIDIA H200, 139.5 GiB, compute capability 9.0, driver 580.159; GPUs here: 8"
    assert doctor.gpu(torch.device("cuda"), "580.159") == line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["op=gemm"], "op=gemm: choose norm, attention, mlp, loss"),
        (["limit=0"], "limit=0: it must be more than 0 seconds"),
        (["keep=true"], "keep=true keeps the rows of a matrix: add --matrix"),
        (["device=tpu"], "device=tpu: choose auto, cpu, cuda or cuda:N"),
    ],
)
def test_mistakes(called, arguments, message):
    code, _, err = called("doctor.py", doctor.main, *arguments)
    assert (code, err) == (1, f"error: {message}\n")


def test_matrix_is_a_flag_too(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["doctor.py", "--matrix", "keep=true", "op=gemm"])
    monkeypatch.delitem(sys.modules, "scripts.doctor")
    with pytest.raises(SystemExit):
        runpy.run_module("scripts.doctor", run_name="__main__")
    assert capsys.readouterr().err == "error: op=gemm: choose norm, attention, mlp, loss\n"
