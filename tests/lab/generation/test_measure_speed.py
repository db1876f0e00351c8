"""decode_speed() by hand: groups of steps, drafts, and launches of several tokens; and the receipt of a graph."""

import pytest
import torch

from kernels.registry import AttnConfig, KernelsConfig
from lab.generation import measure
from lab.generation.measure import decode_speed
from lab.generation.writing import Arrival
from model.decoder import Decoder
from runtime.power import PowerMeter
from tests.model.test_decoder import with_graphs
from tests.model.test_generate import GREEDY, prompt, varied_gpt


def arrive(*steps):
    """Arrivals of (seconds since the last one, tokens)."""
    now, arrivals = 0.0, []
    for seconds, tokens in steps:
        now += seconds
        arrivals.append(Arrival(now, tokens))
    return arrivals


def test_steps_of_one_token():
    figures = decode_speed(arrive((9, 2), *[(0.5, 2)] * 32), batch=2, drafts=False)
    assert figures["gen/laps_s"] == pytest.approx([0.5, 0.5])
    assert figures["gen/decode_tokens_per_sec"] == pytest.approx(4)
    assert (figures["gen/step_ms"], figures["gen/token_ms/p50"]) == pytest.approx((500, 500))


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
    figures = decode_speed(arrive((9, 2), *[(0.8, 16)] * 4, (0.8, 6)), batch=2, drafts=False, graph_tokens=8)
    assert figures["gen/laps_s"] == pytest.approx([0.1, 0.1])
    assert figures["gen/token_ms/p99"] == pytest.approx(100)
    figures = decode_speed(arrive((9, 2), (0.8, 6)), batch=2, drafts=False, graph_tokens=8)
    assert figures["gen/step_ms"] is None
    figures = decode_speed(arrive((9, 2), *[(0.8, 4)] * 15, (0.8, 1)), batch=2, drafts=True)
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
