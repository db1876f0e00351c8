"""The Decoder: batches of different prompts, windows, prefills in parts, fp8, drafts, launches of several tokens."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kernels.cache import FP8, Cache
from kernels.decode import FAILED_LAUNCH, reference
from kernels.registry import KernelError, Unavailable, backend, impls, unavailable
from kernels.sampling import NO_TOKEN, Sampling, sample_tokens
from model import decoder as module
from model.decoder import Decoder
from model.generate import NotFinite, generate, stream
from model.generate_config import GenerateConfig
from model.weights import copied_bytes, weights_of
from runtime.config import UserError
from tests.model.test_generate import CPU, GREEDY, greedy, prompt, streamed, varied_gpt
from tests.model.test_gpt import SMALL, gpt

SAMPLED = Sampling(97, temperature=0.9, top_k=40, top_p=0.95)
LENGTHS = (3, 9, 1, 6)


@pytest.fixture(autouse=True)
def buckets(monkeypatch):
    """Buckets of 4, 8, 16, ... keys, so that 24 positions have four."""
    monkeypatch.setattr(module, "BUCKET", 4)


def ragged():
    """Return prompts of LENGTHS tokens, padded with random tokens, and their lengths."""
    return prompt(len(LENGTHS), max(LENGTHS)), torch.tensor(LENGTHS)


def with_graphs(decoder, prompt, new):
    """Let a decoder on a CPU step as on a GPU after warm_up(prompt, new): a function takes the place of each graph."""
    decoder.graph_tokens = module.GRAPH_TOKENS
    decoder.output = torch.ones(len(decoder.tokens), 1 + module.GRAPH_TOKENS, dtype=torch.int64)
    for keys in decoder.warm_up(prompt, new):
        decoder.graphs[keys] = SimpleNamespace(replay=partial(decoder._steps, keys, module.GRAPH_TOKENS))
    return decoder


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", [{}, {"n_kv_head": 1}, {"window": 4}, {"window": 16}, {"pos": "rope"}], ids=str)
def test_each_sequence_of_a_batch_continues_as_it_would_alone(options, sampling):
    """Sequence b of seed s draws what a single sequence of seed s + b draws."""
    model = varied_gpt(replace(SMALL, **options))
    idx, lengths = ragged()
    texts = streamed(Decoder(model, 4, 21, sampling, seed=5), idx, 12, lengths)
    for b, length in enumerate(LENGTHS):
        alone = Decoder(model, 1, length + 12, sampling, seed=5 + b)
        assert [texts[b]] == streamed(alone, idx[b : b + 1, :length], 12)
        if sampling is GREEDY:
            assert texts[b] == greedy(model, idx[b : b + 1, :length], 12)[0, length:].tolist()
    assert len(set(map(tuple, texts))) == 4


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("window", [1, 5, 8])
def test_the_cache_of_a_window_has_its_size(attn, window):
    """The tokens equal full forwards with the window, for prompts shorter and longer than the window."""
    model = varied_gpt(replace(SMALL, window=window), attn)
    for length in (1, 3, 11):
        decoder = Decoder(model, 2, length + 12, GREEDY)
        assert decoder.kv[0][0].shape[1] == window
        assert streamed(decoder, prompt(2, length), 12) == greedy(model, prompt(2, length), 12)[:, length:].tolist()


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"pos": "rope"}], ids=str)
def test_a_prefill_in_parts_gives_the_same_tokens(options, monkeypatch):
    model = varied_gpt(replace(SMALL, **options))
    idx, lengths = ragged()
    expected = streamed(Decoder(model, 4, 21, GREEDY), idx, 12, lengths)
    monkeypatch.setattr(module, "CHUNK", 4)
    monkeypatch.setattr(module, "SHORT_CHUNK", 1)
    calls = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, **rest: calls.append(ids.shape[1]) or forward(ids, **rest))
    assert streamed(Decoder(model, 4, 21, GREEDY), idx, 12, lengths) == expected
    assert calls[:3] == [4, 4, 1]
    whole, rest = (Decoder(model, 4, 21, GREEDY) for _ in range(2))
    rest.prefill(idx[:, :6])
    calls.clear()
    assert torch.equal(rest.prefill(idx, kept=6), whole.prefill(idx))
    assert calls[:1] == [3]


def test_an_fp8_cache_takes_half_the_bytes_of_bf16_and_gives_similar_logits():
    """Rounding changes a key by at most 1/16 of its value, so the logits change by less than 1/16 of their norm."""
    model = varied_gpt(SMALL, spread=1.0)
    logits = {}
    for kv in ("auto", "fp8"):
        decoder = Decoder(model, 2, 24, GREEDY, options=GenerateConfig(kv=kv))
        decoder.prefill(prompt(2, 9))
        logits[kv] = decoder.decode(decoder.packed, decoder.tokens, Cache(decoder.kv, 24, decoder.positions))
    assert {t.dtype for pair in decoder.kv for t in pair} == {FP8}
    error = (logits["fp8"] - logits["auto"]).norm() / logits["auto"].norm()
    assert 0 < error < 2**-4


@pytest.mark.parametrize("new", [1, 5, 15])
def test_a_decoder_that_makes_several_tokens_in_one_launch(new, monkeypatch):
    """The tokens of a launch arrive together, and each text has exactly `new` tokens."""
    from kernels.decode import blocks

    model, (idx, lengths) = varied_gpt(), ragged()
    expected = streamed(Decoder(model, 4, 9 + new, SAMPLED), idx, new, lengths)
    launches = []

    def generate_tokens(packed, tokens, cache, seeds, sampling, steps, stops):
        assert stops == (3, 5)
        launches.append(steps)
        drawn = []
        for _ in range(steps):
            logits = blocks.decode(packed, tokens, cache)[:, 0]
            cache = cache._replace(positions=cache.positions + 1)
            tokens = sample_tokens(logits, seeds, cache.positions, sampling)[:, None]
            drawn.append(tokens)
        return torch.cat(drawn, 1)

    monkeypatch.setattr(blocks, "generate_tokens", generate_tokens, raising=False)
    monkeypatch.setattr(module, "LAUNCH_TOKENS", 4)
    decoder = Decoder(model, 4, 9 + new, SAMPLED, stops=(3, 5))
    decoder.warm_up(9, new)
    launches.clear()
    for _ in range(2):
        assert streamed(decoder, idx, new, lengths) == expected
    assert sum(launches) >= 2 * (new - 1)
    assert max(launches, default=0) <= 4
    with pytest.raises(Unavailable, match=r"kernels\.decode=blocks verifies no draft"):
        Decoder(model, 1, 9, SAMPLED, options=GenerateConfig(speculate="ngram"))


@pytest.mark.parametrize("lag", [0, 1])
def test_a_failed_launch_is_an_error(lag, monkeypatch):
    """Its tokens are FAILED_LAUNCH. Those of the launch before it arrive, also if the host is a launch behind."""
    from kernels.decode import blocks

    model, (idx, lengths), launches = varied_gpt(), ragged(), []

    def generate_tokens(packed, tokens, cache, seeds, sampling, steps, stops):
        launches.append(steps)
        return torch.full((len(tokens), steps), 7 if len(launches) == 1 else FAILED_LAUNCH)

    monkeypatch.setattr(blocks, "generate_tokens", generate_tokens, raising=False)
    monkeypatch.setattr(module, "LAUNCH_TOKENS", 4)
    monkeypatch.setattr("model.generate.max_lag", lambda *_: lag)
    steps = stream(Decoder(model, 4, 21, SAMPLED), idx, 12, lengths)
    assert [len(tokens) for tokens in next(steps)] == [1] * 4
    assert next(steps) == [[7] * 4] * 4
    with pytest.raises(KernelError, match=r"kernels\.decode=blocks: a launch failed, .*: try again"):
        next(steps)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("new", [1, 2, 9, 10, 15])
@pytest.mark.parametrize("options", [{}, {"window": 4}, {"window": 16}, {"pos": "rope"}], ids=str)
def test_graphs_of_several_steps(options, new, lag, monkeypatch):
    """A graph makes GRAPH_TOKENS tokens. The last graph may exceed the capacity and the table of 24 positions.

    A replay after the end works too: receipt_of_step() profiles it.
    """
    model, (idx, lengths) = varied_gpt(replace(SMALL, **options)), ragged()
    expected = streamed(Decoder(model, 4, 9 + new, SAMPLED), idx, new, lengths)
    monkeypatch.setattr("model.generate.max_lag", lambda *_: lag)
    decoder = with_graphs(Decoder(model, 4, 9 + new, SAMPLED), 9, new)
    assert decoder.kv[0][0].shape[1] == min(9 + new, options.get("window", 99))
    for _ in range(2):
        steps = list(stream(decoder, idx, new, lengths))
        assert [[token for step in steps for token in step[b]] for b in range(4)] == expected
        assert [len(step[0]) for step in steps[1:-1]] == [module.GRAPH_TOKENS] * ((new - 2) // module.GRAPH_TOKENS)
    made = decoder.step()[:, 0]
    assert made.tolist() == [module.GRAPH_TOKENS if new > 1 else 1] * 4  # there is no graph for one new token


def test_a_graph_reads_a_bucket_for_all_its_steps():
    """NaN in the rows behind the bucket does not change the tokens. A length without a graph has steps of one token."""
    model = varied_gpt()
    decoder = with_graphs(Decoder(model, 2, 24, GREEDY), 3, 5)
    assert list(decoder.graphs) == [16]  # the first graph ends with 11 keys, and a second one would with 19
    decoder.prefill(prompt())
    for pair in decoder.kv:
        for tensor in pair:
            tensor[:, 16:] = torch.nan
    steps = [decoder.step().clone() for _ in range(3)]
    assert [step[0, 0].item() for step in steps] == [8, 1, 1]
    made = [step[:, 1 : 1 + step[0, 0]] for step in steps]
    assert torch.equal(torch.cat(made, 1), greedy(model, prompt(), 11)[:, 4:])


def test_draws_vary_after_the_end_of_the_position_table():
    """There every token has the same position in the window, but each draw has random numbers of its own."""
    model = varied_gpt(replace(SMALL, block_size=2), spread=0.0)
    with torch.no_grad():
        model.wte.weight.zero_()  # all tokens are equally likely
    ids = generate(model, torch.tensor([[1, 2]]), 60, n_vocab=97)[0, 2:].tolist()
    assert len(set(ids)) > 30


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kv": "int4"}, "generate.kv=int4: choose auto, fp8"),
        (
            {"speculate": "random"},
            "generate.speculate=random: choose ngram, the checkpoint of a smaller model, or null",
        ),
        ({"draft_tokens": 0}, r"generate.draft_tokens=0: it must be in \[1, 7\]"),
        ({"draft_tokens": 8}, r"generate.draft_tokens=8: it must be in \[1, 7\]"),
    ],
)
def test_wrong_options(values, message):
    with pytest.raises(UserError, match=message):
        GenerateConfig(**values)


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_captured_prefills_are_padded_and_give_the_same_tokens(sampling):
    model, (idx, lengths) = varied_gpt().cuda(), ragged()
    decoder = Decoder(model, 4, 24, sampling)
    decoder.warm_up(idx.shape[1], 12)  # only later prefills are captured
    assert [decoder.padded(4, length) for length in (1, 16, 17, 24, 25)] == [16, 16, 24, 24, None]
    texts = [streamed(decoder, idx.cuda(), 12, lengths.cuda()) for _ in range(3)]
    assert sorted(decoder.prefills) == [16]
    assert texts[0] == texts[1] == texts[2] == streamed(Decoder(varied_gpt(), 4, 24, sampling), idx, 12, lengths)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_a_launch_of_several_tokens(monkeypatch):
    """step() returns before the launch is complete. The text is the same as with decode=blocks."""
    monkeypatch.setattr(module, "LAUNCH_TOKENS", 4)
    idx, lengths = ragged()
    decoder = Decoder(varied_gpt().cuda(), 4, 20, SAMPLED, decode="persistent")
    decoder.warm_up(idx.shape[1], 11)
    text = streamed(decoder, idx.cuda(), 11, lengths.cuda())
    assert text == streamed(Decoder(varied_gpt(), 4, 20, SAMPLED), idx, 11, lengths)
    decoder.prefill(idx.cuda(), lengths.cuda())
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def decoders():
    """Yield the decoders that run here and do not round the weights, and how they draw.

    Triton's interpreter takes 9 s for greedy tokens and 16 s for drawn ones, so our kernels make only drawn ones.
    """
    for impl in impls("decode"):
        if not unavailable("decode", impl, CPU) and not getattr(backend("decode", impl), "LOSSY", False):
            own_kernels = impl in ("triton", "persistent")
            marks = pytest.mark.exhaustive if own_kernels else []
            if not own_kernels:
                yield pytest.param(impl, GREEDY, id=f"{impl}-greedy")
            yield pytest.param(impl, SAMPLED, marks=marks, id=f"{impl}-sampled")


@pytest.mark.skipif(bool(unavailable("decode", "triton", CPU)), reason="needs TRITON_INTERPRET=1")
def test_bytes_of_the_weights_that_a_decoder_copies():
    """blocks and triton read the model's own. int8 has a byte for each element of a matrix, and four for each row."""
    model = varied_gpt(SMALL)
    rows = [len(weight) for h in model.h for weight in matrices(h)] + [len(model.wte.weight)]
    elements = sum(weight.numel() for h in model.h for weight in matrices(h)) + model.wte.weight.numel()
    expected = {"blocks": 0, "triton": 0, "int8": elements + 4 * sum(rows)}
    for decode, size in expected.items():
        assert copied_bytes(Decoder(model, 1, 24, GREEDY, decode=decode).packed, model) == size


