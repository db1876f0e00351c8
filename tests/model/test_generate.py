"""Decoding over the cache against full forwards, and drawing against odds computed otherwise."""

import itertools
from dataclasses import replace

import pytest
import torch

from kernels.registry import Unavailable, backend, impls, refusal, unavailable
from model import generate as module
from model.generate import Decoder, Sampling, biased_row, draw, generate, stream
from runtime.config import UserError
from tests.model.test_gpt import SMALL, gpt

CPU = torch.device("cpu")
HERE = [  # and able to decode
    impl
    for impl in impls("attention")
    if not unavailable("attention", impl, CPU) and not refusal(backend("attention", impl).attention, "lengths")
]
GREEDY = Sampling(97, temperature=0)


@pytest.fixture
def buckets(monkeypatch):
    """Buckets of 4, 8, 16, ... keys, so that 24 positions have four."""
    monkeypatch.setattr(module, "BUCKET", 4)


def lively(config=SMALL, attn="eager", spread=3.0):
    """A model whose best next token is not the last one again: its tied head, turned round, votes against it."""
    model = gpt(config, attn, spread=spread)
    with torch.no_grad():
        model.ln_f.weight.neg_()
    return model


def prompt(rows=2, length=3):
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(1))


def best(model, idx, new):
    """Greedy by a full forward for each token."""
    for _ in range(new):
        idx = torch.cat((idx, model(idx)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return idx


@pytest.mark.parametrize("attn", HERE)
@pytest.mark.parametrize("pos", ["learned", "rope"])
def test_greedy_over_the_cache_is_the_full_forward(pos, attn, buckets):
    model = lively(replace(SMALL, pos=pos), attn)
    expected = best(model, prompt(), 21)
    assert [len(set(row.tolist())) > 5 for row in expected[:, 3:]] == [True, True]
    assert torch.equal(generate(model, prompt(), 21, n_vocab=97, temperature=0), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attn", HERE)
@pytest.mark.parametrize("pos", ["learned", "rope"])
def test_logits_over_the_cache(pos, attn, dtype, buckets, monkeypatch):
    """At every length: as near to float64's full forward as a full forward in that dtype is, times 2."""
    config = replace(SMALL, pos=pos)
    model = gpt(config, attn=attn)
    exact = gpt(config).double()
    exact.ln_f.dtype = torch.float64
    for block in exact.h:
        block.ln_1.dtype = block.ln_2.dtype = torch.float64
    model.ln_f.dtype = dtype
    for block in model.h:
        block.ln_1.dtype = block.ln_2.dtype = dtype
    idx, seen = prompt(length=24), []
    try:
        full = model(idx)[:, 2:]
    except Unavailable as why:  # Triton's interpreter has no bfloat16
        pytest.skip(str(why))
    monkeypatch.setattr(module, "draw", lambda logits, noise, how: seen.append(logits) or logits.argmax(-1, True))
    decoder = Decoder(model, 2, 24, GREEDY)
    decoder.prefill(idx[:, :3])
    for n in range(3, 24):
        decoder.token.copy_(idx[:, n : n + 1])
        decoder.step()
    assert {held.dtype for held in itertools.chain(*decoder.kv)} == {dtype}
    truth = exact(idx)[:, 2:]
    error, fulls = ((logits.double() - truth).abs().max() for logits in (torch.stack(seen, 1), full))
    assert fulls > 0
    assert error <= 2 * fulls + torch.finfo(dtype).eps * truth.abs().max(), f"{error:.2g}, full {fulls:.2g}"


def test_beyond_the_table_the_window_slides():
    model, start = lively(), torch.tensor([[5, 6], [7, 8]])
    expected = start
    for _ in range(40):  # 24 positions
        token = model(expected[:, -24:])[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat((expected, token), dim=1)
    assert torch.equal(generate(model, start, 40, n_vocab=97, temperature=0), expected)
    longer = prompt(length=30)
    token = model(longer[:, -24:])[:, -1].argmax(-1)
    assert torch.equal(generate(model, longer, 1, n_vocab=97, temperature=0)[:, -1], token)


def test_a_step_reads_a_bucket_and_no_more(buckets):
    """What lies behind the bucket is not looked at, and what the mask hides counts for nothing."""
    model = lively()
    decoder = Decoder(model, 2, 20, GREEDY)
    assert [decoder.bucket(length) for length in (1, 4, 5, 9, 16, 17)] == [4, 4, 8, 20, 20, 20]
    assert decoder.warm_up(4, 20) == [4, 8, 20]
    decoder.prefill(prompt())
    for held in itertools.chain(*decoder.kv):
        held[:, 3:8] = 1e3
        held[:, 8:] = torch.nan  # which would pass a mask: 0 * NaN
    steps = [decoder.step().clone() for _ in range(5)]
    assert torch.equal(torch.cat(steps, 1), best(model, prompt(), 6)[:, 4:])


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
def test_few_steps_are_made_ready(prompt, new, buckets):
    """One for all keys where these are less than half as many again; in whole parts of 64."""
    decoder = Decoder(gpt(replace(SMALL, n_layer=1, block_size=1024)), 1, prompt + new, GREEDY)
    assert sorted({decoder.bucket(length) for length in range(prompt + 1, prompt + new)}) == buckets
    assert decoder.kv[0][0].shape[1] == buckets[-1]


def test_streamed_is_generated_and_seeded(buckets):
    model = gpt()
    how = Sampling(97, temperature=1.0, top_k=50, top_p=0.9)

    def streamed(decoder):
        return torch.stack([tokens.clone() for tokens in stream(decoder, prompt(), 21)], 1)

    decoder = Decoder(model, 2, 24, how, seed=3)
    warmed = Decoder(model, 2, 24, how, seed=3)
    warmed.warm_up(4, 23)
    expected = generate(model, prompt(), 21, n_vocab=97, top_k=50, top_p=0.9, seed=3)[:, 3:]
    for _ in range(2):
        assert torch.equal(streamed(decoder), expected)
        assert torch.equal(streamed(warmed), expected)
    assert not torch.equal(streamed(Decoder(model, 2, 24, how, seed=4)), expected)


def test_compiled_steps_are_the_same_and_few(buckets):
    """One graph a bucket, none a token."""
    from runtime.compiling import graphs

    torch.compiler.reset()
    model = lively(replace(SMALL, n_layer=1))
    decoder = Decoder(model, 2, 8, GREEDY, compiled=True)
    before = graphs()
    assert decoder.warm_up(4, 8) == [4, 8]
    assert graphs() - before == 2
    ids = torch.stack([tokens.clone() for tokens in stream(decoder, prompt(), 5)], 1)
    assert graphs() - before == 2
    assert torch.equal(ids, best(model, prompt(), 5)[:, 3:])


def test_a_compiled_step_of_one_row_calls_no_library(tmp_path, monkeypatch):
    """In the code that Inductor writes: of a layer's four biased products addmm has 4, but with one row they are sums;
    what the cache holds of the same graph, made without, is not taken for it. The head's product has no bias, and only
    on a GPU does Inductor itself make it a sum."""
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = lively(replace(SMALL, n_layer=1))
    calls, told = {}, {}
    for name, rows in (("usual", 1), ("ours", 1), ("two rows", 2)):
        torch.compiler.reset()
        decoder = Decoder(model, rows, 8, GREEDY, compiled=True)
        if name == "usual":
            options = {"coordinate_descent_tuning": True}
            decoder.decode = torch.compile(module.decode, fullgraph=True, dynamic=False, options=options)
        told[name], code = run_and_get_code(
            lambda decoder=decoder, rows=rows: [tokens.clone() for tokens in stream(decoder, prompt(rows), 5)]
        )
        [source] = code
        calls[name] = source.count("extern_kernels.addmm(")
    assert calls == {"usual": 4, "ours": 0, "two rows": 4}
    for name, ids in told.items():
        rows = len(ids[0])
        assert torch.equal(torch.stack(ids, 1), best(model, prompt(rows), 5)[:, 3:]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_biased_row_is_as_near_as_addmm(dtype):
    draw = torch.Generator().manual_seed(0)
    bias, x, weight = (torch.randn(*size, generator=draw).to(dtype) for size in ((96,), (1, 769), (769, 96)))
    exact = torch.addmm(bias.double(), x.double(), weight.double())
    errors = [
        (made.double() - exact).abs().max() for made in (biased_row(bias, x, weight), torch.addmm(bias, x, weight))
    ]
    assert biased_row(bias, x, weight).dtype == dtype
    assert errors[0] <= 2 * errors[1] + torch.finfo(dtype).eps
    assert biased_row(bias, x.expand(2, -1), weight) is NotImplemented


@pytest.mark.gpu
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_steps_are_the_same(attn, compiled, buckets):
    """CUDA graphs: greedy as by full forwards on the CPU; drawn as by uncaptured steps, again and again."""
    model, cpu = lively(attn=attn).cuda(), lively(attn=attn)
    torch.compiler.reset()
    decoder = Decoder(model, 2, 24, GREEDY, compiled=compiled)
    decoder.warm_up(4, 23)
    assert sorted(decoder.graphs) == [4, 8, 16, 24]
    ids = torch.stack([tokens.clone() for tokens in stream(decoder, prompt().cuda(), 21)], 1)
    assert torch.equal(ids, best(cpu, prompt(), 21)[:, 3:])
    how = Sampling(97, top_k=50)
    plain, captured = (Decoder(model, 2, 24, how, seed=3) for _ in range(2))
    captured.warm_up(4, 23)
    runs = [[t.clone() for t in stream(decoder, prompt().cuda(), 21)] for decoder in (plain, captured, captured)]
    assert torch.equal(torch.stack(runs[0]), torch.stack(runs[1]))
    assert torch.equal(torch.stack(runs[1]), torch.stack(runs[2]))


def shares(logits, how, draws=20_000):
    """How often each id is drawn."""
    noise = torch.empty(draws, how.candidates).exponential_(generator=torch.Generator().manual_seed(0))
    ids = draw(logits.expand(draws, -1), noise, how)
    return torch.bincount(ids.flatten(), minlength=len(logits)) / draws


def odds(logits, how):
    """By Hugging Face's own warpers, in its order: temperature, top_k, top_p."""
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = logits[None, : how.n_vocab].double()
    scores = TemperatureLogitsWarper(how.temperature)(None, scores)
    scores = TopKLogitsWarper(how.top_k)(None, scores) if how.top_k else scores
    scores = TopPLogitsWarper(how.top_p)(None, scores) if how.top_p < 1 else scores
    p = torch.zeros(len(logits), dtype=torch.float64)
    p[: how.n_vocab] = scores.softmax(-1)[0]
    return p


@pytest.mark.parametrize(
    "how",
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
def test_draws_are_fair(how):
    """Five deviations of a share of 20,000 draws; without odds, as ids from n_vocab up are, never."""
    logits = 2 * torch.randn(40, generator=torch.Generator().manual_seed(5))
    logits[35] = 9.0
    expected, got = odds(logits, how), shares(logits, how)
    assert expected.sum() == pytest.approx(1)
    assert ((got - expected).abs() <= 5 * (expected * (1 - expected) / 20_000).sqrt()).all()
    assert ((got > 0) <= (expected > 0)).all()


@pytest.mark.parametrize("how", [GREEDY, Sampling(97), Sampling(97, top_k=20), Sampling(97, 0.7, 20, 0.8)], ids=str)
def test_bf16_draws_are_those_of_the_same_numbers_in_fp32(how):
    """Of different numbers: among equal ones topk may take any."""
    logits = torch.stack([torch.randperm(128, generator=torch.Generator().manual_seed(i)) for i in range(50)]) / 8
    noise = torch.empty(50, how.candidates).exponential_(generator=torch.Generator().manual_seed(0))
    assert torch.equal(logits.bfloat16().float(), logits)
    assert torch.equal(draw(logits.bfloat16(), noise, how), draw(logits, noise, how))


def test_top_p_by_hand():
    """0.5, 0.3, 0.15, 0.05: 0.8 are the first two exactly (to rounding), 0.81 the first three."""
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    drawn = [shares(logits, Sampling(4, top_p=p)).nonzero().flatten().tolist() for p in (0.3, 0.79, 0.81, 0.96, 1.0)]
    assert drawn == [[1], [1, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_an_attention_without_lengths_is_told():
    def attention(q, k, v, *, causal=True, scale=None):
        return q

    model = gpt()
    model.h[0].attn.attention = attention
    with pytest.raises(UserError, match=r"test_generate takes no lengths .*: choose attn=.*\beager, "):
        generate(model, prompt(), 1, n_vocab=97)


def test_the_mode_is_kept():
    model = lively(replace(SMALL, dropout=0.5)).train()
    ids = generate(model, prompt(), 5, n_vocab=97, temperature=0)
    assert model.training
    assert torch.equal(ids, best(model.eval(), prompt(), 5))
