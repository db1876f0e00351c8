"""`--help`, Ctrl-C and the folder of every command, and `~` in every key."""

import copy
import importlib
import re
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from lab.commands import CONFIGS
from runtime.config import UserError, parse
from tests.lab.context.machine import Machine
from tests.scripts.test_generate import save_model

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(path.stem for path in ROOT.glob("scripts/[a-z]*.py"))


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
    """A value `~/mine.py` gives the config, or the error, of the absolute path.

    Every third key also gets it in a list. With lists for all keys the test would take 50% longer.
    """
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

    for number, key in enumerate(leaves(cfg)):
        expected = "~/mine.py" if key in TEXTS else f"{tmp_path}/mine.py"
        accepted, result = outcome(key, "~/mine.py")
        assert (accepted, result) == outcome(key, expected)
        assert expected in result or not accepted
        if number % 3 == 0:
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
    code, _, error = called(f"{name}.py", main, "~nobody-here/run")
    assert code != 0
    assert re.fullmatch(
        r"error: (argument \S+: )?~nobody-here/run: the home folder of this user is not known; .*\n", error
    )


# The arguments with which a command gets as far as its folder, and the name of the function that makes it.
# scripts.reproduce is not here, because it refuses nothing after it has made its folder
MAKE_A_FOLDER = {
    "bench_attention": ("make_folder", "lengths=[8]", "device=cpu"),
    "bench_kernels": ("make_folder", "op=norm", "shape=narrow", "device=cpu"),
    "course": ("make_folder",),
    "doctor": ("make_folder", "matrix=true", "device=cpu"),
    "evaluate": (
        "choose_folder",
        "checkpoint=ckpt.pt",
        "data=text",
        "data.path=a.txt",
        "tokenizer=bytes",
        "device=cpu",
    ),
    "generate": ("choose_folder", "checkpoint=random", "model=tiny", "prompt=a", "device=cpu"),
    "judge": ("make_folder", "op=norm", "impl=triton", "device=cpu"),
    "max_context": ("choose_folder", "mode=train", "device=cpu"),
}


def test_every_command_that_makes_a_folder_is_tried():
    sources = {name: (ROOT / f"scripts/{name}.py").read_text() for name in COMMANDS}
    makers = {name for name, source in sources.items() if re.search("(make|choose)_folder\\(", source)}
    assert makers - {"reproduce"} == MAKE_A_FOLDER.keys()


@pytest.mark.parametrize("name", MAKE_A_FOLDER)
def test_a_refused_command_leaves_no_folder(called, monkeypatch, tmp_path, name):
    """Here it is refused as soon as its folder is made."""
    make_name, *words = MAKE_A_FOLDER[name]
    module, made = importlib.import_module(f"scripts.{name}"), []
    make = getattr(module, make_name)

    def make_and_refuse(*arguments):
        made.append(make(*arguments))
        raise UserError("no")

    monkeypatch.chdir(tmp_path)
    save_model(tmp_path)
    Path("a.txt").write_text("a few words\n" * 100)
    machine = Machine()
    machine.first.env, machine.first.kernels = {"device": "cpu"}, {}
    monkeypatch.setattr("scripts.max_context.Prober", lambda command, minutes: machine)
    monkeypatch.setattr(module, make_name, make_and_refuse)
    for out_dir in ("out_dir=null", "out_dir=new/one"):
        assert called(f"{name}.py", module.main, *words, out_dir)[::2] == (1, "error: no\n")
    assert [bool(folder) for folder in made] == [True, True]
    assert {path.name for path in Path().iterdir()} <= {"a.txt", "ckpt.pt", ".cache"}
