"""Find the longest sequence that fits: `python -m scripts.max_context kernels=triton attn=sdpa`.

In training, that is the longest T at batch 1 for which two full steps run. In generation, it is the longest T for which
a prompt of T tokens is prefilled and 64 new tokens follow. The search is in lab/context/.
"""

import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from common.terminal import printable, shell_command
from kernels.registry import AttnConfig, KernelsConfig, backend, missing_argument
from lab.commands import command
from lab.context.attempt import MODES, WINDOW, host_tokens, memory_limits, predict, run_attempt, window_is_free
from lab.context.prober import REFUSED, Prober, ProbeResult
from lab.context.search import OCTAVE, Search, predict_longest
from lab.recipe import Recipe
from lab.report.max_context_table import max_context_table
from lab.rows import keep_rows, read_jsonl
from model import cost
from model.config import PRECISIONS, GPTConfig
from model.executed import called_ops, kernels_label, warn_of_uncalled_ops
from model.generate_config import GenerateConfig
from model.optim import OptimConfig, rename_impl
from model.parallel import check_context_divides
from model.vocabulary import take_vocabulary
from runtime.command import arguments, command_line, config_flags
from runtime.config import check
from runtime.device import environment, select_device
from runtime.ranks import join_ranks, rank_device, started_by_torchrun, world_size
from runtime.resume import choose_folder
from runtime.row import read_row
from runtime.run import Run
from runtime.signals import Signals, Stopped
from runtime.trackers import LoggerConfig, Tracker


@dataclass
class Config:
    mode: str | None
    parallel: str | None
    memory_gib: float | None
    probe_minutes: float
    probe: str | None
    length: int | None
    shortened: bool
    keep: bool
    out_dir: str | None
    seed: int
    device: str
    precision: str
    kernels: KernelsConfig
    attn: AttnConfig
    model: GPTConfig
    generate: GenerateConfig
    optim: OptimConfig
    logger: LoggerConfig

    def __post_init__(self):
        check(self.mode in (None, *MODES), f"mode={self.mode}: choose {', '.join(MODES)}, or null for both")
        check(self.memory_gib is None or self.memory_gib > 0, f"memory_gib={self.memory_gib}: it must be above 0")
        check(self.probe_minutes > 0, f"probe_minutes={self.probe_minutes}: it must be above 0")
        check(self.probe in (None, "predict", "run"), f"probe={self.probe}: choose predict or run, or null to search")
        check(not self.probe or bool(self.mode), f"probe={self.probe} needs mode={' or mode='.join(MODES)}")
        check(self.probe != "run" or self.length is not None, "probe=run needs length=T")
        check(not self.shortened or self.probe == "run", "shortened=true needs probe=run: a search decides by itself")
        check(self.length is None or 1 <= self.length < 2**30, f"length={self.length}: it must be in [1, 2^30)")
        rename_impl(self.optim, self.kernels)
        check(self.precision in PRECISIONS, f"precision={self.precision}: choose {', '.join(PRECISIONS)}")
        check(0 <= self.seed < 2**63, f"seed={self.seed}: it must be in [0, 2^63)")
        draft = f"generate.speculate={self.generate.speculate}: no checkpoint drafts in a search: choose ngram"
        check(self.generate.draft_checkpoint is None, f"{draft}, or null")
        check(self.parallel in (None, "context"), f"parallel={self.parallel}: choose context, or null")
        check(self.parallel or world_size() == 1, f"{world_size()} processes need parallel=context")
        if self.parallel:
            check(self.mode != "generate", "parallel=context splits sequences in training only: choose mode=train")
            self.mode = "train"
            check_context_divides(self.model, length=OCTAVE)  # the lengths are m 2^k, with m in [128, 256)

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            model=self.model,
            kernels=self.kernels,
            attn=self.attn,
            optim=self.optim,
            precision=self.precision,
            seed=self.seed,
            generate=self.generate,
        )


def print_json(**facts) -> None:
    """Print one line that the searching process reads."""
    print(json.dumps(facts), flush=True)


def run_probe(
    recipe: Recipe,
    mode: str,
    probe: str,
    length: int | None,
    memory_gib: float | None,
    device_name: str,
    shortened: bool,
) -> None:
    """Make one attempt (probe=run) or one prediction (probe=predict) in this process, and print the result as JSON.

    The keys of the JSON lines are the fields of lab.context.prober.ProbeResult. Raises UserError or KernelError if the
    config cannot run here.
    """
    device = select_device(rank_device(device_name))
    limit_gib, usable_gib = memory_limits(memory_gib, device)
    if probe == "run":
        with join_ranks(device, "context") as ranks:
            print_json(row=run_attempt(recipe, mode, length, memory_gib, device, shortened, ranks))
        return
    print_json(env=environment(device), limit_gib=limit_gib, usable_gib=usable_gib)
    print_json(kernels=recipe.executed_kernels((1, length or 1024), device))
    if length:
        print_json(row=predict(recipe, mode, length, device))
        return
    row = predict_longest(recipe, mode, usable_gib, device)
    print_json(row=row, host_tokens=host_tokens(recipe, device) if mode == "train" else None)
    quadratic = row is not None and row["T"] > WINDOW and recipe.model.window is None
    print_json(can_shorten=quadratic and (mode == "generate" or window_is_free(recipe, device)))


