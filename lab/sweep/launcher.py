"""Sweeps: `python train.py -m kernels=eager,compile attn=eager,sdpa`, each job in a process of its own.

`python -m scripts.generate -m ...` runs sweeps, too.
Hydra's own launcher runs all jobs in one process, where peak memory, caches and an out-of-memory error of one job
affect the next. The launcher here starts a process for each job. hydra/launcher=basic or hydra/launcher=submitit_slurm
replaces it. The sweeper here also tries a list of overrides one at a time.
"""

import itertools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins import launcher, sweeper
from omegaconf import DictConfig, OmegaConf

from common.terminal import override, printable, shell_command
from kernels.names import OPS, config_key
from lab.sweep.jobs import SweepJob, gpu_slots, plan_jobs, run_jobs
from lab.sweep.table import SORTS, sweep_table, write_sort
from model.executed import called_ops
from runtime import compat
from runtime.command import as_typed, config_flags, program
from runtime.config import NEEDS_RESULTS, UserError, check, parse
from runtime.folders import explain_unwritable
from runtime.ranks import world_size
from runtime.row import lock_folder
from runtime.signals import STOPPED, Signals, Stopped
from runtime.trackers import LoggerConfig, Tracker, group_of, track_ended_run


@dataclass
class SweepConfig:
    timeout: float | None  # minutes that a job may take; null: no limit
    repeats: int  # runs of each job
    own_caches: bool | None  # each job has compile caches of its own; null: with repeats
    sort: str  # speed | val/loss: which choice comes first in the table

    def __post_init__(self):
        limit = self.timeout
        check(self.repeats >= 1, f"sweep.repeats={self.repeats}: it must be at least 1")
        check(limit is None or 0 < limit < math.inf, f"sweep.timeout={limit}: it must be minutes above 0, or null")
        check(self.sort in SORTS, f"sweep.sort={self.sort}: choose {' or '.join(SORTS)}")


@dataclass
class LauncherConfig:
    """The keys of the program's config that the launcher reads."""

    out_dir: str | None  # the folder of the sweep
    device: str
    sweep: SweepConfig
    logger: LoggerConfig


class Sweeper(sweeper.Sweeper):
    """Runs every combination of the values in `params` and on the command line, as Hydra's basic sweeper does.

    For each element of `ablations`, an override or a list of overrides, it runs these combinations again with these
    overrides. A job does not choose the backend of an op that its model does not call, unless `arguments` of the
    command line do. Equal jobs run once.
    """

    __module__ = "hydra_plugins.hotswap"  # runtime.compat.register_hydra_plugins() puts it there

    def __init__(self, params: dict[str, str], ablations: list[str | list[str]]):
        self.params = params
        self.ablations = [[ablation] if isinstance(ablation, str) else ablation for ablation in ablations]

    def setup(self, *, hydra_context, task_function, config: DictConfig) -> None:
        self.hydra_context, self.task, self.config = hydra_context, task_function, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list:
        check(
            world_size() == 1,
            "a sweep (-m) cannot run under torchrun: run torchrun once for each job, or the sweep without torchrun",
        )
        words = [*(f"{key}={values}" for key, values in self.params.items()), *arguments]
        products = [self.product(words), *(self.product([*words, *ablation]) for ablation in self.ablations)]
        jobs = [list(job) for job in dict.fromkeys(itertools.chain(*products))]
        self.validate_batch_is_legal(jobs)
        if self.ablations:
            jobs = self.drop_uncalled_ops(jobs, arguments)
        return list(self.launcher.launch(jobs, initial_job_idx=0))

    def drop_uncalled_ops(self, jobs: list[list[str]], arguments: list[str]) -> list[list[str]]:
        """Return the jobs without backends of ops that their models do not call, but with the user's `arguments`."""
        uncalled: dict[tuple[str, ...], set[str]] = {}  # the other words of a job -> the keys to drop
        unique: dict[tuple[str, ...], list[str]] = {}
        asked = set(map(key_of, arguments))
        for job in jobs:
            others = tuple(word for word in job if not word.startswith("kernels."))
            if others not in uncalled:
                uncalled[others] = self.uncalled_keys(others)
            effective = tuple(word for word in job if key_of(word) not in uncalled[others])
            unique.setdefault(effective, [word for word in job if word in effective or key_of(word) in asked])
        return list(unique.values())

    def uncalled_keys(self, words: Sequence[str]) -> set[str]:
        """Return the config keys of the ops that the model of this job does not call; none if the model is unknown."""
        composed = self.hydra_context.config_loader.load_sweep_config(self.config, list(words))
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(composed)  # with init_from, the words of the job decide its model
        try:
            composed = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
            model = getattr(parse(composed, self.task.schema, self.task.complete), "model", None)
        except (UserError, *self.task.errors):  # the job will say so in its row
            return set()
        finally:
            HydraConfig.instance().cfg = before
        return {config_key(op) for op in OPS if op not in called_ops(model)} if model else set()

    def product(self, words: list[str]) -> itertools.product:
        """Return every combination of the overrides' values. If a key is repeated, its last override counts."""
        values = {}
        for word in OverridesParser.create(config_loader=self.hydra_context.config_loader).parse_overrides(words):
            key = word.get_key_element()
            if word.is_sweep_override():
                values[key] = [f"{key}={value}" for value in word.sweep_string_iterator()]
            else:
                values[key] = [word.input_line]
        return itertools.product(*values.values())


