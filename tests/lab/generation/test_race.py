"""The comparison of decoders after a race: wrong texts, the table, the winner."""

import re

import pytest

from kernels.registry import AttnConfig, KernelError, KernelsConfig
from lab.generation.race import Racer, first_difference, judge, kernels_lines, table, verdict, with_decoder
from lab.generation.recipe import GenerationRecipe
from model.generate_config import GenerateConfig
from runtime.config import UserError

RECIPE = GenerationRecipe(
    source=None,
    tokenizer=None,
    kernels=KernelsConfig(),
    attn=AttnConfig("eager"),
    precision="fp32",
    generate=GenerateConfig(),
    sampling=None,
    seed=0,
    stops=None,
)


def racer(name, speed=100.0, spread=0.0, laps=4, tokens=(1, 2, 3), **fields):
    """Return a decoder with `speed` tokens/s, and p20 and p80 at `spread` below and above."""
    quantiles = {"": speed, "/p20": speed - spread, "/p80": speed + spread}
    figures = {f"gen/decode_tokens_per_sec{part}": value for part, value in quantiles.items()}
    figures |= {"gen/step_ms": 1e3 / speed, "gen/laps_s": [0.1] * laps, "gen/warmup_s": 1.0}
    times = [n / speed for n in range(1, len(tokens) + 1)]
    return Racer(name, times=times, tokens=list(tokens), figures=figures, **fields)


@pytest.mark.parametrize(
    ("tokens", "others", "number"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 2), ([5], [6], 1), ([1], [1, 2], 2), ([], [], None)],
)
def test_the_first_different_token_is_counted_from_1(tokens, others, number):
    assert first_difference(tokens, others) == first_difference(others, tokens) == number


def test_an_entry_names_a_decoder_and_additions():
    recipe = with_decoder(RECIPE, "blocks+compile+ngram+fp8")
    assert (recipe.kernels.decode, recipe.kernels.compile) == ("blocks", True)
    assert (recipe.generate.speculate, recipe.generate.kv) == ("ngram", "fp8")
    assert with_decoder(RECIPE, "blocks") == RECIPE
    assert with_decoder(RECIPE, "triton").kernels.decode == "triton"
    with pytest.raises(KernelError, match=r"decoders=mine: no file kernels/decode/mine.py; there are blocks, .*triton"):
        with_decoder(RECIPE, "mine+compile")
    with pytest.raises(
        UserError, match=r"decoders=blocks\+fp4: a decoder can be followed by \+compile, \+ngram, \+fp8"
    ):
        with_decoder(RECIPE, "blocks+fp4")


def test_another_text_is_wrong_only_if_nothing_rounds():
    def statuses(must_agree):
        racers = [
            racer("lossy", tokens=[9], exact=False),
            Racer("absent", status="unavailable: why"),
            racer("a"),
            racer("b"),
            racer("c", tokens=[1, 2, 4]),
        ]
        judge(racers, must_agree)
        return [racer.status for racer in racers]

    assert statuses(False) == ["ok", "unavailable: why", "ok", "ok", "ok"]
    wrong = "wrong: new token 3 differs from a, and in fp32 it must not"
    assert statuses(True) == ["ok", "unavailable: why", "ok", "ok", wrong]


def test_the_table_has_the_fastest_first_and_no_speed_of_a_wrong_decoder():
    racers = [
        racer("a", 1000.0, 10.0),
        racer("b", 2345.6, tokens=[1, 7, 3]),
        racer("wrong", 9999.0, status="wrong: why"),
        Racer("absent", status="unavailable: why"),
    ]
    head, *lines = (re.split("  +", line) for line in table(racers).splitlines())
    assert head == ["decoder", "tok/s", "p20 to p80", "ms a step", "first token", "in all", "warm-up", "tokens", "text"]
    assert lines == [
        ["b", "2,346", "2,346 to 2,346", "0.426", "0.4 ms", "0.00 s", "1.0 s", "3", "differs from a at token 2"],
        ["a", "1,000", "990 to 1,010", "1.000", "1.0 ms", "0.00 s", "1.0 s", "3", "same"],
        ["wrong", "wrong: why"],
        ["absent", "unavailable: why"],
    ]


def test_a_text_of_one_token_has_no_speed():
    one = Racer("one", times=[0.5], tokens=[1])
    one.figures = {"gen/decode_tokens_per_sec": None, "gen/warmup_s": 1.0, "gen/laps_s": []}
    assert "too short" in table([one])
    assert verdict([one, one]).startswith("winner   not judged")


@pytest.mark.parametrize(
    ("racers", "line"),
    [
        ([racer("a"), racer("b", 250.0), racer("c", 50.0)], "winner   b: 2.50x a, 5.00x c (median tok/s)"),
        ([racer("a", 100, 5), racer("b", 109, 5)], "tie of b and a: their speeds overlap between p20 and p80"),
        ([racer("a", 100, 4), racer("b", 109, 4)], "winner   b: 1.09x a"),
        ([racer("a"), racer("b", 300.0, laps=2)], "not judged, because that needs 48 decoding steps"),
        ([racer("a"), racer("b", 900.0, status="wrong: why")], "winner   none, because only a has a speed"),
    ],
    ids=["winner", "tie", "close", "short", "alone"],
)
def test_the_verdict(racers, line):
    assert line in verdict(racers)


def test_kernels_are_named_once():
    common = {"norm": "eager (torch 2)", "attention": "sdpa (torch 2)"}
    racers = [
        Racer(name, kernels={**common, "decode": name, "compile": False}) for name in ("blocks", "mine", "blocks")
    ]
    assert kernels_lines(racers) == "kernels  norm eager (torch 2) | attention sdpa (torch 2)\ndecode   blocks | mine"
