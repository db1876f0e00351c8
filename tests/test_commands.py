"""Every command that a program prints runs when it is pasted into a shell, whatever is in the paths.

The shell's part is shlex.split(), and Hydra's part is its own parser. One test walks over all places in the source that
print a command.
"""

import ast
import re
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf

from common.terminal import override, shell_command
from data import DataConfig, prepare_command
from runtime import resume
from runtime.config import UserError, explain_error
from runtime.tracker_process import TensorBoard
from runtime.trackers import LoggerConfig, Tracker
from scripts import new_kernel
from tests.test_repo import MODULES

HOSTILE = "a b", "a(1)", "a=b", "a,b", "it's", 'say "a"', "r[3]", "{x}", "~", "~/x", "$HOME", "${x}", "${oc.env:HOME}"
HOSTILE += "a\\", "a\\(b", "a\\'b", '\\"', "*", "?x", "-x", "--", "größe", "日本", "null", "True", "1e3", "007", "1_0"
HOSTILE += "nan", "-inf", ".5", "a#b", "a;b", "a&b", "a|b", "`x`", "!x", " a", "a ", "a\tb", "a\nb", "50%", "a:b", "@x"
# in commands, these are names and numbers of ours
SAFE = "op", "cfg.op", "dtype", "script", "arguments", "options"
COMMAND = re.compile(r"\bpython (-m scripts\.|train\.py)|\btorchrun --|\bwandb sync|\btensorboard --logdir")


def read_command(command: str) -> tuple[list[str], dict]:
    """Return the words of a pasted command that are no overrides, and the values that Hydra reads from the others."""
    words, values = [], {}
    for word in shlex.split(command):
        if re.match(r"[+]?[\w.]+=", word):
            parsed = OverridesParser.create().parse_override(word)
            values[parsed.key_or_group] = parsed.value()
        else:
            words.append(word)
    return words, OmegaConf.to_container(OmegaConf.create({"values": values}), resolve=True)["values"]


@pytest.mark.parametrize("text", [*HOSTILE, ""])
def test_hydra_reads_an_override_as_it_is(text):
    for value in (text, Path(text), [text, "b"], ["a", [text]]):
        expected = str(value) if isinstance(value, Path) else value
        assert read_command(shell_command("python", override("key", value))) == (["python"], {"key": expected})


@pytest.mark.parametrize("value", [None, True, False, 0, -3, 1.5, 1e-9, [], [1, None, True, 2.5]])
def test_hydra_reads_other_values_as_they_are(value):
    assert read_command(override("key", value))[1] == {"key": value}


@pytest.mark.parametrize("text", ["out/run", "a.txt", "/tmp/x-1", "124m", "triton", "path/to/mine.py", "auto", "_x"])
def test_plain_values_get_no_quotes(text):
    assert override("key", text) == (f"key={text}" if text != "124m" else 'key="124m"')


def commands_without_quotes(modules: dict[str, ast.Module]) -> list[str]:
    """Return the places in which a command of ours has a value that shell_command() has not quoted."""
    found = []
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("shlex.join", "shlex.quote"):
                found += [f"{module}:{node.lineno} {ast.unparse(node.func)}"] if module != "common.terminal" else []
            elif isinstance(node, ast.JoinedStr):
                in_command = False
                for part in node.values:
                    if isinstance(part, ast.Constant):
                        in_command = bool(COMMAND.search(part.value)) or (in_command and ":" not in part.value)
                    elif in_command and ast.unparse(part.value) not in SAFE:
                        text = ast.unparse(part.value)
                        found += [f"{module}:{node.lineno} {text}"] if not text.startswith("shell_command(") else []
    return found


def test_every_place_that_prints_a_command_quotes_its_values():
    assert commands_without_quotes(MODULES) == []


@pytest.mark.parametrize("line", ["f'python -m scripts.blame {folder}'", "f'wandb sync {a}/{b}'", "shlex.quote(path)"])
def test_the_check_finds_a_value_without_quotes(line):
    assert commands_without_quotes({"lab": ast.parse(line)}) != []
    assert commands_without_quotes({"lab": ast.parse("f'python -m scripts.doctor op={op}: {reason}'")}) == []


@pytest.fixture
def command_of_this_job(monkeypatch):
    """Let the command of this job be `python train.py seed=3` with hostile folders of configs."""
    monkeypatch.setattr("sys.argv", ["train.py", "seed=3"])
    monkeypatch.setattr("runtime.command.HydraConfig.initialized", lambda: False)
    monkeypatch.setattr("runtime.command.config_flags", ["--config-dir=a (1)"])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


@pytest.mark.usefixtures("command_of_this_job")
@pytest.mark.parametrize("name", HOSTILE)
def test_printed_commands_have_the_path_that_they_are_about(name, tmp_path, monkeypatch):
    """The commands that resume a run, start from its weights, prepare data, test a kernel and show a run."""
    monkeypatch.chdir(tmp_path)
    path = Path(name)
    start = ["python", "train.py", "--config-dir=a (1)"]
    assert read_command(resume.command(path)) == (start, {"seed": 3, "out_dir": name, "train.resume": "auto"})
    step = {"block_size": 1, "tokens_per_step": 1, "overfit": False}
    saved = {
        "config": {
            "model": {"n_layer": 1},
            "train": step,
            "data": {"mask_documents": False},
            "optim": {"name": "adamw"},
            "seed": 1,
        },
        "data": {},
    }
    with pytest.raises(UserError) as error:
        resume.check_same_run(saved, saved["config"] | {"seed": 2}, {}, path)
    assert read_command(str(error.value).rpartition("its weights: ")[2]) == ([], {"init_from": name})
    settings = {"val_fraction": 0.1, "prepare": "auto", "tokenizer": "bytes", "subset": None, "column": None}
    config = DataConfig("text", "text", [name, "b.txt"], cache=name, **settings)
    words, values = read_command(prepare_command(config))
    assert (words, values["data"]) == (["python", "-m", "scripts.prepare"], "text")
    assert (values["data.path"], values["data.cache"]) == ([name, "b.txt"], name)
    for command in new_kernel.commands("norm", "mine", name):
        if "pytest" in command:
            assert f"norm={name}" in shlex.split(command)
        else:
            _, values = read_command(command)
            assert values.get("impl", values.get("kernels.norm")) in (name, ["eager", name])
    run = tmp_path / "r" / name
    (run / "wandb/offline-run-1").mkdir(parents=True)
    tracker = Tracker(LoggerConfig("wandb", "offline", "hotswap", None, None, None, [], None, False))
    line = tracker.view_line(run)
    assert shlex.split(line.partition("upload: ")[2]) == ["wandb", "sync", f"{run}/wandb/offline-run-*"]
    assert shlex.split(TensorBoard.view_line(path).partition("board")[2])[2] in (name, f"./{name}")


@pytest.mark.parametrize("name", HOSTILE)
def test_the_quotes_that_an_error_suggests_are_right(name):
    """Hydra's parser refuses some words. The error then has the word that it accepts."""
    try:
        OverridesParser.create().parse_overrides([f"data.path={name}"])
    except OverrideParseException as error:
        suggested = explain_error(error, DataConfig).partition("quotes for the shell: ")[2]
        assert read_command(suggested)[1] == {"data.path": name.replace("\n", " ")}  # an error is one line
