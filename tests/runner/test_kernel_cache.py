"""Compiled CUDA kernels are kept, found again, and made anew when anything that they depend on has changed."""

from __future__ import annotations

import importlib.util
import logging
import re
import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cuda_forms import all_kernels, blank_kernel, recorded
from tiny_models import tiny_model

from headrace.runner.attention import kernel_check, paged_decode_source
from headrace.runner.attention.dispatch import install
from headrace.runner.attention.kernel_check import choose_kernel
from headrace.runner.attention.paged_decode import CUDA_FLOATS, PagedDecodeKernel
from headrace.runner.attention.rotate_store import RotateAndStore
from headrace.runner.kernels import cache as kernel_cache
from headrace.runner.kernels import language as kernel_language
from headrace.runner.kernels.cache import (
    KernelCache,
    compile_form,
    compile_options,
    device_cache,
    environment_of,
    mlx_hash,
    remove_incomplete,
)
from headrace.runner.kernels.language import CUDA_NAMES, compile_ahead, cuda_kernel
from headrace.runner.kernels.nvrtc import Image, Nvrtc, NvrtcError, include_folders, loaded_library
from headrace.runner.kernels.text import KernelForm, KernelSource
from headrace.runner.kv.pool import LayerShape
from headrace.runner.kv.store import PoolStore
from headrace.runner.products.choice import SmallRowsKernel
from headrace.runner.substitutions.block_check import BlockTools, substitute_decoder_blocks
from headrace.runner.substitutions.fused_linear import fuse_projections
from headrace.runner.substitutions.moe_decode import ExpertsChoice

FORM = KernelForm("custom_kernel_add_float", "the text of MLX", "the text of ours")


class Compiler:
    """Stands in for NVRTC: the code is the text."""

    def __init__(self, fault: str | None = None) -> None:
        self.calls: list[str] = []
        self.fault = fault

    def __call__(self, form: KernelForm) -> Image:
        self.calls.append(form.name)
        if self.fault is not None:
            raise NvrtcError(self.fault)
        return Image(form.own.encode(), f"_Z{form.name}")


def cache_in(folder: Path, compiler: Callable[[KernelForm], Image], environment: str = "here") -> KernelCache:
    return KernelCache(folder, environment, compiler, hashed=lambda text: len(text), workers=4)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def test_a_kernel_is_compiled_once(tmp_path: Path) -> None:
    compiler = Compiler()
    first, second = (cache_in(tmp_path, compiler) for _ in range(2))
    first.ensure(FORM)
    second.ensure(FORM)
    assert compiler.calls == [FORM.name]
    assert (first.compiled, first.kept, second.compiled, second.kept) == (1, 0, 0, 1)
    assert "1 from the cache" in second.note()


def test_files_are_what_mlx_looks_for(tmp_path: Path) -> None:
    """Name, hash in hexadecimal; the lines with a tab are name and symbol, all others are ours."""
    cache_in(tmp_path, Compiler()).ensure(FORM)
    code, names = files(tmp_path)
    assert code.name == f"{FORM.name}_{len(FORM.mlx):x}.ptx" and names == code.with_suffix(".txt")
    assert code.read_bytes() == FORM.own.encode()
    lines = [line.split("\t") for line in names.read_text().splitlines() if "\t" in line]
    assert lines == [[f"mlx::core::cu::{FORM.name}", f"_Z{FORM.name}"]]


@pytest.mark.parametrize("broken", [".ptx", ".txt"])
@pytest.mark.parametrize("damage", [b"", b"the text", None, b"\xff\xfe other"])
def test_a_broken_file_is_made_again(tmp_path: Path, broken: str, damage: bytes | None) -> None:
    compiler = Compiler()
    cache_in(tmp_path, compiler).ensure(FORM)
    whole = [path.read_bytes() for path in files(tmp_path)]
    victim = next(path for path in files(tmp_path) if path.suffix == broken)
    if damage is None:
        victim.unlink()
    else:
        victim.write_bytes(damage)
    cache_in(tmp_path, compiler).ensure(FORM)
    assert len(compiler.calls) == 2
    assert [path.read_bytes() for path in files(tmp_path)] == whole


@pytest.mark.parametrize(
    "change",
    [
        lambda form, here: (replace(form, own=form.own + " "), here),
        lambda form, here: (form, here + "another compiler"),
    ],
    ids=["text", "environment"],
)
def test_what_code_depends_on_is_compared(tmp_path: Path, change: Callable[[KernelForm, str], Any]) -> None:
    compiler = Compiler()
    cache_in(tmp_path, compiler).ensure(FORM)
    form, environment = change(FORM, "here")
    cache_in(tmp_path, compiler, environment).ensure(form)
    assert len(compiler.calls) == 2 and len(files(tmp_path)) == 2
    assert files(tmp_path)[0].read_bytes() == form.own.encode()


