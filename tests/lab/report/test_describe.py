"""Two runs whose models differ are never shown as equal, whichever field of the model differs."""

import copy

import pytest

from lab.judge.verdict import training_text
from lab.report.choices import group_runs, set_qualifiers
from lab.report.describe import search_settings, session_settings
from lab.report.peers import is_124m
from model import cost
from model.config import GPTConfig
from runtime.config import field_defaults
from tests.lab.report.sample_rows import make_context_row, make_generation_row, make_row
from tests.model.test_gpt import GPT2

VALUES = {field: "host" if field == "checkpointing" else 7 for field in field_defaults(GPTConfig)}


def with_field(row, field):
    other = copy.deepcopy(row)
    other["config"]["model"][field] = VALUES[field]
    return other


@pytest.mark.parametrize("field", VALUES)
def test_a_field_of_the_model_is_named_if_it_is_not_the_default(field):
    rows = make_row(), make_generation_row(), make_context_row("triton", "flash", 4096, 4096)
    for name, row in zip((session_settings, session_settings, search_settings), rows, strict=True):
        assert name(with_field(row, field)) != name(row)
    assert training_text(with_field(rows[0], field)) != training_text(rows[0])
    choices = group_runs([rows[0], with_field(rows[0], field)])
    set_qualifiers(choices)
    assert [choice.qualifier for choice in choices] == ["gpt2_124m", f"gpt2_124m, {field}={VALUES[field]}"]
    assert is_124m(rows[0])
    assert is_124m(with_field(rows[0], field)) == (field in ("checkpointing", "keep_attention"))
    changed = copy.copy(GPT2)
    setattr(changed, field, VALUES[field])
    assert cost.describe(changed, 64)[0].partition(": ")[2] != cost.describe(GPT2, 64)[0].partition(": ")[2]


def test_a_row_with_the_defaults_has_no_more_to_name():
    row = make_row()
    row["config"]["model"] |= field_defaults(GPTConfig)
    assert session_settings(row) == session_settings(make_row())
    assert training_text(row) == "gpt2_124m, amp, 64 x 1024 tokens, eager, attention sdpa"
