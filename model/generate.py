"""Text from a model: prefill and decode over a KV cache, and sampling.

A decoding step reads every weight for B tokens and computes next to nothing: 124M in bf16 are 248 MB, 52 us of an
H200's 4.8 TB/s, while each of its some 250 kernels wants a launch from the host. So a step is a function of tensors
whose shapes and places never change, and the GPU replays it as one CUDA graph (gpt-fast's idea). What grows is the
number of keys that it looks at: it is rounded up to a bucket, a graph for each, and the op's `lengths` hides the rest.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.registry import refusal
from model.gpt import GPT, Cache
from runtime.config import check

BUCKET = 256  # keys of the shortest step; the next are its doubles, so 8 graphs reach 32,768 and read at most twice
LAG = 4  # steps that the host may be behind the GPU, so that fetching a token never lets it wait


class Sampling(NamedTuple):
    """How the next token is drawn: ids from n_vocab up (the padding of the vocabulary) never are."""

    n_vocab: int
    temperature: float = 1.0  # 0: the best one
    top_k: int = 0  # of the k best; 0: of all
    top_p: float = 1.0  # of the fewest best that together have this probability (Holtzman et al. 2019)

    @property
    def candidates(self) -> int:
        return min(self.top_k or self.n_vocab, self.n_vocab)


def draw(logits: Tensor, noise: Tensor, how: Sampling) -> Tensor:
    """logits (B, V), noise (B, candidates) fp32 of Exp(1) -> (B, 1) int64; top_p applies to what top_k leaves.

    argmax p / noise is a draw from p (of exponentials with rates p, the i-th is first with probability p_i), and unlike
    torch.multinomial it asks nothing of the host.
    """
    logits, ids = logits[:, : how.n_vocab], None
    if how.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if how.top_k or how.top_p < 1:
        logits, ids = logits.topk(how.candidates)  # in the compute dtype: bf16 is half the bits to sort by
    p = (logits.float() / how.temperature).softmax(-1)
    if how.top_p < 1:
        p = p.where(p.cumsum(-1) - p < how.top_p, 0)  # sorted: what is better has not reached top_p yet
    choice = (p / noise).argmax(-1, keepdim=True)
    return choice if ids is None else ids.gather(-1, choice)


def decode(model: GPT, token: Tensor, position: Tensor, kv: list, keys: int, noise: Tensor, how: Sampling) -> Tensor:
    """One step: token (B, 1) at position (1,) -> the next (B, 1). Keeps its keys and values in kv, reads `keys`."""
    lengths = (position + 1).to(torch.int32).repeat(len(token))
    logits = model.forward(token, cache=Cache(kv, position, keys, lengths))
    return draw(logits[:, -1], noise, how)


def inductor(graph: torch.fx.GraphModule, examples: list) -> Callable:
    """torch.compile's own backend, where a product with one row (B = 1) is a sum that fuses with what is around it.

    So tuned, Inductor does that to a linear layer without a bias by itself.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx  # 2 s
    from torch._inductor.decomposition import select_decomp_table

    table = {**select_decomp_table(), torch.ops.aten.addmm.default: biased_row}
    with config.patch(enable_autograd_cache=False):  # its key knows no table: it would give what was made without
        return compile_fx(graph, examples, config_patches={"coordinate_descent_tuning": True}, decompositions=table)


