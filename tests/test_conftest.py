"""The patches of Triton's interpreter in tests/interpreter.py work, and are still needed; also one of Hydra."""

import gc
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is not used on a GPU", allow_module_level=True)

import triton
from triton import language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import ReduceOps

from tests.test_train import config

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


@triton.jit
def operators_kernel(x_ptr, y_ptr, stride, N: tl.constexpr):
    """Combine blocks, columns, rows, scalars and numbers of several dtypes."""
    row, column = tl.arange(0, 4)[:, None], tl.arange(0, N)[None, :]
    offsets = row.to(tl.int64) * stride + column
    mask = ((row < 3) & (column >= 1)) | (row == column)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    y = (x * tl.load(x_ptr) - 0.1) * x + (2 - x) * (row != 1)
    y = y.to(tl.float32) * 1e-3 + (column & 3) - tl.sum(x, 0)
    tl.store(offsets + y_ptr, y.to(tl.float16), mask=offsets <= 4 * N - 2)


def run_operators(dtype):
    x, y = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 8, dtype=torch.float16)
    operators_kernel[(1,)](x.to(dtype), y, 8, 8)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_short_ways_of_operators_change_no_bits(dtype, monkeypatch):
    short = run_operators(dtype)
    for owner, name in (
        (interpreter, "_patch_lang_tensor"),
        *((tl.semantic.TritonSemantic, name) for name in ("broadcast_impl_value", "cast", "arange")),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    assert short.abs().sum() > 0
    assert torch.equal(short, run_operators(dtype))


def test_simple_operators_take_the_short_way(monkeypatch):
    """So no types are checked for x + x, nor for the addition of a pointer and an offset."""
    monkeypatch.setattr(tl.semantic.TritonSemantic, "binary_op_type_checking_impl", None)
    x = torch.ones(4)
    add_kernel[(1,)](x, 4)
    assert x.tolist() == [2.0] * 4


def test_a_second_config_reads_no_file(monkeypatch):
    config("model.n_layer=1")
    monkeypatch.setattr(OmegaConf, "load", None)
    assert config("model.n_layer=2").model.n_layer == 2


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
