"""The proof of a generation fails for wrong logits of any sequence that it compares, and for NaN."""

import math
from dataclasses import replace

import pytest
import torch

from kernels.sampling import Sampling
from lab.proof.generation import compared_rows, judge, prove, to_float64, why_proof_fails
from model.decoder import Decoder
from model.generate import generate
from model.generate_config import GenerateConfig
from runtime.config import UserError
from tests.model.test_generate import varied_gpt
from tests.model.test_gpt import SMALL

OPTIONS = {"decode": "blocks", "compiled": False, "options": GenerateConfig()}


def test_the_compared_sequences_are_spread_over_the_batch():
    assert [compared_rows(batch) for batch in (1, 2, 6, 64)] == [[0], [0, 1], [0, 1, 3, 5], [0, 21, 42, 63]]


@pytest.mark.parametrize(
    ("gaps", "error", "lossy", "ok"),
    [
        ([0.0, 1.9], 1.0, None, True),
        ([0.0, 2.1], 1.0, None, False),
        ([0.0, 1.9], 1.1, None, False),
        ([0.0, 2.1], 1.1, "int8 rounds", None),
        ([0.0, 1.9], math.nan, "int8 rounds", False),
    ],
)
def test_a_token_may_be_off_by_twice_the_bound_and_a_logit_by_the_bound(gaps, error, lossy, ok):
    """Two logits that are each off by the bound, 1 here, may change their order."""
    proof = judge(torch.tensor(gaps), error, 1.0, lossy)
    assert (proof["ok"], proof["ties"] + proof["other_tokens"]) == (ok, 1)


@pytest.mark.parametrize("broken", [None, "-inf", "last"])
def test_wrong_logits_fail(broken, monkeypatch):
    """One logit of each row is -inf, or the logits of the last sequence are too large."""
    from kernels.decode import blocks

    model = varied_gpt().eval()
    idx = torch.randint(97, (6, 4), generator=torch.Generator().manual_seed(2))
    original = blocks.decode

    def decode(packed, tokens, cache):
        logits = original(packed, tokens, cache).clone()
        if broken == "-inf":
            logits[:, :, 96] = -torch.inf
        elif broken == "last":
            logits[-1] *= 1.01
        return logits

    monkeypatch.setattr(blocks, "decode", decode)
    decoder = Decoder(model, 6, 8, Sampling(97, temperature=0))
    with torch.no_grad():
        proof = prove(decoder, OPTIONS, "fp32", idx, torch.full((6,), 4))
    assert (why_proof_fails(proof) is None) == (broken is None)
    assert proof["compared"] == 4


def test_the_bound_is_twice_the_error_of_eager_pytorch():
    """Computed here from one forward over the same tokens, in fp32 and in float64."""
    model, sampling = varied_gpt().eval(), Sampling(97, temperature=0)
    idx = torch.randint(97, (1, 4), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        proof = prove(Decoder(model, 1, 8, sampling), OPTIONS, "fp32", idx, torch.full((1,), 4))
        text = generate(model, idx, proof["new_tokens"], n_vocab=97, temperature=0)
        in_float32 = model(text[:, :-1])[0, 3:, :97].double()
        exact = to_float64(model)(text[:, :-1])[0, 3:, :97]
    error = (in_float32 - exact).abs().max().item()
    assert proof["logits_bound"] == pytest.approx(2 * error + 2.0**-24 * exact.abs().max().item(), rel=0.3)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_a_compiled_step_is_compiled_once(backend):
    """The greedy tokens and the logits come from one compiled graph, because a compilation takes half a minute."""
    model, options = varied_gpt(replace(SMALL, n_layer=1)).eval(), OPTIONS | {"compiled": True}
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    idx = torch.randint(97, (1, 4), generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), torch.compiler.set_stance("default", force_backend=backend):
        proof = prove(Decoder(model, 1, 8, Sampling(97, 0.8), **options), options, "fp32", idx, torch.full((1,), 4))
    assert proof["ok"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("windowed", ["model", "draft"])
def test_a_proof_with_drafts_is_as_long_as_the_window_allows(windowed):
    """A draft of 4 tokens needs the rows of prompt, new tokens and a draft: 4 + 16 + 4 of 24."""
    window = replace(SMALL, pos="rope", n_layer=1, window=24)
    models = [varied_gpt(config).eval() for config in (window, replace(window, window=None))]
    model, draft = (models[0], None) if windowed == "model" else models[::-1]
    options = OPTIONS | {"options": GenerateConfig(speculate="small.pt" if draft else "ngram"), "draft": draft}
    idx = torch.randint(97, (1, 4), generator=torch.Generator().manual_seed(2))
    proof = prove(Decoder(model, 1, 8, Sampling(97, 0.8), **options), options, "fp32", idx, torch.full((1,), 4))
    assert (proof["ok"], proof["new_tokens"]) == (True, 16)
    idx = torch.randint(97, (1, 19), generator=torch.Generator().manual_seed(2))
    decoder = Decoder(model, 1, 20, Sampling(97, 0.8), **options)
    with pytest.raises(
        UserError, match=r"^proof=true compares two new tokens or more, and the window has room for one: "
    ):
        prove(decoder, options, "fp32", idx, torch.full((1,), 19))
