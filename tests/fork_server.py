"""A process that has imported torch, and forks for each Python program that a test starts.

To import torch, its compiler and Hydra takes 3 to 5 s of CPU time, which is most of the time of a short program. With
the fixture `quick_python`, sys.executable is a small script. It runs client(), which gives the program's arguments,
folder, environment and open files to serve(). The server forks, and the fork runs the program. The server itself
imports no module of the repo, so the program imports the rooms anew, from its own folder.

The client passes signals on, and ends as the program ends. If the client is killed, the program is killed too.
"""

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import importlib
import io
import itertools
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from pathlib import Path

# What most programs import. torch._dynamo imports Triton, which then has the server's TRITON_INTERPRET
MODULES = "numpy", "torch._dynamo", "torch.utils.checkpoint", "torch.distributed.launcher.api"
MODULES += "safetensors.torch", "hydra.main"
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
HIGH = 500  # no program here opens so many files
SELDOM = 20_000  # new objects from one garbage collection to the next. After 700, it is a tenth of a quick command


def start(folder: Path) -> tuple[subprocess.Popen, Path]:
    """Start a server, which ends with this process. Return it, and the script that takes the place of sys.executable.

    The files of both are in `folder`.
    """
    address, script = folder / "socket", folder / "python"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(100)  # clients wait until the server has imported its modules
        server = subprocess.Popen(
            [sys.executable, "-P", __file__, "serve", str(listener.fileno())],
            stdin=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {__file__} client {address} "$0" "$@"\n')
    script.chmod(0o755)
    return server, script


def client(address: str, *argv: str) -> None:
    """Let the server run the program `argv`, and end as the program ends."""
    program, early = None, []  # the program's number, and the signals before it is known

    def pass_on(number: int, *_) -> None:
        if program is None:
            early.append(number)
            return
        with contextlib.suppress(ProcessLookupError):  # the program has just ended
            os.kill(program, number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    files = [number for number in range(HIGH) if number != server.fileno() and is_open(number)]
    request = {"argv": argv, "folder": os.getcwd(), "environment": dict(os.environ), "files": files}
    request = json.dumps(request).encode()
    socket.send_fds(server, [struct.pack("i", len(request))], files)
    server.sendall(request)
    [program] = struct.unpack("i", server.recv(4))
    for number in early:
        pass_on(number)
    [code] = struct.unpack("i", server.recv(4))
    if code < 0:
        if -code in SIGNALS:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def is_open(number: int) -> bool:
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def serve(listener: socket.socket) -> dict:
    """Fork twice for each client, until stdin closes. Return the request in each program's process.

    The first fork waits for the program and for the client.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps the first forks
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            break
        connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    header, files, _, _ = socket.recv_fds(connection, 4, HIGH)
    [size] = struct.unpack("i", header)
    request = json.loads(connection.recv(size, socket.MSG_WAITALL))
    pid = os.fork()
    if pid == 0:
        high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, HIGH) for number in files]
        for owner in (listener, connection):
            owner.detach()  # or its end would close a file of the program that has the same number
        os.closerange(0, HIGH)
        for number, original in zip(high, request["files"], strict=True):
            os.dup2(number, original)
            os.close(number)
        return request
    for number in files:
        os.close(number)
    with contextlib.suppress(BrokenPipeError):  # the client was killed: select() finds that, too
        connection.sendall(struct.pack("i", pid))
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, connection], [], [])[0]:  # the client has closed the connection
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(struct.pack("i", code))
    os._exit(0)


def run(argv: list[str], folder: str, environment: dict[str, str], files: list[int]) -> None:
    """Run argv, which is "python", its options, -m MODULE or -c CODE or SCRIPT, and the program's arguments."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable, *words = argv
    # -B and -u, which multiprocessing and torchrun pass on, and -P of a judge's worker
    options = list(itertools.takewhile(lambda word: word.startswith("-") and word not in ("-m", "-c"), words))
    words = words[len(options) :]
    open_streams(unbuffered="-u" in options or bool(os.environ.get("PYTHONUNBUFFERED")))
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    multiprocessing.set_executable(sys.executable)
    multiprocessing.process.ORIGINAL_DIR = folder
    kind = words.pop(0) if words[0] in ("-m", "-c") else "script"
    sys.argv = ["-c", *words[1:]] if kind == "-c" else words
    paths = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if "-P" not in options:
        paths.insert(0, {"-m": folder, "-c": "", "script": str(Path(words[0]).resolve().parent)}[kind])
    sys.path[:0] = paths
    if kind == "-m":
        runpy._run_module_as_main(words[0])
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        code, file = words[0], "<string>"
        if kind == "script":
            main.__file__ = file = os.path.abspath(words[0])
            code = Path(file).read_bytes()
        exec(compile(code, file, "exec"), main.__dict__)


def speed_up_hydra() -> None:
    """Let a program compose its config once, without copies of all groups. This halves the 0.3 s of a composition."""
    from hydra._internal.hydra import Hydra
    from hydra.core.config_store import ConfigStore

    get_mode = Hydra.get_mode
    # Hydra composes the config a first time to read hydra.mode, which only the files of configs/sweep set
    Hydra.get_mode = lambda self, config_name, overrides: (
        get_mode(self, config_name, overrides) if "sweep" in "".join(overrides) else None
    )
    # Hydra copies what reads configs, with the store, for each composition, and for each group that --help lists
    ConfigStore.__deepcopy__ = lambda self, copies: self


def run_and_exit(**request) -> None:
    """Run a program, and end the process without freeing the modules, which takes 1 s."""
    code = 0
    try:
        run(**request)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream and not stream.closed:
                stream.flush()
    finally:
        os._exit(code)


def open_streams(unbuffered: bool) -> None:
    """Open sys.stdin, stdout and stderr anew, because a terminal and Python's option -u change how they buffer."""
    sys.stdin = open(0, closefd=False) if is_open(0) else None  # noqa: SIM115, open until the end
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        if not is_open(number):
            setattr(sys, name, None)
            continue
        lines = number == 2 or os.isatty(number)
        binary = open(number, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(binary, errors=errors, line_buffering=lines, write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    if sys.argv[1] == "client":
        client(*sys.argv[2:])
    listener = socket.socket(fileno=int(sys.argv[2]))
    gc.disable()  # collections during these imports take 1 s
    for module in MODULES:
        importlib.import_module(module)
    speed_up_hydra()
    gc.freeze()  # a garbage collection in a fork then passes over these modules
    gc.enable()
    gc.set_threshold(SELDOM)
    run_and_exit(**serve(listener))
