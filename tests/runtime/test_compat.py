"""Each function of compat.py and torch_compat.py works, and is still needed. A failure says what to change there."""

import argparse
import copy
import importlib.util
import os
import pickle
import re
import subprocess
import sys
import time
from types import ModuleType

import hydra
import pytest
import torch
import torch.distributed as dist
from hydra._internal import config_repository
from hydra._internal.utils import get_args_parser
from hydra.core.plugins import Plugins
from hydra.plugins import launcher
from omegaconf import OmegaConf
from packaging.version import Version

from lab.bench.machine import read_tested_versions
from runtime import compat, torch_compat
from runtime.watchdog import write_records


def test_the_flight_recorder_has_the_collectives_of_gloo(tmp_path):
    """With one rank none stays pending. tests/test_parallel.py has a pending one."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3))
        end = time.monotonic() + 60
        while not (entry := pickle.loads(torch_compat.flight_records()["gloo"])["entries"][-1])["retired"]:
            assert time.monotonic() < end  # another thread retires it, shortly after the collective
            time.sleep(0.01)
        assert entry["profiling_name"] == "gloo:all_reduce"
        assert entry["collective_seq_id"] >= 1
        assert torch_compat.pending_collective() is None
    finally:
        dist.destroy_process_group()


def record_collectives(rank, folder):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    dist.all_reduce(torch.ones(2), group=dist.new_group(backend="gloo"))
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        dist.all_reduce(torch.ones(5), async_op=True)
    write_records(folder / "collectives", rank, world_size=2)
    os._exit(0)  # without a wait for the collective that rank 1 does not join


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torchfrtrace reads gloo's records from PyTorch 2.13 on")
@pytest.mark.usefixtures("quick_python")
def test_torchfrtrace_names_the_rank_that_is_missing_in_a_collective_of_gloo(tmp_path):
    torch.multiprocessing.spawn(record_collectives, (tmp_path,), nprocs=2)
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "-p", "gloo-rank"]
    done = subprocess.run([*command, tmp_path / "collectives"], capture_output=True, text=True)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    assert re.findall(r"missing ranks: (.*)\s+input sizes: (.*)", report) == [("{1}", "[[5]]")]


def test_compile_counters_count_graphs_and_graph_breaks():
    @torch.compile(backend="eager")
    def two_graphs(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    torch.compiler.reset()
    compat.reset_compile_counters()
    assert compat.compile_counters()["stats"]["unique_graphs"] == 0
    two_graphs(torch.ones(2))
    assert compat.compile_counters()["stats"]["unique_graphs"] == 2
    assert sum(compat.compile_counters()["graph_break"].values()) == 1
    compat.reset_compile_counters()
    assert compat.compile_counters()["stats"]["unique_graphs"] == 0


def test_compile_counters_count_misses_and_hits_of_the_caches(monkeypatch, tmp_path):
    """A matmul is compiled twice: first with empty caches, then with full ones."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counts = []
    for _ in range(2):
        torch.compiler.reset()
        compat.reset_compile_counters()
        torch.compile(lambda x: x @ x)(torch.ones(4, 4))
        counters = compat.compile_counters()
        inductor = counters["inductor"]
        hits = inductor["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        counts.append((inductor["fxgraph_cache_miss"], inductor["fxgraph_cache_bypass"], hits > 0))
    assert counts == [(1, 0, False), (0, 0, True)]


def test_pytorch_has_no_public_compile_counters():
    names = [name for part in ("counter", "metric", "stats") for name in public_names(torch.compiler, part)]
    assert not names, f"PyTorch has public counters, {names}: use them in compile_counters()"


def test_triton_reports_each_hit_and_miss_of_its_cache(monkeypatch, tmp_path):
    """An empty kernel is compiled twice, for a GPU that need not be here."""
    pytest.importorskip("triton")
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    def kernel():
        pass

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns if this is not set
    compat.reset_compile_counters()
    for expected in ({"miss": 1}, {"miss": 1, "hit": 1}):
        compile(ASTSource(JITFunction(kernel), {}, {}, {}), target=GPUTarget("cuda", 80, 32))
        assert compat.triton_cache == expected


@pytest.mark.gpu
def test_fa4_keeps_its_kernels_in_dicts():
    interface = pytest.importorskip("flash_attn.cute.interface", reason="FlashAttention-4 is not installed")
    assert isinstance(interface._flash_attn_fwd.compile_cache.cache, dict)
    assert isinstance(interface._flash_attn_bwd.compile_cache.cache, dict)


def public_names(module, part):
    return [name for name in dir(module) if part in name and not name.startswith("_")]


def test_copy_tensors_copies_views_and_converts_dtypes():
    flat = torch.arange(7.0)
    targets = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 2)]
    torch_compat.copy_tensors(targets, [flat[:3], flat[3:].view(2, 2)])
    assert targets[0].tolist() == [0, 1, 2]
    assert targets[1].tolist() == [[3, 4], [5, 6]]


def test_the_oldest_supported_torch_has_no_public_foreach_functions():
    """PyTorch 2.15 has torch.foreach."""
    oldest = Version(read_tested_versions()["torch"][0])
    assert oldest < Version("2.15"), "use torch.foreach in copy_tensors(), and in add_tensors() of model/compat.py"


