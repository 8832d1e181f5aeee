"""Extensions are built once, whoever asks for them at the same time, and a fault is told where one is loaded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.files import cache_folder
from headrace.runner.kernels import native_extension
from headrace.runner.kernels.native_extension import Extension, ExtensionError, build_ahead, load


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Extension:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native_extension, "NATIVE", tmp_path)
    (tmp_path / "one.cpp").write_text("int one;")
    return Extension("one", ("one.cpp",))


def test_who_comes_while_it_is_built_waits_for_it(extension: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, built = threading.Event(), threading.Event(), []

    def compile_slowly(target: Path, units: Sequence[Path], flags: Sequence[str]) -> None:
        built.append([unit.name for unit in units])
        begun.set()
        assert may_end.wait(30)
        target.write_bytes(b"library")

    monkeypatch.setattr(native_extension, "_compile", compile_slowly)
    build_ahead([extension])
    assert begun.wait(30)
    found: list[Path] = []
    waiting = threading.Thread(target=lambda: found.append(native_extension._built(extension)))
    waiting.start()
    may_end.set()
    waiting.join(30)
    assert built == [["one.cpp"]] and found[0].read_bytes() == b"library"
    assert native_extension._built(extension) == found[0] and len(built) == 1


def test_what_a_killed_build_left_is_cleared_away(extension: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_extension, "_compile", lambda target, units, flags: target.write_bytes(b"library"))
    folder = cache_folder("extensions")
    for name in (".one-0123.so.abc", ".another-0123.so.abc"):
        (folder / name).touch()
    target = native_extension._built(extension)
    assert {path.name for path in folder.iterdir()} == {target.name, "one.lock", ".another-0123.so.abc"}


def test_a_fault_on_the_way_is_told_at_load(extension: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(target: Path, units: Sequence[Path], flags: Sequence[str]) -> None:
        raise ExtensionError("g++ is missing")

    monkeypatch.setattr(native_extension, "_compile", missing)
    before = threading.active_count()
    build_ahead([extension])
    for thread in threading.enumerate():
        if thread.name == "build one":
            thread.join(30)
    assert threading.active_count() == before
    with pytest.raises(ExtensionError, match=r"g\+\+ is missing"):
        load(extension)


def test_a_build_is_in_the_log(
    extension: Extension, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes long, and a start that says nothing looks like one that hangs."""
    if (lack := native_extension.missing()) is not None:
        pytest.skip(lack)
    monkeypatch.setattr(
        native_extension.subprocess, "run", lambda command, **options: Path(command[-1]).write_bytes(b"library")
    )
    with caplog.at_level("INFO", "headrace.runner"):
        for _ in range(2):
            native_extension._built(extension)
    assert [record.getMessage() for record in caplog.records] == [
        "building one.cpp, once on this machine: half a minute on two cores"
    ]


def test_a_library_depends_on_its_sources_and_flags(extension: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_extension, "_compile", lambda target, units, flags: target.write_bytes(b"library"))
    others = [extension, Extension("one", ("one.cpp",), ("-O1",))]
    found = [native_extension._built(other) for other in others]
    (native_extension.NATIVE / "one.cpp").write_text("int two;")
    found.append(native_extension._built(extension))
    assert len(set(found)) == 3
