"""Generate text from a model: `python -m scripts.generate checkpoint=out/RUN prompt="def main(" max_new_tokens=200`.

It streams the text, and measures the decoding steps: their tokens/s, and their share of the bound. The bound is the
speed of a step that only reads the weights and the KV cache, at the bandwidth of a copy on this machine. A run's folder
gets the figures. Without a prompt on a terminal, the script asks for one prompt after another, and writes no folder.
Without a prompt, a pipe on stdin is the prompt.
"""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from common.terminal import printable
from data.errors import DataError
from kernels.names import GENERATION_OPS
from lab.bench.new_backends import check_new_backends
from lab.commands import command
from lab.generation import measure, prompts, writing
from lab.generation.interactive import answer_prompts
from lab.generation.recipe import GenerationKeys, GenerationRecipe, take_random_model
from lab.proof import Wrong
from lab.proof.generation import proof_line, prove, why_proof_fails
from lab.proof.memory import in_gib, predict_generation
from lab.proof.receipt import receipt_lines
from lab.sweep.launcher import SweepConfig, register_sweeps
from model import cost
from model.decoder import Decoder
from model.executed import called_kernels, called_ops, warn_of_uncalled_ops
from model.generate import stream
from runtime.command import command_line
from runtime.config import UserError, check
from runtime.console import model_header, power_line
from runtime.device import GIB, environment, explain_out_of_memory, reset_peak_memory, select_device
from runtime.power import PowerMeter
from runtime.resume import choose_folder
from runtime.run import Run
from runtime.signals import Signals
from runtime.timing import measured_bandwidth
from runtime.trackers import LoggerConfig, Tracker

register_sweeps()  # for Hydra's -m and +sweep=generate


@dataclass
class Config(GenerationKeys):
    batch: int
    out_dir: str | None
    proof: bool
    raw: bool  # print control characters of prompts and texts as they are
    sweep: SweepConfig
    logger: LoggerConfig

    def __post_init__(self):
        super().__post_init__()
        check(1 <= self.batch < 2**31, f"batch={self.batch}: it must be in [1, 2^31)")

    @property
    def is_conversation(self) -> bool:
        """Whether a terminal asks for prompts. A conversation writes no run, so keys of a run then raise UserError."""
        given = [self.prompt, self.prompts, self.prompt_tokens]
        if any(value is not None for value in given) or not (sys.stdin.isatty() and sys.stdout.isatty()):
            return False
        keys = {"batch": self.batch > 1, "proof": self.proof, "out_dir": self.out_dir is not None}
        keys["logger"] = self.logger.name != "none"
        for key, is_set in keys.items():
            check(
                not is_set,
                f"{key} is for a run, but without a prompt a terminal starts a conversation, which writes no run: pass "
                "prompt=TEXT, or prompt= to begin a document",
            )
        return True


@command(Config, "generate", errors=(DataError,), complete=take_random_model)
def main(cfg: Config) -> None:
    device = select_device(cfg.device)
    recipe = cfg.open_recipe()
    warn_of_uncalled_ops(called_ops(recipe.source.config))
    torch.compiler.reset()  # hydra/launcher=basic runs all jobs in this process, and Dynamo limits its compilations
    if cfg.is_conversation:
        with explain_out_of_memory(recipe.name, "max_new_tokens, or choose precision=bf16"):
            answer_prompts(recipe, cfg.max_new_tokens, device, cfg.raw)
        return
    options = recipe.shortest, recipe.sampling.n_vocab, recipe.tokenizer, cfg.seed
    given = prompts.make_prompts(cfg.prompt, cfg.prompts, cfg.prompt_tokens, *options)
    # the row then has the number instead of null
    cfg.max_new_tokens = prompts.fit_new_tokens(given, cfg.max_new_tokens, recipe.shortest)
    if cfg.proof:  # the proof needs a second token, even if the run has only one
        longest = prompts.longest_prompt(given)
        prompts.check_room(len(longest.ids) + 1, f"{longest.where} and a token for proof=true", recipe.shortest)
    chosen = [prompt for prompt in given for _ in range(cfg.batch)]
    if cfg.prompts is None and cfg.prompt_tokens is None:
        cfg.prompt = given[0].text  # on a terminal, the command of the row would ask for a prompt without it
    name = f"generate-{recipe.name}"
    folder, _ = choose_folder(cfg.out_dir, None, name)  # after all checks, so that a mistake leaves no empty folder
    work = f"{len(chosen)} sequences, max_new_tokens={cfg.max_new_tokens}, {name}"
    with (
        Signals(),
        Run(folder, name, cfg, Tracker(cfg.logger)) as run,
        explain_out_of_memory(work, "one of them, or choose precision=bf16"),
    ):
        if cfg.prompt is not None:
            run.row["command"] = command_line(prompt=cfg.prompt)
        summary = generate(run, recipe, chosen, cfg.max_new_tokens, device, cfg.proof, cfg.raw)
        print(summary)
    print(f"done     {run.folder / 'result.json'}")


