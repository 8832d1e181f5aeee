from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from local_engine import Build, LocalEngine


@pytest.fixture(scope="module")
def local_engine(scripted_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Build:
    """``local_engine(variant, block_size=16, …)``: fields of ``EngineConfig``."""

    def build(variant: str, **config: object) -> LocalEngine:
        return LocalEngine(scripted_folder(variant), tmp_path_factory.mktemp("record") / "record", **config)

    return build