def biased_row(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """x (1, K) @ weight (K, N) + bias (N,), summed in fp32; all else stays addmm."""
    if x.shape[0] != 1 or (beta, alpha) != (1, 1):
        return NotImplemented
    return ((x.float().unsqueeze(2) * weight.float().unsqueeze(0)).sum(1) + bias.float()).to(x.dtype)


def cannot_generate(model: GPT) -> str | None:
    """Why not, in one line: the model's attention takes no `lengths`."""
    why = refusal(model.h[0].attn.attention, "lengths")
    return why and f"generation reads a cache, and {why}"


class Decoder:
    """Continues B sequences of one length, `capacity` tokens at most: prefill() once, then step() after step.

    Each gives the next tokens (B, 1) int64, in a tensor that the next call overwrites. `compiled` puts torch.compile
    around a step; warm_up() compiles, and on a GPU captures, the steps ahead. UserError: the model's attention has no
    `lengths`.
    """

    def __init__(self, model: GPT, batch: int, capacity: int, how: Sampling, seed: int = 0, compiled: bool = False):
        check(not (why := cannot_generate(model)), why)
        config, device = model.config, model.wte.weight.device
        self.model, self.how, self.seed, self.capacity = model, how, seed, capacity
        rows = -(-capacity // (BUCKET // 4)) * (BUCKET // 4)  # what is masked anyway may as well be aligned
        # Zeros, since what is masked must be finite. Tensors of their own, and not views of one: Inductor would copy
        # that one for each layer that writes to it
        size, kind = (batch, rows, config.kv_heads, config.head_dim), {"dtype": model.ln_f.dtype, "device": device}
        self.kv = [(torch.zeros(size, **kind), torch.zeros(size, **kind)) for _ in range(config.n_layer)]
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.noise = torch.ones(batch, how.candidates, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.length = 0  # tokens in the cache
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None  # cuBLAS keeps a workspace for each
        self.decode = torch.compile(decode, fullgraph=True, dynamic=False, backend=inductor) if compiled else decode

    @torch.no_grad()
    def prefill(self, idx: Tensor) -> Tensor:
        """idx (B, T) int64, from the first position on; the cache is as new."""
        self.length = idx.shape[1]
        positions = torch.arange(self.length, device=idx.device)
        logits = self.model.forward(idx, cache=Cache(self.kv, positions, self.length, None))
        self._make_noise()
        self.position.fill_(self.length)
        return self.token.copy_(draw(logits[:, -1], self.noise, self.how))

    @torch.no_grad()
    def step(self) -> Tensor:
        """Takes the tokens given last."""
        assert 0 < self.length < self.capacity
        self.length += 1
        keys = self.bucket(self.length)
        if keys in self.graphs:
            self.graphs[keys].replay()
        else:
            self._step(keys)
        return self.token

    def bucket(self, length: int) -> int:
        """How many keys a step reads that has `length` of them: all that there are, if they are few more."""
        keys, rows = BUCKET, self.kv[0][0].shape[1]
        while keys < length:
            keys *= 2
        return keys if 1.5 * keys <= rows else rows

    @torch.no_grad()
    def warm_up(self, first: int, last: int) -> list[int]:
        """Makes the steps of `first` to `last` keys ready; returns their buckets. The cache is lost."""
        buckets = sorted({self.bucket(length) for length in range(first, last + 1)})
        with torch._dynamo.config.patch(recompile_limit=max(8, len(buckets))):  # 8, its default, end at 32,768 keys
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
        self.token.copy_(self.decode(self.model, self.token, self.position, self.kv, keys, self.noise, self.how))
        self.position.add_(1)

    def _make_noise(self) -> None:  # outside of what is compiled: Dynamo knows no generators
        if self.how.temperature:
            self.noise.exponential_(generator=self.generator)

    def _capture(self, keys: int) -> torch.cuda.CUDAGraph:
        """A step as a CUDA graph: a replay advances the same tensors, and draws the generator's next numbers."""
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):  # compiles, tunes and allocates what must not happen in a capture
            for _ in range(2):
                self.position.zero_()
                self._step(keys)
        torch.cuda.current_stream().wait_stream(self.side)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        pool = next((other.pool() for other in self.graphs.values()), None)  # never replayed at once: memory is shared
        with torch.cuda.graph(graph, pool=pool, stream=self.side):
            self._step(keys)
        return graph


def stream(decoder: Decoder, idx: Tensor, max_new_tokens: int) -> Iterator[Tensor]:
    """The new tokens as they come, (B,) int64 on the host each; the same seed gives the same ones.

    On a GPU the host is up to LAG steps behind: who stops early has had that many computed in vain.
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
    """idx (B, T) int64 -> (B, T + max_new_tokens), as nanoGPT's; see Sampling.

    Each token sees the last block_size ones. Beyond them the window slides and every position changes, so that from
    there on each token takes a whole forward.
    """
    training = model.training
    model.eval()
    capacity = min(idx.shape[1] + max_new_tokens, model.config.block_size)
    decoder = Decoder(model, len(idx), capacity, Sampling(n_vocab, temperature, top_k, top_p), seed)
    for _ in range(max_new_tokens):
        kept = 0 < decoder.length < capacity
        idx = torch.cat((idx, decoder.step() if kept else decoder.prefill(idx[:, -capacity:])), dim=1)
    model.train(training)
    return idx