def choose_modes(mode: str | None, attn: AttnConfig, decode: str, precision: str) -> list[str]:
    """Return the modes to search in: `mode`, or if it is None every mode that this config can run.

    Raises UserError if `mode` is generate and this config cannot: in fp8, or with blocks and an attention that takes no
    `lengths`.
    """
    reason = None
    if precision == "fp8":
        reason = "precision=fp8 cannot generate: choose precision=bf16"
    elif decode == "blocks" and (lack := missing_argument(backend("attention", attn.impl).attention, "lengths")):
        reason = f"it reads a cache, but {lack}"
    check(mode != "generate" or not reason, f"mode=generate cannot run: {reason}")
    if mode:
        return [mode]
    return ["train"] if reason else list(MODES)


def is_same_search(row: dict, config: dict) -> bool:
    """Return whether the row is from a search with this config, on any machine."""
    return all(row["config"].get(key) == config[key] for key in config.keys() - {"out_dir", "keep", "logger"})


def earlier_attempts(folder: Path, config: dict, env: dict) -> list[dict]:
    """Return the attempts of the same search, if it was stopped in this folder and on this machine."""
    row = read_row(folder)
    if not row or not row["status"].startswith("stopped"):
        return []
    if row.get("env") != env or row.get("world_size", 1) != world_size() or not is_same_search(row, config):
        return []
    return [attempt for _, attempt in read_jsonl(folder / "metrics.jsonl")[0]]


def search_modes(
    modes: list[str], recipe: Recipe, prober: Prober, first_prediction: ProbeResult, run: Run, earlier: list[dict]
) -> None:
    """Search in each mode, and put the figures into the run's row.

    `first_prediction` is for the first mode; `earlier` are attempts that are not repeated.
    """
    for mode in modes:
        prediction = first_prediction if mode == modes[0] else prober.predict(mode)
        prediction.limit_gib = first_prediction.limit_gib
        if not prediction.row:
            print(printable(f"{mode:<8} no prediction: {prediction.failure or f'not even {OCTAVE} tokens'}"))
        run.row |= Search(prober, recipe, mode, prediction, run, earlier).longest()


# model.vocab_size=null is the size for the tokenizer bytes, because no key of this command names another
@command(Config, "max_context", complete=partial(take_vocabulary, key="tokenizer"))
def main(cfg: Config) -> None:
    if cfg.probe:
        run_probe(cfg.recipe, cfg.mode, cfg.probe, cfg.length, cfg.memory_gib, cfg.device, cfg.shortened)
        return
    if started_by_torchrun() and os.environ["RANK"] != "0":
        return  # the first process searches, and every attempt starts a process on each GPU
    warn_of_uncalled_ops(called_ops(cfg.model))
    modes = choose_modes(cfg.mode, cfg.attn, cfg.kernels.decode, cfg.precision)
    config = OmegaConf.to_container(OmegaConf.structured(cfg))
    choice = f"{kernels_label(cfg.model, cfg.kernels, cfg.attn)}-{cfg.precision}"
    name = f"max-context-{cost.parameters(cfg.model) / 1e6:.0f}M-{choice}"
    if cfg.parallel:
        name += f"-context{world_size()}"
    hydra = HydraConfig.get()
    is_sweep = bool(cfg.out_dir) and hydra.mode is RunMode.MULTIRUN
    out_dir = f"{cfg.out_dir}/{hydra.job.num}-{name}" if is_sweep else cfg.out_dir
    row = read_row(Path(out_dir)) if is_sweep else None
    if row and row["status"] == "ok" and is_same_search(row, config):
        print(printable(f"done     before: {out_dir}/result.json"))
        return
    prober = Prober(["-m", "scripts.max_context", *config_flags, *arguments()], cfg.probe_minutes)
    with Signals():
        prediction = prober.predict(modes[0])
        failure = prediction.failure or ""
        check(not failure.startswith(REFUSED), failure.removeprefix(REFUSED))
        hint = f"add probe=predict mode={modes[0]} to see the whole error"
        check(prediction.kernels is not None, f"the prediction failed ({failure}): {hint}")
        folder, _ = choose_folder(out_dir, None, name)
        earlier = earlier_attempts(folder, config, prediction.env)
        try:
            with Run(folder, name, cfg, Tracker(cfg.logger), resume=bool(earlier)) as run:
                facts = {"env": prediction.env, "memory_gib": prediction.limit_gib, "world_size": world_size()}
                facts["parameters"] = cost.parameters(cfg.model)
                facts["allocator"] = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
                if earlier:
                    run.truncate_metrics(sys.maxsize)  # a kill may leave an incomplete line
                run.begin(**facts, kernels=prediction.kernels)
                search_modes(modes, cfg.recipe, prober, prediction, run, earlier)
        except Stopped:
            command = command_line(out_dir=str(folder))
            if is_sweep:  # command_line() gives only one search of the sweep
                command = shell_command("python", "-m", "scripts.max_context", *sys.argv[1:])
            print(printable(f"stopped  before the end of the search; resume with: {command}"))
            raise
    files = [folder / "result.json"]
    if cfg.keep:
        files.append(keep_rows([run.row], "context.jsonl"))
    print(printable(f"\n{max_context_table([run.row])}\n\ndone     {', '.join(map(str, files))}"))


if __name__ == "__main__":
    main()
