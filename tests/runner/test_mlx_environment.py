"""What MLX finds in the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os
from headrace.runner import mlx_environment
mlx_environment.prepare()
import mlx.core as mx
mx.eval(mx.compile(lambda x: mx.exp(x) * 2 + 1)(mx.ones(10)))  # compiled in the temporary folder
print(os.environ.get("TMPDIR"))
"""


def printed(program: str, environment: dict[str, str]) -> str:
    child = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TMPDIR", "TEMP"])
def test_a_temporary_folder_that_is_none(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    clean = {key: value for key, value in os.environ.items() if key not in ("TMPDIR", "TMP", "TEMP", "TEMPDIR")}
    usual = printed("import tempfile; print(tempfile.gettempdir())", clean)  # not what this process has found
    wanted = {tmp_path / "nope": usual, tmp_path / "file": usual}
    if os.path.isdir("/proc"):  # where nobody makes folders, root neither
        wanted[Path("/proc")] = usual
    wanted[tmp_path] = str(tmp_path) if name == "TMPDIR" else "None"
    for folder, used in wanted.items():
        assert Path(printed(PROGRAM, {**clean, name: str(folder)})) == Path(used)
