"""`--help` and Ctrl-C of every command."""

import importlib
from pathlib import Path

import pytest

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
