"""The table of generation in results/README.md. choice_table.py has the table of the page and of report.md."""

from lab import rows as results
from lab.report.describe import (
    attention_cell,
    cache_and_draft,
    commit,
    decoder,
    kernels_cell,
    model_size,
    prompt_tokens,
)
from lab.report.tables import figure_cells, markdown_table, rate_cell, session_lines
from lab.sweep.compare import sequences
from lab.sweep.table import figure_columns


def generation(device: str) -> str:
    """Return the table of the rows of scripts.generate: the newest rows of each choice.

    The rows of a session stay together, fastest first. `of compile` compares a row with compile + sdpa of its session.
    """
    rows = results.read_rows(device, "generate")
    columns = figure_columns(rows)
    head = ["model", "precision", "sequences", "prompt + new tokens", "decode", "kernels", "attn"]
    head += ["decode tokens/s (p20 to p80)", "of compile", *columns, "commit"]

    def line(row: dict, ratio_cell: str) -> list[str]:
        config = row["config"]
        decode = ", ".join([decoder(config) or "blocks", *cache_and_draft(config)])
        kernels = f"prefill: {kernels_cell(row)}" if decoder(config) else kernels_cell(row)
        lengths = f"{prompt_tokens(row):,} + {config['max_new_tokens']:,}"
        settings = [model_size(row), config["precision"], str(sequences(row)), lengths]
        figures = [rate_cell(row), ratio_cell, *figure_cells(row, columns)]
        return [*settings, decode, kernels, attention_cell(row), *figures, commit(row)]

    return markdown_table(head, session_lines(rows, line))
