"""Command-line options and environment variables from the settings records (services/settings.py)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from services.settings import Address, ByteSize, CommonSettings, Metavar, SettingsError, flag_of, variable_of, words_of

Settings = TypeVar("Settings", bound=CommonSettings)

METAVARS = {
    Address: "HOST:PORT",
    Address | None: "HOST:PORT",
    ByteSize: "SIZE",
    ByteSize | None: "SIZE",
    Path: "FOLDER",
    Path | None: "FOLDER",
    float: "SECONDS",
}


def ordered_fields(kind: type[CommonSettings]) -> list[dataclasses.Field[Any]]:
    """The fields of a settings record, its own first and those that all services share last."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    names = [name for base in kind.__mro__ for name in vars(base).get("__annotations__", {}) if name in fields]
    return [fields[name] for name in dict.fromkeys(names)]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default value of a settings field."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def arguments(settings: CommonSettings) -> list[str]:
    """The command line that makes these settings again: what a supervisor starts a service with."""
    fields = dataclasses.fields(settings)
    return [word for field in fields for word in words_of(field.name, getattr(settings, field.name))]


def _parser(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse_option(text: str) -> Any:
        try:
            return parse(text)
        except SettingsError as error:
            raise typer.BadParameter(str(error)) from error

    return parse_option


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    """The typer option of one settings field, which has the type Annotated[type, help, bounds?]."""
    assert get_origin(hint) is Annotated, field.name
    kind, text, *more = get_args(hint)
    default = default_of(field)
    metavar = next((mark.text for mark in more if isinstance(mark, Metavar)), METAVARS.get(kind))
    option: dict[str, Any] = {"help": text, "envvar": variable_of(field.name), "metavar": metavar}
    parsed = next((each for each in (Address, ByteSize) if kind in (each, each | None)), None)
    if parsed is not None:
        option["parser"] = _parser(parsed.parse)
        default = None if default is None else str(default)
    if isinstance(default, StrEnum):
        option["case_sensitive"] = False
    if default in ("", None):
        option["show_default"] = False
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, typer.Option(_flags(field.name, kind), **option)],
    )


def _flags(name: str, kind: Any) -> str:
    """`--flag`, or `--flag/--no-flag` for a yes or no."""
    return f"{flag_of(name)}/{flag_of(f'no_{name}')}" if kind is bool else flag_of(name)


def takes(kind: type[Settings]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make `command(settings, *, more options)` a typer command with an option for each field of `kind`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(kind, include_extras=True)
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        fields = ordered_fields(kind)

        def call(**values: Any) -> None:
            command(kind(**{field.name: values.pop(field.name) for field in fields}), **values)

        parameters = [*(_parameter(field, hints[field.name]) for field in fields), *own]
        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return decorate