@pytest.mark.gpu
def test_sleep_on_gpu_keeps_the_gpu_busy_and_not_the_host():
    """An H200 sleeps 0.1 s. A slower GPU sleeps longer, and no GPU has twice the clock of an H200."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch_compat.sleep_on_gpu(0.1)
    end.record()
    assert not end.query(), "the host waited for the GPU, or the GPU did not sleep"
    end.synchronize()
    assert 0.05 < start.elapsed_time(end) / 1e3 < 1


def test_pytorch_still_has_no_public_sleep():
    names = public_names(torch.cuda, "sleep")
    assert not names, f"PyTorch has the public functions {names}: use them in sleep_on_gpu()"
    assert callable(torch.cuda._sleep), "torch.cuda._sleep is gone: change sleep_on_gpu()"


def run_hydra(monkeypatch, argument):
    """Run a Hydra program with one argument."""
    monkeypatch.setattr(sys, "argv", ["program", argument])
    hydra.main(version_base="1.3")(lambda cfg: None)()


def test_flags_and_overrides_are_told_apart():
    words = ["a=1", "--config-dir", "my (1)", "b=2", "-m", "--cfg=job", "c=3"]
    assert compat.split_flags(words) == (["-m", "--cfg=job", "--config-dir=my (1)"], ["a=1", "b=2", "c=3"])
    assert compat.split_flags(["--multirun", "--info"]) == (["-m", "--info=all"], [])


def test_hydra_alone_refuses_overrides_on_both_sides_of_a_flag():
    with pytest.raises(SystemExit):
        get_args_parser().parse_args(["a=1", "--config-dir", "x", "b=2"])


def test_an_argument_that_hydra_refuses_is_one_line(monkeypatch):
    monkeypatch.setattr(argparse.ArgumentParser, "error", argparse.ArgumentParser.error)  # restored after the test
    compat.shorten_argparse_errors()
    with pytest.raises(SystemExit) as stop:
        run_hydra(monkeypatch, "--nope\x1b[2J")
    assert stop.value.code == "error: unrecognized arguments: --nope\\x1b[2J"


def test_hydra_alone_prints_more_than_one_line(monkeypatch, capsys):
    """Another test may have called shorten_argparse_errors(), so argparse's own function comes from a new copy."""
    spec = importlib.util.find_spec("argparse")
    original = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(original)
    monkeypatch.setattr(argparse.ArgumentParser, "error", original.ArgumentParser.error)
    with pytest.raises(SystemExit):
        run_hydra(monkeypatch, "--nope")
    message = "Hydra prints one line for an argument that it refuses: delete shorten_argparse_errors()"
    assert capsys.readouterr().err.count("\n") > 1, message


class ToyLauncher(launcher.Launcher):
    """A launcher outside of hydra_plugins."""

    def setup(self, *, hydra_context, task_function, config):
        pass

    def launch(self, job_overrides, initial_job_idx):
        return []


class ToyPlugin(ToyLauncher):
    """A launcher whose module is hydra_plugins.hotswap, like the launcher in lab/sweep."""

    __module__ = "hydra_plugins.hotswap"


def instantiate(plugin):
    """Let Hydra make the launcher that a config names."""
    config = OmegaConf.create({"hydra": {"launcher": {"_target_": f"{plugin.__module__}.{plugin.__name__}"}}})
    return Plugins.instance().instantiate_launcher(hydra_context=None, task_function=None, config=config)


@pytest.fixture
def registry(monkeypatch):
    """Hydra's registry of plugins, and the package hydra_plugins. Both are restored after the test."""
    plugins = Plugins.instance()
    classes = {kind: list(known) for kind, known in plugins.plugin_type_to_subclass_list.items()}
    monkeypatch.setattr(plugins, "plugin_type_to_subclass_list", classes)
    monkeypatch.setattr(plugins, "class_name_to_class", dict(plugins.class_name_to_class))
    package = sys.modules.get("hydra_plugins", ModuleType("hydra_plugins"))
    monkeypatch.setitem(sys.modules, "hydra_plugins", package)
    monkeypatch.setattr(package, "hotswap", None, raising=False)
    return plugins


def test_hydra_makes_a_launcher_that_is_registered(registry):
    compat.register_hydra_plugins(sys.modules[__name__], ToyPlugin)
    assert ToyPlugin in registry.discover(launcher.Launcher)
    assert isinstance(instantiate(ToyPlugin), ToyPlugin)
    assert sys.modules["hydra_plugins"].hotswap is sys.modules[__name__]


def test_hydra_refuses_a_launcher_outside_of_hydra_plugins(registry):
    registry.register(ToyLauncher)
    accepted = registry.is_in_toplevel_plugins_module(f"{ToyLauncher.__module__}.{ToyLauncher.__name__}")
    assert not accepted, "Hydra accepts plugins of any package: let register_hydra_plugins() only register them"
    with pytest.raises(RuntimeError, match="not the hydra_plugins package"):
        instantiate(ToyLauncher)


class Sources:
    """Stands for Hydra's list of the sources of configs. It counts its deep copies."""

    def __init__(self):
        self.deep_copies = 0

    def __deepcopy__(self, memo):
        self.deep_copies += 1
        return self


def test_hydra_copies_no_configs_to_list_a_group(monkeypatch):
    monkeypatch.setattr(config_repository, "copy", copy)  # restored after the test
    sources = Sources()
    config_repository.CachingConfigRepository(sources)
    assert sources.deep_copies == 1, "Hydra copies no configs to list a group: delete list_groups_quickly()"
    compat.list_groups_quickly()
    assert config_repository.CachingConfigRepository(sources).delegate is not sources
    assert sources.deep_copies == 1
