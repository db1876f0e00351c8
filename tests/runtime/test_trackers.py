"""Runs with logger=wandb and logger=tensorboard.

The tests read the results with W&B's own command, `wandb leet inspect`, and with TensorBoard's own reader.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from common.files import add_sha256, read_json
from lab.start import ensure_home
from runtime.row import read_row
from runtime.run import Run
from runtime.tracker_process import TensorBoard, Wandb
from runtime.trackers import LoggerConfig, Tracker, track_ended_run
from tests.test_train import QUICK, config

WANDB = str(Path(sys.executable).with_name("wandb"))
SMALL = (
    "+experiment=smoke",
    "logger=wandb",
    "out_dir=run",
    "train.max_steps=6",
    "train.eval_every=6",
    "train.log_every=1",
    "train.sample_tokens=0",
    "model.n_layer=1",
)
LOGGED = {"train/loss", "train/lr", "train/grad_norm", "tokens", "val/loss", "perf/tokens_per_sec", "perf/step_ms"}
LOGGED |= {"perf/mfu_measured_peak", "perf/data_wait_ms"}
SUMMARY = {"status", "perf/tokens_per_sec", "perf/tokens_per_sec/p20", "perf/tokens_per_sec/p80", "perf/compile_s"}
SUMMARY |= {"perf/recompiles", "val/loss", "kernels", "env"}

OFFLINE = LoggerConfig("wandb", "offline", "hotswap", None, None, None, [], None, False)

pytest.importorskip("wandb", reason="W&B is not installed")


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


def inspect(folder, *options):
    """Return W&B's JSON about the run in this folder."""
    command = [WANDB, "leet", "inspect", "--json", *options, str(folder / "wandb")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_an_offline_run_has_the_keys_of_the_row_and_the_metrics(hotswap, tmp_path):
    code, _, err = hotswap(*SMALL)
    assert (code, err) == (0, "")
    run = json.loads(inspect(tmp_path / "run", "--summary"))
    assert (run["name"], run["project"]) == ("0M-eager-sdpa-fp32", "hotswap")
    assert (run["state"], run["exit_code"]) == ("finished", 0)
    assert set(run["summary"]) >= SUMMARY
    assert run["summary"]["kernels"]["attention"].startswith("sdpa (")
    assert run["config"]["train"]["max_steps"] == 6
    assert run["config"]["executed"]["norm"].startswith("eager (")

    row = json.loads((tmp_path / "run/result.json").read_text())
    assert run["summary"]["perf/tokens_per_sec"] == pytest.approx(row["perf/tokens_per_sec"])
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert set().union(*lines) >= LOGGED

    records = [json.loads(line) for line in inspect(tmp_path / "run").splitlines()]
    history = [record for record in records if record["type"] == "history"]
    assert len(history) == len(lines) == 6
    text = json.dumps(history)
    for key in LOGGED:
        assert key in text, f"{key} is in no logged line"


def test_an_offline_run_says_how_to_upload_it_and_has_its_labels_and_its_sample(hotswap, tmp_path):
    labels = "logger.entity=me", "logger.job_type=check", "logger.tags=[a,b]", "logger.notes=why", "logger.group=mine"
    code, out, err = hotswap(*SMALL, "train.max_steps=1", "train.sample_tokens=5", *labels)
    assert (code, err) == (0, "")
    assert out.splitlines()[-2] == "wandb    offline; to upload: wandb sync run/wandb/offline-run-*"
    run = json.loads(inspect(tmp_path / "run", "--summary"))
    assert (run["entity"], run["tags"], run["notes"]) == ("me", ["a", "b"], "why")
    records = inspect(tmp_path / "run")
    assert json.dumps("mine") in records
    assert json.dumps("check") in records
    [table] = (tmp_path / "run/wandb").glob("offline-run-*/files/media/table/sample_*.table.json")
    assert json.loads(table.read_text())["data"] == [[(tmp_path / "run/sample.txt").read_text()]]


def test_a_run_that_could_not_be_built_is_a_run_in_wandb_with_its_reason(hotswap, tmp_path, monkeypatch):
    monkeypatch.setattr("kernels.attention.math.unavailable", lambda device: "it has a day off", raising=False)
    code, out, err = hotswap(*SMALL, "attn=math")
    assert (code, out) == (1, "wandb    offline; to upload: wandb sync run/wandb/offline-run-*\n")
    assert err == "error: attention=math cannot run here: it has a day off\n"
    run = json.loads(inspect(tmp_path / "run", "--summary"))
    assert (run["exit_code"], run["config"]["attn"]["impl"]) == (1, "math")
    assert run["summary"]["status"] == "unavailable: attention=math cannot run here: it has a day off"


def test_a_job_that_left_no_row_is_a_run_in_wandb_with_the_reason(tmp_path):
    """As of a killed job, whose row the sweep writes."""
    row = {
        "name": "1-kernels.mine",
        "command": "python train.py",
        "status": "failed: exit code -11 (Segmentation fault)",
    }
    config = LoggerConfig("wandb", "offline", "hotswap", None, "sweep", None, [], None, False)
    track_ended_run(config, tmp_path, row)
    run = json.loads(inspect(tmp_path, "--summary"))
    assert (run["name"], run["exit_code"]) == ("1-kernels.mine", 1)
    assert run["summary"]["status"] == row["status"]


ARTIFACTS = (*SMALL, "logger.artifacts=true", "train.eval_every=2", "train.checkpoint_every=2")


def artifacts(folder):
    """Return the artifacts in W&B's record of the run in this folder."""
    records = map(json.loads, inspect(folder).splitlines())
    return [record["artifact"] for record in records if record["type"] == "artifact"]


def test_the_summary_and_the_artifact_are_of_the_lowest_validation_loss(hotswap, tmp_path, monkeypatch):
    """The lowest loss is in step 4 of 6."""
    losses = iter([4.0, 2.5, 3.0])
    monkeypatch.setattr(train, "evaluate", lambda *_: next(losses))
    code, out, err = hotswap(*ARTIFACTS)
    assert (code, err) == (0, "")
    [artifact] = artifacts(tmp_path / "run")
    name = f"checkpoint-{read_json(tmp_path / 'run/.wandb-id')['id']}"
    assert f"wandb    artifact {name}: step 4, the lowest val/loss, 2.5000" in out.splitlines()
    assert (artifact["name"], artifact["type"], {*artifact["aliases"]}) == (name, "model", {"latest", "best"})
    assert json.loads(artifact["metadata"]) == {"step": 4, "val_loss": 2.5}
    folder = tmp_path / "run/checkpoints/step-000004"
    files = {entry["path"]: Path(entry["local_path"]) for entry in artifact["manifest"]["contents"]}
    assert files == {name: folder / name for name in ("manifest.json", "model.safetensors", "training.pt")}
    assert json.loads(inspect(tmp_path / "run", "--summary"))["summary"]["val/loss"] == {"min": 2.5}


@pytest.mark.exhaustive
def test_the_artifact_of_a_run_without_evaluations_is_its_newest_checkpoint(hotswap, tmp_path):
    code, out, err = hotswap(*ARTIFACTS, "train.eval_every=0")
    assert (code, err) == (0, "")
    [artifact] = artifacts(tmp_path / "run")
    assert artifact["aliases"] == ["latest"]
    assert json.loads(artifact["metadata"]) == {"step": 6, "val_loss": None}
    assert ": step 6, the newest; no checkpoint has a val/loss" in out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["logger=none"], "only W&B takes a checkpoint; add logger=wandb, or choose false"),
        (["train.checkpoint_every=0"], "there is no checkpoint to upload; set train.checkpoint_every"),
    ],
)
def test_an_artifact_that_cannot_be_made_is_one_line_before_the_run(hotswap, words, reason):
    assert hotswap(*ARTIFACTS, *words) == (1, "", f"error: logger.artifacts=true: {reason}\n")
    assert not Path("run").exists()


