"""Weights & Biases and TensorBoard, and the process in which they run: see Tracker in runtime/trackers.py.

Their libraries start threads and processes, ask servers, and wait at the end of Python. In this process they cannot
fail, stop or end the run.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from common.files import read_json, write_json
from common.terminal import one_line, printable, shell_command

# W&B's servers refuse longer texts. They refuse an offline run only at its upload. W&B documents no limit for notes
MAX_CHARACTERS = {"tags": 64, "job_type": 64, "group": 128, "entity": 128, "name": 128}
KILLED = {"status": "stopped: killed"}  # the row of a run whose process ended without finish()


class Library:
    """A tracker's library. It has the methods of trackers.Tracker, which get JSON. Any of them may raise anything.

    `logger` has the fields of LoggerConfig, and the limits `init_seconds`, `finish_seconds` and `call_seconds`.
    tell("say", line) prints a line on stdout, tell("warn", text) a warning, and tell("stop") acts as Ctrl-C does.
    """

    def __init__(self, logger: SimpleNamespace, tell: Callable):
        self.logger, self.tell, self.run = logger, tell, None


class Wandb(Library):
    """`logger=wandb`: Weights & Biases, offline unless `logger.mode=online`. It never prompts for a login."""

    title, install = "W&B", "pip install wandb"

    def start(self, folder: str, row: dict, last_step: int | None) -> None:
        config = {**row.get("config", {}), "executed": row.get("kernels"), "env": row.get("env")}
        name, job_type = row["name"][: MAX_CHARACTERS["name"]], self.logger.job_type
        identity = self._id(Path(folder))
        self._start_run(Path(folder), "the run", name=name, id=identity, config=config, job_type=job_type)
        if self.run is not None:
            self.run.define_metric("val/loss", summary="min")

    def log(self, step: int, figures: dict) -> None:
        if self.run is not None:
            self.run.log(figures, step=step, commit=True)

    def log_table(self, name: str, columns: list[str], rows: list[list]) -> None:
        import wandb

        if self.run is not None:
            self.run.log({name: wandb.Table(columns=columns, data=rows)})

    def log_checkpoint(self, folder: str, files: list[str], facts: dict) -> None:
        import wandb

        if self.run is None:
            return
        loss, is_best = facts["val_loss"], facts["val_loss"] is not None
        artifact = wandb.Artifact(f"checkpoint-{self.run.id}", type="model", metadata=facts)
        for file in files:  # immutable: W&B makes no copy, which would take 1.5 GB of the home folder at 124M
            artifact.add_file(os.path.join(folder, file), name=file, policy="immutable")
        self.run.log_artifact(artifact, aliases=["latest", "best"] if is_best else ["latest"])
        which = f"the lowest val/loss, {loss:.4f}" if is_best else "the newest; no checkpoint has a val/loss"
        self.tell("say", f"wandb    artifact checkpoint-{self.run.id}: step {facts['step']}, {which}")

    def finish(self, row: dict) -> None:
        if self.run is not None:
            summary = {key: value for key, value in row.items() if key != "config"}
            if "val/loss/min" in summary:  # in the form of define_metric(); the last loss would replace its minimum
                summary["val/loss"] = {"min": summary.pop("val/loss/min")}
            self.run.summary.update(summary)
            self._finish_run(exit_code=0 if row["status"] == "ok" else 1)

    def publish_report(self, folder: str, name: str, table: list[list], files: list[str]) -> str | None:
        """Publish a report as a run: see trackers.Tracker. Returns the run's folder, or None without one."""
        import wandb

        title = f"{name[:100]}-report"
        self._start_run(Path(folder), "the report", name=title, job_type="report")
        if self.run is None:
            return None
        columns, *rows = table
        self.log_table("choices", columns, rows)
        artifact = wandb.Artifact(re.sub(r"[^\w.-]+", "_", title), type="report")
        for file in files:
            artifact.add_file(file)
        self.run.log_artifact(artifact)
        self._finish_run()
        return str(Path(self.run.dir).parent)

    @staticmethod
    def view_line(folder: Path, sweep: bool = False) -> str | None:
        below = f"{'*/' if sweep else ''}wandb/offline-run-*"
        if not list(folder.glob(below)):
            return None
        return printable(f"wandb    offline; to upload: {shell_command('wandb', 'sync', folder)}/{below}")

    def _start_run(self, folder: Path, what: str, id: str | None = None, **settings) -> None:
        """Start self.run in `folder`. If online mode fails, start it offline; if that fails too, it stays None.

        Each failure is a warning that `what` continues. A run with an earlier run's `id` resumes that run in W&B. A run
        that is offline although logger.mode=online gets a new id.
        """
        import wandb

        c = self.logger
        settings_of_run = {
            "silent": True,
            "console": "off",  # this process prints nothing
            "init_timeout": c.init_seconds,
            "finish_timeout": c.finish_seconds,
            "finish_timeout_raises": True,
            "x_stats_pid": os.getppid(),  # W&B's system metrics are of the run, not of this process
            "stop_fn": lambda: self.tell("stop"),  # the button in W&B's page of the run
        }
        for mode in ("online", "offline") if c.mode == "online" else ("offline",):
            try:
                wandb.setup(settings=wandb.Settings(silent=True))  # reads WANDB_*, and refuses a wrong value
                if mode == "online" and not wandb.login(prompt=False, verify=False):
                    raise wandb.errors.UsageError("no API key is configured: run `wandb login`")
                self.run = wandb.init(
                    mode=mode,
                    project=c.project,
                    entity=c.entity,
                    group=c.group,
                    tags=c.tags,
                    notes=c.notes,
                    id=id if mode == c.mode else None,
                    resume="allow",
                    dir=str(folder.resolve()),  # W&B's process may have another working directory
                    settings=wandb.Settings(**settings_of_run),
                    **settings,
                )
                return
            except Exception as error:  # W&B may raise anything
                where = "offline; `wandb sync` uploads it" if mode == "online" else "without W&B"
                self.tell("warn", f"{what} continues {where}: {explain(error)}")

    def _finish_run(self, exit_code: int | None = None) -> None:
        seconds = self.logger.finish_seconds
        if not self.run.offline:
            self.tell("say", f"wandb    uploading what is left, for at most {seconds} s")
        try:
            self.run.finish(exit_code=exit_code)
        except TimeoutError:
            rest = shell_command("wandb", "sync", Path(self.run.dir).parent)
            raise TimeoutError(f"the upload took more than {seconds} s; to upload the rest: {rest}") from None

    def _id(self, folder: Path) -> str:
        """Return W&B's id of the run in this folder, so that a resumed run is the same run in W&B."""
        path, identity, problem = folder / ".wandb-id", uuid.uuid4().hex[:12], None
        try:
            return str(read_json(path)["id"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, RecursionError) as error:
            problem = f"{path} cannot be read, so the run is a new one in W&B: {one_line(error)}"
        try:
            write_json(path, {"id": identity})
        except OSError as error:
            problem = f"{path} cannot be written, so a resumed run is a new one in W&B: {one_line(error)}"
        if problem:
            self.tell("warn", problem)
        return identity


class TensorBoard(Library):
    """`logger=tensorboard`: files of events in the run's folder, for TensorBoard."""

    title, install = "TensorBoard", "pip install '.[tensorboard]'"

    def start(self, folder: str, row: dict, last_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run logs the steps after its checkpoint again, so TensorBoard drops their first figures
        purge_step = last_step + 1 if last_step else None
        self.run = SummaryWriter(os.path.join(folder, "tensorboard"), purge_step=purge_step)

    def log(self, step: int, figures: dict) -> None:
        for key, value in figures.items():
            if isinstance(value, int | float):
                self.run.add_scalar(key, value, step)

    def log_table(self, name: str, columns: list[str], rows: list[list]) -> None:
        def cell(value) -> str:
            return str(value).replace("|", r"\|").replace("\n", "<br>")

        lines = [columns, ["---"] * len(columns), *([cell(value) for value in row] for row in rows)]
        self.run.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines))

    def finish(self, row: dict) -> None:
        self.log_table("row", ["key", "value"], [[key, value] for key, value in row.items()])
        self.run.close()

    @staticmethod
    def view_line(folder: Path, sweep: bool = False) -> str | None:
        return printable(f"board    {shell_command('tensorboard', '--logdir', folder)}")


