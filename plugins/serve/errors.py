"""What goes wrong over HTTP: one exception, one body, and how our own errors become either."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError as BodyError

from ...core.errors import EngineDeadError, ValidationError
from ...core.param_rules import shown

log = logging.getLogger("decodekit.serve")

TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    413: "RequestEntityTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """An answer other than 200: status, one sentence, the field it speaks of."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, kind: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.kind = kind or TYPES.get(status) or HTTPStatus(status).phrase

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer, as OpenAI's clients read it."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.status,
            }
        }


def bad(message: str, param: str | None = None) -> ApiError:
    """Return a 400 with this sentence."""
    return ApiError(400, message, param=param)


def not_found(message: str, param: str | None = None) -> ApiError:
    """Return a 404 with this sentence."""
    return ApiError(404, message, param=param)


def shutting_down() -> ApiError:
    """Return the answer to requests that the end of the server cuts off."""
    return ApiError(503, "the server is shutting down; send the request again elsewhere")


def as_api_error(error: BaseException) -> ApiError:
    """Turn any exception into an answer; what nobody foresaw is logged and told without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return bad(str(error), error.parameter)
    if isinstance(error, BodyError):
        return _of_body(error)
    if isinstance(error, EngineDeadError):
        return ApiError(500, str(error))
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"the server failed on this request ({type(error).__name__}); see its log")


def _of_body(error: BodyError) -> ApiError:
    """Name the first field that pydantic refuses; the names of union branches mean nothing here."""
    first = error.errors(include_url=False)[0]
    path = [part for part in first["loc"] if isinstance(part, int) or part.islower()]
    path = [part for part in path if part not in _BRANCHES]
    name = _joined(path)
    if first["type"] == "missing":
        sentence = f"{name or 'the body'} is required"
    else:
        said = first["msg"][:1].lower() + first["msg"][1:]
        sentence = f"{name or 'the body'}: {said}, got {shown(first['input'])}"
    param = next((part for part in reversed(path) if isinstance(part, str)), None)
    return ApiError(400, sentence, param=param, kind="Bad Request")


_BRANCHES = {"str", "int", "float", "bool", "dict", "list", "none"}


def _joined(path: list[str | int]) -> str:
    name = ""
    for part in path:
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += f".{part}" if name else part
    return name
