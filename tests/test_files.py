"""The cache folder and files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.errors import StartupError
from headrace.files import appearing, cache_folder, sha256_of


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder("a") == tmp_path / ".cache/headrace/a"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("a") == tmp_path / "xdg/headrace/a"
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "own"))
    assert cache_folder("a") == tmp_path / "own/a"
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in (cache_folder(), cache_folder("a")))


def test_a_folder_others_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(StartupError, match="writable by others"):
        cache_folder("a")


def test_a_file_in_the_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="cannot be used"):
        cache_folder()


def test_appearing(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with appearing(target) as temporary:
        temporary.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    with pytest.raises(ValueError, match="half"), appearing(target) as temporary:
        temporary.write_text("broken")
        raise ValueError("half way")
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]
    assert sha256_of(target) == "11507a0e2f5e69d5dfa40a62a1bd7b6ee57e6bcd85c67c9b8431b36fff21c437"