def test_the_environment_holds_versions_options_and_headers(tmp_path: Path) -> None:
    headers = tmp_path / "include"
    headers.mkdir()
    (headers / "cuda_fp16.h").write_text("one")
    options = compile_options(9, 0, [headers])
    here = environment_of((13, 0), options, [headers])
    others = [
        environment_of((13, 1), options, [headers]),
        environment_of((13, 0), compile_options(8, 9, [headers]), [headers]),
        environment_of((13, 0), [*options, "--use_fast_math"], [headers]),
    ]
    (headers / "cuda_fp16.h").write_text("two")
    others.append(environment_of((13, 0), options, [headers]))
    assert len({here, *others}) == 5
    assert f"mlx {kernel_cache.version('mlx')}" in here


@pytest.mark.parametrize(("major", "minor", "expected"), [(9, 0, "sm_90a"), (8, 9, "sm_89"), (12, 0, "sm_120a")])
def test_the_architecture_is_the_device_s_own(major: int, minor: int, expected: str) -> None:
    assert f"--gpu-architecture={expected}" in compile_options(major, minor, [])


def test_kernels_are_compiled_at_the_same_time(tmp_path: Path) -> None:
    """Four compilations wait for each other: one after another they would never end."""
    meeting = threading.Barrier(4, timeout=20)

    def compile(form: KernelForm) -> Image:
        meeting.wait()
        return Image(b"code", "symbol")

    cache = cache_in(tmp_path, compile)
    with cache.together():
        for index in range(4):
            with cache.together():  # one in another ends with the outer one
                cache.ensure(KernelForm(f"k{index}", f"mlx {index}" + " " * index, f"own {index}"))
    assert cache.compiled == 4 and len(files(tmp_path)) == 8


def test_kernels_called_before_a_fault_are_there_after_it(tmp_path: Path) -> None:
    cache = cache_in(tmp_path, Compiler())
    with pytest.raises(ZeroDivisionError), cache.together():
        cache.ensure(FORM)
        raise ZeroDivisionError
    cache.ensure(FORM)
    assert (cache.compiled, cache.kept) == (1, 1)


