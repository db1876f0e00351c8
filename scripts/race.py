"""Race decoders: `python -m scripts.race checkpoint=out/RUN decoders=blocks,blocks+compile prompt="def main("`.

Each decoder continues the same prompt, alone on the device. A terminal then replays the decoders side by side. At the
end a table compares their speeds and texts, and a line names the winner.
"""

import math
import sys
from dataclasses import dataclass

import torch

from common.terminal import printable
from data.errors import DataError
from kernels.registry import default_impl
from lab.commands import command
from lab.generation import prompts, race
from lab.generation.race import Racer
from lab.generation.recipe import GenerationKeys, take_random_model
from lab.generation.replay import choose_seconds, replay
from lab.generation.writing import show
from lab.proof import Wrong
from lab.rows import track_rows
from runtime.config import UserError, check
from runtime.device import device_name, select_device
from runtime.trackers import LoggerConfig, make_tracker


@dataclass
class Config(GenerationKeys):
    decoders: list[str]
    replay: float | None
    logger: LoggerConfig

    def __post_init__(self):
        super().__post_init__()
        check(bool(self.decoders), "decoders is empty: name at least one")
        check(
            not self.kernels.compile and self.kernels.decode == default_impl("decode"),
            "kernels.decode and kernels.compile have no effect here: name decoders, as in decoders=blocks+compile",
        )
        seconds = self.replay
        check(seconds is None or 0 <= seconds < math.inf, f"replay={seconds}: it must be seconds, 0 for none, or null")


@command(Config, "race", errors=(DataError,), complete=take_random_model)
def main(cfg: Config) -> None:
    device, tracker = select_device(cfg.device), make_tracker(cfg.logger)
    recipe = cfg.open_recipe()
    entries = [(entry, race.with_decoder(recipe, entry)) for entry in cfg.decoders]
    [prompt] = prompts.make_prompts(cfg.prompt, None, cfg.prompt_tokens, recipe.source, recipe.tokenizer, cfg.seed)
    new_tokens = prompts.fit_new_tokens([prompt], cfg.max_new_tokens, recipe.source, race.NEW_TOKENS)
    print(f"device   {device_name(device)}, torch {torch.__version__}, precision {cfg.precision}")
    print(printable(f"model    {recipe.model_text}"))
    racers = []
    for number, (entry, contestant) in enumerate(entries, 1):
        if sys.stdout.isatty():
            print(f"running  {entry}, alone on the device ({number} of {len(entries)})", flush=True)
        racers.append(race.run_alone(entry, contestant, prompt, new_tokens, device))
    race.judge(racers, must_agree=cfg.precision == "fp32" and cfg.temperature == 0)
    finished = [racer for racer in racers if racer.status == "ok"]
    if not finished:
        raise UserError(f"no decoder finished: {'; '.join(f'{racer.name} {racer.status}' for racer in racers)}")
    if sys.stdout.isatty() and cfg.replay != 0:
        replay(finished, prompt.text, choose_seconds(finished, cfg.replay))
    print_result(racers, prompt.text)
    rows = {racer.name: {"status": racer.status, "text": racer.text, **racer.figures} for racer in racers}
    track_rows(tracker, "race", cfg, rows)
    if wrong := [f"{racer.name} is {racer.status}" for racer in racers if racer.status.startswith("wrong")]:
        raise Wrong("; ".join(wrong))


def print_result(racers: list[Racer], prompt: str) -> None:
    """Print the kernels, the texts, the table and the winner."""
    written = [racer for racer in racers if racer.times]
    print(race.kernels_lines(racers))
    same = all(racer.tokens == written[0].tokens for racer in written)
    for racer in written[:1] if same else written:
        print(f"\n--- {'all' if same else racer.name}")
        show(f"{prompt}{racer.text}\n", raw=False)
    print("\nThe decoders ran one after the other, each alone on the device.\n")
    print(printable(f"{race.table(racers)}\n{race.verdict(racers)}"))


def main_with_exact_prompt() -> None:
    """Call main() with the prompt quoted for Hydra, and decoders=a,b in the brackets that Hydra needs."""
    try:
        prompts.take_stdin(sys.argv)
    except UserError as error:
        sys.exit(f"error: {printable(error)}")
    prompts.quote_prompt(sys.argv)
    for i, word in enumerate(sys.argv):
        if word.startswith("decoders=") and "[" not in word:
            sys.argv[i] = f"decoders=[{word.removeprefix('decoders=')}]"
    main()


if __name__ == "__main__":
    main_with_exact_prompt()
