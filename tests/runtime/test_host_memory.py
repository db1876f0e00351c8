"""How much host memory a process may use. The tests replace the files that a machine and a container report it in."""

import os

import pytest

from runtime import host_memory

GIB = 2**30
MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
UNLIMITED = 9223372036854771712  # of version 1


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Write files of a machine with 16 GiB free: files({"proc/self/cgroup": "0::/"})."""
    monkeypatch.setattr(host_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "cgroup")

    def write(contents):
        for name, text in {"proc/meminfo": f"MemAvailable: {16 * 2**20} kB\n", **contents}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")

    return write


def version_2(folder, limit, use, cached=0):
    stat = f"anon 5\nfile 7\nactive_file 9\ninactive_file {cached}"
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": use, f"{folder}/memory.stat": stat}


def version_1(folder, limit, use, cached=0):
    stat = f"inactive_file 3\ntotal_cache 7\ntotal_active_file 9\ntotal_inactive_file {cached}"
    use_file = f"{folder}/memory.usage_in_bytes"
    return {f"{folder}/memory.limit_in_bytes": limit, use_file: use, f"{folder}/memory.stat": stat}


SLURM = "proc/self/cgroup", "0::/system.slice/job_7/step_0"
CASES = {
    "no groups": ({}, None, 16 * GIB),
    "version 2, no limit": (dict([SLURM]) | version_2("cgroup/system.slice/job_7/step_0", "max", 5), None, 16 * GIB),
    "version 2, in a container": (
        {"proc/self/cgroup": "0::/"} | version_2("cgroup", GIB // 2, GIB // 4, GIB // 8),
        GIB // 2,
        GIB // 4 + GIB // 8,
    ),
    "version 2, the job has the limit and its step none": (
        dict([SLURM])
        | version_2("cgroup/system.slice/job_7/step_0", "max", 5)
        | version_2("cgroup/system.slice/job_7", GIB // 2, GIB // 8),
        GIB // 2,
        GIB // 2 - GIB // 8,
    ),
    "version 2, two limits": (
        dict([SLURM])
        | version_2("cgroup/system.slice/job_7/step_0", GIB // 4, 0)
        | version_2("cgroup/system.slice/job_7", GIB // 2, GIB // 2 - 5),
        GIB // 4,
        5,
    ),
    "version 1": (
        {"proc/self/cgroup": "9:cpu,cpuacct:/a\n4:memory:/docker/b\n0::/"}
        | version_1("cgroup/memory/docker/b", GIB // 2, GIB // 4, GIB // 8)
        | version_1("cgroup/memory", UNLIMITED, GIB),
        GIB // 2,
        GIB // 4 + GIB // 8,
    ),
    "version 1, in a container, which sees the name on the host": (
        {"proc/self/cgroup": "4:memory:/docker/b"} | version_1("cgroup/memory", GIB // 2, GIB // 4),
        GIB // 2,
        GIB // 4,
    ),
    "a sandbox without memory.stat": (
        {"proc/self/cgroup": "0::/", "cgroup/memory.max": GIB // 2, "cgroup/memory.current": 5},
        GIB // 2,
        GIB // 2 - 5,
    ),
}


@pytest.mark.parametrize(("contents", "total", "free"), CASES.values(), ids=CASES)
def test_a_container_limits_the_memory(files, contents, total, free):
    files(contents)
    assert host_memory.total_memory() == (total or MACHINE)
    assert host_memory.free_memory() == free


def test_this_machine_has_memory():
    assert 0 < host_memory.free_memory() <= host_memory.total_memory() <= MACHINE
