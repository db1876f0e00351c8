"""The drawn tokens follow the probabilities, and our Triton kernel draws the same tokens as PyTorch."""

import functools
import importlib
from pathlib import Path

import pytest
import torch

from kernels import sampling as module
from kernels.sampling import ID_FACTOR, MASK, POSITION_FACTOR, Sampling, exponential_noise, scramble, seeds_of
from kernels.sampling import sample_tokens as sample_in_torch

triton = pytest.importorskip("triton", reason="Triton is for Linux")
tl = triton.language
_sampling = importlib.import_module("kernels.decode._sampling")
ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DRAWS = 20_000
KINDS = {
    "greedy": {"temperature": 0},
    "all": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 20},
    "top_k 1": {"top_k": 1},
    "top_k all": {"top_k": 10**6},
    "top_k many": {"top_k": 80},  # more than there are groups
    "top_p": {"top_p": 0.8},
    "top_p tiny": {"top_p": 1e-6},
    "top_p 0": {"top_p": 0.0},
    "top_p almost 1": {"top_p": 0.999},
    "both": {"temperature": 1.5, "top_k": 12, "top_p": 0.7},
    "both, many": {"top_k": 80, "top_p": 0.95},
    "cold": {"temperature": 1e-4, "top_k": 5, "top_p": 0.9},
    "frozen": {"temperature": 1e-30},
}

KINDS_AND_DTYPES = [(kind, torch.float32) for kind in KINDS]
KINDS_AND_DTYPES += [(kind, dtype) for kind in ("greedy", "both") for dtype in DTYPES[1:]]


@triton.jit
def write_noise(uniform_ptr, noise_ptr, seeds_ptr, positions_ptr, K: tl.constexpr):
    row, ids = tl.program_id(0), tl.arange(0, K)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    tl.store(uniform_ptr + row * K + ids, _sampling.uniform_noise(ids, seed, position))
    tl.store(noise_ptr + row * K + ids, _sampling.exponential_noise(ids, seed, position))


def randn(*size, seed=0, std=2.0):
    return std * torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def draw(sample, logits, sampling, seed=7, first_position=3):
    """Draw a token for each row on DEVICE. Each row has another seed and another position."""
    rows = len(logits)
    positions = first_position + 5 * torch.arange(rows)
    return sample(logits.to(DEVICE), seeds_of(seed, rows, DEVICE), positions.to(DEVICE), sampling).cpu()


def shares(logits, sampling, vary="positions"):
    """Return the share of each id in DRAWS draws from logits (V,). Each draw has another position, or another seed."""
    seeds, positions = seeds_of(3, 1).expand(DRAWS), torch.full((DRAWS,), 11)
    if vary == "positions":
        positions = torch.arange(DRAWS)
    else:
        seeds = seeds_of(3, DRAWS)
    ids = sample_in_torch(logits.expand(DRAWS, -1), seeds, positions, sampling)
    return torch.bincount(ids, minlength=len(logits)) / DRAWS


def probabilities(logits, sampling):
    """Return the probability of each id by transformers' warpers, in transformers' order: temperature, top_k, top_p."""
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = logits[None, : sampling.n_vocab].double()
    scores = TemperatureLogitsWarper(sampling.temperature)(None, scores)
    scores = TopKLogitsWarper(sampling.top_k)(None, scores) if sampling.top_k else scores
    scores = TopPLogitsWarper(sampling.top_p)(None, scores) if sampling.top_p < 1 else scores
    p = torch.zeros(len(logits), dtype=torch.float64)
    p[: sampling.n_vocab] = scores.softmax(-1)[0]
    return p


@pytest.mark.parametrize("vary", ["positions", "seeds"])
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
def test_draws_follow_the_probabilities(sampling, vary):
    """Each share is within five standard deviations, and the chi-square of all is below its 99.9% quantile.

    Ids of probability 0, such as padding, are never drawn.
    """
    logits = randn(40, seed=5)
    logits[35] = 9.0
    expected, got = probabilities(logits, sampling), shares(logits, sampling, vary)
    assert expected.sum() == pytest.approx(1)
    assert ((got - expected).abs() <= 5 * (expected * (1 - expected) / DRAWS).sqrt()).all()
    assert ((got > 0) <= (expected > 0)).all()
    frequent = expected * DRAWS >= 10  # chi-square needs some draws of each; the other ids count as one
    cells = [torch.cat((p[frequent], p[~frequent].sum()[None])) for p in (got.double(), expected)]
    chi_square = (DRAWS * (cells[0] - cells[1]) ** 2 / cells[1]).nan_to_num().sum()
    degrees = frequent.sum().clamp(min=2).double() - 1
    assert torch.special.gammaincc(degrees / 2, chi_square / 2) > 1e-3


