"""The served OpenAPI document is true: bodies made by it meet no 5xx and no undocumented answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks

from decodekit.core.params import FIELD_NAMES
from decodekit.plugins.serve.live import LiveServer
from decodekit.plugins.serve.settings import ServeSettings

# Left out: they stop the server's work for all tests that follow.
STOPPING = ("/sleep", "/pause")
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]
BOUNDED = settings(
    max_examples=15,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
ONLY_IN_PYTHON = {
    "logits_processors", "output_tensors", "output_kind", "skip_clone", "detokenize",
    "output_text_buffer_length",
}  # fmt: skip


@pytest.fixture(scope="module")
def short(table_folder: str) -> Iterator[LiveServer]:
    """A server with a short context and few answers a request, so that nothing runs long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECODEKIT_MAX_N_SEQUENCES", "3")
        own = ServeSettings(served_model_name=["table"])
        with LiveServer(table_folder, settings=own, max_model_len=48, max_num_seqs=16) as server:
            yield server


@pytest.fixture(scope="module")
def api(short: LiveServer) -> Any:
    """The document as schemathesis reads it."""
    schema = schemathesis.openapi.from_url(f"{short.url}/openapi.json")
    return schema.exclude(path=list(STOPPING))


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.name)
def test_random_requests_get_documented_answers(api: Any, mode: GenerationMode) -> None:
    """Each endpoint gets bodies that its schema allows, then bodies that it does not."""
    seen = 0
    for result in api.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and operation.method == "get":
            continue

        @BOUNDED
        @given(case=operation.as_strategy(generation_mode=mode))
        def probe(case: Any) -> None:
            case.call_and_validate(checks=CHECKS)

        probe()
        seen += 1
    assert seen > 8


def test_every_json_field_of_a_request_is_served(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for name in ("ChatRequest", "CompletionRequest"):
        served = set(document["components"]["schemas"][name]["properties"])
        assert set(FIELD_NAMES) - ONLY_IN_PYTHON - served == set()
