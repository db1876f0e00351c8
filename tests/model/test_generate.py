import torch

from model.generate import generate
from tests.model.test_gpt import gpt


def test_greedy_takes_the_best_token_each_time():
    model = gpt()
    start = torch.tensor([[5, 6], [7, 8]])
    ids = generate(model, start, 40, n_vocab=97, temperature=0)  # beyond the table of 24: the last 24 are seen
    expected = start
    for _ in range(40):
        best = model(expected[:, -24:])[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat((expected, best), dim=1)
    assert torch.equal(ids, expected)


def test_sampling_is_seeded_limited_and_fair():
    model = gpt()
    start = torch.zeros(4000, 1, dtype=torch.long)
    ids = generate(model, start, 1, n_vocab=97, temperature=0.5, top_k=3, seed=1)
    assert torch.equal(ids, generate(model, start, 1, n_vocab=97, temperature=0.5, top_k=3, seed=1))
    logits = model(start[:1])[0, -1] / 0.5
    best = logits.topk(3).indices
    odds = logits[best].softmax(-1)
    counts = torch.stack([(ids[:, 1] == token).sum() for token in best])
    assert counts.sum() == 4000
    assert ((counts / 4000 - odds).abs() < 5 * (odds * (1 - odds) / 4000).sqrt()).all()


def test_padding_is_never_drawn():
    ids = generate(gpt(), torch.zeros(500, 1, dtype=torch.long), 2, n_vocab=4, temperature=100.0)
    assert ids.max() == 3
    assert set(ids[:, 1:].flatten().tolist()) == {0, 1, 2, 3}
