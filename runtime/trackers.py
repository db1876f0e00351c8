"""Experiment trackers. They receive the figures of metrics.jsonl and the result row.

A run's own files are complete without a tracker, and a tracker that fails never ends a run: see SafeTracker.
"""

import contextlib
import os
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten

from files import read_line
from runtime.config import check
from terminal import printable, shell_command, warn

INIT_SECONDS = 10  # if W&B has not answered after this time, the run continues offline
FINISH_SECONDS = 60  # how long the end of a run waits for W&B's upload
# W&B's servers refuse longer texts. They refuse an offline run only at its upload. W&B documents no limit for notes
MAX_CHARACTERS = {"tags": 64, "job_type": 64, "group": 128, "entity": 128, "name": 128}


def group_of(folder: Path) -> str:
    """Return W&B's group for the runs of a sweep in this folder."""
    return folder.name[: MAX_CHARACTERS["group"]]


@dataclass
class LoggerConfig:
    """The keys of the config group `logger`."""

    name: str  # none | wandb | tensorboard
    mode: str  # offline | online
    project: str
    entity: str | None  # the user or team that owns the project; None: the user's default
    group: str | None  # the name of a group of runs
    job_type: str | None
    tags: list[str]
    notes: str | None

    def __post_init__(self):
        check(self.name in TRACKERS, f"logger.name={self.name}: choose {', '.join(TRACKERS)}")
        if self.name != "none":
            title, install = TRACKERS[self.name].title, TRACKERS[self.name].install
            needed = f"logger={self.name} needs {title}: {install}; or choose logger=none"
            check(find_spec(self.name) is not None, needed)
        check(self.mode in ("offline", "online"), f"logger.mode={self.mode}: choose offline or online")
        if self.name == "wandb":
            self._check_texts()

    def _check_texts(self) -> None:
        """Raise UserError if W&B would refuse a text."""
        check(
            re.fullmatch(r"[^/\\#?%:]{1,128}", self.project) is not None,
            f"logger.project={self.project}: W&B takes 1 to 128 characters, and none of / \\ # ? % :",
        )
        for key in ("tags", "job_type", "group", "entity"):
            value, longest = getattr(self, key), MAX_CHARACTERS[key]
            for text in value if isinstance(value, list) else [value]:
                given = f"logger.{key}={text}: W&B takes 1 to {longest} characters"
                check(text is None or 1 <= len(text) <= longest, f"{given}, and these are {len(text or '')}")


class Tracker:
    """`logger=none`: does nothing. It is the base class of the other trackers."""

    def __init__(self, config: LoggerConfig):
        self.config = config

    def start(self, folder: Path, row: dict) -> None:
        """Begin a run. `row` has its name and config, and, if the run could be built, its kernels and env."""

    def log(self, step: int, figures: dict) -> None:
        """Receive the figures of one logged step."""

    def log_table(self, name: str, columns: list[str], rows: list[list]) -> None:
        """Receive a table, such as samples of text."""

    def finish(self, row: dict) -> None:
        """End a run that has succeeded or failed. `row` is the result row."""

    def view_line(self, folder: Path, sweep: bool = False) -> str | None:
        """Return the line that says how to see the run in `folder`, or the runs of a sweep; None without advice."""

    def abandon(self) -> None:
        """End what is left of the tracker after a failure."""


class SafeTracker(Tracker):
    """Passes every call to `tracker`. If one fails, it prints one warning, and passes no further calls.

    It does so whatever the tracker raises: a tracker's library may raise anything.
    """

    def __init__(self, tracker: Tracker):
        super().__init__(tracker.config)
        self.tracker, self.failed = tracker, False

    def start(self, folder: Path, row: dict) -> None:
        self._pass_on(self.tracker.start, folder, row)

    def log(self, step: int, figures: dict) -> None:
        self._pass_on(self.tracker.log, step, figures)

    def log_table(self, name: str, columns: list[str], rows: list[list]) -> None:
        self._pass_on(self.tracker.log_table, name, columns, rows)

    def finish(self, row: dict) -> None:
        self._pass_on(self.tracker.finish, row)

    def view_line(self, folder: Path, sweep: bool = False) -> str | None:
        return self.tracker.view_line(folder, sweep)

    def _pass_on(self, method: Callable, *arguments) -> None:
        if self.failed:
            return
        try:
            method(*arguments)
        except Exception as error:
            self.failed = True
            why = f"{self.tracker.title} failed ({explain(error)})"
            warn(f"{why}, and the command continues without it; its own files have all figures")
            with contextlib.suppress(Exception):
                self.tracker.abandon()


