"""Prefill and decode over a KV cache, with fixed shapes and addresses, so that a GPU replays them as CUDA graphs.

A decoding step reads all weights to make B tokens, and computes little. To read the 247 MB of 124M in bf16 takes 59 us
at a copy's 4.2 TB/s on an H200, but the host must launch about 250 kernels for a step. So a step is a function of
tensors whose shapes and addresses never change, and the GPU replays it from a CUDA graph (as gpt-fast does). The number
of keys is rounded up to a bucket, each bucket has its own graph, and attention's argument `lengths` masks the rest. A
short prefill is a graph too: its prompt is padded to a length that has a graph.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kernels import decode as contract
from kernels import fastest
from kernels.cache import Cache
from kernels.compat import allow_graphs
from kernels.registry import KernelError, Unavailable, backend, load, missing_argument, other_runtimes, reads_fp8
from kernels.sampling import Sampling, sample_tokens, seeds_of, shift_positions
from model.compat import inductor
from model.config import GPTConfig
from model.generate_config import DTYPES, GenerateConfig
from model.gpt import GPT
from model.speculation import count_accepted, model_draft, ngram_draft
from model.weights import weights_of
from runtime.config import check

BUCKET = 256  # keys of the smallest bucket; each next bucket has twice as many, so 32,768 keys need 8 graphs
# Tokens of a sequence in one forward of the prefill. More need more memory, and are not faster. With more than 4
# sequences, each has fewer, but at least SHORT_CHUNK
CHUNK, SHORT_CHUNK = 16384, 1024
LAUNCH_TOKENS = 32  # steps in one launch of generate_tokens(); their tokens reach the host together
# Steps in one CUDA graph, without a draft. With one, the host was the limit: launch, copy, wait, text. Then a step of
# 124M took 208 us, and 1,170 with 256 sequences; now 195 and 856 (decode=triton, H200)
GRAPH_TOKENS = 8
CAPTURED = 16384  # tokens in the longest captured prefill, all sequences together; a longer one hides its launches


def why_no_generation(model: GPT) -> str | None:
    """Return in one line why the model's own blocks cannot decode: attention takes no `lengths`. None if they can."""
    reason = missing_argument(model.h[0].attn.attention, "lengths")
    return f"generation reads a cache, and {reason}" if reason else None


