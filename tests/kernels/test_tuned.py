"""Launch parameters come from the user's table, else from the repo's table, else from the kernel's default."""

import os

import pytest
import torch

from common.files import read_json
from kernels.registry import KernelError, contract, describe, load
from kernels.tuned import launch_parameters, override_tables, read_table, write_table

pytest.importorskip("triton", reason="Triton is for Linux")
from kernels.norm import triton as norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DEFAULT = {"ROWS": 4, "num_warps": 8}
NAME = "norm_fwd 24 float32 float32"


def lookup(key="24 torch.float32 torch.float32"):
    return launch_parameters("norm_fwd", key, DEFAULT, DEVICE)


def entry(rows, warps=8):
    return {"parameters": {"ROWS": rows, "num_warps": warps}, "ms": 0.4}


def run(shape=(7, 24), op="norm", **more):
    inputs = contract(op).inputs(shape, **more, dtype=torch.float32, device=DEVICE)
    out = load(op, "triton", DEVICE)(**inputs)
    out = out if isinstance(out, tuple) else (out,)
    leaves = [value for value in inputs.values() if value is not None and value.requires_grad]
    return torch.autograd.grad([each.sum() for each in out], leaves)


def test_user_table_wins_over_repo_table_and_default(tables):
    user_table, repo_table = tables
    assert lookup() == DEFAULT
    write_table(repo_table, {NAME: entry(2)})
    assert lookup()["ROWS"] == 2
    write_table(user_table, {NAME: entry(8)})
    assert lookup()["ROWS"] == 8
    assert lookup("25 torch.float32 torch.float32") == DEFAULT
    lookup().pop("ROWS")  # the caller may change its dict
    assert set(lookup()) == {"ROWS", "num_warps"}


def test_write_table_keeps_the_other_entries(tables):
    """The file is sorted, has a line for each entry, and no temporary file stays."""
    user_table, _ = tables
    write_table(user_table, {"b": entry(1), "a": entry(2)})
    write_table(user_table, {"b": entry(4)})
    assert read_table(user_table) == read_json(user_table) == {"a": entry(2), "b": entry(4)}
    assert len(user_table.read_text().splitlines()) == 4
    assert list(user_table.parent.iterdir()) == [user_table]


def test_a_launch_uses_the_looked_up_parameters(tables, monkeypatch):
    """ROWS of three launches: the default, the table's and the override's."""
    seen, kernel = [], norm._norm_fwd_kernel

    class Recorder:
        def __getitem__(self, grid):
            return lambda *arguments, **launch: (seen.append(launch["ROWS"]), kernel[grid](*arguments, **launch))

    monkeypatch.setattr(norm, "_norm_fwd_kernel", Recorder())
    run()
    write_table(tables[0], {NAME: {"parameters": norm.forward_launch(24) | {"ROWS": 2}}})
    run()
    with override_tables({"norm_fwd": {"ROWS": 1}}):
        run()
    assert seen == [norm.forward_launch(24)["ROWS"], 2, 1]


def test_override_tables_replaces_tables_by_defaults_and_changes(tables):
    """Overrides nest, and they record each kernel's request."""
    write_table(tables[0], {NAME: entry(8)})
    with override_tables({"norm_fwd": {"ROWS": 16}}) as requests:
        assert lookup() == DEFAULT | {"ROWS": 16}
        with override_tables({}):
            assert lookup() == DEFAULT
        assert lookup()["ROWS"] == 16
    assert requests == {"norm_fwd": (NAME, DEFAULT)}
    assert lookup()["ROWS"] == 8


@pytest.mark.parametrize(
    ("op", "shapes", "more"),
    [
        ("norm", [(7, 24), (2, 33, 24)], {}),
        ("mlp", [(7, 24), (2, 33, 24)], {}),
        ("loss", [(7, 24), (2, 33, 24)], {"vocab": 131}),
    ],
)
def test_keys_do_not_depend_on_batch_or_length(tables, op, shapes, more):
    keys = []
    for shape in shapes:
        with override_tables({}) as requests:
            run(shape, op, **more)
        keys.append({kernel: name for kernel, (name, _) in requests.items()})
    assert len(keys[0]) == 2
    assert keys[0] == keys[1]


def test_an_entry_with_other_parameter_names_is_an_error(tables):
    """The kernel changed after the entry was measured."""
    write_table(tables[0], {NAME: {"parameters": {"ROWS": 4}}})
    with pytest.raises(KernelError, match=f"the parameters ROWS for {NAME}, but the kernel needs ROWS, num_warps: "):
        lookup()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_an_odd_file_in_the_place_of_a_table_is_an_error_of_one_line(tables, make):
    tables[0].parent.mkdir(parents=True)
    make(tables[0])
    for use in (lookup, lambda: write_table(tables[0], {})):
        with pytest.raises(KernelError, match=r"cannot be read: it is a .*, and must be a regular file$"):
            use()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"a": {}}', '{"a": {"parameters": [1]}}', b"\xff"])
def test_a_broken_table_is_an_error_of_one_line(tables, text):
    user_table, _ = tables
    user_table.parent.mkdir(parents=True)
    user_table.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(KernelError, match="is not a table of launch parameters") as raised:
        lookup()
    assert "\n" not in str(raised.value)


def test_a_table_that_cannot_be_read_is_not_called_broken(tables, monkeypatch):
    """Nobody should delete it."""
    user_table, _ = tables
    write_table(user_table, {})

    def fail(path):
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr("kernels.tuned.read_json", fail)
    with pytest.raises(KernelError, match=rf"^{user_table} cannot be read: Input/output error$"):
        lookup()


def test_a_table_that_cannot_be_written_is_an_error(tables):
    user_table, _ = tables
    user_table.parent.parent.parent.write_text("a file in place of the cache folder")
    with pytest.raises(KernelError, match=r"h.*\.json cannot be written: "):
        write_table(user_table, {})


def test_a_gpu_without_a_table_takes_the_table_of_its_architecture(tables):
    """The row says so. The GPU's own table has precedence."""
    _, repo_table = tables
    shape = {"shape": (7, 24), "dtype": torch.float32, "device": DEVICE}
    write_table(repo_table.with_stem("relative"), {NAME: entry(2)})
    assert lookup()["ROWS"] == 2
    assert describe("norm", "triton", **shape).endswith(", tuned on relative)")
    write_table(repo_table, {NAME: entry(8)})
    assert lookup()["ROWS"] == 8
    assert "tuned" not in describe("norm", "triton", **shape)


def test_describe_names_a_users_table(tables):
    """Choices of kernels=auto and attn=auto in the table do not count."""
    shape = {"shape": (7, 24), "dtype": torch.float32, "device": DEVICE}
    assert "tuned here" not in describe("norm", "triton", **shape)
    write_table(tables[0], {"attention causal bfloat16 64 x1": {"parameters": {"1024": "flash"}}})
    assert "tuned here" not in describe("norm", "triton", **shape)
    write_table(tables[0], {"norm_fwd 24": {"parameters": {}}})
    assert "tuned here)" in describe("norm", "triton", **shape)
