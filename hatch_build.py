"""Put the rooms inside the package `hotswap` when pip builds it; an editable install leaves them in the checkout."""

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PARTS = ("configs", "data", "kernels", "model", "runtime", "files.py", "terminal.py")


class CustomBuildHook(BuildHookInterface):
    """hatchling calls initialize() before it writes a wheel. force-include in pyproject.toml is for both kinds."""

    def initialize(self, version, build_data):
        if version == "standard":
            build_data["force_include"] |= {part: f"hotswap/{part}" for part in PARTS}
