"""Launches of kernels pass keywords: the names of a kernel's arguments stand where it is called."""

import ast
import re
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"
MOST_POSITIONAL = 9


def long_launches(source: str) -> list[str]:
    """Return the launches kernel[grid](...) and launch(...) with many positional arguments, or with *arguments."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    launches = [call for call in calls if isinstance(call.func, ast.Subscript) or name_of(call.func) == "launch"]
    return [
        f"line {call.lineno}: {ast.unparse(call.func)}"
        for call in launches
        if len(call.args) > MOST_POSITIONAL or any(isinstance(argument, ast.Starred) for argument in call.args)
    ]


def name_of(function: ast.expr) -> str | None:
    return getattr(function, "attr", getattr(function, "id", None))


def test_launches_of_many_arguments_pass_keywords():
    files = {path.relative_to(KERNELS).as_posix(): path for path in KERNELS.rglob("*.py")}
    launches = {name: long_launches(path.read_text(encoding="utf-8")) for name, path in files.items()}
    assert {name: found for name, found in launches.items() if found} == {}


@pytest.mark.parametrize(
    ("call", "is_long"),
    [
        ("kernel[grid](a, b, c, d, e, f, g, h, i, N=10)", False),
        ("kernel[grid](a, b, c, d, e, f, g, h, i, j)", True),
        ("kernel[grid](*tensors, N=10)", True),
        ("kernel[grid](x_ptr=x, **launch)", False),
        ("step.launch(kernel, grid, *tensors)", True),
    ],
)
def test_which_launches_are_long(call, is_long):
    assert bool(long_launches(call)) == is_long


CUTILE = ["_cutile_sums", "norm/cutile", "linear/cutile", "attention/cutile", "loss/cutile"]
LANGUAGES = [*CUTILE, "tilelang", "norm/tilelang", "linear/tilelang", "attention/tilelang"]


@pytest.mark.parametrize("name", LANGUAGES)
def test_launches_in_cutile_and_tilelang_have_the_order_of_the_parameters(name):
    """These languages take no names, so the file's launch() passes the values in the order of its keywords."""
    folder, _, file = name.rpartition("/")
    kernels = KERNELS / folder / {"tilelang": "_tilelang_sums.py"}.get(name, f"_{file.lstrip('_')}.py")
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in {kernels, KERNELS / f"{name}.py"}]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    decorators = r"ct\.kernel|T\.prim_func"
    parameters = [
        [parameter.arg for parameter in node.args.args]
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and any(re.match(decorators, ast.unparse(decorator)) for decorator in node.decorator_list)
    ]
    launches = [node for node in nodes if isinstance(node, ast.Call) and name_of(node.func) == "launch"]
    launches = [[keyword.arg for keyword in call.keywords] for call in launches if call.keywords]
    assert parameters
    assert {*map(tuple, launches)} == {*map(tuple, parameters)}
