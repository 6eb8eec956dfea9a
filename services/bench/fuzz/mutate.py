"""A seeded mutator: from what a peer might say to what it never should."""

from __future__ import annotations

import json
import random
from typing import Any

import msgpack

MAX_RANDOM = 256  # bytes of a frame that is all noise
DEPTHS = (3, 60, 400, 1500)
INTEGERS = (0, 1, -1, 2, 63, 64, 127, 255, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32, 2**62, 2**63 - 1, 2**64 - 1)
FLOATS = (0.0, -0.0, 1e-9, 1.5, -1.0, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "x",
    "\0",
    "a" * 300,
    "x" * 70_000,
    "€𝄞\u202e",
    "../../etc/passwd",
    "regex\n(a{1000}){1000}",
    "json_schema\n{",
)


def mutated(draw: random.Random, frame: bytes, other: bytes) -> bytes:
    """A neighbour of `frame`, a splice of it with `other`, noise, or the frame as it is (a repetition)."""
    kind = draw.random()
    if kind < 0.04:
        return frame
    if kind < 0.10:
        return draw.randbytes(draw.randrange(MAX_RANDOM))
    if kind < 0.45:
        return _bytes_changed(draw, frame, other)
    try:
        value = msgpack.unpackb(frame, strict_map_key=False)
        for _ in range(draw.choice((1, 1, 1, 2, 5))):
            value = changed(draw, value)
        packed: bytes = msgpack.packb(value)
        return packed
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException):
        return _bytes_changed(draw, frame, other)


def mutated_json(draw: random.Random, body: Any) -> bytes:
    """A JSON body near `body`, or bytes near it."""
    value = changed(draw, json.loads(json.dumps(body)))
    try:
        data = json.dumps(value, default=repr).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        data = b"[" * draw.choice(DEPTHS)
    return _bytes_changed(draw, data, data) if draw.random() < 0.2 else data


def mutated_bytes(draw: random.Random, data: bytes) -> bytes:
    """Bytes near `data`, of a form that this module does not know."""
    return _bytes_changed(draw, data, data)


def changed(draw: random.Random, value: Any) -> Any:
    """The same value with one part of it, wherever, replaced, repeated, left out or wrapped."""
    if isinstance(value, list) and value and draw.random() < 0.85:
        at = draw.randrange(len(value))
        change = draw.random()
        if change < 0.06:
            return value[:at] + value[at + 1 :]
        if change < 0.12:
            return [*value[:at], value[at], *value[at:]]
        return [*value[:at], changed(draw, value[at]), *value[at + 1 :]]
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        rest = {name: part for name, part in value.items() if name != key}
        change = draw.random()
        if change < 0.06:
            return rest
        if change < 0.12:
            return {**rest, draw.choice(TEXTS): value[key]}
        return {**rest, key: changed(draw, value[key])}
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.5:
        return value + draw.choice((-2, -1, 1, 2))
    if isinstance(value, bytes) and value and draw.random() < 0.6:
        return _bytes_changed(draw, value, value)
    return anything(draw)


def anything(draw: random.Random) -> Any:
    """A value that someone may not have thought of."""
    kind = draw.randrange(8)
    if kind == 0:
        return draw.choice(FLOATS)
    if kind <= 2:
        return draw.choice(INTEGERS)
    if kind == 3:
        return draw.choice(TEXTS)
    if kind == 4:
        return draw.choice((None, True, False))
    if kind == 5:
        return [draw.choice(INTEGERS) for _ in range(draw.choice((0, 1, 3, 100)))]
    if kind == 6:
        return {draw.choice(TEXTS[:4]): draw.choice(INTEGERS)}
    nested: Any = draw.choice(INTEGERS)
    for _ in range(draw.choice(DEPTHS)):
        nested = [nested]
    return nested


def _bytes_changed(draw: random.Random, data: bytes, other: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(changed) + 1)
        kind = draw.randrange(5)
        if kind == 0 and changed:
            changed[min(at, len(changed) - 1)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            changed[at:at] = draw.randbytes(draw.choice((1, 4, 40)))
        elif kind == 2:
            del changed[at : at + draw.choice((1, 4, 40))]
        elif kind == 3:
            changed = changed[:at]
        else:
            start = draw.randrange(len(other) + 1)
            changed[at:] = other[start:]
    return bytes(changed)