def explain(error: Exception) -> str:
    """Return the error's message in one line of at most 300 characters, or its class name if it has none."""
    return shorten(str(error) or type(error).__name__, 300)


class Wandb(Tracker):
    """`logger=wandb`: Weights & Biases, offline unless `logger.mode=online`. It never prompts for a login."""

    title, install = "W&B", "pip install wandb"

    def __init__(self, config: LoggerConfig):
        super().__init__(config)
        self.run = None

    def start(self, folder: Path, row: dict) -> None:
        config = {**row.get("config", {}), "executed": row.get("kernels"), "env": row.get("env")}
        name, job_type = row["name"][: MAX_CHARACTERS["name"]], self.config.job_type
        settings = {"name": name, "id": wandb_id(folder), "config": config, "job_type": job_type}
        self.run = start_wandb_run(self.config, folder, "the run", **settings)
        if self.run is None:
            return
        # A metric has one x axis in W&B: by default the step. Throughput over tokens therefore needs a second name
        self.run.define_metric("tokens")
        self.run.define_metric("perf_by_tokens/*", step_metric="tokens")

    def log(self, step: int, figures: dict) -> None:
        extra = {}
        if "perf/tokens_per_sec" in figures:
            extra = {"perf_by_tokens/tokens_per_sec": figures["perf/tokens_per_sec"]}
        if self.run is not None:
            self.run.log({**figures, **extra}, step=step, commit=True)

    def log_table(self, name: str, columns: list[str], rows: list[list]) -> None:
        import wandb

        if self.run is not None:
            self.run.log({name: wandb.Table(columns=columns, data=rows)})

    def finish(self, row: dict) -> None:
        if self.run is not None:
            self.run.summary.update({key: value for key, value in row.items() if key != "config"})
            if not self.run.offline:
                print(f"wandb    uploading what is left, for at most {FINISH_SECONDS} s", flush=True)
            try:
                self.run.finish(exit_code=0 if row["status"] == "ok" else 1)
            except TimeoutError:
                rest = shell_command("wandb", "sync", Path(self.run.dir).parent)
                why = f"the upload took more than {FINISH_SECONDS} s; to upload the rest: {rest}"
                raise TimeoutError(why) from None

    def abandon(self) -> None:
        import wandb

        wandb.teardown()  # otherwise W&B fails again at exit, with a traceback

    def view_line(self, folder: Path, sweep: bool = False) -> str | None:
        below = f"{'*/' if sweep else ''}wandb/offline-run-*"
        if not list(folder.glob(below)):
            return None
        return printable(f"wandb    offline; to upload: {shell_command('wandb', 'sync', folder)}/{below}")


def start_wandb_run(logger: LoggerConfig, folder: Path, what: str, id: str | None = None, **settings):
    """Start a run of W&B in `folder`. If online mode fails, start it offline; if that fails too, return None.

    Each failure prints a warning that `what` continues. A run with an earlier run's `id` resumes that run in W&B. A run
    that is offline although logger.mode=online gets a new id.
    """
    import wandb

    timeouts = {"init_timeout": INIT_SECONDS, "finish_timeout": FINISH_SECONDS, "finish_timeout_raises": True}
    for mode in ("online", "offline") if logger.mode == "online" else ("offline",):
        try:
            use_writable_cache(folder)
            # reads WANDB_*, and refuses a wrong value
            server = wandb.setup(settings=wandb.Settings(silent=True)).settings.base_url
            if mode == "online":
                if not wandb.login(prompt=False, verify=False):
                    raise wandb.errors.UsageError("no API key is configured: run `wandb login`")
                print(printable(f"wandb    connecting to {server}, for at most {INIT_SECONDS} s"), flush=True)
            return wandb.init(
                mode=mode,
                project=logger.project,
                entity=logger.entity,
                group=logger.group,
                tags=logger.tags,
                notes=logger.notes,
                id=id if mode == logger.mode else None,
                resume="allow",
                dir=str(folder.resolve()),  # W&B's process may have another working directory
                settings=wandb.Settings(silent=True, **timeouts),
                **settings,
            )
        except Exception as error:  # W&B may raise anything
            where = "offline; `wandb sync` uploads it" if mode == "online" else "without W&B"
            warn(f"{what} continues {where}: {explain(error)}")
    return None


