"""The config group `generate` of scripts.generate and scripts.max_context."""

from dataclasses import dataclass

from kernels.cache import FP8
from runtime.config import check

DTYPES = {"auto": None, "fp8": FP8}  # generate.kv -> dtype of the cache; None: the compute dtype


@dataclass
class GenerateConfig:
    kv: str = "auto"  # dtype of the KV cache: auto (the compute dtype) | fp8 (half of bf16's bytes)
    speculate: str | None = None  # who drafts the next tokens, which each step verifies: ngram | a checkpoint
    draft_tokens: int = 4  # tokens of a draft, 1 to 7

    def __post_init__(self):
        check(self.kv in DTYPES, f"generate.kv={self.kv}: choose {', '.join(DTYPES)}")
        advice = "choose ngram, the checkpoint of a smaller model, or null"
        check(self.speculate not in ("", "random"), f"generate.speculate={self.speculate}: {advice}")
        check(1 <= self.draft_tokens <= 7, f"generate.draft_tokens={self.draft_tokens}: it must be in [1, 7]")

    @property
    def draft_checkpoint(self) -> str | None:
        """The checkpoint of the model that drafts; None if no model does."""
        return None if self.speculate == "ngram" else self.speculate

    @property
    def step_tokens(self) -> int:
        """The number of tokens of each sequence in a decoding step."""
        return 1 + self.draft_tokens if self.speculate else 1
