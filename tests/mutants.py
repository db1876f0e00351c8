"""Change one line of the program at a time, and see whether a test fails: `make mutants`.

Each part of mutants.diff is a mutant: what the line protects, the file and the tests that must fail, and the change. A
mutant survives if its tests pass: then they do not protect what the line is for. `python -m tests.mutants lab model`
tries only the mutants of these rooms or files.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch  # noqa: F401 (each mutant has a child process, which then need not import torch)

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    purpose: str
    file: str
    tests: str  # arguments of pytest
    old: str  # whole lines
    new: str

    def apply(self, text: str) -> str:
        """Return the mutated text of the file. Raises ValueError if the old lines do not occur once in it."""
        if f"\n{text}".count(f"\n{self.old}") != 1:
            raise ValueError(f"tests/mutants.diff: these lines are not once in {self.file}:\n{self.old}")
        return f"\n{text}".replace(f"\n{self.old}", f"\n{self.new}")[1:]


def read_mutants() -> list[Mutant]:
    mutants = []
    for part in (ROOT / "tests/mutants.diff").read_text().split("\n\n"):
        purpose, target, *lines = part.splitlines()
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in signs) for signs in (" -", " +"))
        mutants.append(Mutant(purpose.removeprefix("# "), *target.split(": "), old, new))
    return mutants


def run_tests(arguments: str) -> int:
    """Return the exit code of pytest in a child process.

    0: all tests passed; 1: a test failed; below 0: a signal killed it, as after a write outside of memory.
    """
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        os._exit(pytest.main(["-x", "-n0", *arguments.split()]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    mutants = [mutant for mutant in read_mutants() if mutant.file.startswith(tuple(sys.argv[1:] or [""]))]
    sys.dont_write_bytecode = True  # Python would run the bytecode of a file that had the same size in the same second
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        ignore = shutil.ignore_patterns(".*", "out", "results", "__pycache__")
        copy = shutil.copytree(ROOT, f"{folder}/repo", ignore=ignore)
        os.chdir(copy)
        sys.path[0] = os.environ["PYTHONPATH"] = copy
        for mutant in mutants:
            path = Path(mutant.file)
            text = path.read_text()
            path.write_text(mutant.apply(text))
            code = run_tests(mutant.tests)
            path.write_text(text)
            assert code < 2, f"pytest ended with {code}: {mutant.tests}"
            survivors += code == 0
            print(f"{'caught  ' if code else 'SURVIVES'} {mutant.file}: {mutant.purpose}", flush=True)
    print(f"done     {survivors} of {len(mutants)} mutants survive")
    sys.exit(survivors > 0)


if __name__ == "__main__":
    main()
