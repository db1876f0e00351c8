"""Count the lines of kernel code that a choice of backends needs, for the tables of rungs in README.md."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from common.files import read_text
from kernels.lookup import ROOT, source_file

CUDA_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
CUDA_INCLUDE = re.compile(r'^#include "(.+\.cuh)"', re.MULTILINE)  # a .h is for the CPU's emulator
KERNEL_DECORATOR = re.compile(r"(\w+\.)?jit\b|helion\.kernel\b")
Line = tuple[Path, int]  # a file, and the number of a line with code


def kernel_lines(impls: dict[str, str]) -> dict[str, int]:
    """Return op -> the lines of code of its backend, for {op: backend}. A line that several ops need counts once.

    A backend's code is its file, its CUDA source, and the definitions of other files in kernels/ that it uses. Blank
    lines, comments and docstrings do not count, and neither do an op's contract and the files beside the ops' folders
    that define no kernel, such as registry.py. A backend without a kernel has 0 lines: the kernels are PyTorch's or a
    library's.
    """
    counted: set[Line] = set()
    lines = {}
    for op, impl in impls.items():
        found = backend_lines(source_file(op, impl))
        lines[op] = len(found - counted)
        counted |= found
    return lines


@functools.cache
def backend_lines(backend: Path) -> frozenset[Line]:
    """Return the lines of a backend's code; none if no file among them defines a kernel."""
    body = read_source(backend).body
    used = {(backend, number) for number in range(len(body))}
    names = {name for number in range(len(body)) for name in names_used(backend, number)}
    names |= {name for statement in body for name in names_imported(statement)}  # some are for registry.py alone
    followed: set[tuple[Path, str]] = set()
    while names - followed:
        path, name = (names - followed).pop()
        followed.add((path, name))
        if path == backend or is_kernel_code(path):
            found = {(path, number) for number in statements_of(path, name)} - used
            used |= found
            names |= {each for statement in found for each in names_used(*statement)}
            names |= {imported_names(path)[name]} if name in imported_names(path) else set()
    files = {path for path, _ in used}
    if not any(map(defines_kernel, files)):
        return frozenset()
    cuda = {source for path in files for source in cuda_files(path.with_suffix(".cu"))}
    code = {(path, line) for path, number in used for line in code_lines(path, read_source(path).body[number])}
    return frozenset(code | {(path, line) for path in cuda for line in cuda_lines(path)})


@functools.cache
def read_source(path: Path) -> ast.Module:
    return ast.parse(read_text(path))


def is_kernel_code(path: Path) -> bool:
    """Return whether a file of kernels/ is in an op's folder and not its contract, or defines a kernel."""
    in_op = len(path.relative_to(ROOT).parts) > 1 and path.name != "__init__.py"
    return in_op or defines_kernel(path)


@functools.cache
def defines_kernel(path: Path) -> bool:
    """Return whether a function has the decorator triton.jit, gluon.jit or helion.kernel, or CUDA source is beside."""
    functions = [node for node in ast.walk(read_source(path)) if isinstance(node, ast.FunctionDef)]
    decorators = [ast.unparse(decorator) for function in functions for decorator in function.decorator_list]
    return any(map(KERNEL_DECORATOR.match, decorators)) or path.with_suffix(".cu").is_file()


@functools.cache
def names_bound(path: Path, number: int) -> frozenset[str]:
    """Return the names that a statement at the top of a file defines or imports."""
    statement = read_source(path).body[number]
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return frozenset({statement.name} - {"_"})
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(statement):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return frozenset(names)


@functools.cache
def names_used(path: Path, number: int) -> frozenset[tuple[Path, str]]:
    """Return (file, name) of each name that a statement at the top of a file uses: of this file, and of kernels/.

    Of a module that it uses as a value, as in `(_few if step.few else _many).product()`, these are all names.
    """
    modules = imported_modules(path)
    statement = read_source(path).body[number]
    if isinstance(statement, ast.ImportFrom):
        return frozenset()  # another statement uses some of these names
    nodes = list(ast.walk(statement))
    names = {(path, node.id) for node in nodes if isinstance(node, ast.Name)}
    owners = {id(node.value): node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        names |= names_imported(node)
        if isinstance(node, ast.Name) and node.id in modules:
            module = modules[node.id]
            names |= {(module, name) for name in ([owners[id(node)]] if id(node) in owners else all_names(module))}
    return frozenset(names)


def all_names(path: Path) -> set[str]:
    return {name for number in range(len(read_source(path).body)) for name in names_bound(path, number)}


def names_imported(node: ast.AST) -> set[tuple[Path, str]]:
    """Return (file, name) of each name that a statement imports from a module of kernels/."""
    module = module_file(node.module) if isinstance(node, ast.ImportFrom) else None
    return {(module, alias.name) for alias in node.names} if module else set()


@functools.cache
def imported_names(path: Path) -> dict[str, tuple[Path, str]]:
    """Return name -> (file, name there) of the names that a file imports from modules of kernels/."""
    names = {}
    for node in ast.walk(read_source(path)):
        if found := names_imported(node):
            [module] = {module for module, _ in found}
            names |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
    return names


@functools.cache
def imported_modules(path: Path) -> dict[str, Path]:
    """Return name -> file of the modules of kernels/ that a file imports: `from kernels.mlp import _fp8`."""
    modules = {}
    for node in ast.walk(read_source(path)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if module := module_file(f"{node.module}.{alias.name}"):
                    modules[alias.asname or alias.name] = module
    return modules


@functools.cache
def module_file(module: str | None) -> Path | None:
    """Return the file of a module of kernels/; None for any other module."""
    first, *parts = (module or "").split(".")
    if first != ROOT.name:
        return None
    folder = ROOT.joinpath(*parts)
    return next(filter(Path.is_file, (folder.with_suffix(".py"), folder / "__init__.py")), None)


@functools.cache
def statements_of(path: Path, name: str) -> list[int]:
    """Return the statements at the top of a file that define a name, and those that only register it with PyTorch.

    Such a statement defines no name: `@forward.register_fake def _(...)`, `forward.register_autograd(...)`.
    """
    numbers = []
    for number in range(len(read_source(path).body)):
        bound = names_bound(path, number)
        registers = not bound and (path, name) in names_used(path, number) and defines_function(path, name)
        if name in bound or registers:
            numbers.append(number)
    return numbers


def defines_function(path: Path, name: str) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in read_source(path).body)


def code_lines(path: Path, statement: ast.stmt) -> Iterator[int]:
    """Yield the numbers of a statement's lines without blank lines, comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(statement):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and type(node.value.value) is str
        if is_text:
            docstrings |= set(range(node.lineno, node.end_lineno + 1))
    lines = read_text(path).splitlines()
    first = min([statement.lineno, *(node.lineno for node in getattr(statement, "decorator_list", []))])
    for number in range(first, statement.end_lineno + 1):
        text = lines[number - 1].strip()
        if text and not text.startswith("#") and number not in docstrings:
            yield number


def cuda_files(source: Path) -> Iterator[Path]:
    """Yield a CUDA source file and the .cuh files that it includes; nothing without the file."""
    if source.is_file():
        yield source
        for name in CUDA_INCLUDE.findall(read_text(source)):
            yield from cuda_files(source.parent / name)


def cuda_lines(path: Path) -> Iterator[int]:
    """Yield the numbers of the lines of a CUDA source file without blank lines and comments."""
    without_comments = CUDA_COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), read_text(path))
    return (number for number, line in enumerate(without_comments.splitlines(), 1) if line.strip())
