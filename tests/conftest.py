import logging
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

# Workers and not threads share the cores, in the programs that tests start as well
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

# Tables that the user filled are none of a test's, nor of the programs that it starts
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".cache/tests")

# Where building its cache takes longer than 5 s it says so, on the stderr that a test wants empty
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

if not torch.cuda.is_available():  # Triton kernels run in its interpreter; it has to know before they are imported
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton"):
        from triton.runtime.interpreter import ReduceOps

        one_by_one = ReduceOps.generic_reduce

        def by_halves(self, given):
            """tl.reduce() with a function of ours, which takes blocks: 10 calls for 1024 columns where the interpreter
            makes one a number. Norm, both ways, of 32 x 768: 0.3 s instead of 1.8."""
            if self.axis is None or self.keep_dims:
                return one_by_one(self, given)
            parts = [np.moveaxis(tensor.handle.data, self.axis, 0) for tensor in given]
            types = [tensor.dtype for tensor in given]
            while (half := len(parts[0]) // 2) > 0:
                halves = [part[:half] for part in parts] + [part[half:] for part in parts]
                made = self.combine_fn.fn(*map(self.to_tensor, halves, 2 * types))
                parts = [tensor.handle.data for tensor in (made if isinstance(made, tuple) else (made,))]
            return [self.to_tensor(part[0], dtype) for part, dtype in zip(parts, types, strict=True)]

        ReduceOps.generic_reduce = by_halves


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One worker where a GPU is: its tests fill it, and measure it. None: one a core."""
    return 1 if torch.cuda.is_available() else None


def pytest_collection_modifyitems(items):
    """What is marked `gpu` runs by itself where a GPU is."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture
def called(monkeypatch, capsys):
    """called("train.py", train.main, "key=value", ...): a command in this process -> (exit code, stdout, stderr)."""

    def call(name, main, *arguments):
        monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def checkout(tmp_path):
    """A copy of the repo to add files to."""
    ignore = shutil.ignore_patterns(".*", "out", "results", "__pycache__")
    return Path(shutil.copytree(Path(__file__).parents[1], tmp_path / "repo", ignore=ignore))


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """Where the user's table of launch parameters and the repo's would be, of this test's device; there are none."""
    from kernels import tuned

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "TABLES", tmp_path / "tables")
    tuned.table.cache_clear()
    yield tuned.files(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    tuned.table.cache_clear()


@pytest.fixture
def hotswap(called, monkeypatch, tmp_path):
    """train.py as a command in this process: hotswap("kernels=compile") -> (exit code, stdout, stderr).

    Runs start in an empty folder, where the runs and the token shards of one test are.
    """
    import train

    monkeypatch.chdir(tmp_path)
    return lambda *arguments: called("train.py", train.main, *arguments, f"data.cache={tmp_path / 'tokens'}")
