"""The cases of a backend: a worker runs them, and this process judges the results without importing the backend."""

import os
import sys
from pathlib import Path

import pytest
import torch

from common.terminal import override
from kernels.registry import backend, contract, describe
from lab.bench.probe import Probe
from lab.judge import cases, sandbox
from lab.judge.arm import Plan, run_arm
from lab.judge.cases import CaseWorker, judge_cases, names_eager_kernel, same_bits, why_wrong
from lab.judge.op_worker import CALLS, Case, global_state, run_calls
from lab.judge.sandbox import PROCESSES
from lab.judge.trial import FIXED_WORDS
from tests.lab.bench.test_new_backends import GOOD
from tests.lab.judge.test_audit import TINY

CPU = torch.device("cpu")
NORM = Probe("norm", "eager", {"shape": (3, 64)}, torch.float32)
# What the backend does depends on the width
CANDIDATE = """
import os
from pathlib import Path

from kernels.registry import Unavailable

Path(os.environ["TMPDIR"], "pid").write_text(str(os.getpid()))
""" + GOOD.replace(
    "):\n",
    """):
    width = x.shape[-1]
    if width == 7:
        print("the GPU is gone", flush=True)
        os._exit(7)
    if width == 8:
        raise Unavailable("no width of 8")
    if width == 9:
        raise ValueError("no\\nidea")
    eps = 0.3 if width == 10 else eps
""",
    1,
)


@pytest.fixture
def candidate(tmp_path):
    path = tmp_path / "candidate_norm.py"
    path.write_text(CANDIDATE)
    return str(path)


