"""What this machine offers a process: memory and cores, as a container or an affinity mask bounds them.

Linux: /proc/meminfo, the limits of every cgroup above this process (version 2 and 1), the affinity mask and
the CPU topology. macOS: sysctl and vm_stat. Nothing is cached; nothing here knows an accelerator. The Linux
readers take the root of the file system, so that tests can show them other machines.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# cgroup 1 writes "no limit" as the largest multiple of a page that fits 63 bits; anything above this means it.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class Memory:
    """Main memory in bytes.

    Attributes:
        physical_bytes: what is built in.
        cgroup_limit_bytes: lowest limit of the cgroups this process is in, None without one.
        available_bytes: what could be allocated now without swapping and without crossing that limit;
            reclaimable file cache counts as available.
    """

    physical_bytes: int
    cgroup_limit_bytes: int | None
    available_bytes: int

    @property
    def total_bytes(self) -> int:
        """What this process may use at most: physical memory or the cgroup's limit, the lower."""
        if self.cgroup_limit_bytes is None:
            return self.physical_bytes
        return min(self.physical_bytes, self.cgroup_limit_bytes)


def read_memory() -> Memory:
    """Main memory as of now."""
    return _darwin_memory() if sys.platform == "darwin" else linux_memory(_ROOT)


def process_bytes() -> int:
    """Physical memory of this process: resident on Linux, the footprint on macOS (which counts Metal's buffers,
    not run there yet); 0 where it is not known."""
    if sys.platform == "darwin":
        return _darwin_footprint()
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


def usable_cores() -> int:
    """Physical cores that this process may keep busy: affinity mask and cgroup quota, hyperthreads not counted."""
    if sys.platform == "darwin":
        return _sysctl("hw.perflevel0.physicalcpu") or _sysctl("hw.physicalcpu") or os.cpu_count() or 1
    return linux_cores(os.sched_getaffinity(0), _ROOT)


def cpu_model() -> str:
    """The processor's name as the system gives it, "" when it gives none."""
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string").strip()
    match = re.search(r"^model name\s*:\s*(.+)$", _text(_ROOT / "proc/cpuinfo"), re.MULTILINE)
    return match.group(1).strip() if match else ""


def cpu_features() -> str:
    """The instruction sets of the first processor, as /proc/cpuinfo words them; "" on macOS."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _text(_ROOT / "proc/cpuinfo"), re.MULTILINE)
    return match.group(1).strip() if match else ""


# -- Linux ---------------------------------------------------------------------------------------------


def linux_memory(root: Path) -> Memory:
    """Memory from /proc and the cgroup file systems below ``root``."""
    info = _fields(root / "proc/meminfo")
    physical = info["MemTotal"] * 1024
    available = info.get("MemAvailable", info["MemFree"]) * 1024
    limit: int | None = None
    for folder in _cgroup_folders(root, "memory"):
        bound = _first_number(folder / "memory.max", folder / "memory.limit_in_bytes")
        if bound is None or bound >= _UNLIMITED_BYTES:
            continue
        limit = bound if limit is None else min(limit, bound)
        used = _first_number(folder / "memory.current", folder / "memory.usage_in_bytes") or 0
        stat = _fields(folder / "memory.stat")
        reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        available = min(available, max(0, bound - used + reclaimable))
    return Memory(physical, limit, available)


def linux_cores(affinity: set[int], root: Path) -> int:
    """Distinct physical cores among the CPUs of ``affinity``, bounded by the lowest cgroup CPU quota."""
    topology = root / "sys/devices/system/cpu"
    siblings = {cpu: _text(topology / f"cpu{cpu}/topology/thread_siblings_list").strip() for cpu in affinity}
    cores = len({name or str(cpu) for cpu, name in siblings.items()})
    for folder in _cgroup_folders(root, "cpu"):
        quota, period = _cpu_quota(folder)
        if quota > 0 and period > 0:
            cores = min(cores, math.ceil(quota / period))
    return max(1, cores)


def _cpu_quota(folder: Path) -> tuple[int, int]:
    """(quota, period) in microseconds of CPU time; quota 0 when there is no bound."""
    words = _text(folder / "cpu.max").split()
    if len(words) == 2:
        return (0 if words[0] == "max" else int(words[0])), int(words[1])
    quota = _first_number(folder / "cpu.cfs_quota_us")  # -1: no bound, which the pattern does not match
    return quota or 0, _first_number(folder / "cpu.cfs_period_us") or 0


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and all its parents, for version 2 and for one version 1 controller.

    In a container the path in /proc/self/cgroup may be the host's; then only the mount's top, which is the
    container's own cgroup, exists.
    """
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = mount
        elif controller in controllers.split(","):
            base = mount / controller
        else:
            continue
        folder = base / path.lstrip("/")
        while folder != base:
            if folder.is_dir():
                yield folder
            folder = folder.parent
        yield base


def _fields(file: Path) -> dict[str, int]:
    """Lines of "name 123" or "name: 123 kB"."""
    return {name: int(number) for name, number in re.findall(r"^(\w+):?\s+(\d+)", _text(file), re.MULTILINE)}


def _first_number(*files: Path) -> int | None:
    """The number that the first of these files that exists holds; None for none, or for "max"."""
    for file in files:
        text = _text(file).strip()
        if text:
            return int(text) if text.isdigit() else None
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


# -- macOS (not run on macOS yet) ----------------------------------------------------------------------


def _darwin_memory() -> Memory:
    physical = _sysctl("hw.memsize") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Memory(physical, None, vm_stat_available(_output("vm_stat")) or physical)


def _darwin_footprint() -> int:
    """``ri_phys_footprint`` of proc_pid_rusage's first flavor: a UUID of 16 bytes, then 64-bit numbers."""
    usage = ctypes.create_string_buffer(256)
    try:
        if ctypes.CDLL("/usr/lib/libproc.dylib").proc_pid_rusage(os.getpid(), 0, usage):
            return 0
    except (OSError, AttributeError):
        return 0
    return int.from_bytes(usage.raw[72:80], "little")


def vm_stat_available(report: str) -> int:
    """Bytes that macOS could hand out: free, inactive, speculative and purgeable pages of a vm_stat report."""
    page = re.search(r"page size of (\d+) bytes", report)
    counts = dict(re.findall(r"^Pages (free|inactive|speculative|purgeable):\s+(\d+)\.", report, re.MULTILINE))
    return sum(map(int, counts.values())) * int(page.group(1)) if page else 0


def _sysctl(name: str) -> int:
    text = _output("sysctl", "-n", name).strip()
    return int(text) if text.isdigit() else 0


def _output(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
