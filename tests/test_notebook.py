"""notebooks/quickstart.ipynb runs from top to bottom on a CPU, and the repo's file holds no output."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readmes import READMES, check

ROOT = Path(__file__).parents[1]
NOTEBOOK = "notebooks/quickstart.ipynb"
CELLS = json.loads((ROOT / NOTEBOOK).read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
TEXT = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
SHORTER = {"batch_size": 2, "tokens_per_step": 256, "max_steps": 6, "eval_every": 3}  # the smoke experiment's keys


@pytest.fixture
def kernel(tmp_path, monkeypatch, fork_server):
    """Let Jupyter's kernel be this Python, and the programs that the notebook starts be forks, which start quickly."""
    pytest.importorskip("ipykernel")
    folder = tmp_path / "jupyter/kernels/python3"
    folder.mkdir(parents=True)
    program = f"import sys; sys.executable = {fork_server!r}; import ipykernel.kernelapp as app"
    argv = [sys.executable, "-c", f"{program}; app.launch_new_instance()", "-f", "{connection_file}"]
    spec = {"argv": argv, "language": "python"}
    (folder / "kernel.json").write_text(json.dumps({**spec, "display_name": "Python 3"}))
    for variable in ("JUPYTER_PATH", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / "jupyter"))


@pytest.mark.usefixtures("kernel")
def test_every_cell_runs_and_the_ladder_has_four_choices(checkout):
    """In a copy of the repo with a shorter smoke experiment."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    smoke = checkout / "configs/experiment/smoke.yaml"
    text = smoke.read_text()
    for key, value in SHORTER.items():
        text, count = re.subn(rf"^  {key}: \d+$", f"  {key}: {value}", text, flags=re.MULTILINE)
        assert count == 1
    smoke.write_text(text)
    notebook = nbformat.read(checkout / NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    resources = {"metadata": {"path": str(checkout / "notebooks")}}  # where Jupyter starts the kernel
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert not re.search(r"^error: |^Traceback", printed, re.MULTILINE), printed
    rows = [json.loads(path.read_text()) for path in sorted(checkout.glob("out/**/result.json"))]
    assert [row["status"] for row in rows] == ["ok"] * 6, printed  # two runs, and four jobs of a sweep
    eager, mine = [row for row in rows if row["steps"] == SHORTER["max_steps"]]
    assert [row["kernels"]["norm"].split()[0] for row in (eager, mine)] == ["eager", "out/my_norm.py"]
    assert mine["train/loss"] == pytest.approx(eager["train/loss"], rel=1e-5)  # as the text says
    shown = [output["data"] for output in outputs if "data" in output]
    [table] = [data["text/markdown"] for data in shown if "text/markdown" in data]
    _, _, *lines = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    norms, attentions = ("eager", "eager, norm out/my_norm.py"), ("eager", "sdpa")
    assert {line[1] for line in lines} == {f"{norm} · {attention}" for norm in norms for attention in attentions}
    assert all(re.match(r"[\d,]+ \(", line[2]) for line in lines)  # each has a speed
    [picture] = checkout.glob("out/*-sweep/speed.png")
    assert len([data for data in shown if "image/png" in data]) == 1
    assert picture.stat().st_size > 10_000


def test_the_file_holds_no_output():
    cells = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert [cell for cell in cells if cell["outputs"] or cell["execution_count"] is not None] == []


def test_the_commands_for_every_device_are_valid():
    """The cell that chooses the sweep runs here as on a CPU, a T4 and an A100. Its texts are checked like READMEs'."""
    [choose] = [code for code in CODE if "is_available" in code]
    sweeps = []
    for is_available, capability in ((False, None), (True, (7, 5)), (True, (8, 0))):
        fake = f"class torch:\n    class cuda:\n        is_available = lambda: {is_available}\n"
        fake += f"        get_device_capability = lambda: {capability}\n"
        done = subprocess.run(
            [sys.executable, "-c", fake + choose.replace("import torch\n", "")],
            capture_output=True,
            text=True,
            check=True,
        )
        sweeps.append(done.stdout.strip())
    assert len(set(sweeps)) == 3
    commands = re.findall(r"!(python [^`\n{]+)", "\n".join([*CODE, TEXT]).replace("{folder}", "out/SWEEP"))
    for command in [*commands, *sweeps]:
        words = shlex.split(command)[1:]
        if words[-1] == "--version" or words[:2] == ["-m", "scripts.report"]:
            continue
        check([word.replace("out/my_norm.py", "kernels/norm/triton.py") for word in words])


def test_it_uses_the_kernel_of_the_readme_and_files_that_git_tracks():
    [kernel] = [code.partition("\n")[2] for code in CODE if code.startswith("%%writefile out/")]
    assert f"```python\n{kernel}\n```" in READMES["README.md"]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    links = re.findall(r"\]\(\.\./([^)]+)\)", TEXT)
    scripts = [f"scripts/{name}.py" for name in re.findall(r"-m scripts\.(\w+)", "\n".join([*CODE, TEXT]))]
    named = re.findall(r'"([\w/]+\.py)"', CODE[0])
    assert len(links) == 3
    assert {NOTEBOOK, *links, *scripts, *named} <= {*tracked}


def test_outside_of_the_repo_the_first_cell_clones_and_installs_it(tmp_path):
    """A stub takes the place of pip. A second call neither clones again nor fails."""
    source = tmp_path / "source"
    for file in ("kernels/registry.py", "train.py"):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).touch()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=source, check=True)
    pip = tmp_path / "bin/python"
    pip.parent.mkdir()
    pip.write_text(f'#!/bin/sh\necho "$PWD" "$@" >> {tmp_path}/log\n')
    pip.chmod(0o755)
    cell = re.sub(r"^!.*", "", CODE[0], flags=re.MULTILINE)
    program = f"import sys; sys.executable = {str(pip)!r}\n{cell}\nprint(Path.cwd())"
    no_address = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    reason = "error: ADDRESS is empty, so there is no repo to clone: write the https address of your fork into it"
    assert no_address.stderr == f"{reason}, or run this notebook inside a clone\n"
    assert not (tmp_path / "hotswap").exists()
    program = program.replace('ADDRESS = ""', f"ADDRESS = {source.as_uri()!r}")
    clone = tmp_path / "hotswap"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(clone)
    assert (tmp_path / "log").read_text().splitlines() == [f"{clone} -m pip install -q -e .[report]"] * 2
    done = subprocess.run([sys.executable, "-c", program], cwd=clone, capture_output=True, text=True, check=True)
    assert len((tmp_path / "log").read_text().splitlines()) == 2  # inside the repo it installs nothing
