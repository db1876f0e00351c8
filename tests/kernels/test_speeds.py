"""What was measured of a backend beside eager is stored, and found again only where it counts."""

import pytest
import torch

from common.files import read_json
from kernels import speeds
from kernels.compat import FakeTensorMode
from kernels.registry import KernelError, contract
from kernels.tuned import write_table

pytestmark = pytest.mark.usefixtures("tables")
CPU = torch.device("cpu")
FOUND = {"ms": 7.29, "baseline": "eager", "baseline_ms": 3.42, "at": None, "date": "2026-11-27"}


def fake_inputs(op="mlp", **shape):
    with FakeTensorMode():
        return contract(op).inputs(**({"shape": (65536, 768), "dtype": torch.bfloat16} | shape))


def row(impl, ms, spread=0.05, way="both"):
    return {"impl": impl, f"{way}/ms": ms, f"{way}/ms/p20": ms - spread, f"{way}/ms/p80": ms + spread}


def store(*rows, op="mlp", path=None, **shape):
    speeds.store_speeds(op, fake_inputs(op, **shape), rows, CPU, path)


def find(impl="torchao", op="mlp", way="both", compiled=False, **shape):
    return speeds.find_slower(op, impl, fake_inputs(op, **shape), CPU, way, compiled)


@pytest.fixture(autouse=True)
def same_day(monkeypatch):
    monkeypatch.setattr(speeds.time, "strftime", lambda form: FOUND["date"])


def test_a_slower_backend_is_found_again():
    assert find() is None
    store(row("eager", 3.42), row("torchao", 7.29), row("nvmath", 2.9))
    assert find() == FOUND
    assert find("nvmath") is find("triton") is find("eager") is find("auto") is None
    assert find(way="forward") is None


@pytest.mark.parametrize(
    ("spread", "ms", "verdict"),
    [
        *((0.3, *case) for case in [(3.71, "tie"), (3.13, "tie"), (3.73, "slower"), (3.11, "faster")]),
        *((0.01, *case) for case in [(3.48, "tie"), (3.36, "tie"), (3.49, "slower"), (3.35, "faster")]),
    ],
)
def test_a_median_between_eagers_quantiles_or_within_2_percent_is_a_tie(spread, ms, verdict):
    assert speeds.compare(ms, [3.42 - spread, 3.42, 3.42 + spread]) == verdict
    store(row("eager", 3.42, spread=spread), row("torchao", ms))
    assert (find() is not None) == (verdict == "slower")


@pytest.mark.parametrize(
    ("shape", "at"),
    [
        ({"shape": (16384, 768)}, "rows=65536"),
        ({"shape": (16, 4, 256, 768)}, "rows=65536"),
        ({"shape": (262144, 768)}, "rows=65536"),
        ({"shape": (64, 1024, 768)}, None),
    ],
)
def test_a_call_of_nearly_as_many_rows_is_said_with_the_measured_rows(shape, at):
    store(row("eager", 3.42), row("torchao", 7.29))
    assert find(**shape) == FOUND | {"at": at}


@pytest.mark.parametrize(
    "shape",
    [
        {"shape": (16383, 768)},
        {"shape": (1, 768)},
        {"shape": (65536, 1024)},
        {"hidden": 2048},
        {"dtype": torch.float32},
        {"fp8": True},
    ],
)
def test_a_fact_of_another_call_is_not_used(shape):
    store(row("eager", 3.42), row("torchao", 7.29))
    assert find(**shape) is None


def test_the_nearest_of_several_measurements_counts():
    store(row("eager", 3.42), row("torchao", 7.29))
    store(row("eager", 0.9), row("torchao", 0.5), shape=(16384, 768))
    assert find(shape=(32769, 768)) is not None
    assert find(shape=(32767, 768)) is None


def test_a_decoding_step_of_attention_is_another_call():
    sizes = {"shape": (1, 1, 12, 64), "keys": 1024, "lengths": [1024]}
    store(row("eager", 0.1, 0.01, "forward"), row("sdpa", 0.2, 0.01, "forward"), op="attention", **sizes)
    near = sizes | {"keys": 256, "lengths": [256]}
    assert find("sdpa", "attention", "forward", **sizes)["ms"] == 0.2
    assert find("sdpa", "attention", "forward", **near)["at"] == "rows=1 Tq=1 Tk=1024"
    assert find("sdpa", "attention", "forward", shape=(1, 1024, 12, 64)) is None
    assert find("sdpa", "attention", "forward", **sizes, window=5) is None


