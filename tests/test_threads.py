"""An exception in a thread of the program reaches the main thread, or is a warning of one line."""

import ast
import inspect
import multiprocessing
import os
import signal
import threading
from types import SimpleNamespace

import pytest
import requests
import torch
import torch.distributed as dist

from common.terminal import class_and_message
from data import loader, pipeline, tokenizer
from runtime.power import PowerMeter
from runtime.ranks import Ranks
from runtime.saver import Checkpoints
from runtime.signals import Signals
from runtime.watchdog import Watchdog
from tests.test_repo import ROOT, dotted, read_modules

STARTERS = {"Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "start_new_thread", "to_thread"}
CPU = torch.device("cpu")
CASES = {}  # "module: function that starts the thread" -> a function that makes the thread fail


def starts_of_threads(modules: dict[str, ast.Module]) -> set[str]:
    """Return "module: function" for each call that starts a thread or makes an executor, and each class of threads."""
    found = set()

    def visit(module: str, node: ast.AST, place: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            place = f"{place}.{node.name}".removeprefix(".")
        called = [node.func] if isinstance(node, ast.Call) else getattr(node, "bases", [])
        if any(dotted(name).rpartition(".")[2] in STARTERS for name in called):
            found.add(f"{module}: {place}")
        for child in ast.iter_child_nodes(node):
            visit(module, child, place)

    for module, tree in modules.items():
        visit(module, tree, "")
    return found


def test_each_thread_of_the_program_has_a_case():
    assert starts_of_threads(read_modules(ROOT)) == CASES.keys()


def test_the_check_finds_a_new_thread():
    source = (
        "class A:\n    def run(self):\n        threading.Thread(target=print).start()\nclass B(Thread):\n    pass\n"
    )
    assert starts_of_threads({"lab.a": ast.parse(source)}) == {"lab.a: A.run", "lab.a: B"}


class Fault(Exception):
    """An exception that no code of the repo expects."""


def fail(*_, **__):
    raise Fault("the disk\nis on fire")


REPORT = "Fault: the disk is on fire"


def raised(function, *arguments) -> str:
    """Return the class and the message of the fault that reaches the caller."""
    with pytest.raises(Fault) as error:
        function(*arguments)
    return class_and_message(error.value)


def run_threads(start) -> None:
    """Call start(), and wait for the threads that it starts."""
    before = set(threading.enumerate())
    start()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def case(place):
    return lambda function: CASES.setdefault(place, function)


@case("runtime.power: PowerMeter.__enter__")
def read_sensors(monkeypatch):
    monkeypatch.setattr("runtime.power.SAMPLE_SECONDS", 1e-3)
    meter = PowerMeter(CPU)
    meter.sensors = SimpleNamespace(sample=fail)
    run_threads(meter.__enter__)


@case("runtime.saver: Checkpoints.__init__")
def save_a_checkpoint(monkeypatch, tmp_path):
    """Both the allocation of host memory and the files."""
    monkeypatch.setattr(Checkpoints, "_allocate", fail)
    monkeypatch.setattr(Checkpoints, "_write", fail)
    with Checkpoints(tmp_path, 1, False, Ranks(), CPU) as checkpoints:
        checkpoints.allocate_host_copies({})
        assert raised(checkpoints.finish) == REPORT
        checkpoints.save(1, {}, {}, {"val_loss": None})
        return raised(checkpoints.close)


@case("runtime.watchdog: Watchdog.__init__")
def watch_the_job(monkeypatch):
    """It ends the process, with the reason in the row, because the main thread may wait for another rank for ever."""
    reasons, codes = [], []
    monkeypatch.setattr("runtime.watchdog.GRACE", 0)

    def end(code):
        codes.append(code)
        watchdog.done.set()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(Watchdog, "failure_reason", fail)
    monkeypatch.setattr(Watchdog, "report", fail)  # the store fails, too
    watchdog = Watchdog(0, 1)
    watchdog.on_stuck = reasons.append
    run_threads(lambda: watchdog.start(dist.HashStore(), None))
    assert (reasons, codes) == ([f"the watchdog of rank 0 failed: {REPORT}"], [1])


@case("runtime.signals: Signals.__enter__")
def record_the_end(monkeypatch):
    """It ends the process, because the main thread does not."""
    ended = threading.Event()
    monkeypatch.setattr("runtime.signals.HANDLER_SECONDS", 0)
    monkeypatch.setattr("runtime.signals.exit_at_once", ended.set)
    monkeypatch.setattr(Signals, "_handle", lambda *_: None)
    with Signals() as signals:
        signals.start_loop(fail)
        signals.looping = False
        signal.raise_signal(signal.SIGINT)
        assert ended.wait(60)


@case("lab.bench.compile_ahead: launches_only_compile")
def compile_a_kernel(monkeypatch):
    """The launch after the block raises the error again."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    from triton.runtime._async_compile import active_mode

    from lab.bench.compile_ahead import launches_only_compile

    with launches_only_compile():
        kernel = active_mode.get().submit("a key", fail, lambda kernel: None)
    return raised(kernel.result)


@case("data.loader: prefetch")
def read_batches():
    class Broken:
        shifts = ()
        __call__ = fail

    return raised(next, loader.prefetch(Broken(), 1, CPU))


@case("data.tokenizer: is_reachable")
def ask_a_server(monkeypatch):
    monkeypatch.setattr(requests, "head", fail)
    run_threads(lambda: tokenizer.is_reachable("https://nowhere.invalid", seconds=60))


@case("data.pipeline: worker_pool")
def tokenize():
    with pipeline.worker_pool(workers=1) as pool:
        return raised(list, pipeline.encode_in_order(pool, fail, iter([("text", 0)]), ahead=1))


@case("data.pipeline: initialize_worker")
def wait_for_the_parent(monkeypatch):
    """The worker process ends, which raises BrokenProcessPool in its parent: tests/data/test_pipeline.py."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(join=fail))
    run_threads(pipeline.initialize_worker)
    assert codes == [1]


@pytest.mark.parametrize("place", CASES)
def test_an_exception_in_a_thread_is_reported(place, request, monkeypatch, capsys):
    names = inspect.signature(CASES[place]).parameters
    report = CASES[place](**{name: request.getfixturevalue(name) for name in names}) or capsys.readouterr().err
    assert REPORT in report
    assert report.removesuffix("\n").count("\n") == 0
