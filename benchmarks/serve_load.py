"""Load on the server: streaming clients with random settings, some of which leave in mid-answer.

    python benchmarks/serve_load.py                    # 500 requests of 64 clients, then offline
    python benchmarks/serve_load.py --terminate        # SIGTERM in the middle

Starts `decodekit serve` in a process of its own, sends the requests over loopback, and compares
tokens a second with `LLM.generate` on the same requests. Ends with exit code 1 if a request fails
or hangs, if anything is left in the engine, or if its memory grows in the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any

WORDS = "the cat sat on a mat and looked at some birds in an old garden of my friend".split()
LONGEST_WAIT = 300.0  # seconds for one answer
CACHE = "256M"  # so small that all of it is touched before the first half is over
NUM_MIXES = 24  # different sets of settings
MOST_GROWTH = 1.10  # resident memory at the end over that after half of the requests


@dataclass
class Tally:
    """What the clients saw."""

    done: int = 0
    left: int = 0
    refused: int = 0  # the server was gone, or said that it was going
    faults: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)  # to the first event, seconds


def requests_of(count: int, most_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Make the bodies: prompts and settings drawn with a fixed seed."""
    draw = random.Random(seed)
    # A service sees few mixes of settings, many times; each has its plan in the engine's cache.
    mixes = [
        {name: draw.choice(values) for name, values in SETTINGS.items() if draw.random() < 0.4}
        for _ in range(NUM_MIXES)
    ]
    bodies = []
    for number in range(count):
        body: dict[str, Any] = {
            "prompt": " ".join(draw.choices(WORDS, k=draw.randint(3, 40))),
            "max_tokens": draw.randint(most_tokens // 2, most_tokens),
            "temperature": draw.choice([0.0, 0.5, 0.9, 1.3]),
            "seed": number,
            "ignore_eos": True,
        }
        bodies.append({**body, **draw.choice(mixes)})
    return bodies


SETTINGS: dict[str, list[Any]] = {
    "top_k": [5, 50],
    "top_p": [0.8, 0.95],
    "min_p": [0.02, 0.1],
    "frequency_penalty": [0.3],
    "repetition_penalty": [1.1],
    "logprobs": [0, 3],
    "stop": [["zzz"], "qqq"],
    "logit_bias": [{"5": -2.0, "9": 1.5}],
}


async def client(port: int, todo: list[dict[str, Any]], leaving: set[int], tally: Tally) -> None:
    """Take bodies off the list and stream their answers until none is left."""
    while todo:
        body = todo.pop()
        leaves_after = 3 if body["seed"] in leaving else None
        try:
            async with asyncio.timeout(LONGEST_WAIT):
                await one(port, body, leaves_after, tally)
        except (ConnectionError, asyncio.IncompleteReadError):
            tally.refused += 1
        except TimeoutError:
            tally.faults.append(f"request {body['seed']} hangs")


async def one(port: int, body: dict[str, Any], leaves_after: int | None, tally: Tally) -> None:
    """Stream one answer; leave after some events if told so."""
    raw = json.dumps({**body, "stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + raw)
        await writer.drain()
        status = (await reader.readuntil(b"\r\n")).split()[1]
        events, last = 0, b""
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            if not events:
                tally.latencies.append(time.monotonic() - began)
            events, last = events + 1, line.strip() if b"[DONE]" not in line else last
            if b"[DONE]" in line:
                break
            if leaves_after is not None and events >= leaves_after:
                tally.left += 1
                return
        if status == b"503" or b'"code":503' in last:
            tally.refused += 1
        elif status != b"200" or b'"error"' in last or b'"finish_reason":"length"' not in last:
            tally.faults.append(f"request {body['seed']}: {status!r} {last[:200]!r}")
        else:
            tally.done += 1
    finally:
        writer.close()


def metric(port: int, name: str) -> float:
    """Read one number from /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    found = re.search(rf"^decodekit:{name}{{[^}}]*}} (\S+)$", text, re.M)
    assert found is not None, name
    return float(found[1])


def resident(process: int) -> float:
    """MiB of memory that a process holds."""
    with open(f"/proc/{process}/status") as file:
        return int(re.search(r"VmRSS:\s+(\d+)", file.read())[1]) / 1024  # type: ignore[index]


def start(arguments: argparse.Namespace) -> tuple[subprocess.Popen[str], int]:
    """Start the server; return it with its port when it listens."""
    command = [sys.executable, "-m", "decodekit", "serve", *arguments.model, "--host", "127.0.0.1",
               "--port", "0", "--max-num-seqs", str(arguments.clients), "--max-model-len", "1024",
               "--kv-cache-memory-bytes", CACHE,
               "--disable-uvicorn-access-log"]  # fmt: skip
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"http://127\.0\.0\.1:(\d+) serves", line)
        if found:
            return process, int(found[1])
    raise SystemExit("the server did not start")


async def drive(
    process: subprocess.Popen[str], port: int, arguments: argparse.Namespace
) -> tuple[Tally, dict[str, float]]:
    """Send all requests; return what the clients saw, and the server's figures."""
    bodies = requests_of(arguments.requests, arguments.tokens, arguments.seed)
    draw = random.Random(1)
    leaving = {body["seed"] for body in bodies if draw.random() < arguments.leaving}
    tally, todo, figures = Tally(), bodies[::-1], {}
    began = time.monotonic()
    clients = [
        asyncio.create_task(client(port, todo, leaving, tally)) for _ in range(arguments.clients)
    ]
    while len(todo) > arguments.requests // 2:
        await asyncio.sleep(0.1)
    figures["MiB after half"] = resident(process.pid)
    if arguments.terminate:
        process.send_signal(signal.SIGTERM)
        todo.clear()
    await asyncio.gather(*clients)
    figures["seconds"] = time.monotonic() - began
    return tally, figures


def after_load(process: subprocess.Popen[str], port: int, figures: dict[str, float]) -> list[str]:
    """Look at what is left in an idle server; return what is wrong."""
    end = time.monotonic() + 5
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any(metric(port, name) for name in names) and time.monotonic() < end:
        time.sleep(0.05)
    wrong = [f"{name} is not 0" for name in names if metric(port, name)]
    figures["MiB at the end"] = resident(process.pid)
    if figures["MiB at the end"] > MOST_GROWTH * figures["MiB after half"]:
        wrong.append("the memory grew")
    figures["tokens"] = metric(port, "generation_tokens_total")
    figures["tokens a second"] = figures["tokens"] / figures["seconds"]
    return wrong


def offline(arguments: argparse.Namespace) -> float:
    """Tokens a second of `LLM.generate` on the same requests."""
    from decodekit import LLM, SamplingParams

    llm = LLM(*arguments.model, max_num_seqs=arguments.clients, max_model_len=1024,
              kv_cache_memory_bytes=CACHE)  # fmt: skip
    bodies = requests_of(arguments.requests, arguments.tokens, arguments.seed)
    prompts = [body.pop("prompt") for body in bodies]
    params = [SamplingParams.from_optional(**body) for body in bodies]
    began = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    return count / (time.monotonic() - began)


def main() -> None:
    """Run and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="*", help="the embedded model by default")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--leaving", type=float, default=0.1, help="share of clients that leave")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--terminate", action="store_true", help="SIGTERM in the middle")
    parser.add_argument("--no-offline", action="store_true")
    arguments = parser.parse_args()
    process, port = start(arguments)
    try:
        tally, figures = asyncio.run(drive(process, port, arguments))
        wrong = list(tally.faults)
        if arguments.terminate:
            process.wait(60)
        else:
            wrong += after_load(process, port, figures)
            if tally.refused:
                wrong.append(f"{tally.refused} requests were refused")
    finally:
        process.terminate()
        process.wait(60)
    print(f"{tally.done} answers, {tally.left} left, {tally.refused} refused as the server ended")
    if tally.latencies:
        ordered = sorted(tally.latencies)
        figures["seconds to the first event, median"] = ordered[len(ordered) // 2]
    for name, value in figures.items():
        print(f"{name}: {value:.2f}")
    if not (arguments.terminate or arguments.no_offline):
        speed = offline(arguments)
        print(f"offline tokens a second: {speed:.2f}")
        print(f"server over offline: {figures['tokens a second'] / speed:.2f}")
    for sentence in wrong:
        print("WRONG:", sentence)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
