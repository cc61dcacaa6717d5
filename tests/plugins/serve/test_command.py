"""`decodekit serve`: options, the config file, the start-up line, and a real process to its end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from decodekit.core.cli import app
from decodekit.core.config import EngineArgs
from decodekit.core.errors import ValidationError
from decodekit.plugins.serve import flags
from decodekit.plugins.serve.command import split
from decodekit.plugins.serve.settings import ServeSettings

TALK: Any = [{"role": "user", "content": "What is the capital of France?"}]


def parsed(*args: str) -> tuple[EngineArgs, ServeSettings, dict[str, Any]]:
    """What the command makes of its arguments."""
    found: list[Any] = []
    command = flags.command(lambda model, given: found.append(split(model, given)), "help")
    command.main(list(args), standalone_mode=False)
    [made] = found
    return made  # type: ignore[no-any-return]


def test_options_go_to_the_engine_the_server_and_the_listener() -> None:
    engine, own, listener = parsed(
        "folder", "--max-model-len", "2k", "--no-enable-prefix-caching", "--served-model-name", "a",
        "--served-model-name", "b", "--api-key", "k", "--port", "0", "--strict-fields",
        "--logits-processors", "m:C", "-p", "no:xtc",
    )  # fmt: skip

    assert (engine.model, engine.max_model_len) == ("folder", 2000)
    assert engine.enable_prefix_caching is False
    assert engine.served_model_name == ["a", "b"]
    assert (engine.logits_processors, engine.plugins) == (["m:C"], ["no:xtc"])
    assert (own.api_key, own.strict_fields, own.served_model_name) == (["k"], True, ["a", "b"])
    assert listener == {"port": 0}


def test_underscores_dots_and_json_are_understood() -> None:
    engine, own, _ = parsed(
        "--max_num_seqs=8",
        "--override_generation_config", '{"top_k": 5}',
        "--override-generation-config.temperature", "0.5",
        "--default-chat-template-kwargs.deep.key=word",
        "--engine", '{"max_num_batched_tokens": 64}',
    )  # fmt: skip

    assert engine.max_num_seqs == 8
    assert engine.override_generation_config == {"top_k": 5, "temperature": 0.5}
    assert own.default_chat_template_kwargs == {"deep": {"key": "word"}}
    assert engine.max_num_batched_tokens == 64


def test_the_command_line_wins_over_the_config_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: folder\nport: 9000\nserved_model_name: [x, y]\nenable-prefix-caching: false\n"
        "default-chat-template-kwargs: {mood: calm}\nmax-model-len: 512\nstrict-fields: true\n"
    )
    engine, own, listener = parsed("--config", str(path), "--port", "1", "--no-strict-fields")

    assert (engine.model, engine.max_model_len) == ("folder", 512)
    assert engine.enable_prefix_caching is False
    assert own.served_model_name == ["x", "y"]
    assert own.default_chat_template_kwargs == {"mood": "calm"}
    assert own.strict_fields is False
    assert listener["port"] == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("prot: 1", "did you mean 'port'"), ("[1]", "must hold options"), (": :", "no valid YAML")],
)
def test_a_bad_config_file_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)

    with pytest.raises(ValidationError, match=sentence):
        parsed("--config", str(path))
    with pytest.raises(ValidationError, match="cannot be read"):
        parsed("--config", str(tmp_path / "nowhere.yaml"))


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--hf-overrides", "{"], "not valid JSON"),
        (["--dtype", "float8"], "dtype must be"),
        (["--max-tokens-limit", "0"], "max_tokens_limit must be"),
        (["--engine", '{"dtype": "float32"}', "--dtype", "float32"], "given twice"),
        (["--lora-modules", "a=b"], "not in this version"),
        (["--tensor-parallel-size", "2"], "not in this version"),
    ],
    ids=str,
)
def test_a_bad_option_ends_in_one_sentence(args: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["serve", *args])

    assert result.exit_code == 2
    assert sentence in result.output


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["serve", "--host", "127.0.0.1", "--port", port])

    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in result.output


def test_every_option_of_the_reference_is_known() -> None:
    """Those of section 1 that this version serves."""
    known = {f"--{name.replace('_', '-')}" for name in flags.BY_NAME}
    wanted = """--host --port --uds --api-key --served-model-name --chat-template
        --chat-template-content-format --trust-request-chat-template --default-chat-template-kwargs
        --response-role --return-tokens-as-token-ids --structured-outputs-config --reasoning-config
        --logits-processors --max-logprobs --logprobs-mode --generation-config
        --override-generation-config --max-model-len --gpu-memory-utilization
        --kv-cache-memory-bytes --dtype --enforce-eager --enable-prefix-caching
        --scheduling-policy --enable-sleep-mode --enable-prompt-tokens-details
        --enable-force-include-usage --enable-request-id-headers --enable-log-requests
        --enable-log-outputs --max-log-len --disable-log-stats --tokens-only --strict-fields
        --root-path --middleware --allowed-origins --allowed-methods --allowed-headers
        --allow-credentials --ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs
        --uvicorn-log-level --disable-uvicorn-access-log --disable-access-log-for-endpoints
        --disable-fastapi-docs --h11-max-incomplete-event-size --preset-file --default-max-tokens
        --max-tokens-limit""".split()

    assert set(wanted) <= known


@pytest.fixture(scope="module")
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The embedded model served by a process of its own, with a key."""
    command = [sys.executable, "-m", "decodekit", "serve", "--host", "127.0.0.1", "--port", "0",
               "--served-model-name", "smol", "--max-model-len", "512"]  # fmt: skip
    environ = {**os.environ, "DECODEKIT_API_KEY": "secret", "COLUMNS": "200"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as running:
        assert running.stderr is not None
        told = ""
        while "http://" not in told:
            told = running.stderr.readline()
            assert told, "the server ended"
        yield running, told
        running.kill()


def test_a_real_process_serves_the_official_client_until_sigterm(
    process: tuple[subprocess.Popen[str], str],
) -> None:
    running, line = process
    found = re.search(r"(http://127\.0\.0\.1:\d+) serves smol; a key is needed", line)
    assert found is not None, line
    url = found[1]
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 401

    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="smol", messages=TALK, max_tokens=12, temperature=0
        )
        chunks = client.chat.completions.create(
            model="smol", messages=TALK, max_tokens=12, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        schema = {"type": "object", "properties": {"capital": {"enum": ["Paris", "Rome"]}},
                  "required": ["capital"], "additionalProperties": False}  # fmt: skip
        made = client.chat.completions.create(
            model="smol", messages=TALK, temperature=0, max_tokens=40,
            response_format={"type": "json_schema",
                             "json_schema": {"name": "it", "schema": schema}},
        )  # fmt: skip
    assert answer.choices[0].message.content == text
    assert "Paris" in text
    assert json.loads(made.choices[0].message.content or "")["capital"] in ("Paris", "Rome")

    running.send_signal(signal.SIGTERM)
    assert running.wait(30) in (0, -signal.SIGTERM)
