"""What would run, as a table and as JSON."""

import json

from .conftest import Decodekit


def test_explain_shows_order_values_sources_and_what_was_dropped(decodekit: Decodekit) -> None:
    options = ("--temperature", "0.7", "--top-p", "1", "--top-k", "5", "--max-tokens", "9")

    report = json.loads(decodekit("explain", "TINY", *options, "--json").stdout)
    shown = decodekit("explain", "TINY", *options).stdout

    assert [step["stage"] for step in report["order"]] == ["temperature", "top_k", "race"]
    assert report["order"][0]["provenance"]["t"] == "request"
    assert "top_p" in [item["stage"] for item in report["dropped"]]
    assert report["fields"] == {"max_tokens": {"value": 9, "from": "request"}}
    assert report["fingerprint"] in shown
    assert shown.index("temperature") < shown.index("top_k") < shown.index("race")
    assert "t = 0.7" in shown
    assert "top_p is neutral" in shown


def test_a_default_of_the_command_says_so(decodekit: Decodekit) -> None:
    report = json.loads(decodekit("explain", "TINY", "--json").stdout)

    assert report["fields"]["max_tokens"]["from"] == "this command"


def test_values_with_brackets_are_shown_as_they_are(decodekit: Decodekit) -> None:
    shown = decodekit("explain", "TINY", "--stop", "[/b]").stdout

    assert "['[/b]']" in shown


def test_an_order_that_cannot_run_is_refused(decodekit: Decodekit) -> None:
    result = decodekit("explain", "TINY", "--chain", "top_k=5,allowed_tokens=[5]")

    assert result.exit_code == 2
    assert "top_k" in result.stderr
    assert "allowed_tokens" in result.stderr
