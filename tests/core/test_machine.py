"""Memory and cores as read from file trees of other machines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.core.machine import linux_cores, linux_memory, read_memory, usable_cores, vm_stat_available

GIB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> Path:
    """A file tree with 64 GiB of memory, 60 GiB of it available, and these files."""
    meminfo = f"MemTotal: {64 << 20} kB\nMemFree: {20 << 20} kB\nMemAvailable: {60 << 20} kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_plain_machine(tmp_path: Path) -> None:
    memory = linux_memory(machine(tmp_path, {"proc/self/cgroup": "0::/\n"}))
    assert (memory.total_bytes, memory.cgroup_limit_bytes, memory.available_bytes) == (64 * GIB, None, 60 * GIB)


def test_kernel_without_memavailable(tmp_path: Path) -> None:
    memory = linux_memory(machine(tmp_path, {"proc/meminfo": "MemTotal: 2048 kB\nMemFree: 1024 kB\n"}))
    assert memory.available_bytes == 1 << 20


def test_cgroup2_lowest_limit_of_all_parents(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/unit\n",
            "sys/fs/cgroup/slice/memory.max": str(8 * GIB),
            "sys/fs/cgroup/slice/memory.current": str(5 * GIB),
            "sys/fs/cgroup/slice/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
            "sys/fs/cgroup/slice/unit/memory.max": "max\n",
        },
    )
    memory = linux_memory(root)
    assert memory.cgroup_limit_bytes == memory.total_bytes == 8 * GIB
    assert memory.available_bytes == 5 * GIB  # 8 - 5 used + 2 of file cache


def test_container_sees_the_hosts_path(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/docker/abc\n",
            "sys/fs/cgroup/memory.max": str(4 * GIB),
            "sys/fs/cgroup/x/y": "",
        },
    )
    assert linux_memory(root).total_bytes == 4 * GIB


def test_cgroup1_with_and_without_limit(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(6 * GIB),
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(7 * GIB),
            "sys/fs/cgroup/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 2\n",
        },
    )
    memory = linux_memory(root)
    assert (memory.cgroup_limit_bytes, memory.available_bytes) == (6 * GIB, 0)


@pytest.mark.parametrize(
    ("affinity", "files", "cores"),
    [
        ({0, 1, 2, 3}, {}, 2),  # two hyperthreads a core
        ({0, 1}, {}, 1),
        ({1, 2}, {}, 2),
        ({0, 1, 2, 3, 9}, {}, 3),  # no topology known for CPU 9
        ({0, 2}, {"sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        ({0, 2}, {"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({0, 2}, {"sys/fs/cgroup/cpu.max": "max 100000"}, 2),
        ({0, 2}, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 2),
        (
            {0, 2},
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "99999", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            1,
        ),
    ],
)
def test_cores(tmp_path: Path, affinity: set[int], files: dict[str, str], cores: int) -> None:
    topology = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": "0-1\n" if cpu < 2 else "2-3\n"
        for cpu in range(4)
    }
    root = machine(tmp_path, {"proc/self/cgroup": "2:cpuacct,cpu:/\n0::/\n", **topology, **files})
    assert linux_cores(affinity, root) == cores


def test_vm_stat() -> None:
    report = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                              100.\nPages active:                           900.\n"
        "Pages inactive:                           20.\nPages speculative:                        3.\n"
        "Pages wired down:                        500.\nPages purgeable:                          4.\n"
    )
    assert vm_stat_available(report) == 127 * 16384
    assert vm_stat_available("") == 0


def test_this_machine() -> None:
    memory = read_memory()
    assert 0 < memory.available_bytes <= memory.physical_bytes
    assert memory.total_bytes <= memory.physical_bytes
    assert usable_cores() >= 1 or sys.platform not in ("linux", "darwin")
