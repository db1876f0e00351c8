"""Launch parameters: the user's, else the repo's, else the kernel's default."""

import json

import pytest
import torch

from kernels.registry import KernelError, contract, describe, load
from kernels.tuned import override, read, tuned, write

pytest.importorskip("triton", reason="Triton is for Linux")
from kernels.norm import triton as norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DEFAULT = {"ROWS": 4, "num_warps": 8}
NAME = "norm_fwd 24 float32 float32"


def ask(key="24 torch.float32 torch.float32"):
    return tuned("norm_fwd", key, DEFAULT, DEVICE)


def entry(rows, warps=8):
    return {"parameters": {"ROWS": rows, "num_warps": warps}, "ms": 0.4}


def run(shape=(7, 24), op="norm", **more):
    inputs = contract(op).inputs(shape, **more, dtype=torch.float32, device=DEVICE)
    out = load(op, "triton", DEVICE)(**inputs)
    out = out if isinstance(out, tuple) else (out,)
    leaves = [value for value in inputs.values() if value is not None and value.requires_grad]
    return torch.autograd.grad([each.sum() for each in out], leaves)


def test_mine_before_ours_before_the_default(tables):
    mine, ours = tables
    assert ask() == DEFAULT
    write(ours, {NAME: entry(2)})
    assert ask()["ROWS"] == 2
    write(mine, {NAME: entry(8)})
    assert ask()["ROWS"] == 8
    assert ask("25 torch.float32 torch.float32") == DEFAULT
    ask().pop("ROWS")  # the caller's own
    assert set(ask()) == {"ROWS", "num_warps"}


def test_a_table_keeps_its_other_entries(tables):
    mine, _ = tables
    write(mine, {"b": entry(1), "a": entry(2)})
    write(mine, {"b": entry(4)})
    assert read(mine) == json.loads(mine.read_text()) == {"a": entry(2), "b": entry(4)}
    assert len(mine.read_text().splitlines()) == 4
    assert list(mine.parent.iterdir()) == [mine]


def test_a_launch_takes_them(tables, monkeypatch):
    seen, kernel = [], norm._norm_fwd_kernel

    class Recorder:
        def __getitem__(self, grid):
            return lambda *arguments, **launch: (seen.append(launch["ROWS"]), kernel[grid](*arguments, **launch))

    monkeypatch.setattr(norm, "_norm_fwd_kernel", Recorder())
    run()
    write(tables[0], {NAME: {"parameters": norm.block(24) | {"ROWS": 2}}})
    run()
    with override({"norm_fwd": {"ROWS": 1}}):
        run()
    assert seen == [norm.block(24)["ROWS"], 2, 1]


def test_override(tables):
    write(tables[0], {NAME: entry(8)})
    with override({"norm_fwd": {"ROWS": 16}}) as asked:
        assert ask() == DEFAULT | {"ROWS": 16}
        with override({}):
            assert ask() == DEFAULT  # whatever the table says
        assert ask()["ROWS"] == 16
    assert asked == {"norm_fwd": (NAME, DEFAULT)}
    assert ask()["ROWS"] == 8


@pytest.mark.parametrize(
    ("op", "shapes", "more"),
    [
        ("norm", [(7, 24), (2, 33, 24)], {}),
        ("mlp", [(7, 24), (2, 33, 24)], {}),
        ("loss", [(7, 24), (2, 33, 24)], {"vocab": 131}),
    ],
)
def test_keys_know_neither_batch_nor_length(tables, op, shapes, more):
    keys = []
    for shape in shapes:
        with override({}) as asked:
            run(shape, op, **more)
        keys.append({kernel: name for kernel, (name, _) in asked.items()})
    assert len(keys[0]) == 2
    assert keys[0] == keys[1]


def test_an_entry_from_before_the_kernel_changed(tables):
    write(tables[0], {NAME: {"parameters": {"ROWS": 4}}})
    with pytest.raises(KernelError, match=f"{NAME} the parameters ROWS, and the kernel takes ROWS, num_warps: "):
        ask()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"a": {}}', '{"a": {"parameters": [1]}}', b"\xff"])
def test_a_broken_table_is_one_line(tables, text):
    mine, _ = tables
    mine.parent.mkdir(parents=True)
    mine.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(KernelError, match="is no table of launch parameters") as raised:
        ask()
    assert "\n" not in str(raised.value)


def test_a_table_that_cannot_be_written(tables):
    mine, _ = tables
    mine.parent.parent.parent.write_text("a file, where the cache should be")
    with pytest.raises(KernelError, match=r"h.*\.json cannot be written: "):
        write(mine, {})


def test_a_row_says_that_the_table_is_mine(tables):
    shape = {"shape": (7, 24), "dtype": torch.float32, "device": DEVICE}
    assert "tuned here" not in describe("norm", "triton", **shape)
    write(tables[0], {"attention causal bfloat16 64 x1": {"parameters": {"1024": "flash"}}})  # by attn=auto
    assert "tuned here" not in describe("norm", "triton", **shape)
    write(tables[0], {"norm_fwd 24": {"parameters": {}}})
    assert "tuned here)" in describe("norm", "triton", **shape)
