"""The commands of every README are valid, its links lead somewhere, and its tables show the rows in results/."""

import ast
import functools
import importlib
import os
import re
import shlex
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from torch.distributed.run import get_args_parser as torchrun_parser

from lab import rows
from lab.report.readmes import fill
from model.vocabulary import take_vocabulary
from runtime.config import parse
from tests.crashtest.__main__ import parse_arguments
from tests.test_train import config

ROOT = Path(__file__).parents[1]
PATHS = [*ROOT.glob("*.md"), *ROOT.glob("[!.]*/README.md"), ROOT / "lab/judge/README.md"]
READMES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PATHS}
COMMAND = re.compile(
    r"(?:^ *|`)(?:uv run )?((?:[A-Z_]+=\S+ )*(?:python|torchrun|make|scripts/measure\.sh) [^`#\n]+)", re.MULTILINE
)
COMMANDS = [
    (name, command.strip())
    for name, text in READMES.items()
    for command in dict.fromkeys(COMMAND.findall(text.replace("\\\n", " ")))
]
# Backends that are not in the repo
NEW = "kernels.norm=mine", "attn=mine", "kernels.norm=same", "kernels.norm=slow", "impl=mine"
NEW += (
    "kernels.norm=path/to/mine.py",
    "attn=some_package.module",
    "impl=path/to/mine.py",
    "impl=[eager,path/to/mine.py]",
)


