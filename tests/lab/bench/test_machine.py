from types import SimpleNamespace

import torch

from kernels.fastest import FILL_COMMAND
from kernels.tuned import write_table
from lab.bench.machine import describe_gpu, describe_tables


def test_lines_count_the_entries_of_the_user_table_and_of_the_repo_table(tables):
    """A broken table is a line, too."""
    user_table, repo_table = tables
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert list(describe_tables(device)) == [
        "tuned    launch parameters: none on this device: python -m scripts.tune",
        f"auto     choices of kernels=auto and attn=auto: none on this device: {FILL_COMMAND}",
    ]
    write_table(user_table, {"norm_fwd 5": {"parameters": {}}, "attention causal float32 64 x1": {"parameters": {}}})
    write_table(repo_table, {"norm_fwd 6": {"parameters": {}}, "norm_fwd 7": {"parameters": {}}})
    assert list(describe_tables(device)) == [
        f"tuned    launch parameters: 1 in {user_table}, 2 in {repo_table}",
        f"auto     choices of kernels=auto and attn=auto: 1 in {user_table}",
    ]
    user_table.write_text("{")
    [line] = describe_tables(device)
    assert line.startswith(f"tuned    {user_table} is not a table of launch parameters")


def test_a_gpu_is_described_in_one_line(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=139.5 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    line = "NVIDIA H200, 139.5 GiB, compute capability 9.0, driver 580.159; GPUs here: 8"
    assert describe_gpu(torch.device("cuda"), "580.159") == line
