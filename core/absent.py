"""What the API references name and this version lacks: one row each, refused with one sentence.

A feature that arrives strikes its row. Rows of engine arguments and request fields say which
values ask for nothing, since those are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from .errors import NotInThisVersion
from .param_rules import shown

T = TypeVar("T")

ENGINE_ARGUMENT = "engine argument"
REQUEST_FIELD = "request field"
CALL_ARGUMENT = "call argument"
METHOD = "method"
TASK = "pooling task"
PROMPT_KEY = "prompt key"
COMMAND = "command"
FLAG = "flag"

_POOLING = "this version generates text only"
_TEXT_ONLY = "prompts are text or token ids"
_ONE_DEVICE = "one engine runs on one device"
_OFFLOAD = "weights stay on the device that runs them"
_ADAPTERS = "merge the adapter into the weights and load the result as the model"


@dataclass(frozen=True, slots=True)
class Absent:
    """One name that is refused.

    `asks` says whether a value asks for the feature; None: the name alone does.
    """

    what: str
    name: str
    instead: str | None = None
    asks: Callable[[Any], bool] | None = None

    def sentence(self, value: object = None) -> str:
        """The whole message; `value` is shown where the name takes one."""
        named = f"{self.name}={shown(value)}" if self.asks is not None else self.name
        alternative = f"; {self.instead}" if self.instead else ""
        return f"the {self.what} {named} is not in this version of decodekit{alternative}"

    def refuse(self, value: object = None) -> NoReturn:
        """Raise the sentence."""
        raise NotInThisVersion(self.sentence(value), parameter=self.name, value=value)


def other_than(*neutral: object) -> Callable[[Any], bool]:
    """Any value but these asks for the feature; 1 and True are told apart."""
    return lambda value: (
        not any(value is item or (type(value) is type(item) and value == item) for item in neutral)
    )


def check_engine_args(args: object) -> None:
    """Refuse the first argument of `args` that asks for something this version does not have."""
    for row in ENGINE_ARGUMENTS:
        value = getattr(args, row.name)
        if row.asks is not None and row.asks(value):
            row.refuse(value)


def check_params(params: Any) -> None:
    """Refuse the first field, of SamplingParams or RequestParams, that this version cannot do."""
    for row in REQUEST_FIELDS:
        value = getattr(params, row.name)
        if row.asks is not None and row.asks(value):
            row.refuse(value)


def check_call(**arguments: object) -> None:
    """Refuse the first of these arguments of a method that is set and known to be absent."""
    for row in CALL_ARGUMENTS:
        value = arguments.get(row.name)
        if row.asks is not None and row.asks(value):
            row.refuse(value)


def check_prompt(prompt: Mapping[str, object]) -> None:
    """Refuse a prompt dict with a key, set to something, that this version does not read."""
    for row in PROMPT_KEYS:
        value = prompt.get(row.name)
        if value is not None and not (isinstance(value, (dict, list)) and not value):
            row.refuse(value)


def refuse(name: str, what: str | None = None) -> NoReturn:
    """Raise the sentence of the row called `name`; `what` settles a name of two tables."""
    for row in ALL:
        if row.name == name and what in (None, row.what):
            row.refuse()
    raise LookupError(f"no row for {name!r} ({what or 'of any kind'}) in the table of absent names")


def refuses_methods(cls: type[T]) -> type[T]:
    """Decorate a class: each absent method that it does not have raises its sentence."""
    for row in METHODS:
        if not hasattr(cls, row.name):
            setattr(cls, row.name, _refusal(row))
    return cls


def _refusal(row: Absent) -> Callable[..., NoReturn]:
    def method(self: object, *args: object, **kwargs: object) -> NoReturn:
        row.refuse()

    method.__name__ = row.name
    method.__doc__ = row.sentence()
    return method


def _arg(name: str, *neutral: object, instead: str | None = None) -> Absent:
    return Absent(ENGINE_ARGUMENT, name, instead, other_than(*neutral))


def _field(name: str, *neutral: object, instead: str | None = None) -> Absent:
    return Absent(REQUEST_FIELD, name, instead, other_than(*neutral))


def _rows(what: str, instead: str | None, *names: str) -> tuple[Absent, ...]:
    return tuple(Absent(what, name, instead) for name in names)


ENGINE_ARGUMENTS: tuple[Absent, ...] = (
    _arg("runner", "auto", "generate", instead=_POOLING),
    _arg("convert", "auto", "none", instead=_POOLING),
    _arg("tokenizer_mode", "auto", "hf", instead="use 'auto' or 'hf'"),
    _arg("allowed_local_media_path", "", instead=_TEXT_ONLY),
    _arg("allowed_media_domains", None, [], instead=_TEXT_ONLY),
    _arg("tensor_parallel_size", 1, instead=_ONE_DEVICE),
    _arg("pipeline_parallel_size", 1, instead=_ONE_DEVICE),
    _arg("data_parallel_size", 1, instead="start one engine a replica"),
    _arg("distributed_executor_backend", None, "uni", instead=_ONE_DEVICE),
    _arg("disable_custom_all_reduce", False, instead=_ONE_DEVICE),
    _arg(
        "quantization",
        None,
        instead="load a GGUF file, whose weights are expanded, or an unquantised checkpoint",
    ),
    _arg("cpu_offload_gb", 0, 0.0, instead=_OFFLOAD),
    _arg("offload_group_size", 0, instead=_OFFLOAD),
    _arg("offload_num_in_group", 1, instead=_OFFLOAD),
    _arg("offload_prefetch_step", 1, instead=_OFFLOAD),
    _arg("offload_params", None, instead=_OFFLOAD),
    _arg("enable_return_routed_experts", False),
    _arg("mm_processor_kwargs", None, {}, instead=_TEXT_ONLY),
    _arg("limit_mm_per_prompt", None, {}, instead=_TEXT_ONLY),
    _arg("mm_processor_cache_gb", 4, 4.0, instead=_TEXT_ONLY),
    _arg("pooler_config", None, instead=_POOLING),
    _arg("attention_config", None, instead="offer an attention backend as a plugin"),
    _arg("compilation_config", None, instead="use fusion=False to run every stage by itself"),
    _arg("kv_cache_dtype", "auto", instead="the cache has the model's dtype"),
    _arg("async_scheduling", None, False, instead="leave it out"),
    _arg("enable_lora", False, instead=_ADAPTERS),
    _arg("max_loras", 1, instead=_ADAPTERS),
    _arg("max_lora_rank", 16, instead=_ADAPTERS),
    _arg("max_cpu_loras", None, instead=_ADAPTERS),
    _arg("lora_dtype", "auto", instead=_ADAPTERS),
    _arg("fully_sharded_loras", False, instead=_ADAPTERS),
    _arg("default_mm_loras", None, {}, instead=_ADAPTERS),
    _arg("weight_transfer_config", None, instead="make the engine again with the new weights"),
    _arg("kv_transfer_config", None),
    _arg("batch_invariant", False, instead="run requests one at a time (max_num_seqs=1)"),
)

REQUEST_FIELDS: tuple[Absent, ...] = ()

CALL_ARGUMENTS: tuple[Absent, ...] = tuple(
    Absent(CALL_ARGUMENT, name, instead, other_than(None, *neutral))
    for name, neutral, instead in (
        ("lora_request", ([],), _ADAPTERS),
        ("mm_processor_kwargs", ({},), _TEXT_ONLY),
        ("trace_headers", ({},), None),
        ("data_parallel_rank", (), "start one engine a replica"),
        ("reasoning_ended", (False,), None),
        ("reset_connector", (False,), "this version has no cache connector"),
    )
)

METHODS: tuple[Absent, ...] = (
    *_rows(METHOD, _POOLING, "encode", "embed", "classify", "reward", "score"),
    *_rows(METHOD, _ONE_DEVICE, "get_world_size"),
    *_rows(
        METHOD,
        "make the engine again with the new weights",
        "init_weight_transfer_engine",
        "update_weights",
    ),
    *_rows(METHOD, _TEXT_ONLY, "reset_mm_cache"),
    *_rows(METHOD, _ADAPTERS, "add_lora", "remove_lora", "list_loras", "pin_lora"),
)
TASKS: tuple[Absent, ...] = _rows(
    TASK,
    _POOLING,
    "embed",
    "classify",
    "reward",
    "score",
    "token_embed",
    "token_classify",
    "plugin",
)
PROMPT_KEYS: tuple[Absent, ...] = _rows(
    PROMPT_KEY,
    _TEXT_ONLY,
    "multi_modal_data",
    "mm_processor_kwargs",
    "multi_modal_uuids",
    "token_type_ids",
    "encoder_prompt",
    "decoder_prompt",
    "data",
    "data_format",
)
COMMANDS: tuple[Absent, ...] = (
    *_rows(COMMAND, "use `decodekit generate` for files", "run-batch"),
    *_rows(COMMAND, "use `decodekit generate`", "complete"),
    *_rows(COMMAND, "use `decodekit doctor`", "collect-env"),
    *_rows(COMMAND, None, "launch"),
)
FLAGS: tuple[Absent, ...] = _rows(
    FLAG,
    "clients run their tools themselves",
    "tool_server",
) + _rows(FLAG, _ADAPTERS, "lora_modules")

ALL: tuple[Absent, ...] = (
    *ENGINE_ARGUMENTS,
    *REQUEST_FIELDS,
    *CALL_ARGUMENTS,
    *METHODS,
    *TASKS,
    *PROMPT_KEYS,
    *COMMANDS,
    *FLAGS,
)
