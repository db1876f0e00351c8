"""The lines of kernel code of a backend, counted by hand in a small copy of kernels/."""

import pytest

from kernels.lookup import files
from kernels.names import ALL_OPS
from lab.proof import source_lines
from lab.proof.source_lines import kernel_lines

FILES = {
    # 14 lines: 3 imports, FAMILY, 3 of the kernel, 7 of the function
    "norm/mine.py": '''"""The idea.

Two lines of it.
"""

import torch
from kernels import gpu
from kernels.norm._shared import sum_rows

FAMILY = "mine"  # a comment behind code


@triton.jit
# a comment alone
def _mine_kernel(x):
    """What it does."""
    tl.store(x, 0)


def norm(
    x,
):
    text = """
# this line is text
"""
    from kernels import sums
    return sum_rows(x) + sums.add(x) + gpu.count(text)
''',
    # sum_rows uses SIZE and _sum_kernel, and its fake is registered: 1 + 3 + 3 + 3 lines, and both imports
    "norm/_shared.py": """import triton
from kernels.sums import add, unused

UNUSED = 1
SIZE = 4


@triton.jit
def _sum_kernel(x):
    pass


@custom_op("sum_rows")
def sum_rows(x):
    return _sum_kernel[SIZE](add(x))


@sum_rows.register_fake
def _(x):
    return x


def unused(x):
    return x
""",
    # beside the folders of the ops, with a kernel: 2 lines of add and 2 of its kernel; the other function is not used
    "sums.py": """@gluon.jit
def _add_kernel(x): return x


def add(x):
    return _add_kernel(x)


def unused(x):
    return x
""",
    # no kernel: infrastructure
    "gpu.py": "def count(text):\n    return 1\n",
    "norm/__init__.py": "def reference(x):\n    return x\n",
    "norm/eager.py": "from kernels.norm import reference\n\n\ndef norm(x):\n    return reference(x)\n",
    # 2 lines of Python, 3 of persistent.cu, 2 of part.cuh; emulator.h is for tests
    "norm/persistent.py": "from kernels.norm import reference\nnorm = reference\n",
    "norm/persistent.cu": """// a comment
#include "part.cuh"
#include "emulator.h"  // counts as a line
/* two
   lines */
int a; // code

""",
    "norm/part.cuh": "int b;\n\nint c; /* comment */\n",
    "norm/emulator.h": "int d;\n",
    "mlp/mine.py": "from kernels import sums\nmlp = sums.add\n",
    # a library's kernels: the function beside Triton's kernel is no kernel
    "norm/library.py": "from kernels.norm._shared import unused\nnorm = unused\n",
    # a kernel behind a file without one, which does not count; and kernels that are no functions with a decorator
    "launch.py": "def run(x):\n    from kernels.sums import add\n    return add(x)\n",
    "mlp/behind.py": "from kernels.launch import run\nmlp = run\n",
    "mlp/called.py": "def rows(x):\n    return x\n\n\nmlp = helion.kernel(rows)\n",
    # a module as a value: all 6 lines of sums.py
    "mlp/either.py": "from kernels import gpu, sums\nmlp = (sums if gpu.count('a') else gpu).add\n",
}


@pytest.fixture
def small_kernels(monkeypatch, tmp_path):
    root = tmp_path / "kernels"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(source_lines, "ROOT", root)
    monkeypatch.setattr(source_lines, "source_file", lambda op, impl: root / op / f"{impl}.py")
    return root


def test_lines_with_code_are_counted(small_kernels):
    by_file = {}
    for path, _ in source_lines.backend_lines(small_kernels / "norm/mine.py"):
        by_file[path.name] = by_file.get(path.name, 0) + 1
    # "# this line is text" begins like a comment, and is not counted
    assert by_file == {"mine.py": 3 + 1 + 3 + 7, "_shared.py": 2 + 1 + 3 + 3 + 3, "sums.py": 2 + 2}
    assert kernel_lines({"norm": "mine"}) == {"norm": 14 + 12 + 4}


def test_cuda_source_and_its_headers_are_counted(small_kernels):
    assert kernel_lines({"norm": "persistent"}) == {"norm": 2 + 3 + 2}


@pytest.mark.parametrize("impl", ["eager", "library"])
def test_a_backend_without_a_kernel_has_no_lines(small_kernels, impl):
    assert kernel_lines({"norm": impl}) == {"norm": 0}


@pytest.mark.parametrize(("impl", "lines"), [("behind", 2 + 4), ("called", 3)])
def test_a_kernel_is_found_behind_other_files_and_without_a_decorator(small_kernels, impl, lines):
    assert kernel_lines({"mlp": impl}) == {"mlp": lines}


def test_each_language_has_lines_and_each_library_has_none():
    """Of norm and rms_norm: the autograd of all languages is in files beside Triton's kernels."""
    for op in ("norm", "rms_norm"):
        lines = {impl: kernel_lines({op: impl})[op] for impl in files(op)}
        ours = {"triton", "triton_recompute", "cutile", "helion", "tilelang", "pallas"} & lines.keys()
        assert all(lines[impl] > 100 for impl in ours)
        assert max(lines[impl] for impl in ours - {"triton", "triton_recompute"}) < lines["triton"]
        assert not any(lines[impl] for impl in ("eager", "liger", "quack", "xla"))


def test_what_two_ops_share_is_counted_once(small_kernels):
    assert kernel_lines({"norm": "mine", "mlp": "mine"}) == {"norm": 30, "mlp": 2}
    assert kernel_lines({"mlp": "mine"}) == {"mlp": 2 + 4}


def test_a_module_that_is_used_as_a_value_counts_whole(small_kernels):
    assert kernel_lines({"mlp": "either"}) == {"mlp": 2 + 6}


@pytest.mark.parametrize("op", ALL_OPS)
def test_the_backends_of_pytorch_and_of_libraries_have_no_lines(op):
    """Every other backend of this repo has some."""
    without = [
        "auto",
        "blocks",
        "cudnn",
        "cudnn_frontend",
        "eager",
        "flash",
        "flashinfer",
        "flex",
        "huggingface",
        "math",
        "mem_efficient",
        "nvmath",
        "sdpa",
        "torch_chunked",
    ]
    lines = {impl: kernel_lines({op: impl})[op] for impl in files(op)}
    theirs = {impl for impl, count in lines.items() if not count}
    assert theirs >= without & lines.keys()
    ours = {impl for impl in lines if impl.startswith(("triton", "gluon", "persistent"))}
    assert not theirs & ours
