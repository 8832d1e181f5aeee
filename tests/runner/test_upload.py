"""Uploads to a CUDA device: the extension compiles; what arrives is looked at before anything relies on it."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from headrace.runner.kernels import upload
from headrace.runner.kernels.native_extension import NATIVE, ExtensionError
from headrace.runner.kernels.upload import MOST_BYTES, Uploads


class Native:
    """Stands in for the extension: ``send`` gives what it is told to, ``off`` by one."""

    def __init__(self, off: int = 0) -> None:
        self.off = off
        self.sent = 0

    def Outbox(self, nbytes: int) -> int:
        return nbytes

    def send(self, outbox: int, to: mx.array, data: bytes) -> mx.array:
        assert to.nbytes == len(data) <= outbox
        self.sent += 1
        return mx.array(np.frombuffer(data, np.uint32).reshape(to.shape)) + self.off


def on_cuda(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    monkeypatch.setattr(upload.mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(upload.mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(upload, "load", load)


def test_what_is_sent_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    native = Native()
    on_cuda(monkeypatch, lambda *_args, **_options: native)
    uploads = Uploads.checked()
    assert uploads is not None and native.sent == 40
    words = np.arange(24, dtype=np.uint32).reshape(3, 8)
    assert np.array_equal(np.array(uploads(words)), words)
    large = np.zeros((MOST_BYTES // 32 + 1, 8), np.uint32)
    assert uploads(large).shape == large.shape and native.sent == 41


def test_what_arrives_otherwise_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "headrace.runner")
    on_cuda(monkeypatch, lambda *_args, **_options: Native(off=1))
    assert Uploads.checked() is None and "other values" in caplog.text


def test_without_the_extension_there_are_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_args: Any, **_options: Any) -> Any:
        raise ExtensionError("g++ is missing")

    caplog.set_level(logging.WARNING, "headrace.runner")
    on_cuda(monkeypatch, missing)
    assert Uploads.checked() is None and "g++ is missing" in caplog.text


def test_without_cuda_there_are_none() -> None:
    if mx.default_device() == mx.cpu:
        assert Uploads.checked() is None


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("source", ["upload.cpp", "step_graph.cpp"])
def test_the_sources_are_sound_without_cuda_s_toolkit(source: str) -> None:
    spec = importlib.util.find_spec("nanobind")
    headers = Path(sysconfig.get_paths()["include"])
    if spec is None or spec.origin is None or not (headers / "Python.h").exists():
        pytest.skip("needs nanobind and Python's headers")
    folders = [NATIVE / "cuda_names", Path(mx.__file__).parent / "include", headers]
    folders += [Path(spec.origin).parent / name for name in ("include", "ext/robin_map/include")]
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Werror", "-DNB_DOMAIN=mlx"]
    command += [*(f"-isystem{folder}" for folder in folders), str(NATIVE / source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
