"""`--help` and Ctrl-C of every command, and `~` in every key."""

import copy
import importlib
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from lab.commands import CONFIGS
from runtime.config import parse

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(path.stem for path in ROOT.glob("scripts/[a-z]*.py"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_a_command_to_copy_and_short_lines(called, name):
    """A line has at most 120 columns."""
    main = importlib.import_module(f"scripts.{name}").main
    code, out, err = called(f"{name}.py", main, "--help")
    assert (code, err) == (0, "")
    assert f"python -m scripts.{name} " in out
    assert [line for line in out.splitlines() if len(line) > 120] == []
    if (ROOT / "configs" / f"{name}.yaml").exists():
        assert "Keys (key=value)\n---\n" in out
        assert "${" not in out  # every interpolation is resolved


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_prints_one_line_and_no_traceback(called, monkeypatch, name):
    """Ctrl-C interrupts the first function of the command. The exit code is 130, as in a shell."""

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("runtime.compat.shorten_argparse_errors", interrupt)
    main = importlib.import_module(f"scripts.{name}").main
    assert called(f"{name}.py", main) == (130, "", "interrupted\n")


TEXTS = {"prompt", "stop", "training", "logger.notes"}  # these values are no paths


@pytest.mark.parametrize("name", ["config", *(name for name in COMMANDS if (CONFIGS / f"{name}.yaml").exists())])
def test_every_key_of_every_command_takes_the_home_folder(tmp_path, monkeypatch, name):
    """A value `~/mine.py` gives the config, or the error, of the absolute path, alone and in a list."""
    (tmp_path / "mine.py").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    task = importlib.import_module("train" if name == "config" else f"scripts.{name}").main.new_task()
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = hydra.compose(name)
    needed = {"checkpoint": "random", "impl": "eager", "op": "norm", "path": "x", "name": "x"}
    cfg.update({key: value for key, value in needed.items() if key in cfg})

    def outcome(key, value):
        """Return (whether the key takes the value, the config or the error)."""
        changed = copy.deepcopy(cfg)
        OmegaConf.update(changed, key, value)
        try:
            return True, OmegaConf.to_yaml(OmegaConf.structured(parse(changed, task.schema, task.complete)))
        except ValueError as error:
            return False, str(error)

    for key in leaves(cfg):
        expected = "~/mine.py" if key in TEXTS else f"{tmp_path}/mine.py"
        accepted, result = outcome(key, "~/mine.py")
        assert (accepted, result) == outcome(key, expected)
        assert expected in result or not accepted
        assert outcome(key, ["x", "~/mine.py"]) == outcome(key, ["x", expected])


def leaves(cfg, prefix=""):
    """Return the keys of a config, in dotted form, without its groups."""
    keys = []
    for key in cfg:
        is_group = OmegaConf.is_dict(cfg._get_node(key)) and cfg[key] is not None
        keys += leaves(cfg[key], f"{prefix}{key}.") if is_group else [f"{prefix}{key}"]
    return keys


@pytest.mark.parametrize("name", [name for name in COMMANDS if not (CONFIGS / f"{name}.yaml").exists()])
def test_every_folder_of_a_command_without_keys_takes_the_home_folder(called, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    main = importlib.import_module(f"scripts.{name}").main
    assert called(f"{name}.py", main, "~/run") == called(f"{name}.py", main, str(tmp_path / "run"))
