"""A folder of rows."""

import pytest

from lab import rows


@pytest.fixture
def results(monkeypatch, tmp_path):
    """A results/ folder that does not exist yet."""
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    return tmp_path / "results"
