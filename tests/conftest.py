"""Fixtures of all tests, and the settings that must be made before torch and Triton are imported."""

import copy
import functools
import gc
import logging
import multiprocessing.spawn
import os
import resource
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

# XLA compiles for each shape. Without LLVM's optimizations and with its older emitter it takes a fifth of the time.
# jaxlib 0.11 has no older emitter, and a flag that it does not know ends the process. On a GPU the tests run the
# programs that a training runs
if not shutil.which("nvidia-smi"):
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
        if find_spec("jaxlib") and version("jaxlib").startswith("0.10.")
        else "--xla_backend_optimization_level=0",
    )

# One thread a process, because pytest-xdist's workers already share the cores. Programs that tests start inherit this
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The programs then share the compiled modules of the repo, which saves each of them 0.25 s
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from runtime.device import select_device
from runtime.signals import ignore_interrupt
from tests.fork_server import SELDOM, speed_up_hydra, start

# Until the tests are collected. Collections of garbage would take 7 s of their imports' 30 s, and find nothing
gc.disable()

# The tests run in a process like that of a program: no TF32, and on a GPU the same allocator
select_device("cpu")

speed_up_hydra()


def read_configs_once() -> None:
    """Let Hydra read each file of configs/, and of its own, once, and not for each config: half of a composition."""
    Plugins.instance()  # runs the modules of Hydra's plugins again, so a class that is patched earlier is not used
    for scheme, folder in (("file", "/configs"), ("pkg", "hydra.conf")):
        source = SourcesRegistry.instance().resolve(scheme)
        source.load_config = load_once(source.load_config, folder)


def load_once(load_config, folder):
    read = {}

    @functools.wraps(load_config)
    def load(self, config_path):
        key = self.path, config_path
        if not self.path.endswith(folder):
            return load_config(self, config_path)
        if key not in read:
            read[key] = load_config(self, config_path)
        return copy.deepcopy(read[key])

    return load


read_configs_once()

# A background job (`make test &`) ignores SIGINT, and so would the programs that the tests start and interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)

# A test that kills a program must not leave a core dump in the repo
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

CACHE = Path(__file__).parents[1] / ".cache/tests"

# Inductor's pool for compiling would be another process, which imports torch for 2 s in each program that compiles
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

# The tests, and the programs that they start, must not read the user's tables of launch parameters
os.environ["XDG_CACHE_HOME"] = str(CACHE)

# ATEN_CPU_CAPABILITY selects the instructions that Inductor generates, but Inductor's cache key does not include it. If
# all values share a cache, torch 2.13 uses graphs that were compiled for AVX2 in a run with AVX-512: wrong results
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(CACHE / f"inductor-{os.environ.get('ATEN_CPU_CAPABILITY', 'default')}")

# If building the font cache takes more than 5 s, matplotlib logs that to stderr, which many tests compare with ""
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined, so before the kernels are imported
    if find_spec("triton"):
        from tests import interpreter

        interpreter.speed_up()


@pytest.fixture(scope="session", autouse=True)
def few_programs():
    """Let a program of kernels/sums.py add 128 columns at once, not 8. Triton's interpreter takes 2 ms a program."""
    if os.environ.get("TRITON_INTERPRET") and find_spec("triton"):
        from kernels import sums

        sums.PARTIAL_SUMS["BLOCK_C"] = 128


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Use one worker on a GPU, because a test fills the GPU and measures it. Otherwise use two for each core.

    Tests wait for programs: two cores were idle for a third of the time with two workers, and for a fifth with three.
    """
    return 1 if torch.cuda.is_available() else len(os.sched_getaffinity(0)) * 2


def pytest_addoption(parser):
    parser.addoption("--backend", action="append", default=[], metavar="OP=PATH", help="also test this backend")


def pytest_configure(config):
    """Let the tests find the backends of --backend among the files in kernels/OP."""
    added = [word.partition("=")[::2] for word in config.getoption("--backend")]
    if added:
        from kernels import lookup

        files = lookup.files
        lookup.files = lambda op: files(op) + [path for name, path in added if name == op]


def pytest_collection_modifyitems(config, items):
    """Run the exhaustive tests first, so that no long test is last. Leave out those marked `gpu` if there is no GPU."""
    items.sort(key=lambda item: item.get_closest_marker("exhaustive") is None)
    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish():
    """Collect garbage again from here on, but pass over what has been imported."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(SELDOM)


