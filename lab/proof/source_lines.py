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
KERNEL_DECORATOR = re.compile(r"(\w+\.)?jit\b|(helion|ct)\.kernel\b")
KERNEL_CALLS = "helion.kernel", "pl.pallas_call"
Line = tuple[Path, int]  # a file, and the number of a line with code
Name = tuple[Path, str]  # a file, and a name in it


def kernel_lines(impls: dict[str, str]) -> dict[str, int]:
    """Return op -> the lines of code of its backend, for {op: backend}. A line that several ops need counts once.

    A backend's code is its file, its CUDA source, and the definitions of other files in kernels/ that it uses. Blank
    lines, comments and docstrings do not count, and neither do an op's contract and the files beside the ops' folders
    that define no kernel, such as registry.py. A backend that uses no kernel of these files has 0 lines: its kernels
    are PyTorch's or a library's.
    """
    counted: set[Line] = set()
    lines = {}
    for op, impl in impls.items():
        found = backend_lines(source_file(op, impl))
        lines[op] = len(found - counted)
        counted |= found
    return lines


class Source:
    """A file of kernels/. `defined[n]` and `used[n]` are the names that statement n at its top defines and uses.

    A used name is (file, name), of this file or of a module of kernels/. `imports` has the (file, name) of each name
    that the file imports from such a module. `kernels` are the numbers of the statements that contain a kernel: a
    function with the decorator triton.jit, gluon.jit, tilelang.jit, helion.kernel or ct.kernel (cuTile), or one of
    KERNEL_CALLS. If a .cu file is beside it, they are all statements.
    """

    def __init__(self, path: Path):
        text = read_text(path)
        tree = ast.parse(text)
        self.path, self.lines, self.body = path, text.splitlines(), tree.body
        self.imports: dict[str, tuple[Path, str]] = {}
        self.modules: dict[str, Path] = {}  # `from kernels.mlp import _fp8` imports a module
        for node in ast.walk(tree):
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                name = alias.asname or alias.name
                if file := module_file(node.module):
                    self.imports[name] = file, alias.name
                if module := module_file(f"{node.module}.{alias.name}"):
                    self.modules[name] = module
        is_cuda = path.with_suffix(".cu").is_file()
        self.kernels = {i for i, statement in enumerate(self.body) if is_cuda or contains_kernel(statement)}
        self.defined = [names_defined(statement) for statement in self.body]

    @functools.cached_property
    def used(self) -> list[set[Name]]:
        return [self._names_used(statement) for statement in self.body]

    def _names_used(self, statement: ast.stmt) -> set[Name]:
        """Return the names that a statement uses. An import uses none, because another statement uses its names.

        A module as a value, as in `(_few if step.few else _many).product()`, uses all names of the module.
        """
        if isinstance(statement, ast.ImportFrom):
            return set()
        nodes = list(ast.walk(statement))
        attributes = {id(node.value): node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names = set()
        for node in nodes:
            if isinstance(node, ast.Name):
                names.add((self.path, node.id))
                if module := self.modules.get(node.id):
                    attribute = attributes.get(id(node))
                    found = [attribute] if attribute else set().union(*read_source(module).defined)
                    names |= {(module, name) for name in found}
        return names

    def statements_of(self, name: str) -> set[int]:
        """Return the statements that define a name, and those that only register its function with PyTorch.

        Such a statement defines no name: `@forward.register_fake def _(...)`, `forward.register_autograd(...)`.
        """
        is_function = any(isinstance(node, ast.FunctionDef) and node.name == name for node in self.body)
        found = set()
        for number, (defined, used) in enumerate(zip(self.defined, self.used, strict=True)):
            if name in defined or (is_function and not defined and (self.path, name) in used):
                found.add(number)
        return found


@functools.cache
def read_source(path: Path) -> Source:
    return Source(path)


@functools.cache
def backend_lines(backend: Path) -> frozenset[Line]:
    """Return the lines of a backend's code; none if no file among them defines a kernel."""
    source = read_source(backend)
    statements = {backend: set(range(len(source.body)))}  # file -> the numbers of the statements that the backend needs
    names = set().union(*source.used, source.imports.values())  # some imports are for registry.py alone
    followed: set[Name] = set()
    while names - followed:
        path, name = (names - followed).pop()
        followed.add((path, name))
        source = read_source(path)
        new = source.statements_of(name) - statements.setdefault(path, set())
        statements[path] |= new
        names |= {each for number in new for each in source.used[number]}
        if name in source.imports:
            names.add(source.imports[name])
    if not any(numbers & read_source(path).kernels for path, numbers in statements.items()):
        return frozenset()
    files = [path for path, numbers in statements.items() if numbers and (read_source(path).kernels or is_in_op(path))]
    cuda = {source for path in files for source in cuda_files(path.with_suffix(".cu"))}
    lines = {(path, line) for path in cuda for line in cuda_lines(path)}
    for path in files:
        source = read_source(path)
        for number in statements[path]:
            lines |= {(path, line) for line in code_lines(source.lines, source.body[number])}
    return frozenset(lines)


def contains_kernel(statement: ast.stmt) -> bool:
    nodes = list(ast.walk(statement))
    decorators = [decorator for node in nodes if isinstance(node, ast.FunctionDef) for decorator in node.decorator_list]
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    return any(KERNEL_DECORATOR.match(ast.unparse(node)) for node in decorators) or any(
        ast.unparse(node) in KERNEL_CALLS for node in calls
    )


def is_in_op(path: Path) -> bool:
    """Return whether a file of kernels/ is in an op's folder, and is not the contract."""
    return len(path.relative_to(ROOT).parts) > 1 and path.name != "__init__.py"


def names_defined(statement: ast.stmt) -> set[str]:
    """Return the names that a statement at the top of a file defines or imports."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name} - {"_"}
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def module_file(module: str | None) -> Path | None:
    """Return the file of a module of kernels/; None for any other module."""
    first, *parts = (module or "").split(".")
    if first != ROOT.name:
        return None
    folder = ROOT.joinpath(*parts)
    return next(filter(Path.is_file, (folder.with_suffix(".py"), folder / "__init__.py")), None)


def code_lines(lines: list[str], statement: ast.stmt) -> Iterator[int]:
    """Yield the numbers of a statement's lines without blank lines, comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and type(node.value.value) is str:
            docstrings |= set(range(node.lineno, node.end_lineno + 1))
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
