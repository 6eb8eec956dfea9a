"""The whole state of the scheduler as bytes and back: where an event log may begin in mid-run.

The state is a graph of plain data. Each thing that is not a scalar becomes a node, written once however often it is
held, so that what was one object is one again. Only classes of scheduler/, kvpool/ and proto/ are made when a
checkpoint is read, without calling any of their code, so that a file from a stranger can do no more than be wrong.
"""

from __future__ import annotations

import importlib
import zlib
from collections import Counter, OrderedDict, deque
from enum import Enum
from typing import Any

import msgpack
import numpy as np

from scheduler.state import SchedulerState

PACKAGES = ("scheduler", "kvpool", "proto")
SCALARS = frozenset({type(None), bool, int, float, str, bytes})
DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
PAGE = 4096  # bytes; large arrays are written without their pages of zeros
MAX_BYTES = 2**32  # of one checkpoint, unpacked


class CheckpointError(ValueError):
    """A state that cannot be written, or bytes that are no checkpoint of this release."""


def freeze(state: SchedulerState) -> bytes:
    """The state as bytes, as fast as can be. Raises CheckpointError for a state that holds more than data."""
    writer = _Writer()
    root = writer.value(state)
    nodes = writer.nodes()
    plain: bytes = msgpack.packb([writer.classes, nodes, root])
    return plain


def compress(plain: bytes) -> bytes:
    """For a file: most of a checkpoint is small numbers."""
    return zlib.compress(plain, 1)


def decompress(data: bytes) -> bytes:
    """What was compressed. Raises CheckpointError when it is damaged."""
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise CheckpointError(f"the checkpoint cannot be read ({error})") from error
    if not stream.eof:
        raise CheckpointError("the checkpoint cannot be read: it is cut off or too large")
    return plain


def thaw(plain: bytes) -> SchedulerState:
    """The state again, equal in all that advance can see. Raises CheckpointError for anything but a checkpoint."""
    try:
        classes, nodes, root = msgpack.unpackb(plain, strict_map_key=False)
        state = _Reader(classes, nodes).value(root)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"the checkpoint cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(state, SchedulerState):
        raise CheckpointError("the checkpoint holds no scheduler state")
    return state


