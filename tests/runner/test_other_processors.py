"""Products over narrow weights as they are built for other processors, against sums in double.

``narrow_products.cpp`` is compiled with each one's instructions and run here, or under qemu. What cannot be
compiled or run on this machine is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.core.machine import cpu_features
from headrace.runner.kernels import native_extension

HERE = Path(__file__).parent
FEATURES = set(cpu_features().split())

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="extensions of the CPU are built on Linux"),
]

# g++'s options -> features that the processor must list to run what they make
X86 = {
    "-march=x86-64": {"sse2"},
    "-march=ivybridge": {"avx", "f16c"},
    "-march=haswell": {"avx2", "fma", "f16c"},
    "-mavx2": {"avx2"},
    "-march=haswell -mavxvnni": {"avx2", "avx_vnni"},
    "-march=skylake-avx512": {"avx512vl", "avx512bw"},
    "-march=icelake-server": {"avx512_vnni", "avx512_bitalg"},
}
ARM = ("-march=armv8-a", "-march=armv8.2-a+dotprod", "-march=armv8.6-a")


def compiled(compiler: str, options: str, folder: Path) -> Path:
    program = folder / "narrow_products"
    flags = ["-std=c++20", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Werror"]
    command = [compiler, *flags, "-static", *options.split(), f"-I{native_extension.NATIVE}"]
    subprocess.run([*command, str(HERE / "narrow_products.cpp"), "-o", str(program)], check=True, timeout=120)
    return program


def results(*command: str | Path) -> int:
    """How many were compared, none of them wrong."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.split()[0])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("options", X86)
def test_on_x86(options: str, tmp_path: Path) -> None:
    if os.uname().machine != "x86_64" or shutil.which("g++") is None:
        pytest.skip("needs g++ on x86-64")
    if lacking := X86[options] - FEATURES:
        pytest.skip(f"this processor has no {', '.join(sorted(lacking))}")
    assert results(compiled("g++", options, tmp_path)) > 1_000_000


@pytest.mark.timeout(240)
@pytest.mark.parametrize("options", ARM)
def test_on_aarch64(options: str, tmp_path: Path) -> None:
    compiler, qemu = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or qemu is None:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user)")
    assert results(qemu, "-cpu", "max", compiled(compiler, options, tmp_path)) > 1_000_000