def matrices(block):
    return [linear.weight for linear in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)]


@pytest.mark.parametrize(("decode", "sampling"), decoders())
def test_every_decoder_draws_the_same_text_of_a_seed(decode, sampling, monkeypatch):
    """The model is in fp32, and the prompts differ in length. Steps of one token, of a graph, and of a draft."""
    monkeypatch.setattr(module, "GRAPH_TOKENS", 3)
    model = varied_gpt(replace(SMALL, n_layer=2))
    idx, lengths = ragged()
    expected = streamed(Decoder(model, 4, 15, sampling, seed=7), idx, 6, lengths)
    assert streamed(Decoder(model, 4, 15, sampling, seed=7, decode=decode), idx, 6, lengths) == expected
    if not hasattr(backend("decode", decode), "generate_tokens"):
        captured = with_graphs(Decoder(model, 4, 15, sampling, seed=7, decode=decode), 9, 6)
        assert streamed(captured, idx, 6, lengths) == expected
        options = GenerateConfig(speculate="ngram", draft_tokens=3)
        drafting = Decoder(model, 4, 15, sampling, seed=7, decode=decode, options=options)
        assert streamed(drafting, idx, 6, lengths) == expected


def all_decoders():
    """Yield the decoders that run here, and how they draw. In Triton's interpreter they make only drawn tokens."""
    for impl in impls("decode"):
        if not unavailable("decode", impl, CPU):
            for name, sampling in {"greedy": GREEDY, "sampled": SAMPLED}.items():
                if impl not in ("triton", "int8") or name == "sampled":
                    yield pytest.param(impl, sampling, id=f"{impl}-{name}")


