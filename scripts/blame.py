"""Find the op behind a loss or gradient that is not finite: `python -m scripts.blame out/RUN`.

A run that meets NaN or infinity keeps the batch of that step (nonfinite-step-*.pt). This command runs the batch again,
forward and backward: with the run's backends, with one op at a time swapped to eager, and with all ops eager. A table
says what each gave. The line below names the first op and layer that is not finite, and which swap repairs the step.

Before that, the batch runs twice. If the bits differ with eager PyTorch too, the machine is to blame: one line says so.
The exit code is 0 if the step goes wrong again, and 1 if it does not, or after an error.

The folder may be from somebody else, so a run whose backends are not of kernels/ is refused without --trust.
"""

import sys
from pathlib import Path

from common.terminal import printable
from kernels.registry import KernelError
from lab.proof.blame import Replay, check_ids, check_repeatable, read_step, replay, swaps, verdict
from lab.recipe import Recipe
from lab.rerun import check_backends
from lab.rows import read_run
from runtime.config import UserError, check, parse, path_argument
from runtime.device import OutOfMemory, select_device
from runtime.signals import exit_quietly
from scripts import flag_parser
from train import Config as TrainConfig


def blame(run: Path, number: int | None, device_name: str, trust: bool) -> bool:
    """Print the page. Return whether the step goes wrong again."""
    row = read_run(run)
    check(
        row is not None and isinstance(row.get("config"), dict),
        f"{run} has no row with a config: its result.json is missing or damaged, or {run} is not the folder of a run",
    )
    if not trust:
        check_backends(row["config"], f"the config of {run}", "read it, and add --trust to run it")
    cfg = parse(row["config"], TrainConfig)
    step, device = read_step(run, number), select_device(device_name)
    recipe = Recipe.of(cfg)
    check_ids(step, cfg.model)
    recipes, replays = list(swaps(recipe)), []
    if line := check_repeatable(step, device, recipes[0][1], recipes[-1][1]):
        print(printable(line))
    for name, swapped in recipes:
        try:
            replays.append(replay(name, swapped, step, device))
        except (OutOfMemory, KernelError) as error:
            if not replays:
                raise
            replays.append(Replay(name, None, None, failure=str(error)))
        if sys.stdout.isatty():
            print(f"replay   {name}", flush=True)
        if replays[0].first is None:  # nothing to repair
            break
    print(printable(verdict(replays, step)))
    return replays[0].first is not None


@exit_quietly()
def main() -> None:
    parser = flag_parser("blame", __doc__)
    parser.add_argument("run", type=path_argument, metavar="RUN", help="the folder of a run with a nonfinite-step-*.pt")
    parser.add_argument("--step", type=int, help="the number of the step; default: the first one")
    parser.add_argument("--trust", action="store_true", help="run the run's backends also from outside of kernels/")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    arguments = parser.parse_args()
    try:
        goes_wrong = blame(arguments.run, arguments.step, arguments.device, arguments.trust)
    except (UserError, KernelError) as error:
        sys.exit(f"error: {printable(error)}")
    sys.exit(0 if goes_wrong else 1)


if __name__ == "__main__":
    main()
