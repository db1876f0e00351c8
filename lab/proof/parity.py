"""Compare the first losses and the first gradient of a run with eager PyTorch in fp32.

A lower precision alone changes both, so the bounds are measured: eager PyTorch runs the same steps in the row's
precision too, and its distance from fp32 is the effect of rounding. The run's losses may be LOSS_FACTOR times as far
from fp32, its whole gradient GRADIENT_FACTOR times, and the gradient of one parameter PARAMETER_FACTOR times.

Gradients are compared as sketches (Charikar, Chen and Farach-Colton 2002): each element gets a random sign, and the
elements are summed in BUCKETS buckets. The squared length of a sketch is on average the squared length of the gradient.
The sketches of 124M parameters take 0.6 MB.
"""

import hashlib
import math

import torch
from torch import Tensor

from model.optim import Optimizer

STEPS = 20
LOSS_FACTOR = 3.0  # for two sets of STEPS equally large errors, F (the ratio of variances) exceeds 3^2 once in 250,000
GRADIENT_FACTOR = 2.0  # the whole gradient is a sum over millions of errors, which hardly varies
PARAMETER_FACTOR = 4.0  # measured: at most 1.2 in right runs (tiny model, bf16, 6 seeds), 9 to 12 without dq and dk
ROUNDING = 2.0**-14  # of fp32: its unit 2^-24 times the 2^10 terms of a sum, whose order differs between kernels
BUCKETS = 1024
FirstSteps = dict[str, Tensor]  # "losses" (STEPS,) fp64, and for each parameter's name the sketch of its first gradient


def sketch(name: str, gradient: Tensor) -> Tensor:
    """Return the sketch of a gradient, (at most BUCKETS,) fp32 on the CPU.

    A gradient of at most BUCKETS elements is flattened only. The signs depend only on the parameter's name and size and
    on the type of device.
    """
    flat = gradient.detach().float().flatten()
    if len(flat) > BUCKETS:
        seed = torch.Generator(flat.device).manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]))
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % BUCKETS))
        signs = torch.randint(0, 2, flat.shape, generator=seed, device=flat.device, dtype=torch.int8)
        flat = torch.where(signs > 0, flat, -flat).view(-1, BUCKETS).sum(0)
    return flat.to("cpu", copy=True)  # clipping scales the gradient in place


class Recorder:
    """Records the first STEPS losses and the first gradient of a run while it runs."""

    def __init__(self, optimizer: Optimizer):
        self.losses, self.gradient = [], {}
        optimizer.observer = lambda name, gradient: self.gradient.update({name: sketch(name, gradient)})

    def add_loss(self, loss: Tensor) -> None:
        if len(self.losses) < STEPS:
            self.losses.append(loss.clone())  # a step from a CUDA graph overwrites the loss before it

    @property
    def steps(self) -> FirstSteps:
        return {"losses": torch.stack(self.losses).double().cpu(), **self.gradient}


def distance(run: FirstSteps, truth: FirstSteps) -> tuple[float, float]:
    """Return (rms of the differences of the losses, ||gradient - true gradient|| / ||true gradient||)."""
    losses = (run["losses"] - truth["losses"]).square().mean().sqrt().item()
    pairs = [(run[name].double(), truth[name].double()) for name in truth if name != "losses"]
    difference = sum((a - b).square().sum().item() for a, b in pairs)
    length = sum(b.square().sum().item() for _, b in pairs)
    return losses, math.sqrt(difference / length) if length else math.inf


def worst_parameter(run: FirstSteps, truth: FirstSteps, rounded: FirstSteps) -> tuple[str, float]:
    """Return (the parameter whose gradient's error is largest relative to the bound, its error / bound).

    Each parameter has a bound of its own, because the length of the whole gradient hides an error in the gradient of
    attention or of a bias.
    """
    ratios = {}
    for name in truth:
        if name == "losses":
            continue
        error, rounding_error = ((steps[name].double() - truth[name]).norm().item() for steps in (run, rounded))
        bound = PARAMETER_FACTOR * rounding_error + ROUNDING * truth[name].double().norm().item()
        if bound:
            ratios[name] = error / bound
        else:
            ratios[name] = math.inf if error else 0.0
    return max(ratios.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])


def judge(run: FirstSteps, truth: FirstSteps, rounded: FirstSteps) -> dict:
    """Return the row's `parity`.

    `truth` is eager PyTorch in fp32, and `rounded` is eager PyTorch in the row's precision, both on the run's data and
    weights.
    """
    loss_error, gradient_error = distance(run, truth)
    loss_rounding, gradient_rounding = distance(rounded, truth)
    parity = {"steps": len(truth["losses"]), "losses": run["losses"].tolist(), "reference": truth["losses"].tolist()}
    parity["loss_error"] = loss_error
    parity["loss_bound"] = LOSS_FACTOR * loss_rounding + ROUNDING * truth["losses"].abs().mean().item()
    parity["gradient_error"] = gradient_error
    parity["gradient_bound"] = GRADIENT_FACTOR * gradient_rounding + ROUNDING
    parity["gradient_worst"], parity["gradient_worst_of_bound"] = worst_parameter(run, truth, rounded)
    parity["ok"] = (  # NaN is not ok
        loss_error <= parity["loss_bound"]
        and gradient_error <= parity["gradient_bound"]
        and parity["gradient_worst_of_bound"] <= 1
    )
    return parity


def why_parity_fails(parity: dict) -> str | None:
    """Return one line that says how far the run is off; None if its parity is ok, or if there is none."""
    if parity["ok"] is not False:
        return None
    return (
        f"against eager PyTorch in fp32 the first {parity['steps']} losses are off by {parity['loss_error']:.1e} "
        f"(bound {parity['loss_bound']:.1e}) and the first gradient by {parity['gradient_error']:.1e} "
        f"(bound {parity['gradient_bound']:.1e}); the gradient of {parity['gradient_worst']} is off by "
        f"{parity['gradient_worst_of_bound']:.2g} times its bound: find the kernel with python -m scripts.doctor"
    )
