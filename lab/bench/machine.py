"""Describe this machine, in lines for the terminal."""

import os
import platform
import re
import textwrap
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from common.files import read_text
from kernels.fastest import FILL_COMMAND
from kernels.registry import KernelError, cpp_compiler
from kernels.tuned import is_choice, read_table, tables_in_use
from runtime.device import GIB
from runtime.host_memory import total_memory

ROOT = Path(__file__).parents[2]
PACKAGES = ("flash-attn-4", "flash-attn", "liger-kernel", "quack-kernels", "wandb", "datasets", "tiktoken")


def describe_machine(device: torch.device, env: dict) -> Iterator[str]:
    """Yield lines about the GPU, the host, versions, packages, the compiler, and tables."""
    versions = {"python": env["python"], "torch": env["torch"], "cuda": torch.version.cuda}
    versions |= {"cudnn": torch.backends.cudnn.version(), "triton": env["triton"]}
    yield f"gpu      {describe_gpu(device, env['driver'])}"
    yield f"host     {platform.system()} {platform.machine()}, {os.cpu_count()} cores, {total_memory() / GIB:.1f} GiB"
    yield f"versions {', '.join(f'{name} {number or None}' for name, number in versions.items())}"
    yield f"tested   {compare_versions(env, read_tested_versions())}"
    yield f"packages {describe_packages()}"
    yield f"compiler {cpp_compiler() or 'none, but torch.compile needs one: apt install g++'}"
    yield from describe_tables(device)


def read_tested_versions() -> dict[str, list[str]]:
    """Return {"torch": ["2.11", ...]} of pyproject.toml: the versions with which every test passed, in order."""
    return tomllib.loads(read_text(ROOT / "pyproject.toml"))["tool"]["hotswap"]["tested"]


def compare_versions(env: dict, tested: dict[str, list[str]]) -> str:
    """Return "yes" with the tested versions, or which of `env` is not among them. Patch releases do not count."""
    untested = []
    for name, versions in tested.items():
        if env[name] and ".".join(re.findall(r"\d+", env[name])[:2]) not in versions:
            untested.append(f"{name} {env[name]} is not; tested are {', '.join(versions)}")
    return "; ".join(untested) or f"yes: {', '.join(f'{name} {env[name]}' for name in tested if env[name])}"


def describe_gpu(device: torch.device, driver: str | None) -> str:
    """Return the GPU, or why PyTorch has none."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return (
            f"{properties.name}, {properties.total_memory / GIB:.1f} GiB, compute capability "
            f"{properties.major}.{properties.minor}, driver {driver}; GPUs here: {torch.cuda.device_count()}"
        )
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as reason:  # built without CUDA; no driver, or a driver that is too old
        return f"none: {textwrap.shorten(str(reason), 200)}"
    return f"{torch.cuda.get_device_name()}, not used because of device=cpu"


def describe_packages() -> str:
    """Return the installed ones of PACKAGES with their versions, and the absent ones."""
    installed, absent = [], []
    for name in PACKAGES:
        try:
            installed.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            absent.append(name)
    return f"{', '.join(installed) or 'none'}; absent: {', '.join(absent) or 'none'}"


def describe_tables(device: torch.device) -> Iterator[str]:
    """Yield a line with the number of tuned launch parameters, and one with the number of choices of `auto`."""
    try:
        tables = {path: read_table(path) for path in tables_in_use(device)}
    except KernelError as broken:
        yield f"tuned    {broken}"
        return
    tuned, auto = {}, {}  # table -> number of entries
    for path, entries in tables.items():
        auto[path] = sum(map(is_choice, entries))
        tuned[path] = len(entries) - auto[path]
    for label, what, counts, command in (
        ("tuned", "launch parameters", tuned, "python -m scripts.tune"),
        ("auto", "choices of kernels=auto and attn=auto", auto, FILL_COMMAND),
    ):
        places = ", ".join(f"{count} in {path}" for path, count in counts.items() if count)
        yield f"{label:<8} {what}: {places or f'none on this device: {command}'}"
