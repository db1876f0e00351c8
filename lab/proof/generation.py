"""Proof of a generation: compare its greedy tokens and its logits with full forwards without a cache.

The decoder makes the tokens as in the run: captured, compiled, with the run's batch. The reference reads these tokens
in one forward of eager PyTorch, so one wrong token does not make the next tokens wrong. It runs in float64 with the
model's own (rounded) weights, and again in the run's precision, which gives the error of rounding alone.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.cache import Cache
from kernels.registry import AttnConfig, KernelsConfig, backend
from kernels.sampling import Sampling
from model.decoder import Decoder
from model.generate import stream
from model.gpt import GPT
from model.layers import Norm
from model.step import build
from runtime.config import check

NEW_TOKENS = 512
ROWS = 4  # compare at most this many sequences of the batch


def prove(decoder: Decoder, options: dict, precision: str, idx: Tensor, lengths: Tensor) -> dict:
    """Return the proof of a decoder like this one, for the prompts idx (B, T) with lengths (B,).

    `options` are the keyword arguments of the decoder's constructor. In the result, `ok` is True if every token is the
    most likely one, or a tie, and the logits are within the bound. It is None if the decoder rounds on purpose (int8,
    fp8). `ties` counts tokens whose logit is below the largest one by at most twice the bound.
    """
    model, n_vocab = decoder.model, decoder.sampling.n_vocab
    device, T = idx.device, idx.shape[1]
    shapes = [each.model.config for each in decoder.decoders]
    new_tokens = min([NEW_TOKENS, *(each.block_size - T for each in shapes if each.pos != "rope")])
    if decoder.step_tokens > 1:
        # the cache must hold all tokens and one whole draft, so a window limits them
        new_tokens = min([new_tokens, *(each.window - T - decoder.step_tokens + 1 for each in shapes if each.window)])
        check(
            new_tokens > 1,
            "proof=true compares two new tokens or more, and the window has room for one: shorten the prompt",
        )
    greedy = Decoder(model, len(idx), T + new_tokens, Sampling(n_vocab, temperature=0), **options)
    greedy.warm_up(T, new_tokens)
    texts = [[] for _ in idx]
    for step in stream(greedy, idx, new_tokens, lengths):
        for text, tokens in zip(texts, step, strict=True):
            text += tokens
    new = torch.tensor(texts, device=device)  # (B, new_tokens)
    logits = step_logits(greedy, idx, lengths, new)
    errors, eager_errors, scales, gaps = [], [], [], []
    for place, (row, *references) in enumerate(reference_logits(model, precision, idx, lengths, new)):
        truth, rounded = (reference[:, :n_vocab] for reference in references)
        errors.append((logits[place, :, :n_vocab] - truth[1:]).abs().max())
        eager_errors.append((rounded - truth).abs().max())
        scales.append(truth.abs().max())
        gaps.append(truth.max(-1).values - truth.gather(-1, new[row, :, None])[:, 0])
    error, eager_error, scale = (torch.stack(values).max().item() for values in (errors, eager_errors, scales))
    bound = 2 * eager_error + torch.finfo(model.ln_f.dtype).eps / 2 * scale
    return {
        "new_tokens": new_tokens,
        "compared": len(gaps),
        **judge(torch.cat(gaps), error, bound, describe_rounding(options)),
    }


@torch.no_grad()
def reference_logits(
    model: GPT, precision: str, idx: Tensor, lengths: Tensor, new: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (row, exact logits, eager's logits), both (n, V) float64, for each of compared_rows().

    They are the logits after the prompt's last token, and after each token of new (B, n) except the last. One forward
    of eager PyTorch reads the prompt and the tokens, in float64 and in the precision of the run.
    """
    eager = rebuild(model, precision)
    exact = to_float64(rebuild(model, precision))
    for row in compared_rows(len(idx)):
        length = int(lengths[row])
        ids = torch.cat((idx[row, :length], new[row, :-1]))[None]
        truth, rounded = (reference(ids)[0, length - 1 :].double() for reference in (exact, eager))
        yield row, truth, rounded


