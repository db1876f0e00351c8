"""Run untrusted code in a worker: a process that imports a copy of the repo, and has a folder and caches of its own.

The worker gets the strongest isolation that works on this machine:

    bubblewrap, unshare   Linux namespaces. The worker sees no other process and has no network. Every file outside of
                          its folder is read-only; if root starts it, it may still write to some files in /dev, /proc
                          and /sys. When it ends, Linux ends all processes that it started.
    a process             without namespaces. The judge finds the processes that it leaves behind by a variable in their
                          environment.

README.md lists what no isolation here prevents.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import re
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from socket import socketpair

from common.files import open_regular, read_bytes
from kernels.tuned import user_cache
from lab.channel import CHANNEL, FOLDER, read_answer, send_message
from runtime.folders import COMPILE_CACHES, cache_variables

ROOT = Path(__file__).parents[2]
ROOMS = ("common", "configs", "data", "hotswap", "kernels", "lab", "model", "runtime", "scripts", "train.py")
IGNORED = "__pycache__", ".*"
MOST_CODE_BYTES = 2**24  # of a file
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)  # variables that no worker needs
MARK = "HOTSWAP_WORKER"  # the variable in the environment of a worker and of the processes that it starts
COMPILED = [name.lower() for name in COMPILE_CACHES]  # they stay for the next worker in the same folder
NAMESPACES = "user, PID, network and mount namespaces"
PROCESSES = "a process of its own, without namespaces"

# This script runs in the new mount namespace. It makes all mounts read-only except the worker's folder, /proc, /sys and
# /dev. Then it gives up its capabilities, so the worker cannot make them writable again
READ_ONLY = r"""
set -e
mount --make-rprivate /
mount --bind "$0" "$0"
mounts=$(cut -d " " -f 2 /proc/self/mounts)
for target in $mounts; do
    case "$target" in
        "$0" | /proc* | /sys* | /dev*) ;;
        *) mount -o remount,bind,ro "$target" || test "$target" != / ;;
    esac
done
mount -t tmpfs tmpfs /dev/shm
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""


def prefixes(folder: Path) -> dict[str, list[str]]:
    """Return {isolation: the words in front of a command that may write to `folder` only}, the strongest first."""
    bubblewrap = ["bwrap", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--tmpfs", "/dev/shm"]
    bubblewrap += ["--proc", "/proc", "--bind", str(folder), str(folder), "--cap-drop", "ALL", "--die-with-parent"]
    bubblewrap += ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--"]
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    unshare += ["--mount", "--net", "--ipc", "sh", "-c", READ_ONLY, str(folder)]
    return {f"bubblewrap: {NAMESPACES}": bubblewrap, f"unshare: {NAMESPACES}": unshare, PROCESSES: []}


@functools.cache
def isolation() -> str:
    """Return the strongest isolation under which a trial command can write inside of its folder, and not outside."""
    with tempfile.TemporaryDirectory() as outside, tempfile.TemporaryDirectory() as inside:
        test = ["sh", "-c", f"touch {inside}/yes; touch {outside}/no; true"]
        for name, prefix in prefixes(Path(inside)).items():
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run([*prefix, *test], capture_output=True, timeout=20, stdin=subprocess.DEVNULL)
            yes, no = Path(inside, "yes"), Path(outside, "no")
            if yes.exists() and not no.exists():
                return name
            for path in (yes, no):
                path.unlink(missing_ok=True)
    return PROCESSES


def copy_repo(target: Path) -> None:
    """Copy the code of the repo into the folder `target`. A worker imports the rooms from this copy."""
    for name in ROOMS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns(*IGNORED))
        elif source.exists():
            shutil.copy(source, target / name)


def digest_repo(folder: Path = ROOT, known: dict[str, str] | None = None) -> dict[str, str]:
    """Return {path in the repo: SHA-256} of the code in a checkout or in a copy.

    With `known`, an earlier result, other files are not read: a worker may put any number of files into its copy.
    """
    files = [path for name in ROOMS for path in (folder / name, *(folder / name).rglob("*"))]
    files = [path for path in files if path.is_file() and "__pycache__" not in path.parts]
    names = {os.fsencode(path.relative_to(folder)).decode(errors="replace"): path for path in sorted(files)}
    return {name: digest_file(path) if known is None or name in known else "new" for name, path in names.items()}


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file, or why it cannot be read: a worker may make it as large as it likes."""
    try:
        return hashlib.sha256(read_bytes(path, MOST_CODE_BYTES)).hexdigest()
    except OSError as error:
        return str(error.strerror)


def stamp_packages() -> dict[str, str]:
    """Return {path: size and ctime} of Python's own and the installed packages, if workers may write to them.

    Linux sets a file's ctime at each change, and no program can set it. So it also shows a file that was restored.
    """
    if isolation() != PROCESSES:
        return {}
    folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    paths = [Path(root, name) for folder in folders for root, _, names in os.walk(folder) for name in names]
    stamps = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # a temporary file of another program
            stamp = path.lstat()
            stamps[str(path)] = f"{stamp.st_size} {stamp.st_ctime_ns}"
    return stamps


def changed_packages(before: dict[str, str]) -> list[str]:
    """Return the sorted paths that changed since stamp_packages() returned `before`. New files are no change."""
    after = stamp_packages() if before else {}
    return sorted(path for path, stamp in before.items() if after.get(path) != stamp)


def changed_files(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the sorted paths that differ between two results of digest_repo()."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


class Ended(Exception):
    """The worker ended, broke the protocol, or did not answer in time. The message says how, in one line."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))  # what a worker wrote may have line breaks


