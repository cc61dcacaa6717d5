"""What `make demo` shows."""

import pytest

from decodekit.core.models.locate import EMBEDDED_INSTALL
from decodekit.plugins.console import demo

from .conftest import Decodekit


def test_the_demo_answers_completes_and_says_what_ran(
    decodekit: Decodekit, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DRAWN", "BEST"):  # the same chains, cut short
        short = getattr(demo, name).with_fields({"max_tokens": 8})
        monkeypatch.setattr(demo, name, short)

    result = decodekit("demo")

    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("SmolLM2-135M-Instruct (135M parameters")
    question, opening = lines.index(f"Chat: {demo.QUESTION}"), lines.index(demo.SECOND)
    assert lines[question + 1].strip()
    assert lines[opening + 1].startswith(demo.OPENING)
    assert len(lines[opening + 1]) > len(demo.OPENING)
    chains = [line for line in lines if "tokens/s" in line]
    assert [line.partition(" | ")[0] for line in chains] == [
        "repetition_penalty 1.1 > temperature 0.5 > min_p 0.05 > top_p 0.9 > race",
        "greedy",
    ]
    assert "decodekit chat" in lines[-3]


def test_without_the_embedded_model_the_demo_says_how_to_install_it(
    decodekit: Decodekit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decodekit.core.models.locate._EMBEDDED_PACKAGE", "no_such_package")

    result = decodekit("demo")

    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith(f"install it with: {EMBEDDED_INSTALL}\n")
