"""--help, --version and tab completion are quick, because they do not import torch."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import hydra
import pytest

import train
from kernels.names import config_groups
from lab.commands import CONFIGS, compose

ROOT = Path(__file__).parents[2]


def run(*command: str, **environment: str) -> tuple[int, str, list[str]]:
    """Run Python in the repo's root, and return its exit code, its output, and the modules that it imported."""
    words = [sys.executable, "-X", "importtime", *command]
    result = subprocess.run(words, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    modules = [
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")
    ]
    return result.returncode, result.stdout, modules


@pytest.mark.parametrize("command", [["train.py"], ["-m", "scripts.generate"], ["-m", "scripts.doctor"]])
def test_help_imports_no_torch(command):
    code, out, modules = run(*command, "--help")
    assert code == 0
    assert " ".join(["python", *command]) in out
    assert "Keys (key=value)\n---\n" in out
    assert "hydra" in modules
    assert "torch" not in modules


def test_tab_completion_imports_no_torch():
    code, out, modules = run("train.py", "-sc", "query=bash", COMP_LINE="python train.py attn=e")
    assert (code, out) == (0, "attn=eager\n")
    assert "torch" not in modules


def test_the_tab_key_completes_after_the_command_of_the_readme(tmp_path):
    """In a real bash, which calls the function of the command as the Tab key does."""
    [line] = [line for line in (ROOT / "configs/README.md").read_text().splitlines() if "install=bash" in line]
    assert f"for the Tab key: {line.strip()}" in (ROOT / "README.md").read_text()
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    script = f"""{line}
        complete_line() {{
            COMP_LINE="$1" COMP_POINT=${{#1}} COMP_WORDS=($1) COMP_CWORD=2
            "$(complete -p python | sed 's/.*-F //; s/ python//')"
            echo "${{COMPREPLY[@]}}"
        }}
        complete_line "python train.py attn=e"
        complete_line "python train.py kernels="
        complete_line "python train.py optim.lea" """
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = subprocess.run(["bash", "-c", script], cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True)
    attention, *presets, key = result.stdout.decode().split()
    assert (attention, key, result.stderr) == ("attn=eager", "optim.learning_rate=", b"")
    assert {*presets} == {f"kernels={name}" for name in config_groups()["kernels"] if name != "*"}


@pytest.mark.parametrize("command", [["train.py"], ["-m", "scripts.generate"], ["-m", "scripts.blame"]], ids=" ".join)
def test_version_is_of_hotswap_and_of_torch(command):
    """README.md names it."""
    assert "`--version` prints the versions" in (ROOT / "README.md").read_text()
    code, out, modules = run(*command, "--version")
    assert re.fullmatch(rf"hotswap \d+\.\d+\.\d+, torch {re.escape(version('torch'))}, (no )?triton.*\n", out)
    assert code == 0
    assert "torch" not in modules


@pytest.mark.usefixtures("quick_python")
def test_help_with_a_wrong_choice_explains_the_choice():
    """The quick answer fails, and the program itself, which imports torch, prints the error."""
    result = subprocess.run(
        [sys.executable, "train.py", "--help", "attn=nope"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: attn=nope: no such choice; attn is one of: ")


def test_a_composed_config_has_the_home_folder_before_it_is_completed(monkeypatch):
    """scripts.judge completes it with the shape of the model in init_from."""
    monkeypatch.setenv("HOME", "/home-of-test")
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        assert compose(train.Config, "config", ['init_from="~/model"']).init_from == "/home-of-test/model"
