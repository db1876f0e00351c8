"""A backend outside this repo: a file, a module, an entry point of an installed package."""

import os
import sys
from importlib.metadata import EntryPoint

import pytest
import torch

from kernels import lookup, names, registry
from kernels.lookup import backend, check_name, files, impls, short_name, source, source_file
from kernels.registry import AttnConfig, KernelError, KernelsConfig, describe, label, load

CPU = torch.device("cpu")
NORM = "from kernels.norm import reference\n\n\ndef norm(x, residual, weight, bias, eps=1e-5):\n    return x, x\n"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The current folder, with mine/fast.py, and the package hotswap_toy, whose entry point norm.quick is a norm."""
    for name in ("mine/fast.py", "hotswap_toy/quick.py", "hotswap_toy/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(NORM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    points = {"norm.quick": "hotswap_toy.quick", "norm.eager": "hotswap_toy.quick", "mlp": "x", "norm.a.b": "x"}
    monkeypatch.setattr(
        lookup,
        "entry_points",
        lambda group: [EntryPoint(name, module, group) for name, module in points.items()],
    )
    lookup.installed.cache_clear()
    yield tmp_path
    lookup.installed.cache_clear()
    for name in [name for name in sys.modules if name.startswith(("hotswap_toy", "backend_"))]:
        del sys.modules[name]


@pytest.mark.parametrize("impl", ["mine/fast.py", "./mine/fast.py", "hotswap_toy.quick", "quick"])
def test_a_backend_outside_the_repo_loads_and_is_named_as_it_was_typed(folder, impl):
    assert KernelsConfig(norm=impl).norm == impl
    module = backend("norm", impl)
    assert load("norm", impl, CPU).__wrapped__ is module.norm
    assert backend("norm", impl) is module  # imported once, because custom operators are defined once
    assert sys.modules[module.__name__] is module
    assert describe("norm", impl) == f"{impl} (torch {torch.__version__})"
    assert source_file("norm", impl).is_relative_to(folder)
    assert source_file("norm", impl).read_text() == NORM


def test_an_absolute_path_is_the_same_module_as_a_relative_one(folder):
    assert backend("norm", str(folder / "mine/fast.py")) is backend("norm", "mine/fast.py")


def test_a_path_into_this_repo_is_the_backend_of_this_repo():
    path = os.path.relpath(lookup.ROOT / "norm/eager.py")
    assert backend("norm", path) is backend("norm", "eager")


def test_entry_points_are_backends_like_files(folder):
    """A file comes first. Entry points of other ops and with other names are left out."""
    assert impls("norm") == sorted([*files("norm"), "quick"])
    assert impls("mlp") == files("mlp")
    assert backend("norm", "eager").__name__ == "kernels.norm.eager"
    assert names.config_groups()["kernels"]["quick"]["norm"] == "quick"
    assert ", quick, " in names.backend_names()["backends"]["table"]
    assert source("norm", "quick") == "hotswap_toy.quick"


@pytest.mark.parametrize(
    ("impl", "message"),
    [
        (
            "mine/slow.py",
            "kernels.norm=mine/slow.py: no file mine/slow.py in {folder}; the path of a backend ends in .py",
        ),
        ("mine/fast", "kernels.norm=mine/fast: no file mine/fast in {folder}; the path of a backend ends in .py"),
        (
            "~nobody-here/mine.py",
            "kernels.norm=~nobody-here/mine.py: no file ~nobody-here/mine.py in {folder}; the path",
        ),
        ("mine.fast.py.x", "kernels.norm=mine.fast.py.x: ModuleNotFoundError: No module named 'mine.fast.py'"),
        ("hotswap_toy.slow", "kernels.norm=hotswap_toy.slow: no module hotswap_toy.slow; install its package, or add"),
        ("no_such_package.fast", "kernels.norm=no_such_package.fast: ModuleNotFoundError: No module named 'no_such_"),
        ("..", "kernels.norm=..: "),
        (
            "hotswap_toy.parts",
            "kernels.norm=hotswap_toy.parts: this is a folder without __init__.py; name a module in it",
        ),
    ],
)
def test_a_backend_that_does_not_exist_is_an_error_of_one_line(folder, impl, message):
    (folder / "hotswap_toy/parts").mkdir()
    with pytest.raises(KernelError) as error:
        check_name("norm", impl, "kernels.norm")
    assert str(error.value).startswith(message.format(folder=folder))
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_imported_is_named_and_can_be_repaired(folder):
    (folder / "mine/broken.py").write_text("import no_such_package\n" + NORM)
    for _ in range(2):
        with pytest.raises(KernelError) as error:
            load("norm", "mine/broken.py", CPU)
        assert str(error.value) == (
            "mine/broken.py cannot be imported (ModuleNotFoundError: No module named 'no_such_package'): "
            "python -c 'import runpy; runpy.run_path(\"mine/broken.py\")' shows where"
        )
    (folder / "mine/broken.py").write_text(NORM + "\n")
    assert load("norm", "mine/broken.py", CPU).__name__ == "norm"


def test_a_file_without_the_function_and_a_function_without_an_argument_are_named(folder):
    with pytest.raises(KernelError) as error:
        load("mlp", "mine/fast.py", CPU)
    assert str(error.value) == "mine/fast.py defines no function mlp(...); kernels/mlp/__init__.py shows it"
    reason = registry.missing_argument(load("norm", "mine/fast.py", CPU), "wings", "norm")
    assert reason.startswith("mine/fast.py takes no wings (kernels/norm/__init__.py): choose kernels.norm=")


def test_the_label_of_a_path_is_the_name_of_its_file(folder):
    (folder / "plain.py").write_text("def attention(q, k, v, *, causal=True, scale=None):\n    return q\n")
    called = "norm", "mlp", "loss"
    chosen = label(KernelsConfig(norm="mine/fast.py"), AttnConfig("./plain.py"), called)
    assert chosen == "norm.fast.py+mlp.eager+loss.eager-plain.py"
    assert short_name("hotswap_toy.quick") == "hotswap_toy.quick"
