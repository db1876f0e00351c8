"""Runs with W&B, read back with W&B's own command."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

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

pytest.importorskip("wandb", reason="W&B is not installed")


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


def inspect(folder, *options):
    command = [WANDB, "leet", "inspect", "--json", *options, str(folder / "wandb")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_an_offline_run_has_our_keys(hotswap, tmp_path):
    code, _, err = hotswap(*SMALL)
    assert (code, err) == (0, "")
    run = json.loads(inspect(tmp_path / "run", "--summary"))
    assert (run["name"], run["project"]) == ("0M-eager-sdpa-fp32", "hotswap")  # after its kernels
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
    for key in LOGGED | {"perf_by_tokens/tokens_per_sec"}:
        assert key in text, f"{key} was never logged"
    assert any("perf_by_tokens" in json.dumps(record) for record in records if record["type"] == "metric")


def test_online_without_a_key_goes_on_offline(hotswap, tmp_path):
    code, _out, err = hotswap(*SMALL, "logger.mode=online")
    assert code == 0
    assert err.startswith("warning: the run goes on offline; `wandb sync` uploads it: no API key is configured")
    assert err.count("\n") == 1
    assert json.loads(inspect(tmp_path / "run", "--summary"))["state"] == "finished"


def test_online_without_a_network_goes_on_offline(hotswap, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens on the discard port
    monkeypatch.setattr("runtime.trackers.INIT_SECONDS", 3)
    code, _out, err = hotswap(*SMALL, "logger.mode=online")
    assert code == 0
    assert err.startswith("warning: the run goes on offline; `wandb sync` uploads it: ")
    assert err.count("\n") == 1
    assert json.loads(inspect(tmp_path / "run", "--summary"))["state"] == "finished"


def test_a_run_outlives_wandb(hotswap, tmp_path, monkeypatch):
    """Not even offline: the run goes on without it."""
    monkeypatch.setattr("wandb.init", lambda **_: (_ for _ in ()).throw(ValueError("no\nway")))
    code, _, err = hotswap(*SMALL)
    assert (code, err) == (0, "warning: the run goes on without W&B: no way\n")
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "ok"


def test_a_run_outlives_wandb_in_mid_run(hotswap, tmp_path, monkeypatch):
    """W&B's own process is killed after step 3."""
    import train

    step = train.train_step

    def killing(model, optimizer, batches, lr):
        if optimizer.steps == 3:
            subprocess.run(["pkill", "-KILL", "-P", str(os.getpid()), "-f", "wandb-core"], check=True)
            time.sleep(0.5)
        return step(model, optimizer, batches, lr)

    monkeypatch.setattr(train, "train_step", killing)
    code, _, err = hotswap(*SMALL)
    assert code == 0
    assert err == "warning: W&B is lost (Connection lost) and the run goes on without; metrics.jsonl has it all\n"
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 6
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "ok"


def test_a_run_that_goes_on_is_one_run_there(hotswap, tmp_path):
    assert hotswap(*SMALL, "train.checkpoint_every=3", "train.stop_after=3")[0] == 0
    assert hotswap(*SMALL, "train.checkpoint_every=3", "train.resume=auto")[0] == 0
    runs = [path.name for path in (tmp_path / "run/wandb").glob("offline-run-*")]
    assert len(runs) == 2  # of the same second, W&B gives the second one a number behind the name
    assert all((tmp_path / "run/.wandb-id").read_text() in name for name in runs)


def test_a_failed_run_is_marked(hotswap, tmp_path, monkeypatch):
    monkeypatch.setattr("train.train_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hotswap(*SMALL)
    run = json.loads(inspect(tmp_path / "run", "--summary"))
    assert run["exit_code"] == 1
    assert run["summary"]["status"] == "failed: division by zero"
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "failed: division by zero"