class _Writer:
    """Values are scalars as they are, or [number of a node]. Breadth first: no graph is too deep."""

    def __init__(self) -> None:
        self.classes: list[str] = []
        self._class_numbers: dict[type, int] = {}
        self._slots: dict[type, list[str]] = {}
        self._numbers: dict[int, int] = {}  # id -> node
        self._found: list[Any] = []

    def value(self, thing: Any) -> Any:
        if type(thing) in SCALARS:
            return thing
        number = self._numbers.get(id(thing))
        if number is None:
            number = self._numbers[id(thing)] = len(self._found)
            self._found.append(thing)
        return [number]

    def values(self, things: Any) -> list[Any]:
        items = list(things)
        return items if SCALARS.issuperset(map(type, items)) else [self.value(item) for item in items]

    def nodes(self) -> list[Any]:
        return [self._node(thing) for thing in self._found]  # which grows meanwhile

    def _node(self, thing: Any) -> list[Any]:
        kind = type(thing)
        if kind in (list, tuple, set, frozenset):
            return [kind.__name__, self.values(thing)]
        if kind is deque:
            return ["deque", self.values(thing), thing.maxlen]
        if DICTS.get(kind.__name__) is kind:
            return [kind.__name__, self.values(thing.keys()), self.values(thing.values())]
        if kind is np.ndarray:
            return self._array(thing)
        if kind is slice:
            return ["slice", self.values((thing.start, thing.stop, thing.step))]
        if isinstance(thing, np.generic):
            return ["numpy", thing.dtype.str, thing.tobytes()]
        if isinstance(thing, Enum):
            return ["enum", self._class(kind), thing.value]
        if kind.__module__.partition(".")[0] not in PACKAGES:
            raise CheckpointError(f"the scheduler's state holds a {kind.__module__}.{kind.__qualname__}")
        names = self._names(kind) + list(getattr(thing, "__dict__", ()))
        names = [name for name in names if hasattr(thing, name)]
        return ["object", self._class(kind), names, self.values(getattr(thing, name) for name in names)]

    def _array(self, array: np.ndarray) -> list[Any]:
        if array.dtype.hasobject:
            raise CheckpointError("the scheduler's state holds an array of objects")
        base = array.base
        if isinstance(base, np.ndarray):  # a view goes on sharing memory with what it is a view of
            offset = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
            return ["view", self.value(base), array.dtype.str, offset, list(array.shape), list(array.strides)]
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        whole = data[: len(data) // PAGE * PAGE].view(np.uint64).reshape(-1, PAGE // 8)
        used = np.flatnonzero(np.bitwise_or.reduce(whole, axis=1)) if len(whole) else np.zeros(0, np.int64)
        rest = data[len(whole) * PAGE :].tobytes()
        pages = [used.astype("<i8").tobytes(), whole[used].tobytes(), rest]
        return ["array", array.dtype.str, list(array.shape), *pages]

    def _class(self, kind: type) -> int:
        if kind not in self._class_numbers:
            self._class_numbers[kind] = len(self.classes)
            self.classes.append(f"{kind.__module__}:{kind.__qualname__}")
        return self._class_numbers[kind]

    def _names(self, kind: type) -> list[str]:
        if kind not in self._slots:
            slots = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
            names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
            self._slots[kind] = [name for name in names if name not in ("__dict__", "__weakref__")]
        return self._slots[kind]


class _Reader:
    """Makes every mutable thing empty first and then fills it, so that cycles close."""

    def __init__(self, classes: list[str], nodes: list[Any]) -> None:
        self.classes = [_find_class(name) for name in classes]
        self.nodes = nodes
        self.made: list[Any] = [None] * len(nodes)
        self.is_made = [False] * len(nodes)
        for number in range(len(nodes)):
            if nodes[number][0] not in ("tuple", "frozenset", "slice", "view"):
                self._keep(number, self._empty(*nodes[number]))
        # What a hash may depend on is filled before what hashes it.
        for number, (kind, *rest) in enumerate(nodes):
            if kind in ("object", "list", "deque"):
                self._fill(self.made[number], kind, *rest)
        for number, (kind, *rest) in enumerate(nodes):
            if kind in DICTS or kind == "set":
                self._fill(self.made[number], kind, *rest)

    def value(self, value: Any) -> Any:
        if type(value) is not list:
            return value
        (number,) = value
        if not self.is_made[number]:
            self._keep(number, self._fixed(*self.nodes[number]))
        return self.made[number]

    def _keep(self, number: int, thing: Any) -> None:
        self.made[number], self.is_made[number] = thing, True

    def _empty(self, kind: str, *rest: Any) -> Any:
        match kind:
            case "list":
                return []
            case "set":
                return set()
            case "deque":
                return deque(maxlen=rest[1])
            case "object":
                return object.__new__(self.classes[rest[0]])
            case "enum":
                return self.classes[rest[0]](rest[1])
            case "numpy":
                return np.frombuffer(rest[1], rest[0])[0]
            case "array":
                return _array(*rest)
        return DICTS[kind]()

    def _fixed(self, kind: str, *rest: Any) -> Any:
        if kind == "view":
            base, dtype, offset, shape, strides = rest
            return np.ndarray(shape, dtype, _bytes_of(self.value(base)), offset, strides)
        items = [self.value(item) for item in rest[0]]
        return slice(*items) if kind == "slice" else tuple(items) if kind == "tuple" else frozenset(items)

    def _fill(self, thing: Any, kind: str, *rest: Any) -> None:
        match kind:
            case "list" | "deque":
                thing.extend(map(self.value, rest[0]))
            case "set":
                thing.update(map(self.value, rest[0]))
            case "object":
                for name, value in zip(rest[1], rest[2], strict=True):
                    object.__setattr__(thing, name, self.value(value))
            case _:
                for key, value in zip(rest[0], rest[1], strict=True):
                    thing[self.value(key)] = self.value(value)


def _array(dtype: str, shape: list[int], used: bytes, pages: bytes, rest: bytes) -> np.ndarray:
    array = np.zeros(shape, dtype)
    data = array.reshape(-1).view(np.uint8)
    whole = data[: len(data) // PAGE * PAGE].reshape(-1, PAGE)
    whole[np.frombuffer(used, "<i8")] = np.frombuffer(pages, np.uint8).reshape(-1, PAGE)
    data[len(whole) * PAGE :] = np.frombuffer(rest, np.uint8)
    return array


def _bytes_of(array: np.ndarray) -> Any:
    return array.reshape(-1).view(np.uint8).data


def _find_class(name: str) -> Any:
    module, _, qualname = name.partition(":")
    if module.partition(".")[0] not in PACKAGES or not qualname.isidentifier():
        raise CheckpointError(f"the checkpoint names {name}, which is no part of a state")
    try:
        found = getattr(importlib.import_module(module), qualname)
    except (ImportError, AttributeError):
        found = None
    if not isinstance(found, type):
        raise CheckpointError(f"the checkpoint is of another release: {name} is not known here")
    return found
