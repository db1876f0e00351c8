"""The command of a row that may be from somebody else."""

import json
import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from kernels.names import backend_names, config_groups
from kernels.registry import COMPILE_MODES
from lab import rows
from lab.commands import CONFIGS
from lab.generation.prompts import quote_prompt
from lab.rerun import check_backends, rerun_command, rerun_words
from runtime.config import UserError, register, store_named_choices
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
    r"kernels.norm=$\{data\[path\]\}",
    r"seed=$\{oc.env:HOME\}",
    r"seed='$\{oc.env:HOME}'",
    r"data.path=\${oc.env:HOME}",
    "data={path:$HOME}",
    "stop=['${oc.env:HOME}']",
    "++prompt=${oc.env:HOME}",
    "prompt=${oc.env:HOME}",  # of a training: only scripts.generate quotes its prompt
    "kernels.norm=eager,triton",
    "seed=range(1,9)",
    "seed=interval(1,9)",
    "seed=[[[",
    f"seed={'[' * 3000}",
    f"seed={'x' * 5000}",
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
PATH = "/tmp/evil/x.py"
# Ways to write a value for Hydra, and the values that would run a file, or none: {0} is a backend
SPELLINGS = [
    "{0}",
    "'{0}'",
    '"{0}"',
    " {0} ",
    "\\ {0}",
    "[{0}]",
    "['{0}']",
    "str({0})",
    "str('{0}')",
    "choice({0})",
    "sort({0})",
    "glob({0})",
    "{0},{0}",
    "{{norm:{0}}}",
    "{{impl:{0}}}",
    "{{'norm':'{0}'}}",
    "{{norm:{{norm:{0}}}}}",
    "{{{0}:norm}}",
]
BACKENDS = [
    "eager",
    "triton",
    PATH,
    "~/x.py",
    "some.module",
    "some-other.module",
    "${data.path}",
    "${data[path]}",
    r"$\{data.path\}",
    r"$\{data\[path\]\}",
    r"\${data.path}",
    r"\\${data.path}",
    r"\$\{data.path\}",
    "$ {data.path}",
    r"$\ {data.path}",
    "${.path}",
    "${oc.env:EVIL}",
    r"$\{oc.env:EVIL\}",
    "${oc.select:data.path}",
    "${oc.decode:${data.path}}",
]
CODE_KEYS = ["kernels.norm", "kernels", "attn", "attn.impl", "kernels/norm@kernels", "kernels@kernels", "data@kernels"]
HOSTILE_NAMES = ["../../x", "/tmp/x", "a\0b", "x" * 300, "a\nb", "a\x1b[2J", ".x", "-x", "", ".", "..", None, 3, ["x"]]


@pytest.mark.parametrize("command", HOSTILE_COMMANDS, ids=lambda command: repr(command)[:60])
def test_a_hostile_command_is_refused_in_one_line(command):
    with pytest.raises(UserError) as error:
        rerun_words({"command": command})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert rerun_command({"command": command}) == ""


def test_every_kept_row_of_a_run_has_a_command_that_may_run_again():
    """Without the keys of one run, it is the row's command, word for word. Only rows of scripts.peers have none."""
    kept = [path for path in (ROOT / "results").rglob("*.jsonl") if "command" in path.read_text().partition("\n")[0]]
    count = 0
    for path in kept:
        for row in map(json.loads, path.read_text().splitlines()):
            words = [word for word in shlex.split(row["command"]) if not word.startswith("out_dir=")]
            assert rerun_command(row) == ("" if "scripts.peers" in words else shlex.join(words))
            count += 1
    assert count > 400


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python /else/train.py out_dir=x train.resume=auto logger=wandb logger.group=x", "python train.py"),
        ("python train.py data.cache=/x train.replicate_to=/y ~attn ++seed=2", "python train.py '~attn' ++seed=2"),
        ("python -m scripts.generate 'prompt=${x} ../ /a.py \n; rm'", None),
        ("python train.py kernels=triton 'kernels.fp8=[linear,mlp]'", None),
        *((f"python train.py kernels.compile_mode={mode}", None) for mode in COMPILE_MODES),
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
    monkeypatch.chdir(ROOT / "kernels")  # kernels/lookup.py expands the ~
    assert rerun_command({"command": "python train.py kernels.norm='~/x.py'"}) == ""


@pytest.mark.parametrize("key", [f"{prefix}{key}" for prefix in ("", "+", "++") for key in CODE_KEYS])
def test_no_spelling_of_a_backend_names_a_file_after_hydra_has_read_it(key, monkeypatch):
    """The words that pass are composed as train.py does it: every backend is then a name in kernels/.

    Each key has a third of the values, because all of them would take 100 s.
    """
    monkeypatch.setenv("EVIL", PATH)
    register(CONFIGS, config_groups(), backend_names())
    passed, composed = set(), 0
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        values = [spelling.format(backend) for spelling in SPELLINGS for backend in BACKENDS]
        for value in values[len(key) % 3 :: 3]:
            words = [f"{key}={value}", f"+data.x={PATH}", "data=text", f"data.path={PATH}"]
            try:
                kept = rerun_words({"command": shlex.join(["python", "train.py", *words])})[2:]
            except UserError:
                continue
            passed.add(value)
            store_named_choices(config_groups(), kept)
            try:
                cfg = OmegaConf.to_container(compose("config", kept), resolve=True)
            except HydraException:  # it is no choice
                continue
            check_backends(cfg, "", "")
            composed += 1
    assert not [value for value in passed if re.search(r"\$|~|/|\.", value)]
    assert bool(composed) == ("@" not in key)


@pytest.mark.parametrize(
    "command",
    [
        "python train.py +experiment=smoke 'kernels.norm=$\\{data\\[path\\]\\}' data=text data.path=/tmp/evil.py",
        "python -m scripts.generate checkpoint=random 'kernels.norm=$\\{prompt\\}' prompt=/x.py",
        "python -m scripts.judge op=norm 'impl=$\\{checkpoint\\}' checkpoint=/x.py",
        "python -m scripts.judge op=norm impl=triton -- 'kernels.norm=$\\{data.path\\}' data.path=/x.py",
        "python -m scripts.generate '+prompt=${oc.env:HOME}'",
        "python -m scripts.bench_kernels op=norm 'impl=[eager,$\\{dtype\\}]' dtype=/x.py",
    ],
)
def test_a_value_that_names_another_key_is_refused(command):
    with pytest.raises(UserError, match="may run any code: if you trust it, run the command yourself"):
        rerun_words({"command": command})


def test_the_prompt_of_a_generation_is_text_for_hydra(monkeypatch):
    monkeypatch.setenv("EVIL", "secret")
    register(CONFIGS, config_groups(), backend_names())
    for text in ("${oc.env:EVIL}", r"$\{oc.env:EVIL\}", r"\${oc.env:EVIL}", r"\\${oc.env:EVIL}", "\"'${seed}", "[x"):
        words = rerun_words({"command": shlex.join(["python", "-m", "scripts.generate", f"prompt={text}"])})[3:]
        assert words == [f"prompt={text}"]
        quote_prompt(words)  # as scripts.generate does
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            assert compose("generate", words).prompt == text


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
