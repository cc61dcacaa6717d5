"""Read GGUF files: metadata with struct over a memory map, tensors as byte views.

Values become Python numbers, strings and lists; nothing is dequantised here (`dequant.py`) and
nothing is known of architectures (`gguf_weights.py`). The format is that of GGUF versions 2 and 3,
little-endian: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ValidationError

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies; `shape` is torch's (slowest dimension first)."""

    name: str
    shape: tuple[int, ...]
    type_id: int  # ggml type: 0 F32, 1 F16, 3 Q4_1, 8 Q8_0, ...
    start: int  # byte offset from the beginning of the file


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed file: all metadata, all tensor places, and the mapped bytes."""

    path: Path
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, GGUFTensor] = field(repr=False)
    data: NDArray[np.uint8] = field(repr=False)  # the whole file, mapped read-only

    def bytes_of(self, tensor: GGUFTensor, num_bytes: int) -> NDArray[np.uint8]:
        """Return the tensor's bytes as a view of the map; refuse a file that is too short."""
        end = tensor.start + num_bytes
        if end > self.data.size:
            raise _broken(self.path, f"tensor {tensor.name!r} ends past the end of the file")
        return self.data[tensor.start : end]


def read_gguf(path: Path) -> GGUFFile:
    """Parse a GGUF file; raise ValidationError if it isn't one or is cut short."""
    with path.open("rb") as opened:
        if opened.read(4) != _MAGIC:
            raise ValidationError(f"{path} is not a GGUF file", parameter="model", value=str(path))
        buffer = mmap(opened.fileno(), 0, access=ACCESS_READ)
    try:
        return _parse(path, buffer)
    except (struct.error, UnicodeDecodeError) as error:
        raise _broken(path, str(error)) from error


def _parse(path: Path, buffer: mmap) -> GGUFFile:
    (version,) = _U32.unpack_from(buffer, 4)
    if version not in (2, 3):
        raise ValidationError(
            f"{path} has GGUF version {version}; versions 2 and 3, little-endian, can be read",
            parameter="model",
            value=str(path),
        )
    (num_tensors,) = _U64.unpack_from(buffer, 8)
    (num_keys,) = _U64.unpack_from(buffer, 16)
    at = 24
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key, at = _string(buffer, at)
        (kind,) = _U32.unpack_from(buffer, at)
        metadata[key], at = _value(buffer, at + 4, kind)
    tensors, at = _tensor_table(buffer, at, num_tensors)
    alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    base = -(-at // alignment) * alignment
    placed = {t.name: GGUFTensor(t.name, t.shape, t.type_id, t.start + base) for t in tensors}
    data = np.frombuffer(buffer, dtype=np.uint8)
    return GGUFFile(path=path, metadata=metadata, tensors=placed, data=data)


def _tensor_table(buffer: mmap, at: int, count: int) -> tuple[list[GGUFTensor], int]:
    """Read the tensor places; `start` is still relative to the data section."""
    tensors = []
    for _ in range(count):
        name, at = _string(buffer, at)
        (num_dims,) = _U32.unpack_from(buffer, at)
        dims = struct.unpack_from(f"<{num_dims}Q", buffer, at + 4)
        at += 4 + 8 * num_dims
        type_id, offset = struct.unpack_from("<IQ", buffer, at)
        at += 12
        tensors.append(GGUFTensor(name, tuple(reversed(dims)), type_id, offset))
    return tensors, at


def _string(buffer: mmap, at: int) -> tuple[str, int]:
    (size,) = _U64.unpack_from(buffer, at)
    end = at + 8 + size
    if end > len(buffer):
        raise struct.error(f"a string of {size} bytes at {at} ends past the end of the file")
    return buffer[at + 8 : end].decode("utf-8"), end


def _value(buffer: mmap, at: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _string(buffer, at)
    if kind == _ARRAY:
        item_kind, count = struct.unpack_from("<IQ", buffer, at)
        return _array(buffer, at + 12, item_kind, count)
    scalar = _scalar(kind)
    return scalar.unpack_from(buffer, at)[0], at + scalar.size


def _array(buffer: mmap, at: int, kind: int, count: int) -> tuple[list[Any], int]:
    if kind == _STRING:
        return _strings(buffer, at, count)
    if kind == _ARRAY:
        rows = []
        for _ in range(count):
            row, at = _value(buffer, at, _ARRAY)
            rows.append(row)
        return rows, at
    scalar = _scalar(kind)
    many = struct.Struct(f"<{count}{scalar.format[1:]}")
    return list(many.unpack_from(buffer, at)), at + many.size


def _strings(buffer: mmap, at: int, count: int) -> tuple[list[Any], int]:
    """Read a list of strings; a vocabulary has a hundred thousand, so names are local here."""
    read: Callable[[mmap, int], tuple[Any, ...]] = _U64.unpack_from
    end_of_file = len(buffer)
    strings: list[Any] = []
    append = strings.append
    for _ in range(count):
        start = at + 8
        at = start + read(buffer, at)[0]
        if at > end_of_file:
            raise struct.error("a list of strings ends past the end of the file")
        append(buffer[start:at].decode("utf-8"))
    return strings, at


def _scalar(kind: int) -> struct.Struct:
    scalar = _SCALARS.get(kind)
    if scalar is None:
        raise struct.error(f"unknown metadata type {kind}")
    return scalar


def _broken(path: Path, reason: str) -> ValidationError:
    return ValidationError(
        f"{path} is a broken GGUF file: {reason}", parameter="model", value=str(path)
    )