@pytest.mark.parametrize(("decode", "sampling"), all_decoders())
def test_every_decoder_names_the_token_whose_logits_are_not_finite(decode, sampling, monkeypatch):
    """Position 4 has NaN. The first prompt has 2 tokens, so its fourth new token follows position 4.

    The steps after it go on, and no id leaves the embedding. No NaN is left in the cache, so the next text is right.
    """
    monkeypatch.setattr(module, "GRAPH_TOKENS", 2)
    monkeypatch.setattr(module, "LAUNCH_TOKENS", 4)
    model, (idx, lengths) = varied_gpt(replace(SMALL, n_layer=1)), (prompt(2, 3), torch.tensor([2, 1]))
    decoder = Decoder(model, 2, 24, sampling, decode=decode)
    if not decoder.generate_tokens:
        decoder = with_graphs(decoder, 3, 6)
    expected = streamed(decoder, idx, 2, lengths)
    with torch.no_grad():
        model.wpe.weight[4] = torch.nan
    monkeypatch.setattr("model.generate.max_lag", lambda *_: 1)
    with pytest.raises(NotFinite, match=r"^the logits of new token 4 of sequence 1 are not finite, [^\n]*$"):
        streamed(decoder, idx, 8, lengths)
    assert streamed(decoder, idx, 2, lengths) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("decode", impls("decode"))
