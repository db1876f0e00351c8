"""Drafts, of n-grams and of a smaller model: they save steps, and do not change the text."""

from dataclasses import replace

import pytest
import torch

from kernels.cache import FP8
from kernels.registry import Unavailable
from kernels.sampling import Sampling
from model.decoder import Decoder
from model.generate import NotFinite
from model.generate_config import GenerateConfig
from model.speculation import NGRAM, ngram_draft
from runtime.config import UserError
from tests.model.test_decoder import SAMPLED, buckets, ragged  # noqa: F401
from tests.model.test_generate import GREEDY, greedy, prompt, streamed, varied_gpt
from tests.model.test_gpt import SMALL

SOURCES = {
    "ngram": None,
    "model": replace(SMALL, n_layer=1),
    "llama": replace(SMALL, n_layer=1, pos="rope", n_kv_head=1, norm="rmsnorm", mlp="swiglu", vocab_size=128),
}


def drafts(source, draft_tokens=4, **other):
    """Return the arguments of a decoder with drafts. Those of a model are mostly wrong, because its weights differ."""
    config = SOURCES[source]
    draft = None if config is None else varied_gpt(replace(config, **other), spread=1.0)
    speculate = "ngram" if draft is None else "out/small"
    return {"options": GenerateConfig(speculate=speculate, draft_tokens=draft_tokens), "draft": draft}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft_tokens", [1, 4, 7])
@pytest.mark.parametrize("source", SOURCES)
def test_a_draft_does_not_change_the_text(source, draft_tokens, sampling):
    model, (idx, lengths) = varied_gpt(), ragged()
    expected = streamed(Decoder(model, 4, 24, sampling, seed=2), idx, 15, lengths)
    decoder = Decoder(model, 4, 24, sampling, seed=2, **drafts(source, draft_tokens))
    for _ in range(2):
        assert streamed(decoder, idx, 15, lengths) == expected


@pytest.mark.parametrize("new", [2, 4, 15])
@pytest.mark.parametrize("draft_tokens", [1, 4, 7])
@pytest.mark.parametrize("source", SOURCES)
def test_a_draft_near_the_end_when_the_host_is_behind(monkeypatch, source, draft_tokens, new):
    """As on a GPU, where the decoder knows only a bound of its length. The cache has no row to spare."""
    model, (idx, lengths) = varied_gpt(), ragged()
    expected = streamed(Decoder(model, 4, 9 + new, SAMPLED), idx, new, lengths)
    monkeypatch.setattr("model.generate.max_lag", lambda *_: 4)
    decoder = Decoder(model, 4, 9 + new, SAMPLED, **drafts(source, draft_tokens))
    assert streamed(decoder, idx, new, lengths) == expected


def test_a_right_draft_saves_steps():
    """A model that repeats its input accepts whole drafts."""
    model = varied_gpt()
    with torch.no_grad():
        model.ln_f.weight.fill_(1)
        for weight in (model.wpe.weight, *(p for n, p in model.named_parameters() if "c_proj" in n)):
            weight.zero_()  # the blocks add nothing, so a token is most likely to follow itself
    idx = torch.full((1, 5), 7)
    decoder = Decoder(model, 1, 24, GREEDY, options=GenerateConfig(speculate="ngram", draft_tokens=4))
    assert greedy(model, idx, 3)[0, 5:].tolist() == [7, 7, 7]
    outputs = [decoder.prefill(idx).clone(), decoder.step().clone(), decoder.step().clone()]
    assert [output[0, 0].item() for output in outputs] == [1, 5, 5]


def test_the_draft_follows_the_latest_longest_match():
    """The text ends in 1 2 3. Before, it has 1 2 3, then 2 3, then 3. Each earlier match is removed in turn."""
    assert NGRAM == 3
    history = torch.tensor([[1, 2, 3, 40, 41, 2, 3, 50, 3, 60, 1, 2, 3, 0, 0, 0]])
    assert ngram_draft(history, torch.tensor([12]), 3).tolist() == [[40, 41, 2]]
    history[0, 0] = 9
    assert ngram_draft(history, torch.tensor([12]), 3).tolist() == [[50, 3, 60]]
    history[0, [1, 5]] = 9
    assert ngram_draft(history, torch.tensor([12]), 3).tolist() == [[60, 1, 2]]


def test_a_draft_at_the_end_repeats_the_text_after_its_match():
    history = torch.tensor([[5, 6, 7, 6, 7, 0, 0, 0, 0, 0], [8, 8, 0, 0, 0, 0, 0, 0, 0, 0]])
    assert ngram_draft(history, torch.tensor([4, 1]), 5).tolist() == [[6, 7, 6, 7, 6], [8, 8, 8, 8, 8]]
    assert ngram_draft(history, torch.tensor([0, 0]), 2).shape == (2, 2)


