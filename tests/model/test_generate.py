"""Decoding over the cache equals full forward passes, and sampling follows the probabilities of transformers."""

import itertools
from dataclasses import replace

import pytest
import torch

from kernels.registry import Unavailable, backend, impls, missing_argument, unavailable
from model import generate as module
from model.generate import Decoder, Sampling, addmm_of_one_row, generate, sample_token, stream
from runtime.config import UserError
from tests.model.test_gpt import SMALL, gpt

CPU = torch.device("cpu")
DECODING = [  # the backends that run on a CPU and take `lengths`; Triton's interpreter takes 5 to 11 s for each test
    pytest.param(impl, marks=pytest.mark.exhaustive) if impl == "triton" else impl
    for impl in impls("attention")
    if not unavailable("attention", impl, CPU) and not missing_argument(backend("attention", impl).attention, "lengths")
]
GREEDY = Sampling(97, temperature=0)


@pytest.fixture
def buckets(monkeypatch):
    """Buckets of 4, 8, 16, ... keys, so that 24 positions have four."""
    monkeypatch.setattr(module, "BUCKET", 4)


def varied_gpt(config=SMALL, attn="eager", spread=3.0):
    """A model whose most likely next token differs from the last one: with a negated ln_f, the tied head avoids it."""
    model = gpt(config, attn, spread=spread)
    with torch.no_grad():
        model.ln_f.weight.neg_()
    return model


def prompt(rows=2, length=3):
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(1))