def test_what_cannot_be_compiled_is_left_to_mlx(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.runner")
    cache = cache_in(tmp_path, Compiler("line 3: error: expected a semicolon"))
    cache.ensure(FORM)
    cache.ensure(replace(FORM, name="custom_kernel_other"))
    assert files(tmp_path) == [] and cache.faults == 2 and "2 left to MLX" in cache.note()
    assert len(caplog.records) == 1 and "expected a semicolon" in caplog.text


def test_a_folder_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    cache = cache_in(tmp_path / "missing", Compiler())
    cache.ensure(FORM)
    assert cache.faults == 1


def elf(length: int) -> bytes:
    """A file of 64-bit ELF whose last table ends at ``length``."""
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<QQ", header, 0x20, length - 56, 64)
    struct.pack_into("<4H", header, 0x36, 56, 1, 64, 1)
    return bytes(header).ljust(length, b"x")


@pytest.mark.parametrize(
    ("code", "names", "stays"),
    [
        (elf(400), "kernel\tsymbol\n", True),
        (b"// PTX" + b" " * 90, "kernel\tsymbol\n", True),
        (elf(400)[:399], "kernel\tsymbol\n", False),
        (elf(400)[:20], "kernel\tsymbol\n", False),
        (b"", "kernel\tsymbol\n", False),
        (bytes(400), "kernel\tsymbol\n", False),
        (elf(400), "kernel\tsym", False),
        (elf(400), "", False),
        (elf(400), None, False),
    ],
)
def test_what_a_killed_process_left_of_mlx_s_modules_is_removed(
    tmp_path: Path, code: bytes, names: str | None, stays: bool
) -> None:
    (tmp_path / "gather_1.ptx").write_bytes(code)
    if names is not None:
        (tmp_path / "gather_1.txt").write_text(names)
    cache_in(tmp_path, Compiler()).ensure(FORM)
    ours = {path.name for path in files(tmp_path)} - {"gather_1.ptx", "gather_1.txt"}
    remove_incomplete(tmp_path)
    assert {path.name for path in files(tmp_path)} == ours | ({"gather_1.ptx", "gather_1.txt"} if stays else set())


def test_without_cuda_there_is_no_cache() -> None:
    device_cache.cache_clear()
    if mx.default_device() == mx.cpu:
        assert device_cache() is None
        compile_ahead(lambda: pytest.fail("called without a cache"))
    device_cache.cache_clear()


def test_without_nvrtc_mlx_compiles(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.runner")

    def fail() -> KernelCache:
        raise NvrtcError("MLX has not loaded NVRTC")

    monkeypatch.setattr(kernel_cache, "_open", fail)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    device_cache.cache_clear()
    try:
        assert device_cache() is None and device_cache() is None
    finally:
        device_cache.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "MLX compiles kernels itself at every start: MLX has not loaded NVRTC"
    ]


# -- texts and calls ---------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    """``cuda_kernel`` makes kernels that go through this cache; MLX's part returns zeros."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "modules").mkdir()
    cache = cache_in(tmp_path / "modules", Compiler())
    monkeypatch.setattr(kernel_language, "device_cache", lambda: cache)
    monkeypatch.setattr(mx.fast, "cuda_kernel", blank_kernel)
    return cache


def call(kernel: Any, n: int) -> Any:
    return kernel(
        inputs=[mx.zeros((3,))],
        template=[("T", mx.float32), ("N", n)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(3,)],
        output_dtypes=[mx.float32],
    )


def test_each_form_of_a_kernel_is_compiled_before_its_first_run(own_cache: KernelCache) -> None:
    kernel = cuda_kernel(name="copy", input_names=["x"], output_names=["y"], source="y[0] = T(x[N]);")
    for n in (1, 2, 1):
        assert call(kernel, n)[0].shape == (3,)
    assert (own_cache.compiled, own_cache.kept) == (2, 0)
    again = cuda_kernel(name="copy", input_names=["x"], output_names=["y"], source="y[0] = T(x[N]);")
    compile_ahead(lambda: [call(again, n) for n in (1, 2, 3)])
    assert (own_cache.compiled, own_cache.kept) == (3, 2)


def test_a_damaged_source_file_is_written_again(own_cache: KernelCache, tmp_path: Path) -> None:
    def make() -> None:
        cuda_kernel(name="copy", input_names=["x"], output_names=["y"], source="y[0] = x[0];", header="int z;")

    make()
    sources = sorted((tmp_path / "cache/kernels").glob("*.cuh"))
    texts = [path.read_text() for path in sources]
    sources[0].write_text("half")
    make()
    assert [path.read_text() for path in sources] == texts and len(sources) == 2


def test_the_text_is_mlx_s() -> None:
    """As ``mx.fast.cuda_kernel`` of MLX 0.32.4 for CUDA prints it with ``verbose=True``."""
    source = "  y[0] = x_shape[0] + w_strides[1];\n// x_shape w_strides s_shape x_ndim\n"
    kernel = KernelSource("rows_x", ("x", "w", "s"), ("y", "z"), '\n#include "/a/b.cuh"\n', source, "", source)
    inputs = [mx.zeros((3, 4), mx.bfloat16), mx.zeros((5,)), mx.array(1)]
    template = [("T", mx.bfloat16), ("N", 5), ("F", True), ("M", 7), ("U", mx.uint32)]
    form = kernel.form(inputs, [mx.float16, mx.uint32], template)
    assert form is not None and form.name == "custom_kernel_rows_x_bfloat16_t_5_t_7_uint32_t"
    assert form.mlx == (Path(__file__).parent / "mlx_kernel_text.cu").read_text()


def test_a_type_that_is_not_known_is_left_to_mlx() -> None:
    kernel = KernelSource("k", ("x",), ("y",), "", "", "", "")
    assert kernel.form([mx.zeros((1,), mx.complex64)], [mx.float32], []) is None


def test_the_hash_is_the_c_library_s() -> None:
    """What ``std::hash<std::string>`` of libstdc++ gives on 64-bit machines."""
    assert mlx_hash()(b"hello world") == 0x4D6686D362067FF9


def test_the_loaded_compiler_is_found() -> None:
    maps = "7f-8f r-xp 0 00:1 5 /x/libcuda.so.1\n7f-8f r-xp 0 00:1 5 /x y/nvidia/cu13/lib/libnvrtc.so.13\n"
    assert loaded_library(maps) == Path("/x y/nvidia/cu13/lib/libnvrtc.so.13")
    with pytest.raises(NvrtcError):
        loaded_library("7f-8f r-xp 0 00:1 5 /x/libnvrtc-builtins.so.13.0\n")


@pytest.mark.parametrize(("version", "package"), [((12, 9), "cuda_runtime"), ((13, 0), "cu13")])
def test_headers_are_looked_for_where_mlx_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], package: str
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    for folder in ("mlx/include/cccl", f"nvidia/{package}/include", "cuda/include"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(NvrtcError):
        include_folders(tmp_path / "mlx", version)
    (tmp_path / "cuda/include/cuda_fp16.h").touch()
    (tmp_path / f"nvidia/{package}/include/cuda_fp16.h").touch()
    found = [str(path.relative_to(tmp_path)) for path in include_folders(tmp_path / "mlx", version)]
    assert found == ["mlx/include", "mlx/include/cccl", f"nvidia/{package}/include"]


# -- ahead of the checks at start --------------------------------------------------------------------------


def test_the_attention_check_compiles_its_kernels_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))

    def made(*, tiles: bool = True) -> PagedDecodeKernel:
        return PagedDecodeKernel(cuda_kernel, paged_decode_source.CUDA_PRELUDE, CUDA_FLOATS, tiles=tiles)

    monkeypatch.setattr(PagedDecodeKernel, "for_device", made)
    monkeypatch.setattr(kernel_check, "_fault", lambda *_: None)
    monkeypatch.setattr(kernel_check, "best_seconds", lambda run: (run(), 1.0)[1])
    monkeypatch.setattr(kernel_check, "no_slower", lambda new, old: (new(), old(), True)[2])
    layer = LayerShape(0, 2, 64, 64, mx.bfloat16)
    recorder = recorded(monkeypatch, lambda: choose_kernel(layer, 8, None, 32))
    # By tensor cores whole (by 4, 8 and 16 warps) and split, combination; without, what they are compared with.
    found = Counter(
        form.name.removeprefix("custom_kernel_").split("_bfloat16")[0] for form in recorder.forms.values()
    )
    assert found == {"tile_decode": 3, "tile_decode_split": 1, "paged_decode_combine": 1, "paged_decode_plain": 1}
    assert recorder.late == []


