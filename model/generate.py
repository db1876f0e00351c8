"""Text from a model: sampling one token after the other."""

import torch
from torch import Tensor

from model.gpt import GPT


@torch.no_grad()
def generate(model: GPT, idx: Tensor, max_new_tokens: int, *, n_vocab: int, temperature=1.0, top_k=0, seed=0) -> Tensor:
    """idx (B, T) int64 -> (B, T + max_new_tokens), as nanoGPT's.

    Temperature 0 is greedy, top_k 0 is no limit; ids from n_vocab up (the padding of the vocabulary) are never drawn.
    Each token sees the last block_size ones.
    """
    generator = torch.Generator(idx.device).manual_seed(seed)
    training = model.training
    model.eval()
    for _ in range(max_new_tokens):
        # forward and not call: the length grows, and a compiled model would be compiled for each
        logits = model.forward(idx[:, -model.config.block_size :])[:, -1, :n_vocab].float()
        if temperature == 0:
            token = logits.argmax(-1, keepdim=True)
        else:
            if top_k:
                least = logits.topk(min(top_k, n_vocab)).values[:, -1:]
                logits = logits.masked_fill(logits < least, -torch.inf)
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        idx = torch.cat((idx, token), dim=1)
    model.train(training)
    return idx
