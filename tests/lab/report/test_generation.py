"""Rows of generation: their choices and figures in a report, their table in results/."""

import pytest

from lab import rows as lab_rows
from lab.report.choice_table import report_tables
from lab.report.colours import choice_colours
from lab.report.describe import choice_key, choice_name, kernels_cell, prefill_name
from lab.report.page import render_page
from lab.report.panels import choice_panels
from lab.report.plot import plotly
from lab.report.source import read_source
from lab.report.tables import generation
from scripts import collect
from tests.lab.report.sample_rows import ENV, make_generation_row, make_row, write_generations, write_row


def add_rows(results, *rows):
    lab_rows.append_rows(results / "h200/generate.jsonl", rows)


def cells(table):
    """Return the cells of a Markdown table, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def old_row(kernels, attn, tokens_per_sec):
    """Return an old row, as in results/h200: it has no op decode, and fewer figures."""
    row = make_generation_row(kernels=kernels, attn=attn, prompt=7)
    for key in ("generate", "proof", "prompt_tokens", "model"):
        del row["config"][key]
    del row["config"]["kernels"]["decode"], row["kernels"]["decode"], row["receipt"], row["proof"]
    old_keys = [key for key in row if key.startswith(("gen/laps", "gen/token_ms", "gen/accepted", "gen/sequences"))]
    for key in old_keys:
        del row[key]
    row |= {f"gen/decode_tokens_per_sec{part}": tokens_per_sec + d for part, d in (("", 0), ("/p20", -1), ("/p80", 1))}
    return row | {"name": f"generate-124M-{kernels}-{attn}-bf16", "env": ENV | {"git_commit": "5918f41a"}}


def test_a_decoder_has_a_name_of_its_own_and_blocks_have_the_names_of_their_kernels():
    names = {
        choice_name(make_generation_row(**settings)): prefill_name(make_generation_row(**settings))
        for settings in (
            {},
            {"kv": "fp8", "speculate": "ngram"},
            {"decode": "int8", "kernels": "triton", "attn": "flash"},
            {"decode": "int8", "kernels": "eager", "kv": "fp8"},
            {"decode": "triton", "kernels": "eager", "speculate": "out/small"},
        )
    }
    assert names == {
        "compile · sdpa": "",
        "compile, fp8 cache, ngram draft of 4 · sdpa": "",
        "decode int8": "prefill triton · flash",
        "decode int8, fp8 cache": "prefill eager · sdpa",
        "decode triton, small draft of 4": "prefill eager · sdpa",
    }
    assert choice_name(old_row("compile", "triton", 2131.0)) == "compile · triton"
    assert choice_name(choosing(decode="int8")) == "triton · flash"
    assert choice_name(choosing(fp8=["mlp", "loss"])) == "triton, fp8 in mlp and loss · flash"
    for adamw, note in (("auto", ""), ("eager", ", adamw eager")):
        assert choice_name(choosing(adamw=adamw)) == f"triton{note} · flash"


def choosing(**kernels):
    """Return a row of training with kernels=triton attn=flash and these choices."""
    row = make_row("triton", "flash")
    row["config"]["kernels"] |= kernels
    return row


def test_a_choice_names_only_ops_that_ran():
    """GPT-2 calls norm, and a model with RMSNorm calls rms_norm. config.kernels has a backend of each."""
    gpt2 = choosing(rms_norm="liger")
    assert (choice_name(gpt2), kernels_cell(gpt2), choice_key(gpt2)[0]) == ("triton · flash", "triton", "triton")
    llama = choosing(norm="eager", rms_norm="liger")
    llama["kernels"]["rms_norm"] = llama["kernels"].pop("norm")
    assert (choice_name(llama), kernels_cell(llama)) == ("triton, rms_norm liger · flash", "liger+triton")
    ended_early = {"config": gpt2["config"]}
    assert choice_name(ended_early) == "triton, rms_norm liger · flash"  # nobody knows its model


def test_generations_are_compared_at_their_batch_and_prompt(tmp_path):
    write_row(tmp_path / "sweep/15-training", make_row())
    source = read_source(write_generations(tmp_path / "sweep"))
    assert [choice.name for choice in source.measured_choices] == ["eager · sdpa"]
    measured = source.measured_generations
    assert [choice.title for choice in measured[:4]] == [
        "decode int8 (batch 1 · prompt 128)",
        "decode triton (batch 1 · prompt 128)",
        "compile · sdpa (batch 1 · prompt 128)",
        "decode int8 (batch 1 · prompt 1,024)",
    ]
    for group in (measured[i : i + 3] for i in range(0, 12, 3)):
        assert [choice.base.name for choice in group] == ["compile · sdpa"] * 3
        values = [choice.ratio.value for choice in group]
        assert values == pytest.approx([0.5 / 0.16, 0.5 / 0.2, 1.0], rel=0.02)
        assert all(choice.ratio.low < choice.ratio.value for choice in group)
    assert len({choice.title for choice in source.all_choices}) == len(source.all_choices) == 15


def test_force_compares_all_batches(tmp_path):
    source = read_source(write_generations(tmp_path / "sweep"), force=True)
    last = next(choice for choice in source.measured_generations if choice.title.startswith("compile · sdpa (batch 8"))
    first = source.generations[0]
    assert last.base is first
    assert last.ratio.value == pytest.approx(last.speed / first.speed, rel=0.01)


def test_evaluations_stay_left_out_and_old_generations_are_read(tmp_path):
    write_row(tmp_path / "1", {"name": "evaluation", "status": "ok", "config": {"checkpoint": "a", "batches": 2}})
    write_row(tmp_path / "2", old_row("compile", "sdpa", 1977.0))
    write_row(tmp_path / "3", old_row("compile", "triton", 2131.0))
    source = read_source(tmp_path)
    assert [choice.name for choice in source.all_choices] == ["compile · sdpa", "compile · triton"]
    assert source.generations[1].ratio_text == "1.08x"  # without timed intervals there is no interval
    assert [panel.figure for panel in choice_panels(source, {})] == [None] * 9
    assert "scripts.generate +sweep=generate" in render_page(source)


def test_lines_over_batches_and_prompts_have_every_choice(tmp_path):
    source = read_source(write_generations(tmp_path / "sweep"))
    colours = choice_colours(choice.name for choice in source.all_choices)
    panels = {panel.id: plotly(panel.figure)["data"] for panel in choice_panels(source, colours) if panel.figure}
    assert {trace["name"]: trace["x"] for trace in panels["batches"]} == {
        f"{name} · prompt {prompt}": [1, 8]
        for name in ("compile · sdpa", "decode triton", "decode int8")
        for prompt in ("128", "1,024")
    }
    assert {tuple(trace["x"]) for trace in panels["prompts"]} == {(128, 1024)}
    assert len({trace["name"] for trace in panels["prompts"]}) == 6
    looks = [(trace["line"]["color"], trace["marker"]["symbol"]) for trace in panels["batches"]]
    assert len(set(looks)) == 6
    measured = source.measured_generations
    for traces in (panels["batches"], panels["prompts"]):
        speeds, shares = (
            sorted(y for trace in traces if trace.get("yaxis") == axis for y in trace["y"]) for axis in (None, "y2")
        )
        assert speeds == sorted(choice.speed for choice in measured)
        assert shares == pytest.approx(sorted(100 * each.row["gen/bandwidth_utilisation"] for each in measured))
    families = {trace["name"]: sum(trace["x"]) for trace in panels["decoding"]}
    receipts = [choice.row["receipt"] for choice in source.measured_generations]
    busy = sum(receipt["busy_ms"] for receipt in receipts)
    assert sum(families.values()) == pytest.approx(sum(receipt["step_ms"] for receipt in receipts))
    assert families["idle"] == pytest.approx(sum(receipt["step_ms"] for receipt in receipts) - busy)


def test_one_batch_has_no_line(tmp_path):
    for number, decode in enumerate(("blocks", "triton"), 1):
        write_row(tmp_path / str(number), make_generation_row(decode))
    source = read_source(tmp_path)
    panels = choice_panels(source, choice_colours(["compile · sdpa", "decode triton"]))
    assert [panel.id for panel in panels if panel.figure] == ["decoding"]


def test_the_page_has_a_table_of_generation(tmp_path):
    source = read_source(write_generations(tmp_path / "sweep"))
    table, failed = report_tables(source)
    assert table.columns[:4] == ["choice", "tokens/s", "of the baseline", "ms a token p50 / p99"]
    line, row = table.lines[1].cells, table.lines[1].choice.row
    p20, p80 = (f"{row[f'gen/decode_tokens_per_sec/{quantile}']:,.0f}" for quantile in ("p20", "p80"))
    ms = 0.2 * (1 + 1 / 40 + 128 / 4096)
    assert line == [
        "decode triton (batch 1 · prompt 128)",
        f"{row['gen/decode_tokens_per_sec']:,.0f} ({p20} to {p80})",
        str(table.lines[1].choice.ratio),
        f"{ms:.2f} / {1.2 * ms:.2f}",
        f"{0.06 / ms:.1%}",
        "7.2 ms",
        "0.34",
        "21.2 s",
        "holds, logits 1.2e-02 of 5.0e-02",
    ]
    assert table.lines[0].cells[-1].startswith("kernels.decode=int8 rounds the weights, logits ")
    assert {line.choice.name for line in failed.lines} == {"decode mine", "14-decode.gone"}
    text = render_page(source)
    assert all(cell in text for cell in line)
    assert "wrong: 3 of 508 greedy tokens are others" in text


def test_collected_rows_have_a_table_by_settings_and_fastest_first(results):
    """The table has the newest row of each choice, an old row without the new keys, and a row without a result."""
    blocks, wrong = make_generation_row(batch=8, ms=0.8), make_generation_row("mine", "eager", batch=8)
    wrong |= {"status": "wrong: 3 tokens", "parameters": 124_475_904}
    slower = make_generation_row("int8", "eager", batch=8, ms=2.0)
    slower["env"] = ENV | {"git_commit": "1234567890"}
    again = make_generation_row("int8", "eager", batch=8, ms=0.4, kv="fp8")
    add_rows(results, slower, old_row("compile", "sdpa", 2000.0), old_row("compile", "triton", 2200.0))
    add_rows(results, blocks, wrong, make_generation_row("int8", "eager", batch=8, ms=0.4), again)
    titles, tables = generation("h200").split("\n\n")[::2], generation("h200").split("\n\n")[1::2]
    sizes = "gpt2_124m, bf16, 8 sequences, prompt + new: 128 + 128 tokens"
    shared = "**, decode: blocks, kernels: compile, commit: 5918f41"
    assert titles[0] == f"**gpt2_124m, bf16, 1 sequence, prompt + new: 7 + 128 tokens{shared}"
    assert titles[1] == f"**{sizes}**, attn: sdpa, commit: f3adfe0"
    old, new = map(cells, tables)
    assert [line[:3] for line in old] == [
        ["triton", "**2,200** (2,199 to 2,201)", "1.100x"],
        ["sdpa", "**2,000** (1,999 to 2,001)", "1.000x"],
    ]
    assert [line[:2] for line in new] == [
        ["int8", "prefill: eager"],
        ["int8, fp8 cache", "prefill: eager"],
        ["blocks", "compile"],
        ["mine", "prefill: eager"],
    ]
    assert [float(line[3][:-1]) for line in new[:2]] == pytest.approx([2, 2], rel=0.02)
    assert [line[3] for line in new[2:]] == ["1.000x", ""]
    assert new[3][2] == "wrong: 3 tokens"
    assert not any(new[3][4:])


def test_a_generation_is_collected_into_its_file(results, tmp_path):
    row = make_generation_row()
    assert collect.collect(tmp_path, row, curves=False) == results / "h200/generate.jsonl"
    assert read_source(results / "h200").generations[0].row == row
