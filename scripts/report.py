"""Make tables, figures and a page from rows: `python -m scripts.report`.

Without a folder, it writes the generated sections of README.md and */README.md, and the PNGs in results/<device>/. A
generated section stands between `<!-- NAME: DEVICE -->` and `<!-- end -->`; do not edit it by hand. With a folder,
`python -m scripts.report out/SWEEP`, it writes report.html, report.md and PNGs into that folder. See lab/report/.
"""

import argparse
import sys
from itertools import chain
from pathlib import Path

from lab.report.page import publish, write_report
from lab.report.readmes import draw_results, write_readmes
from runtime import compat
from runtime.config import UserError
from runtime.signals import exit_quietly


def parse_arguments() -> argparse.Namespace:
    compat.shorten_argparse_errors()
    parser = argparse.ArgumentParser(
        prog="python -m scripts.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, help="out/SWEEP, out/RUN or results/DEVICE; none: fill the READMEs"
    )
    parser.add_argument("--force", action="store_true", help="also compare choices that differ in more than kernels")
    parser.add_argument(
        "--wandb",
        nargs="?",
        const="offline",
        choices=["offline", "online"],
        help="send the table and the page to W&B; offline if no mode is given",
    )
    arguments = parser.parse_args()
    if not arguments.folder and (arguments.force or arguments.wandb):
        parser.error("--force and --wandb need the folder of a sweep")
    return arguments


@exit_quietly()
def main() -> None:
    arguments = parse_arguments()
    if not arguments.folder:
        for file in chain(write_readmes(), draw_results()):
            print(file)
        return
    try:
        files, source = write_report(arguments.folder, arguments.force)
        if arguments.wandb:
            files += publish(source, arguments.wandb, files)
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
    print("\n".join(map(str, files)))


if __name__ == "__main__":
    main()
