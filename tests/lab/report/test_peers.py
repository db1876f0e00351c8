"""The table of other systems compares like with like, and README.md names its ratios."""

import re

import pytest

from lab import rows as lab_rows
from lab.report.peers import peers
from tests.lab.report.sample_rows import make_context_row, make_generation_row
from tests.test_train import ROOT


def add(results, name, *rows):
    lab_rows.append_rows(results / f"h200/{name}.jsonl", list(rows))


def cells(text):
    """Return the cells of a Markdown table, without its head."""
    lines = text.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture
def others(results):
    ours = {"choice": "triton + flash, bf16", "tokens_per_sec": 600, "peak_gib": 16.0}
    common = {"model": "124M", "system": "nanoGPT"}
    add(
        results,
        "peers",
        common
        | {"measure": "training", "batch": "64 x 1024", "how": "autocast", "tokens_per_sec": 500, "ours": ours}
        | {"peak_gib": 40.0},
        common | {"measure": "training", "batch": "1 x 1024", "how": "older", "tokens_per_sec": 100},
        common | {"measure": "context", "how": "eager", "max_train": 100_000},
        common | {"measure": "context", "how": "torch.compile", "max_train": 200_000},
        common | {"measure": "context", "how": "Liger's loss, checkpoints", "max_train": 1_000_000},
        common | {"measure": "generation", "batch": "1", "how": "no cache", "tokens_per_sec": 20, "ours": ours},
        common
        | {"measure": "generation", "system": "Hugging Face", "batch": "1", "how": "static cache"}
        | {"tokens_per_sec": 400, "ours": {"choice": "compile, bf16", "tokens_per_sec": 2000}},
    )


def test_speeds_are_of_one_session_and_contexts_have_checkpoints_on_both_sides(results, others):
    """A row of another session, and a generation without a cache, have no line."""
    add(results, "context", make_context_row("compile", "sdpa", 300_000, 1, checkpointing="none"))
    add(results, "context", make_context_row("triton", "flash", 500_000, 1, checkpointing="none"))
    add(results, "context", make_context_row("triton", "flash", 4_000_000, 1, checkpointing="chunks"))
    add(results, "context", make_context_row("triton", "flash", 3_000_000, 1, checkpointing="block"))
    longest = "longest training step, gpt2_124m,"
    assert cells(peers("h200")) == [
        ["training, gpt2_124m, 64 x 1024", "600 tokens/s (triton + flash, bf16)", "nanoGPT: 500 (autocast)", "1.20x"],
        ["training, gpt2_124m, 64 x 1024", "16.0 GiB (triton + flash, bf16)", "nanoGPT: 40.0 (autocast)", "0.40x"],
        [
            "generation, gpt2_124m, 1 sequence",
            "2,000 tokens/s (compile, bf16)",
            "Hugging Face: 400 (static cache)",
            "5.00x",
        ],
        [f"{longest} without checkpoints", "500,000 tokens (triton)", "nanoGPT: 200,000 (torch.compile)", "2.50x"],
        [
            f"{longest} with checkpoints",
            "4,000,000 tokens (triton, checkpointing=chunks)",
            "nanoGPT: 1,000,000 (Liger's loss, checkpoints)",
            "4.00x",
        ],
    ]


def test_the_fastest_exact_decoder_of_one_sequence_is_named(results, others):
    """Decoders that round, several sequences, other precisions and drafts are not."""
    assert "In another session" not in peers("h200")
    exact = make_generation_row("persistent", "eager", ms=0.16)
    rounds = make_generation_row("int8", "eager", ms=0.1)
    rounds.pop("proof")  # a row without a proof rounds, too
    other_precision = make_generation_row("triton", "eager", ms=0.01)
    other_precision["config"] = other_precision["config"] | {"precision": "fp32"}
    draft = make_generation_row("triton", "eager", ms=0.02, speculate="ngram")
    add(results, "generate", exact, rounds, other_precision, draft, make_generation_row(batch=8, ms=0.02))
    rate = exact["gen/decode_tokens_per_sec"]
    assert peers("h200").split("\n\n")[1] == (
        f"In another session, `kernels.decode=persistent` made {rate:,.0f} tokens/s for one sequence: "
        f"{rate / 400:.0f}x the speed of Hugging Face in the table."
    )


def test_the_root_readme_names_ratios_of_the_table():
    """Its ratios to other systems are those of one session, and of contexts with checkpoints on both sides."""
    text = " ".join((ROOT / "README.md").read_text().split("## Why this")[1].split("##")[0].split())
    named = re.findall(r"([\d.]+) (?:times|the memory)", text)
    assert len(named) == 4
    assert {f"{ratio}x" for ratio in named} <= {line[-1] for line in cells(peers("h200"))}
