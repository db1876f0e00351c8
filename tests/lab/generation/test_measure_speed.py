"""decode_speed() by hand: groups of steps, drafts, and launches of several tokens; and the receipt of a graph."""

from types import SimpleNamespace

import pytest
import torch

from data.tokenizer import Bytes
from kernels.registry import AttnConfig, KernelsConfig
from lab.generation import measure, writing
from lab.generation.measure import decode_speed
from lab.generation.writing import Arrival
from model.decoder import Decoder
from model.generate_config import GenerateConfig
from model.text import Text
from runtime.power import PowerMeter
from tests.model.test_decoder import with_graphs
from tests.model.test_generate import GREEDY, prompt, varied_gpt


def arrive(*steps, batch=1):
    """Arrivals of (seconds since the last one, tokens) of all sequences."""
    now, arrivals = 0.0, []
    for seconds, tokens in steps:
        now += seconds
        arrivals.append(Arrival(now, tokens, batch))
    return arrivals


def test_steps_of_one_token():
    figures = decode_speed(arrive((9, 2), *[(0.5, 2)] * 32, batch=2), batch=2, drafts=False)
    assert figures["gen/laps_s"] == pytest.approx([0.5, 0.5])
    assert figures["gen/decode_tokens_per_sec"] == pytest.approx(4)
    assert (figures["gen/step_ms"], figures["gen/token_ms/p50"]) == pytest.approx((500, 500))


