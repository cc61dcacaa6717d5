"""What /metrics tells, read by the official parser."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

BODY = {"prompt": "abc", "max_tokens": 6, "ignore_eos": True}


def samples(url: str) -> dict[str, float]:
    """Name of each sample, with its telling labels, and its value."""
    text = httpx.get(f"{url}/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + (str(sorted(own.items())) if own else "")] = sample.value
    return found


def test_requests_leave_their_counts_and_times(serve: Any) -> None:
    server = serve()
    url = f"{server.url}/v1/completions"
    for body in (BODY, {**BODY, "stream": True}, {**BODY, "n": 2}):
        assert httpx.post(url, json=body).status_code == 200
    httpx.post(url, json={**BODY, "top_p": 7})
    httpx.post(url, json={**BODY, "nonsense_field": 1, "user": "me"})
    told = samples(server.url)

    assert told["decodekit:generation_tokens_total"] == 6 + 6 + 12 + 6
    assert told["decodekit:prompt_tokens_total"] == 12
    assert told["decodekit:request_success_total[('finished_reason', 'length')]"] == 5
    assert told["decodekit:num_requests_running"] == 0
    assert told["decodekit:kv_cache_usage_perc"] == 0
    assert told["decodekit:inter_token_latency_seconds_count"] == 5
    spans = """time_to_first_token e2e_request_latency request_queue_time request_inference_time
        request_prefill_time request_decode_time""".split()
    for name in spans:
        assert told[f"decodekit:{name}_seconds_count"] == 4
        assert told[f"decodekit:{name}_seconds_sum"] >= 0
    assert told["decodekit:request_generation_tokens_sum"] == 30
    assert told["decodekit:request_params_n_sum"] == 5
    labels = [("handler", "/v1/completions"), ("method", "POST"), ("status", "400")]
    assert told[f"decodekit:http_requests_total{labels}"] == 1
    assert told["decodekit:ignored_fields_total[('field', 'other')]"] == 1
    assert told["decodekit:ignored_fields_total[('field', 'user')]"] == 1
    assert told["decodekit:engine_sleep_state[('sleep_state', 'awake')]"] == 1


def test_every_metric_has_the_models_name(serve: Any) -> None:
    text = httpx.get(f"{serve().url}/metrics").text

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "http_request_duration" not in sample.name:
                assert sample.labels.get("model_name") == "table", sample


def test_there_are_none_without_statistics(serve: Any) -> None:
    server = serve(disable_log_stats=True, engine={"disable_log_stats": True})

    assert httpx.get(f"{server.url}/metrics").status_code == 404
    assert httpx.post(f"{server.url}/v1/completions", json=BODY).status_code == 200
