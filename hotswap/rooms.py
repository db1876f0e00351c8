"""Import the rooms as parts of this package: `hotswap.model` is the folder model/.

The files of a room say `from kernels import registry`, because train.py runs from the repo's root. A program that
imports hotswap may have a `model` or a `data` of its own, and the Hugging Face package `kernels`. So this loader reads
such an import as `from hotswap.kernels import registry`, and no room is ever imported under a name of the program's.

In a checkout a program may import the rooms under both names. Then each has custom operators of its own, because a
second operator of the same name would free the first, and PyTorch would crash in its next call.
"""

import ast
import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

ROOMS = ("common", "kernels", "data", "runtime", "model")
HERE = Path(__file__).parent
ROOT = HERE if (HERE / "kernels").exists() else HERE.parent  # an installed package holds the rooms; a checkout does not


def is_room(module: str) -> bool:
    return module.partition(".")[0] in ROOMS


class RoomFinder(MetaPathFinder):
    """Finds hotswap.ROOM, and the modules in it."""

    def find_spec(self, name, path, target=None):
        package, _, module = name.partition(".")
        if package != __package__ or not is_room(module):
            return None
        spec = PathFinder.find_spec(name, path if "." in module else [str(ROOT)])
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = RoomLoader(name, spec.loader.path)
        return spec


class RoomLoader(SourceFileLoader):
    """Compiles a file of a room with its imports of rooms and its operators renamed. Line numbers stay."""

    def get_code(self, name):  # never from __pycache__: its files are for the room's own name, with other imports
        path = self.get_filename(name)
        tree = ast.parse(self.get_data(path), path)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and is_room(node.module):
                node.module = f"{__package__}.{node.module}"
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = re.sub("^hotswap::", "hotswap_package::", node.value)
        return compile(tree, path, "exec", dont_inherit=True)


sys.meta_path.insert(0, RoomFinder())