def test_captured_steps_name_the_token_whose_logits_are_not_finite(decode):
    """The graphs go on with NaN until the host reads the token, and give the right text afterwards.

    Position 18 has NaN, because a captured prefill is padded to 16 tokens. The first prompt has 2 tokens.
    """
    if reason := unavailable("decode", decode, torch.device("cuda")):
        pytest.skip(reason)
    model, idx, lengths = varied_gpt(replace(SMALL, n_layer=1)).cuda(), prompt(2, 3).cuda(), torch.tensor([2, 1]).cuda()
    try:
        decoder = Decoder(model, 2, 24, SAMPLED, decode=decode)
    except Unavailable as reason:  # flashinfer has no fp32
        pytest.skip(str(reason))
    decoder.warm_up(3, 20)
    expected = streamed(decoder, idx, 2, lengths)
    with torch.no_grad():
        model.wpe.weight[18] = torch.nan
    with pytest.raises(NotFinite, match=r"^the logits of new token 18 of sequence 1 are not finite, "):
        streamed(decoder, idx, 20, lengths)
    assert streamed(decoder, idx, 2, lengths) == expected


def test_a_launch_after_logits_that_are_not_finite_begins_with_an_id(monkeypatch):
    """The host is a launch behind. The embedding of NO_TOKEN would be read outside the table."""
    from kernels.decode import blocks

    def generate_tokens(packed, tokens, cache, seeds, sampling, steps, stops):
        assert (tokens >= 0).all()
        launches.append(steps)
        return torch.tensor([[1, 1, NO_TOKEN, NO_TOKEN], [1, 1, 1, 1]])

    launches, model = [], varied_gpt()
    monkeypatch.setattr(blocks, "generate_tokens", generate_tokens, raising=False)
    monkeypatch.setattr(module, "LAUNCH_TOKENS", 4)
    monkeypatch.setattr("model.generate.max_lag", lambda *_: 1)
    with pytest.raises(NotFinite, match=r"^the logits of new token 4 of sequence 1 are not finite, "):
        streamed(Decoder(model, 2, 24, GREEDY), prompt(), 15)
    assert len(launches) == 2