def test_top_p_by_hand():
    """With the probabilities 0.5, 0.3, 0.15 and 0.05, top_p=0.79 takes the first two tokens, and 0.81 three."""
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    drawn = [shares(logits, Sampling(4, top_p=p)).nonzero().flatten().tolist() for p in (0.3, 0.79, 0.81, 0.96, 1.0)]
    assert drawn == [[1], [1, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_noise_is_exponential():
    """The Kolmogorov-Smirnov distance is below its 99% quantile, along ids, positions and seeds."""
    n = 100_000
    zeros, numbers = torch.zeros(1, dtype=torch.int64), torch.arange(n)
    along = {
        "ids": exponential_noise(numbers[None], zeros, zeros),
        "positions": exponential_noise(zeros.expand(n, 1), zeros.expand(n), numbers),
        "seeds": exponential_noise(zeros.expand(n, 1), seeds_of(0, n), zeros.expand(n)),
    }
    for name, noise in along.items():
        expected = 1 - (-noise.flatten().double().sort().values).exp()
        distance = (expected - (numbers + 0.5) / n).abs().max()
        assert n**0.5 * distance < 1.63, name


@pytest.mark.parametrize("by", [1, 2, 16, 1024])
def test_neighbours_have_unrelated_noise(by):
    """For ids, positions or seeds that differ by `by`, the correlation is within 4 standard deviations of 0."""
    ids, positions, seeds = torch.arange(3000), torch.arange(1060), seeds_of(9, 1060)
    rows = exponential_noise(ids.expand(1060, -1), seeds, positions) - 1
    one_seed = exponential_noise(ids.expand(1060, -1), seeds[:1].expand(1060), positions) - 1
    one_position = exponential_noise(ids.expand(1060, -1), seeds, positions[:1].expand(1060)) - 1
    for pairs in (
        rows[:, by:] * rows[:, :-by],
        one_seed[by:] * one_seed[:-by],
        one_position[by:] * one_position[:-by],
        one_seed[by:, by:] * one_seed[:-by, :-by],
    ):
        assert pairs.mean().abs() < 4 / pairs.numel() ** 0.5


@pytest.mark.parametrize(("extreme", "expected"), [(0, 24 * 0.693147), (MASK, 2**-24)])
def test_noise_of_extreme_hashes_is_positive_and_finite(extreme, expected, monkeypatch):
    monkeypatch.setattr(module, "scramble", lambda x: torch.full_like(x, extreme))
    zeros = torch.zeros(1, dtype=torch.int64)
    assert exponential_noise(zeros[None], zeros, zeros).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("seed", [0, -3, 2**31 - 2, 2**32 - 2, 2**63 - 6])
def test_sequence_b_has_the_noise_of_seed_plus_b(seed):
    """All hashed seeds differ, and are in [0, 2^32)."""
    seeds = seeds_of(seed, 5)
    assert torch.equal(seeds, torch.cat([seeds_of(seed + b, 1) for b in range(5)]))
    assert len(set(seeds.tolist())) == 5
    assert ((seeds >= 0) & (seeds <= MASK)).all()
    assert seeds_of(seed + 2**32 if seed < 2**62 else seed - 2**32, 1) != seeds[:1]
    logits, positions = randn(97, seed=1).expand(5, -1), torch.full((5,), 8)
    alone = [sample_in_torch(logits[:1], seeds_of(seed + b, 1), positions[:1], Sampling(97)) for b in range(5)]
    assert torch.equal(sample_in_torch(logits, seeds, positions, Sampling(97)), torch.cat(alone))


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_draws_are_those_of_the_same_numbers_in_fp32(kind):
    """All logits of a row differ, because topk may take any of two equal ones."""
    logits = torch.stack([torch.randperm(128, generator=torch.Generator().manual_seed(i)) for i in range(50)]) / 8
    assert torch.equal(logits.bfloat16().float(), logits)
    sampling = Sampling(97, **KINDS[kind])
    drawn = draw(sample_in_torch, logits, sampling)
    assert torch.equal(draw(sample_in_torch, logits.bfloat16(), sampling), drawn)
    assert drawn.max() < 97
    if kind in ("greedy", "top_k 1", "top_p tiny", "cold", "frozen"):
        assert torch.equal(drawn, logits[:, :97].argmax(-1))


@pytest.mark.parametrize("vocab", [(101, 97), (2096, 2001)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_triton_draws_the_tokens_of_torch(kind, vocab):
    """All fp32 logits of a row differ. The largest logits are padding. Half of the rows also have logits of -inf."""
    columns, n_vocab = vocab
    logits = randn(6, columns, seed=columns)
    logits[:, n_vocab:] = 50.0
    logits[3:, ::3] = -torch.inf
    sampling = Sampling(n_vocab, **KINDS[kind])
    assert torch.equal(draw(_sampling.sample_tokens, logits, sampling), draw(sample_in_torch, logits, sampling))


@pytest.mark.parametrize("kind", ["greedy", "both"])
def test_decode_token_stores_its_draws_in_a_column(kind):
    """It draws at positions + 1, and adds 1 to the positions. All other columns keep their bits.

    For a row with NaN, the next step reads the embedding of id 0.
    """
    logits, seeds, sampling = randn(3, 101).to(DEVICE), seeds_of(7, 3, DEVICE), Sampling(97, **KINDS[kind])
    logits[1, 20] = torch.nan
    positions, output = torch.tensor([4, 0, 9], device=DEVICE), torch.full((3, 6), -7, device=DEVICE)
    for column in (1, 4):
        tokens, before = torch.zeros(3, 1, dtype=torch.int64, device=DEVICE), output.clone()
        expected = sample_in_torch(logits, seeds, positions + 1, sampling)
        after = positions + 1
        _sampling.decode_token(logits, seeds, positions, sampling, tokens, output[:, column])
        before[:, column] = expected
        assert (expected == module.NO_TOKEN).tolist() == [False, True, False]
        assert torch.equal(tokens[:, 0], expected.clamp(min=0))
        assert torch.equal(output, before)
        assert torch.equal(positions, after)


def definition(logits, sampling, seed=7, first_position=3):
    """Draw in float64 by definition. Keep an id if fewer than top_k logits, with less p than top_p, are larger."""
    rows, n_vocab = len(logits), sampling.n_vocab
    logits = logits[:, :n_vocab].double()
    if sampling.temperature == 0:
        return logits.argmax(-1)
    larger = logits[:, None, :] > logits[:, :, None]
    kept = larger.sum(-1) < (sampling.top_k or n_vocab)
    p = (logits / sampling.temperature).masked_fill(~kept, -torch.inf).softmax(-1)
    if sampling.top_p < 1:
        kept &= (larger * p[:, None, :]).sum(-1) < max(sampling.top_p, 1e-12)
    positions = first_position + 5 * torch.arange(rows)
    noise = exponential_noise(torch.arange(n_vocab).expand(rows, -1), seeds_of(seed, rows), positions)
    return (p * kept / noise).argmax(-1)


@pytest.mark.parametrize(("kind", "dtype"), KINDS_AND_DTYPES, ids=str)
def test_triton_keeps_all_or_none_of_equal_logits(kind, dtype):
    """Logits are multiples of 1/2, so each limit of top_k and top_p falls among equal logits."""
    logits = (2 * randn(8, 200, seed=3)).round() / 2
    logits[:2] = logits[:2].clamp(max=0)  # many zeros are the largest
    logits[2:4] -= 30
    logits[4] = 1.25
    logits[5] = -0.0
    logits[5, ::2] = 0.0
    sampling = Sampling(190, **KINDS[kind])
    assert torch.equal(draw(_sampling.sample_tokens, logits.to(dtype), sampling), definition(logits, sampling))


def rows_without_probabilities():
    """Return logits (15, 128) of 97 ids and padding, and whether each row has probabilities."""
    logits, valid = randn(15, 128), torch.ones(15, dtype=torch.bool)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        logits[5 * row, :97] = value
        logits[5 * row + 1, ::2] = value
        logits[5 * row + 2, 96] = value  # the last id
        logits[5 * row + 3] = logits[5 * row + 3].abs().neg()
        logits[5 * row + 3, 5] = value
        logits[5 * row + 4, 97:] = value  # padding, which may hold anything
        valid[5 * row : 5 * row + 4] = value == -torch.inf
    valid[10] = False  # all are -inf
    return logits, valid


@pytest.mark.parametrize(("kind", "dtype"), KINDS_AND_DTYPES, ids=str)
@pytest.mark.parametrize("sample", [sample_in_torch, _sampling.sample_tokens], ids=["torch", "triton"])
def test_a_row_with_nan_or_inf_draws_no_token(sample, kind, dtype):
    """Every other row draws the same id as without such rows, also a row in which some logits are -inf."""
    logits, valid = rows_without_probabilities()
    logits, sampling = logits.to(dtype), Sampling(97, **KINDS[kind])
    drawn = draw(sample, logits, sampling)
    assert torch.equal(drawn == module.NO_TOKEN, ~valid)
    expected = draw(sample, logits.masked_fill(~valid[:, None], 0), sampling)
    assert torch.equal(drawn[valid], expected[valid])
    assert ((drawn[valid] >= 0) & (drawn[valid] < 97)).all()


@pytest.mark.parametrize("kind", ["greedy", "all", "both", "top_p"])
def test_triton_takes_views_and_many_groups(kind):
    """The inputs are rows of a larger tensor, expanded seeds and positions, and hashed seeds above 2^32."""
    wide = randn(6, 3, 1500, seed=2)
    seeds, positions = (seeds_of(1, 1) + 2**40 + 3 * POSITION_FACTOR).expand(6), torch.tensor([2**31 + 5]).expand(6)
    sampling = Sampling(1111, **KINDS[kind])
    expected = sample_in_torch(wide[:, 1, :1400], seeds, positions, sampling)
    got = _sampling.sample_tokens(wide.to(DEVICE)[:, 1, :1400], seeds.to(DEVICE), positions.to(DEVICE), sampling)
    assert torch.equal(got.cpu(), expected)
    assert got.dtype == torch.int64


def test_triton_noise_has_the_bits_of_torch():
    """The uniform numbers are equal, and their logarithms are equal up to rounding."""
    seeds, positions = seeds_of(2**40, 20), torch.arange(20) * 1234567
    ids = torch.arange(4096).expand(20, -1)
    uniform, noise = (torch.empty(20, 4096, device=DEVICE) for _ in range(2))
    write_noise[(20,)](uniform, noise, seeds.to(DEVICE), positions.to(DEVICE), K=4096)
    hashes = scramble(ids * ID_FACTOR + (positions * POSITION_FACTOR + seeds)[:, None])
    assert torch.equal(uniform.cpu(), ((hashes >> 9).float() + 0.5) * 2**-23)
    torch.testing.assert_close(noise.cpu(), exponential_noise(ids, seeds, positions), rtol=3e-7, atol=0)


def test_triton_is_an_operator_for_torch_compile():
    logits, sampling = randn(4, 128), Sampling(97, top_k=20, top_p=0.9)
    compiled = torch.compile(functools.partial(draw, _sampling.sample_tokens), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logits, sampling), draw(sample_in_torch, logits, sampling))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_triton_in_a_cuda_graph(kind, dtype):
    """A CUDA graph with GPT-2's vocabulary draws the same tokens as torch, for new logits and positions at each replay.

    Each row has the same 2560 different numbers, which every dtype represents exactly. The other logits are -inf.
    """
    numbers = torch.arange(0x3C80, 0x4180, dtype=torch.int16).view(torch.bfloat16).float()  # from 2^-6 up to 16
    row = torch.cat((numbers, -numbers, torch.full((50304 - 2560,), -torch.inf)))
    permute = torch.Generator().manual_seed(0)
    logits = torch.stack([row[torch.randperm(50304, generator=permute)] for _ in range(30)]).to(DEVICE, dtype)
    seeds, positions = seeds_of(0, 30, DEVICE), torch.arange(30, device=DEVICE)
    sampling = Sampling(50257, **KINDS[kind])
    _sampling.sample_tokens(logits, seeds, positions, sampling)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = _sampling.sample_tokens(logits, seeds, positions, sampling)
    for _ in range(5):
        logits.copy_(logits.roll(1, 0))
        positions.add_(7)
        graph.replay()
        assert torch.equal(tokens, sample_in_torch(logits.float(), seeds, positions, sampling))
