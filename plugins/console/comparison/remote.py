"""Run the texts of a comparison on an OpenAI-compatible server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from statistics import fmean
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from ....core.errors import ValidationError
from .outcome import Job, Outcome

AT_ONCE = 16
TIMEOUT_S = 600.0
MOST_LETTERS = 300  # of an error body


class Server:
    """A server's base address, such as http://127.0.0.1:8000/v1, with its key and model."""

    def __init__(self, url: str, *, key: str | None = None, model: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValidationError(
                f"--url must be an http or https address such as http://127.0.0.1:8000/v1, "
                f"got {url!r}",
                parameter="url",
                value=url,
            )
        base = url.rstrip("/")
        self.base = base if base.endswith("/v1") else f"{base}/v1"
        self.key = key
        self.model = model or self._first_model()

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send one request and return its JSON; OSError with one sentence if that fails."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.base}{path}", data=data, headers=headers)
        try:
            with urlopen(request, timeout=TIMEOUT_S) as answer:
                found = json.load(answer)
        except HTTPError as error:
            said = error.read().decode(errors="replace")
            raise OSError(f"HTTP {error.code}: {_message(said)}") from None
        except URLError as error:
            raise OSError(f"{self.base} does not answer: {error.reason}") from None
        except ValueError:
            raise OSError(f"{self.base}{path} did not answer with JSON") from None
        if not isinstance(found, dict):
            raise OSError(f"{self.base}{path} answered with {type(found).__name__}, not an object")
        return found

    def _first_model(self) -> str:
        try:
            return str(self.ask("/models")["data"][0]["id"])
        except (OSError, LookupError, TypeError) as error:
            raise ValidationError(
                f"--url {self.base} names no model: {error}", parameter="url", value=self.base
            ) from None


def run(
    server: Server, common: Mapping[str, Any], jobs: Sequence[Job], *, chat: bool
) -> Iterator[Outcome]:
    """Yield each outcome as it is done; a request that fails is an outcome with an error."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        waiting: set[Future[Outcome]] = {
            pool.submit(_one, server, common, job, chat) for job in jobs
        }
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            for future in waiting:
                future.cancel()


def _one(server: Server, common: Mapping[str, Any], job: Job, chat: bool) -> Outcome:
    fields = {**common, "seed": job.seed, **job.column.fields}
    body: dict[str, Any] = {
        "model": server.model,
        **{name: value for name, value in fields.items() if value is not None},
    }
    if chat:
        body |= {"messages": [{"role": "user", "content": job.text}], "logprobs": True}
    else:
        body |= {"prompt": job.text, "logprobs": 0}
    try:
        answer = server.ask("/chat/completions" if chat else "/completions", body)
        return _outcome(job, answer, chat)
    except OSError as error:
        return Outcome(job, error=str(error))
    except (LookupError, TypeError, AttributeError) as error:
        return Outcome(job, error=f"the answer is no completion: {error!r}")


def _outcome(job: Job, answer: Mapping[str, Any], chat: bool) -> Outcome:
    choice = answer["choices"][0]
    text = (choice["message"].get("content") if chat else choice["text"]) or ""
    record = choice.get("logprobs") or {}
    if chat:
        entries = record.get("content") or []
        units = [entry["token"] for entry in entries]
        values = [entry["logprob"] for entry in entries]
    else:
        units = record.get("tokens") or []
        values = record.get("token_logprobs") or []
    known = [value for value in values if isinstance(value, int | float)]
    usage = answer.get("usage") or {}
    return Outcome(
        job,
        text=text,
        units=tuple(units) or tuple(text.split()),
        num_tokens=int(usage.get("completion_tokens") or len(units) or len(text.split())),
        finish_reason=choice.get("finish_reason"),
        mean_logprob=fmean(known) if known else None,
    )


def _message(body: str) -> str:
    """Find the sentence in an error body of OpenAI's form, or take its beginning."""
    try:
        found = json.loads(body)
        inner = found.get("error", found)
        return str(inner.get("message", body) if isinstance(inner, dict) else inner)
    except (ValueError, AttributeError):
        return body[:MOST_LETTERS]