def test_a_draft_needs_a_cache_of_all_tokens():
    model = varied_gpt(replace(SMALL, window=4))
    with pytest.raises(UserError, match=r"generate\.speculate needs a cache of all tokens, not of a window of 4"):
        Decoder(model, 1, 24, GREEDY, options=GenerateConfig(speculate="ngram"))


@pytest.mark.parametrize("source", SOURCES)
def test_a_draft_ends_at_a_token_whose_logits_are_not_finite(monkeypatch, source):
    """In a step of several tokens, masked keys with NaN make earlier logits NaN too, so it names an earlier token."""
    model, idx = varied_gpt(), prompt(1, 3)
    decoder = Decoder(model, 1, 24, GREEDY, **drafts(source, 3))
    expected = streamed(decoder, idx, 4)
    with torch.no_grad():
        model.wpe.weight[12] = torch.nan
    monkeypatch.setattr("model.generate.max_lag", lambda *_: 2)  # so two more steps follow it
    with pytest.raises(NotFinite, match=r"^the logits of new token ([89]|1[01]) are not finite, "):
        streamed(decoder, idx, 20)
    assert streamed(decoder, idx, 4) == expected


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft_tokens", [1, 2, 7])
def test_a_model_that_drafts_for_itself_is_always_right(draft_tokens, sampling):
    """So its cache has every token, and it draws with the model's random numbers. The prompts differ in length."""
    model, (idx, lengths) = varied_gpt(replace(SMALL, block_size=40)), ragged()
    options = GenerateConfig(speculate="out/same", draft_tokens=draft_tokens)
    decoder = Decoder(model, 4, 40, sampling, seed=2, options=options, draft=model)
    decoder.prefill(idx, lengths)
    for _ in range(30 // (1 + draft_tokens)):
        assert decoder.step()[:, 0].tolist() == [1 + draft_tokens] * 4


def test_a_draft_model_that_draws_no_token_drafts_wrongly():
    """Its logits are NaN from the second position on. The text is that of the model."""
    model, (idx, lengths), arguments = varied_gpt(), ragged(), drafts("model")
    with torch.no_grad():
        arguments["draft"].wpe.weight[1:] = torch.nan
    expected = streamed(Decoder(model, 4, 24, SAMPLED), idx, 15, lengths)
    assert streamed(Decoder(model, 4, 24, SAMPLED, **arguments), idx, 15, lengths) == expected


def probabilities(model, texts, ids, temperature):
    """Return the exact probabilities of the token after each text (N, T), (N, ids) float64."""
    with torch.no_grad():
        return (model(texts)[:, -1, :ids].double() / temperature).softmax(-1)


def test_text_with_drafts_follows_the_probabilities_of_the_model():
    """A chi-square test of the first two new tokens of 8192 sequences. A step with a draft makes the second one.

    There are 8 ids, so 64 pairs, and each is expected at least 10 times. The bound is 4.5 standard deviations above the
    mean of 63.
    """
    N, ids, temperature = 8192, 8, 2.0
    model, idx = varied_gpt(spread=1.0), prompt(1).expand(N, -1)
    decoder = Decoder(model, N, 24, Sampling(ids, temperature), seed=3, **drafts("model"))
    drawn = torch.tensor(streamed(decoder, idx, 2))
    assert decoder.positions.float().std() > 0  # some drafts were right, and others wrong
    counts = torch.zeros(ids, ids, dtype=torch.float64)
    counts.index_put_((drawn[:, 0], drawn[:, 1]), torch.ones(N, dtype=torch.float64), accumulate=True)
    p = probabilities(model, idx[:1], ids, temperature).T
    after = torch.cat((idx[:ids], torch.arange(ids)[:, None]), 1)
    expected = N * p * probabilities(model, after, ids, temperature)
    assert expected.min() > 10
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 4.5 * (2 * 63) ** 0.5


def test_a_draft_is_right_as_often_as_the_coupling_says():
    """With shared exponential noise, both draw id i with probability 1 / sum_j max(p_j / p_i, q_j / q_i).

    This is for the first token of a draft, over 4096 sequences, within 4 standard deviations. It is at least
    (1 - d) / (1 + d) and at most 1 - d for each sequence, where d is the total variation of p and q.
    """
    N, temperature = 4096, 1.5
    model, arguments = varied_gpt(spread=1.0), drafts("model", 1)
    decoder = Decoder(model, N, 24, Sampling(97, temperature), seed=5, **arguments)
    idx = prompt(1).expand(N, -1)
    first = decoder.prefill(idx)[:, 1:2].clone()
    right = (decoder.step()[:, 0] == 2).double()
    texts = torch.cat((idx, first), 1)
    p, q = (probabilities(each, texts, 97, temperature) for each in (model, arguments["draft"]))
    ratios = torch.maximum(p[:, None] / p[:, :, None], q[:, None] / q[:, :, None])
    chance = (1 / ratios.sum(-1)).sum(-1)
    d = (p - q).abs().sum(-1) / 2
    assert ((1 - d) / (1 + d) <= chance + 1e-9).all()
    assert (chance <= 1 - d + 1e-9).all()
    assert 0.05 < chance.mean() < 0.95
    deviation = (chance * (1 - chance)).sum() ** 0.5
    assert (right.sum() - chance.sum()).abs() < 4 * deviation


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"block_size": 16},
            "has 16 positions, and prompt and answer may need 24: choose a model with more, or fewer new",
        ),
        ({"vocab_size": 64}, "has 64 ids, and the tokenizer 97: choose a model with the same tokenizer"),
        (
            {"window": 8},
            "has a window of 8 tokens, and a draft needs a cache of all 28: choose a model without window",
        ),
    ],
)
def test_a_model_that_cannot_draft_is_refused(other, message):
    with pytest.raises(UserError, match=f"^generate.speculate=out/small {message}"):
        Decoder(varied_gpt(), 1, 24, GREEDY, **drafts("model", **other))


