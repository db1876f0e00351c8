"""The commands that the page copies run in a fresh clone, and choose what the row ran."""

import shlex
from pathlib import Path

import pytest

from kernels.attention._flash import VERSIONS
from kernels.names import OPS
from lab.report.bench_panels import attention_command
from lab.report.choice_table import report_tables
from lab.report.choices import Choice, group_runs
from lab.report.source import read_source
from lab.report.user_command import benchmark_command, clone_command, flash_version, user_command
from lab.sweep.compare import peer_name
from tests.lab.report.sample_rows import make_attention_row, make_context_row, make_generation_row, make_row
from tests.test_readmes import check
from tests.test_train import config

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = "h200", "h200-rungs", "h200-fp8", "h200-course", "h200x2", "h200x4", "h100", "h100x2"
FLASH_4 = "flash (fa4, flash-attn-4 4.0.0b36)"
TRITON_FLASH = "python train.py model=gpt2_124m kernels=triton attn=flash"


def check_command(choice: Choice, command: str) -> None:
    """Assert that the command names no file of another machine, and that a program reads in it what the row ran."""
    words = shlex.split(command)
    assert not any(word.startswith(("data", "init_from", "out_dir", "prompts")) for word in words)
    assert not any("checkpoint=" in word and word != "checkpoint=random" for word in words)
    row = choice.row["config"]
    if choice.generates:
        check(words[1:])
        return
    words = words[words.index("train.py") + 1 :]
    cfg = config(*(word.replace("attn=", "attn.impl=") if word[:5] == "attn=" else word for word in words))
    assert (cfg.precision, cfg.attn.impl) == (row["precision"], row["attn"]["impl"])
    assert cfg.attn.version == (row["attn"]["version"] or flash_version(choice.row) or None)
    chosen = {op: name for op, name in row["kernels"].items() if op in OPS}
    assert {op: getattr(cfg.kernels, op) for op in chosen} == chosen
    shape = {key: value for key, value in row["model"].items() if key != "vocab_size"}
    assert {key: getattr(cfg.model, key) for key in shape} == shape
    assert cfg.train.block_size == row["train"]["block_size"]
    assert cfg.train.tokens_per_step == row["train"]["tokens_per_step"]
    assert (cfg.train.cuda_graph is False) == (row["train"].get("cuda_graph") is False)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_second_copied_command_runs_in_a_fresh_clone_and_chooses_what_the_row_ran(name):
    """Most rows trained on a text that no clone has. A row that this version cannot run has no command.

    Rows of other systems have none either. All commands would take 60 s.
    """
    source = read_source(ROOT / "results" / name)
    commands = [choice.command for choice in source.all_choices if not peer_name(choice.row)]
    assert sum(map(bool, commands)) > 0.8 * len(commands)
    for choice in source.all_choices[::2]:
        if choice.command:
            check_command(choice, choice.command)
    lines = [line for table in report_tables(source) for line in table.lines]
    assert not any("data.path" in line.command for line in lines)


def test_a_sweep_copies_the_command_of_the_row():
    """The reader of a sweep has its files. The row may have overrides besides its kernels, such as optim.lr."""
    row = make_row("triton", "flash") | {"command": f"{TRITON_FLASH} data=text data.path=mine.txt optim.lr=0.1"}
    [own], [result] = group_runs([row]), group_runs([row], from_results=True)
    assert own.command == row["command"]
    assert result.command == user_command(row) == f"{TRITON_FLASH} precision=amp"


def test_the_version_of_flash_attention_is_the_one_that_ran():
    """attn=flash takes another version where the measured one is not installed."""
    row = make_row("triton", "flash", precision="bf16")
    for ran, version in {
        FLASH_4: "fa4",
        "flash (PyTorch's fa2, torch 2.11.0)": "torch",
        "flash (PyTorch's fa2, torch 2.11.0, flash-attn-4 cannot be imported)": "torch",
        "flash (fa3, x)": "fa3",
    }.items():
        row["kernels"]["attention"] = ran
        assert version in VERSIONS
        assert user_command(row) == f"{TRITON_FLASH} attn.version={version} precision=bf16"
    row["config"]["attn"]["version"] = "fa2"
    assert user_command(row) == f"{TRITON_FLASH} attn.version=fa2 precision=bf16"
    search = make_context_row("triton", "flash", 2**20, 2**21)
    search["kernels"]["attention"] = FLASH_4
    assert clone_command(search) == f"{search['command']} attn.version=fa4"


def test_a_step_without_a_cuda_graph_stays_without():
    row = make_row()
    row["config"]["train"]["cuda_graph"] = False
    assert "train.cuda_graph=false" in user_command(row).split()


def test_what_this_version_cannot_run_has_no_command():
    assert user_command({"status": "failed: no config", "command": "python train.py"}) == ""
    assert user_command(make_generation_row(speculate="ngram")) == ""
    assert user_command(make_row() | {"kernels": {"peer": "nanoGPT"}}) == ""
    assert attention_command(make_attention_row("flash", 1024)).endswith("dtype=bfloat16")
    assert attention_command(make_attention_row("gone", 1024)) == ""
    assert benchmark_command("bench_kernels", "norm", {"op": "norm", "impl": "compile"})
    row = make_row()
    assert user_command(row).startswith("python train.py model=gpt2_124m kernels=eager")
    row["config"]["kernels"]["norm"] = "course/05_norm.py"
    assert "kernels.norm=course/05_norm.py" in user_command(row).split()
    for name in ("gone", "~/evil.py", "/etc/passwd", "course/gone.py"):
        row["config"]["kernels"]["norm"] = name
        assert user_command(row) == ""


def test_a_command_of_another_program_has_the_data_of_every_clone():
    judge = (
        "python -m scripts.judge op=loss impl=gluon against=liger -- data=text data.path=mine.txt train.max_steps=25"
    )
    assert clone_command({"command": judge}) == judge.replace(" data=text data.path=mine.txt", "")
    tokenizer = "python -m scripts.judge op=loss impl=gluon -- data.tokenizer=bytes"
    assert clone_command({"command": tokenizer}) == tokenizer
    assert clone_command({"command": "rm -rf /"}) == ""
