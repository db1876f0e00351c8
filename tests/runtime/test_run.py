"""A run's row and its log: figures that are not finite, and a full disk."""

from pathlib import Path

import pytest

from runtime.config import UserError
from runtime.run import Run, without_nonfinite
from runtime.trackers import Tracker
from tests.test_train import QUICK, config


def log_on_a_full_disk(folder):
    """Log a line to /dev/full, which refuses every write. Closing the file fails too, because it still has the line."""
    with Run(folder, "name", config(*QUICK), Tracker(None)) as run:
        run.begin(kernels={}, env={})
        run.metrics.close()
        run.metrics = Path("/dev/full").open("a", buffering=1)  # noqa: SIM115
        run.log(1, {"train/loss": 1.0})


def test_nan_and_infinity_become_null_at_any_depth():
    row = {"a": float("nan"), "b": {"c": [1.0, float("inf")], "d": "nan"}}
    assert without_nonfinite(row) == {"a": None, "b": {"c": [1.0, None], "d": "nan"}}


def test_log_raises_one_line_when_the_disk_is_full(tmp_path):
    with pytest.raises(UserError, match=r"run can no longer be written: No space left on device; free some space, and"):
        log_on_a_full_disk(tmp_path / "run")
    assert '"status": "failed: ' in (tmp_path / "run/result.json").read_text()
