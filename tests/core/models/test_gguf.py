"""The GGUF reader agrees with the gguf package, which wrote the files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from decodekit.core.errors import ValidationError
from decodekit.core.models.dequant import dequantize
from decodekit.core.models.gguf import read_gguf


@pytest.fixture
def written(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A file with every kind of metadata and two tensors, aligned to 64."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -300)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -70000)
    writer.add_float32("f32", 0.5)
    writer.add_bool("yes", True)
    writer.add_string("text", "größer \N{SNOWMAN}")
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float64("f64", 1e-300)
    writer.add_array("ints", [1, 2, 3])
    writer.add_array("floats", [0.25, -1.0])
    writer.add_array("texts", ["a", "", "\N{SNOWMAN}"])
    writer.add_array("flags", [True, False])
    values = np.arange(96, dtype=np.float32).reshape(3, 32)
    writer.add_tensor("one", values)
    writer.add_tensor("two", values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator for the test's own random inputs."""
    return np.random.default_rng(7)


def test_every_kind_of_metadata_is_read(written: Path) -> None:
    metadata = read_gguf(written).metadata

    assert {
        key: metadata[key] for key in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")
    } == {
        "u8": 200,
        "i8": -3,
        "u16": 60000,
        "i16": -300,
        "u32": 4_000_000_000,
        "i32": -70000,
        "u64": 2**63,
        "i64": -(2**62),
    }
    assert (metadata["f32"], metadata["f64"], metadata["yes"]) == (0.5, 1e-300, True)
    assert metadata["text"] == "größer \N{SNOWMAN}"
    assert metadata["texts"] == ["a", "", "\N{SNOWMAN}"]
    assert (metadata["ints"], metadata["floats"]) == ([1, 2, 3], [0.25, -1.0])
    assert metadata["flags"] == [True, False]


def test_tensors_have_torchs_shape_and_their_own_values(written: Path) -> None:
    file = read_gguf(written)
    expected = np.arange(96, dtype=np.float32).reshape(3, 32)

    assert file.tensors["one"].shape == (3, 32)
    for name in ("one", "two"):
        np.testing.assert_array_equal(dequantize(file, file.tensors[name]).numpy(), expected)


@pytest.mark.parametrize("name", ["one", "two"])
def test_places_equal_the_gguf_packages_own_reader(name: str, written: Path) -> None:
    theirs = {tensor.name: tensor.data_offset for tensor in gguf.GGUFReader(written).tensors}

    assert read_gguf(written).tensors[name].start == theirs[name]


@pytest.mark.parametrize("length", [0, 3, 4, 10, 24, 60, 200])
def test_a_file_cut_short_is_refused(length: int, written: Path) -> None:
    written.write_bytes(written.read_bytes()[:length])

    with pytest.raises(ValidationError, match="not a GGUF file|broken GGUF file") as caught:
        read_gguf(written)

    assert caught.value.parameter == "model"


def test_a_tensor_cut_short_is_refused(written: Path) -> None:
    written.write_bytes(written.read_bytes()[:-100])
    file = read_gguf(written)

    with pytest.raises(ValidationError, match="'two' ends past the end"):
        dequantize(file, file.tensors["two"])


def test_an_unknown_version_is_refused(written: Path) -> None:
    data = bytearray(written.read_bytes())
    data[4:8] = (77).to_bytes(4, "little")
    written.write_bytes(data)

    with pytest.raises(ValidationError, match="version 77"):
        read_gguf(written)


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("PK not this one")

    with pytest.raises(ValidationError, match="is not a GGUF file"):
        read_gguf(path)
