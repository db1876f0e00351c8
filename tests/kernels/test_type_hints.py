"""Every function of kernels/ has type hints for its parameters and its result."""

import ast
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"
# Triton and cuTile read the source of functions with the first three. functools.wraps gives its function the hints of
# another. TileLang reads the hints of parameters, and a kernel has no result
EXCLUDED = ("jit", "ct.kernel", "constexpr_function", "functools.wraps", "T.prim_func")
HELION = {  # compiled from the source
    "loss/_helion.py": ["cross_entropy"],
    "norm/_helion.py": ["norm_fwd", "norm_bwd"],
    "rope/_helion.py": ["rope"],
    "glu/_helion.py": ["swiglu_fwd", "swiglu_bwd"],
}


def without_hints(function: ast.FunctionDef) -> list[str]:
    """Return the names of the parameters without a type hint, and "return" if the result has none."""
    a = function.args
    parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    missing = [p.arg for p in parameters if p.annotation is None and p.arg not in ("self", "cls")]
    return missing if function.returns else [*missing, "return"]


def test_every_function_has_type_hints():
    found = {}
    for path in KERNELS.rglob("*.py"):
        file = path.relative_to(KERNELS).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or node.name in HELION.get(file, ()):
                continue
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            is_excluded = any(decorator.split("(")[0].endswith(EXCLUDED) for decorator in decorators)
            if not is_excluded and (missing := without_hints(node)):
                found[f"{file}:{node.lineno} {node.name}"] = missing
    assert found == {}
