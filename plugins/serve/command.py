"""`decodekit serve`: check everything, load the model, listen, and end without losing a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...core.config import AsyncEngineArgs
from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.stage import CommandSpec
from .flags import BY_NAME, ENGINE_NAMES, command, json_of
from .settings import ServeSettings, keys_of_environment

HELP = """Serve a model over HTTP, compatible with OpenAI's API.

Every option may stand in a YAML file (--config), and --opt.key VALUE fills a JSON option."""

# Options of the listener itself, which neither the engine nor the application reads.
LISTENER = frozenset(
    """host port uds ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs uvicorn_log_level
    disable_uvicorn_access_log disable_access_log_for_endpoints h11_max_incomplete_event_size
    """.split()
)


def run(model: str | None, given: dict[str, Any]) -> None:
    """Serve until a signal ends it."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValidationError(
            f"serve needs the package {error.name}: pip install 'decodekit[serve]'"
        ) from error
    arguments, settings, listener = split(model, given)
    from .server import serve

    serve(arguments, settings, listener)


def split(
    model: str | None, given: dict[str, Any]
) -> tuple[AsyncEngineArgs, ServeSettings, dict[str, Any]]:
    """Share the options out: to the engine, to the application, to the listener."""
    values: dict[str, Any] = {
        name: json_of(f"--{name.replace('_', '-')}", value) if BY_NAME[name].is_json else value
        for name, value in given.items()
    }
    if level := values.pop("log_level", None):
        from ..console.options import set_log_level

        set_log_level(level)
    further = values.pop("engine", {})
    files = [
        values.pop(name)
        for name in ("tool_parser_plugin", "reasoning_parser_plugin")
        if name in values
    ]
    if files:
        values["plugins"] = [*values.get("plugins", ()), *dict.fromkeys(files)]
    engine: dict[str, Any] = {name: values[name] for name in values if name in ENGINE_NAMES}
    for name in further:
        if name in engine:
            raise ValidationError(
                f"{name} is given twice, by an option of its own and in --engine", parameter=name
            )
    listener = {name: values[name] for name in values if name in LISTENER}
    own = {
        name: value
        for name, value in values.items()
        if name not in ENGINE_NAMES and name not in LISTENER
    }
    own.setdefault("api_key", keys_of_environment())
    settings = ServeSettings(
        **own,
        disable_log_stats=bool(values.get("disable_log_stats", False)),
    )
    if settings.tokens_only:
        engine["skip_tokenizer_init"] = True
    names = settings.served_model_name or None
    arguments = AsyncEngineArgs(model=model, served_model_name=names, **engine, **further)
    return arguments, settings, listener


@hookimpl
def decodekit_commands() -> Iterable[CommandSpec]:
    return [CommandSpec("serve", command(run, HELP))]
