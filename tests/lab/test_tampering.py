"""Which functions were replaced?"""

import time

import pytest
import torch

from kernels import check
from kernels.norm import eager
from lab import tampering
from lab.tampering import find_functions, functions_of, replaced_functions
from model.optim import TorchAdamW


def replaced(monkeypatch, owner, name):
    """The names that are reported while owner.name is another function."""
    before = find_functions()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *_, **__: None)
        return replaced_functions(before)


@pytest.mark.parametrize(
    ("owner", "name", "label"),
    [
        (time, "perf_counter", "time.perf_counter"),
        (torch, "randn", "torch.randn"),
        (torch, "allclose", "torch.allclose"),
        (torch.nn.functional, "layer_norm", "torch.nn.functional.layer_norm"),
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),
        (torch.cuda.Event, "elapsed_time", "torch.cuda.streams.Event.elapsed_time"),
        (torch.Tensor, "backward", "torch.Tensor.backward"),
        (check, "broken_rule", "kernels.check.broken_rule"),
        (eager, "norm", "kernels.norm.eager.norm"),
        (TorchAdamW, "update", "model.optim.TorchAdamW.update"),
    ],
)
def test_a_function_that_is_replaced_is_named(monkeypatch, owner, name, label):
    assert label in replaced(monkeypatch, owner, name)


def test_nothing_is_named_if_nothing_is_replaced(monkeypatch):
    """Also not after an import, which adds functions, and after other values of a module have changed."""
    before = find_functions()
    assert replaced_functions(before) == []
    monkeypatch.setattr(tampering, "new_function", lambda: None, raising=False)
    monkeypatch.setattr(check, "NEW_CONSTANT", 5, raising=False)
    assert replaced_functions(before) == []


def test_a_function_that_is_removed_is_named(monkeypatch):
    before = find_functions()
    monkeypatch.delattr(check, "broken_rule")
    assert "kernels.check.broken_rule" in replaced_functions(before)


def test_a_method_is_found_in_the_module_of_its_class_only():
    """A class that a module imports would be named once for each module."""

    class Here:
        def method(self):
            pass

    Here.__module__ = "some.module"
    members = {"Here": Here, "constant": 5, "function": test_a_method_is_found_in_the_module_of_its_class_only}
    names = dict(functions_of("some.module", members))
    assert {"some.module.Here", "some.module.Here.method", "some.module.function"} <= names.keys()
    assert "some.module.constant" not in names
    assert dict(functions_of("another.module", members)).keys() == {"another.module.Here", "another.module.function"}