def use_writable_cache(folder: Path) -> None:
    """Let W&B's process write its log below `folder` if this user's cache cannot be written. It would print its log."""
    cache = os.path.abspath(os.path.join(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "wandb"))
    while not os.path.exists(cache):  # False for a folder that this user cannot enter; Path.exists() would raise
        cache = os.path.dirname(cache)
    if not (os.path.isdir(cache) and os.access(cache, os.W_OK)):
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder.resolve() / "wandb"))


def publish_report(config: LoggerConfig, folder: Path, name: str, table: list[list], files: list[Path]) -> Path | None:
    """Publish a report as a run of W&B with the job_type `report`: a table, and `files` as an artifact.

    The first row of `table` has the names of its columns. Returns the folder of the run, or None if W&B failed.
    """
    title = f"{name[:100]}-report"
    run = start_wandb_run(config, folder, "the report", name=title, job_type="report")
    if run is None:
        return None
    import wandb

    columns, *rows = table
    try:
        run.log({"choices": wandb.Table(columns=columns, data=rows)})
        artifact = wandb.Artifact(re.sub(r"[^\w.-]+", "_", title), type="report")
        for file in files:
            artifact.add_file(str(file))
        run.log_artifact(artifact)
        run.finish()
    except Exception as error:  # W&B may raise anything
        warn(f"W&B failed ({explain(error)}); the report is in {folder}")
        return None
    return Path(run.dir).parent


def wandb_id(folder: Path) -> str:
    """Return W&B's id of the run in this folder, so that a resumed run is the same run in W&B."""
    path = folder / ".wandb-id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
    return path.read_text(encoding="utf-8")


class TensorBoard(Tracker):
    """`logger=tensorboard`: files of events in the run's folder, for TensorBoard."""

    title, install = "TensorBoard", "pip install '.[tensorboard]'"

    def __init__(self, config: LoggerConfig):
        super().__init__(config)
        self.writer = None

    def start(self, folder: Path, row: dict) -> None:
        from torch.utils.tensorboard import SummaryWriter

        last = last_step(folder / "metrics.jsonl")
        # A resumed run logs the steps after its checkpoint again, so TensorBoard drops their first figures
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=last + 1 if last else None)

    def log(self, step: int, figures: dict) -> None:
        for key, value in figures.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(key, value, step)

    def log_table(self, name: str, columns: list[str], rows: list[list]) -> None:
        def cell(value) -> str:
            return str(value).replace("|", r"\|").replace("\n", "<br>")

        lines = [columns, ["---"] * len(columns), *([cell(value) for value in row] for row in rows)]
        self.writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines))

    def finish(self, row: dict) -> None:
        if self.writer is None:
            return
        for key in ("status", "command"):
            self.writer.add_text(key, row[key])
        self.log_table("row", ["key", "value"], [[key, value] for key, value in row.items()])
        self.writer.close()

    def view_line(self, folder: Path, sweep: bool = False) -> str | None:
        return printable(f"board    {shell_command('tensorboard', '--logdir', folder)}")


def last_step(metrics: Path) -> int | None:
    """Return the step of the last complete line of a metrics.jsonl; None if it has none."""
    for line in reversed(metrics.read_bytes().splitlines() if metrics.exists() else []):
        with contextlib.suppress(ValueError, KeyError, RecursionError):  # damaged, or incomplete after a kill
            return read_line(line)["step"]
    return None


TRACKERS = {"none": Tracker, "wandb": Wandb, "tensorboard": TensorBoard}


def make_tracker(config: LoggerConfig) -> Tracker:
    """Return the tracker that logger.name chooses."""
    return SafeTracker(TRACKERS[config.name](config))


def track_ended_run(config: LoggerConfig, folder: Path, row: dict) -> None:
    """Send the row of a run that ended before it could do so itself."""
    tracker = make_tracker(config)
    tracker.start(folder, row)
    tracker.finish(row)
