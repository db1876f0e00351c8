"""`python -m scripts.reproduce` as a command."""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.files import add_crc32
from runtime.row import read_row, write_row
from scripts import reproduce
from tests.lab.test_rerun import HOSTILE_COMMANDS, HOSTILE_NAMES
from tests.test_train import QUICK

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(called, monkeypatch, tmp_path):
    """Run the command in this process: command("run") -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: called("reproduce.py", reproduce.main, *arguments)


def kept_row(**changes):
    """A row of a training of 1,000 tokens/s, in five intervals that differ by up to 2%."""
    row = {"name": "1M", "status": "ok", "started": "2026-11-20", "command": "python train.py seed=2 out_dir=out/a"}
    row |= {"config": {"seed": 2, "out_dir": "out/a"}, "kernels": {"norm": "eager"}, "train/loss": 2.0}
    row |= {"perf/tokens_per_sec": 1000, "perf/laps_s": [0.99, 1.0, 1.01, 0.995, 1.005]}
    return row | {"env": {"device": "NVIDIA H200", "gpu": "GPU-1", "torch": "2.13", "git_commit": "abc123"}} | changes


def write_rows(*rows):
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def fake_run(monkeypatch, code=0, **changes):
    """Replace the process of the row's command: it leaves a row with these changes. Return the list of commands."""
    commands = []

    def run(words, stdin):
        commands.append(words)
        if code == 0:
            Path(words[-1].removeprefix("out_dir="), "result.json").write_text(json.dumps(kept_row(**changes)))
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(reproduce.subprocess, "run", run)
    return commands


@pytest.mark.usefixtures("quick_python")
def test_a_run_is_run_again_and_compared(command, hotswap, monkeypatch):
    """The real command: its losses are equal, and its speed ties with a row of steps that differ by 100x."""
    monkeypatch.setenv("HOTSWAP_COMMIT", "abc")
    assert hotswap(*QUICK, "train.max_steps=5")[0] == 0
    row = read_row(Path("run"))
    row["perf/laps_s"] = [row["perf/step_ms"] / 1e3 * factor for factor in (0.1, 1, 10)]
    row["command"] = row["command"].replace(sys.argv[0], "train.py")
    write_row(Path("run"), row)
    code, out, err = command("run")
    assert (code, err) == (0, "")
    assert re.search(r"^speed    [\d,]+ tok/s, the row has [\d,]+: tie, \d", out, re.MULTILINE)
    assert f"loss     {row['train/loss']:.6g}, equal to the row's\n" in out
    assert "same     device, versions, commit, kernels and config\n" in out
    [folder] = Path("out").iterdir()
    assert out.endswith(f"done     {folder}/result.json\n")


@pytest.mark.parametrize(
    ("factor", "code", "verdict"), [(1.0, 0, "tie"), (1.012, 0, "tie"), (1.1, 2, "faster"), (0.9, 2, "slower")]
)
def test_the_exit_code_says_whether_the_speeds_are_a_tie(command, monkeypatch, factor, code, verdict):
    """1.2% is above the p80 of the row's steps. It is a tie by the interval, because the steps differ as much."""
    write_rows(kept_row())
    laps = [seconds / factor for seconds in reversed(kept_row()["perf/laps_s"])]
    fake_run(monkeypatch, **{"perf/tokens_per_sec": 1000 * factor, "perf/laps_s": laps})
    result, out, err = command("rows.jsonl")
    assert (result, err) == (code, "")
    assert f"speed    {1000 * factor:,.0f} tok/s, the row has 1,000: {verdict}, {factor:.3f}x (" in out


def test_another_gpu_is_noted_beside_the_ratio(command, monkeypatch):
    write_rows(kept_row())
    fake_run(monkeypatch, env=kept_row()["env"] | {"gpu": "GPU-2"})
    assert re.search(r"tie, 1\.000x \(.*, 1 run, other GPU\)$", command("rows.jsonl")[1], re.MULTILINE)


def test_what_differs_is_named(command, monkeypatch):
    """Two GPUs of one kind differ in their uuid, and two runs in their folder: neither is a difference."""
    env = {"device": "NVIDIA H100", "gpu": "GPU-2", "torch": "2.13", "git_commit": "def456"}
    write_rows(kept_row())
    config = {"seed": 2, "out_dir": "out/b", "model": {"n_layer": 2}}
    fake_run(monkeypatch, env=env, config=config, kernels={"norm": "triton"}, **{"train/loss": 2.1})
    lines = command("rows.jsonl")[1].splitlines()
    assert [line for line in lines if line.startswith(("differs", "loss"))] == [
        "loss     2.1, the row's is 2: 5.0e-02 of it apart",
        "differs  device: NVIDIA H100 here, NVIDIA H200 in the row",
        "differs  git_commit: def456 here, abc123 in the row",
        "differs  kernels.norm: triton here, eager in the row",
        "differs  config.model: {'n_layer': 2} here, None in the row",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("python train.py a=1 out_dir=x train.resume=auto", [str(ROOT / "train.py"), "a=1"]),
        ("python /elsewhere/train.py 'a=[1, 2]'", [str(ROOT / "train.py"), "a=[1, 2]"]),
        ("python -m scripts.generate prompt=", ["-m", "scripts.generate", "prompt="]),
        (
            "torchrun --standalone --nproc_per_node=2 train.py a=1",
            ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ROOT / "train.py"), "a=1"],
        ),
    ],
)
def test_a_command_gets_this_python_and_a_folder_of_its_own(text, expected):
    assert reproduce.reproduction_command({"command": text}, Path("new")) == [sys.executable, *expected, "out_dir=new"]


