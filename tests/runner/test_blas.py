"""Choosing, preparing and loading a BLAS. Loading happens in children: it cannot be undone in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.runner.cpu import blas, blas_candidates
from headrace.runner.cpu.blas import Measured
from headrace.runner.cpu.blas_candidates import Candidate, candidates

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has a fast BLAS of its own")


def in_child(program: str, cache: Path, **environment: str) -> dict[str, object]:
    """Run a program that prints one JSON object last; with a cache folder of its own."""
    child = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "HEADRACE_CACHE": str(cache), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    result = json.loads(child.stdout.splitlines()[-1])
    assert isinstance(result, dict)
    return result


PRODUCT = """
import json
from dataclasses import asdict
from headrace.runner.cpu.blas import prepare
choice = prepare()
import mlx.core as mx
mx.set_default_device(mx.cpu)
x = mx.arange(40 * 70).reshape(40, 70) % 7 - 3
w = mx.arange(90 * 70).reshape(90, 70) % 5 - 2
got = x.astype(mx.float32) @ w.astype(mx.float32).T
want = (x[:, None, :] * w[None, :, :]).sum(axis=-1)
print(json.dumps(asdict(choice) | {"equal": bool(mx.all(got == want).item())}))
"""


@pytest.mark.slow
def test_mlx_computes_with_the_chosen_library(tmp_path: Path) -> None:
    first = in_child(PRODUCT, tmp_path)
    assert first["equal"]
    assert first["path"] and Path(str(first["path"])).exists()
    assert isinstance(first["gflops"], float) and first["gflops"] > 0
    assert in_child(PRODUCT, tmp_path) == first  # figures and copy come from the cache now


@pytest.mark.slow
def test_threads_follow_affinity(tmp_path: Path) -> None:
    program = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" + PRODUCT
    assert in_child(program, tmp_path)["threads"] == 1


@pytest.mark.slow
def test_threads_that_the_user_set(tmp_path: Path) -> None:
    assert in_child(PRODUCT, tmp_path, OPENBLAS_NUM_THREADS="3")["threads"] == 3


@pytest.mark.slow
def test_too_late_is_said(tmp_path: Path) -> None:
    program = (
        "import json, mlx.core\nfrom dataclasses import asdict\nfrom headrace.runner.cpu.blas import prepare\n"
        "print(json.dumps(asdict(prepare())))"
    )
    choice = in_child(program, tmp_path)
    assert choice["path"] is None
    assert "before" in str(choice["note"])


@pytest.mark.slow
def test_unusable_cache_folder_is_no_reason_not_to_start(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    result = in_child(PRODUCT, shared)
    assert result["equal"]
    assert not list(shared.iterdir())


def test_copy_has_plain_names_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    problems: list[str] = []
    found = [one for one in candidates(problems) if "scipy" in one.name and one.kernel is None]
    assert (len(found), problems) == (1, [])
    copy = Path(found[0].path)
    made = copy.stat().st_mtime_ns
    assert [one for one in candidates(problems) if "scipy" in one.name and one.kernel is None] == found
    assert copy.stat().st_mtime_ns == made
    assert not list(tmp_path.rglob(".*.so.*"))  # nothing half made stays behind


def test_missing_patchelf_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(blas_candidates.shutil, "which", lambda *_, **__: None)
    problems: list[str] = []
    assert not any("scipy" in one.name for one in candidates(problems))
    assert "patchelf is missing" in problems[0]
    assert not list(tmp_path.rglob("*.so"))


def test_kernel_is_built_once_and_stands_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    found = candidates([])
    plain = [one for one in found if one.kernel is None]
    assert [one.path for one in found if one.kernel] == [one.path for one in plain]
    kernel = Path(next(one.kernel for one in found if one.kernel))
    built = kernel.stat().st_mtime_ns
    assert candidates([]) == found
    assert kernel.stat().st_mtime_ns == built


def test_compiler_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho unknown option >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    problems: list[str] = []
    assert all(one.kernel is None for one in candidates(problems))
    assert problems == ["native/sgemm.cpp could not be built: unknown option"]


def test_a_library_that_does_not_load_is_left_out(tmp_path: Path) -> None:
    broken = tmp_path / "libbroken.so"
    broken.write_bytes(b"not a library")
    result = blas._probe(Candidate("Broken", str(broken)), 1)
    assert result == "Broken does not run on this processor"


def test_a_library_that_computes_wrong_is_left_out(tmp_path: Path) -> None:
    source, library = tmp_path / "wrong.c", tmp_path / "libwrong.so"
    source.write_text("void cblas_sgemm(void) {}\n")
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    assert blas._probe(Candidate("Wrong", str(library)), 1) == "Wrong computes wrong products here"


def test_the_kernel_comes_first_then_the_faster_library() -> None:
    measured = [
        Measured("a", "a", None, 64, 1.0, 9.0),
        Measured("b", "b", "kernel", 64, 3.0, 2.0),
        Measured("c", "c", "kernel", 64, 2.0, 3.0),
    ]
    assert [one.name for one in sorted(measured, key=lambda one: one.rank)] == ["c", "b", "a"]


def test_figures_are_measured_again_when_a_library_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    library = tmp_path / "lib.so"
    library.write_bytes(b"1")
    candidate = Candidate("Some", str(library))
    probed: list[Candidate] = []

    def probe(one: Candidate, threads: int) -> Measured:
        probed.append(one)
        return Measured(one.name, one.path, None, 64, 1.0, 2.0)

    monkeypatch.setattr(blas, "candidates", lambda problems: [candidate])
    monkeypatch.setattr(blas, "_probe", probe)
    assert blas._measured(2, refresh=False) == blas._measured(2, refresh=False)
    assert len(probed) == 1
    blas._measured(1, refresh=False)
    assert len(probed) == 2
    library.write_bytes(b"22")
    blas._measured(1, refresh=False)
    assert len(probed) == 3
    blas._measured(1, refresh=True)
    assert len(probed) == 4
