"""The options of `decodekit serve`: two tables, the engine's and the server's, and how they parse.

Underscores count as dashes, `--opt.key value` fills a JSON option, every switch has its `--no-`
twin, and `--config FILE` gives any of them; the command line wins over the file.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ...core.errors import ValidationError, did_you_mean
from ...core.param_rules import shown

JSON = "JSON"


@dataclass(frozen=True, slots=True)
class Flag:
    """One option; unset is None, and a switch may be turned off too."""

    name: str
    type: Any
    help: str
    metavar: str | None = None
    short: tuple[str, ...] = ()

    @property
    def is_json(self) -> bool:
        """Whether the value is JSON."""
        return self.metavar == JSON

    def parameter(self, panel: str) -> inspect.Parameter:
        """Describe the option as typer reads it off a function."""
        flag = f"--{self.name.replace('_', '-')}"
        if self.type is bool:
            flag += f"/--no-{self.name.replace('_', '-')}"
        info: Any = typer.Option(
            flag,
            *self.short,
            help=self.help,
            metavar=self.metavar,
            rich_help_panel=panel,
            show_default=False,
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[self.type | None, info],
        )


_NAMES = list[str]

HTTP = (
    Flag("host", str, "Address to listen on; all interfaces unless said."),
    Flag("port", int, "Port; 8000 unless said, 0 takes a free one."),
    Flag("uds", str, "Unix socket to listen on instead.", metavar="PATH"),
    Flag("root_path", str, "Path under which a proxy serves this.", metavar="PATH"),
    Flag("max_body_bytes", int, "Largest body; 32 MiB unless said."),
    Flag("drain_timeout", float, "Seconds that running requests have after SIGTERM; 30."),
    Flag("middleware", _NAMES, "ASGI middleware by import path. Repeatable.", metavar="NAME"),
    Flag("uvicorn_log_level", str, "debug, info, warning, error or critical."),
    Flag("disable_uvicorn_access_log", bool, "Log no line for each request."),
    Flag(
        "disable_access_log_for_endpoints",
        str,
        "Log no line for these paths, separated by commas.",
        metavar="PATHS",
    ),
    Flag("h11_max_incomplete_event_size", int, "Most bytes of request headers; 4 MiB."),
    Flag("disable_playground", bool, "Serve no page at /."),
    Flag("disable_fastapi_docs", bool, "Serve neither /docs nor /openapi.json."),
    Flag("enable_request_id_headers", bool, "Return X-Request-Id."),
)
SECURITY = (
    Flag(
        "api_key",
        _NAMES,
        "Key that clients must send. Repeatable. Also DECODEKIT_API_KEY or VLLM_API_KEY.",
        metavar="KEY",
    ),
    Flag("auth_v1_only", bool, "Ask for the key under /v1 only, as vLLM does."),
    Flag("allowed_origins", _NAMES, "CORS origins; all unless said. Repeatable.", metavar="ORIGIN"),
    Flag("allowed_methods", _NAMES, "CORS methods. Repeatable.", metavar="METHOD"),
    Flag("allowed_headers", _NAMES, "CORS headers. Repeatable.", metavar="HEADER"),
    Flag("allow_credentials", bool, "CORS with credentials."),
    Flag("ssl_keyfile", str, "Private key of the certificate.", metavar="FILE"),
    Flag("ssl_certfile", str, "Certificate: serve HTTPS.", metavar="FILE"),
    Flag("ssl_ca_certs", str, "Authorities whose clients are let in.", metavar="FILE"),
    Flag("ssl_cert_reqs", int, "Whether clients need a certificate: 0 no, 1 may, 2 must."),
)
SERVING = (
    Flag(
        "served_model_name",
        _NAMES,
        "Name of the model in requests; the first stands in answers. Repeatable.",
        metavar="NAME",
    ),
    Flag("strict_fields", bool, "Refuse unknown body fields instead of naming them."),
    Flag("default_max_tokens", int, "Length of an answer where nothing says otherwise."),
    Flag("max_tokens_limit", int, "Most tokens that a request may ask for."),
    Flag("served_preset", _NAMES, "Preset of a served name. Repeatable.", metavar="NAME=PRESET"),
    Flag(
        "allowed_stages",
        _NAMES,
        "Stages that requests may name: a,b or NAME=a,b for a served name. Repeatable.",
        metavar="STAGES",
    ),
    Flag("chat_template_content_format", str, "auto, string or openai."),
    Flag("trust_request_chat_template", bool, "Take chat templates from requests."),
    Flag(
        "default_chat_template_kwargs",
        str,
        "Template variables under those of the request.",
        metavar=JSON,
    ),
    Flag("response_role", str, "Role of the answers; assistant."),
    Flag("enable_auto_tool_choice", bool, "Let the model decide on tool calls."),
    Flag("tool_call_parser", str, "Parser of tool calls: hermes, llama3_json, mistral, json, ..."),
    Flag("tool_parser_plugin", str, "Plugin file with tool parsers.", metavar="FILE"),
    Flag(
        "exclude_tools_when_tool_choice_none",
        bool,
        "Hide the tools from the template under tool_choice='none'.",
    ),
    Flag("reasoning_parser_plugin", str, "Plugin file with reasoning parsers.", metavar="FILE"),
    Flag("reasoning_content_field", bool, "Tell the reasoning as reasoning_content too."),
    Flag(
        "responses_store", int, "Most answers of /v1/responses that are kept; 0, none, unless said."
    ),
    Flag("return_tokens_as_token_ids", bool, 'Show tokens in log-probs as "token_id:N".'),
    Flag("enable_prompt_tokens_details", bool, "Tell the cached tokens in usage."),
    Flag("enable_force_include_usage", bool, "Tell usage on every event of every stream."),
    Flag("control_endpoints", bool, "Serve /sleep, /pause and their kin; on unless said."),
    Flag("tokens_only", bool, "Serve token ids alone, without a tokenizer."),
    Flag("enable_log_requests", bool, "Log each request's prompt and parameters."),
    Flag("enable_log_outputs", bool, "Log each answer."),
    Flag("max_log_len", int, "Most characters of a logged text."),
)
ENGINE = (
    Flag("dtype", str, "auto, float32, bfloat16 or float16."),
    Flag("max_model_len", str, "Longest prompt and answer together.", metavar="LENGTH"),
    Flag("max_num_seqs", int, "Most sequences that run together."),
    Flag("max_num_batched_tokens", int, "Most tokens of one step."),
    Flag("gpu_memory_utilization", float, "Share of the device's memory to use, in (0, 1]."),
    Flag("kv_cache_memory_bytes", str, "Memory of the key/value cache.", metavar="SIZE"),
    Flag("block_size", int, "Tokens of a cache block."),
    Flag("enable_prefix_caching", bool, "Reuse the cache of equal prompt beginnings."),
    Flag("enable_chunked_prefill", bool, "Split long prompts over steps."),
    Flag("scheduling_policy", str, "fcfs or priority."),
    Flag("stream_interval", int, "Tokens between two events of a stream."),
    Flag("enforce_eager", bool, "Capture no graphs."),
    Flag("enable_sleep_mode", bool, "Allow /sleep at levels 1 and 2."),
    Flag("tokenizer", str, "Another tokenizer than the model's."),
    Flag("tokenizer_mode", str, "auto or hf."),
    Flag("skip_tokenizer_init", bool, "Load no tokenizer; prompts are token ids."),
    Flag("chat_template", str, "A Jinja template, or a file with one."),
    Flag("revision", str, "Branch, tag or commit on the hub."),
    Flag("tokenizer_revision", str, "The same for the tokenizer."),
    Flag("trust_remote_code", bool, "Run code that comes with the model."),
    Flag("hf_overrides", str, "Values over the model's config.", metavar=JSON),
    Flag("load_format", str, "auto, safetensors, gguf, or dummy for random weights."),
    Flag("model_impl", str, "auto, decodekit or transformers."),
    Flag("seed", int, "The engine's seed, for requests without one."),
    Flag("max_logprobs", int, "Most log-probs a position; -1 is no limit."),
    Flag("logprobs_mode", str, "Where log-probs are taken."),
    Flag("generation_config", str, "Sampling defaults: auto, vllm (none) or a folder."),
    Flag("override_generation_config", str, "Sampling defaults over these.", metavar=JSON),
    Flag("preset", str, "Preset of requests that name none."),
    Flag("preset_file", str, "File of presets (.toml or .json).", metavar="FILE"),
    Flag("reasoning_parser", str, "Where reasoning stands: deepseek_r1, qwen3, ..."),
    Flag("reasoning_config", str, "Where reasoning begins and ends.", metavar=JSON),
    Flag("structured_outputs_config", str, "How grammars are compiled.", metavar=JSON),
    Flag("speculative_config", str, "What guesses tokens ahead.", metavar=JSON),
    Flag("profile", str, "The named default chain."),
    Flag("plan_review", bool, "Note settings that defeat themselves."),
    Flag("fusion", bool, "Compile chains to fused kernels."),
    Flag("debug", bool, "Check every stage as it runs; show tracebacks."),
    Flag("disable_log_stats", bool, "Measure no times; no /metrics."),
    Flag("profiler_config", str, "Where a torch profile goes.", metavar=JSON),
    Flag("engine", str, "Further arguments of LLM().", metavar=JSON),
    Flag("log_level", str, "debug, info, warning or error."),
)
PLUGINS = (
    Flag(
        "plugins",
        _NAMES,
        "Load this plugin: a name, or a path to a file; no:NAME blocks one. Repeatable.",
        metavar="NAME",
        short=("--plugin", "-p"),
    ),
    Flag("plugin_autoload", bool, "Load installed plugins; on unless said."),
    Flag("strict_plugins", bool, "Refuse to start with a broken plugin."),
    Flag("logits_processors", _NAMES, "vLLM processors, module:Class. Repeatable.", metavar="NAME"),
    Flag("vllm_entry_points", bool, "Load the entry points of vLLM's processors."),
)
PANELS: Mapping[str, Sequence[Flag]] = {
    "Network": HTTP,
    "Security": SECURITY,
    "Serving": SERVING,
    "Engine": ENGINE,
    "Plugins": PLUGINS,
}
BY_NAME = {flag.name: flag for flags in PANELS.values() for flag in flags}
ENGINE_NAMES = frozenset(flag.name for flag in (*ENGINE, *PLUGINS)) - {"engine", "log_level"}


class ServeCommand(TyperCommand):
    """Parses the options as the module says."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spelled = [dashed(arg) for arg in args]
        config = _value_of(spelled, "--config")
        if config is not None:
            ctx.default_map = {**(ctx.default_map or {}), **read_config(Path(config))}
        return super().parse_args(ctx, folded(spelled))


