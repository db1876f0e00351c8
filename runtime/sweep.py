"""Sweeps: `python train.py -m kernels=eager,compile attn=eager,sdpa`, each job in a process of its own.

With Hydra's own launcher all jobs share one process, where peak memory, caches and an out-of-memory leak into the next
job. This is a launcher of processes, and a sweeper which also knows a list of overrides to be tried one at a time.
Both are choices like any other: hydra/launcher=basic, submitit_slurm, ... takes the place of ours.
"""

import itertools
import math
import shlex
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins import launcher, sweeper
from omegaconf import OmegaConf

from runtime.config import check, parse, quoted
from runtime.console import sweep_table
from runtime.jobs import Job, planned, slots, work
from runtime.ranks import world_size
from runtime.run import lock
from runtime.signals import STOPPED, Signals, Stopped


@dataclass
class SweepConfig:
    timeout: float | None  # minutes that a job may take; null: no limit
    repeats: int  # runs of each job

    def __post_init__(self):
        limit = self.timeout
        check(self.repeats >= 1, f"sweep.repeats={self.repeats}: it must be at least 1")
        check(limit is None or 0 < limit < math.inf, f"sweep.timeout={limit}: minutes above 0, or null for no limit")


@dataclass
class Swept:
    """What the launcher reads of the program's config."""

    out_dir: str | None  # the folder of the sweep
    device: str
    sweep: SweepConfig


class Sweeper(sweeper.Sweeper):
    """Every combination of the values in `params` and on the command line, as with Hydra's basic sweeper; then the
    same again with each of the overrides in `alone` in the place of its key's. Jobs that are alike are one."""

    __module__ = "hydra_plugins.hotswap"

    def __init__(self, params: dict[str, str], alone: list[str]):
        self.params, self.alone = params, alone

    def setup(self, *, hydra_context, task_function, config) -> None:
        parts = {"hydra_context": hydra_context, "task_function": task_function, "config": config}
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(**parts)

    def sweep(self, arguments: list[str]) -> list:
        check(
            world_size() == 1,
            "a sweep (-m) of several processes does not work: run torchrun once a job, or the sweep without torchrun",
        )
        words = [*(f"{key}={values}" for key, values in self.params.items()), *arguments]
        products = [self.product(words), *(self.product([*words, word]) for word in self.alone)]
        jobs = [list(job) for job in dict.fromkeys(itertools.chain(*products))]
        self.validate_batch_is_legal(jobs)
        return [job.return_value for job in self.launcher.launch(jobs, initial_job_idx=0)]

    def product(self, words: list[str]) -> itertools.product:
        """Of a key that is given twice the last counts, in the place of the first."""
        values = {}
        for word in OverridesParser.create(config_loader=self.hydra_context.config_loader).parse_overrides(words):
            key, swept = word.get_key_element(), word.is_sweep_override()
            values[key] = [f"{key}={value}" for value in word.sweep_string_iterator()] if swept else [word.input_line]
        return itertools.product(*values.values())


class Launcher(launcher.Launcher):
    """A process a job: one at a time, or where there are several GPUs one on each."""

    __module__ = "hydra_plugins.hotswap"

    def setup(self, *, hydra_context, task_function, config) -> None:
        self.config = config

    def launch(self, job_overrides: list[list[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run what has no row, and show the table. Exits with 75 where jobs are left, with 1 where one has `failed`."""
        cfg = parse(OmegaConf.create({key.name: self.config[key.name] for key in fields(Swept)}), Swept)
        runtime = self.config.hydra.runtime
        name = "-".join(filter(None, (time.strftime("%Y%m%d-%H%M%S"), "sweep", runtime.choices.get("sweep"))))
        folder = Path(cfg.out_dir or f"out/{name}")
        logger = self.config.logger
        group = [f"logger.group={quoted(folder.name)}"] * (logger.name != "none" and logger.group is None)
        configs = [source.path for source in runtime.config_sources if source.provider == "command-line"]
        flags = [word for path in configs for word in ("--config-dir", path)]
        repeats = cfg.sweep.repeats
        gpus = slots(cfg.device)[: repeats if repeats > 1 else None]  # a turn of all jobs has one GPU
        jobs = planned(folder, job_overrides, group, flags, gpus, repeats)
        pace = "one at a time" if len(gpus) == 1 else f"{len(gpus)} at a time, each on a GPU of its own"
        with lock(folder) as held, Signals() as signals:
            signals.looping = True
            print(f"sweep    {len(jobs)} jobs, {sum(job.done for job in jobs)} of them done before; {pace}")
            print(f"folder   {folder}", flush=True)
            work(jobs, gpus, cfg.sweep.timeout, held, signals)
        choices: dict[tuple[str, ...], list[Job]] = {}
        for job in jobs:
            if job.row:
                choices.setdefault(tuple(job.words), []).append(job)
        if choices:
            print(sweep_table({these[0].folder.name: [job.row for job in these] for these in choices.values()}))
        if not all(job.done for job in jobs):
            again = [word for word in sys.argv if not word.startswith("out_dir=")]
            again = shlex.join(["python", *again, f"out_dir={quoted(str(folder))}"])
            print(f"stopped  with {sum(job.done for job in jobs)} of {len(jobs)} jobs done; go on with: {again}")
            raise Stopped(STOPPED, "with jobs left to do")
        print(f"done     {folder}; as a page: python -m scripts.report {shlex.quote(str(folder))}")
        if any(job.row["status"].startswith(("failed", "wrong")) for job in jobs):
            sys.exit(1)
        return [JobReturn(job.words, status=JobStatus.COMPLETED, _return_value=job.row) for job in jobs]


def register_sweeps() -> None:
    """Make them choices: hydra/sweeper=hotswap, hydra/launcher=hotswap.

    Hydra takes them from a package hydra_plugins alone, which is there where others are installed.
    """
    plugins = Plugins.instance()  # imports that package, where it is
    sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins")).hotswap = sys.modules[__name__]
    for plugin, defaults in ((Sweeper, {"params": {}, "alone": []}), (Launcher, {})):
        plugins.register(plugin)
        node = {"_target_": f"{plugin.__module__}.{plugin.__name__}", **defaults}
        ConfigStore.instance().store("hotswap", node, group=f"hydra/{plugin.__name__.lower()}")
