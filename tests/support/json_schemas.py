"""Over 200 JSON schemas of the kind that people send, and a check that a value is of one.

BASES are written by hand, after what is asked for in practice: extraction, classification, function arguments, forms.
The others put each of them where it usually stands: in a list, behind a reference, as an optional or nullable part,
or as one case of a union.
"""

from __future__ import annotations

from typing import Any

import jsonschema

Schema = dict[str, Any]


def obj(required: Schema, optional: Schema | None = None, **more: Any) -> Schema:
    """An object as strict clients write it."""
    properties = {**required, **(optional or {})}
    closed = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return closed | more


def one_of(*values: object) -> Schema:
    return {"enum": list(values)}


def array(items: Schema, least: int | None = None, most: int | None = None) -> Schema:
    limits = {name: value for name, value in (("minItems", least), ("maxItems", most)) if value is not None}
    return {"type": "array", "items": items, **limits}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT: Schema = {"type": "string"}
SHORT: Schema = {"type": "string", "maxLength": 20}
NUMBER: Schema = {"type": "number"}
INT: Schema = {"type": "integer"}
BOOL: Schema = {"type": "boolean"}
PRICE: Schema = {"type": "number", "minimum": 0}
SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
DATE: Schema = {"type": "string", "format": "date"}
MOOD: Schema = {"type": "string", "enum": ["positive", "negative", "neutral"]}
ADDRESS = obj({"street": TEXT, "city": TEXT, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}, {"country": TEXT})
POINT = obj({"lat": {"type": "number", "minimum": -90, "maximum": 90}, "lon": NUMBER})

CAT, DOG = obj({"kind": {"const": "cat"}, "lives": INT}), obj({"kind": {"const": "dog"}, "tricks": INT})

BASES: list[Schema] = [
    obj({"name": TEXT, "age": INT}),
    obj({"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 150}}, {"email": TEXT}),
    obj({"sentiment": MOOD, "confidence": SHARE}),
    obj({"label": one_of("spam", "ham"), "reason": TEXT}),
    obj({"city": one_of("Paris", "Rome")}),
    obj({"location": TEXT, "unit": one_of("celsius", "fahrenheit")}),
    obj({"answer": TEXT, "sources": array(TEXT)}),
    obj({"steps": array(obj({"explanation": TEXT, "output": TEXT})), "final_answer": TEXT}),
    obj({"name": TEXT, "date": DATE, "participants": array(TEXT)}, title="CalendarEvent"),
    obj({"invoice": TEXT, "lines": array(obj({"item": TEXT, "count": INT, "price": PRICE}), 1, 3), "total": PRICE}),
    obj({"person": obj({"first": TEXT, "last": TEXT}), "address": ADDRESS}),
    ADDRESS,
    POINT,
    obj({"points": array(POINT, 2, 3)}),
    obj({"id": {"type": "string", "format": "uuid"}, "active": BOOL}),
    obj({"sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, "stock": INT}),
    obj({"phone": {"type": "string", "pattern": r"^\+?[0-9]{7,12}$"}}),
    obj({"version": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"}}),
    obj({"color": {"type": "string", "pattern": "^#[0-9a-fA-F]{6}$"}}),
    obj({"time": {"type": "string", "format": "time"}, "day": one_of("Mon", "Tue", "Wed", "Thu", "Fri")}),
    obj({"at": {"type": "string", "format": "date-time"}}),
    obj({"mail": {"type": "string", "format": "email"}}),
    obj({"host": {"type": "string", "format": "ipv4"}, "port": {"type": "integer", "minimum": 1, "maximum": 65535}}),
    obj({"title": SHORT, "tags": array(SHORT, 0, 5)}),
    obj({"query": TEXT}, {"limit": INT, "offset": INT, "sort": one_of("asc", "desc")}),
    obj({"sql": TEXT, "dangerous": BOOL}),
    obj({"function": {"const": "search"}, "arguments": obj({"query": TEXT})}),
    obj({"action": one_of("buy", "sell", "hold"), "amount": {"type": "integer", "exclusiveMinimum": 0}}),
    obj({"rating": one_of(1, 2, 3, 4, 5), "review": TEXT}),
    obj({"value": {"anyOf": [TEXT, NUMBER, BOOL]}}),
    obj({"value": {"type": ["string", "null"]}}),
    obj({"parent": nullable(INT), "name": TEXT}),
    obj({"entities": array(obj({"text": TEXT, "type": one_of("PER", "ORG", "LOC"), "start": INT, "end": INT}))}),
    obj({"triples": array({"type": "array", "prefixItems": [TEXT, TEXT, TEXT], "items": False, "minItems": 3})}),
    obj({"matrix": array(array(INT, 2, 2), 2, 2)}),
    obj({"scores": {"type": "object", "additionalProperties": SHARE}}),
    obj({"meta": {"type": "object", "additionalProperties": TEXT}, "ok": BOOL}),
    {"type": "object", "properties": {"a": INT, "b": TEXT}, "required": ["a"]},
    {"type": "object", "properties": {"a": INT, "b": TEXT}},
    {"type": "object"},
    array(TEXT, 1, 4),
    array(INT),
    {"type": "string", "enum": ["yes", "no", "maybe"]},
    MOOD,
    BOOL,
    INT,
    {"type": "number", "minimum": -1, "maximum": 1},
    {"$ref": "#/$defs/Node", "$defs": {"Node": obj({"value": INT, "next": nullable({"$ref": "#/$defs/Node"})})}},
    {"$ref": "#/$defs/T", "$defs": {"T": obj({"name": SHORT, "children": array({"$ref": "#/$defs/T"}, 0, 2)})}},
    obj({"pet": {"oneOf": [CAT, DOG]}}),
]


def in_list(schema: Schema) -> Schema:
    return hoisted(obj({"items": array(schema, 0, 2), "count": INT}), schema)


def referred(schema: Schema) -> Schema:
    """As pydantic writes a model inside a model."""
    inner = {name: value for name, value in schema.items() if name != "$defs"}
    definitions = {**schema.get("$defs", {}), "Inner": {**inner, "title": "Inner", "description": "A part."}}
    return obj({"id": INT, "data": {"$ref": "#/$defs/Inner"}}) | {"$defs": definitions, "title": "Outer"}


def optional(schema: Schema) -> Schema:
    return hoisted(obj({"status": one_of("ok", "error")}, {"result": nullable(schema), "message": SHORT}), schema)


def in_union(schema: Schema) -> Schema:
    failure = obj({"error": SHORT, "code": one_of(400, 404, 500)})
    return hoisted({"anyOf": [failure, obj({"kind": {"const": "value"}, "value": schema})]}, schema)


def hoisted(outer: Schema, inner: Schema) -> Schema:
    """References are to the document's root, so definitions must stand there."""
    return outer | ({"$defs": inner["$defs"]} if "$defs" in inner else {})


SCHEMAS: list[Schema] = [wrap(base) for base in BASES for wrap in (dict, in_list, referred, optional, in_union)]
QUICK: list[Schema] = SCHEMAS[:: len(SCHEMAS) // 15]


def conforms(value: object, schema: Schema) -> str | None:
    """What is wrong with a value; None if it is of the schema."""
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    error = next(iter(validator.iter_errors(value)), None)
    return None if error is None else error.message
