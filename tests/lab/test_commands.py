"""--help and tab completion are quick, because they do not import torch. The speed itself depends on the machine."""

import os
import subprocess
import sys
from pathlib import Path

import hydra
import pytest

import train
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