def pytest_unconfigure():
    """Let Python free what has been imported if nanobind is in it. Otherwise nanobind prints 50 lines about leaks.

    Triton has nanobind since version 3.9. The end of a process takes 2 s longer.
    """
    triton = sys.modules.get("triton._C.libtriton")
    if triton and type(triton.ir.builder).__module__.startswith("nanobind"):
        gc.unfreeze()


@functools.cache
def measured_flops(device, dtype):
    from runtime.timing import measured_flops

    return measured_flops(device, dtype)


@pytest.fixture
def called(monkeypatch, capsys):
    """Run a command in this process: called("train.py", train.main, "key=value") -> (exit code, stdout, stderr).

    Hydra forgets the choices that a test adds, such as attn=path/to/mine.py. An error lists all choices, and --help in
    a later test would list the folders above attn=../../mine.py, for more than 10 minutes.
    """
    import train  # noqa: F401

    Plugins.instance()  # this and the import register choices once, and the copy must have them
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", copy.deepcopy(store.repo))
    # Each run would measure the peak of the CPU again, which is 0.35 s of the 1.1 s of a quick run of train.py
    monkeypatch.setattr("runtime.device.measured_flops", measured_flops)

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
        if signal.getsignal(signal.SIGINT) is ignore_interrupt:  # a command ends here, and pytest goes on
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return (code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory):
    """The path of a Python that starts in 0.1 s: see tests/fork_server.py."""
    server, python = start(tmp_path_factory.mktemp("fork_server"))
    yield str(python)
    server.stdin.close()
    server.wait()


@pytest.fixture
def quick_python(monkeypatch, fork_server):
    """Start Python programs as forks of a process that has imported torch, also the programs that they start.

    A killed program may live on for a moment after its wait() returns.
    """
    monkeypatch.setattr(sys, "executable", fork_server)
    monkeypatch.setenv("PYTHON_EXEC", fork_server)  # for torchrun
    executable = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(fork_server)
    yield
    multiprocessing.set_executable(executable)


@pytest.fixture
def fp8_on_a_cpu(monkeypatch):
    """Make Triton's interpreter round to fp8 as PyTorch does: to the nearest number. Its own code cuts off bits."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(values, source, target, rounding):
        if source.name == "fp32" and target.name in ("fp8e4nv", "fp8e5"):
            dtype = torch.float8_e4m3fn if target.name == "fp8e4nv" else torch.float8_e5m2
            return torch.from_numpy(values.copy()).to(dtype).view(torch.uint8).numpy()
        return original(values, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr("kernels.gpu.INTERPRETER_ROUNDS_TO_FP8", True)


@pytest.fixture
def checkout(tmp_path):
    """The folder of a copy of the repo without results, to which a test may add files. git tracks its kernels."""
    ignore = shutil.ignore_patterns(".*", "out", "results")
    folder = Path(shutil.copytree(Path(__file__).parents[1], tmp_path / "repo", ignore=ignore))
    for words in (["init", "-q"], ["add", "kernels"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


@pytest.fixture
def disk(monkeypatch):
    """A list of what the test writes to the disk: each path that is fsynced, and (old, new path) of each rename."""
    events, fsync = [], os.fsync

    def record_fsync(handle):
        events.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def record(rename):
        def record_rename(path, target):
            events.append((str(path), str(target)))
            return rename(path, target)

        return record_rename

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record(Path.rename))
    monkeypatch.setattr(Path, "replace", record(Path.replace))
    return events


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """The paths of the user's and the repo's table of launch parameters for this test's device. Neither file exists."""
    from kernels import tuned

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "TABLES", tmp_path / "tables")
    tuned.merged_table.cache_clear()
    yield tuned.table_paths(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    tuned.merged_table.cache_clear()


@pytest.fixture
def hotswap(called, monkeypatch, tmp_path):
    """Run train.py in this process: hotswap("kernels=compile") -> (exit code, stdout, stderr).

    The current folder is an empty one, so each test has its own runs and token shards.
    """
    import train

    monkeypatch.chdir(tmp_path)
    return lambda *arguments: called("train.py", train.main, *arguments, f"data.cache={tmp_path / 'tokens'}")
