"""The commands. `python -m scripts.NAME --help` is answered here, before NAME imports torch, which takes 3 s."""

import sys

from lab.commands import CONFIGS, answer_help

if sys.argv[0] == "-m":  # Python imports this package before it runs the command, and then puts the file's path here
    name = sys.orig_argv[-len(sys.argv)].rpartition(".")[2]
    if (CONFIGS / f"{name}.yaml").exists():  # others read their command line with argparse
        answer_help(name)