class Launcher(launcher.Launcher):
    """Starts a process for each job: one at a time, or one on each GPU if there are several."""

    __module__ = "hydra_plugins.hotswap"

    def setup(self, *, hydra_context, task_function, config: DictConfig) -> None:
        sweeper_class = config.hydra.sweeper._target_.rpartition(".")[2]
        check(
            sweeper_class in ("Sweeper", "BasicSweeper"),
            f"hydra/sweeper={config.hydra.runtime.choices['hydra/sweeper']}: {sweeper_class} {NEEDS_RESULTS}",
        )
        self.config, self.config_loader = config, hydra_context.config_loader

    def launch(self, job_overrides: list[list[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run the jobs that have no row, and print the table.

        Exits with 75 if jobs are left, and with 1 if the status of a job is `failed` or `wrong`.
        """
        groups = {field.name: self.config[field.name] for field in fields(LauncherConfig)}
        cfg = parse(OmegaConf.create(groups), LauncherConfig)
        if cfg.sweep.sort == "val/loss":
            self.check_evaluations(job_overrides)
        tracker = Tracker(cfg.logger)
        sweep = self.config.hydra.runtime.choices.get("sweep")
        suffix = f"-{sweep}" if sweep else ""
        folder = Path(cfg.out_dir or f"out/{time.strftime('%Y%m%d-%H%M%S')}-sweep{suffix}")
        repeats = cfg.sweep.repeats
        gpus = gpu_slots(cfg.device)
        if repeats > 1:
            gpus = gpus[:repeats]  # each repeat of all jobs takes one GPU
        words, added = [list(map(as_typed, words)) for words in job_overrides], []
        logger = replace(cfg.logger, group=cfg.logger.group or group_of(folder))  # the runs are one group
        if logger.name != "none" and cfg.logger.group is None:
            added.append(override("logger.group", logger.group))
        jobs = plan_jobs(folder, words, added, config_flags, gpus, repeats, cfg.sweep.own_caches)
        pace = "one at a time" if len(gpus) == 1 else f"{len(gpus)} at a time, each on a GPU of its own"
        with lock_folder(folder) as lock, Signals() as signals:
            signals.looping = True
            print(f"sweep    {len(jobs)} jobs, {sum(job.done for job in jobs)} of them done before; {pace}")
            print(f"folder   {folder}", flush=True)
            with explain_unwritable(folder):
                write_sort(folder, cfg.sweep.sort)
            run_jobs(jobs, gpus, cfg.sweep.timeout, lock, signals)
            for job in jobs:
                if job.died:  # it could not send its row itself
                    track_ended_run(logger, job.folder, job.row)
        print_table(jobs, cfg.sweep.sort)
        if line := tracker.view_line(folder, sweep=True):
            print(line)
        if not all(job.done for job in jobs):
            words = [as_typed(word) for word in sys.argv[1:] if not word.startswith("out_dir=")]
            command = printable(shell_command("python", *program(), *words, override("out_dir", folder)))
            print(f"stopped  with {sum(job.done for job in jobs)} of {len(jobs)} jobs done; resume with: {command}")
            raise Stopped(STOPPED, "with jobs left to do")
        page = shell_command("python", "-m", "scripts.report", folder)
        print(printable(f"done     {folder}; as a page: {page}"))
        if any(job.has_failed for job in jobs):
            sys.exit(1)
        return []  # the sweeper needs no results

    def check_evaluations(self, jobs: list[list[str]]) -> None:
        """Raise UserError if no job evaluates."""
        check("train" in self.config, "sweep.sort=val/loss: only a training evaluates; choose sweep.sort=speed")
        composed = (self.config_loader.load_sweep_config(self.config, words) for words in jobs)
        check(
            any(OmegaConf.select(config, "train.eval_every") for config in composed),
            "sweep.sort=val/loss: no job of this sweep evaluates; set train.eval_every, the steps between evaluations",
        )


def key_of(word: str) -> str:
    """Return the key of an override: "kernels.mlp" of "kernels.mlp=eager"."""
    return word.partition("=")[0]


def print_table(jobs: list[SweepJob], sort: str) -> None:
    """Print the table of the jobs that have a row. Repeats of a job are one choice."""
    choices: dict[tuple[str, ...], list[SweepJob]] = {}
    for job in jobs:
        if job.row:
            choices.setdefault(tuple(job.words), []).append(job)
    if choices:
        first_runs = [runs[0] for runs in choices.values()]
        rows = {runs[0].folder.name: [job.row for job in runs] for runs in choices.values()}
        print(sweep_table(rows, sort, {job.folder.name: job.log for job in first_runs if job.has_failed}))


def register_sweeps() -> None:
    """Let Hydra use our sweeper and launcher: hydra/sweeper=hotswap, hydra/launcher=hotswap (configs/hydra/)."""
    compat.register_hydra_plugins(sys.modules[__name__], Sweeper, Launcher)