def test_a_checkpoint_that_cannot_be_read_is_a_warning(tmp_path, monkeypatch, capsys):
    def fail(folder):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr("runtime.run.best_or_newest", fail)
    tracker = SimpleNamespace(config=SimpleNamespace(artifacts=True), finish=lambda row: None)
    tracker.start = tracker.view_line = lambda *_: None
    with Run(tmp_path / "run", "name", config(*QUICK), tracker) as run:
        run.begin()
    assert capsys.readouterr().err == "warning: logger.artifacts=true: nothing is uploaded: Permission denied\n"
    assert read_row(tmp_path / "run")["status"] == "ok"


def test_the_line_about_a_sweep_quotes_its_folder(tmp_path):
    (tmp_path / "a b/1-x/wandb/offline-run-1").mkdir(parents=True)
    tracker = Tracker(OFFLINE)
    assert tracker.view_line(tmp_path / "a b", sweep=True) == (
        f"wandb    offline; to upload: wandb sync '{tmp_path}/a b'/*/wandb/offline-run-*"
    )
    assert tracker.view_line(tmp_path / "none", sweep=True) is None


def test_tensorboard_is_refused_in_one_line_if_it_is_missing(hotswap, monkeypatch):
    monkeypatch.setattr("runtime.trackers.find_spec", lambda name: None)
    line = "error: logger=tensorboard needs TensorBoard: pip install '.[tensorboard]'; or choose logger=none\n"
    assert hotswap(*SMALL, "logger=tensorboard") == (1, "", line)
    assert hotswap(*SMALL, "logger=tensorboard", "-m", "seed=1,2")[2] == line
    assert not Path("run").exists()


