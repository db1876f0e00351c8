"""Generate tokens: prefill and decode over a KV cache, and sampling.

A decoding step reads all weights to make B tokens, and computes little. The 248 MB of 124M in bf16 take 52 us at an
H200's 4.8 TB/s, but the host must launch some 250 kernels for a step. So a step is a function of tensors whose shapes
and addresses never change, and the GPU replays it as one CUDA graph (as gpt-fast does). Only the number of keys grows.
It is rounded up to a bucket, each bucket has its own graph, and the argument `lengths` of attention masks the rest.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from kernels.compat import allow_graphs
from kernels.registry import Unavailable, missing_argument
from model import compat
from model.cache import Cache
from model.gpt import GPT
from model.parallel import gather_parameters
from runtime.config import check

BUCKET = 256  # keys of the smallest bucket; each next one has twice as many, so 8 graphs are enough for 32,768 keys
LAG = 4  # the host reads a token up to this many steps after the GPU has made it, so that the GPU need not wait


class Sampling(NamedTuple):
    """How the next token is drawn. Ids of n_vocab and above, the padding of the vocabulary, are never drawn."""

    n_vocab: int
    temperature: float = 1.0  # 0: always the most likely token
    top_k: int = 0  # draw among the k most likely tokens; 0: among all
    top_p: float = 1.0  # draw among the fewest tokens that together have this probability (Holtzman et al. 2019)

    @property
    def candidates(self) -> int:
        """The number of tokens that remain after top_k."""
        return min(self.top_k or self.n_vocab, self.n_vocab)


def sample_token(logits: Tensor, noise: Tensor, sampling: Sampling) -> Tensor:
    """Draw a token a sequence: logits (B, V), noise (B, candidates) fp32 -> (B, 1) int64. top_k comes before top_p.

    The noise is drawn from Exp(1), so argmax(p / noise) is a draw from p: noise / p is exponential with rate p, and the
    i-th of such exponentials is the smallest with probability p_i. torch.multinomial would synchronise with the host.
    """
    logits, ids = logits[:, : sampling.n_vocab], None
    if sampling.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if sampling.top_k or sampling.top_p < 1:
        # In the compute dtype, because bf16 has half the bits to sort by
        logits, ids = logits.topk(sampling.candidates)
    p = (logits.float() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        # p is sorted: keep a token if the tokens before it have less than top_p together
        p = p.where(p.cumsum(-1) - p < sampling.top_p, 0)
    choice = (p / noise).argmax(-1, keepdim=True)
    return choice if ids is None else ids.gather(-1, choice)


def decode_step(
    model: GPT, token: Tensor, position: Tensor, kv: list, keys: int, noise: Tensor, sampling: Sampling
) -> Tensor:
    """One decoding step: token (B, 1) at position (1,) -> the next token (B, 1). Attention reads `keys` keys of kv."""
    lengths = (position + 1).to(torch.int32).repeat(len(token))
    logits = model.forward(token, cache=Cache(kv, position, keys, lengths))
    return sample_token(logits[:, -1], noise, sampling)


def inductor(graph: torch.fx.GraphModule, examples: list) -> Callable:
    """A backend of torch.compile: Inductor, but a linear layer of one row (B = 1) is a sum, which fuses with other ops.

    With coordinate_descent_tuning, Inductor itself does so for a linear layer without a bias, on a GPU.
    """
    decompositions = {torch.ops.aten.addmm.default: addmm_of_one_row}
    return compat.compile_graph(graph, examples, decompositions, {"coordinate_descent_tuning": True})


def addmm_of_one_row(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """x (1, K) @ weight (K, N) + bias (N,) as a sum in fp32. NotImplemented for other shapes, which stay addmm."""
    if x.shape[0] != 1 or (beta, alpha) != (1, 1):
        return NotImplemented
    return ((x.float().unsqueeze(2) * weight.float().unsqueeze(0)).sum(1) + bias.float()).to(x.dtype)


def why_no_generation(model: GPT) -> str | None:
    """Return why the model cannot generate, in one line: its attention takes no `lengths`. None if it can."""
    reason = missing_argument(model.h[0].attn.attention, "lengths")
    return f"generation reads a cache, and {reason}" if reason else None


class Decoder:
    """Continues B sequences of equal length, to at most `capacity` tokens: prefill() once, then step() repeatedly.

    Both return the next tokens (B, 1) int64, in a tensor that the next call overwrites. With `compiled`, torch.compile
    compiles a step. warm_up() compiles the steps in advance, and on a GPU captures them as CUDA graphs. Raises
    UserError if the model's attention takes no `lengths`.
    """

    def __init__(
        self, model: GPT, batch: int, capacity: int, sampling: Sampling, seed: int = 0, compiled: bool = False
    ):
        reason = why_no_generation(model)
        check(reason is None, reason)
        config, device = model.config, model.wte.weight.device
        self.model, self.sampling, self.seed, self.capacity = model, sampling, seed, capacity
        rows = -(-capacity // (BUCKET // 4)) * (BUCKET // 4)  # the rows beyond `capacity` are masked
        # Zeros, because masked values must be finite. Separate tensors, because Inductor would copy one common tensor
        # for each layer that writes to a view of it
        shape = batch, rows, config.kv_heads, config.head_dim
        tensors = [torch.zeros(shape, dtype=model.ln_f.dtype, device=device) for _ in range(2 * config.n_layer)]
        self.kv = list(zip(tensors[::2], tensors[1::2], strict=True))  # (keys, values) of each layer
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.noise = torch.ones(batch, sampling.candidates, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.length = 0  # tokens in the cache
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # One stream for all captures, because cuBLAS allocates a workspace for each stream
        self.capture_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.decode = decode_step
        if compiled:
            self.decode = torch.compile(decode_step, fullgraph=True, dynamic=False, backend=inductor)

    @torch.no_grad()
    def prefill(self, idx: Tensor) -> Tensor:
        """Fill the cache with idx (B, T) int64, from position 0 on, and return the next tokens."""
        self.length = idx.shape[1]
        positions = torch.arange(self.length, device=idx.device)
        logits = self.model.forward(idx, cache=Cache(self.kv, positions, self.length, None))
        self._make_noise()
        self.position.fill_(self.length)
        return self.token.copy_(sample_token(logits[:, -1], self.noise, self.sampling))

    @torch.no_grad()
    def step(self) -> Tensor:
        """Put the last tokens into the cache, and return the next ones."""
        assert 0 < self.length < self.capacity
        self.length += 1
        keys = self.bucket(self.length)
        if keys in self.graphs:
            self.graphs[keys].replay()
        else:
            self._step(keys)
        return self.token

    def bucket(self, length: int) -> int:
        """How many keys a step reads if the cache holds `length`. It is all rows if the bucket has nearly as many."""
        keys, rows = BUCKET, self.kv[0][0].shape[1]
        while keys < length:
            keys *= 2
        return keys if 1.5 * keys <= rows else rows

    @torch.no_grad()
    def warm_up(self, first: int, last: int) -> list[int]:
        """Compile and capture the steps with `first` to `last` keys. Returns their buckets. It clears the cache."""
        buckets = sorted({self.bucket(length) for length in range(first, last + 1)})
        with allow_graphs(len(buckets)):
            for keys in buckets:
                if self.token.is_cuda:
                    self.graphs[keys] = self._capture(keys)
                else:
                    self.position.zero_()
                    self._step(keys)
        self.length = 0
        return buckets

    def _step(self, keys: int) -> None:
        self._make_noise()
        self.token.copy_(self.decode(self.model, self.token, self.position, self.kv, keys, self.noise, self.sampling))
        self.position.add_(1)

    def _make_noise(self) -> None:  # not in decode_step(), because torch.compile does not support generators
        if self.sampling.temperature:
            self.noise.exponential_(generator=self.generator)

    def _capture(self, keys: int) -> torch.cuda.CUDAGraph:
        """Capture a step as a CUDA graph. A replay updates the same tensors, and draws the generator's next numbers."""
        self.capture_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.capture_stream):  # compilation, tuning and first allocations cannot be captured
            for _ in range(2):
                self.position.zero_()
                self._step(keys)
        torch.cuda.current_stream().wait_stream(self.capture_stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        # The graphs share one memory pool, because only one of them runs at a time
        pool = next((other.pool() for other in self.graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool, stream=self.capture_stream):
            self._step(keys)
        return graph


def stream(decoder: Decoder, idx: Tensor, max_new_tokens: int) -> Iterator[Tensor]:
    """Yield the new tokens of each step, (B,) int64 on the host. The same seed gives the same tokens.

    On a GPU the host is up to LAG steps behind, so a caller that stops early has computed up to LAG steps too many.
    """
    decoder.generator.manual_seed(decoder.seed)
    host = torch.empty(max_new_tokens, len(idx), dtype=torch.int64, pin_memory=idx.is_cuda)
    pending = deque()
    for n in range(max_new_tokens):
        token = decoder.step() if n else decoder.prefill(idx)
        host[n].copy_(token[:, 0], non_blocking=True)
        pending.append((host[n], torch.cuda.current_stream().record_event() if idx.is_cuda else None))
        while pending and (len(pending) > LAG or n + 1 == max_new_tokens or not idx.is_cuda):
            tokens, copied = pending.popleft()
            if copied:
                copied.synchronize()
            yield tokens


@torch.no_grad()
def generate(
    model: GPT, idx: Tensor, max_new_tokens: int, *, n_vocab: int, temperature=1.0, top_k=0, top_p=1.0, seed=0
) -> Tensor:
    """idx (B, T) int64 -> (B, T + max_new_tokens), as nanoGPT's generate() does. Sampling describes the arguments.

    Each token depends on the last block_size tokens. Once the text is longer, the position of every token changes with
    each new one, so each new token takes a forward pass over the whole window.
    """
    training = model.training
    model.eval()
    capacity = min(idx.shape[1] + max_new_tokens, model.config.block_size)
    decoder = Decoder(model, len(idx), capacity, Sampling(n_vocab, temperature, top_k, top_p), seed)
    for _ in range(max_new_tokens):
        is_cached = 0 < decoder.length < capacity
        token = decoder.step() if is_cached else decoder.prefill(idx[:, -capacity:])
        idx = torch.cat((idx, token), dim=1)
    model.train(training)
    return idx


def sample_text(model: GPT, tokenizer: Tokenizer, max_new_tokens: int, seed: int) -> str:
    """Generate a new document, and return its text. Raises Unavailable if the model's attention cannot generate."""
    if reason := why_no_generation(model):
        raise Unavailable(reason)
    gather_parameters(model)
    start = torch.tensor([[tokenizer.eot]], device=model.wte.weight.device)
    options = {"n_vocab": tokenizer.n_vocab, "temperature": 0.8, "top_k": 200, "seed": seed}
    return tokenizer.decode(generate(model, start, max_new_tokens, **options)[0].tolist())
