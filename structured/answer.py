"""What the finished or growing text of a constrained request is as a value.

While a JSON text grows, its value so far is plain data, with an unfinished string cut where it is;
at the end a pydantic model gives an object of the model. A text that is no value keeps the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError as PydanticError
from pydantic_core import from_json

from ..core.constraint import GrammarSpec
from ..core.structured_params import StructuredOutputsParams, is_model_class
from .compiler import Ticket
from .schema_document import Document
from .validate import Validator, loads


class Reader:
    """How the answers of one request are read."""

    def __init__(self, wanted: StructuredOutputsParams, spec: GrammarSpec, ticket: Ticket) -> None:
        self._model: Any = wanted.json if is_model_class(wanted.json) else None
        self._spec = spec
        self._ticket = ticket

    @property
    def is_json(self) -> bool:
        """Whether the answer is a JSON text."""
        return self._spec.kind in ("json", "json_object")

    def growing(self, text: str) -> Mapping[str, Any]:
        """Return the fields of an output whose text still grows."""
        return {"parsed": partial_value(text)} if self.is_json else {}

    def finished(self, text: str, *, complete: bool, cut_by: str | None) -> Mapping[str, Any]:
        """Return the fields of a finished output; `cut_by` says what ended it early, if anything.

        Where the grammar was approximate, a text that the schema refuses is not complete.
        """
        value, error = self._read(text) if self.is_json else (None, None)
        fields: dict[str, Any] = {"parsed": value}
        if self._ticket.approximate:
            fields["approximate"] = [refusal.pointer for refusal in self._ticket.approximate]
            if self.is_json and error is None:
                error = self._fault(text)
                complete = complete and error is None
        if error is not None and cut_by is not None:
            error = f"{cut_by}: {error}"
        return {**fields, "parse_error": error, "complete": complete}

    def _read(self, text: str) -> tuple[Any, str | None]:
        """Return the value, and why there is none."""
        try:
            if self._model is not None:
                return self._model.model_validate_json(text), None
            return json.loads(text), None
        except PydanticError as error:
            return None, str(error)
        except (ValueError, RecursionError) as error:
            return None, f"the text is not JSON: {error}"

    def _fault(self, text: str) -> str | None:
        """Say what is wrong with a text that was constrained approximately."""
        try:
            value = loads(text)
        except (ValueError, RecursionError) as error:
            return f"the text does not fit the schema: {error}"
        if Validator(Document(json.loads(self._spec.text))).valid(value):
            return None
        return "the text does not fit the schema, which was enforced approximately (strict=False)"


def partial_value(text: str) -> Any:
    """Return the value of a JSON text that is still being written, or None before it begins."""
    try:
        return from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return None
