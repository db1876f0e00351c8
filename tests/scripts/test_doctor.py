"""`python -m scripts.doctor` as a command."""

import json
import re
import subprocess
import sys

import pytest
import torch

from kernels.registry import ALL_OPS, contract, impls
from kernels.tuned import device_slug
from lab import rows
from lab.bench import probe
from lab.proof import soak
from lab.report import tables
from lab.report.readmes import fill
from model.step import train_step
from runtime.device import device_name
from scripts import doctor

CPU = torch.device("cpu")


@pytest.mark.usefixtures("quick_python")
def test_the_machine_and_every_backend_are_listed(called):
    """The exit code is 0 when every backend is ok, or says why it cannot run."""
    code, out, err = called("doctor.py", doctor.main, "op=norm", "device=cpu")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    machine, backends, last_line = out.split("\n\n")
    assert machine.startswith("gpu      ")
    for label in ("host", "versions", "tested", "packages", "compiler", "tuned"):
        assert re.search(rf"^{label:<8} \S", machine, re.MULTILINE)
    assert f"torch {torch.__version__}" in machine
    assert re.search(
        rf"^norm       eager             ok           fp32, torch {re.escape(torch.__version__)}$", out, re.M
    )
    assert re.search(r"^norm       quack             unavailable  it needs ", backends, re.MULTILINE)
    assert re.findall(r"^norm +(\w+)", backends, re.MULTILINE) == impls("norm")
    assert last_line.startswith(f"done     {len(impls('norm'))} answers of {len(impls('norm'))} backends: ")


def test_a_file_outside_the_repo_is_examined_alone(called, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from kernels.norm import reference as norm\n")
    code, out, err = called("doctor.py", doctor.main, "op=norm", "impl=mine.py", "device=cpu")
    assert (code, err) == (0, "")
    assert re.findall(r"^norm +(\S+) +(\w+)", out, re.MULTILINE) == [("mine.py", "ok")]


# Backend -> the body of its norm()
BODIES = {
    "wrong": "    y, stream = reference(x, residual, weight, bias, eps)\n    return 1.001 * y, stream\n",
    "raises": "    raise RuntimeError('two\\nlines')\n",
    "killed": "    os.kill(os.getpid(), signal.SIGKILL)\n",
    "leaves": "    os.write(2, b'LLVM ERROR: no\\n')\n    os._exit(3)\n",
    "hangs": "    time.sleep(600)\n",
    "chatters": "    os.write(1, b'{}')\n    print('hello')\n    return reference(x, residual, weight, bias, eps)\n",
}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_a_broken_backend_is_named_and_the_others_still_run(checkout):
    for path in (checkout / "kernels" / "norm").glob("[!_]*.py"):
        if path.stem != "eager":
            path.unlink()
    for impl, body in BODIES.items():
        code = "import os, signal, time\nfrom kernels.norm import reference\n"
        code += f"def norm(x, residual, weight, bias, eps=1e-5):\n{body}"
        (checkout / "kernels" / "norm" / f"{impl}.py").write_text(code)
    command = [sys.executable, "-m", "scripts.doctor", "op=norm", "device=cpu", "limit=10"]
    process = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=120)
    statuses = dict(re.findall(r"^norm +(\w+) +(\w+)  ", process.stdout, re.MULTILINE))
    failed = dict.fromkeys(("leaves", "raises"), "failed") | dict.fromkeys(("hangs", "killed"), "undecided")
    assert statuses == {"eager": "ok", "chatters": "ok", "wrong": "wrong", **failed}
    assert process.stderr.splitlines() == [
        "error: norm=hangs fp32 768 undecided: no answer within 10 s",
        "error: norm=killed fp32 768 undecided: the process ended, killed by SIGKILL",
        "error: norm=leaves fp32 768 failed: the process ended, exit code 3: LLVM ERROR: no",
        "error: norm=raises fp32 768 failed: RuntimeError: two lines",
        process.stderr.splitlines()[-1],
    ]
    wrong_line = r"error: norm=wrong fp32 768 wrong: out0: error \S+ is more than .*"
    assert re.fullmatch(wrong_line, process.stderr.splitlines()[-1])
    assert "hello" not in process.stdout
    assert process.returncode == 1


