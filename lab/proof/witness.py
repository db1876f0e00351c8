"""Send the losses, states and logits of a run in a worker to the judge. lab/judge/arm.py asks for them.

After each window of steps the run waits for the judge. The judge measures the window by its own clock, may ask for the
weights and moments, and then sends the number of steps of the next window and a shift of its batches. The answer to a
window has a checksum of the weights, which shows work that waited until the judge asked for them.
"""

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from data.loader import Loader
from kernels.registry import Unavailable
from kernels.sampling import Sampling
from lab.channel import Channel
from lab.proof.generation import step_logits
from lab.tampering import changed_settings, replaced_functions
from model.decoder import Decoder, why_no_generation
from model.gpt import GPT
from model.modes import in_eval_mode
from model.optim import Optimizer
from runtime.timing import synchronize

FIGURES = "mem/peak_allocated_gib", "mem/peak_reserved_gib", "mem/peak_rss_gib", "perf/first_step_s", "kernels"


class Witness:
    """Replaces the Recorder of lab/proof/parity.py in a run that a judge started."""

    functions: ClassVar[dict[str, object]] = {}  # find_functions() before the kernels are imported
    settings: ClassVar[dict[str, object]] = {}  # process_settings() before the kernels are imported

    def __init__(self, optimizer: Optimizer, batches: Loader):
        self.channel, self.optimizer, self.batches = Channel(), optimizer, batches
        self.losses: list[Tensor] = []
        self.steps = 0
        self.answer_requests(ready=True)

    def add_loss(self, loss: Tensor) -> None:
        """Record the loss of a step, a scalar. After the last step of a window, send the window's losses."""
        self.steps += 1
        self.losses.append(loss.clone())  # a step from a CUDA graph overwrites the loss before it
        if len(self.losses) == self.window:
            device = self.optimizer.lr.device
            weights = sum_of_bits(self.optimizer.state()["model"].values())  # launched while the GPU still works
            synchronize(device)
            losses = torch.stack(self.losses).double().tolist()
            self.losses = []
            allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
            refused = int(self.optimizer.refused)
            self.answer_requests(losses=losses, weights=str(int(weights)), allocated=allocated, refused=refused)

    def answer_requests(self, **facts: object) -> None:
        """Send the facts, then answer requests until the judge sends the next window."""
        self.channel.answer(**facts)
        while (request := self.channel.receive())[0] == "state":
            self.channel.write(request[1], flat_state(self.optimizer))
            self.channel.answer(written=True)
        _, self.window, *shift = request  # the steps of the next window; None after the last step, without a shift
        for samples in shift:
            self.batches.shift(self.steps + 1, samples)

    def testify(self, model: GPT, row: dict) -> None:
        """Send the figures of the finished run. Then, if the judge asks for them, send the logits of a generation."""
        self.channel.answer(
            replaced=replaced_functions(self.functions)[:10],
            changed=changed_settings(self.settings),
            val_loss=row.get("val/loss"),
            figures={key: row[key] for key in FIGURES if key in row},
        )
        while (request := self.channel.receive())[0] == "logits":
            try:
                logits = generation_logits(model, *request[2:])
            except Unavailable as reason:
                self.channel.answer(unavailable=str(reason))
            else:
                self.channel.write(request[1], {"logits": logits})
                self.channel.answer(written=True)


def sum_of_bits(weights: Iterable[Tensor]) -> Tensor:
    """Return the sum of all elements of fp32 weights, each read as an int32: a scalar, int64. The sum is exact."""
    return torch.stack([weight.detach().view(torch.int32).sum() for weight in weights]).sum()


def flat_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state() in one dict, with keys such as "exp_avg/h.0.ln_1.weight"."""
    return {f"{group}/{name}": t for group, tensors in optimizer.state().items() for name, t in tensors.items()}


@torch.no_grad()
@in_eval_mode
def generation_logits(model: GPT, idx: Tensor, lengths: Tensor, new: Tensor) -> Tensor:
    """Return the logits (rows, n - 1, V), float64, of the steps that read `new` (B, n) after prompts (B, T).

    `lengths` (B,) are the lengths of the prompts. All three tensors are int64. step_logits() of lab/proof/generation.py
    chooses the rows. Raises Unavailable if the model's backends cannot generate.
    """
    if reason := why_no_generation(model):
        raise Unavailable(reason)
    device, n_vocab = model.wte.weight.device, model.config.vocab_size
    idx, lengths, new = (tensor.to(device) for tensor in (idx, lengths, new))
    decoder = Decoder(model, len(idx), idx.shape[1] + new.shape[1], Sampling(n_vocab, temperature=0))
    return step_logits(decoder, idx, lengths, new)
