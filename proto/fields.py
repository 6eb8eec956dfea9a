"""Tables that turn a record into plain msgpack values and back, built once from the dataclasses' annotations.

A record is the array of its fields, in the order of the dataclass. A field's annotation fixes its form:

    bool, int, str, float       themselves; floats are finite
    IntEnum                     an int, one of the members
    bytes                       bin
    Int32, Int64, Float32       bin, little-endian items
    tuple[int, ...]             bin, little-endian int64 items
    tuple[float, ...]           bin, little-endian float64 items
    dict[str, float]            map
    record                      array of its fields
    record | None, float | None either, or nil
    tuple[form, ...]            array
    tuple[A | B, ...]           array of [tag, fields]

Anything else is an error when the table is built. Every record is checked (proto.checks) when it is written and when
it is read. A table reads only values of exactly these types: no coercion, except of int to float.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import IntEnum
from math import isfinite
from struct import error as StructError
from struct import pack
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from proto.checks import CHECKS
from proto.errors import CodecError
from proto.messages import Float32, Int32, Int64

MAX_ITEMS = 65_536  # entries of one array or map
MAX_TEXT_BYTES = 1 << 20

Convert = Callable[[Any], Any]


class Form:
    """How one kind of value is written to and read from msgpack. Both raise CodecError."""

    __slots__ = ("read", "write")

    def __init__(self, write: Convert, read: Convert) -> None:
        self.write = write
        self.read = read


def _wrong(wanted: str, value: object) -> CodecError:
    return CodecError("", f"must be {wanted}, not {type(value).__name__}")


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise _wrong("true or false", value)
    return value


def _int(value: Any) -> int:
    if type(value) is not int:
        raise _wrong("an integer", value)
    if not -(1 << 63) <= value < 1 << 64:
        raise CodecError("", f"does not fit 64 bits: {value}")
    return value


def _float(value: Any) -> float:
    if type(value) is not float:
        if type(value) is not int:
            raise _wrong("a number", value)
        return float(_int(value))
    if not isfinite(value):
        raise CodecError("", f"must be finite, not {value}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _wrong("text", value)
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError:
        raise CodecError("", "holds a lone surrogate, which UTF-8 cannot carry") from None
    if size > MAX_TEXT_BYTES:
        raise CodecError("", f"takes {size} bytes, more than {MAX_TEXT_BYTES}")
    return value


def _bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise _wrong("bytes (bin)", value)
    return value


def _counters(value: Any) -> dict[str, float]:
    if type(value) is not dict:
        raise _wrong("a map", value)
    if len(value) > MAX_ITEMS:
        raise CodecError("", f"has {len(value)} entries, more than {MAX_ITEMS}")
    checked = {}
    for key, number in value.items():
        try:
            checked[_text(key)] = _float(number)
        except CodecError as error:
            raise error.within(f"[{str(key)[:80]!r}]") from None
    return checked


def _enum(enum: type[IntEnum]) -> Form:
    members = {int(member): member for member in enum}

    def write(value: Any) -> int:
        if type(value) is not enum:
            raise _wrong(f"a {enum.__name__}", value)
        return int(value)

    def read(value: Any) -> IntEnum:
        member = members.get(value) if type(value) is int else None
        if member is None:
            raise CodecError("", f"is no {enum.__name__}: {value!r:.80}")
        return member

    return Form(write, read)


def _column(dtype: np.dtype[Any]) -> Form:
    def write(value: Any) -> bytes:
        if type(value) is not np.ndarray or (value.dtype is not dtype and value.dtype != dtype) or value.ndim != 1:
            found = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
            raise CodecError("", f"must be a one-dimensional {dtype} column, not {found}")
        return value.tobytes()

    def read(value: Any) -> Any:
        if type(value) is not bytes:
            raise _wrong(f"a {dtype} column (bin)", value)
        if len(value) % dtype.itemsize:
            raise CodecError("", f"{len(value)} bytes are no whole number of {dtype} items")
        return np.frombuffer(value, dtype)

    return Form(write, read)


def _numbers(dtype: np.dtype[Any], item: Convert) -> Form:
    column, code = _column(dtype), {"i": "q", "f": "d"}[dtype.kind]

    def write(value: Any) -> bytes:
        if type(value) is not tuple:
            raise _wrong("a tuple", value)
        if not value:
            return b""
        for number in value:
            item(number)
        try:
            return pack(f"<{len(value)}{code}", *value)
        except StructError:
            raise CodecError("", f"holds a number that does not fit {dtype}") from None

    def read(value: Any) -> tuple[Any, ...]:
        if value == b"":
            return ()
        numbers = column.read(value)
        if dtype.kind == "f" and not np.isfinite(numbers).all():
            raise CodecError("", "must be finite")
        return tuple(numbers.tolist())

    return Form(write, read)


def _optional(form: Form) -> Form:
    def write(value: Any) -> Any:
        return None if value is None else form.write(value)

    def read(value: Any) -> Any:
        return None if value is None else form.read(value)

    return Form(write, read)


def _many(form: Form) -> Form:
    def convert(values: Any, kind: type[list[Any]] | type[tuple[Any, ...]], one: Convert) -> list[Any]:
        if type(values) is not kind:
            raise _wrong(f"a {kind.__name__}", values)
        if len(values) > MAX_ITEMS:
            raise CodecError("", f"has {len(values)} entries, more than {MAX_ITEMS}")
        converted: list[Any] = []
        try:
            for value in values:
                converted.append(one(value))  # noqa: PERF401 - its length is the place of the error
        except CodecError as error:
            raise error.within(f"[{len(converted)}]") from None
        return converted

    def write(values: Any) -> list[Any]:
        return convert(values, tuple, form.write) if values != () else []

    def read(values: Any) -> tuple[Any, ...]:
        return tuple(convert(values, list, form.read)) if values != [] else ()

    return Form(write, read)


class TaggedUnion:
    """A closed set of records, each with a tag. `inner` are the tags of unions inside them."""

    def __init__(self, tags: Mapping[type, int], inner: Mapping[type, int]) -> None:
        self._tags = dict(tags)
        self._types = {tag: record for record, tag in tags.items()}
        self._tables = {record: record_form(record, inner) for record in tags}
        assert len(self._types) == len(self._tags), "two records have one tag"

    def write(self, value: Any) -> list[Any]:
        """[tag, fields] of a record."""
        record = type(value)
        table = self._tables.get(record)
        if table is None:
            raise _wrong("one of " + ", ".join(record.__name__ for record in self._tags), value)
        try:
            return [self._tags[record], table.write(value)]
        except CodecError as error:
            raise error.within(record.__name__) from None

    def read(self, value: Any) -> Any:
        """The record of [tag, fields]."""
        if type(value) is not list or len(value) != 2:
            raise _wrong("an array of tag and fields", value)
        return self.read_fields(self.record_of(value[0]), value[1])

    def read_fields(self, record: type, fields: Any) -> Any:
        """A record from its fields."""
        try:
            return self._tables[record].read(fields)
        except CodecError as error:
            raise error.within(record.__name__) from None

    def record_of(self, tag: Any) -> type:
        """The type of record that a tag stands for."""
        record = self._types.get(tag) if type(tag) is int else None
        if record is None:
            raise CodecError("", f"unknown tag {tag!r:.80}")
        return record


def record_form(record: type, tags: Mapping[type, int]) -> Form:
    """The table of one record; `tags` are those of the unions inside it."""
    hints = get_type_hints(record)
    names = tuple(field.name for field in fields(record))
    forms = tuple(_form(hints[name], tags) for name in names)
    named_writers = tuple((name, form.write) for name, form in zip(names, forms, strict=True))
    # A slot's descriptor stores past the frozen __setattr__, in half the time; every field is stored, so that no
    # default is missed.
    stores = tuple((name, getattr(record, name).__set__, form.read) for name, form in zip(names, forms, strict=True))
    check = CHECKS[record]

    def write(value: Any) -> list[Any]:
        if type(value) is not record:
            raise _wrong(f"a {record.__name__}", value)
        written: list[Any] = []
        name = ""
        try:
            for name, write_field in named_writers:
                written.append(write_field(getattr(value, name)))
        except CodecError as error:
            raise error.within(name) from None
        check(value)
        return written

    def read(value: Any) -> Any:
        if type(value) is not list:
            raise _wrong(f"the fields of {record.__name__} (array)", value)
        if len(value) != len(names):
            raise CodecError("", f"{record.__name__} has {len(names)} fields, not {len(value)}")
        built: Any = object.__new__(record)
        name = ""
        try:
            for raw, (name, store, read_field) in zip(value, stores, strict=True):  # noqa: B007 - told by the error
                store(built, read_field(raw))
        except CodecError as error:
            raise error.within(name) from None
        check(built)
        return built

    return Form(write, read)


_FORMS: dict[Any, Form] = {
    bool: Form(_bool, _bool),
    int: Form(_int, _int),
    float: Form(_float, _float),
    str: Form(_text, _text),
    bytes: Form(_bytes, _bytes),
    dict[str, float]: Form(_counters, _counters),
    Int32: _column(np.dtype("<i4")),
    Int64: _column(np.dtype("<i8")),
    Float32: _column(np.dtype("<f4")),
    tuple[int, ...]: _numbers(np.dtype("<i8"), _int),
    tuple[float, ...]: _numbers(np.dtype("<f8"), _float),
}


def _form(hint: Any, tags: Mapping[type, int]) -> Form:
    if hint in _FORMS:
        return _FORMS[hint]
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return _enum(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return record_form(hint, tags)
    arguments = get_args(hint)
    if isinstance(hint, UnionType):
        if len(arguments) == 2 and arguments[1] is NoneType:
            return _optional(_form(arguments[0], tags))
        union = TaggedUnion({record: tags[record] for record in arguments}, {})
        return Form(union.write, union.read)
    if get_origin(hint) is tuple and arguments[1:] == (...,):
        return _many(_form(arguments[0], tags))
    raise TypeError(f"no form for fields of type {hint}")