def test_a_compiled_model_is_compared_with_compiled_eager():
    """There the choice is between the backend and eager under torch.compile, if that was measured."""
    store(row("eager", 3.42), row("torchao", 3.3), row("compile", 3.1), row("nvmath", 3.0))
    assert find() is find("nvmath", compiled=True) is None
    assert find(compiled=True) == FOUND | {"ms": 3.3, "baseline": "compile", "baseline_ms": 3.1}
    store(row("eager", 3.42), row("torchao", 7.29))
    assert find(compiled=True) == FOUND


@pytest.mark.parametrize("key", ["device", "torch", "triton", "code"])
def test_a_fact_of_other_conditions_is_not_used(monkeypatch, key):
    """Of another GPU, of another version of PyTorch or Triton, or of a kernel that has changed since."""
    store(row("eager", 3.42), row("torchao", 7.29))
    now = speeds.conditions("mlp", "torchao", CPU)
    assert key in now
    monkeypatch.setattr(speeds, "conditions", lambda *_: now | {key: "another"})
    assert find() is None


def test_a_change_of_a_backend_or_of_its_launch_parameters_makes_other_conditions(monkeypatch, tables, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def mlp(x, w_fc, b_fc, w_proj, b_proj): ...\n")
    store(row("eager", 3.42), row(str(path), 7.29))
    monkeypatch.chdir(tmp_path)
    assert find("mine.py") == find(str(path)) == FOUND
    write_table(tables[0], {"mlp bfloat16": {"parameters": {"768": "eager"}}})  # a choice of auto
    assert find("mine.py") == FOUND
    write_table(tables[0], {"mlp_fwd 768": {"parameters": {"BLOCK": 64}}})
    if not torch.cuda.is_available():  # otherwise this is the table of the GPU
        assert find("mine.py") is None
    store(row("eager", 3.42), row("mine.py", 7.29))
    assert find("mine.py") == FOUND
    path.write_text("def mlp(x, w_fc, b_fc, w_proj, b_proj): return x\n")
    assert find("mine.py") is None


def test_a_file_of_the_op_counts_as_code(monkeypatch, tmp_path):
    before = speeds.code_digest("mlp", "eager", CPU)
    assert before == speeds.code_digest("mlp", "eager", CPU) != speeds.code_digest("norm", "eager", CPU)
    read = speeds.read_bytes
    for name in ("_activations.py", "matmul.py", "ring.py"):  # the others are parts of several ops
        monkeypatch.setattr(speeds, "read_bytes", lambda path, name=name: read(path) + b"#" * (path.name == name))
        assert speeds.code_digest("mlp", "eager", CPU) != before


def test_the_users_table_wins_over_the_repos():
    """But an entry of the user's that does not count hides none of the repo's."""
    user_table, repo_table = speeds.table_paths(CPU)
    store(row("eager", 3.42), row("torchao", 7.29), path=repo_table)
    assert not user_table.exists()
    assert find() == FOUND
    store(row("eager", 3.42), row("torchao", 8.0))
    assert find()["ms"] == 8.0
    [(name, entry)] = read_json(user_table).items()
    assert name == "mlp=torchao bfloat16 C=768 F=3072 at rows=65536"
    write_table(user_table, {name: entry | {"torch": "1.0"}}, "times")
    assert find() == FOUND


def test_without_eager_nothing_is_stored():
    store(row("torchao", 7.29))
    assert not speeds.table_paths(CPU)[0].exists()


@pytest.mark.parametrize("text", [b"", b"{", b'{"a": {}}', b"\xff"])
def test_a_broken_table_is_an_error_of_one_line(text):
    path, _ = speeds.table_paths(CPU)
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    for use in (find, lambda: store(row("eager", 3.42), row("torchao", 7.29))):
        with pytest.raises(KernelError, match=r"is not a table of speeds .* run python -m scripts\.doctor speed=true$"):
            use()
