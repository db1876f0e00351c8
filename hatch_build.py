"""Choose the files of the wheel and of the source archive, and put the rooms inside the package `hotswap`.

In a checkout these are the files that git tracks, so a file such as data/.env is never shipped. An unpacked source
archive has no .git: there they are the files with the suffixes of this repo. An editable install copies no file.
"""

import os
import subprocess
import sys
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOMS = ("common", "configs", "data", "kernels", "model", "runtime")
SUFFIXES = {".py", ".typed", ".yaml", ".cu", ".cuh", ".h", ".json", ".jsonl", ".md", ".png", ".toml", ".lock"}
SUFFIXES |= {".css", ".js", ".j2", ".sh", ".diff", ".ipynb"}
NAMES = {"LICENSE", "Makefile", "Dockerfile"}  # files without a suffix
NOT_OURS = {"__pycache__", "build", "dist", "multirun", "out", "wandb"}  # folders that commands make


def repo_files(root: Path) -> list[str]:
    """Return the relative paths of the files of this repo, sorted."""
    if (root / ".git").exists():
        command = ["git", "-c", f"safe.directory={root.resolve()}", "ls-files", "-z"]  # also of another user's checkout
        try:
            git = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"error: git cannot list the files of {root} ({error}): install git, or build from `git archive`")
        return sorted(path for path in map(os.fsdecode, git.stdout.split(b"\0")) if (root / path).is_file())
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in NOT_OURS]
        relative = Path(folder).relative_to(root)
        names = [name for name in names if name in NAMES or Path(name).suffix in SUFFIXES]
        files += [str(relative / name) for name in names if not name.startswith(".")]
    return sorted(files)


class CustomBuildHook(BuildHookInterface):
    """hatchling calls initialize() before it writes a wheel (`version` is standard or editable) or an sdist."""

    def initialize(self, version, build_data):
        if version == "editable":
            return
        files = {path: path for path in repo_files(Path(self.root))}
        if self.target_name == "wheel":
            parts = {path: path.split("/")[0] for path in files}
            files = {path: path for path in files if parts[path] == "hotswap"}
            files |= {path: f"hotswap/{path}" for path in parts if parts[path] in ROOMS}
        self.build_config.target_config["exclude"] = ["*"]  # of the files that hatchling itself would select
        build_data["force_include"] |= files