def test_a_row_is_named_by_its_line_or_a_part_of_its_command_name_or_commit(command, monkeypatch):
    other = kept_row(command="python train.py seed=3", name="2M", env={"git_commit": "fed654"})
    write_rows(kept_row(), other)
    commands = fake_run(monkeypatch)
    for name in ("2", "seed=3", "2M", "fed65"):
        command("rows.jsonl", name)
        assert commands.pop()[2] == "seed=3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing does not exist; pass a file of results/ or the folder of a run"),
        (["."], ". has no row: it is not the folder of a run with a result.json"),
        (["empty"], "empty is empty"),
        (["bad"], "bad: line 2 is damaged (it is no JSON object)"),
        (["rows.jsonl"], "rows.jsonl has 5 rows: name one by its line (1 to 5), or by a part of its command"),
        (["rows.jsonl", "9"], "rows.jsonl has no row 9: name one by its line (1 to 5)"),
        (["rows.jsonl", "seed=2"], "4 rows of rows.jsonl match seed=2: pass one of the lines 1, 2, 3, 5"),
        (["rows.jsonl", "2"], "rows.jsonl, line 2: this row has no speed (its status: oom)"),
        (["rows.jsonl", "3"], "rows.jsonl, line 3: this row has no command; runs and generations have one"),
        (["rows.jsonl", "4"], "rows.jsonl, line 4: its command starts with rm -r x, and not with python or torchrun"),
        (["rows.jsonl", "5"], "rows.jsonl, line 5: it has fewer than 2 timed intervals"),
        (["rows.jsonl", "1"], "rows.jsonl, line 1: its command failed here with exit code 3; see its lines above"),
    ],
)
def test_a_mistake_is_one_line(command, monkeypatch, arguments, message):
    fake_run(monkeypatch, code=3)
    without_config = {key: value for key, value in kept_row().items() if key != "config"}
    old = kept_row(**{"perf/laps_s": None})  # rows of before 2026-11 have no timed intervals
    write_rows(kept_row(), kept_row(status="oom"), without_config, kept_row(command="rm -r x"), old)
    Path("empty").touch()
    Path("bad").write_text("{}\n[1]\n")
    code, _, err = command(*arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"error: {message}")


VALUES = [None, True, 1.5, -1, 0, 10**400, "", "x" * 10**6, "\x1b[2J\n", [], {}, [1], {"a": {}}]
VALUES += [[None], [0, 0], [-1, 1]]


@pytest.mark.parametrize("key", kept_row())
def test_a_wrong_value_in_a_row_is_one_line(command, monkeypatch, key):
    """Also in a row of a generation. If the comparison needs no such value, the row runs again."""
    generation = kept_row(command="python -m scripts.generate", **{"gen/decode_tokens_per_sec": 9})
    generation |= {"config": {"max_new_tokens": 9, "batch": 1}, "gen/laps_s": [1.0, 1.1, 1.2]}
    monkeypatch.setattr(reproduce.subprocess, "run", lambda words, stdin: SimpleNamespace(returncode=3))
    for row in (kept_row(), generation):
        for value in [*VALUES, {"max_new_tokens": 1}, {"train": 3}, {"gpu": []}]:
            write_rows(row | {key: value})
            code, _, err = command("rows.jsonl")
            assert (code, err.count("\n")) == (1, 1), (value, err)
            assert len(err) < 1000
        write_rows({name: held for name, held in row.items() if name != key})
        code, _, err = command("rows.jsonl", "")
        assert (code, err.count("\n")) == (1, 1), err


def test_a_hostile_command_does_not_run(command, monkeypatch, tmp_path):
    commands = fake_run(monkeypatch)
    for text in HOSTILE_COMMANDS:
        write_rows(kept_row(command=text))
        code, _, err = command("rows.jsonl")
        assert (code, err.count("\n")) == (1, 1), err
        assert err.startswith("error: rows.jsonl, line 1: "), err
    for name in HOSTILE_NAMES:
        write_rows(kept_row(name=name))
        assert command("rows.jsonl")[0] == 1
    assert commands == []
    assert os.listdir() == ["rows.jsonl"]
    assert not (tmp_path.parent / "x").exists()


def test_a_damaged_row_is_not_run_again(command, monkeypatch):
    commands = fake_run(monkeypatch)
    line = add_crc32(json.dumps(kept_row()))
    for content in (line.replace("seed=2", "seed=3"), "[" * 10**5, line[:-9]):
        Path("rows.jsonl").write_text(content)
        assert command("rows.jsonl")[2].startswith("error: rows.jsonl: line 1 is damaged")
    os.unlink("rows.jsonl")
    os.mkfifo("rows.jsonl")
    assert command("rows.jsonl")[2].startswith("error: rows.jsonl cannot be read: it is a FIFO")
    assert commands == []
