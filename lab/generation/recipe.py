"""The keys of scripts.generate, and the model, the decoder and the texts that these keys choose."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from omegaconf import DictConfig

from data.tokenizer import Tokenizer
from kernels import registry
from kernels.lookup import short_name
from kernels.names import GENERATION_OPS
from kernels.registry import AttnConfig, KernelsConfig, impl_by_op
from kernels.sampling import Sampling
from model import cost, pretrained
from model.config import PRECISIONS, GPTConfig
from model.decoder import Decoder, make_decoder
from model.executed import called_ops, executed_kernels, kernels_label, slower_kernels
from model.generate import check_sampling
from model.generate_config import GenerateConfig
from model.gpt import GPT
from model.sources import Pretrained, random_source
from model.step import build
from model.text import Text, stop_ids
from model.vocabulary import guess_tokenizer, take_vocabulary
from runtime.config import UserError, check, command_line_values


@dataclass(frozen=True)
class GenerationRecipe:
    """Everything besides the prompt that decides the generated tokens and how they are computed."""

    source: Pretrained
    draft: Pretrained | None  # the model of generate.speculate=CHECKPOINT
    tokenizer: Tokenizer
    kernels: KernelsConfig
    attn: AttnConfig
    precision: str
    generate: GenerateConfig
    sampling: Sampling
    seed: int
    stops: list[int | str] | None

    @property
    def name(self) -> str:
        """For example 124M-eager-sdpa-blocks-bf16."""
        size = cost.parameters(self.source.config) / 1e6
        choice = kernels_label(self.source.config, self.kernels, self.attn)
        return f"{size:.0f}M-{choice}-{short_name(self.kernels.decode)}-{self.precision}"

    @property
    def model_text(self) -> str:
        """The model in a few words, for the terminal."""
        drafted = f", drafts by {describe(self.draft)}" if self.draft else ""
        return f"{describe(self.source)}, tokenizer {self.tokenizer.name}{drafted}"

    @property
    def groups(self) -> tuple[GPTConfig, KernelsConfig, AttnConfig, str]:
        return self.source.config, self.kernels, self.attn, self.precision

    @property
    def shortest(self) -> Pretrained:
        """The model, or the draft model, whose table of positions is the shortest: a text must fit into both."""
        learned = [source for source in (self.source, self.draft) if source and source.model["pos"] == "learned"]
        return min(learned, key=lambda source: source.model["block_size"], default=self.source)

    @property
    def chosen_kernels(self) -> dict[str, str | bool]:
        """op -> the backend that the config chooses, for the ops of a generation with this model."""
        chosen = impl_by_op(self.kernels, self.attn, called_ops(self.source.config, GENERATION_OPS))
        return chosen | {"compile": self.kernels.compile}

    @property
    def decoder_options(self) -> dict:
        return self.kernels.decoder_options | {"options": self.generate}

    def build_decoder(self, batch: int, capacity: int, device: torch.device) -> Decoder:
        """Build the model, and its decoder of `batch` sequences. Raises Unavailable or UserError as make_decoder()."""
        needs = ["lengths"] if self.kernels.decode == "blocks" else []  # its steps read a cache with attention

        def build_model(source: Pretrained) -> GPT:
            weights = source if source.weights else None
            groups = source.config, *self.groups[1:]
            return build(*groups, device, seed=self.seed, weights=weights, needs=needs).eval()

        draft = build_model(self.draft) if self.draft else None
        check(  # such a draft guesses nothing: the text is right, but slow
            draft is None or all(weight.isfinite().all() for weight in draft.parameters()),
            f"generate.speculate={self.generate.speculate} has a NaN or inf in a weight: choose another draft",
        )
        options = self.decoder_options | {"stops": stop_ids(self.tokenizer, self.stops), "draft": draft}
        return make_decoder(build_model(self.source), batch, capacity, self.sampling, self.seed, **options)

    def naming(self, decoder: Decoder) -> "GenerationRecipe":
        """Return the recipe with this decoder's own name, in the place of kernels.decode=auto."""
        return replace(self, kernels=replace(self.kernels, decode=decoder.name))

    def kernel_facts(self, decoder: Decoder, shape: tuple[int, int], device: torch.device) -> dict[str, dict]:
        """Return the keys of the row about the kernels: what executed_kernels() returns, and what is slower than eager.

        They are for the first decoding step after a prompt of `shape`, (B, T). If the decoder is not blocks, the times
        are of the prefill.
        """
        groups = self.naming(decoder).groups
        arguments = *groups, shape, device, decoder.bucket(shape[1] + decoder.graph_tokens)
        kernels = executed_kernels(*arguments)
        kernels["decode"] = registry.describe("decode", self.kernels.decode, chosen=decoder.name)
        return {"kernels": kernels, "slower": slower_kernels(*arguments)}

    def make_texts(self, count: int) -> list[Text]:
        return [Text(self.tokenizer, self.stops) for _ in range(count)]