def test_a_cell_of_tensorboards_table_may_hold_the_sign_between_cells():
    board, texts = TensorBoard(None, print), {}
    board.run = SimpleNamespace(add_text=texts.__setitem__)
    board.log_table("row", ["key", "value"], [["command", "a | b\nc"], ["steps", 5]])
    assert texts["row"].splitlines() == [
        "| key | value |",
        "| --- | --- |",
        r"| command | a \| b<br>c |",
        "| steps | 5 |",
    ]


def test_tensorboard_has_the_figures_the_sample_and_the_status(hotswap, tmp_path):
    """A resumed run logs the steps after its checkpoint again. Each step then has one figure, the later one."""
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = *SMALL, "logger=tensorboard", "train.checkpoint_every=3", "train.sample_tokens=5"
    assert hotswap(*board, "train.stop_after=4")[0] == 0
    shutil.rmtree(tmp_path / "run/checkpoints/step-000004")
    code, out, err = hotswap(*board, "train.resume=auto")
    assert (code, err) == (0, "")
    assert out.splitlines()[-2] == "board    tensorboard --logdir run"
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(line["step"], pytest.approx(line["train/loss"])) for line in lines]
    [table] = events.Tensors("row/text_summary")[-1].tensor_proto.string_val
    assert b"| status | ok |" in table
    assert "sample/text_summary" in events.Tags()["tensors"]


def test_the_run_continues_offline_when_there_is_no_api_key(hotswap, tmp_path):
    code, _out, err = hotswap(*SMALL, "logger.mode=online")
    assert code == 0
    assert err.startswith("warning: the run continues offline; `wandb sync` uploads it: no API key is configured")
    assert err.count("\n") == 1
    assert json.loads(inspect(tmp_path / "run", "--summary"))["state"] == "finished"


