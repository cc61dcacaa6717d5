"""Six spellings of a constraint become one `GrammarSpec`, checked before any work is done.

`spec_of(params, config)` takes what a request asked for and what the engine assumes. Its text is
canonical: a schema given as a dict, as text or as a pydantic model gives one key in the cache.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from json import JSONDecodeError
from typing import Any

from ..core.constraint import GrammarSpec
from ..core.errors import ParameterTypeError, ValidationError
from ..core.structured_params import StructuredOutputsConfig, StructuredOutputsParams
from . import grammar_text, regex_syntax, structural_tags
from .limits import LIMITS, check
from .schema_check import check_schema
from .schema_close import closed

JSON_OBJECT = '{"type":"object"}'


def spec_of(
    params: StructuredOutputsParams, config: StructuredOutputsConfig | None = None
) -> GrammarSpec:
    """Return the grammar that `params` ask for; `config` gives what they leave at its default.

    ValidationError, one sentence that names the place, if the grammar is malformed, has no
    sentence at all, or is over a limit.
    """
    config = config or StructuredOutputsConfig()
    compact = params.disable_any_whitespace or config.disable_any_whitespace
    shut = params.disable_additional_properties or config.disable_additional_properties
    options = _options(params, compact)
    if params.json is not None:
        return GrammarSpec("json", _schema_text(params.json, shut), options)
    if params.json_object is not None:
        return GrammarSpec("json_object", JSON_OBJECT, options)
    if params.choice is not None:
        return GrammarSpec("choice", _choice_text(params.choice))
    if params.regex is not None:
        return GrammarSpec("regex", regex_syntax.checked(params.regex))
    if params.grammar is not None:
        return GrammarSpec(*grammar_text.checked(params.grammar))
    return GrammarSpec("structural_tag", structural_tags.checked(params.structural_tag), options)


def schema_of(value: Any) -> Any:
    """Return the JSON Schema that `value` spells: a dict, JSON text or a pydantic model class."""
    if isinstance(value, str):
        check("json", "characters", len(value), LIMITS.schema)
        return _parsed("json", value)
    if hasattr(value, "model_json_schema"):
        return value.model_json_schema()
    return value


def _schema_text(value: Any, shut: bool) -> str:
    schema = schema_of(value)
    try:
        text = _dumped(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterTypeError(
            f"json must be a schema of plain JSON values, but {error}", parameter="json"
        ) from error
    check("json", "characters", len(text), LIMITS.schema)
    check_schema(schema)
    return _dumped(closed(schema)) if shut else text


def _choice_text(choice: list[str]) -> str:
    check("choice", "choices", len(choice), LIMITS.choices)
    kept = list(dict.fromkeys(choice))
    text = _dumped(kept)
    check("choice", "characters", len(text), LIMITS.grammar)
    for index, item in enumerate(kept):
        if not _is_unicode(item):
            raise ValidationError(
                f"choice[{index}] must be text that UTF-8 can hold, got {item!r}",
                parameter="choice",
                value=item,
            )
    return text


def _options(params: StructuredOutputsParams, compact: bool) -> tuple[tuple[str, Hashable], ...]:
    """Options of JSON; the policy of whitespace is "bounded" unless one of these says otherwise."""
    options: dict[str, Hashable] = {}
    if params.whitespace_pattern is not None:
        if params.disable_any_whitespace:
            raise ValidationError(
                "whitespace_pattern must be None with disable_any_whitespace=True, "
                f"got {params.whitespace_pattern!r}",
                parameter="whitespace_pattern",
                value=params.whitespace_pattern,
            )
        options["whitespace_pattern"] = regex_syntax.checked_whitespace(params.whitespace_pattern)
    elif compact:
        options["whitespace"] = "compact"
    if params.format != "annotation":
        options["format"] = params.format
    return tuple(sorted(options.items()))


def _parsed(field: str, text: str) -> Any:
    """Parse JSON text of a user; the error gives line and column."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except JSONDecodeError as error:
        raise ValidationError(
            f"{field} is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}",
            parameter=field,
            value=text,
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValidationError(
            f"{field} is not valid JSON: {error}", parameter=field, value=text
        ) from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _is_unicode(text: str) -> bool:
    """Whether `text` has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
