"""What holds for the repo as a whole: imports never climb, and what the README says is so."""

import ast
import importlib
import re
import shlex
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
SCRIPTS = re.findall(r"^ +python -m scripts\.(\w+) (.*?)(?: +#.*)?$", README, re.MULTILINE)


@pytest.mark.parametrize(("processes", "arguments"), sorted(set(COMMANDS)))
def test_every_command_of_the_readme_is_one(processes, arguments, monkeypatch):
    """Each is composed and checked (a sweep, each of its jobs), as the first of so many processes."""
    if processes:
        for name, value in {"WORLD_SIZE": processes, "RANK": "0", "MASTER_ADDR": "localhost"}.items():
            monkeypatch.setenv(name, value)
    words = [word for word in shlex.split(arguments) if word not in ("-m", "--help")]
    jobs, sweep = [[]], "-m" in arguments or "+sweep=" in arguments
    for word in words:
        key, _, values = word.partition("=")
        jobs = [[*job, f"{key}={value}"] for job in jobs for value in (values.split(",") if sweep else [values])]
    for job in jobs:
        config(*[word for word in job if not word.startswith(("kernels.norm=mine", "attn=mine"))])


def test_every_script_of_the_readme_is_one():
    """Those with a config are composed and checked; the others take what their own tests show."""
    seen = set()
    for name, arguments in SCRIPTS:
        module = importlib.import_module(f"scripts.{name}")
        seen.add(name)
        if not (ROOT / "configs" / f"{name}.yaml").exists():
            continue
        words = [word for word in shlex.split(arguments) if not word.startswith("prompt=")]
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            parse(compose(name, overrides=words), module.Config)
    assert seen >= {"doctor", "prepare", "generate", "evaluate", "export", "collect"}


def test_the_readme_shows_the_results_as_they_are():
    """Its tables are what scripts/report.py makes of results/ now."""
    text = (ROOT / "README.md").read_text()
    assert report.fill(text) == text
    assert report.fill(lessons := (ROOT / "kernels" / "README.md").read_text()) == lessons
    sections = re.findall(r"<!-- (\w+): h200 -->\n\S.*?\n<!-- end -->", text, re.DOTALL)
    assert sections == ["support", "context", "max_context", "throughput", "environment", "generation", "agreement"]
