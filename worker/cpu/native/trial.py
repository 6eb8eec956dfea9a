"""Single kernels on a machine's own limits, for `signalbox bench kernels`; whoever has a clock times the calls."""

from __future__ import annotations

import ctypes

import numpy as np

from worker.cpu.native.buffers import large_pages
from worker.cpu.native.records import BLOCK, Activations, Format, Kind, Model, Op, address, native

# A pattern that is an ordinary small number in every format.
FILL = 0x11


class LinearTrial:
    """One linear map of `tokens` tokens; each call computes it. weight_bytes: what a call reads."""

    def __init__(self, kind: Format, *, n: int, k: int, tokens: int, threads: int) -> None:
        self.tokens = tokens
        self._library = native()
        self.weight_bytes = int(self._library.sb_packed_bytes(kind, n, k))
        self._panels = np.frombuffer(large_pages(self.weight_bytes), np.uint8)
        self._panels[:] = FILL
        self._x = np.random.default_rng(0).standard_normal((tokens, k)).astype(np.float32)
        self._out = np.empty((tokens, n), np.float32)
        blocks = -(-k // BLOCK) * tokens
        floats = np.empty((2, blocks), np.float32)
        self._quantised = np.empty((blocks, BLOCK), np.int8), floats[0], floats[1], np.empty((blocks, 4), np.int32)
        activations = Activations(*(address(part) for part in self._quantised))
        model = Model(heads=1, kv_heads=1, head_dim=16, padded_dim=16, block_size=16, head_rows=1, threads=threads)
        model.activations = activations
        if kind.quantised:
            self._library.sb_quantise(address(self._x), tokens, k, ctypes.byref(activations))
        self._engine = self._library.sb_open(ctypes.byref(model), None, 0, None, 0)
        self._op = Op(
            kind=Kind.LINEAR,
            format=kind,
            n=n,
            k=k,
            in_stride=k,
            out_stride=n,
            weights=address(self._panels),
            in_=address(self._x),
            out=address(self._out),
        )

    def __call__(self) -> None:
        self._library.sb_linear(self._engine, ctypes.byref(self._op), self.tokens)

    def close(self) -> None:
        """Ends the map's threads."""
        self._library.sb_close(self._engine)
