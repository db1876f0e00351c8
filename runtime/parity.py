"""Does a run compute what eager PyTorch in fp32 does? Its first losses and its first gradient say.

Precision alone moves both, so the measure is taken, not chosen: eager PyTorch runs the same steps in the row's
precision too, and how far that lies from fp32 is what rounding does. A kernel may lie LOSSES or GRADIENT times as far.
Gradients are compared as sketches (Charikar, Chen and Farach-Colton 2002): signs drawn at random, sums in BUCKETS
buckets, whose squared length is on average that of the gradient itself. Of 124M parameters 0.6 MB stay.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

STEPS = 20
LOSSES = 3.0  # of two sets of STEPS errors alike in size: Fisher's F exceeds 9 once in 100,000
GRADIENT = 2.0  # a sum over millions of errors, which hardly varies
PARAMETER = 4.0  # of one alone: 1.2 at most of honest runs (tiny model, bf16, 6 seeds), 9 to 12 without dq and dk
ROUNDING = 2.0**-14  # of fp32 alone: its unit 2^-24, and chains of some 2^10 sums in an order of their own
BUCKETS = 1024
Steps = dict[str, Tensor]  # "losses" (STEPS,), and by name each parameter's sketch


def sketch(name: str, gradient: Tensor) -> Tensor:
    """(BUCKETS,) fp32 on the CPU; the gradient itself where it is no longer than that."""
    flat = gradient.detach().float().flatten()
    if len(flat) > BUCKETS:
        seed = torch.Generator(flat.device).manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]))
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % BUCKETS))
        signs = torch.randint(0, 2, flat.shape, generator=seed, device=flat.device, dtype=torch.int8)
        flat = torch.where(signs > 0, flat, -flat).view(-1, BUCKETS).sum(0)
    return flat.cpu()


def distance(mine: Steps, truth: Steps) -> tuple[float, float]:
    """Root mean square of the losses' differences; of the gradients' one, over the true one's length."""
    losses = (mine["losses"] - truth["losses"]).square().mean().sqrt().item()
    pairs = [(mine[name].double(), truth[name].double()) for name in truth if name != "losses"]
    apart = sum((a - b).square().sum().item() for a, b in pairs)
    length = sum(b.square().sum().item() for _, b in pairs)
    return losses, math.sqrt(apart / length) if length else math.inf


def worst(mine: Steps, truth: Steps, rounded: Steps) -> tuple[str, float]:
    """The parameter whose gradient is farthest beyond its own bound, or nearest to it, and how far: 1 is the bound.

    In the norm of all, an error in those of attention or of a bias would drown.
    """
    found = {}
    for name in (name for name in truth if name != "losses"):
        off, by_rounding = ((each[name].double() - truth[name]).norm().item() for each in (mine, rounded))
        bound = PARAMETER * by_rounding + ROUNDING * truth[name].double().norm().item()
        found[name] = off / bound if bound else math.inf if off else 0.0
    return max(found.items(), key=lambda each: math.inf if math.isnan(each[1]) else each[1])


def judged(mine: Steps, truth: Steps, rounded: Steps) -> dict:
    """What the row says of it. `truth` is eager PyTorch in fp32, `rounded` eager PyTorch in the row's precision, on
    the same data and weights."""
    loss_error, gradient_error = distance(mine, truth)
    loss, gradient = distance(rounded, truth)
    found = {"steps": len(truth["losses"]), "losses": mine["losses"].tolist(), "reference": truth["losses"].tolist()}
    found |= {"loss_error": loss_error, "loss_bound": LOSSES * loss + ROUNDING * truth["losses"].abs().mean().item()}
    found |= {"gradient_error": gradient_error, "gradient_bound": GRADIENT * gradient + ROUNDING}
    found["gradient_worst"], found["gradient_worst_of_bound"] = worst(mine, truth, rounded)
    ok = loss_error <= found["loss_bound"] and gradient_error <= found["gradient_bound"]  # not of NaN
    return found | {"ok": ok and found["gradient_worst_of_bound"] <= 1}


def refused(parity: dict) -> str | None:
    """Why a row with this parity shows no speed, in a line."""
    if parity["ok"] is not False:
        return None
    return (
        f"against eager PyTorch in fp32 the first {parity['steps']} losses are off by {parity['loss_error']:.1e} "
        f"(bound {parity['loss_bound']:.1e}) and the first gradient by {parity['gradient_error']:.1e} "
        f"(bound {parity['gradient_bound']:.1e}), that of {parity['gradient_worst']} by "
        f"{parity['gradient_worst_of_bound']:.2g} times its bound: python -m scripts.doctor finds the kernel"
    )


def key(*facts: object, files: Iterable[Path]) -> str:
    """A name for what depends on these facts and on the text of these files."""
    told = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for file in sorted(files):
        told.update(file.read_bytes())
    return told.hexdigest()[:16]
