"""No mutant of a judge survives. `make mutants` also tries the mutants of the other files."""

import subprocess
import sys

import pytest

from tests.mutants import ROOT, read_mutants


def test_each_mutant_changes_a_line_of_its_file():
    for mutant in read_mutants():
        text = (ROOT / mutant.file).read_text()
        assert mutant.apply(text) != text


@pytest.mark.exhaustive
def test_no_mutant_of_a_judge_survives():
    """These files decide whether a kernel or a figure is right."""
    judges = "kernels/check.py", "lab/judge"
    done = subprocess.run([sys.executable, "-m", "tests.mutants", *judges], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
