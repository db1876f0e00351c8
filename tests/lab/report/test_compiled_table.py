"""The tables of what the kernels need on each compute capability."""

from lab import rows
from lab.report import compiled_table
from lab.report.readmes import fill
from tests.kernels.compiled import read_lines

TEXT = """norm forward: 40 registers, 0 bytes of stack, 2048 of shared memory
norm forward: 39 registers, 8 bytes of stack, 1024 of shared memory
matmul OUT 768, K 64: 255 registers, 0 bytes of stack, 101376 of shared memory
"""


def test_the_tables_name_what_was_timed_and_what_was_not(monkeypatch, tmp_path):
    """Kernels of one name are one line, with the largest numbers."""
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    (tmp_path / "h100").mkdir()
    rows.replace_rows(tmp_path / "h100/train.jsonl", [{"env": {"device": "NVIDIA H100 80GB HBM3"}}])
    used = read_lines(TEXT)
    assert used == {"norm forward": [40, 8, 2048], "matmul OUT 768, K 64": [255, 0, 101376]}
    usage = dict.fromkeys(compiled_table.GPUS, used)
    usage[90] = {**used, "only here": [1, 0, 0], "only here in fp32": [2, 800, 0]}
    compiled_table.write_usage("3.7.1", "5f", usage)
    assert compiled_table.read_usage() == ("3.7.1", "5f", usage)
    text = fill("<!-- compiled: capabilities -->\n<!-- end -->\n<!-- compiled: kernels -->\n<!-- end -->")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    table = {line[0]: line[1:] for line in lines}
    assert table["8.6"][1:] == ["2", "255", "99 of 99 KB", "kernels: 1, bytes: 8 or fewer", "never timed"]
    assert table["9.0"][1:] == ["3", "255", "99 of 227 KB", "kernels: 1, bytes: 8 or fewer", "H100"]
    assert table["norm forward"] == ["40, 2 KB, 8 B spilled"] * 6
    assert "only here" not in table
    assert text.count("Compiled with triton 3.7.1.") == 2


def test_a_device_is_of_a_gpu_or_of_a_series():
    devices = {"NVIDIA GeForce RTX 4090": 89, "NVIDIA A100-SXM4-80GB": 80, "NVIDIA L40": 89, "NVIDIA L4": 89}
    devices |= {"NVIDIA H100 80GB HBM3": 90, "NVIDIA RTX A6000": 86, "NVIDIA A10": 86, "NVIDIA GeForce RTX 5090": 120}
    for device, capability in devices.items():
        table = compiled_table.GPUS.items()
        found = [key for key, (_, gpus) in table if any(compiled_table.is_of(device, gpu) for gpu in gpus)]
        assert found == [capability]
    assert [gpu for gpu in compiled_table.GPUS[89][1] if compiled_table.is_of("NVIDIA L40", gpu)] == ["L40"]
