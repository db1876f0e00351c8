"""Generate tokens: a stream from a Decoder, nanoGPT's generate(), and a sample of text."""

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from kernels.registry import Unavailable
from kernels.sampling import Sampling
from model.decoder import Decoder, why_no_generation
from model.gpt import GPT
from model.parallel import gather_parameters

# How many calls of Decoder.step() the GPU may be ahead of the host. A call makes GRAPH_TOKENS tokens, but with a draft
# it may make only one
LAG, DRAFT_LAG = 2, 4
# The same for generate_tokens(), which makes LAUNCH_TOKENS. With 0, a launch of 32 tokens took 5.28 ms, and the GPU was
# idle for 0.46 ms (decode=persistent, 124M, H200)
LAUNCH_LAG = 1


def stream(
    decoder: Decoder,
    idx: Tensor,
    max_new_tokens: int,
    lengths: Tensor | None = None,
    lag: int | None = None,
    kept: int = 0,
) -> Iterator[list[list[int]]]:
    """Yield the tokens that each call of step() adds to each sequence, until all have max_new_tokens new tokens.

    Decoder.prefill() describes idx (B, T), lengths (B,) and `kept`. The host is up to `lag` calls behind, by default
    default_lag(). If the caller stops early, the GPU has computed up to `lag` calls too many. Tokens beyond
    max_new_tokens are left out. Raises KernelError if a launch of generate_tokens() failed.
    """
    assert idx.shape[1] + max_new_tokens <= decoder.capacity  # step() does not fail beyond the capacity
    lag = default_lag(decoder, idx) if lag is None else lag
    prompt, totals, pending = idx.shape[1], [0] * len(idx), deque()
    # The steps write these buffers in turn. There are more buffers than pending steps
    host = torch.empty(lag + 2, *decoder.output.shape, dtype=torch.int64, pin_memory=idx.is_cuda)
    calls = 0
    while min(totals) < max_new_tokens:
        while len(pending) <= lag and fewest_tokens(decoder, prompt, totals, len(pending)) < max_new_tokens:
            buffer = host[calls % len(host)]
            buffer.copy_(decoder.step() if calls else decoder.prefill(idx, lengths, kept=kept), non_blocking=True)
            pending.append((buffer, torch.cuda.current_stream().record_event() if idx.is_cuda else None))
            calls += 1
        buffer, copied = pending.popleft()
        if copied:
            copied.synchronize()
        rows = zip(buffer.tolist(), totals, strict=True)
        new = [tokens[: min(count, max_new_tokens - done)] for (count, *tokens), done in rows]
        decoder.check_launch(new)
        totals = [done + len(tokens) for done, tokens in zip(totals, new, strict=True)]
        if decoder.step_tokens > 1:  # the decoder knows only an upper bound of the length
            decoder.length = prompt + max(totals) - 1 + decoder.step_tokens * len(pending)
        yield new


def default_lag(decoder: Decoder, idx: Tensor) -> int:
    """Return the `lag` of stream(): 0 on a CPU, because there step() returns when the tokens are ready."""
    if not idx.is_cuda:
        return 0
    if decoder.generate_tokens:
        return LAUNCH_LAG
    return LAG if decoder.step_tokens == 1 else DRAFT_LAG


def fewest_tokens(decoder: Decoder, prompt: int, totals: list[int], pending: int) -> int:
    """Return how many new tokens each sequence has at least after the pending steps. The prefill makes the first."""
    if decoder.step_tokens > 1:
        return min(totals) + pending  # a step adds at least one token to each sequence that is not complete
    return decoder.length + 1 - prompt if decoder.length and (pending or any(totals)) else 0


@torch.no_grad()
def generate(
    model: GPT, idx: Tensor, max_new_tokens: int, *, n_vocab: int, temperature=1.0, top_k=0, top_p=1.0, seed=0
) -> Tensor:
    """idx (B, T) int64 -> (B, T + max_new_tokens), as nanoGPT's generate() does. Sampling describes the arguments.

    Each token depends on the last block_size tokens. Once the text is longer, each new token changes the positions of
    all others, so it takes a forward pass over the whole window.
    """
    training = model.training
    model.eval()
    capacity = min(idx.shape[1] + max_new_tokens, model.config.block_size)
    decoder = Decoder(model, len(idx), capacity, Sampling(n_vocab, temperature, top_k, top_p), seed)
    for _ in range(max_new_tokens):
        is_cached = 0 < decoder.length < capacity
        dropped = max(0, idx.shape[1] - capacity)
        output = decoder.step() if is_cached else decoder.prefill(idx[:, dropped:], dropped=dropped)
        idx = torch.cat((idx, output[:, 1:2]), dim=1)  # without a warm-up, a step makes one token
    model.train(training)
    return idx


def sample_text(model: GPT, tokenizer: Tokenizer, max_new_tokens: int, seed: int) -> str:
    """Generate a new document, and return its text. Raises Unavailable if the model's attention cannot generate."""
    if reason := why_no_generation(model):
        raise Unavailable(reason)
    gather_parameters(model)
    start = torch.tensor([[tokenizer.eot]], device=model.wte.weight.device)
    options = {"n_vocab": tokenizer.n_vocab, "temperature": 0.8, "top_k": 200, "seed": seed}
    with torch.compiler.set_stance("force_eager"):  # compiled blocks would be compiled again for a few tokens
        return tokenizer.decode(generate(model, start, max_new_tokens, **options)[0].tolist())