OTHER_SHAPES = {
    "llama": {"pos": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "n_kv_head": 1, "hidden": 40},
    "gpt2": {"norm_eps": 0.1, "mlp": "relu2", "hidden": 56},
}
OTHER_SHAPES["qwen3"] = OTHER_SHAPES["llama"] | {"qk_norm": True, "head_dim": 24, "norm_eps": 1e-6}
OTHER_SHAPES["qwen3"] |= {"rope_theta": 500.0, "rope_scaling": 8.0, "tie_embeddings": False}
ONLY_GPT2 = ("huggingface",)


def other_gpt(shape):
    return varied_gpt(replace(SMALL, n_layer=2, **OTHER_SHAPES[shape]))


@pytest.mark.parametrize("shape", OTHER_SHAPES)
def test_the_contract_of_decode_computes_the_logits_of_the_model(shape):
    """The bound is fp32's rounding of sums of 100 terms, through 2 layers."""
    model = other_gpt(shape)
    decoder = Decoder(model, 4, 24, GREEDY)
    decoder.prefill(*ragged())
    tokens, copies = prompt(4, 3), [tuple(tensor.clone() for tensor in pair) for pair in decoder.kv]
    with torch.no_grad():
        expected = decoder.decode(decoder.packed, tokens, Cache(decoder.kv, 24, decoder.positions))
        logits = reference(weights_of(model), tokens, Cache(copies, 24, decoder.positions))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("shape", OTHER_SHAPES)
