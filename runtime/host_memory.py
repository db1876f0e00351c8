"""The memory of the host that this process may use: the machine's, or less if a container or SLURM limits it.

Linux limits a container with a control group, of version 2 (docs.kernel.org/admin-guide/cgroup-v2.html) or 1. A group's
limit holds for all groups below it. A container may see its group as the root, or may only know the name that the group
has on the host, where it finds no files. So we read the files in every folder from this name up to the root.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from common.files import read_text

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# the file of the limit, the file of the use, and the key of cached files, which the system drops when memory runs short
VERSION_2 = "memory.max", "memory.current", "inactive_file"
VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def total_memory() -> int:
    """Return the bytes of memory that this process may use in all."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for limit, _ in group_limits())])


def free_memory() -> int:
    """Return the bytes of memory that are free for this process. It needs Linux."""
    machine = 1024 * int(re.search(r"MemAvailable:\s+(\d+) kB", read_text(PROC / "meminfo"))[1])
    return min([machine, *(free for _, free in group_limits())])


def group_limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, free bytes below it) of each control group with a limit that this process is in."""
    for line in read(PROC / "self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (CGROUPS / "memory", VERSION_1) if controllers else (CGROUPS, VERSION_2)
        folder = root / name.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(root) and (found := read_group(group, *files)):
                yield found


def read_group(group: Path, limit_file: str, use_file: str, cache: str) -> tuple[int, int] | None:
    """Return (limit, free bytes below it) of a control group; None if it has no limit or no files."""
    limit, use = read(group / limit_file), read(group / use_file)
    if not (limit.isdigit() and use.isdigit()):  # the limit may be the word "max"
        return None
    cached = re.search(rf"^{cache} (\d+)$", read(group / "memory.stat"), re.MULTILINE)  # a sandbox may lack this file
    return int(limit), int(limit) - int(use) + (int(cached[1]) if cached else 0)


def read(path: Path) -> str:
    try:
        return read_text(path).strip()
    except OSError:
        return ""
