"""The folder's record when the disk is full."""

from pathlib import Path

import pytest

from runtime.config import UserError
from runtime.run import Run, finite
from runtime.trackers import Tracker
from tests.test_train import QUICK, config


def log_on_a_full_disk(folder):
    with Run(folder, "name", config(*QUICK), Tracker(None)) as run:
        run.begin(kernels={}, env={})
        run.metrics.close()
        run.metrics = Path("/dev/full").open("a", buffering=1)  # noqa: SIM115
        run.log(1, {"train/loss": 1.0})


def test_what_is_no_number_is_null_at_any_depth():
    row = {"a": float("nan"), "b": {"c": [1.0, float("inf")], "d": "nan"}}
    assert finite(row) == {"a": None, "b": {"c": [1.0, None], "d": "nan"}}


def test_a_full_disk_under_the_log_is_a_line(tmp_path):
    """/dev/full takes nothing; the line that stays in the buffer fails once more when the file is closed."""
    with pytest.raises(UserError, match=r"run cannot be written any more: No space left on device; make room, and"):
        log_on_a_full_disk(tmp_path / "run")
    assert '"status": "failed: ' in (tmp_path / "run/result.json").read_text()
