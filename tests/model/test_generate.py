"""Decoding over the cache equals full forward passes, and sampling follows the probabilities of transformers."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kernels.registry import Unavailable, backend, impls, missing_argument, unavailable
from kernels.sampling import Sampling
from model import decoder as module
from model.compat import addmm_of_one_row
from model.decoder import Decoder
from model.generate import DRAFT_LAG, LAG, LAUNCH_LAG, NotFinite, generate, max_lag, stream
from runtime.config import UserError
from tests.model.test_gpt import SMALL, gpt

CPU = torch.device("cpu")
DECODING = [  # the backends that run on a CPU and take `lengths`; Triton's interpreter takes 5 to 11 s for each test
    pytest.param(impl, marks=pytest.mark.exhaustive) if impl == "triton" else impl
    for impl in impls("attention")
    if not unavailable("attention", impl, CPU) and not missing_argument(backend("attention", impl).attention, "lengths")
]
POSITIONS = [("learned", impl) for impl in DECODING if isinstance(impl, str)]  # once is enough for the interpreter
POSITIONS += [
    pytest.param("rope", *getattr(impl, "values", [impl]), marks=getattr(impl, "marks", [])) for impl in DECODING
]
GREEDY = Sampling(97, temperature=0)


@pytest.fixture
def buckets(monkeypatch):
    """Buckets of 4, 8, 16, ... keys, so that 24 positions have four."""
    monkeypatch.setattr(module, "BUCKET", 4)


def varied_gpt(config=SMALL, attn="eager", spread=3.0):
    """Return a model whose next token differs from the last one: with a negated ln_f, the tied head avoids it."""
    model = gpt(config, attn, spread=spread)
    with torch.no_grad():
        model.ln_f.weight.neg_()
    return model


def prompt(rows=2, length=3):
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(1))


def streamed(decoder, idx, new, lengths=None):
    """Return the new tokens of each sequence, as a list of lists."""
    texts = [[] for _ in idx]
    for step in stream(decoder, idx, new, lengths):
        for text, tokens in zip(texts, step, strict=True):
            text += tokens
    return texts


def greedy(model, idx, new):
    """Return idx with `new` more tokens. Each is the most likely token of a full forward pass."""
    for _ in range(new):
        idx = torch.cat((idx, model(idx)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return idx


@pytest.mark.parametrize(("pos", "attn"), POSITIONS)
def test_greedy_tokens_over_the_cache_are_those_of_full_forwards(pos, attn, buckets):
    model = varied_gpt(replace(SMALL, pos=pos), attn)
    expected = greedy(model, prompt(), 21)
    assert all(len(set(row.tolist())) > 5 for row in expected[:, 3:])  # the tokens vary
    assert torch.equal(generate(model, prompt(), 21, n_vocab=97, temperature=0), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("pos", "attn"), POSITIONS)
def test_logits_over_the_cache_are_those_of_full_forwards(pos, attn, dtype, buckets, monkeypatch):
    """At every length, the error against float64 is at most twice the error of a full forward in this dtype."""
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
    monkeypatch.setattr(module, "sample_tokens", lambda logits, *rest: collected.append(logits) or logits.argmax(-1))
    decoder = Decoder(model, 2, 24, GREEDY)
    decoder.prefill(idx[:, :3])
    for n in range(3, 24):
        decoder.tokens.copy_(idx[:, n : n + 1])
        decoder.step()
    assert {tensor.dtype for tensor in itertools.chain(*decoder.kv)} == {dtype}
    truth = exact(idx)[:, 2:]
    error, full_error = ((logits.double() - truth).abs().max() for logits in (torch.stack(collected, 1), full))
    assert full_error > 0
    assert error <= 2 * full_error + torch.finfo(dtype).eps * truth.abs().max(), f"{error:.2g}, full {full_error:.2g}"


def test_padding_is_never_generated():
    """Without a limit, the most likely tokens are padding: ids from 50 on."""
    model = varied_gpt()
    assert (greedy(model, prompt(), 8)[:, 3:] >= 50).any()
    for temperature in (0, 1):
        assert (generate(model, prompt() % 50, 8, n_vocab=50, temperature=temperature) < 50).all()


def test_beyond_the_position_table_the_window_slides():
    """The table has 24 positions. Beyond them, a full forward over the last 24 tokens gives the next token."""
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
    assert decoder.warm_up(3, 17) == [4, 8, 20]
    decoder.prefill(prompt())
    for tensor in itertools.chain(*decoder.kv):
        tensor[:, 3:8] = 1e3
        tensor[:, 8:] = torch.nan  # a mask would not remove it, because 0 * NaN is NaN
    steps = [decoder.step()[:, 1:].clone() for _ in range(5)]
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
    """Buckets are 256 keys and their doubles, but all rows (a multiple of 64) if these are below 1.5 buckets."""
    decoder = Decoder(gpt(replace(SMALL, n_layer=1, block_size=1024)), 1, prompt + new, GREEDY)
    assert sorted({decoder.bucket(length) for length in range(prompt + 1, prompt + new)}) == buckets
    assert decoder.kv[0][0].shape[1] == buckets[-1]


def test_streamed_tokens_are_those_of_generate_for_each_seed(buckets):
    model = gpt()
    sampling = Sampling(97, temperature=1.0, top_k=50, top_p=0.9)

    decoder = Decoder(model, 2, 24, sampling, seed=3)
    warmed = Decoder(model, 2, 24, sampling, seed=3)
    warmed.warm_up(3, 21)
    expected = generate(model, prompt(), 21, n_vocab=97, top_k=50, top_p=0.9, seed=3)[:, 3:].tolist()
    for _ in range(2):
        assert streamed(decoder, prompt(), 21) == expected
        assert streamed(warmed, prompt(), 21) == expected
    assert streamed(Decoder(model, 2, 24, sampling, seed=4), prompt(), 21) != expected


@pytest.mark.exhaustive
def test_compiled_steps_give_the_same_tokens_from_one_graph_a_bucket(buckets):
    from runtime.compiling import graphs

    torch.compiler.reset()
    model = varied_gpt(replace(SMALL, n_layer=1))
    decoder = Decoder(model, 2, 8, GREEDY, compiled=True)
    before = graphs()
    assert decoder.warm_up(3, 5) == [4, 8]
    assert graphs() - before == 2
    texts = streamed(decoder, prompt(), 5)
    assert graphs() - before == 2
    assert texts == greedy(model, prompt(), 5)[:, 3:].tolist()


@pytest.mark.exhaustive
def test_a_compiled_step_calls_no_addmm_for_one_row_and_copies_no_cache(tmp_path, monkeypatch):
    """Inductor's code calls addmm for the 4 linear layers of a block. With our backend and one row, they are sums.

    Attention reads the KV cache itself. The compiler's cache does not return the code that was compiled without our
    backend. The head has no bias, so it is no addmm.
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
            decoder.next_tokens = torch.compile(
                Decoder(model, rows, 8, GREEDY).next_tokens, fullgraph=True, dynamic=False, options=options
            )
        tokens[name], code = run_and_get_code(lambda decoder=decoder, rows=rows: streamed(decoder, prompt(rows), 5))
        [source] = code
        assert f"empty_strided_cpu({tuple(decoder.kv[0][0].shape)}" not in source
        calls[name] = source.count("extern_kernels.addmm(")
    assert calls == {"usual": 4, "ours": 0, "two rows": 4}
    for name, ids in tokens.items():
        assert ids == greedy(model, prompt(len(ids)), 5)[:, 3:].tolist(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_addmm_of_one_row_is_as_accurate_as_addmm(dtype):
    """Its error against float64 is at most twice the error of addmm. For two rows it returns NotImplemented."""
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


def test_the_gpu_is_ahead_of_the_host():
    """The host is a few calls of Decoder.step() behind the GPU, and none on a CPU."""
    cases = (True, None, 1, LAG), (True, None, 5, DRAFT_LAG), (True, print, 1, LAUNCH_LAG), (False, print, 1, 0)
    for is_cuda, launches, step_tokens, lag in cases:
        decoder = SimpleNamespace(generate_tokens=launches, step_tokens=step_tokens)
        assert max_lag(decoder, SimpleNamespace(is_cuda=is_cuda)) == lag


@pytest.mark.gpu
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_steps_give_the_same_tokens(attn, compiled, buckets):
    """CUDA graphs give the greedy tokens of full forwards on the CPU, and the sampled tokens of steps without graphs.

    Graphs of 8 steps end with 11, 19 and 27 keys.
    """
    model, cpu = varied_gpt(attn=attn).cuda(), varied_gpt(attn=attn)
    torch.compiler.reset()
    decoder = Decoder(model, 2, 24, GREEDY, compiled=compiled)
    decoder.warm_up(3, 21)
    assert sorted(decoder.graphs) == [16, 24]
    assert streamed(decoder, prompt().cuda(), 21) == greedy(cpu, prompt(), 21)[:, 3:].tolist()
    sampling = Sampling(97, top_k=50)
    plain, captured = (Decoder(model, 2, 24, sampling, seed=3) for _ in range(2))
    captured.warm_up(3, 21)
    runs = [streamed(decoder, prompt().cuda(), 21) for decoder in (plain, captured, captured)]
    assert runs[0] == runs[1] == runs[2]


def test_generation_is_refused_without_lengths():
    """The error names the attention, and the backends to choose instead."""

    def attention(q, k, v, *, causal=True, scale=None):
        return q

    model = gpt()
    model.h[0].attn.attention = attention
    with pytest.raises(Unavailable, match=r"test_generate takes no lengths .*: choose attn=.*\beager, "):
        generate(model, prompt(), 1, n_vocab=97)


@pytest.mark.parametrize(("new", "token"), [(21, 7), (40, 7), (6, None)])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"top_k": 50}], ids=str)
def test_generate_names_the_token_whose_logits_are_not_finite(new, token, sampling):
    """Position 8 has NaN, and the prompt has 3 tokens. Beyond 24 tokens the window slides over ids in the table."""
    model = varied_gpt()
    expected = generate(model, prompt(1), 6, n_vocab=97, **sampling)
    with torch.no_grad():
        model.wpe.weight[8] = torch.nan
    if token:
        with pytest.raises(NotFinite, match=f"^the logits of new token {token} are not finite, because "):
            generate(model, prompt(1), new, n_vocab=97, **sampling)
    assert torch.equal(generate(model, prompt(1), 6, n_vocab=97, **sampling), expected)


def test_generate_leaves_each_module_in_its_mode():
    """It generates without dropout. A part of the model may be in eval mode."""
    model = varied_gpt(replace(SMALL, dropout=0.5)).train()
    model.h[0].eval()
    modes = [module.training for module in model.modules()]
    ids = generate(model, prompt(), 5, n_vocab=97, temperature=0)
    assert [module.training for module in model.modules()] == modes
    assert len(set(modes)) == 2
    assert torch.equal(ids, greedy(model.eval(), prompt(), 5))


def test_generate_leaves_each_module_in_its_mode_after_an_error(monkeypatch):
    model = varied_gpt().train()
    with pytest.raises(UserError):
        generate(model, prompt(), -1, n_vocab=97)
    assert all(module.training for module in model.modules())
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "step", lambda decoder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(model, prompt(), 5, n_vocab=97)
    assert all(module.training for module in model.modules())
    assert torch.equal(generate(model, prompt(), 5, n_vocab=97, temperature=0), greedy(model, prompt(), 5))