def command(run: Callable[[str | None, dict[str, Any]], None], help: str) -> TyperCommand:
    """Return the command that calls `run` with the model and the options that were given."""

    def serve(**values: Any) -> None:
        model = values.pop("model_tag") or values.pop("model", None)
        values.pop("model", None)
        values.pop("config", None)
        given = {name: value for name, value in values.items() if value not in (None, [])}
        run(model, given)

    model = inspect.Parameter(
        "model_tag",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            str | None,
            typer.Argument(
                metavar="[MODEL]",
                help="A folder, a .gguf file or a hub name; by default the embedded model.",
                show_default=False,
            ),
        ],
    )
    first = (
        Flag("model", str, "The same as an option."),
        Flag("config", str, "YAML file with any of these options.", metavar="FILE"),
    )
    parameters = [model, *(flag.parameter("Serving") for flag in first)]
    for panel, flags in PANELS.items():
        parameters += [flag.parameter(panel) for flag in flags]
    setattr(serve, "__signature__", inspect.Signature(parameters))  # noqa: B010
    serve.__annotations__ = {each.name: each.annotation for each in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(cls=ServeCommand, help=help)(serve)
    made = typer.main.get_command(app)
    assert isinstance(made, TyperCommand)
    return made


# --- spelling -------------------------------------------------------------------------------------


def dashed(arg: str) -> str:
    """Write the underscores of an option's name as dashes, up to its value or its dot."""
    if not arg.startswith("--"):
        return arg
    ends = [place for mark in "=." if (place := arg.find(mark)) > 0]
    end = min(ends, default=len(arg))
    return arg[:end].replace("_", "-") + arg[end:]


def folded(args: Sequence[str]) -> list[str]:
    """Turn `--opt.key value` into `--opt JSON`, over what `--opt JSON` itself says."""
    kept: list[str] = []
    dotted: dict[str, dict[str, Any]] = {}
    left = iter(args)
    for arg in left:
        name, dot, rest = arg.partition(".")
        flag = BY_NAME.get(name[2:].replace("-", "_")) if name.startswith("--") else None
        if not dot or "=" in name or flag is None or not flag.is_json:
            kept.append(arg)
            continue
        path, equals, value = rest.partition("=")
        if not equals:
            value = next(left, "")
        _put(dotted.setdefault(name, {}), path.split("."), value)
    for name, found in dotted.items():
        given = _value_of(kept, name)
        whole = {**({} if given is None else json_of(name, given)), **found}
        kept += [name, json.dumps(whole)]
    return kept


def _put(into: dict[str, Any], path: Sequence[str], text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    for key in path[:-1]:
        into = into.setdefault(key, {})
    into[path[-1]] = value


def _value_of(args: Sequence[str], name: str) -> str | None:
    """Return the last value of an option among unparsed arguments."""
    found = None
    for place, arg in enumerate(args):
        if arg == name and place + 1 < len(args):
            found = args[place + 1]
        elif arg.startswith(f"{name}="):
            found = arg.partition("=")[2]
    return found


def json_of(name: str, text: str) -> dict[str, Any]:
    """Read an option's JSON object; ValidationError with one sentence if it is none."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValidationError(f"{name} is not valid JSON: {error}", parameter=name) from None
    if not isinstance(found, dict):
        raise ValidationError(f"{name} must be a JSON object, got {shown(text)}", parameter=name)
    return found


# --- the file -------------------------------------------------------------------------------------


def read_config(path: Path) -> dict[str, Any]:
    """Read a YAML file of options into defaults by parameter name; unknown ones are refused."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ValidationError(
            f"config {str(path)!r} cannot be read: {error.strerror}", parameter="config"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValidationError(
            f"config {str(path)!r} is no valid YAML: {error}", parameter="config"
        ) from error
    if not isinstance(found, dict):
        raise ValidationError(f"config {str(path)!r} must hold options by name", parameter="config")
    return {name: value for key, given in found.items() for name, value in [_default(key, given)]}


def _default(key: object, value: Any) -> tuple[str, Any]:
    name = str(key).lstrip("-").replace("-", "_")
    if name in ("model", "model_tag"):
        return "model", value
    flag = BY_NAME.get(name)
    if flag is None:
        known = [*BY_NAME, "model"]
        raise ValidationError(
            f"config has no option {key!r}{did_you_mean(name, known)}", parameter=name, value=value
        )
    if flag.is_json and isinstance(value, Mapping):
        return name, json.dumps(value)
    if flag.type == _NAMES and value is not None and not isinstance(value, list):
        return name, [str(value)]
    return name, value
