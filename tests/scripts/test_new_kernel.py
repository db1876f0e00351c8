"""`python -m scripts.new_kernel` as a command, and the templates that it copies."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.registry import ALL_OPS, TRAINING_OPS, backend, contract
from lab.bench.probe import Probe, probe_status
from scripts import generate, new_kernel

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CASES = [(op, case) for op in ALL_OPS for case, shape in contract(op).CASES.items() if not shape.get("fp8")]


def new(called, *arguments):
    return called("new_kernel.py", new_kernel.main, *arguments)


@pytest.mark.parametrize(("op", "case"), CASES)
def test_a_template_is_right_in_every_case_of_the_contract(op, case):
    template = str(ROOT / f"kernels/{op}/_template.py")
    status = probe_status(Probe(op, template, contract(op).CASES[case], torch.float32), CPU)
    assert status == f"ok: torch {torch.__version__}"


@pytest.mark.parametrize("op", ALL_OPS)
def test_the_file_is_new_and_the_commands_name_it(called, monkeypatch, tmp_path, op):
    monkeypatch.chdir(tmp_path)
    code, out, err = new(called, f"op={op}", "name=mine", "path=my kernels")
    assert (code, err) == (0, "")
    text = Path("my kernels/mine.py").read_text()
    assert "Your Triton kernel goes here" in text
    assert all(f"    {argument}" in text for argument in ("lengths  ", "window  ", "starts  ") if op == "attention")
    assert callable(getattr(backend(op, "my kernels/mine.py"), op))
    commands = [shlex.split(line) for line in out.splitlines() if line.startswith("python")]
    key = "attn" if op == "attention" else f"kernels.{op}"
    assert ["python", "-m", "scripts.doctor", f"op={op}", 'impl="my kernels/mine.py"'] in commands
    assert any(f'{key}="my kernels/mine.py"' in command for command in commands)
    assert any("train.py" in command for command in commands) == (op in TRAINING_OPS)
    code, _, err = new(called, f"op={op}", "name=mine", "path=my kernels")
    assert (code, err) == (1, "error: my kernels/mine.py exists: choose another name, or edit it\n")


def test_without_a_path_the_file_is_in_the_folder_of_the_op(called, monkeypatch, tmp_path):
    (tmp_path / "kernels/norm").mkdir(parents=True)
    (tmp_path / "kernels/norm/_template.py").write_text("# Your Triton kernel goes here\n")
    monkeypatch.setattr(new_kernel, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    code, out, _ = new(called, "op=norm", "name=mine")
    assert code == 0
    assert Path("kernels/norm/mine.py").exists()
    assert out.startswith("wrote    kernels/norm/mine.py: ")
    assert "python train.py +experiment=smoke kernels.norm=mine\n" in out
    code, _, err = new(called, "op=mlp", "name=mine")
    assert (code, err.startswith("error: op=mlp has no template ")) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["op=norm"], "name is missing"),
        (["op=gemm", "name=mine"], f"op=gemm: choose {', '.join(ALL_OPS)}"),
        (["op=norm", "name=a-b"], "name=a-b: it must be a name in Python"),
        (["op=norm", "name=def"], "name=def: it must be a name in Python"),
        (["op=norm", "name=compile"], "name=compile: it must be a name in Python"),
        (["op=norm", "name=eager"], "kernels/norm/eager.py exists: choose another name"),
        (["op=norm", "name=mine", "path=/proc/none"], "/proc/none/mine.py cannot be written: "),
    ],
)
def test_a_mistake_prints_one_line(called, arguments, message):
    code, _, err = new(called, *arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert message in err


@pytest.mark.parametrize("choice", ["attn={attention}", "kernels.decode={decode}", "attn={attention} model.window=8"])
def test_a_template_generates_the_text_of_eager(called, monkeypatch, tmp_path, choice):
    monkeypatch.chdir(tmp_path)
    templates = {op: os.path.relpath(ROOT / f"kernels/{op}/_template.py") for op in ("attention", "decode")}
    words = "checkpoint=random", "model=tiny", "prompt_tokens=12", "max_new_tokens=20", "precision=fp32", "device=cpu"
    window = [word for word in choice.split() if "window" in word]
    texts = []
    for chosen in (["attn=eager", *window], choice.format(**templates).split()):
        folder = f"run{len(texts)}"
        code, _, err = called("generate.py", generate.main, *words, "temperature=0", *chosen, f"out_dir={folder}")
        assert (code, err) == (0, "")
        texts.append(Path(folder, "samples.jsonl").read_text())
    assert texts[0] == texts[1]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_the_tests_of_backends_test_a_file_outside_the_repo(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text((ROOT / "kernels/norm/_template.py").read_text())
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "--import-mode=importlib", "-q", "tests/kernels"]
    command += ["--backend", f"norm={file}", "-k", "mine and not compile", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.rpartition(" passed")[0].split()[-1].lstrip()) > 30