def next_tokens(
    decode: Callable, packed, draw: Callable, tokens: Tensor, cache: Cache, seeds: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Run a decoding step. Return the token that it draws after each of tokens (B, T), (B, T) int64, and the logits."""
    B, T = tokens.shape
    logits = decode(packed, tokens, cache)
    draw_positions = (cache.token_positions(T) + 1).view(-1)
    seeds = seeds if T == 1 else seeds.repeat_interleave(T, output_size=B * T)
    return draw(logits.view(B * T, -1), seeds, draw_positions, sampling).view(B, T), logits


def make_decoder(model: GPT, batch: int, *arguments, decode: str = "blocks", **options) -> "Decoder":
    """Return a Decoder of these arguments. For decode=auto it is the fastest one here that accepts them; `name` has it.

    Raises Unavailable or UserError as Decoder does, and Unavailable if auto has no measurement.
    """

    def build(name: str) -> Decoder:
        return Decoder(model, batch, *arguments, decode=name, **options)

    if decode != "auto":
        return build(decode)
    names = fastest.rank_decoders(model.ln_f.dtype, model.config.n_embd, batch, model.wte.weight.device)
    return fastest.first_accepted(names, build)


class Decoder:
    """Continues B sequences, to at most `capacity` tokens each: prefill() once, then step() repeatedly.

    Both return `output` (B, 1 + the most new tokens) int64, which the next call overwrites: the number of new tokens of
    each sequence, then the tokens. step() makes 1 token, or up to 1 + draft_tokens, or up to LAUNCH_TOKENS if the
    backend has generate_tokens(). With a CUDA graph and no draft it makes GRAPH_TOKENS: the last ones may be beyond
    `capacity`, and have no meaning. warm_up() compiles the steps in advance, and on a GPU captures them as CUDA graphs;
    later prefills are captured, too. generate_tokens() ends early when all sequences have stopped at an id in `stops`;
    the caller must still cut the texts. A token is NO_TOKEN if its logits are not finite, and FAILED_LAUNCH if its
    launch failed; check_tokens() in generate.py raises an error for both. With `prefill_only`, step() is not called,
    and the model's attention need not take `lengths`. With generate.speculate=CHECKPOINT, `draft` is the model that
    drafts; the same backend computes it. Raises Unavailable or UserError if the model or the backend cannot decode with
    these arguments.
    """

    def __init__(
        self,
        model: GPT,
        batch: int,
        capacity: int,
        sampling: Sampling,
        seed: int = 0,
        *,
        decode: str = "blocks",
        compiled: bool = False,
        compile_mode: str = "default",
        options: GenerateConfig | None = None,
        stops: tuple[int, ...] = (),
        prefill_only: bool = False,
        draft: GPT | None = None,
    ):
        options = options or GenerateConfig()
        assert (draft is None) == (options.draft_checkpoint is None)
        config, device = model.config, model.wte.weight.device
        module = backend("decode", decode)
        if decode == "blocks" and not prefill_only and (reason := why_no_generation(model)):
            raise Unavailable(reason)
        if config.logit_softcap is not None and decode != "blocks":
            raise Unavailable(
                f"kernels.decode={decode} has no cap, and this model has model.logit_softcap={config.logit_softcap}: "
                "choose kernels.decode=blocks"
            )
        if compiled and not getattr(module, "COMPILES", False):
            raise Unavailable(
                f"kernels.compile=true compiles plain PyTorch, and kernels.decode={decode} has its own kernels: choose "
                "kernels.compile=false, or kernels.decode=blocks"
            )
        self.model, self.name, self.sampling, self.capacity, self.stops = model, decode, sampling, capacity, stops
        self.keeps_fp8 = reads_fp8(model.h[0].attn.attention)
        self.step_tokens = T = options.step_tokens
        self.generate_tokens = getattr(module, "generate_tokens", None)
        if self.generate_tokens and T > 1:
            raise Unavailable(f"kernels.decode={decode} verifies no draft: choose generate.speculate=null")
        # Tokens of a sequence in a CUDA graph: of several steps, or of one step that verifies a draft. T without graphs
        self.graph_tokens = GRAPH_TOKENS if device.type == "cuda" and T == 1 and not self.generate_tokens else T
        self.rows = self.allocated_rows(config.window)
        dtype = DTYPES[options.kv] or model.ln_f.dtype
        # Zeros, because masked values must be finite. Separate tensors, because Inductor would copy one common tensor
        # for each layer that writes to a view of it
        shape = batch, self.rows, config.kv_heads, config.head_size
        tensors = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * config.n_layer)]
        self.kv = list(zip(tensors[::2], tensors[1::2], strict=True))  # (keys, values) of each layer
        self.tokens = torch.zeros(batch, T, dtype=torch.int64, device=device)  # the last token, and the draft
        self.positions = torch.zeros(batch, dtype=torch.int64, device=device)  # of the last token
        self.first_seeds = seeds_of(seed, batch, device)
        self.seeds = self.first_seeds.clone()
        # All tokens, for the draft. A step may write T - 1 tokens beyond the last one
        self.history = None
        if T > 1:  # a captured prefill writes up to `rows` tokens
            width = max(capacity + T, self.rows)
            self.history = torch.zeros(batch, width, dtype=torch.int64, device=device)
        self.captures = False  # whether prefills are captured: after warm_up()
        self.length = 0  # tokens of the longest sequence in the cache; with a draft, an upper bound
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # keys -> graph of one or more steps
        # length -> graph, its ids and lengths
        self.prefills: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        # One stream for all captures, because cuBLAS allocates a workspace for each stream
        self.capture_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        own = contract.Model(self._forward, partial(weights_of, model))
        pack = getattr(module, "pack", None)
        self.decode = load("decode", decode, device)
        self.packed = pack(own, Cache(self.kv, self.rows, self.positions)) if pack else own.weights()
        self.drafter: Decoder | None = None
        if draft is not None:
            self.check_draft(draft.config, options.speculate)
            choices = {"decode": decode, "compiled": compiled, "compile_mode": compile_mode}
            choices |= {"options": replace(options, speculate=None), "prefill_only": prefill_only}
            self.drafter = Decoder(draft, batch, capacity + T - 1, sampling, **choices)
        # Bytes of weights that a step reads, if pack() changed them; otherwise None
        self.weight_bytes = module.weight_bytes(self.packed) if hasattr(module, "weight_bytes") else None
        self.draw = getattr(module, "sample_tokens", sample_tokens)
        self.next_tokens = partial(next_tokens, self.decode, self.packed, self.draw)
        self.decode_token = getattr(module, "decode_token", None) if T == 1 else None
        width = LAUNCH_TOKENS if self.generate_tokens else self.graph_tokens
        self.output = torch.ones(batch, 1 + width, dtype=torch.int64, device=device)
        if compiled:
            backend_of_step = inductor(compile_mode)
            compiled_step = torch.compile(self.next_tokens, fullgraph=True, dynamic=False, backend=backend_of_step)
            # Dynamo counts the graphs of all decoders together: one for each bucket and number of tokens
            self.next_tokens = allow_graphs(512)(compiled_step)

    def _forward(self, tokens: Tensor, cache: Cache) -> Tensor:
        return self.model.forward(tokens, cache=cache._replace(keeps_fp8=self.keeps_fp8))

    def allocated_rows(self, window: int | None) -> int:
        """Return the rows of the cache: one for each position and for a draft after the last one, or `window` rows.

        A step beyond `capacity` needs no row: position p has row p % rows, and only such steps read what it overwrites.
        """
        most = self.capacity + self.step_tokens - 1
        if window is not None and window < most:
            reason = f"generate.speculate needs a cache of all tokens, not of a window of {window}"
            check(self.step_tokens == 1, f"{reason}: remove generate.speculate")
            return window
        return -(-most // (BUCKET // 4)) * (BUCKET // 4)  # a multiple of 64; the rest is masked

    @property
    def decoders(self) -> "list[Decoder]":
        """This decoder, and that of the draft model if there is one."""
        return [self, self.drafter] if self.drafter else [self]

    def memory(self) -> dict[str, list[Tensor]]:
        """Return the tensors of `weights` and of `kv_cache`, also those of a draft model."""
        return {
            "weights": [weight for each in self.decoders for weight in each.model.parameters()],
            "kv_cache": [tensor for each in self.decoders for pair in each.kv for tensor in pair],
        }

    def check_draft(self, config: GPTConfig, name: str) -> None:
        """Raise UserError if a model with this config cannot draft for this one."""
        ids, most = self.sampling.n_vocab, self.capacity + self.step_tokens - 1
        check(
            config.vocab_size >= ids,
            f"generate.speculate={name} has {config.vocab_size} ids, and the tokenizer {ids}: choose a model with the "
            "same tokenizer",
        )
        check(
            config.pos != "learned" or config.block_size >= self.capacity,
            f"generate.speculate={name} has {config.block_size} positions, and prompt and answer may need "
            f"{self.capacity}: choose a model with more, or fewer new tokens",
        )
        check(
            config.window is None or config.window >= most,
            f"generate.speculate={name} has a window of {config.window} tokens, and a draft needs a cache of all "
            f"{most}: choose a model without window",
        )

    @torch.no_grad()
    def prefill(self, idx: Tensor, lengths: Tensor | None = None, dropped: int = 0, kept: int = 0) -> Tensor:
        """Fill the cache with idx (B, T) int64, from position 0 on, and draw the next tokens.

        Sequence b has only the first lengths[b] tokens of idx, (B,) int64 on the device; None: all. The other tokens of
        idx have no effect. `dropped` tokens of the text come before idx. They only shift the positions of the draws.
        The first `kept` tokens, fewer than each length, are in the cache already.
        """
        (B, self.length), device = idx.shape, idx.device
        self.seeds.copy_(shift_positions(self.first_seeds, dropped))
        if lengths is None:
            lengths = torch.full((B,), self.length, device=device)
        padded = None if kept else self.padded(B, self.length)
        if padded is None:
            self._prefill(idx, lengths, kept)
            return self.output
        if padded not in self.prefills:
            inputs = torch.zeros(B, padded, dtype=torch.int64, device=device), torch.full_like(lengths, padded)
            self.prefills[padded] = self._capture(lambda: self._prefill(*inputs)), *inputs
        graph, ids, ends = self.prefills[padded]
        ids[:, : self.length] = idx
        ends.copy_(lengths)
        graph.replay()
        return self.output

    @torch.no_grad()
    def step(self) -> Tensor:
        """Put the last tokens into the cache, and draw the next ones."""
        # With a draft, length is an upper bound, which steps that the host has not read yet may exceed. The last steps
        # of a graph may exceed the capacity
        if self.step_tokens > 1 or self.graphs:
            self.length = min(self.length, self.capacity - 1)
        assert 0 < self.length < self.capacity
        if self.generate_tokens:
            self._launch(min(LAUNCH_TOKENS, max(1, self.capacity - 1 - self.length)))
            return self.output
        new, keys = self.graph_tokens, self.bucket(self.length + self.graph_tokens)
        if keys in self.graphs:
            self.graphs[keys].replay()
        else:
            new = self.step_tokens
            self._steps(self.bucket(self.length + new), 1)
        self.length += new
        return self.output

    def check_launch(self, tokens: list[list[int]]) -> None:
        """Raise KernelError if the launch that made these tokens of each sequence failed."""
        if any(contract.FAILED_LAUNCH in sequence for sequence in tokens):
            raise KernelError(
                f"kernels.decode={self.name}: a launch failed, because a part of it waited too long: try again, or "
                "choose kernels.decode=blocks"
            )

    def _launch(self, steps: int) -> None:
        cache = Cache(self.kv, self.rows, self.positions)
        drawn = self.generate_tokens(self.packed, self.tokens, cache, self.seeds, self.sampling, steps, self.stops)
        self.output[:, 0] = steps
        self.output[:, 1 : 1 + steps] = drawn
        self.tokens.copy_(drawn[:, -1:].clamp(min=0))
        self.positions.add_(steps)
        self.length += steps

    def bucket(self, length: int) -> int:
        """Return how many keys a step reads if the cache holds `length`: a bucket, or all rows below 1.5 buckets."""
        keys = BUCKET
        while keys < length:
            keys *= 2
        return keys if 1.5 * keys <= self.rows else self.rows

    def padded(self, batch: int, length: int) -> int | None:
        """Return the length to which a prefill is padded, so that it has a graph; None if it is not captured.

        The lengths are the powers of two from 16 on, and 1.5 times each of them: 16, 24, 32, 48, 64, ...
        """
        configs = [each.model.config for each in self.decoders]
        most = min([self.rows, CHUNK, *(config.block_size for config in configs if config.pos == "learned")])
        if not self.captures or length > most or batch * length > CAPTURED:
            return None
        padded = 16
        while padded < length:
            padded += padded // 2 if padded & (padded - 1) == 0 else padded // 3
        return min(padded, most)

    @torch.no_grad()
    def warm_up(self, prompt: int, new_tokens: int) -> list[int]:
        """Compile and capture the steps after a prompt of this length. Return the buckets. It overwrites the cache.

        Raises Unavailable if a GPU cannot capture an op.
        """
        if self.tokens.is_cuda and (others := other_runtimes(self.model.ops._asdict())):
            reason = f"a GPU decodes in CUDA graphs, and {', '.join(others.values())}"
            raise Unavailable(f"generation cannot run here: {reason}: choose kernels=eager attn=sdpa")
        self.captures = self.tokens.is_cuda
        if self.generate_tokens:  # compiles its kernel
            self.positions.zero_()
            self._launch(1)
            self.check_launch(self.output[:, 1:2].tolist())
            self.length = 0
            return [self.rows]
        lengths = range(prompt, min(prompt + new_tokens - 1, self.capacity))  # before a step
        buckets = sorted({self.bucket(length + self.graph_tokens) for length in lengths})
        for keys in buckets:
            steps = partial(self._steps, keys, self.graph_tokens // self.step_tokens)
            if self.tokens.is_cuda:
                self.graphs[keys] = self._capture(steps)
            else:
                self.positions.zero_()
                steps()
        self.length = 0
        return buckets

    def _prefill(self, idx: Tensor, lengths: Tensor, kept: int = 0) -> None:
        logits = self._fill(idx, lengths, kept)
        if self.drafter:
            self.drafter._fill(idx, lengths, kept)
        drawn = self.draw(logits, self.seeds, lengths, self.sampling)[:, None]
        if self.history is not None:
            self.history[:, : idx.shape[1]] = idx
        self.positions.copy_(lengths)
        self.output[:, 0] = 1
        self._take(drawn)

    def _fill(self, idx: Tensor, lengths: Tensor, kept: int) -> Tensor:
        """Fill the cache as prefill() does. Return the logits after the last token of each sequence, (B, V)."""
        B, T = idx.shape
        self.model.config.check_length(T)
        chunk = min(CHUNK, max(SHORT_CHUNK, 4 * CHUNK // B))
        logits = None
        for start in range(kept, T, chunk):
            ids = idx[:, start : start + chunk]
            last = lengths - 1 - start
            cache = Cache(self.kv, start + ids.shape[1], last=last)
            new = self._forward(ids, cache)[:, 0]
            logits = new if logits is None else torch.where((last >= 0)[:, None], new, logits)
        return logits

    def _steps(self, keys: int, count: int) -> None:
        """Run `count` steps, one after the other. Each reads `keys` keys."""
        if self.step_tokens == 1:
            self.output[:, 0] = count
        for column in range(1, 1 + count):
            self._step(keys, column)

    def _step(self, keys: int, column: int) -> None:
        """Run a step. Its tokens go into the output from `column` on."""
        if self.decode_token:
            logits = self.decode(self.packed, self.tokens, Cache(self.kv, keys, self.positions)).flatten(0, 1)
            output = self.output[:, column]
            self.decode_token(logits, self.seeds, self.positions, self.sampling, self.tokens, output)
            return
        if self.step_tokens > 1:
            self.tokens[:, 1:] = self._draft(keys)
        drawn, _ = self.next_tokens(self.tokens, Cache(self.kv, keys, self.positions), self.seeds, self.sampling)
        new = None
        if self.step_tokens > 1:  # one sequence may be complete some steps before another
            new = 1 + count_accepted(self.tokens[:, 1:], drawn[:, :-1])
            new = new.minimum(self.capacity - 1 - self.positions)
        self.positions.add_(1)
        self._take(drawn, new, column)

    def _take(self, drawn: Tensor, new: Tensor | None = None, column: int = 1) -> None:
        """Store `drawn` (B, n) from self.positions on, and in the output from `column` on.

        Sequence b has new[b] of these tokens; None: one token.
        """
        self.output[:, column : column + drawn.shape[1]] = drawn
        # The next step reads embeddings, and NO_TOKEN has none
        if self.history is None:
            torch.clamp(drawn, min=0, out=self.tokens)
            return
        drawn = drawn.clamp(min=0)
        self.history.scatter_(1, self.positions[:, None] + torch.arange(drawn.shape[1], device=drawn.device), drawn)
        if new is not None:
            self.output[:, 0] = new
            self.positions.add_(new - 1)
        self.tokens[:, :1] = self.history.gather(1, self.positions[:, None])

    def _draft(self, keys: int) -> Tensor:
        """Return likely next tokens of each sequence, (B, step_tokens - 1) int64. A draft model reads `keys` keys."""
        count = self.step_tokens - 1
        if self.drafter is None:
            return ngram_draft(self.history, self.positions, count)
        next_tokens = partial(self.drafter.next_tokens, seeds=self.seeds, sampling=self.sampling)
        return model_draft(next_tokens, Cache(self.drafter.kv, keys), self.history, self.positions, count)

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture `work` as a CUDA graph. Each replay updates the same tensors. The capture overwrites the cache."""
        self.capture_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.capture_stream):  # compilation, tuning and first allocations cannot be captured
            for _ in range(2):
                self.positions.zero_()
                work()
        torch.cuda.current_stream().wait_stream(self.capture_stream)
        graph = torch.cuda.CUDAGraph()
        # The graphs share one memory pool, because only one of them runs at a time
        others = [*self.graphs.values(), *(graph for graph, *_ in self.prefills.values())]
        pool = others[0].pool() if others else None
        with torch.cuda.graph(graph, pool=pool, stream=self.capture_stream):
            work()
        return graph
