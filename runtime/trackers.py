"""Experiment trackers: they get the keys of metrics.jsonl and the result row. Our own files are the record."""

import contextlib
import re
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from runtime.config import check

INIT_SECONDS = 20  # that W&B may take to answer before the run goes on offline


@dataclass
class LoggerConfig:
    name: str  # none | wandb
    mode: str  # offline | online
    project: str
    group: str | None

    def __post_init__(self):
        check(self.name in TRACKERS, f"logger.name={self.name}: choose {' or '.join(TRACKERS)}")
        check(self.mode in ("offline", "online"), f"logger.mode={self.mode}: choose offline or online")
        check(
            re.fullmatch(r"[^/\\#?%:]{1,128}", self.project) is not None,
            f"logger.project={self.project}: W&B takes 1 to 128 characters, and none of / \\ # ? % :",
        )


class Tracker:
    """`logger=none`: keeps nothing. The interface that the others fill."""

    def __init__(self, config: LoggerConfig):
        self.config = config

    def start(self, folder: Path, row: dict) -> None:
        """The run begins; `row` holds name, config, kernels and env."""

    def log(self, step: int, figures: dict) -> None:
        """The figures of one logged step."""

    def finish(self, row: dict) -> None:
        """The run ended, in whatever way; `row` is the result row."""


class Wandb(Tracker):
    """`logger=wandb`: Weights & Biases, offline unless `logger.mode=online`; never a prompt, never a lost run."""

    def __init__(self, config: LoggerConfig):
        super().__init__(config)
        check(find_spec("wandb") is not None, "logger=wandb needs W&B: pip install wandb; or choose logger=none")
        self.run = None

    def start(self, folder: Path, row: dict) -> None:
        # a run that goes on is one run there as well; but offline in place of online has a name of its own
        config = {**row["config"], "executed": row["kernels"], "env": row["env"]}
        self.run = begun(self.config, folder, "the run goes on", name=row["name"], id=identity(folder), config=config)
        if self.run is None:
            return
        # A metric has one x axis in W&B. Throughput has two: the step (the default), and tokens under a second name.
        self.run.define_metric("tokens")
        self.run.define_metric("perf_by_tokens/*", step_metric="tokens")

    def log(self, step: int, figures: dict) -> None:
        extra = {}
        if "perf/tokens_per_sec" in figures:
            extra = {"perf_by_tokens/tokens_per_sec": figures["perf/tokens_per_sec"]}
        with self._or_without():
            if self.run is not None:
                self.run.log({**figures, **extra}, step=step, commit=True)

    def finish(self, row: dict) -> None:
        with self._or_without():
            if self.run is not None:
                self.run.summary.update({key: value for key, value in row.items() if key != "config"})
                self.run.finish(exit_code=0 if row["status"] == "ok" else 1)

    @contextlib.contextmanager
    def _or_without(self) -> Iterator[None]:
        """W&B works in a process of its own, which may die: then the run goes on without it."""
        import wandb

        try:
            yield
        except (OSError, wandb.errors.Error) as error:
            print(
                f"warning: W&B is lost ({error}) and the run goes on without; metrics.jsonl has it all", file=sys.stderr
            )
            self.run = None
            with contextlib.suppress(OSError):
                wandb.teardown()  # or it would try at exit, with a traceback


def begun(logger: LoggerConfig, folder: Path, goes_on: str, id: str | None = None, **settings):
    """A run of W&B's in `folder`: offline, with a warning, where online does not work; None, where neither does."""
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
                dir=str(folder.resolve()),  # W&B writes from a process of its own, with its own idea of "here"
                settings=wandb.Settings(silent=True, init_timeout=INIT_SECONDS),
                **settings,
            )
        except (wandb.errors.Error, ValueError, OSError) as error:
            where = "offline; `wandb sync` uploads it" if mode == "online" else "without W&B"
            print(f"warning: {goes_on} {where}: {' '.join(str(error).split())}", file=sys.stderr)
    return None


def publish(config: LoggerConfig, folder: Path, name: str, table: list[list], files: list[Path]) -> Path | None:
    """A run of job_type `report`: `table`, the first line its columns, and `files` as an artifact. Returns the run's
    folder. UserError: W&B is not installed."""
    Wandb(config)
    run = begun(config, folder, "the report goes on", name=f"{name}-report", job_type="report")
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


def identity(folder: Path) -> str:
    """A name for W&B that stays with the folder."""
    path = folder / ".wandb-id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text()


TRACKERS = {"none": Tracker, "wandb": Wandb}


def tracker(config: LoggerConfig) -> Tracker:
    return TRACKERS[config.name](config)
