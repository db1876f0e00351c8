"""Train a GPT in which every hot operation is a choice: `python train.py kernels=compile attn=sdpa`.

Read it from the top: the config, what is built from it, one optimizer step, the loop, and what is said and written.
"""

import math
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor
from tqdm import tqdm

from data import DataConfig, DataError, Dataset, open_dataset
from data.loader import Batch, Loader, Windows, evaluation, prefetch
from kernels.registry import AttnConfig, KernelError, KernelsConfig, chosen, describe, impls, label, resolve
from model import cost
from model.generate import generate
from model.gpt import GPT, PRECISIONS, GPTConfig, beyond_table
from model.optim import OptimConfig, Optimizer, learning_rate
from runtime.config import check, cli
from runtime.console import step_line, summary, val_line
from runtime.device import Ceiling, environment, pick, reset_memory
from runtime.meter import WARMUP, Meter
from runtime.run import OutOfMemory, Run, new_folder
from runtime.trackers import LoggerConfig, tracker

ROOT = Path(__file__).resolve().parent


@dataclass
class TrainConfig:
    batch_size: int  # sequences per device and micro-step
    block_size: int  # tokens per sequence
    tokens_per_step: int  # of one optimizer step over all devices; gradient accumulation follows from it
    max_steps: int | None
    max_minutes: float | None
    log_every: int
    eval_every: int  # 0: never
    eval_batches: int
    sample_tokens: int  # of text at the end; 0: none

    def __post_init__(self):
        for key in ("batch_size", "block_size", "log_every", "eval_every", "eval_batches", "sample_tokens"):
            least = 0 if key in ("eval_every", "sample_tokens") else 1
            check(getattr(self, key) >= least, f"train.{key}={getattr(self, key)}: it must be at least {least}")
        limits = [limit for limit in (self.max_steps, self.max_minutes) if limit is not None]
        check(bool(limits), "train.max_steps or train.max_minutes must be set, or the run would never end")
        check(all(0 < limit < math.inf for limit in limits), "train.max_steps and train.max_minutes must be above 0")
        micro = self.batch_size * self.block_size
        below = max(0, self.tokens_per_step // micro * micro)
        check(
            self.tokens_per_step > 0 and below == self.tokens_per_step,
            f"train.tokens_per_step={self.tokens_per_step} does not divide into micro-steps of train.batch_size "
            f"{self.batch_size} x train.block_size {self.block_size} = {micro} tokens: try "
            f"{f'{below} or ' if below else ''}{below + micro}",
        )


@dataclass
class Config:
    out_dir: str | None  # the run's folder; null: out/<time>-<parameters>-<kernels>-<attn>-<precision>
    seed: int
    device: str  # auto | cpu | cuda | cuda:N
    precision: str  # fp32 | amp | bf16
    kernels: KernelsConfig
    attn: AttnConfig
    model: GPTConfig
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig
    logger: LoggerConfig

    def __post_init__(self):
        check(self.precision in PRECISIONS, f"precision={self.precision}: choose {', '.join(PRECISIONS)}")
        check(0 <= self.seed < 2**63, f"seed={self.seed}: it must be in [0, 2^63)")
        length = self.train.block_size
        check(
            self.model.pos == "rope" or length <= self.model.block_size,
            f"train.block_size: {beyond_table(length, self.model.block_size)}",
        )


def build(cfg: Config, device: torch.device) -> GPT:
    """The model on `device`, from seed, with the kernels and the precision that the config names."""
    stored, compute = PRECISIONS[cfg.precision]
    torch.set_float32_matmul_precision("highest")  # fp32 is the parity reference: no TF32
    torch.manual_seed(cfg.seed)
    with device:
        model = GPT(cfg.model, resolve(cfg.kernels, cfg.attn, device), compute).to(stored)
    if cfg.kernels.compile:
        check(
            any(map(shutil.which, ("g++", "clang++", os.environ.get("CXX", "c++")))),
            "kernels.compile=true needs a C++ compiler, and g++ and clang++ are not to be found: install one",
        )
        model.compile(fullgraph=True)
    return model


def train_step(model: GPT, optimizer: Optimizer, batches: list[Batch], lr: float) -> tuple[Tensor, Tensor]:
    """One optimizer step over the micro-batches: (mean loss, gradient norm), on the device and not waited for."""
    total = torch.zeros((), device=batches[0][0].device)
    for x, y in batches:
        loss = model(x, y) / len(batches)
        loss.backward()
        optimizer.accumulate()
        total += loss.detach()
    return total, optimizer.step(lr)


@torch.no_grad()
def evaluate(model: GPT, windows: Windows, cfg: TrainConfig, device: torch.device) -> float:
    """Mean loss over the fixed validation batches."""
    model.eval()
    batches = evaluation(windows, cfg.batch_size, cfg.eval_batches)
    losses = [model(x.to(device), y.to(device)) for x, y in batches]
    model.train()
    return torch.stack(losses).mean().item()


def train(cfg: Config, device: torch.device, run: Run) -> None:
    """The run: build everything, step, log, and leave the figures in `run.row`."""
    t, flops_per_token = cfg.train, cost.flops_per_token(cfg.model, cfg.train.block_size)
    run.row |= {"kernels": chosen(cfg.kernels, cfg.attn) | {"compile": cfg.kernels.compile}, "env": environment(device)}
    run.row |= {"parameters": cost.parameters(cfg.model), "flops_per_token": flops_per_token}
    dataset = open_dataset(cfg.data)
    check_vocabulary(cfg, dataset)
    loader = Loader(Windows(dataset.train, t.block_size, "training"), t.batch_size, t.tokens_per_step, cfg.seed)
    held_out = Windows(dataset.val, t.block_size, "validation") if t.eval_every else None
    ceiling = Ceiling(device, PRECISIONS[cfg.precision][1], flops_per_token)
    reset_memory(device)
    model = build(cfg, device)
    optimizer = Optimizer(model, cfg.optim)
    run.begin(kernels=executed(cfg, device), peak_flops=ceiling.peak, measured_peak_flops=ceiling.measured)
    print(header(cfg, run, dataset, ceiling))

    meter = Meter(device, t.tokens_per_step, ceiling)
    with tqdm(total=t.max_steps, unit="step", disable=not sys.stdout.isatty(), leave=False, file=sys.stdout) as bar:
        for step, (batches, waited) in enumerate(prefetch(loader, 1, device), 1):
            lr = learning_rate(cfg.optim, step, last_step(t, step, meter))
            loss, norm = train_step(model, optimizer, batches, lr)
            meter.waited += waited
            bar.update()
            done = step == t.max_steps or meter.elapsed >= 60 * (t.max_minutes or math.inf)
            judged = t.eval_every and (done or step % t.eval_every == 0)
            if not (done or judged or step <= WARMUP or step % t.log_every == 0):
                continue
            figures = meter.lap(step)  # synchronises; nothing else does
            figures |= {"tokens": step * t.tokens_per_step, "train/loss": loss.item(), "train/lr": lr}
            figures |= {"train/grad_norm": norm.item()}
            bar.write(step_line(step, t.max_steps, figures), file=sys.stdout)
            check_finite(step, figures)
            if step <= WARMUP:  # printed, but in no throughput
                figures = {key: value for key, value in figures.items() if not key.startswith("perf/")}
            if judged:
                figures["val/loss"] = evaluate(model, held_out, t, device)
                bar.write(val_line(step, t.max_steps, figures["val/loss"]), file=sys.stdout)
                meter.restart(step)
            run.log(step, figures)
            if done:
                break

    run.row |= {"steps": step, **figures, **meter.result()}
    print(summary(run.row))
    if t.sample_tokens:
        print(sample(cfg, model, dataset, device, run.folder))


def check_vocabulary(cfg: Config, dataset: Dataset) -> None:
    ids = dataset.tokenizer.n_vocab
    check(
        ids <= cfg.model.vocab_size,
        f"data.tokenizer={cfg.data.tokenizer} has {ids} ids, and model.vocab_size={cfg.model.vocab_size} is less: "
        f"pass model.vocab_size={-(-ids // 64) * 64}",
    )


def check_finite(step: int, figures: dict) -> None:
    loss, norm = figures["train/loss"], figures["train/grad_norm"]
    check(
        math.isfinite(loss) and math.isfinite(norm),
        f"the run has diverged: loss {loss} and gradient norm {norm} at step {step}; lower optim.learning_rate",
    )


def last_step(cfg: TrainConfig, step: int, meter: Meter) -> float:
    """The step in which the run will end, for the schedule: max_steps, or where max_minutes lead at this speed."""
    last = cfg.max_steps or math.inf
    if cfg.max_minutes is None or step <= WARMUP:
        return last
    steady = (meter.elapsed - meter.first_step_s) / (step - 2)  # seconds a step, of the step - 2 after the first
    return min(last, step - 1 + math.ceil((60 * cfg.max_minutes - meter.elapsed) / steady))


def executed(cfg: Config, device: torch.device) -> dict[str, str | bool]:
    """Op -> backend and version as they run at this run's shape."""
    stored, compute = PRECISIONS[cfg.precision]
    shape = cfg.train.batch_size, cfg.train.block_size
    shapes = {
        "norm": {"shape": (*shape, cfg.model.n_embd), "residual_dtype": stored},
        "attention": {"shape": (*shape, cfg.model.n_head, cfg.model.head_dim), "packed": cfg.model.pos == "learned"},
        "mlp": {"shape": (*shape, cfg.model.n_embd)},
        "loss": {"shape": (*shape, cfg.model.n_embd), "vocab": cfg.model.vocab_size},
    }
    names = chosen(cfg.kernels, cfg.attn).items()
    ops = {op: describe(op, impl, dtype=compute, device=device, **shapes[op]) for op, impl in names}
    return {**ops, "compile": cfg.kernels.compile}


def header(cfg: Config, run: Run, dataset: Dataset, ceiling: Ceiling) -> str:
    """What is about to run."""
    m, t = cfg.model, cfg.train
    kernels = [f"{op} {who}" for op, who in run.row["kernels"].items() if op != "compile"]
    kernels += ["torch.compile"] * cfg.kernels.compile
    tokens = [f"{sum(map(len, shards)):,}" for shards in (dataset.train, dataset.val)]
    counted = (cost.parameters(m) - cost.positions(m)) / 1e6
    peak = f"{ceiling.peak / 1e12:.1f} by data sheet" if ceiling.peak else "unknown to the table of GPUs"
    floor = 1e3 * ceiling.flops_per_token * t.tokens_per_step / ceiling.measured
    micro = t.tokens_per_step // (t.batch_size * t.block_size)
    return f"""\
device   {run.row["env"]["device"]}, torch {torch.__version__}, precision {cfg.precision}
model    {cost.parameters(m) / 1e6:.1f}M: {m.n_layer} layers, {m.n_head} heads, {m.n_embd} wide, {m.pos} positions
data     {dataset.name}, {dataset.tokenizer.name}: {tokens[0]} training tokens, {tokens[1]} validation tokens
kernels  {" | ".join(kernels)}
step     {t.tokens_per_step:,} tokens: {micro} micro-steps of {t.batch_size} sequences of {t.block_size:,}
mfu      (6 x {counted:.1f}M + 12 x {m.n_layer} x {m.n_embd} x {t.block_size}) FLOP a token over the dense bf16 peak
peak     TFLOP/s: {peak}; {ceiling.measured / 1e12:.3g} by a matmul here, at which a step takes {floor:.1f} ms
folder   {run.folder}"""


def sample(cfg: Config, model: GPT, dataset: Dataset, device: torch.device, folder: Path) -> str:
    """Some text of the model's own, also kept as sample.txt."""
    start = torch.tensor([[dataset.tokenizer.eot]], device=device)
    n_vocab = dataset.tokenizer.n_vocab
    ids = generate(model, start, cfg.train.sample_tokens, n_vocab=n_vocab, temperature=0.8, top_k=200, seed=cfg.seed)
    text = dataset.tokenizer.decode(ids[0].tolist())
    (folder / "sample.txt").write_text(text, encoding="utf-8")
    return f"sample   {text!r}"


OmegaConf.register_new_resolver("backends", lambda op: ", ".join(impls(op)), replace=True)  # for --help


@cli(
    Config,
    configs=ROOT / "configs",
    name="config",
    groups={"attn": {name: {"impl": name} for name in impls("attention")}},
    errors=(KernelError, DataError),
)
def main(cfg: Config) -> None:
    device = pick(cfg.device)
    choice = f"{label(cfg.kernels, cfg.attn)}-{cfg.precision}"
    name = f"{cost.parameters(cfg.model) / 1e6:.0f}M-{choice}"
    out_dir = cfg.out_dir and Path(cfg.out_dir).expanduser()
    folder = out_dir or new_folder(Path("out"), f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
    torch.compiler.reset()  # a sweep's jobs share the code of GPT.forward, of which Dynamo compiles 8 versions at most
    with Run(folder, name, cfg, tracker(cfg.logger)) as run:
        try:
            train(cfg, device, run)
        except RuntimeError as error:  # torch.OutOfMemoryError is one; a CPU's is told by its text alone
            gpu = isinstance(error, torch.OutOfMemoryError)
            if not gpu and "DefaultCPUAllocator" not in str(error):
                raise
            what = re.search(r"[Tt]ried to allocate .*?(?=\. |$)(\. GPU .*?(?=\. |$))?", str(error))
            raise OutOfMemory(
                f"out of {'GPU ' if gpu else ''}memory with train.batch_size={cfg.train.batch_size} x "
                f"train.block_size={cfg.train.block_size}, {choice}: {what[0] if what else error}; lower "
                "train.batch_size (train.tokens_per_step keeps the step's size), or choose a leaner kernel, a smaller "
                "model or precision=bf16"
            ) from error
    print(f"done     {run.folder / 'result.json'}")


if __name__ == "__main__":
    main()
