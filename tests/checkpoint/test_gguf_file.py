"""GGUF headers: read as the reference reader does, and never trusted."""

from __future__ import annotations

import resource
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoint_files import CONFIG, tiny_weights
from gguf_files import QTYPE, write_llama
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint.gguf_config import config_of
from headrace.checkpoint.gguf_file import TENSOR_TYPES, read_gguf, read_metadata
from headrace.checkpoint.model_folder import describe
from headrace.errors import ModelFileError


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("gguf") / "m.gguf", CONFIG, tiny_weights(), QTYPE.Q8_0)


def test_the_table_of_tensor_types_is_ggml_s() -> None:
    expected = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert expected == TENSOR_TYPES


def test_metadata_of_every_type(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "odd")
    values: dict[str, Any] = {"u8": 200, "i8": -3, "u16": 60000, "i16": -300, "u32": 1 << 31, "i32": -(1 << 30)}
    values |= {"u64": 1 << 40, "i64": -(1 << 40), "f32": 0.5, "f64": 0.1, "yes": True, "text": "grüße\n"}
    values |= {"numbers": [1, 2, 3], "floats": [0.5, -1.5], "texts": ["", "ä", "b"], "flags": [True, False]}
    for name, value in values.items():
        kind = {"u8": "uint8", "i8": "int8", "u16": "uint16", "i16": "int16", "u32": "uint32", "i32": "int32"}
        kind |= {"u64": "uint64", "i64": "int64", "f32": "float32", "f64": "float64", "yes": "bool"}
        default = "string" if isinstance(value, str) else "array"
        getattr(writer, f"add_{kind.get(name, default)}")(f"x.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert {name: read_metadata(path)[f"x.{name}"] for name in values} == values


def test_tensors_are_where_the_reference_reader_finds_them(sound: Path) -> None:
    mine = {tensor.name: tensor for tensor in read_gguf(sound).tensors}
    reference = gguf.GGUFReader(sound).tensors
    assert len(mine) == len(reference)
    for tensor in reference:
        found = mine[tensor.name]
        assert (found.offset, found.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert found.type == tensor.tensor_type.name


def test_the_configuration_is_the_folder_s(sound: Path) -> None:
    found = config_of(read_gguf(sound))
    assert {name: found[name] for name in CONFIG} == CONFIG
    assert describe(sound).kind == "gguf"


def _damaged(content: bytes, **changes: bytes) -> bytes:
    for place, new in changes.items():
        start = int(place.removeprefix("at"))
        content = content[:start] + new + content[start + len(new) :]
    return content


BIG = struct.pack("<Q", 1 << 60)
DAMAGE: dict[str, tuple[dict[str, bytes], str]] = {
    "magic": ({"at0": b"GGML"}, "not a GGUF file"),
    "version 1": ({"at4": struct.pack("<I", 1)}, "version 1"),
    "big-endian": ({"at4": struct.pack(">I", 3)}, "big-endian"),
    "tensor count": ({"at8": BIG}, "incomplete: tensor count 1152921504606846976"),
    "metadata count": ({"at16": BIG}, "incomplete: metadata count 1152921504606846976"),
    "key length": ({"at24": BIG}, "metadata key 0 has 1152921504606846976 bytes"),
    "key not UTF-8": ({"at32": b"\xff"}, "not UTF-8"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_and_allocates_nothing(sound: Path, tmp_path: Path, case: str) -> None:
    changes, message = DAMAGE[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(_damaged(sound.read_bytes(), **changes))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelFileError, match=message) as caught:
        read_gguf(path)
    assert str(caught.value).startswith("bad.gguf: ")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_a_file_without_its_last_byte_is_incomplete(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    last = max(tensor.offset + tensor.nbytes for tensor in read_gguf(sound).tensors)
    path.write_bytes(sound.read_bytes()[: last - 1])
    with pytest.raises(ModelFileError, match="incomplete: tensor"):
        read_gguf(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_damage_is_an_error_or_a_sound_header(
    sound: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(sound.read_bytes())
    header_end = min(tensor.offset for tensor in read_gguf(sound).tensors)
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    path.write_bytes(content)
    try:
        files = describe(path)
    except ModelFileError as error:
        assert "\n" not in str(error)
        return
    assert all(tensor.nbytes <= len(content) for tensor in files.tensors.values())


def test_architectures_and_features_that_cannot_be_loaded(tmp_path: Path) -> None:
    for architecture, key, message in (
        ("mamba", None, "general.architecture 'mamba'"),
        ("qwen2", "qwen2.expert_count", "in llama and qwen3moe only"),
        ("llama", "llama.rope.scaling.type", "rope.scaling"),
        ("llama", "llama.rope.scaling.type with experts", "is not supported with experts"),
    ):
        path = tmp_path / f"{architecture}{key}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        if key == "qwen2.expert_count":
            writer.add_uint32(key, 8)
        elif key is not None:
            if "with experts" in key:
                writer.add_expert_count(4)
            writer.add_string(key.split()[0], "odd")
            writer.add_float32("llama.rope.scaling.factor", 2.0)
        writer.add_block_count(1)
        writer.add_context_length(8)
        writer.add_embedding_length(32)
        writer.add_feed_forward_length(32)
        writer.add_head_count(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ModelFileError, match=message):
            describe(path)


def test_llama_3_scaling_is_found_in_its_frequencies(tmp_path: Path) -> None:
    from mlx_lm.models.rope_utils import Llama3RoPE

    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    scaled = np.array(Llama3RoPE(64, base=5e5, scaling_config=scaling)._freqs)
    divisors = scaled / 5e5 ** (np.arange(0, 64, 2) / 64)
    config = {**CONFIG, "rope_theta": 5e5}
    weights = tiny_weights(config)
    path = tmp_path / "m.gguf"
    _write_with_frequencies(path, config, weights, divisors.astype(np.float32))
    found = describe(path).config["rope_scaling"]
    assert {name: found[name] for name in scaling} == scaling
    _write_with_frequencies(path, config, weights, (divisors * 1.1).astype(np.float32))
    with pytest.raises(ModelFileError, match="rope_freqs"):
        describe(path)


def _write_with_frequencies(
    path: Path, config: dict[str, Any], weights: dict[str, np.ndarray], divisors: np.ndarray
) -> None:
    original = gguf.GGUFWriter.write_header_to_file

    def with_frequencies(writer: Any, *args: Any, **kwargs: Any) -> None:
        writer.add_tensor("rope_freqs.weight", divisors)
        original(writer, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_frequencies)
        write_llama(path, config, weights)
