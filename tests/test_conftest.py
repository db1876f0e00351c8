"""The patches of Triton's interpreter in tests/conftest.py work, and are still needed."""

import gc
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is not used on a GPU", allow_module_level=True)

import triton
from triton import language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import ReduceOps

ROOT = Path(__file__).parents[1]
calls = []


@triton.jit
def add_and_count(a, b):
    calls.append(1)
    return a + b


@triton.jit
def sum_kernel(x_ptr, sum_ptr, N: tl.constexpr):
    tl.store(sum_ptr, tl.reduce(tl.load(x_ptr + tl.arange(0, N)), 0, add_and_count))


def count_calls() -> int:
    """Sum the numbers 0 to 63 in the interpreter, and return how often it calls the function of tl.reduce()."""
    calls.clear()
    result = torch.zeros(1)
    sum_kernel[(1,)](torch.arange(64.0), result, 64)
    assert result.item() == 2016
    return len(calls)


def test_a_reduction_in_the_interpreter_halves_its_block():
    """A block of 64 is halved 6 times."""
    assert count_calls() == 6


def test_the_patch_of_reductions_is_still_needed(monkeypatch):
    """Triton's own method calls the function for each number after the first."""
    monkeypatch.setattr(ReduceOps, "generic_reduce", ReduceOps.generic_reduce.__wrapped__)
    assert count_calls() == 63, "Triton no longer calls the function for each number: delete reduce_halves()"


@triton.jit
def add_kernel(x_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(x_ptr + tl.arange(0, N), x + x)


def test_a_sum_of_integers_may_overflow(monkeypatch):
    """Also in Triton's own way, which checks for it, and uses the result only if options.debug is true."""
    for sanitize_overflow in (False, True):
        options = interpreter.InterpreterOptions(sanitize_overflow=sanitize_overflow)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
        x = torch.full((4,), 2**30, dtype=torch.int32)
        add_kernel[(1,)](x, 4)
        assert x.tolist() == [-(2**31)] * 4


def test_a_launch_patches_triton_language_once(monkeypatch):
    """Not in each of the 6 calls of a function from the kernel. It patches tl, tl.math, and two classes."""
    patched, patch_builtin = [], interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *args: patched.append(args[0]) or patch_builtin(*args))
    assert count_calls() == 6
    assert patched == [tl, tl.tensor, tl.math, tl.core.tensor_descriptor_base]


def test_equal_types_share_their_fields(monkeypatch):
    """So a launch that has been made once makes no new shapes."""
    count_calls()
    monkeypatch.setattr(tl.core, "_unwrap_shape", None)
    assert count_calls() == 6


def test_what_was_imported_is_freed_at_the_end_if_nanobind_is_in_it(request, monkeypatch):
    """Otherwise the tests' end is 50 lines about leaked types. Triton has nanobind since version 3.9."""
    plugins = request.config.pluginmanager.get_plugins()
    [conftest] = [plugin for plugin in plugins if getattr(plugin, "__file__", None) == str(ROOT / "tests/conftest.py")]
    kind = type("nb_type_0", (type,), {"__module__": "nanobind"})
    for builder, frozen in ((type("builder", (), {}), True), (kind("builder", (), {}), False)):
        gc.freeze()
        monkeypatch.setitem(sys.modules, "triton._C.libtriton", SimpleNamespace(ir=SimpleNamespace(builder=builder)))
        conftest.pytest_unconfigure()
        assert (gc.get_freeze_count() > 0) == frozen
    gc.freeze()