@pytest.mark.parametrize("more", [0, 1])
def test_the_gain_of_drafts_is_of_all_tokens_after_the_first(monkeypatch, more):
    """With drafts, 6 tokens take 3 s, and without them 6 s. The texts differ from their fifth token on, of 7 each.

    A text of one token has no speed. The turns are A B B A A B, and one turn of each takes longer.
    """
    idx, lengths = torch.zeros(1, 3, dtype=torch.int64), torch.tensor([3])
    drafting = Decoder(varied_gpt(), 1, 24, GREEDY, options=GenerateConfig(speculate="ngram"))
    steps = {  # the same in each turn
        True: [(10.0, [0]), (11.0, [1, 2, 3]), (12.0, [9]), (13.0, [5, 6])],
        False: [(20.0 + number, [number]) for number in range(7)],
    }
    now, turns = [], []

    def stream(decoder, idx, new, lengths):
        turns.append(drafts := decoder.step_tokens > 1)
        for seconds, tokens in steps[drafts][: None if more else 1]:
            now[:] = [seconds * (10 if turns == [True] or turns[2:] == [False] else 1)]
            yield [tokens]

    monkeypatch.setattr(measure, "stream", stream)
    monkeypatch.setattr(measure, "warm_up", lambda *_: None)
    monkeypatch.setattr(writing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    gain = measure.gain_of_drafts(drafting, {"options": GenerateConfig(speculate="ngram")}, idx, lengths, 7)
    assert turns == [True, False, False, True, True, False]
    if not more:
        assert gain == {"gen/same_tokens": 1.0}
        assert measure.gain_line(gain) == "drafts   not timed; the texts agree in their first 100.0%"
        return
    assert gain == {"gen/same_tokens": 4 / 7, "gen/undrafted_tokens_per_sec": 1.0, "gen/speedup": 2.0}
    assert measure.gain_line(gain) == "drafts   2.00x the 1 tok/s without; the texts agree in their first 57.1%"


def test_a_draft_counts_the_tokens_of_its_intervals():
    """Half of the groups make 1 token a step, half 4. A lap is the time of a token."""
    figures = decode_speed(arrive((9, 1), *[(0.5, 1)] * 16, *[(0.5, 4)] * 16), batch=1, drafts=True)
    assert figures["gen/laps_s"] == pytest.approx([0.5, 0.125])
    assert figures["gen/step_ms"] == pytest.approx(500)
    assert figures["gen/decode_tokens_per_sec"] == pytest.approx((2 + 8) / 2)


def test_a_launch_of_16_tokens_is_16_steps():
    """Also if the last launch makes one token."""
    figures = decode_speed(arrive((9, 1), *[(1.6, 16)] * 4, (0.1, 1)), batch=1, drafts=False)
    assert figures["gen/laps_s"][:4] == pytest.approx([0.1] * 4)
    assert figures["gen/step_ms"] == pytest.approx(100)


def test_the_last_graph_does_not_count_if_its_tokens_were_cut():
    """A graph of 8 tokens takes 0.8 s, also if only 3 of them are used. A draft may always make fewer tokens."""
    figures = decode_speed(arrive((9, 2), *[(0.8, 16)] * 4, (0.8, 6), batch=2), batch=2, drafts=False, graph_tokens=8)
    assert figures["gen/laps_s"] == pytest.approx([0.1, 0.1])
    assert figures["gen/token_ms/p99"] == pytest.approx(100)
    figures = decode_speed(arrive((9, 2), (0.8, 6), batch=2), batch=2, drafts=False, graph_tokens=8)
    assert figures["gen/step_ms"] is None
    figures = decode_speed(arrive((9, 2), *[(0.8, 4)] * 15, (0.8, 1), batch=2), batch=2, drafts=True)
    assert figures["gen/laps_s"] == pytest.approx([16 * 0.8 * 2 / 61])


def test_a_receipt_is_that_of_one_token(monkeypatch):
    """A greedy token needs one maximum, and a graph of 8 tokens has 8."""
    monkeypatch.setattr("lab.proof.receipt.MOST_KERNELS", 1000)
    kernels, attn = KernelsConfig(), AttnConfig("eager")
    row = {"kernels": dict.fromkeys(("norm", "attention", "mlp", "decode"), "eager")}
    decoders = [Decoder(varied_gpt(), 1, 24, GREEDY) for _ in range(2)]
    with_graphs(decoders[1], 3, 21)
    for decoder in decoders:
        decoder.prefill(prompt(1))
        receipt = measure.receipt_of_step(decoder, row, kernels, attn)
        assert {kernel["name"]: kernel["calls"] for kernel in receipt["kernels"]}["aten::max"] == 1


def test_the_power_is_that_of_repeated_generations(monkeypatch):
    """Two sequences of 12 tokens in 0.6 s, three times; a longer generation once."""
    power, decoder = PowerMeter(torch.device("cpu")), Decoder(varied_gpt(), 2, 15, GREEDY)
    monkeypatch.setattr(power, "figures", lambda tokens, ranks: {"tokens": tokens})
    monkeypatch.setattr(power, "stop", lambda: setattr(power, "seconds", power.seconds + 0.6))
    monkeypatch.setattr(power, "start", lambda: None)
    monkeypatch.setattr(power, "_watch", lambda sensors: None)
    for seconds, sensors, times in ((0.6, "sensors", 3), (2.0, "sensors", 1), (0.6, None, 1)):
        power.seconds, power.sensors = seconds, sensors
        figures = measure.power_figures(power, decoder, prompt(2), torch.tensor([3, 2]), 12)
        assert figures == {"tokens": times * 2 * 12}


def test_one_arrival_has_no_speed():
    assert decode_speed(arrive((9, 1)), batch=1, drafts=False)["gen/decode_tokens_per_sec"] is None


def test_accepted_tokens_are_those_of_sequences_that_are_not_complete():
    """One sequence gets 1 + 3 tokens, the other 1 + 3 x 1: six tokens in four steps of a sequence after the prefill."""
    texts = [Text(Bytes(), []), Text(Bytes(), [])]
    steps = [[[0], [0]], [[1, 2, 3], [1]], [[], [2]], [[], [3]]]
    arrivals = [arrival for arrival, _ in writing.read_stream(iter(steps), texts)]
    assert [(each.tokens, each.sequences) for each in arrivals] == [(2, 2), (4, 2), (1, 1), (1, 1)]
    decoder = Decoder(varied_gpt(), 2, 24, GREEDY, options=GenerateConfig(speculate="ngram"))
    idx, lengths = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 3])
    found = measure.figures(decoder, idx, lengths, [0.1], arrivals, least=1, bandwidth=1.0)
    assert found["gen/accepted_tokens"] == 6 / 4


def test_the_time_of_a_token_is_that_of_sequences_that_are_not_complete():
    """One of two sequences is complete after the second step, and each step takes a second."""
    figures = decode_speed([Arrival(0.0, 2, 2), Arrival(1.0, 2, 2), Arrival(2.0, 1, 1)], batch=2, drafts=True)
    assert (figures["gen/token_ms/p50"], figures["gen/token_ms/p99"]) == (1000, 1000)
