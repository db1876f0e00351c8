"""`python -m scripts.race`: decoders on the same prompt."""

import sys
from pathlib import Path

import pytest
import torch

from kernels.decode import blocks, huggingface
from lab.generation.replay import ENTER, LEAVE
from scripts import race as script
from tests.scripts.test_generate import greedy_text, save_model

ARGUMENTS = "checkpoint=ckpt.pt", "device=cpu", "precision=fp32", "max_new_tokens=60", "prompt=Hello (world"


@pytest.fixture
def command(called, monkeypatch, tmp_path):
    """Run the command in this process: command("decoders=blocks") -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path)
    return lambda *arguments: called("race.py", script.main_with_exact_prompt, *ARGUMENTS, *arguments)


def break_drafts(monkeypatch):
    """Shift the logits by one id in every step that verifies a draft."""

    def decode(packed, tokens, cache):
        logits = packed(tokens, cache)
        return logits if tokens.shape[1] == 1 else logits.roll(1, -1)

    monkeypatch.setattr(blocks, "decode", decode)


def test_decoders_write_the_same_text_and_one_that_cannot_run_says_why(command, monkeypatch):
    """Without a terminal the output has no control codes. The race writes no file."""
    monkeypatch.setattr(huggingface, "unavailable", lambda device: "it needs a GPU")
    code, out, err = command("decoders=blocks,huggingface,blocks+ngram,blocks+fp8", "temperature=0")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "The decoders ran one after the other, each alone on the device." in out
    table = out[out.index("decoder  ") :].splitlines()
    assert sorted(line.split()[0] for line in table[1:4]) == ["blocks", "blocks+fp8", "blocks+ngram"]
    assert table[4] == "huggingface   unavailable: decode=huggingface cannot run here: it needs a GPU"
    assert [line.endswith("  same") for line in table[1:4] if "fp8" not in line] == [True, True]
    assert table[5].startswith("winner   ")
    assert [path.name for path in Path().iterdir()] == ["ckpt.pt"]


def test_the_text_is_that_of_full_forwards(command):
    code, out, _ = command("decoders=[blocks]")
    assert code == 0
    assert f"\n--- all\n{greedy_text('Hello (world', 60)}\n\n" in out
    assert "winner   none, because only blocks has a speed" in out


def test_all_decoders_make_the_same_draws(command):
    code, out, err = command("decoders=blocks,blocks+ngram", "temperature=1", "top_k=0", "seed=4")
    assert (code, err) == (0, "")
    assert out.count("  same\n") == 2
    assert out.count("--- ") == 1


def test_another_text_is_an_error_in_fp32_and_greedy(command, monkeypatch):
    """The wrong decoder has no speed. The output has both texts."""
    break_drafts(monkeypatch)
    code, out, err = command("decoders=blocks,blocks+ngram")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("error: blocks+ngram is wrong: new token 2 differs from blocks, and in fp32 it must not")
    assert "\nblocks+ngram  wrong: new token 2" in out
    assert "winner   none, because only blocks has a speed" in out
    assert ("--- blocks\n" in out, "--- blocks+ngram\n" in out) == (True, True)
    code, out, err = command("decoders=blocks,blocks+ngram", "temperature=1")
    assert (code, err) == (0, "")
    assert "differs from blocks at token 2" in out


def test_logits_that_are_not_finite_are_an_error(command, monkeypatch, tmp_path):
    """The prompt has 12 tokens. If only one decoder makes NaN, the others have a speed."""
    decode = huggingface.decode

    def decode_nan(packed, tokens, cache):
        return decode(packed, tokens, cache) * torch.where(cache.positions < 30, 1, torch.nan)

    monkeypatch.setattr(huggingface, "decode", decode_nan)
    code, out, err = command("decoders=blocks,huggingface", "temperature=0")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("error: huggingface is wrong: the logits of new token 20 are not finite, ")
    assert "winner   none, because only blocks has a speed" in out
    save_model(tmp_path, nan_position=30)
    code, _, err = command("decoders=blocks,blocks+ngram", "temperature=0")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("error: no decoder finished: blocks wrong: the logits of new token 20 are not finite, ")


def test_a_terminal_shows_a_replay(command, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("lab.generation.replay.time.sleep", lambda seconds: None)
    code, out, _ = command("decoders=blocks,blocks", "replay=0.1")
    assert code == 0
    before, shown, after = out.partition(ENTER)[0], out.partition(ENTER)[2].partition(LEAVE)[0], out.partition(LEAVE)[2]
    assert "running  blocks, alone on the device (2 of 2)" in before
    assert "They ran one after the other" in shown
    assert "\x1b" not in before + after
    assert "decoder  " in after
    assert ENTER not in command("decoders=blocks,blocks", "replay=0")[1]


def test_a_race_needs_a_decoder_that_can_run(command, monkeypatch):
    monkeypatch.setattr(blocks, "unavailable", lambda device: "it needs a GPU", raising=False)
    code, _, err = command("decoders=blocks,blocks+ngram")
    why = "unavailable: decode=blocks cannot run here: it needs a GPU"
    assert (code, err) == (1, f"error: no decoder finished: blocks {why}; blocks+ngram {why}\n")


@pytest.mark.exhaustive
def test_compiled_blocks_are_the_default_opponent(command):
    code, out, err = command()
    assert (code, err) == (0, "")
    assert out.count("  same\n") == 2
    assert "\nblocks+compile  " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decoders=[]"], "decoders is empty: name at least one"),
        (["decoders=blocks,mine"], "decoders=mine: no file kernels/decode/mine.py; there are blocks, "),
        (["decoders=blocks+fast"], "decoders=blocks+fast: a decoder can be followed by +compile, +ngram, +fp8"),
        (["decoders=huggingface+ngram+x"], "decoders=huggingface+ngram+x: a decoder can be followed by"),
        (["kernels=compile"], "kernels.decode and kernels.compile have no effect here: name decoders"),
        (["kernels.decode=triton"], "kernels.decode and kernels.compile have no effect here: name decoders"),
        (["replay=-1"], "replay=-1.0: it must be seconds, 0 for none, or null"),
        (["checkpoint=null"], "checkpoint is missing"),
        (["prompt_tokens=9"], "prompt and prompt_tokens are given: choose one of them"),
        (["max_new_tokens=79"], "these are more than the 80 positions of ckpt.pt: pass max_new_tokens=68"),
        (["model.n_layer=3"], "model.n_layer is for checkpoint=random"),
        (["prompts=a.txt"], "unknown key prompts; did you mean prompt?"),
    ],
)
def test_a_mistake_prints_one_line(command, arguments, message):
    code, _, err = command(*arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("error: ")
    assert message in err
