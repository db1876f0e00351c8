"""Generate tokens: a stream from a Decoder, nanoGPT's generate(), and a sample of text."""

from collections import deque
from collections.abc import Iterator
from numbers import Integral, Real

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from kernels.registry import Unavailable
from kernels.sampling import NO_TOKEN, Sampling
from model.decoder import Decoder, why_no_generation
from model.gpt import GPT
from model.modes import in_eval_mode
from model.parallel import gather_parameters
from runtime.config import UserError, check, value_text

# How many calls of Decoder.step() the GPU may be ahead of the host. A call makes GRAPH_TOKENS tokens, but with a draft
# it may make only one
LAG, DRAFT_LAG = 2, 4
# The same for generate_tokens(), which makes LAUNCH_TOKENS. With 0, a launch of 32 tokens took 5.28 ms, and the GPU was
# idle for 0.46 ms (decode=persistent, 124M, H200)
LAUNCH_LAG = 1


class NotFinite(UserError):
    """The logits of a new token are not finite, so it has no probabilities. The message names the token."""

    status = "wrong"  # the word in a result row


def stream(
    decoder: Decoder, idx: Tensor, max_new_tokens: int, lengths: Tensor | None = None, kept: int = 0
) -> Iterator[list[list[int]]]:
    """Yield the tokens that each call of step() adds to each sequence, until all have max_new_tokens new tokens.

    Decoder.prefill() describes idx (B, T), lengths (B,) and `kept`. The host is up to max_lag() calls behind. Tokens
    beyond max_new_tokens are left out. Raises NotFinite if logits are not finite, and KernelError if a launch of
    generate_tokens() failed.
    """
    assert idx.shape[1] + max_new_tokens <= decoder.capacity  # step() does not fail beyond the capacity
    lag = max_lag(decoder, idx)
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
        check_tokens(decoder, new, totals)
        totals = [done + len(tokens) for done, tokens in zip(totals, new, strict=True)]
        if decoder.step_tokens > 1:  # the decoder knows only an upper bound of the length
            decoder.length = prompt + max(totals) - 1 + decoder.step_tokens * len(pending)
        yield new


def check_tokens(decoder: Decoder, new: list[list[int]], totals: list[int]) -> None:
    """Raise NotFinite or KernelError if `new` has something else than tokens. They follow totals[b] new tokens."""
    decoder.check_launch(new)
    sequences = enumerate(zip(new, totals, strict=True), start=1)
    wrong = [(done + tokens.index(NO_TOKEN) + 1, b) for b, (tokens, done) in sequences if NO_TOKEN in tokens]
    if not wrong:
        return
    for tensor in decoder.memory()["kv_cache"]:  # a later call multiplies masked rows by 0, and 0 * NaN is NaN
        tensor.zero_()
    number, b = min(wrong)
    where = f" of sequence {b}" if len(new) > 1 else ""
    raise NotFinite(
        f"the logits of new token {number}{where} are not finite, because a weight or a result of a kernel is NaN or "
        "inf: choose other weights, or kernels=eager attn=eager to see whether a kernel is wrong"
    )


