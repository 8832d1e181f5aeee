"""What several test folders share. Imported by ``tests/conftest.py`` before anything imports MLX."""

import os
import tempfile

from headrace.files import cache_folder
from headrace.runner.cpu import blas


def take_own_temporary_folder(run: str) -> None:
    """MLX compiles kernels into a folder below the system's temporary one, without a lock: each of the test runs
    that go side by side has one of its own, the same every time."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(cache_folder(f"test-run-{run}"))


if "PYTEST_XDIST_WORKER" in os.environ:
    take_own_temporary_folder(os.environ["PYTEST_XDIST_WORKER"])
# Tests compute with the BLAS that workers compute with; MLX's own takes several times as long on Linux.
blas.prepare()
