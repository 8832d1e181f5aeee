"""``headrace doctor``: what this machine offers, what Headrace uses of it, and what would make it faster."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.cli.flags import OneLineParser
from headrace.core.machine import cpu_model, read_memory, usable_cores
from headrace.errors import StartupError

GIB = 1 << 30
_PINNED = ("mlx", "mlx-lm")
_DEMO_BYTES = 98_362_432


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        label: what was looked at.
        value: what is there.
        advice: what to do about it, "" when nothing.
        ok: False when Headrace cannot serve like this.
    """

    label: str
    value: str
    advice: str = ""
    ok: bool = True


def run(argv: Sequence[str]) -> int:
    """Print the report; 0 when Headrace can serve on this machine, else 1."""
    parser = OneLineParser(prog="headrace doctor", description="Check this machine for serving.")
    parser.parse_args(argv)
    findings = [system(), *mlx_findings(), memory(), compiler(), demo_model()]
    print(render(findings))
    return 0 if all(finding.ok for finding in findings) else 1


def render(findings: Sequence[Finding]) -> str:
    width = max(len(finding.label) for finding in findings)
    lines = [f"{finding.label:<{width}}  {finding.value}" for finding in findings]
    advice = [(finding.advice, finding.ok) for finding in findings if finding.advice]
    for title, fatal in (("to be able to serve:", True), ("to be faster:", False)):
        chosen = [text for text, ok in advice if ok is not fatal]
        if chosen:
            lines += ["", title, *(f"  - {text}" for text in chosen)]
    return "\n".join(lines)


def system() -> Finding:
    parts = [
        f"{platform.system()} {platform.release()} {platform.machine()}",
        f"Python {platform.python_version()}",
    ]
    parts += [cpu_model() or "unknown processor", f"{usable_cores()} usable cores"]
    return Finding("System", ", ".join(parts))


def mlx_findings() -> list[Finding]:
    """MLX's version, device and BLAS; the BLAS goes in place before MLX is imported."""
    from headrace.runner.cpu.blas import prepare

    blas = prepare(refresh=True)
    try:
        import mlx.core
    except ImportError as error:
        advice = "install MLX's build for this machine: pip install 'headrace[cpu]' (or cuda12, cuda13)"
        return [Finding("MLX", f"cannot be imported: {error}", advice, ok=False)]
    device = _device()
    findings = [_versions(), device]
    if mlx.core.default_device() == mlx.core.Device(mlx.core.cpu):
        rate = _product_gflops()
        threads = f", {blas.threads} threads" if blas.threads else ""
        reference = sys.platform == "linux" and blas.path is None
        findings.append(
            Finding("BLAS", f"{blas.name}{threads}: {rate:.0f} GFLOP/s", blas.note if reference else "")
        )
        if blas.note and not reference:
            findings.append(Finding("BLAS note", blas.note))
    return findings


def _versions() -> Finding:
    """Installed versions against the ones this release was written for."""
    wanted = {
        name: version
        for requirement in importlib.metadata.requires("headrace") or []
        if "extra ==" not in requirement
        for name, _, version in [requirement.split(";")[0].strip().partition("==")]
        if name in _PINNED
    }
    installed = {name: importlib.metadata.version(name) for name in wanted}
    value = ", ".join(f"{name} {version}" for name, version in installed.items())
    if installed != wanted:
        pins = " ".join(f"{name}=={version}" for name, version in wanted.items())
        return Finding("MLX", value, f"this release needs other versions: pip install {pins}", ok=False)
    return Finding("MLX", value)


def _device() -> Finding:
    """The device MLX computes on, tried with one small product."""
    import mlx.core

    kind = "CPU"
    if mlx.core.metal.is_available():
        kind = "Metal"
    elif mlx.core.default_device() != mlx.core.Device(mlx.core.cpu):
        kind = "CUDA"
    info = mlx.core.device_info() if kind != "CPU" else {}
    value = kind
    if "device_name" in info:
        value += f" ({info['device_name']})"
    size = info.get("max_recommended_working_set_size") or info.get("total_memory")
    if size:
        value += f", {int(size) / GIB:.1f} GiB for the GPU"
    try:
        ones = mlx.core.ones((8, 8))
        correct = bool(mlx.core.all(ones @ ones == 8).item())
    except Exception as error:  # whatever the device's driver raises: the report goes on
        return Finding(
            "Device", f"{value}: {' '.join(str(error).split())[:200]}", "the device does not work", ok=False
        )
    if not correct:
        return Finding("Device", f"{value}: wrong results", "the device computes wrong results", ok=False)
    advice = ""
    if kind == "CPU" and shutil.which("nvidia-smi"):
        advice = (
            "this machine has an NVIDIA driver but MLX's CPU build: pip install 'headrace[cuda13]' or [cuda12]"
        )
    return Finding("Device", value, advice)


def _product_gflops() -> float:
    """Rate of a float32 product of 512 rows by a 1024 × 1024 matrix, as MLX computes it."""
    import mlx.core

    x, w = mlx.core.ones((512, 1024)), mlx.core.ones((1024, 1024))
    mlx.core.eval(x @ w.T)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        mlx.core.eval(x @ w.T)
        best = min(best, time.perf_counter() - started)
    return 2e-9 * 512 * 1024 * 1024 / best


def memory() -> Finding:
    now = read_memory()
    value = f"{now.total_bytes / GIB:.1f} GiB, {now.available_bytes / GIB:.1f} GiB available"
    if now.cgroup_limit_bytes is not None and now.cgroup_limit_bytes < now.physical_bytes:
        value += f" (limited by a cgroup; the machine has {now.physical_bytes / GIB:.1f} GiB)"
    return Finding("Memory", value)


def compiler() -> Finding:
    """Headrace's own kernels are built with it on Linux, and MLX's fused ones."""
    from headrace.runner.kernels import native_extension

    path = shutil.which("g++") or ("none" if sys.platform == "linux" else "not needed on this system")
    lack = native_extension.missing() if sys.platform == "linux" else None
    if lack is None:
        return Finding("C++ compiler", path)
    return Finding("C++ compiler", path, f"{lack}: with it, kernels of our own make a CPU two to ten times faster")


def demo_model() -> Finding:
    from headrace.cli.demo_model import DEMO_MODEL_NAME, demo_model_path

    try:
        path = demo_model_path()
    except StartupError as error:
        return Finding("Demo model", str(error), "make the cache folder usable", ok=False)
    if path is None:
        return Finding("Demo model", f"{DEMO_MODEL_NAME}: fetched at first use ({_DEMO_BYTES // 10**6} MB)")
    return Finding("Demo model", f"{DEMO_MODEL_NAME}: {path}")