def greedy(model, idx, new):
    """idx with `new` more tokens, the most likely ones, by a full forward pass for each."""
    for _ in range(new):
        idx = torch.cat((idx, model(idx)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return idx


@pytest.mark.parametrize("attn", DECODING)
@pytest.mark.parametrize("pos", ["learned", "rope"])
def test_greedy_tokens_over_the_cache_are_those_of_full_forwards(pos, attn, buckets):
    model = varied_gpt(replace(SMALL, pos=pos), attn)
    expected = greedy(model, prompt(), 21)
    assert all(len(set(row.tolist())) > 5 for row in expected[:, 3:])  # the tokens vary
    assert torch.equal(generate(model, prompt(), 21, n_vocab=97, temperature=0), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attn", DECODING)
@pytest.mark.parametrize("pos", ["learned", "rope"])
def test_logits_over_the_cache_are_those_of_full_forwards(pos, attn, dtype, buckets, monkeypatch):
    """At every length the error against a float64 forward is at most twice that of a full forward in this dtype."""
    config = replace(SMALL, pos=pos)
    model = gpt(config, attn=attn)
    exact = gpt(config).double()
    exact.ln_f.dtype = torch.float64
    for block in exact.h:
        block.ln_1.dtype = block.ln_2.dtype = torch.float64
    model.ln_f.dtype = dtype
    for block in model.h:
        block.ln_1.dtype = block.ln_2.dtype = dtype
    idx, collected = prompt(length=24), []
    try:
        full = model(idx)[:, 2:]
    except Unavailable as why:  # Triton's interpreter has no bfloat16
        pytest.skip(str(why))
    monkeypatch.setattr(
        module, "sample_token", lambda logits, noise, sampling: collected.append(logits) or logits.argmax(-1, True)
    )
    decoder = Decoder(model, 2, 24, GREEDY)
    decoder.prefill(idx[:, :3])
    for n in range(3, 24):
        decoder.token.copy_(idx[:, n : n + 1])
        decoder.step()
    assert {tensor.dtype for tensor in itertools.chain(*decoder.kv)} == {dtype}
    truth = exact(idx)[:, 2:]
    error, full_error = ((logits.double() - truth).abs().max() for logits in (torch.stack(collected, 1), full))
    assert full_error > 0
    assert error <= 2 * full_error + torch.finfo(dtype).eps * truth.abs().max(), f"{error:.2g}, full {full_error:.2g}"


def test_beyond_the_position_table_the_window_slides():
    """After 24 positions, each token is that of a full forward over the last 24 tokens."""
    model, start = varied_gpt(), torch.tensor([[5, 6], [7, 8]])
    expected = start
    for _ in range(40):  # 24 positions
        token = model(expected[:, -24:])[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat((expected, token), dim=1)
    assert torch.equal(generate(model, start, 40, n_vocab=97, temperature=0), expected)
    longer = prompt(length=30)
    token = model(longer[:, -24:])[:, -1].argmax(-1)
    assert torch.equal(generate(model, longer, 1, n_vocab=97, temperature=0)[:, -1], token)


def test_a_step_reads_a_bucket_and_no_more(buckets):
    """Large values in masked keys and NaN behind the bucket do not change the tokens."""
    model = varied_gpt()
    decoder = Decoder(model, 2, 20, GREEDY)
    assert [decoder.bucket(length) for length in (1, 4, 5, 9, 16, 17)] == [4, 4, 8, 20, 20, 20]
    assert decoder.warm_up(4, 20) == [4, 8, 20]
    decoder.prefill(prompt())
    for tensor in itertools.chain(*decoder.kv):
        tensor[:, 3:8] = 1e3
        tensor[:, 8:] = torch.nan  # a mask would not remove it, because 0 * NaN is NaN
    steps = [decoder.step().clone() for _ in range(5)]
    assert torch.equal(torch.cat(steps, 1), greedy(model, prompt(), 6)[:, 4:])


@pytest.mark.parametrize(
    ("prompt", "new", "buckets"),
    [
        (250, 16, [320]),
        (250, 133, [256, 384]),
        (10, 100, [128]),
        (200, 824, [256, 512, 1024]),
        (10, 1000, [256, 512, 1024]),
    ],
)
def test_the_buckets_of_a_generation(prompt, new, buckets):
    """256 keys and doubles. All rows, a multiple of 64, are one bucket if they are fewer than 1.5 times the bucket."""
    decoder = Decoder(gpt(replace(SMALL, n_layer=1, block_size=1024)), 1, prompt + new, GREEDY)
    assert sorted({decoder.bucket(length) for length in range(prompt + 1, prompt + new)}) == buckets
    assert decoder.kv[0][0].shape[1] == buckets[-1]


def test_streamed_tokens_are_those_of_generate_for_each_seed(buckets):
    model = gpt()
    sampling = Sampling(97, temperature=1.0, top_k=50, top_p=0.9)

    def streamed(decoder):
        return torch.stack([tokens.clone() for tokens in stream(decoder, prompt(), 21)], 1)

    decoder = Decoder(model, 2, 24, sampling, seed=3)
    warmed = Decoder(model, 2, 24, sampling, seed=3)
    warmed.warm_up(4, 23)
    expected = generate(model, prompt(), 21, n_vocab=97, top_k=50, top_p=0.9, seed=3)[:, 3:]
    for _ in range(2):
        assert torch.equal(streamed(decoder), expected)
        assert torch.equal(streamed(warmed), expected)
    assert not torch.equal(streamed(Decoder(model, 2, 24, sampling, seed=4)), expected)


@pytest.mark.exhaustive
def test_compiled_steps_give_the_same_tokens_from_one_graph_a_bucket(buckets):
    from runtime.compiling import graphs

    torch.compiler.reset()
    model = varied_gpt(replace(SMALL, n_layer=1))
    decoder = Decoder(model, 2, 8, GREEDY, compiled=True)
    before = graphs()
    assert decoder.warm_up(4, 8) == [4, 8]
    assert graphs() - before == 2
    ids = torch.stack([tokens.clone() for tokens in stream(decoder, prompt(), 5)], 1)
    assert graphs() - before == 2
    assert torch.equal(ids, greedy(model, prompt(), 5)[:, 3:])


@pytest.mark.exhaustive
def test_a_compiled_step_of_one_row_calls_no_addmm(tmp_path, monkeypatch):
    """Inductor's code calls addmm for the 4 linear layers of a block. With our backend and one row, they are sums.

    The cache does not return the code that was compiled without our backend. The head has no bias, so it is no addmm.
    """
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = varied_gpt(replace(SMALL, n_layer=1))
    calls, tokens = {}, {}
    for name, rows in (("usual", 1), ("ours", 1), ("two rows", 2)):
        torch.compiler.reset()
        decoder = Decoder(model, rows, 8, GREEDY, compiled=True)
        if name == "usual":
            options = {"coordinate_descent_tuning": True}
            decoder.decode = torch.compile(module.decode_step, fullgraph=True, dynamic=False, options=options)
        tokens[name], code = run_and_get_code(
            lambda decoder=decoder, rows=rows: [ids.clone() for ids in stream(decoder, prompt(rows), 5)]
        )
        [source] = code
        calls[name] = source.count("extern_kernels.addmm(")
    assert calls == {"usual": 4, "ours": 0, "two rows": 4}
    for name, ids in tokens.items():
        rows = len(ids[0])
        assert torch.equal(torch.stack(ids, 1), greedy(model, prompt(rows), 5)[:, 3:]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_addmm_of_one_row_is_as_accurate_as_addmm(dtype):
    """Its error against float64 is at most twice that of addmm. It leaves products of two rows to addmm."""
    draw = torch.Generator().manual_seed(0)
    bias, x, weight = (torch.randn(*size, generator=draw).to(dtype) for size in ((96,), (1, 769), (769, 96)))
    exact = torch.addmm(bias.double(), x.double(), weight.double())
    errors = [
        (made.double() - exact).abs().max()
        for made in (addmm_of_one_row(bias, x, weight), torch.addmm(bias, x, weight))
    ]
    assert addmm_of_one_row(bias, x, weight).dtype == dtype
    assert errors[0] <= 2 * errors[1] + torch.finfo(dtype).eps
    assert addmm_of_one_row(bias, x.expand(2, -1), weight) is NotImplemented


@pytest.mark.gpu
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_steps_give_the_same_tokens(attn, compiled, buckets):
    """The greedy tokens of CUDA graphs are those of full forwards on the CPU; sampled ones are those without graphs."""
    model, cpu = varied_gpt(attn=attn).cuda(), varied_gpt(attn=attn)
    torch.compiler.reset()
    decoder = Decoder(model, 2, 24, GREEDY, compiled=compiled)
    decoder.warm_up(4, 23)
    assert sorted(decoder.graphs) == [4, 8, 16, 24]
    ids = torch.stack([tokens.clone() for tokens in stream(decoder, prompt().cuda(), 21)], 1)
    assert torch.equal(ids, greedy(cpu, prompt(), 21)[:, 3:])
    sampling = Sampling(97, top_k=50)
    plain, captured = (Decoder(model, 2, 24, sampling, seed=3) for _ in range(2))
    captured.warm_up(4, 23)
    runs = [[t.clone() for t in stream(decoder, prompt().cuda(), 21)] for decoder in (plain, captured, captured)]
    assert torch.equal(torch.stack(runs[0]), torch.stack(runs[1]))
    assert torch.equal(torch.stack(runs[1]), torch.stack(runs[2]))


def shares(logits, sampling, draws=20_000):
    """The share of each id among the draws."""
    noise = torch.empty(draws, sampling.candidates).exponential_(generator=torch.Generator().manual_seed(0))
    ids = sample_token(logits.expand(draws, -1), noise, sampling)
    return torch.bincount(ids.flatten(), minlength=len(logits)) / draws


def probabilities(logits, sampling):
    """The probability of each id by transformers' warpers, in its order: temperature, top_k, top_p."""
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = logits[None, : sampling.n_vocab].double()
    scores = TemperatureLogitsWarper(sampling.temperature)(None, scores)
    scores = TopKLogitsWarper(sampling.top_k)(None, scores) if sampling.top_k else scores
    scores = TopPLogitsWarper(sampling.top_p)(None, scores) if sampling.top_p < 1 else scores
    p = torch.zeros(len(logits), dtype=torch.float64)
    p[: sampling.n_vocab] = scores.softmax(-1)[0]
    return p


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(30),
        Sampling(30, temperature=0.5, top_k=3),
        Sampling(30, top_p=0.7),
        Sampling(30, temperature=1.5, top_k=12, top_p=0.8),
        Sampling(30, top_k=500, top_p=0.5),
        Sampling(30, top_p=1e-6),
        Sampling(30, temperature=1e-4),
    ],
    ids=str,
)
def test_draws_follow_the_probabilities(sampling):
    """Each share of 20,000 draws is within five deviations. Ids of probability 0, such as padding, are never drawn."""
    logits = 2 * torch.randn(40, generator=torch.Generator().manual_seed(5))
    logits[35] = 9.0
    expected, got = probabilities(logits, sampling), shares(logits, sampling)
    assert expected.sum() == pytest.approx(1)
    assert ((got - expected).abs() <= 5 * (expected * (1 - expected) / 20_000).sqrt()).all()
    assert ((got > 0) <= (expected > 0)).all()


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(97), Sampling(97, top_k=20), Sampling(97, 0.7, 20, 0.8)], ids=str
)
def test_bf16_draws_are_those_of_the_same_numbers_in_fp32(sampling):
    """All logits of a row differ, because topk may take any of two equal ones."""
    logits = torch.stack([torch.randperm(128, generator=torch.Generator().manual_seed(i)) for i in range(50)]) / 8
    noise = torch.empty(50, sampling.candidates).exponential_(generator=torch.Generator().manual_seed(0))
    assert torch.equal(logits.bfloat16().float(), logits)
    assert torch.equal(sample_token(logits.bfloat16(), noise, sampling), sample_token(logits, noise, sampling))


def test_top_p_by_hand():
    """With the probabilities 0.5, 0.3, 0.15 and 0.05, top_p=0.79 takes the first two tokens, and 0.81 three."""
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    drawn = [shares(logits, Sampling(4, top_p=p)).nonzero().flatten().tolist() for p in (0.3, 0.79, 0.81, 0.96, 1.0)]
    assert drawn == [[1], [1, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_generation_is_refused_without_lengths():
    """The error names the attention, and the backends to choose instead."""

    def attention(q, k, v, *, causal=True, scale=None):
        return q

    model = gpt()
    model.h[0].attn.attention = attention
    with pytest.raises(UserError, match=r"test_generate takes no lengths .*: choose attn=.*\beager, "):
        generate(model, prompt(), 1, n_vocab=97)


def test_generate_returns_to_training_mode():
    """It generates without dropout, and the model is in training mode afterwards."""
    model = varied_gpt(replace(SMALL, dropout=0.5)).train()
    ids = generate(model, prompt(), 5, n_vocab=97, temperature=0)
    assert model.training
    assert torch.equal(ids, greedy(model.eval(), prompt(), 5))
