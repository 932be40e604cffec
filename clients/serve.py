"""`lockstep serve`: its options are the fields of `ServeSettings`, so that the two cannot drift apart."""

import difflib
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from clients.errors import ClientError
from clients.pull import DEFAULT_MODEL, KNOWN_MODELS, resolve
from scheduler.serve.settings import ServeSettings

FIELDS = {field.name: field for field in msgspec.structs.fields(ServeSettings)}
ENV_PREFIX = "LOCKSTEP_"
VARIABLES = frozenset({"CACHE", "CONFIG", "URL", *(name.upper() for name in FIELDS)})
"""Every variable that means something to one of the commands, without the prefix."""


class ConfigFileError(ClientError):
    """A TOML file that is not one, or holds a key or a value no option takes."""


def read_config(path: Path) -> dict[str, Any]:
    """The options set in the TOML file at `path`, by field name. Keys are written as the flags are.

    Raises `ConfigFileError` naming the file and the key.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigFileError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigFileError(f"{path}: {error}") from error
    for key, value in document.items():
        if isinstance(value, dict):
            raise ConfigFileError(f"{path}: [{key}]: there are no tables, options stand at the top")
    return {_field_of(key, path): _value_of(key, value, path) for key, value in document.items()}


def _field_of(key: str, path: Path) -> str:
    name = key.replace("-", "_")
    if name not in FIELDS:
        options = [known.replace("_", "-") for known in FIELDS]
        near = difflib.get_close_matches(key, options, n=1)
        hint = f", did you mean {near[0]!r}?" if near else f" (known: {', '.join(options)})"
        raise ConfigFileError(f"{path}: unknown key {key!r}{hint}")
    return name


def _value_of(key: str, value: Any, path: Path) -> Any:
    field = FIELDS[key.replace("-", "_")]
    kind = str if field.name == "model" else field.type
    try:
        return msgspec.convert(value, kind, dec_hook=lambda wanted, given: wanted(given))
    except msgspec.ValidationError as error:
        raise ConfigFileError(f"{path}: {key}: {error}{_accepted(kind)}") from error


def _accepted(kind: Any) -> str:
    """How a value of `kind` is written, where msgspec's message does not say."""
    match msgspec.inspect.type_info(kind):
        case msgspec.inspect.Metadata(type=msgspec.inspect.VarTupleType()):
            return ', such as ["abc"]'
        case msgspec.inspect.Metadata(type=msgspec.inspect.LiteralType(values=values)):
            return f" (one of {', '.join(map(str, values))})"
    return ""


def unknown_variables(env: Mapping[str, str]) -> Iterator[str]:
    """A warning for each variable of `env` that looks like one of ours and is none."""
    given = {name.removeprefix(ENV_PREFIX) for name in env if name.startswith(ENV_PREFIX)}
    for name in sorted(given - VARIABLES):
        near = difflib.get_close_matches(name, VARIABLES, n=1)
        yield f"{ENV_PREFIX}{name} is no option" + (f", did you mean {ENV_PREFIX}{near[0]}?" if near else "")


def _use_config(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    if path is not None:
        ctx.default_map = read_config(path)


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with one option per field of `ServeSettings` but the model."""
    for field in reversed(msgspec.inspect.type_info(ServeSettings).fields):  # type: ignore[attr-defined]
        if field.name != "model":
            command = _option(field)(command)
    return command


def _option(field: msgspec.inspect.Field) -> Callable[[Callable[..., None]], Callable[..., None]]:
    assert isinstance(field.type, msgspec.inspect.Metadata)
    schema = field.type.extra_json_schema or {}
    kind, multiple = _click_type(field.type.type)
    return click.option(
        f"--{field.name.replace('_', '-')}",
        field.name,
        type=kind,
        is_flag=kind is click.BOOL,
        multiple=multiple,
        default=field.default,
        envvar=ENV_PREFIX + field.name.upper(),
        help=schema["description"],
        show_default=not multiple and field.default is not None,
    )


def _click_type(kind: msgspec.inspect.Type) -> "tuple[click.ParamType[Any], bool]":
    """The click type that parses `kind`, and whether the option may be given many times."""
    match kind:
        case msgspec.inspect.VarTupleType():
            return _click_type(kind.item_type)[0], True
        case msgspec.inspect.UnionType():
            (inner,) = (t for t in kind.types if not isinstance(t, msgspec.inspect.NoneType))
            return _click_type(inner)
        case msgspec.inspect.LiteralType():
            return click.Choice([str(value) for value in kind.values]), False
        case msgspec.inspect.BoolType():
            return click.BOOL, False
        case msgspec.inspect.IntType():
            return click.INT, False
        case msgspec.inspect.FloatType():
            return click.FLOAT, False
        case msgspec.inspect.CustomType():
            return click.Path(path_type=Path), False
        case msgspec.inspect.StrType():
            return click.STRING, False
        case _:
            raise AssertionError(f"no option is made of {kind}")


def _check_key_variable(keys: tuple[str, ...]) -> None:
    """Raise `ClientError` rather than serve everyone where a key was meant, such as by a variable that has none."""
    name = ENV_PREFIX + "API_KEY"
    if not keys and name in os.environ:
        raise ClientError(f"{name} is set but blank: put a key in it, or unset it to need none")


@click.command("serve")
@click.argument("model", default=DEFAULT_MODEL, envvar=ENV_PREFIX + "MODEL")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar=ENV_PREFIX + "CONFIG",
    is_eager=True,
    expose_value=False,
    callback=_use_config,
    help="TOML file of options, keys written as the flags without their dashes in front: slots = 8.",
)
@_options
def command(model: str, **options: Any) -> None:
    """Serve MODEL, the path of a .gguf file or a known name, on an OpenAI-compatible HTTP API.

    Without MODEL the default one is fetched into the cache folder first. Each option is also read from the environment
    (LOCKSTEP_PORT, ...) and from a TOML file; a flag beats the environment, which beats the file.
    """
    for warning in unknown_variables(os.environ):
        click.echo(f"Warning: {warning}", err=True)
    _check_key_variable(options["api_key"])
    settings = ServeSettings(model=Path(model), **options)
    if not settings.served_model_name and model in KNOWN_MODELS:
        settings = msgspec.structs.replace(settings, served_model_name=(model,))
    settings = msgspec.structs.replace(settings, model=resolve(model))

    from scheduler.serve.app import run

    raise SystemExit(run(settings))