def generate(
    run: Run,
    recipe: GenerationRecipe,
    chosen: list[prompts.Prompt],
    new_tokens: int,
    device: torch.device,
    proof: bool,
    raw: bool,
) -> str:
    """Continue the prompts, and fill the run's row and folder. Return the figures as text.

    Raises Wrong if the proof fails.
    """
    idx, lengths = (tensor.to(device) for tensor in prompts.make_batch(chosen))
    # the row of a decoder that cannot run here needs these two
    run.row["kernels"] = recipe.chosen_kernels
    run.row["env"] = environment(device)
    called = called_kernels(recipe.source.config, recipe.kernels)
    run.row["checks"] = check_new_backends(called, recipe.attn, device, GENERATION_OPS)
    bandwidth = measured_bandwidth(device)
    reset_peak_memory(device)
    decoder = recipe.build_decoder(len(idx), idx.shape[1] + new_tokens, device)
    facts = recipe.kernel_facts(decoder, tuple(idx.shape), device)
    facts |= {"measured_bandwidth": bandwidth, "source": recipe.source.name}
    facts["parameters"] = cost.parameters(recipe.source.config)
    if recipe.draft:
        facts["draft"] = {"source": recipe.draft.name, "parameters": cost.parameters(recipe.draft.config)}
    run.begin(**facts)
    print(f"{model_header(run.row, recipe.model_text, compiled='torch.compile around a step')}\n", flush=True)
    figures, first_token = measure.warm_up(decoder, idx, lengths, new_tokens)
    steps = stream(decoder, idx, new_tokens, lengths)
    with PowerMeter(device) as power:
        power.start()
        written, arrivals = writing.write_texts(steps, chosen, recipe.make_texts(len(chosen)), run.folder, raw)
        power.stop()
    print("\n", flush=True)
    steps_made = sum(arrival.tokens for arrival in arrivals) // len(chosen)
    least = measure.least_bytes(decoder, recipe.precision, lengths, steps_made)
    figures |= measure.figures(decoder, idx, lengths, first_token, arrivals, least, bandwidth)
    run.row |= figures  # now, because the repetitions below may be interrupted
    figures |= measure.power_figures(power, decoder, idx, lengths, new_tokens)
    for number, seconds in enumerate(figures["gen/laps_s"], 1):  # the speed over time
        run.log(number * measure.SAMPLE_STEPS, {"gen/lap_tokens_per_sec": len(chosen) / seconds})
    run.log((len(figures["gen/laps_s"]) + 1) * measure.SAMPLE_STEPS, figures)
    samples = [[prompt.text, text] for prompt, text in zip(chosen, written, strict=True)]
    run.tracker.log_table("samples", ["prompt", "text"], samples)
    run.row |= figures
    if proof:
        record_proof(run, recipe, decoder, idx, lengths, new_tokens)
    return measure.summary(figures, least, bandwidth) + power_line(figures)


def record_proof(
    run: Run, recipe: GenerationRecipe, decoder: Decoder, idx: Tensor, lengths: Tensor, new_tokens: int
) -> None:
    """Write the proof into the row, and print it. Raises Wrong if the tokens, the logits or the kernels are wrong."""
    recipe, draft = recipe.naming(decoder), recipe.draft.config if recipe.draft else None
    arguments = recipe.groups, recipe.generate, tuple(idx.shape), new_tokens, idx.device
    parts, _ = predict_generation(*arguments, draft=draft)
    packed = GIB * run.row["mem/packed_gib"]  # a prediction is of blocks, which pack nothing
    predicted = in_gib({**parts, "packed": packed, "peak": parts["peak"] + packed})
    run.row["memory"] = {"predicted": predicted, "measured": measure.measured_memory(run.row)}
    run.row["receipt"] = measure.receipt_of_step(decoder, run.row, recipe.kernels, recipe.attn)
    options = recipe.decoder_options | {"draft": decoder.drafter and decoder.drafter.model}
    run.row["proof"] = prove(decoder, options, recipe.precision, idx, lengths)
    print("\n".join([*receipt_lines(run.row), proof_line(run.row["proof"])]))
    if reason := why_proof_fails(run.row["proof"]) or run.row["receipt"]["wrong"]:
        raise Wrong(reason)
    if decoder.step_tokens > 1:
        gain = measure.gain_of_drafts(decoder, options, idx, lengths, min(new_tokens, run.row["gen/tokens"]))
        run.row |= gain
        print(measure.gain_line(gain))


def main_with_exact_prompt() -> None:
    """Call main() with the prompt, also one from stdin, quoted for Hydra, so that the model gets exactly its text."""
    try:
        prompts.check_stdin(sys.argv)
        prompts.take_stdin(sys.argv)
    except UserError as error:
        sys.exit(f"error: {printable(error)}")
    prompts.quote_prompt(sys.argv)
    main()


if __name__ == "__main__":
    main_with_exact_prompt()
