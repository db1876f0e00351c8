"""The text that a training run generates at its end."""

from data.tokenizer import Tokenizer
from kernels.registry import Unavailable
from model.generate import sample_text
from model.gpt import GPT
from runtime.console import sample_line
from runtime.run import Run


def write_sample(run: Run, model: GPT, tokenizer: Tokenizer, max_new_tokens: int, seed: int) -> None:
    """Generate a document, print it, and keep it as sample.txt. Prints the reason if the model cannot generate."""
    try:
        text = sample_text(model, tokenizer, max_new_tokens, seed)
    except Unavailable as reason:
        print(sample_line(f"none: {reason}"))
        return
    run.write_sample(text)
    print(sample_line(repr(text)))
