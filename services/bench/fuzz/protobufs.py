"""Protobuf messages of any schema: filled at random, or near one that a client might send."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from services.bench.fuzz.mutate import FLOATS, INTEGERS, MAX_RANDOM, TEXTS, mutated_bytes

Kind = Any  # a Descriptor, and a Field is a FieldDescriptor: of either implementation, which share no type
Field = Any

MAX_DEPTH = 4
COUNTS = (0, 1, 1, 2, 3, 100)  # of a repeated field
BITS = {
    FieldDescriptor.CPPTYPE_INT32: (32, True),
    FieldDescriptor.CPPTYPE_INT64: (64, True),
    FieldDescriptor.CPPTYPE_UINT32: (32, False),
    FieldDescriptor.CPPTYPE_UINT64: (64, False),
    FieldDescriptor.CPPTYPE_ENUM: (31, False),
}


def lie(draw: random.Random, kind: Kind, likely: list[Message]) -> bytes:
    """Bytes for a method that takes a message of this kind: noise, a random message, or one near a likely one."""
    chance = draw.random()
    if chance < 0.1:
        return draw.randbytes(draw.randrange(MAX_RANDOM))
    if chance < 0.4 or not likely:
        return filled(draw, kind).SerializeToString()
    message = GetMessageClass(kind)()
    message.CopyFrom(draw.choice(likely))
    if chance < 0.7:
        fill(draw, message)
        return message.SerializeToString()
    return mutated_bytes(draw, message.SerializeToString())


def filled(draw: random.Random, kind: Kind, depth: int = 0) -> Message:
    """A message of this kind with some of its fields."""
    message: Message = GetMessageClass(kind)()
    fill(draw, message, depth)
    return message


def fill(draw: random.Random, message: Message, depth: int = 0) -> None:
    """Set some fields of a message to what nobody may have thought of."""
    fields = [one for one in message.DESCRIPTOR.fields if depth < MAX_DEPTH or one.message_type is None]
    for field in draw.sample(fields, min(len(fields), draw.choice((1, 1, 2, 4, 8)))):
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(draw, getattr(message, field.name), field.message_type, depth)
        elif field.is_repeated:
            count = draw.choice(COUNTS if field.message_type is None else COUNTS[:-1])
            getattr(message, field.name).extend(_value(draw, field, depth) for _ in range(count))
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(_value(draw, field, depth))
        else:
            setattr(message, field.name, _value(draw, field, depth))


def _fill_map(draw: random.Random, entries: Any, kind: Kind, depth: int) -> None:
    key, value = kind.fields_by_name["key"], kind.fields_by_name["value"]
    for _ in range(draw.choice(COUNTS)):
        one = _value(draw, key, depth)
        if value.message_type is None:
            entries[one] = _value(draw, value, depth)
        else:
            entries[one].CopyFrom(_value(draw, value, depth))


def _value(draw: random.Random, field: Field, depth: int) -> Any:
    """One value of a field's type."""
    if field.message_type is not None:
        return filled(draw, field.message_type, depth + 1)
    if field.cpp_type in BITS:
        bits, signed = BITS[field.cpp_type]
        number = draw.choice(INTEGERS) % 2**bits
        return number - 2**bits if signed and number >= 2 ** (bits - 1) else number
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return draw.choice(FLOATS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return draw.random() < 0.5
    text = draw.choice(TEXTS)
    return text if field.type == FieldDescriptor.TYPE_STRING else text.encode()
