"""Fixtures that every test folder may use. Keep this short."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import scripted
from support.narrow import products  # noqa: F401
from support.reference import greedy_reference  # noqa: F401
from support.server import serve, server_room, start_server  # noqa: F401

from headrace.files import cache_folder


@pytest.fixture(scope="session")
def scripted_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``scripted_folder("plain")``: folder of that variant of the scripted checkpoint, built once. Read only."""
    root = tmp_path_factory.mktemp("scripted")

    def folder(variant: str) -> Path:
        path = root / variant
        return path if path.exists() else scripted.build(path, scripted.VARIANTS[variant])

    return folder


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, empty but for native operations: building them takes half a minute."""
    folder = tmp_path / "own-cache"
    folder.mkdir(mode=0o700)
    (folder / "extensions").symlink_to(cache_folder("extensions"))
    monkeypatch.setenv("HEADRACE_CACHE", str(folder))
    return folder
