"""A new op is a folder and a new backend is a file. Nothing else is edited, and every program finds them."""

import subprocess
import sys

import pytest

CONTRACT = """
import torch

SHAPES = {"large": {"shape": (64, 32)}}
CASES = {"small": {"shape": (3, 5)}}
SIZES = {"5": {"shape": (3, 5)}}
FEATURES = ["small"]
BOUND = "bytes"
FAMILY = "silu"


def reference(x):
    return x / (1 + torch.exp(-x))


def inputs(shape, *, dtype, device="cpu", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return {"x": torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()}


def cost(shape, *, dtype=torch.bfloat16):
    elements = torch.Size(shape).numel()
    bytes_of_x = elements * dtype.itemsize
    return {"forward": (4 * elements, 2 * bytes_of_x), "backward": (6 * elements, 3 * bytes_of_x)}
"""

EAGER = """
import torch


def toy(x):
    return torch.nn.functional.silu(x)
"""

MINE = """
FAMILY = "my_toy_kernel"


def toy(x):
    return x * x.sigmoid()


def detail(x):
    return "mine, 1.0"
"""

NORM = """
from kernels.norm import reference

FAMILY = "my_norm_kernel"


def norm(x, residual, weight, bias, eps=1e-5):
    return reference(x, residual, weight, bias, eps)


def detail(**inputs):
    return "mine, 1.0"
"""

FILES = {
    "toy/__init__.py": CONTRACT,
    "toy/eager.py": EAGER,
    "toy/mine.py": MINE,
    "norm/mine.py": NORM,
    "attention/mine.py": "from kernels.attention import reference as attention\n",
}

# the files whose tests are parametrised over ops and backends, and toy_checks.py, which runs the programs
TESTS = [
    "kernels/toy_checks",
    "kernels/test_backends",
    "kernels/test_costs",
    "kernels/test_custom_ops",
    "lab/bench/test_op",
]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_a_new_op_and_a_new_backend_need_no_other_edit(checkout):
    """In a copy of the repo with these files, the generic tests and toy_checks.py test them and pass."""
    (checkout / "kernels/toy").mkdir()
    for name, text in FILES.items():
        (checkout / "kernels" / name).write_text(text)

    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "--import-mode=importlib", "-v"]
    command += [f"tests/{name}.py" for name in TESTS]
    command += ["-k", "(toy or (mine and 768)) and not torch_compile"]  # because compiling takes long
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    for test in (
        "test_eager_agrees_with_the_reference_in_float64[toy-small]",
        "test_against_float64[cpu-toy-mine-small-torch.bfloat16]",
        "test_against_float64[cpu-norm-mine-768-torch.bfloat16]",
        "test_two_calls_give_the_same_bits[cpu-toy-mine-torch.float32]",
        "test_forward_bytes_count_each_tensor_once[toy-small]",
        "test_opcheck[toy-mine-small-cpu]",
        "test_row_has_the_times_the_rates_and_the_share_of_the_floor[toy]",
        "toy_checks.py::test_train_lists_and_runs_the_backends",
    ):
        assert f"{test} PASSED" in done.stdout
