"""Make tables, figures and a page from rows: `python -m scripts.report`.

Without a folder, it writes the generated sections of README.md and */README.md, and the PNGs in results/<device>/. A
generated section stands between `<!-- NAME: DEVICE -->` and `<!-- end -->`; do not edit it by hand. With a folder,
`python -m scripts.report out/SWEEP`, it writes report.html, report.md and PNGs into that folder. With several folders,
`python -m scripts.report out/ONE out/OTHER`, it prints a table of the choices that they have in common: what got
faster? See lab/report/.
"""

import argparse
import sys
from itertools import chain

from common.terminal import LostOutput, outlive_output, printable
from lab.report.page import publish, write_report
from lab.report.readmes import draw_results, write_readmes
from lab.report.side_by_side import side_by_side
from runtime.config import UserError, path_argument
from runtime.signals import exit_quietly
from scripts import flag_parser


def parse_arguments() -> argparse.Namespace:
    parser = flag_parser("report", __doc__)
    parser.add_argument(
        "folders",
        nargs="*",
        type=path_argument,
        metavar="folder",
        help="out/SWEEP, out/RUN or results/DEVICE; several: compare them; none: fill the READMEs",
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
    if len(arguments.folders) != 1 and (arguments.force or arguments.wandb):
        parser.error("--force and --wandb need the folder of one sweep")
    return arguments


@exit_quietly()
def main() -> None:
    arguments = parse_arguments()
    if len(arguments.folders) <= 1:  # side_by_side() only prints
        outlive_output()
    try:
        if len(arguments.folders) > 1:
            print(printable(side_by_side(arguments.folders)))
        elif arguments.folders:
            files, source = write_report(arguments.folders[0], arguments.force)
            if arguments.wandb:
                files += publish(source, arguments.wandb, files)
            print(printable("\n".join(map(str, files))))
        else:
            for file in chain(write_readmes(), draw_results()):
                print(file)
    except UserError as error:
        sys.exit(f"error: {printable(error)}")
    except LostOutput:  # exit_quietly() handles it
        raise
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error
        sys.exit(f"error: {printable(reason)}")


if __name__ == "__main__":
    main()