@pytest.mark.parametrize("decode", [impl for impl in ONLY_GPT2 if not unavailable("decode", impl, CPU)])
def test_a_decoder_of_gpt_2_names_what_another_shape_has(decode, shape):
    message = rf"^kernels\.decode={decode} computes GPT-2's shape, and this model has .*model\.mlp=[^\n]*: choose "
    with pytest.raises(Unavailable, match=message):
        Decoder(other_gpt(shape), 2, 12, GREEDY, decode=decode)


@pytest.mark.parametrize("decode", [impl for impl in impls("decode") if not unavailable("decode", impl, CPU)])
def test_only_blocks_caps_logits(decode):
    model = varied_gpt(replace(SMALL, logit_softcap=5.0))
    if decode == "blocks":
        assert torch.equal(generate(model, prompt(), 8, n_vocab=97, temperature=0), greedy(model, prompt(), 8))
        return
    with pytest.raises(Unavailable, match=rf"^kernels\.decode={decode} has no cap, .*logit_softcap=5\.0: choose "):
        Decoder(model, 2, 12, GREEDY, decode=decode)


def decoders_of_every_shape(lossy):
    """Return the decoders that run here and compute every shape, and round the weights or not."""
    return [
        impl
        for impl in impls("decode")
        if not unavailable("decode", impl, CPU)
        and impl not in ONLY_GPT2
        and getattr(backend("decode", impl), "LOSSY", False) == lossy
    ]


@pytest.mark.parametrize("shape", OTHER_SHAPES)
@pytest.mark.parametrize("decode", decoders_of_every_shape(lossy=False))
def test_greedy_texts_of_other_shapes_are_those_of_full_forwards(decode, shape):
    """The prompts differ in length. Steps of one token, and steps that verify a draft if the decoder has them."""
    model, (idx, lengths) = other_gpt(shape), ragged()
    expected = [greedy(model, idx[b : b + 1, :length], 4)[0, length:].tolist() for b, length in enumerate(LENGTHS)]
    assert len(set(map(tuple, expected))) == 4
    verifies = not hasattr(backend("decode", decode), "generate_tokens")
    draft = [GenerateConfig(speculate="ngram", draft_tokens=3)] if verifies else []
    for options in (GenerateConfig(), *draft):
        decoder = Decoder(model, 4, 13, GREEDY, decode=decode, options=options)
        assert streamed(decoder, idx, 4, lengths) == expected


@pytest.mark.parametrize("shape", OTHER_SHAPES)
@pytest.mark.parametrize("decode", decoders_of_every_shape(lossy=True))
def test_logits_of_other_shapes_with_rounded_weights(decode, shape):
    """They are off by less than 10%, as the doctor demands."""
    model = gpt(replace(SMALL, n_layer=2, **OTHER_SHAPES[shape]))
    decoder = Decoder(model, 4, 13, GREEDY, decode=decode)
    decoder.prefill(*ragged())
    cache = Cache(decoder.kv, 12, decoder.positions)
    with torch.no_grad():
        logits = decoder.decode(decoder.packed, decoder.tokens, cache)
        exact = model.forward(decoder.tokens, cache=cache)
    assert 0 < (logits - exact).norm() / exact.norm() < 0.1


def test_two_views_of_a_copy_count_once_and_the_weights_of_the_model_do_not():
    model, copy = varied_gpt(), torch.zeros(8)
    packed = {"first": copy[:4], "others": [copy[4:], model.wte.weight]}
    assert copied_bytes(packed, model) == copy.nbytes