LIBRARIES = {"wandb": Wandb, "tensorboard": TensorBoard}


def explain(error: BaseException) -> str:
    """Return one line of at most 300 characters, with the file of an OSError, which one_line() leaves out."""
    return " ".join(str(error).split())[:300] or type(error).__name__


class Popen(subprocess.Popen):
    """Starts each process in this process's group, so that one signal ends all. W&B would start it in a session."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options | {"start_new_session": False})


def serve(connection: socket.socket) -> None:
    """Do what the lines that arrive say, and answer each one, until one fails or the process of the run ends.

    The first line has the name and the config of the library, and each other line a method and its arguments.
    """

    def send(kind: str, value=None) -> None:
        with contextlib.suppress(OSError):  # the process of the run has ended
            connection.sendall(f"{json.dumps([kind, value])}\n".encode())

    lines = connection.makefile("rb")
    name, logger = json.loads(next(lines))
    library, is_running = LIBRARIES[name](SimpleNamespace(**logger), send), False
    signal.signal(signal.SIGALRM, end)
    with contextlib.suppress(ConnectionResetError):  # the run's process has ended, and has not read an answer
        for line in lines:
            # Nobody kills this process if the run's process is dead
            signal.setitimer(signal.ITIMER_REAL, library.logger.call_seconds)
            try:
                method, *arguments = json.loads(line)
                is_running = method not in ("finish", "publish_report")
                answer = getattr(library, method)(*arguments)
            except BaseException as error:  # a library may raise anything, and may exit
                send("fail", explain(error))
                return
            signal.setitimer(signal.ITIMER_REAL, 0)
            send("done", answer)
    if is_running:
        signal.setitimer(signal.ITIMER_REAL, library.logger.call_seconds)
        library.finish(KILLED)


def end(*_) -> None:
    """End this process, and all that it has started."""
    with contextlib.suppress(OSError):  # this process leads no group
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are for the run
    subprocess.Popen = Popen
    try:
        with socket.socket(fileno=int(sys.argv.pop(1))) as connection:
            connection.set_inheritable(False)
            serve(connection)
    finally:
        end()
