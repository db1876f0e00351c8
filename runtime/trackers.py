"""Experiment trackers. They receive the figures of metrics.jsonl and the result row.

A run's own files are complete without a tracker.
"""

import contextlib
import re
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from runtime.config import check

INIT_SECONDS = 20  # if W&B has not answered after this time, the run continues offline


@dataclass
class LoggerConfig:
    """The keys of the config group `logger`."""

    name: str  # none | wandb
    mode: str  # offline | online
    project: str
    group: str | None  # the name of a group of runs in W&B

    def __post_init__(self):
        check(self.name in TRACKERS, f"logger.name={self.name}: choose {' or '.join(TRACKERS)}")
        check(self.mode in ("offline", "online"), f"logger.mode={self.mode}: choose offline or online")
        check(
            re.fullmatch(r"[^/\\#?%:]{1,128}", self.project) is not None,
            f"logger.project={self.project}: W&B takes 1 to 128 characters, and none of / \\ # ? % :",
        )


class Tracker:
    """`logger=none`: does nothing. It is the base class of the other trackers."""

    def __init__(self, config: LoggerConfig):
        self.config = config

    def start(self, folder: Path, row: dict) -> None:
        """Begin a run. `row` has its name, config, kernels and env."""

    def log(self, step: int, figures: dict) -> None:
        """Receive the figures of one logged step."""

    def log_table(self, name: str, columns: list[str], rows: list[list]) -> None:
        """Receive a table, such as samples of text."""

    def finish(self, row: dict) -> None:
        """End a run that has succeeded or failed. `row` is the result row."""


class Wandb(Tracker):
    """`logger=wandb`: Weights & Biases, offline unless `logger.mode=online`.

    It never prompts for a login, and a failure of W&B never ends the run.
    """

    def __init__(self, config: LoggerConfig):
        super().__init__(config)
        require_wandb()
        self.run = None

    def start(self, folder: Path, row: dict) -> None:
        config = {**row["config"], "executed": row["kernels"], "env": row["env"]}
        self.run = start_wandb_run(self.config, folder, "the run", name=row["name"], id=wandb_id(folder), config=config)
        if self.run is None:
            return
        # A metric has one x axis in W&B: by default the step. Throughput over tokens therefore needs a second name
        self.run.define_metric("tokens")
        self.run.define_metric("perf_by_tokens/*", step_metric="tokens")

    def log(self, step: int, figures: dict) -> None:
        extra = {}
        if "perf/tokens_per_sec" in figures:
            extra = {"perf_by_tokens/tokens_per_sec": figures["perf/tokens_per_sec"]}
        with self._warn_of_failure():
            if self.run is not None:
                self.run.log({**figures, **extra}, step=step, commit=True)

    def log_table(self, name: str, columns: list[str], rows: list[list]) -> None:
        import wandb

        with self._warn_of_failure():
            if self.run is not None:
                self.run.log({name: wandb.Table(columns=columns, data=rows)})

    def finish(self, row: dict) -> None:
        with self._warn_of_failure():
            if self.run is not None:
                self.run.summary.update({key: value for key, value in row.items() if key != "config"})
                self.run.finish(exit_code=0 if row["status"] == "ok" else 1)

    @contextlib.contextmanager
    def _warn_of_failure(self) -> Iterator[None]:
        """If W&B fails within this context, print a warning and continue without it: its process may be killed."""
        import wandb

        try:
            yield
        except (OSError, wandb.errors.Error) as error:
            print(
                f"warning: W&B failed ({error}), and the run continues without it; metrics.jsonl has all figures",
                file=sys.stderr,
            )
            self.run = None
            with contextlib.suppress(OSError):
                wandb.teardown()  # otherwise W&B fails again at exit, with a traceback


def require_wandb() -> None:
    """Raise UserError if W&B is not installed."""
    check(find_spec("wandb") is not None, "logger=wandb needs W&B: pip install wandb; or choose logger=none")


def start_wandb_run(logger: LoggerConfig, folder: Path, what: str, id: str | None = None, **settings):
    """Start a run of W&B in `folder`. If online mode fails, start it offline; if that fails too, return None.

    Each failure prints a warning that `what` continues. A run with an earlier run's `id` resumes that run in W&B. A run
    that is offline although logger.mode=online gets a new id.
    """
    import wandb

    wandb.setup(settings=wandb.Settings(silent=True))
    for mode in ("online", "offline") if logger.mode == "online" else ("offline",):
        try:
            if mode == "online" and not wandb.login(prompt=False, verify=False):
                raise wandb.errors.UsageError("no API key is configured: run `wandb login`")
            return wandb.init(
                mode=mode,
                project=logger.project,
                group=logger.group,
                id=id if mode == logger.mode else None,
                resume="allow",
                dir=str(folder.resolve()),  # W&B's process may have another working directory
                settings=wandb.Settings(silent=True, init_timeout=INIT_SECONDS),
                **settings,
            )
        except (wandb.errors.Error, ValueError, OSError) as error:
            where = "offline; `wandb sync` uploads it" if mode == "online" else "without W&B"
            print(f"warning: {what} continues {where}: {' '.join(str(error).split())}", file=sys.stderr)
    return None


def publish_report(config: LoggerConfig, folder: Path, name: str, table: list[list], files: list[Path]) -> Path | None:
    """Publish a report as a run of W&B with the job_type `report`: a table, and `files` as an artifact.

    The first row of `table` has the names of its columns. Returns the folder of the run, or None if W&B failed. Raises
    UserError if W&B is not installed.
    """
    require_wandb()
    run = start_wandb_run(config, folder, "the report", name=f"{name}-report", job_type="report")
    if run is None:
        return None
    import wandb

    columns, *rows = table
    run.log({"choices": wandb.Table(columns=columns, data=rows)})
    artifact = wandb.Artifact(re.sub(r"[^\w.-]+", "_", f"{name}-report"), type="report")
    for file in files:
        artifact.add_file(str(file))
    run.log_artifact(artifact)
    run.finish()
    return Path(run.dir).parent


def wandb_id(folder: Path) -> str:
    """Return W&B's id of the run in this folder, so that a resumed run is the same run in W&B."""
    path = folder / ".wandb-id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text()


TRACKERS = {"none": Tracker, "wandb": Wandb}


def make_tracker(config: LoggerConfig) -> Tracker:
    """Return the tracker that logger.name chooses. Raises UserError if its package is not installed."""
    return TRACKERS[config.name](config)
