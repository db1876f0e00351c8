"""What holds for the repo as a whole: imports never climb, and what the README says is so."""

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from runtime.config import parse
from scripts import report
from tests.test_train import config

ROOT = Path(__file__).parents[1]
FLOOR = {"kernels": 0, "data": 0, "runtime": 0, "model": 1, "train": 2, "scripts": 3}
FILES = [path for room in FLOOR for path in [*ROOT.glob(f"{room}/**/*.py"), *ROOT.glob(f"{room}.py")]]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_never_climb(path):
    """`kernels`, `data`, `runtime` <- `model` <- `train.py` <- `scripts`, and the ground floor's rooms stand alone."""
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for module in imported(path):
        other = module.split(".")[0]
        if other in FLOOR and other != room:
            assert FLOOR[other] < FLOOR[room], f"{room} imports {module}"


README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(
    r"^ +(?:python|torchrun --standalone --nproc_per_node=(\d)) train\.py(.*?)(?: +#.*)?$", README, re.MULTILINE
)
NEW = "kernels.norm=mine", "attn=mine", "kernels.norm=same", "kernels.norm=slow"  # kernels that a reader adds
SCRIPTS = re.findall(r"^ +python -m scripts\.(\w+) (.*?)(?: +#.*)?$", README, re.MULTILINE)


@pytest.mark.parametrize(("processes", "arguments"), sorted(set(COMMANDS)))
def test_every_command_of_the_readme_is_one(processes, arguments, monkeypatch):
    """Each is composed and checked (a sweep, each of its jobs), as the first of so many processes."""
    if processes:
        for name, value in {"WORLD_SIZE": processes, "RANK": "0", "MASTER_ADDR": "localhost"}.items():
            monkeypatch.setenv(name, value)
    check(shlex.split(arguments))


def check(arguments):
    """Of train.py, or of each job of its sweep."""
    words = [word for word in arguments if word not in ("-m", "--help")]
    jobs, sweep = [[]], "-m" in arguments or any(word.startswith("+sweep=") for word in arguments)
    for word in words:
        key, _, values = word.partition("=")
        jobs = [[*job, f"{key}={value}"] for job in jobs for value in (values.split(",") if sweep else [values])]
    for job in jobs:
        job = [word for word in job if not word.startswith(NEW)]
        config(*(re.sub("^attn=", "attn.impl=", word) for word in job))  # of some the program itself adds the group


def test_every_script_of_the_readme_is_one():
    """Those with a config are composed and checked; the others take what their own tests show."""
    seen = set()
    for name, arguments in SCRIPTS:
        seen.add(name)
        check_script(name, [word for word in shlex.split(arguments) if not word.startswith("prompt=")])
    assert seen >= {"doctor", "prepare", "generate", "evaluate", "export", "collect"}


def check_script(name, arguments):
    module = importlib.import_module(f"scripts.{name}")
    if (ROOT / "configs" / f"{name}.yaml").exists():
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            parse(compose(name, overrides=arguments), module.Config)


def test_what_measures_the_results_again(checkout, monkeypatch):
    """Every group of scripts/measure.sh, with a python that only notes what it was asked for."""
    notes, python = checkout / "notes", checkout / "python"
    note = f'import json, sys; open("{notes}", "a").write(json.dumps(sys.argv[1:]) + "\\n")'
    python.write_text(f"#!{sys.executable}\n{note}")
    python.chmod(0o755)
    (checkout / "sotu.txt").touch()
    monkeypatch.setenv("PATH", str(checkout), prepend=os.pathsep)
    text = (checkout / "scripts/measure.sh").read_text()
    groups = re.findall(r"^(\w+)\(\) \{(?! # )", text, re.MULTILINE)  # those with a comment are helpers
    done = subprocess.run([checkout / "scripts/measure.sh", *groups], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
    asked = [json.loads(line) for line in notes.read_text().splitlines()]
    for words in asked:
        if words[0] == "train.py":
            check(words[1:])
        else:
            check_script(words[1].removeprefix("scripts."), words[2:])
    assert len(asked) >= len(groups)
    for name in ("same", "slow"):
        ast.parse((checkout / f"out/same.copy/kernels/norm/{name}.py").read_text())
    assert subprocess.run([checkout / "scripts/measure.sh", "nothing"], capture_output=True).returncode == 2


def test_the_readme_shows_the_results_as_they_are():
    """Its tables are what scripts/report.py makes of results/ now."""
    text = (ROOT / "README.md").read_text()
    assert report.fill(text) == text
    assert report.fill(lessons := (ROOT / "kernels" / "README.md").read_text()) == lessons
    sections = re.findall(r"<!-- (\w+): h200 -->\n\S.*?\n<!-- end -->", text, re.DOTALL)
    assert sections == ["support", "context", "max_context", "throughput", "environment", "generation", "agreement"]
