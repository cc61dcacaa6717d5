"""A comparison from the command line: its files, its texts, a server, and what is refused."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from decodekit.core.engine import LLMEngine
from decodekit.core.params import RequestOutputKind, SamplingParams

from .conftest import Decodekit

SHORT = ("--max-tokens", "6", "--no-progress")


def outputs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "outputs.jsonl").read_text().splitlines()]


def test_profiles_become_columns_with_texts_figures_and_a_plot(
    decodekit: Decodekit, engine: LLMEngine, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\n\nhello there\n")
    folder = tmp_path / "out"

    result = decodekit(
        *("compare", "TINY", "--profiles", "vllm,transformers", "--prompts", str(prompts)),
        *("--seeds", "1,2", "--temperature", "0.9", "-o", str(folder), *SHORT),
    )

    assert result.exit_code == 0, result.output
    found = outputs(folder)
    places = {(line["prompt"], line["column"], line["seed"]) for line in found}
    assert len(found) == len(places) == 8
    with Image.open(folder / "plot.png") as picture:
        assert min(picture.size) > 200
    columns = json.loads((folder / "summary.json").read_text())["columns"]
    assert [column["name"] for column in columns] == ["vllm", "transformers"]
    assert columns[0]["agreement"] == columns[0]["identical"] == 1.0
    page = (folder / "texts.md").read_text()
    assert "## hello there" in page
    assert "transformers" in result.stdout

    params = SamplingParams(
        temperature=0.9,
        seed=2,
        max_tokens=6,
        profile="transformers",
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine.add_request("alone", "abc", params)
    alone = [
        output for _ in iter(engine.has_unfinished_requests, False) for output in engine.step()
    ]
    [mine] = [
        line
        for line in found
        if (line["prompt"], line["column"], line["seed"]) == ("abc", "transformers", 2)
    ]
    assert mine["token_ids"] == list(alone[-1].outputs[0].token_ids)


def test_a_sweep_draws_a_line_for_each_field(decodekit: Decodekit, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    result = decodekit(
        *("compare", "TINY", "--baseline", "temperature=0", "--vary", "temperature=.5,1"),
        *("--vary", "top_k=1,3", "--prompt", "abc", "-o", str(folder), *SHORT),
    )

    assert result.exit_code == 0, result.output
    columns = json.loads((folder / "summary.json").read_text())["columns"]
    assert [column["varied"] for column in columns] == [
        *(None, "temperature", "temperature", "top_k", "top_k")
    ]
    assert columns[-1]["identical"] == 1.0  # temperature 0 stays greedy under any top-k


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--profiles", "vllm,klingon"), "column 'klingon': profile must be one of"),
        (("--vary", "top_p=1,2"), "column 'top_p=2': top_p"),
        (("--profiles", "vllm"), "2 to 64 columns"),
        (("--profiles", "vllm,sglang", "--seeds", "x"), "--seeds must be different integers"),
        (("--profiles", "vllm,sglang", "--url", "ftp://x"), "--url must be an http"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    options: tuple[str, ...], sentence: str, decodekit: Decodekit, tmp_path: Path
) -> None:
    result = decodekit(*("compare", "TINY", "--prompt", "a", "-o", str(tmp_path), *options, *SHORT))

    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())


def test_an_earlier_comparison_is_not_replaced_unless_asked(
    decodekit: Decodekit, tmp_path: Path
) -> None:
    command = ("compare", "TINY", "--profiles", "vllm,sglang", "--prompt", "a", "--no-plot")
    assert decodekit(*command, "-o", str(tmp_path), *SHORT).exit_code == 0
    before = (tmp_path / "outputs.jsonl").read_bytes()

    refused = decodekit(*command, "-o", str(tmp_path), *SHORT)
    assert refused.exit_code == 2
    assert "--overwrite replaces it" in " ".join(refused.output.split())
    assert (tmp_path / "outputs.jsonl").read_bytes() == before
    assert decodekit(*command, "-o", str(tmp_path), "--overwrite", *SHORT).exit_code == 0
    assert not (tmp_path / "plot.png").exists()


class Handler(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that answers with its request; top_k 13 fails."""

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked.get("top_k") == 13:
            self.answer(400, {"error": {"message": "top_k is unlucky"}})
            return
        record = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -1.5]}
        choice = {"text": json.dumps(asked), "finish_reason": "stop", "logprobs": record}
        self.answer(200, {"choices": [choice], "usage": {"completion_tokens": 2}})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_is_asked_for_each_text_and_a_refusal_stays_with_its_column(
    url: str, decodekit: Decodekit, tmp_path: Path
) -> None:
    result = decodekit(
        *("compare", "--url", url, "--vary", "top_k=5,13", "--prompt", "abc", "--no-plot"),
        *("--temperature", "0.5", "-o", str(tmp_path), *SHORT),
    )

    assert result.exit_code == 1
    first, second, third = sorted(outputs(tmp_path), key=lambda line: str(line["column"]))
    assert json.loads(second["text"] if second["error"] is None else third["text"]) == {
        "model": "served",
        "temperature": 0.5,
        "max_tokens": 6,
        "seed": 1,
        "top_k": 5,
        "prompt": "abc",
        "logprobs": 0,
    }
    assert first["mean_logprob"] == -1.0
    assert [line["error"] for line in (first, second, third)].count(
        "HTTP 400: top_k is unlucky"
    ) == 1


def test_a_server_that_does_not_answer_is_said_once_or_with_each_text(
    decodekit: Decodekit, tmp_path: Path
) -> None:
    command = ("--profiles", "vllm,sglang", "--url", "http://127.0.0.1:9", "--prompt", "a")

    unnamed = decodekit("compare", *command, "-o", str(tmp_path / "a"), *SHORT)
    assert unnamed.exit_code == 2
    assert "names no model" in " ".join(unnamed.output.split())

    named = decodekit("compare", "served", *command, "-o", str(tmp_path / "b"), *SHORT)
    assert named.exit_code == 1
    assert all("does not answer" in str(line["error"]) for line in outputs(tmp_path / "b"))