@pytest.mark.parametrize(("name", "least"), [("llama", 6), ("qwen3_moe", 9)])
def test_the_block_check_compiles_its_kernels_together(
    name: str, least: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    install(None)
    model = tiny_model(name)
    model.set_dtype(mx.bfloat16)
    fuse_projections(model)

    def check() -> None:
        store = PoolStore(cuda_kernel, CUDA_NAMES)
        tools = BlockTools(SmallRowsKernel(), RotateAndStore(cuda_kernel, CUDA_NAMES), store, ExpertsChoice())
        substitute_decoder_blocks(model, tools)

    recorder = recorded(monkeypatch, check)
    assert len(recorder.forms) >= least and recorder.late == []


# -- the real compiler ----------------------------------------------------------------------------------------


def installed_compiler() -> tuple[Nvrtc, list[Path]] | None:
    """NVRTC of NVIDIA's packages, and the folders of the headers; None where they are not installed."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        libraries = [path for path in Path(place).rglob("libnvrtc.so.*") if re.search(r"so\.\d+$", path.name)]
        headers = [path.parent for path in Path(place).rglob("cuda_bf16.h")]
        if libraries and headers:
            return Nvrtc(libraries[0]), [Path(mx.__file__).parent / "include", headers[0]]
    return None


@pytest.fixture(scope="module")
def compiler() -> tuple[Nvrtc, list[str]]:
    found = installed_compiler()
    if found is None:
        pytest.skip("NVIDIA's run-time compiler and headers are not installed")
    return found[0], compile_options(9, 0, found[1])


@pytest.mark.slow
def test_all_kernels_compile_for_a_gpu(
    compiler: tuple[Nvrtc, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "modules").mkdir()
    forms = list(recorded(monkeypatch, all_kernels).forms.values())
    cache = KernelCache(
        tmp_path / "modules", "", lambda form: compile_form(*compiler, form), hashed=mlx_hash(), workers=2
    )
    with cache.together():
        for form in forms:
            cache.ensure(form)
    assert len(forms) > 40 and (cache.compiled, cache.faults) == (len(forms), 0)
    for code in (tmp_path / "modules").glob("*.ptx"):
        symbol = code.with_suffix(".txt").read_text().splitlines()[0].split("\t")[1]
        assert code.read_bytes().startswith(b"\x7fELF") and kernel_cache._is_whole(code.read_bytes())
        assert not kernel_cache._is_whole(code.read_bytes()[:-1])
        assert symbol.encode() in code.read_bytes()


def test_a_compiler_error_is_one_line(compiler: tuple[Nvrtc, list[str]]) -> None:
    with pytest.raises(NvrtcError, match="error"):
        compile_form(*compiler, KernelForm("custom_kernel_x", "", "__global__ void custom_kernel_x() { y; }"))
