"""The commands. `python -m scripts.NAME` starts here, before NAME imports torch, which takes 3 s."""

import sys

from lab.start import start_command

if sys.argv[0] == "-m":  # Python imports this package before it runs the command, and then puts the file's path here
    start_command(sys.orig_argv[-len(sys.argv)].rpartition(".")[2])