@functools.cache  # parsing takes 3 s, which the collection of tests would take in each worker
def defined_names() -> set[str]:
    """Return the names of all functions and classes of the repo."""
    trees = (ast.parse(path.read_text()) for path in ROOT.glob("[!.]*/**/*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_every_command_of_a_readme_is_valid(monkeypatch, name, command):
    """Its config is composed and checked as the program does it: each job of a sweep, and rank 0 of torchrun.

    The packages of the trackers need not be installed.
    """
    monkeypatch.setattr("runtime.trackers.find_spec", lambda name: True)
    program, *words = [word for word in shlex.split(command) if not re.match("[A-Z_]+=", word)]
    if program == "make":
        assert all(re.search(f"^{word}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for word in words)
        return
    if program == "scripts/measure.sh":
        assert {*words} <= {*measure_groups(), "GROUP"}  # GROUP stands for the name of a group
        return
    check(words)


def check(words):
    """Check the words behind `python` or `torchrun`: train.py, a command in scripts/, pytest, or tests.crashtest."""
    if words[0].startswith("--"):
        options = torchrun_parser().parse_args(words)
        world_size = int(options.nnodes.rpartition(":")[2]) * int(options.nproc_per_node)
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in {"WORLD_SIZE": str(world_size), "RANK": "0", "MASTER_ADDR": "localhost"}.items():
                patch.setenv(variable, value)
            module = ["-m"] if options.module else []
            check([*module, options.training_script, *options.training_script_args])
    elif words[0] == "train.py":
        check_train(words[1:])
    elif words[0].startswith("course/"):
        assert (ROOT / words[0]).is_file()
    elif words[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words[2:] if "/" in word and "path/to/" not in word)
    elif words[:2] == ["-m", "tests.crashtest"]:
        check_train(parse_arguments(words[2:]).training)
    else:
        assert words[0] == "-m"
        check_script(words[1].removeprefix("scripts."), words[2:])


def check_train(words):
    """Compose the config of a run, or of as many jobs of a sweep as show each value once."""
    is_sweep = "-m" in words or any(word.startswith("+sweep=") for word in words)
    values = {}
    for word in words:
        if word not in ("-m", "--help"):
            key, _, value = word.partition("=")
            values[key] = re.findall(r"\[[^]]*\]|[^,]+", value) if is_sweep else [value]  # a list is one value
    for i in range(max(map(len, values.values()), default=1)):
        job = [f"{key}={choices[i % len(choices)]}" for key, choices in values.items()]
        job = [word for word in job if not word.startswith(NEW)]
        # some values of attn= have no YAML file: the program adds their choices
        config(*(re.sub("^attn=", "attn.impl=", word) for word in job))


def check_script(name, words):
    """Compose the command's config, if it has one; the other commands have tests of their arguments."""
    module = importlib.import_module(f"scripts.{name}")
    if "--" in words:  # scripts.judge gives the rest to train.py
        check_train(words[words.index("--") + 1 :])
        words = words[: words.index("--")]
    if (ROOT / "configs" / f"{name}.yaml").exists():
        if name == "judge":  # it needs a name
            words = ["impl=triton_recompute" if word == "impl=mine" else word for word in words]
        words = [word for word in words if not word.startswith(("prompt=", *NEW)) and word not in ("--help", "-m")]
        words = [re.sub(r"^([\w.]+=)(?!\[)([^,]*),.*", r"\1\2", word) for word in words]  # the first job of a sweep
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            cfg = compose(name, overrides=words)
            take_vocabulary(cfg, "data.tokenizer")
            parse(cfg, module.Config)


def measure_groups():
    """Return the groups of scripts/measure.sh: its functions without arguments (`() { # NAME ...` names arguments)."""
    return re.findall(r"^(\w+)\(\) \{(?! # NAME)", (ROOT / "scripts/measure.sh").read_text(), re.MULTILINE)


@pytest.mark.exhaustive
def test_every_group_of_measure_sh_runs_valid_commands(checkout, monkeypatch):
    """A fake `python` and `torchrun` writes down the commands of every group; they are checked like the READMEs'.

    A command is skipped if earlier ones of its program had all its words. All commands would take 60 s.
    """
    log, python = checkout / "log", checkout / "python"
    python.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" >> {log}; echo >> {log}\n")
    python.chmod(0o755)
    (checkout / "torchrun").symlink_to(python)
    (checkout / "sotu.txt").touch()
    monkeypatch.setenv("PATH", str(checkout), prepend=os.pathsep)
    groups = measure_groups()
    done = subprocess.run([checkout / "scripts/measure.sh", *groups], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
    commands = [words.split("\0") for words in log.read_text().split("\0\n")[:-1]]
    checked = defaultdict(set)
    for words in commands:
        program = next(word for word in words if re.search(r"\.py$|^(scripts|tests)\.|^pytest$", word))
        if not checked[program] >= set(words):
            check(words)
            checked[program].update(words)
    assert len(commands) >= len(groups)
    for name in ("same", "slow"):
        ast.parse((checkout / f"out/same.copy/kernels/norm/{name}.py").read_text())
    assert subprocess.run([checkout / "scripts/measure.sh", "nothing"], capture_output=True).returncode == 2


def test_the_slurm_script_starts_torchrun_on_each_machine(monkeypatch, tmp_path):
    """Stubs of scontrol and srun take its calls, and torchrun's own parser and train.py's config take the command."""
    stubs = {
        "scontrol": '[ "$*" = "show hostnames gpu-[7-8]" ] && printf "gpu-7\\ngpu-8\\n"',
        "srun": 'exec "$@"',
        "torchrun": 'printf "%s\\n" "$@"',
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    variables = {"JOB_NODELIST": "gpu-[7-8]", "JOB_NUM_NODES": "2", "GPUS_ON_NODE": "8", "JOB_ID": "42"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    script = ROOT / "scripts/slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run([script, "out_dir=out/mine", "parallel=fsdp"], capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[:5] == [
        "--nnodes=2",
        "--nproc_per_node=8",
        "--rdzv_backend=c10d",
        "--rdzv_id=42",
        "--rdzv_endpoint=gpu-7:29500",
    ]
    check(words)
    assert words[-5:] == ["train.py", "train.resume=auto", "runtime.requeue=true", "out_dir=out/mine", "parallel=fsdp"]


def test_every_command_is_in_a_readme_and_the_root_readme_links_every_room():
    shown = {word for _, command in COMMANDS for word in command.split() if word.startswith("scripts.")}
    assert shown >= {f"scripts.{path.stem}" for path in ROOT.glob("scripts/[a-z]*.py")}
    links = set(re.findall(r"\]\((\w+)/README\.md\)", READMES["README.md"]))
    assert links >= {path.parent.name for path in ROOT.glob("[!.]*/README.md")}


def test_the_root_readme_opens_with_a_picture_of_results_that_leads_to_its_questions():
    """Above the first table, and the picture is one that the first section of results/README.md shows, too."""
    opening = READMES["README.md"].partition("\n|")[0]
    [(picture, target)] = re.findall(r"\[!\[[^]]+\]\(([^)]+)\)\]\(([^)]+)\)", opening)
    assert target == "results/README.md"
    assert f"]({picture.removeprefix('results/')})" in READMES[target].partition("\n## Which needs")[0]


@pytest.mark.parametrize("name", READMES)
def test_links_lead_somewhere(name):
    for link in re.findall(r"\]\(([^)#:, ]+)(?:#[^)]*)?\)", READMES[name]):
        assert (ROOT / name).parent.joinpath(link).exists(), link


@pytest.mark.parametrize("name", READMES)
def test_the_functions_that_a_readme_names_exist(name):
    named = set(re.findall(r"`(?:[\w.]+\.)?(\w+)\(\)`", READMES[name]))
    assert named - defined_names() == set()


@pytest.mark.parametrize("name", [name for name, text in READMES.items() if "\n## Files\n" in text])
def test_the_files_of_a_room_are_listed(name):
    listed = READMES[name].partition("\n## Files\n")[2].partition("\n## ")[0]
    files = {path.name for path in (ROOT / name).parent.rglob("*.py")} - {"__init__.py"}
    assert {*re.findall(r"[\w]+\.py\b", listed)} - {"__init__.py"} == files
    assert {*re.findall(r"(\w+)\(\)", listed)} - defined_names() == set()


@pytest.mark.parametrize("name", READMES)
def test_the_tables_show_the_results_as_they_are(name):
    """`python -m scripts.report` would not change the README."""
    assert fill(READMES[name]) == READMES[name]


def test_no_table_reads_the_archive(monkeypatch):
    """But its rows are whole: each has its CRC-32."""
    read, read_lines = [], rows.read_lines
    monkeypatch.setattr(rows, "read_lines", lambda path: read.append(path) or read_lines(path))
    for text in READMES.values():
        fill(text)
    archive = ROOT / "results/archive"
    assert not any(archive in path.parents and path.exists() for path in read)
    assert all(rows.read_whole(path) for path in archive.glob("*/*.jsonl"))
