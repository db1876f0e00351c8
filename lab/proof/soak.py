"""Repeat one training step, and compare its bits with the first time: does this device compute correctly?

Weights, moments and batch are the same in each repetition, and eager kernels are deterministic. So if a bit of the
loss, the gradient norm, the new weights or the new moments differs, the device or its memory is faulty.
"""

import platform
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from kernels.registry import AttnConfig, KernelsConfig
from model.config import GPTConfig
from model.optim import OptimConfig
from model.optimizers import make_optimizer
from model.step import build, train_step
from runtime.config import UserError
from runtime.device import device_name, explain_out_of_memory
from runtime.power import PowerMeter
from runtime.ranks import Ranks
from runtime.torch_compat import copy_tensors

# GPT-2 124M with a batch of 4 fits a GPU of 16 GiB
SIZES = {"cuda": (GPTConfig(12, 12, 768, 1024, 50304, "learned", True, 0.0), 4)}
SIZES["cpu"] = GPTConfig(2, 4, 64, 64, 256, "learned", True, 0.0), 2
LR = 1e-3
OPTIM = OptimConfig(LR, LR, warmup_steps=0, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0)
PRECISIONS = "fp32", "bf16"  # on a GPU they use different units, so their steps take turns
PARTS = "loss", "gradient norm", "weights or moments"
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of the tensors' bits as integers, on the device. Every flip of a single bit changes it."""
    integers = [tensor.detach().contiguous().view(INTEGERS[tensor.element_size()]) for tensor in tensors]
    return torch.stack([each.sum(dtype=torch.int64) for each in integers]).sum()


class FixedStep:
    """A training step that can be repeated from the same weights, moments and batch."""

    def __init__(self, precision: str, device: torch.device):
        config, batch_size = SIZES[device.type]
        self.model = build(config, KernelsConfig(), AttnConfig("eager"), precision, device, seed=0)
        self.optimizer = make_optimizer(self.model, OPTIM, impl="eager", stop=False)
        self.state = [tensor for group in self.optimizer.state().values() for tensor in group.values()]
        self.start = [tensor.clone() for tensor in self.state]
        shape, generator = (batch_size, config.block_size + 1), torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, shape, generator=generator).to(device)
        self.batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def run(self) -> Tensor:
        """Return the checksum of each of PARTS, on the device."""
        copy_tensors(self.state, self.start)
        self.optimizer.load(0, 0)
        loss, norm = train_step(self.model, self.optimizer, [self.batch], LR)
        return torch.stack([checksum([loss]), checksum([norm]), checksum(self.state)])


def soak(minutes: float, device: torch.device) -> Iterator[str]:
    """Repeat the steps for so many minutes. Yield a line each minute, and one at the end.

    Raises UserError with the name of the device if a repetition differs from the first.
    """
    repetitions, wrong = 0, defaultdict(list)  # wrong: (precision, part) -> the repetitions that differ in it
    with explain_out_of_memory("the steps of the soak", "the use of this device by other programs"):
        steps = {precision: FixedStep(precision, device) for precision in PRECISIONS}
        expected = [step.run() for step in steps.values()]
        start = time.monotonic()
        while (elapsed := time.monotonic() - start) < 60 * minutes:
            end, differences = start + min(elapsed + 60, 60 * minutes), []
            with PowerMeter(device) as power:
                power.start()
                while not differences or time.monotonic() < end:
                    sums = [step.run() for step in steps.values()]
                    differences.append(torch.stack([a != b for a, b in zip(sums, expected, strict=True)]))
                found = torch.stack(differences).nonzero().tolist()  # waits for the device
                power.stop()
            for row, step, part in found:
                wrong[PRECISIONS[step], PARTS[part]].append(repetitions + row + 1)
            repetitions += len(differences)
            yield minute_line(time.monotonic() - start, repetitions, wrong, power)
    if wrong:
        (precision, part), numbers = min(wrong.items(), key=lambda item: item[1])
        gpu = f", {torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""
        raise UserError(
            f"{device_name(device)} ({device} of {platform.node()}{gpu}) miscomputes: {count_different(wrong)} of "
            f"{repetitions} repetitions differ from the first. Repetition {numbers[0]} differs in the {part} of the "
            f"{precision} step. Take the device out of use, and check its memory, power and cooling"
        )
    yield f"soaked   {device_name(device)}: the bits of all {repetitions:,} repetitions are equal"


def count_different(wrong: dict[tuple[str, str], list[int]]) -> int:
    """Return how many repetitions differ from the first."""
    return len({number for numbers in wrong.values() for number in numbers})


def minute_line(seconds: float, repetitions: int, wrong: dict[tuple[str, str], list[int]], power: PowerMeter) -> str:
    cells = [f"soak     {seconds / 60:.1f} min", f"{repetitions:,} repetitions", f"{count_different(wrong)} differ"]
    if figures := power.figures(1, Ranks()):
        cells.append(f"{figures['power/watts']:.0f} of {figures['power/limit_watts']:.0f} W")
        cells.append(f"{figures['power/sm_mhz']:,.0f} of {figures['power/max_sm_mhz']:,} MHz")
        cells.append(f"{figures['power/celsius']} C")
        cells += [f"slowed by {name} {share:.0%}" for name, share in figures["power/slowed_by"].items()]
    return " | ".join(cells)
