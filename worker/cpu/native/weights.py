"""A decoder's weights for the kernels: matrices in panels (src/formats.h), vectors as float32.

Packing a large model takes a while, so the panels are kept in a file, keyed by content, for the next start.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from proto.messages import Float32
from worker.cpu.native.buffers import large_pages
from worker.cpu.native.records import PANEL, Format, address, native
from worker.errors import ConfigError
from worker.loader.cache import cache_folder, locked
from worker.loader.errors import ModelError
from worker.loader.model import ModelFiles
from worker.loader.tensors import UNITS, TensorEntry, as_float32, decode_rows, quantise_q8_0

# Rises when the layout of panels changes.
PACKING = 2
# Models below this size are packed at every start.
KEPT_FROM = 16 * 2**20
# Up to this size the file is read into large pages, which the kernels stream from a fifth faster than from the map.
COPIED_UP_TO = 2 * 2**30
ALIGNMENT = 64
# Rows that are converted together, whole panels, so that a large matrix never stands in memory as float32.
ROWS_AT_ONCE = 4096

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One packed matrix, [n features out, k features in]."""

    format: Format
    n: int
    k: int
    panels: Bytes


@dataclass(frozen=True, kw_only=True)
class Weights:
    """matrices and vectors by Hugging Face name; embedding: its rows as stored."""

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, Float32]
    embedding: Bytes
    embedding_format: Format


def load_weights(files: ModelFiles, kind: Format | None, *, threads: int) -> Weights:
    """Packs the model's matrices or maps what an earlier start left; `kind`: to F32 or Q8_0, whatever is stored."""
    embedding = files.tensors["model.embed_tokens.weight"]
    matrices = [entry for entry in _linear_entries(files) if len(entry.shape) == 2]
    layout = _Layout(matrices, kind)
    panels = _panels(files, layout, threads)
    return Weights(
        matrices={entry.name: layout.matrix(entry, panels) for entry in matrices},
        vectors={
            name: np.ascontiguousarray(as_float32(entry))
            for name, entry in files.tensors.items()
            if len(entry.shape) == 1
        },
        embedding=embedding.raw(),
        embedding_format=Format[embedding.dtype],
    )


def _linear_entries(files: ModelFiles) -> Iterator[TensorEntry]:
    """All matrices that are multiplied with, the output projection last: the embedding when the model ties them."""
    head = "model.embed_tokens.weight" if files.config.tie_word_embeddings else "lm_head.weight"
    yield from (entry for name, entry in files.tensors.items() if name.startswith("model.layers."))
    yield files.tensors[head]


class _Layout:
    """Where each matrix's panels lie in one run of bytes."""

    def __init__(self, entries: Sequence[TensorEntry], kind: Format | None) -> None:
        self.kind = kind
        self.entries = entries
        self.offsets: dict[str, int] = {}
        self.size = 0
        for entry in entries:
            if self.format(entry).quantised and entry.shape[1] % (values := UNITS[self.format(entry).name][0]):
                raise ConfigError(
                    f"--quantization q8_0 needs rows of a multiple of {values} values: {entry.name} has "
                    f"{entry.shape[1]}: use --quantization none"
                )
            self.offsets[entry.name] = self.size
            self.size += -(-self.packed_bytes(entry) // ALIGNMENT) * ALIGNMENT

    def format(self, entry: TensorEntry) -> Format:
        return Format[entry.dtype] if self.kind is None else self.kind

    def packed_bytes(self, entry: TensorEntry) -> int:
        return int(native().sb_packed_bytes(self.format(entry), *entry.shape))

    def matrix(self, entry: TensorEntry, panels: Bytes) -> Matrix:
        start = self.offsets[entry.name]
        part = panels[start : start + self.packed_bytes(entry)]
        return Matrix(format=self.format(entry), n=entry.shape[0], k=entry.shape[1], panels=part)

    def pack(self, entry: TensorEntry, panels: Bytes) -> None:
        target, rows = self.matrix(entry, panels), entry.rows()
        panel = len(target.panels) // -(-target.n // PANEL)
        for first in range(0, target.n, ROWS_AT_ONCE):
            part = self._converted(entry, rows[first : first + ROWS_AT_ONCE])
            to = address(target.panels, first // PANEL * panel)
            native().sb_pack(target.format, address(part), len(part), target.k, to)

    def _converted(self, entry: TensorEntry, rows: Bytes) -> NDArray[np.generic]:
        if self.kind is None or self.kind.name == entry.dtype:
            return np.ascontiguousarray(rows)
        values = decode_rows(entry.dtype, rows)
        return quantise_q8_0(values) if self.kind == Format.Q8_0 else values

    def pack_all(self, panels: Bytes, threads: int) -> None:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lambda entry: self.pack(entry, panels), self.entries):
                pass


def _panels(files: ModelFiles, layout: _Layout, threads: int) -> Bytes:
    if layout.kind == Format.F32 or layout.size < KEPT_FROM:
        panels = _zeros(layout.size)
        layout.pack_all(panels, threads)
        return panels
    key = hashlib.sha256(f"{files.fingerprint} {PACKING} {layout.kind and layout.kind.name}".encode()).hexdigest()[:32]
    file = cache_folder() / "packed" / f"{key}.bin"
    if file.exists() and file.stat().st_size == layout.size:
        return _read(file, layout.size)
    try:
        return _packed_file(file, layout, threads)
    except (OSError, ModelError):  # no folder to write to, or no room in it: the next start packs again
        panels = _zeros(layout.size)
        layout.pack_all(panels, threads)
        return panels


def _packed_file(file: Path, layout: _Layout, threads: int) -> Bytes:
    """Packs into a draft that becomes the file when it is whole."""
    with locked(file.with_suffix(".lock")):
        if not (file.exists() and file.stat().st_size == layout.size):
            draft = file.with_suffix(".draft")
            with draft.open("wb+") as stream:
                os.posix_fallocate(stream.fileno(), 0, layout.size)
                target = np.frombuffer(mmap.mmap(stream.fileno(), layout.size), np.uint8)
                layout.pack_all(target, threads)
            os.replace(draft, file)
    return _read(file, layout.size)


def _read(file: Path, size: int) -> Bytes:
    if size > COPIED_UP_TO:
        return np.asarray(np.memmap(file, np.uint8, "r"))
    panels = _zeros(size)
    with file.open("rb", buffering=0) as stream:
        view, done = panels.data, 0
        while count := stream.readinto(view[done:]):
            done += count
    if done != size:
        raise ModelError(f"{file}: ends after {done} of {size} bytes: delete it and start again")
    return panels


def _zeros(size: int) -> Bytes:
    """Zeros on large pages: weights are read from end to end at every step."""
    return np.frombuffer(large_pages(size), np.uint8)[:size]