def test_a_draft_model_has_a_cache_of_the_same_dtype():
    arguments = drafts("model")
    arguments["options"] = replace(arguments["options"], kv="fp8")
    decoder = Decoder(varied_gpt(), 1, 24, GREEDY, **arguments)
    assert {tensor.dtype for tensor in decoder.memory()["kv_cache"]} == {FP8}
    assert len(decoder.memory()["kv_cache"]) == 2 * (3 + 1)  # keys and values of 3 layers, and of 1


def test_a_captured_prefill_is_not_padded_beyond_the_positions_of_the_draft_model():
    """A prompt of 20 tokens would be padded to 24. The table of the draft model has 22 positions."""
    decoder = Decoder(varied_gpt(), 1, 22, GREEDY, **drafts("model", block_size=22))
    decoder.captures = True
    assert decoder.padded(1, 20) == 22


def test_logits_that_are_not_finite_leave_none_in_either_cache(monkeypatch):
    """Both models have NaN at the same position."""
    model, idx, arguments = varied_gpt(), prompt(1, 3), drafts("model", 3)
    decoder = Decoder(model, 1, 24, GREEDY, **arguments)
    with torch.no_grad():
        for each in (model, arguments["draft"]):
            each.wpe.weight[12] = torch.nan
    with pytest.raises(NotFinite):
        streamed(decoder, idx, 20)
    assert all(tensor.isfinite().all() for tensor in decoder.memory()["kv_cache"])


def test_compiled_steps_of_a_draft_model_are_three_graphs_a_bucket():
    """They verify 4 tokens, and draft with two tokens and with one.

    Dynamo by default stops after 8 graphs. It counts those of all decoders, so the second one has the graphs 10 to 13.
    """
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model, (idx, lengths) = varied_gpt(replace(SMALL, n_layer=1)), ragged()
    expected = streamed(Decoder(model, 4, 24, GREEDY), idx, 15, lengths)
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        for graphs, buckets, arguments in ((9, 3, drafts("model", 3)), (13, 4, {})):
            decoder = Decoder(model, 4, 24, GREEDY, compiled=True, **arguments)
            assert len(decoder.warm_up(1, 23)) == buckets
            assert streamed(decoder, idx, 15, lengths) == expected
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.gpu
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("decode", ["blocks", "triton"])
def test_captured_steps_with_drafts_give_the_same_texts(decode, source):
    """In fp32, CUDA graphs with drafts give the sampled tokens of steps without graphs and without drafts."""
    model, arguments = varied_gpt().cuda(), drafts(source, 3)
    if arguments["draft"]:
        arguments["draft"].cuda()
    idx, lengths = (tensor.cuda() for tensor in ragged())
    try:
        decoder = Decoder(model, 4, 24, SAMPLED, seed=2, decode=decode, **arguments)
    except Unavailable as reason:
        pytest.skip(str(reason))
    decoder.warm_up(9, 15)
    expected = streamed(Decoder(model, 4, 24, SAMPLED, seed=2, decode=decode), idx, 15, lengths)
    assert [streamed(decoder, idx, 15, lengths) for _ in range(2)] == [expected] * 2