def max_lag(decoder: Decoder, idx: Tensor) -> int:
    """Return how many calls the host may be behind: 0 on a CPU, where step() returns when the tokens are ready."""
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
@in_eval_mode
def generate(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    *,
    n_vocab: int,
    temperature: float = 1.0,
    top_k: int | None = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """idx (B, T) int64 -> (B, T + max_new_tokens), as nanoGPT's generate() does.

    Sampling describes the other arguments. Sequence b draws with seed + b. Each token depends on the last block_size
    tokens. Once the text is longer, each new token changes the positions of all others, so it takes a forward pass over
    the whole window. Raises UserError if an argument is wrong, and NotFinite if logits are not finite. It waits for the
    device twice: to check idx, and to check the new tokens.
    """
    check_prompt(model, idx)
    check(
        isinstance(max_new_tokens, Integral) and 0 <= max_new_tokens < 2**31,
        f"max_new_tokens={value_text(max_new_tokens)}: it must be in [0, 2^31)",
    )
    size = model.config.vocab_size
    check(
        isinstance(n_vocab, Integral) and 1 <= n_vocab <= size,
        f"n_vocab={value_text(n_vocab)}: it must be in [1, {size}], because model.vocab_size is {size}",
    )
    top_k = 0 if top_k is None else top_k  # nanoGPT's default
    check_sampling(temperature, top_k, top_p, seed)
    prompt, seed = idx.shape[1], int(seed)
    capacity = min(prompt + max_new_tokens, model.config.block_size)
    sampling = Sampling(int(n_vocab), float(temperature), int(top_k), float(top_p))
    decoder = Decoder(model, len(idx), capacity, sampling, seed)
    for _ in range(max_new_tokens):
        is_cached = 0 < decoder.length < capacity
        dropped = max(0, idx.shape[1] - capacity)
        # NO_TOKEN has no embedding
        output = decoder.step() if is_cached else decoder.prefill(idx[:, dropped:].clamp(min=0), dropped=dropped)
        idx = torch.cat((idx, output[:, 1:2]), dim=1)  # without a warm-up, a step makes one token
    check_tokens(decoder, idx[:, prompt:].tolist(), [0] * len(idx))
    return idx


def check_prompt(model: GPT, idx: Tensor) -> None:
    """Raise UserError if idx is not (B, T) int64 of at least one token, on the model's device. Synchronises."""
    is_tensor = isinstance(idx, Tensor)
    found = f"{tuple(idx.shape)} {idx.dtype}" if is_tensor else f"a {type(idx).__name__}"
    check(
        is_tensor and idx.dim() == 2 and idx.dtype == torch.int64 and idx.numel() > 0,
        f"idx must be token ids (B, T) int64, at least one for each sequence, not {found}",
    )
    device, size = model.wte.weight.device, model.config.vocab_size
    check(idx.device == device, f"idx is on {idx.device}, and the model on {device}: pass idx.to({str(device)!r})")
    low, high = torch.stack(idx.aminmax()).tolist()
    check(low >= 0 and high < size, f"idx has ids from {low} to {high}, and model.vocab_size is {size}")


def check_sampling(temperature: float, top_k: int, top_p: float, seed: int) -> None:
    """Raise UserError if these are no arguments of Sampling, or no seed."""
    check(
        isinstance(temperature, Real) and (temperature == 0 or 1e-4 <= temperature <= 1e4),
        f"temperature={value_text(temperature)}: it must be 0 (the most probable token each time) or in "
        "[0.0001, 10000]",
    )
    check(
        isinstance(top_k, Integral) and top_k >= 0,
        f"top_k={value_text(top_k)}: it must be at least 1, or 0 for no limit",
    )
    check(
        isinstance(top_p, Real) and 0 < top_p <= 1,
        f"top_p={value_text(top_p)}: it must be in (0, 1]; 1 is no limit",
    )
    check(isinstance(seed, Integral) and 0 <= seed < 2**63, f"seed={value_text(seed)}: it must be in [0, 2^63)")


def sample_text(model: GPT, tokenizer: Tokenizer, max_new_tokens: int, seed: int) -> str:
    """Generate a new document, and return its text. Raises Unavailable if the model's attention cannot generate."""
    if reason := why_no_generation(model):
        raise Unavailable(reason)
    gather_parameters(model)
    start = torch.tensor([[tokenizer.eot]], device=model.wte.weight.device)
    options = {"n_vocab": tokenizer.n_vocab, "temperature": 0.8, "top_k": 200, "seed": seed}
    with torch.compiler.set_stance("force_eager"):  # compiled blocks would be compiled again for a few tokens
        return tokenizer.decode(generate(model, start, max_new_tokens, **options)[0].tolist())
