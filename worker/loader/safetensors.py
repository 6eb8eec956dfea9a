"""The tensor index of a Hugging Face folder, from the headers of its safetensors files alone.

Format (huggingface.co/docs/safetensors): u64 little-endian header length, a JSON header, then the tensors' bytes,
which cover the rest of the file without gap or overlap. A sharded model has an index file that says which shard holds
each tensor.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.loader.errors import ModelError
from worker.loader.expected import listed
from worker.loader.keys import read_json
from worker.loader.tensors import TensorEntry, stored_bytes

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000
_LFS_MARK = b"version https://git-lfs"
_AGAIN = "fetch the file again"
# Old Llama checkpoints hold these; they follow from the config.
_DERIVED = ".rotary_emb.inv_freq"
_SAMPLES, _SAMPLE_BYTES = 16, 65536


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One safetensors file whose header was read and fits the file."""

    file: Path
    size: int
    header: bytes
    tensors: dict[str, TensorEntry]


def read_index(folder: Path) -> list[Shard]:
    """The model's shards, all checked. Every missing or damaged file is named in one ModelError."""
    if (folder / SINGLE_FILE).exists():
        return [_read_shard(folder / SINGLE_FILE)]
    if not (folder / INDEX_FILE).exists():
        raise ModelError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}: only safetensors weights are read")
    weight_map = _weight_map(folder / INDEX_FILE)
    shards, faults = [], []
    for name in sorted(set(weight_map.values())):
        try:
            shards.append(_read_shard(folder / name))
        except ModelError as error:
            faults.append(str(error))
    if faults:
        raise ModelError("; ".join(faults))
    _check_map(weight_map, shards, folder / INDEX_FILE)
    return shards


def all_tensors(shards: list[Shard]) -> dict[str, TensorEntry]:
    return {name: entry for shard in shards for name, entry in shard.tensors.items() if not name.endswith(_DERIVED)}


def content_key(shards: list[Shard]) -> str:
    """A hash of each shard's name, size, header and a spread sample of its bytes: not of its whole content.

    A flipped bit can escape it; another model, dtype, version or finetune does not.
    """
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(json.dumps([shard.file.name, shard.size]).encode())
        digest.update(shard.header)
        with shard.file.open("rb") as stream:
            for i in range(_SAMPLES):
                stream.seek(max(0, shard.size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _weight_map(file: Path) -> dict[str, str]:
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{file}: weight_map must be an object of tensor and file names: {_AGAIN}")
    for tensor, shard in weight_map.items():
        # A name with a folder in it could point outside the model.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{file}: weight_map gives {tensor} the file {shard!r}: must be a .safetensors file name")
    return weight_map


def _check_map(weight_map: dict[str, str], shards: list[Shard], index: Path) -> None:
    """The index and the shards name the same tensors in the same files."""
    held = {name: shard.file.name for shard in shards for name in shard.tensors}
    if sum(len(shard.tensors) for shard in shards) != len(held):
        twice = {n for a in shards for b in shards if a is not b for n in a.tensors.keys() & b.tensors.keys()}
        raise ModelError(f"{index}: tensors held by two shards: {listed(twice)}: fetch the model again")
    if absent := {name for name in weight_map if name not in held}:
        files = ", ".join(sorted({weight_map[name] for name in absent}))
        raise ModelError(f"{index}: names tensors that no shard holds: {listed(absent)} (said to be in {files})")
    if moved := {name for name, file in weight_map.items() if held[name] != file}:
        raise ModelError(f"{index}: says another shard than the one that holds: {listed(moved)}")
    if unnamed := held.keys() - weight_map.keys():
        files = ", ".join(sorted({held[name] for name in unnamed}))
        raise ModelError(f"{index}: does not name tensors that {files} holds: {listed(unnamed)}: {_AGAIN}")


def _read_shard(file: Path) -> Shard:
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            start = stream.read(8)
            _check_start(file, start + stream.read(len(_LFS_MARK) - 8), size)
            length = struct.unpack("<Q", start)[0]
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ModelError(
                    f"{file}: its header says {length} bytes and the file has {size}: damaged or cut off: {_AGAIN}"
                )
            stream.seek(8)
            header = stream.read(length)
    except FileNotFoundError as error:
        raise ModelError(f"{file}: is missing: fetch it") from error
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    return Shard(file=file, size=size, header=header, tensors=_parse_header(file, header, size))


def _check_start(file: Path, start: bytes, size: int) -> None:
    if start.startswith(_LFS_MARK):
        raise ModelError(f"{file}: is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
    if size < 8:
        raise ModelError(f"{file}: has {size} bytes, too few for a safetensors file: {_AGAIN}")


def _parse_header(file: Path, header: bytes, size: int) -> dict[str, TensorEntry]:
    try:
        fields = json.loads(header)
    except ValueError as error:
        raise ModelError(f"{file}: its header is not JSON ({error}): {_AGAIN}") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{file}: its header is not a JSON object: {_AGAIN}")
    data_start = 8 + len(header)
    tensors = {name: _entry(file, name, field, data_start) for name, field in fields.items() if name != "__metadata__"}
    _check_cover(file, sorted(tensors.values(), key=lambda entry: (entry.offset, entry.nbytes)), data_start, size)
    return tensors


def _entry(file: Path, name: str, field: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = field["dtype"], tuple(field["shape"]), field["data_offsets"]
        well_formed = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        well_formed = False
    if not well_formed:
        raise ModelError(f"{file}: the header entry of {name} is malformed: {_AGAIN}")
    nbytes = stored_bytes(dtype, shape, f"{file}: {name}")
    if end - begin != nbytes:
        raise ModelError(f"{file}: {name} has {end - begin} bytes, its type and shape need {nbytes}: {_AGAIN}")
    return TensorEntry(name=name, file=file, offset=data_start + begin, nbytes=nbytes, dtype=dtype, shape=shape)


def _check_cover(file: Path, entries: list[TensorEntry], data_start: int, size: int) -> None:
    """Tensors follow each other from the header to the end of the file."""
    position = data_start
    for entry in entries:
        if entry.offset != position:
            how = "overlaps the one before it" if entry.offset < position else "leaves a gap before it"
            raise ModelError(f"{file}: {entry.name} {how}: the header is damaged: {_AGAIN}")
        position += entry.nbytes
    if position != size:
        fault = "is cut off" if position > size else "has bytes that belong to no tensor"
        raise ModelError(f"{file}: {fault}: its header says {position} bytes, the file has {size}: {_AGAIN}")