def compared_rows(batch: int) -> list[int]:
    """Return the sequences that are compared: the first, the last, and others between them, ROWS in all."""
    return sorted({place * (batch - 1) // (ROWS - 1) for place in range(ROWS)})


def describe_rounding(options: dict) -> str | None:
    """Return a text that says what the decoder rounds on purpose, or None."""
    kv = options["options"].kv
    if getattr(backend("decode", options["decode"]), "LOSSY", False):
        return f"kernels.decode={options['decode']} rounds the weights"
    return f"generate.kv={kv} rounds keys and values" if kv != "auto" else None


def judge(gaps: Tensor, error: float, bound: float, why_lossy: str | None) -> dict:
    """Return the result of a proof. A token's logit is below the largest one by its number in `gaps` (N,).

    If each of two logits is off by at most `bound`, their order can change while they differ by at most 2 bound.
    """
    other = gaps > 2 * bound
    facts = {"tokens": len(gaps), "ties": int(((gaps > 0) & ~other).sum()), "other_tokens": int(other.sum())}
    facts |= {"logits_error": error, "logits_bound": bound}
    if not math.isfinite(error):
        return {"ok": False, "why": "a logit is not finite", **facts}
    if why_lossy:
        return {"ok": None, "why": why_lossy, **facts}
    if facts["other_tokens"]:
        why = f"{facts['other_tokens']} of {len(gaps)} greedy tokens are not the most likely ones of a full forward"
        return {"ok": False, "why": why, **facts}
    if not error <= bound:  # `not <=` also catches NaN
        return {"ok": False, "why": f"a logit is off by {error:.2g}, and the bound is {bound:.2g}", **facts}
    return {"ok": True, "why": None, **facts}


def why_proof_fails(proof: dict) -> str | None:
    """Return why the decoder is wrong; None if the proof holds, or if the decoder rounds on purpose."""
    return proof["why"] if proof["ok"] is False else None


@torch.no_grad()
def step_logits(decoder: Decoder, idx: Tensor, lengths: Tensor, new: Tensor) -> Tensor:
    """Return the logits (rows, n - 1, V), float64, of the decoding steps that read new (B, n) token by token."""
    decoder.prefill(idx, lengths)
    logits, rows = [], compared_rows(len(idx))
    token = decoder.tokens[:, :1]  # with other strides, a compiled step would be compiled again
    for n in range(new.shape[1] - 1):
        cache = Cache(decoder.kv, decoder.bucket(idx.shape[1] + n + decoder.graph_tokens), lengths + n)
        token.copy_(new[:, n : n + 1])
        _, new_logits = decoder.next_tokens(token, cache, decoder.seeds, decoder.sampling)
        logits.append(new_logits[rows, 0].double())
    return torch.stack(logits, 1)


def rebuild(model: GPT, precision: str) -> GPT:
    """Return a copy of the model with eager kernels."""
    eager = build(model.config, KernelsConfig(), AttnConfig("eager"), precision, model.wte.weight.device).eval()
    eager.load_state_dict(model.state_dict())
    return eager


def to_float64(model: GPT) -> GPT:
    """Convert weights and arithmetic to float64, in place."""
    for module in model.modules():
        if isinstance(module, Norm):
            module.dtype = torch.float64
    return model.double()


def proof_line(proof: dict) -> str:
    """Return the proof in one line, for the terminal."""
    agree = proof["tokens"] - proof["other_tokens"] - proof["ties"]
    text = f"{agree:,} of {proof['tokens']:,} greedy tokens match a full forward"
    if proof["ties"]:
        text += f", {proof['ties']} are ties within its rounding"
    text += f"; logits are off by {proof['logits_error']:.2g} (bound {proof['logits_bound']:.2g})"
    return f"proof    {text}{'' if proof['ok'] is not None else ', because ' + proof['why']}"