class Sandbox:
    """A context manager that runs one worker: `python *words`.

    The worker may write into `folder`, which holds `repo` (its copy of the repo), its caches and log.txt. At the end
    the judge kills the worker and all processes that it started. The answers are JSON and raw tensors, because a pickle
    could run code here. `limit` is the time of one answer, in seconds. With `shows_output`, the worker's output goes to
    the terminal.
    """

    def __init__(self, words: list[str], folder: Path, limit: float, shows_output: bool = False):
        self.folder, self.limit, self.shows_output = folder.resolve(), limit, shows_output
        self.words, self.repo = words, self.folder / "repo"
        self.mark, self.log = secrets.token_hex(8), self.folder / "log.txt"

    def __enter__(self) -> "Sandbox":
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():  # an earlier worker may have left links, which lead out of the folder
            if path.name not in COMPILED or path.is_symlink() or not path.is_dir():
                remove(path)
        self.repo.mkdir()
        copy_repo(self.repo)
        self.digest = digest_repo(self.repo)
        self.channel, theirs = socketpair()
        variables = self.variables() | {CHANNEL: str(theirs.fileno())}
        command = [*prefixes(self.folder)[isolation()], sys.executable, "-P", *self.words]
        with theirs, open_regular(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=None if self.shows_output else log,
                stderr=log,
                env=variables,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return self

    def variables(self) -> dict[str, str]:
        """Return the worker's environment: its own caches, its copy of the repo first in PYTHONPATH, no passwords."""
        variables = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
        caches = {name: self.folder / name for name in ("home", "tmp", "cache", *COMPILED)}
        for path in caches.values():
            path.mkdir(exist_ok=True)
        tuned = user_cache() / "tuned"  # the launch parameters of this machine
        if tuned.is_dir():
            shutil.copytree(tuned, caches["cache"] / user_cache().name / "tuned", dirs_exist_ok=True)
        paths = [str(self.repo), *filter(None, [variables.get("PYTHONPATH")]), os.getcwd()]
        variables |= {"HOME": str(caches["home"]), "TMPDIR": str(caches["tmp"]), "XDG_CACHE_HOME": str(caches["cache"])}
        variables |= {**cache_variables(self.folder), "PYTHONPATH": os.pathsep.join(paths)}
        variables |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        return variables | {MARK: self.mark, FOLDER: str(self.folder)}

    def __exit__(self, *_) -> None:
        self.kill()
        self.channel.close()

    def kill(self) -> None:
        """End the worker and all processes that it started."""
        for _ in range(3):  # a process may start another one while the first is killed
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            for pid in marked_processes(self.mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def send(self, message: object) -> None:
        """Send a message as a pickle. Raises Ended if the worker has ended, or does not read it within `limit`."""
        try:
            send_message(self.channel, pickle.dumps(message), self.limit)
        except OSError:
            raise Ended(self.describe_end()) from None

    def ask(self, *message: object) -> dict:
        """Send a message, and return the answer."""
        self.send(message)
        return self.receive()

    def receive(self, limit: float | None = None) -> dict:
        """Return the worker's next answer. Raises Ended if there is none within `limit` seconds, or if it ends."""
        limit = self.limit if limit is None else limit
        try:
            return read_answer(self.channel, limit)
        except TimeoutError:
            raise Ended(f"no answer within {limit:g} s") from None
        except (ValueError, RecursionError):
            raise Ended("its answer is not JSON") from None
        except (EOFError, OSError):
            raise Ended(self.describe_end()) from None

    def describe_end(self) -> str:
        """Return how the worker ended, with the last line that it printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        code = self.process.poll()
        how = "it closed its channel" if code is None else describe_code(code)
        last = last_line(self.log)
        return f"the process ended, {how}{': ' + last if last else ''}"

    def changed_files(self) -> list[str]:
        """Return the files of its copy of the repo that the worker changed."""
        return changed_files(self.digest, digest_repo(self.repo, self.digest))

    def copy_file(self, name: str, target: Path) -> None:
        """Copy a file that the worker wrote. Raises Ended if it is no regular file, or too large for the disk."""
        try:
            with open_regular(self.folder / name) as source, open_regular(target, "wb") as copy:
                size = os.fstat(source.fileno()).st_size
                if size > shutil.disk_usage(target.parent).free // 2:
                    raise Ended(f"its file {name} has {size / 1e9:.3g} GB, more than half of the free disk")
                while size > 0 and (part := source.read(min(size, 2**24))):  # the file may grow while it is copied
                    copy.write(part)
                    size -= len(part)
        except OSError as error:
            raise Ended(f"it wrote no readable file {name}: {error}") from None

    def read_file(self, name: str, at_most: int) -> bytes:
        """Return the content of a file that the worker wrote. Raises Ended if it is no regular file, or too large."""
        try:
            return read_bytes(self.folder / name, at_most)
        except OSError as error:
            raise Ended(f"it wrote no readable file {name}: {error}") from None


def describe_code(code: int) -> str:
    """Describe an exit code. After a signal it is negative, and bubblewrap makes it 128 + the number."""
    number = -code if code < 0 else code - 128
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(number).name}"
    return f"exit code {code}"


def last_line(log: Path) -> str:
    """Return the last line in a log, at most 200 characters; "" without one."""
    with contextlib.suppress(OSError):
        lines = read_bytes(log)[-(2**16) :].decode(errors="replace").splitlines()
        # faulthandler prints the stack and the loaded modules last
        messages = [line for line in lines if line.strip() and not line.startswith((" ", "Extension modules"))]
        return messages[-1][:200] if messages else ""
    return ""


def marked_processes(mark: str) -> Iterator[int]:
    """Yield the ids of the processes with this mark in their environment.

    Only a worker without namespaces leaves such processes behind.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in read_bytes(folder / "environ"):
                yield int(folder.name)