@pytest.mark.usefixtures("quick_python")
def test_the_table_of_a_readme_equals_the_printed_one_when_the_matrix_is_kept(called, monkeypatch, tmp_path):
    """keep=true appends the rows of a small matrix to results/. A README's section made from them equals the output."""
    monkeypatch.setattr(contract("norm"), "SIZES", {str(C): {"shape": (5, C)} for C in (5, 64)})
    monkeypatch.setattr(doctor, "impls", lambda op: ["eager", "quack"])
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    device = device_slug(device_name(CPU))
    assert "No rows yet" in tables.support_tables(device)
    arguments = "op=norm", "device=cpu", "matrix=true", "keep=true", f"out_dir={tmp_path / 'out'}"
    code, out, err = called("doctor.py", doctor.main, *arguments)
    assert (code, err) == (0, "")
    eager, quack = map(json.loads, (tmp_path / "results" / device / "support.jsonl").read_text().splitlines())
    assert set(eager["answers"]["fp16"]) == {"5", "64"}
    assert list(eager["answers"]) == [
        *probe.PROBE_DTYPES,
        *contract("norm").FEATURES,
        "forward",
        "backward",
        "compile",
    ]
    assert (eager["impl"], quack["impl"], eager["env"]["torch"]) == ("eager", "quack", torch.__version__)
    section = fill(f"<!-- support: {device} -->\n<!-- end -->").splitlines()[1:-1]
    assert "\n".join(section) in out
    assert [cell.strip() for cell in section[2].strip("|").split("|")] == ["eager", *["yes"] * 8]
    assert section[4].startswith("- `norm=quack`: it needs ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["op=gemm"], f"op=gemm: choose {', '.join(ALL_OPS)}"),
        (["impl=eager"], "impl=eager needs one op: add op=NAME"),
        (["op=norm", "impl=fast"], f"impl=fast: no file kernels/norm/fast.py; there are {', '.join(impls('norm'))}"),
        (["limit=0"], "limit=0: it must be more than 0 seconds"),
        (["keep=true"], "keep=true stores the rows of a matrix, or speeds: add matrix=true or speed=true"),
        (["out_dir=out/a"], "out_dir=out/a is for the rows of a matrix: add matrix=true"),
        (["device=tpu"], "device=tpu: choose auto, cpu, cuda or cuda:N"),
    ],
)
def test_a_mistake_prints_one_line(called, arguments, message):
    code, _, err = called("doctor.py", doctor.main, *arguments)
    assert (code, err) == (1, f"error: {message}\n")


def test_a_device_that_repeats_its_bits_passes_the_soak(called):
    code, out, err = called("doctor.py", doctor.main, "soak=0.01", "device=cpu")
    assert (code, err) == (0, "")
    line, verdict = out.splitlines()[-2:]
    count = re.fullmatch(r"soak     0\.\d min \| (\d+) repetitions \| 0 differ", line)[1]
    assert verdict.endswith(f": the bits of all {count} repetitions are equal")


@pytest.mark.parametrize("part", ["loss", "gradient norm", "weights or moments"])
def test_a_flipped_bit_in_the_soak_names_the_device(called, monkeypatch, part):
    """The lowest bit of one number is flipped in the second repetition of the bf16 step."""
    calls = []

    def miscompute(model, optimizer, *arguments):
        loss, norm = train_step(model, optimizer, *arguments)
        calls.append(next(model.parameters()).dtype)
        weight = optimizer.state()["exp_avg"]["h.0.mlp.c_fc.weight"][3, 5]
        if calls.count(torch.bfloat16) == 3 and calls[-1] == torch.bfloat16:  # the first is what the others equal
            {"loss": loss, "gradient norm": norm}.get(part, weight).detach().view(torch.int32).bitwise_xor_(1)
        return loss, norm

    monkeypatch.setattr(soak, "train_step", miscompute)
    code, out, err = called("doctor.py", doctor.main, "soak=0.02", "device=cpu")
    assert code == 1
    assert " | 1 differ" in out.splitlines()[-1]
    assert err.startswith(f"error: {device_name(CPU)} (cpu of ")
    assert f" miscomputes: 1 of {len(calls) // 2 - 1} repetitions differ from the first. Repetition 2 " in err
    assert f"Repetition 2 differs in the {part} of the bf16 step. " in err
    assert err.count("\n") == 1


def test_a_soak_of_no_minutes_is_an_error(called):
    assert called("doctor.py", doctor.main, "soak=0")[2] == "error: soak=0.0: it must be more than 0 minutes\n"