@pytest.fixture
def no_home(monkeypatch):
    """HOME is not set, and this user has no entry in the password file, as in some containers."""

    def find_no_entry(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", find_no_entry)


@pytest.mark.usefixtures("no_home")
def test_the_run_continues_without_wandb_without_a_home(tmp_path):
    """Here the command's start has not made a home."""
    pytest.importorskip("wandb").teardown()  # it reads the environment once
    told = []
    Wandb(SimpleNamespace(**vars(OFFLINE), init_seconds=1, finish_seconds=1), lambda *said: told.append(said)).start(
        str(tmp_path), {"name": "a"}, None
    )
    assert told == [("warn", "the run continues without W&B: Could not determine home directory.")]


@pytest.mark.usefixtures("no_home")
def test_a_command_makes_a_home_if_there_is_none(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")  # rank 0 alone prints the line
    monkeypatch.setenv("HOME", "")  # monkeypatch removes the new HOME after the test
    monkeypatch.delenv("HOME")
    ensure_home()
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("RANK")
    assert capsys.readouterr().err == ""
    for _ in range(2):  # the second time, there is one
        ensure_home()
    assert Path.home() == tmp_path / ".cache/home"
    where = f"caches go to {tmp_path}/.cache/home; HOME=FOLDER sets another one"
    line = f"warning: this user has no home folder, so {where}"
    assert capsys.readouterr().err == f"{line}\n"
    monkeypatch.setenv("HOME", str(tmp_path / "nonexistent"))  # Debian's `nobody` has /nonexistent
    ensure_home()
    assert (Path.home(), capsys.readouterr().err) == (tmp_path / ".cache/home", f"{line}\n")
    monkeypatch.setenv("HOME", "/")  # docker sets it
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    ensure_home()
    assert (Path.home(), capsys.readouterr().err) == (tmp_path / ".cache/home", f"{line}\n")


def test_wandb_prints_nothing_if_its_cache_cannot_be_written(hotswap, tmp_path, monkeypatch):
    (tmp_path / "file").touch()  # root may write everywhere, but not below a file
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file/cache"))
    assert hotswap(*SMALL, "train.max_steps=1")[::2] == (0, "")
    assert [*tmp_path.glob("run/wandb/offline-run-*")]


def test_the_run_continues_without_wandb_when_a_variable_of_wandb_has_a_wrong_value(hotswap, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "perhaps")
    code, _, err = hotswap(*SMALL)
    assert code == 0
    assert re.match(r"warning: the run continues without W&B: 1 validation error for Settings silent .*\n$", err)
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "ok"


def test_a_resumed_run_is_the_same_run_in_wandb(hotswap, tmp_path):
    assert hotswap(*SMALL, "train.checkpoint_every=3", "train.stop_after=3")[0] == 0
    assert hotswap(*SMALL, "train.checkpoint_every=3", "train.resume=auto")[0] == 0
    runs = [path.name for path in (tmp_path / "run/wandb").glob("offline-run-*")]
    assert len(runs) == 2  # if both are of the same second, W&B adds a number to the name of the second one
    assert all(read_json(tmp_path / "run/.wandb-id")["id"] in name for name in runs)


def make_folder(path):
    path.mkdir()


@pytest.mark.parametrize(
    "make",
    [
        Path.touch,
        lambda path: path.write_text("text"),
        lambda path: path.write_bytes(b"\xff\x00"),
        lambda path: path.write_bytes(bytes(2000)),
        lambda path: path.write_bytes(add_sha256('{"id": "0123456789ab"}').replace(b"4", b"5")),
        lambda path: path.write_bytes(add_sha256("{}")),
        os.mkfifo,
        make_folder,
    ],
)
def test_a_broken_id_is_replaced_with_one_warning(tmp_path, make):
    """A folder is not replaced."""
    told, path = [], tmp_path / ".wandb-id"
    make(path)
    wandb = Wandb(None, lambda *said: told.append(said))
    identity = wandb._id(tmp_path)
    assert re.fullmatch("[0-9a-f]{12}", identity)
    [(kind, text)] = told
    assert (kind, text.startswith(f"{path} cannot be ")) == ("warn", True)
    assert path.is_dir() or (wandb._id(tmp_path), len(told)) == (identity, 1)


def test_a_failed_run_has_its_status_and_exit_code_in_wandb(hotswap, tmp_path, monkeypatch):
    monkeypatch.setattr("model.capture.train_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hotswap(*SMALL)
    run = json.loads(inspect(tmp_path / "run", "--summary"))
    assert run["exit_code"] == 1
    assert run["summary"]["status"] == "failed: division by zero"
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "failed: division by zero"