def describe(source: Pretrained) -> str:
    """Return the name of a model, and its size."""
    return f"{source.name}: {cost.parameters(source.config) / 1e6:.1f}M"


@dataclass
class GenerationKeys:
    """The keys of scripts.generate that choose the text and the kernels. A wrong value raises UserError."""

    checkpoint: str | None
    prompt: str | None
    prompts: str | None
    prompt_tokens: int | None
    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: Any
    tokenizer: str | None
    device: str
    precision: str | None
    generate: GenerateConfig
    kernels: KernelsConfig
    attn: AttnConfig
    model: GPTConfig | None  # the shape of checkpoint=random; otherwise None

    def __post_init__(self):
        check(
            bool(self.checkpoint),
            "checkpoint is missing: pass a run (out/RUN), a checkpoint, gpt2, a folder, or random",
        )
        given = [key for key in ("prompt", "prompts", "prompt_tokens") if getattr(self, key) is not None]
        check(len(given) < 2, f"{' and '.join(given)} are given: choose one of them")
        for key in ("prompt_tokens", "max_new_tokens"):
            value = getattr(self, key)
            check(value is None or 1 <= value < 2**31, f"{key}={value}: it must be in [1, 2^31)")
        check_sampling(self.temperature, self.top_k, self.top_p, self.seed)
        check(self.precision != "fp8", "precision=fp8 cannot generate: choose precision=bf16")
        precisions = [name for name in PRECISIONS if name != "fp8"]
        choices = f"choose {', '.join(precisions)}, or null: the run's own"
        check(self.precision in (None, *precisions), f"precision={self.precision}: {choices}")
        check(self.kernels.fp8 is None, "kernels.fp8 is for training: remove it")
        if self.stop is None:
            self.stop = []
        stops = self.stop if isinstance(self.stop, list) else [self.stop]
        self.stop = [stop.replace("\\n", "\n") if isinstance(stop, str) else stop for stop in stops]
        check(
            all(type(stop) in (int, str) and stop != "" for stop in self.stop),
            f"stop={self.stop}: it must be a list of texts and token ids",
        )

    def open_recipe(self) -> GenerationRecipe:
        """Read the model, and return the recipe. Raises UserError or DataError if model or tokenizer cannot be read.

        Without a precision, the model generates in the precision of its run, or in bf16. Random weights may draw the
        end of text at any step. It does not end their texts, unless the user names stops.
        """
        source = random_source(asdict(self.model)) if self.model else pretrained.read_pretrained(self.checkpoint)
        if self.precision is None:
            own = source.run_config.get("precision")
            self.precision = "bf16" if own in (None, "fp8") else own  # fp8 cannot generate, and its weights are in bf16
        tokenizer = pretrained.tokenizer_of(source, self.tokenizer)
        # the speed of a shape includes a draw from all its ids, also if no tokenizer of ours has them
        fits = source.weights or guess_tokenizer(source.config.vocab_size)
        n_vocab = tokenizer.n_vocab if fits else source.config.vocab_size
        sampling = Sampling(n_vocab, self.temperature, self.top_k, self.top_p)
        stops = self.stop if source.weights or self.stop else None
        groups = self.kernels, self.attn, self.precision, self.generate
        return GenerationRecipe(source, self.open_draft(tokenizer), tokenizer, *groups, sampling, self.seed, stops)

    def open_draft(self, tokenizer: Tokenizer) -> Pretrained | None:
        """Read the model of generate.speculate=CHECKPOINT. Raises UserError if it has another tokenizer.

        The key `tokenizer` is for a draft model that names none.
        """
        name = self.generate.draft_checkpoint
        if name is None:
            return None
        try:
            draft = pretrained.read_pretrained(name)
            other = pretrained.tokenizer_of(draft, None if draft.tokenizer else self.tokenizer).name
        except UserError as error:
            choices = "choose ngram, the checkpoint of a smaller model, or null"
            raise UserError(f"generate.speculate={name}: {choices}: {error}") from error
        check(
            other == tokenizer.name,
            f"generate.speculate={name} has the tokenizer {other}, and the model {tokenizer.name}: choose a model with "
            "the same tokenizer",
        )
        return draft


def take_random_model(cfg: DictConfig) -> None:
    """Remove the group `model` unless checkpoint=random. Raises UserError if the command line then sets it.

    With checkpoint=random, model.vocab_size=null is the size for the tokenizer.
    """
    if cfg.checkpoint == "random":
        take_vocabulary(cfg, "tokenizer")
        return
    asked = command_line_values(cfg, "model")
    check(not asked, f"model.{next(iter(asked), '')} is for checkpoint=random; this model's shape is its checkpoint's")
    cfg.model = None
