"""The request to /inference/v1/generate that another request comes down to."""

from __future__ import annotations

from typing import Any

from .protocol import Common
from .running import Job
from .sampling import params_as_json


def rendered(call_id: str, model: str, job: Job, body: Common) -> dict[str, Any]:
    """Return a body that can be posted to /inference/v1/generate as it is."""
    options = body.stream_options
    return {
        "request_id": call_id,
        "token_ids": list(job.prompt.ids),
        "features": None,
        "sampling_params": params_as_json(job.params),
        "model": model,
        "stream": bool(body.stream),
        "stream_options": None if options is None else options.model_dump(exclude_none=True),
        "cache_salt": job.salt,
        "priority": job.priority,
        "kv_transfer_params": None,
    }