def assert_not_imported(path):
    """No module of this process has the code of this file, nor is named after it."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    assert path not in files
    assert not [name for name in sys.modules if Path(path).stem in name]


def test_each_case_has_a_status_and_this_process_does_not_import_the_backend(candidate, tmp_path):
    """After a failure, the rest of the group runs in another worker."""
    shapes = {"right": 64, "refused": 8, "ends": 7, "wrong": 10, "raises": 9}
    probes = {name: NORM._replace(impl=candidate, shape={"shape": (3, width)}) for name, width in shapes.items()}
    [statuses] = judge_cases([probes], CPU, 60, tmp_path / "judged")
    assert list(statuses) == list(shapes)
    assert statuses["right"] == f"ok: {describe('norm', 'eager').removeprefix('eager (').removesuffix(')')}"
    assert statuses["refused"] == "unavailable: no width of 8"
    assert statuses["ends"] == "failed: the process ended, exit code 7: the GPU is gone"
    assert statuses["wrong"].startswith("wrong: out0: error ")
    assert statuses["raises"] == "failed: ValueError: no idea"
    assert_not_imported(candidate)
    assert int((tmp_path / "judged/cases-0/tmp/pid").read_text()) > 0
    assert not list((tmp_path / "judged/cases-0").glob("results-*"))


def test_a_run_imports_the_backend_in_another_process(candidate, monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "isolation", lambda: PROCESSES)  # in a namespace, processes have other numbers
    (tmp_path / "text.txt").write_text("sheep, " * 2000)
    data = override("data.path", tmp_path / "text.txt"), override("data.cache", tmp_path / "tokens")
    words = [*TINY, "precision=fp32", "device=cpu", *data, override("kernels.norm", candidate), *FIXED_WORDS, "seed=5"]
    arm = run_arm(words, tmp_path / "run", tmp_path / "worker", Plan([5, 2], [7], [3, 4]), {7})
    assert (arm.status, len(arm.losses), len(arm.seconds)) == ("ok", 7, 2)
    assert (arm.figures["kernels"]["norm"].partition(" ")[0], arm.state(7).exists()) == (candidate, True)
    pid = int((tmp_path / "worker/tmp/pid").read_text())
    assert pid != os.getpid()
    assert not Path("/proc", str(pid)).exists()
    assert_not_imported(candidate)


def test_cases_without_an_answer_are_not_asked_for_ever():
    """A backend whose import never ends would take two minutes for each of 40 cases."""
    assert not cases.has_failed({"a": "undecided: no answer", "b": "failed: x", "c": "ok: x"})
    assert cases.has_failed({"a": "undecided: no answer", "b": "failed: x", "c": "undecided: no answer"})


def test_two_workers_get_other_random_inputs(tmp_path):
    seeds = [CaseWorker({"a": NORM, "b": NORM}, CPU, tmp_path, 60).cases for _ in range(2)]
    assert len({seed for cases in seeds for case in cases.values() for seed in case.seeds}) == 8


@pytest.fixture
def statuses(monkeypatch, tmp_path):
    """Judge NORM from made-up answers of a worker in `tmp_path`, one for each case: statuses(answers) -> statuses."""

    def call(answers, changed=()):
        def receive(worker):
            answer = next(left)
            if isinstance(answer, Exception):
                raise answer
            return answer

        left = iter(answers)
        monkeypatch.setattr(CaseWorker, "receive", receive)
        monkeypatch.setattr(CaseWorker, "changed_files", lambda worker: list(changed))
        return list(CaseWorker({str(n): NORM for n in range(len(answers))}, CPU, tmp_path, 60).statuses().values())

    return call


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (sandbox.Ended("no answer within 60 s"), "undecided: no answer within 60 s"),
        (sandbox.Ended("the process ended, killed by SIGKILL"), "undecided: the process ended, killed by SIGKILL"),
        (sandbox.Ended("the process ended, exit code 1"), "failed: the process ended, exit code 1"),
        ({"unavailable": "no GPU"}, "unavailable: no GPU"),
        ({"undecided": "RuntimeError: out of memory"}, "undecided: RuntimeError: out of memory"),
        ({"failed": "ValueError: no"}, "failed: ValueError: no"),
        ({"failed": "ValueError: no", "replaced": ["time.time"]}, "wrong: it replaced time.time"),
        ({"replaced": True}, "failed: its answer is not that of a worker: 'bool' object is not iterable"),
        ({"executed": "mine"}, "failed: it wrote no tensors: it wrote no readable file results-0: "),
    ],
)
def test_what_a_worker_answers_becomes_a_status(statuses, answer, status):
    [got] = statuses([answer])
    assert got.startswith(status)


def test_after_a_failure_the_worker_is_not_asked_again(statuses):
    assert statuses([{"unavailable": "no"}, {"failed": "no"}, {"unavailable": "no"}]) == [
        "unavailable: no",
        "failed: no",
    ]


def test_a_worker_that_changes_its_copy_of_the_repo_is_wrong_in_all_cases(statuses):
    wrong = "wrong: it changed files of the repo: kernels/check.py"
    assert statuses([{"unavailable": "no"}] * 2, changed=["kernels/check.py"]) == [wrong] * 2


def test_what_is_not_safetensors_is_no_result(statuses, tmp_path):
    (tmp_path / "results-0").write_bytes(b"\x80\x04N.")  # a pickle
    assert statuses([{"executed": "mine"}])[0].startswith("failed: it wrote no tensors: ")
    with (tmp_path / "results-0").open("wb") as file:
        file.truncate(10**9)
    assert "results-0: [Errno 27] it has more than" in statuses([{"executed": "mine"}])[0]


CASE = Case(NORM, (11, 12), "results")


@pytest.fixture(scope="module")
def results():
    return {name: tensor.clone() for name, tensor in run_calls(CASE, CPU)}


@pytest.fixture(scope="module")
def inputs():
    return [contract("norm").inputs(shape=(3, 64), dtype=torch.float32, seed=seed) for seed in CASE.seeds]


def test_a_case_has_calls_with_two_inputs_with_and_without_gradients(results, inputs):
    names = {name.partition("/")[2] for name in results if name.startswith("first/")}
    assert {"out0", "out1", "d_x", "d_residual", "d_weight", "d_bias"} == names
    assert {name.partition("/")[0] for name in results} == {*CALLS, "inputs"}
    assert "no_grad/d_x" not in results
    assert not torch.equal(results["first/out0"], results["second/out0"])
    assert torch.equal(results["first/out0"], results["inference/out0"])
    assert torch.equal(results["second/out0"], results["no_grad/out0"])
    assert torch.equal(results["inputs/x"], inputs[0]["x"])


def test_right_results_are_not_wrong(results, inputs):
    assert why_wrong(CASE, inputs, results, {}) is None


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("first/out0", lambda t: t + 1e-3, "out0: error 0.001 is more than 4 x eager's "),
        ("first/d_bias", lambda t: 0 * t, "d_bias: error "),
        ("second/out0", lambda t: t + 1e-3, "(in a call with other numbers at the same addresses)"),
        ("third/d_x", lambda t: t + 1e-3, "(in a third call, with the first numbers)"),
        ("no_grad/out1", lambda t: t + 1e-3, "(in a call under torch.no_grad())"),
        ("inference/out1", lambda t: t * torch.nan, "(in a call under torch.inference_mode())"),
        ("inputs/weight", lambda t: t + 1e-7, "it writes to its input weight"),
        ("inputs/x", None, "it writes to its input x"),
        ("third/out1", lambda t: torch.nextafter(t, t + 1), "two calls give other bits in out1; "),
        ("first/out0", lambda t: t.double(), "out0 has dtype torch.float64, but eager has torch.float32"),
        ("more/out0", lambda t: t, "it gave results of "),
    ],
)
def test_a_wrong_result_is_named_with_its_call(results, inputs, name, change, reason):
    changed = dict(results)
    tensor = changed.pop(name, results["first/out0"])
    if change:
        changed[name] = change(tensor)
    assert reason in why_wrong(CASE, inputs, changed, {})


def test_a_missing_call_is_wrong(results, inputs):
    fewer = {name: tensor for name, tensor in results.items() if not name.startswith("no_grad/")}
    assert why_wrong(CASE, inputs, fewer, {}) == (
        "it gave results of first, second, third, inference, elsewhere, inputs instead of first, second, third, "
        "no_grad, inference, elsewhere"
    )


def test_other_bits_are_allowed_to_a_backend_that_says_so(results, inputs):
    changed = results | {"third/out1": torch.nextafter(results["third/out1"], results["third/out1"] + 1)}
    assert why_wrong(CASE, inputs, changed, {"deterministic": False}) is None
    compiled = CASE._replace(probe=NORM._replace(compiled=True))
    assert why_wrong(compiled, inputs, changed, {}) is None


def test_a_pattern_that_a_kernel_of_eager_matches_proves_nothing(inputs):
    reason = names_eager_kernel("norm", "mine.py", inputs[0], ["my_kernel", "aten::native_layer_norm"])
    assert reason.startswith("its RUNS has the pattern aten::native_layer_norm, which ")
    assert names_eager_kernel("norm", "mine.py", inputs[0], ["my_kernel"]) is None
    assert (
        names_eager_kernel("norm", "mine.py", inputs[0], ["a"] * 21)
        == "its RUNS has 21 patterns, and at most 20 are searched"
    )
    for pattern in ("my_kernel(", "a{99999999999}"):
        assert "is no regular expression" in names_eager_kernel("norm", "mine.py", inputs[0], [pattern])
    assert names_eager_kernel("norm", "eager", inputs[0], ["aten::native_layer_norm"]) is None


def test_a_backend_that_knows_an_input_by_its_address_gives_the_result_of_another_call(monkeypatch, inputs):
    right, kept = backend("norm", "eager").norm, {}

    def norm(x, *rest, **more):
        y, residual = right(x, *rest, **more)
        stored = kept.setdefault(x.data_ptr(), y.detach().clone())
        return y + (stored - y).detach(), residual

    with monkeypatch.context() as patch:
        patch.setattr(backend("norm", "eager"), "norm", norm)
        results = {name: tensor.clone() for name, tensor in run_calls(CASE, CPU)}
    assert why_wrong(CASE, inputs, results, {}).endswith(" (in a call with other numbers at the same addresses)")


def test_a_backend_whose_outputs_share_memory_is_wrong(monkeypatch, inputs):
    """The results are read after the last call."""
    right, buffer = backend("norm", "eager").norm, torch.empty(3, 64)

    def norm(x, *rest, **more):
        y, residual = right(x, *rest, **more)
        return y, residual if torch.is_grad_enabled() else buffer.copy_(residual)

    with monkeypatch.context() as patch:
        patch.setattr(backend("norm", "eager"), "norm", norm)
        results = {name: tensor.clone() for name, tensor in run_calls(CASE, CPU)}
    assert why_wrong(CASE, inputs, results, {}).endswith(" (in a call under torch.no_grad())")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda: torch.manual_seed(5), "random numbers"),
        (lambda: torch.set_float32_matmul_precision("medium"), "precision of matmuls"),
        (lambda: torch.set_default_dtype(torch.float64), "default dtype"),
        (lambda: torch.set_grad_enabled(False), "gradients"),
        (lambda: torch.use_deterministic_algorithms(True), "deterministic algorithms"),
        (lambda: torch.set_flush_denormal(True), "denormals"),
    ],
)
def test_a_change_of_the_process_is_seen(change, name):
    state, precision = global_state(CPU), torch.get_float32_matmul_precision()
    generator, is_deterministic = torch.get_rng_state(), torch.are_deterministic_algorithms_enabled()
    try:
        change()
        changed = global_state(CPU)
    finally:
        torch.set_rng_state(generator)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(is_deterministic)
        torch.set_flush_denormal(False)
    assert changed[name] != state[name]
    assert global_state(CPU) == state


def test_equal_bits():
    nan, one = torch.tensor([torch.nan, 1.0]), torch.tensor([1.0, 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, one)
    assert not same_bits(one, one.double())
    assert not same_bits(one, one[:1])
