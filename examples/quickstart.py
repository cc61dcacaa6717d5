"""A tour of decodekit on the embedded model: `python examples/quickstart.py`. Needs no network."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # sleeping threads leave the cores to others

import torch
from rich.console import Console
from rich.markup import escape

from decodekit import LLM, AsyncLLM, Kind, RowView, SamplingParams, Stage, StageParams
from decodekit.sampling_params import RequestOutputKind

NUM_WATCHED = 50  # how many alternatives the stop on chain orders looks at

console = Console(highlight=False, width=96)


def heading(text: str) -> None:
    """Print a line across the terminal."""
    console.print()
    console.rule(f"[bold]{text}", align="left")


def generate(llm: LLM) -> None:
    """Complete plain text: several prompts run together, each result in its place."""
    heading("generate: two prompts at once, greedy")
    prompts = ["1, 2, 3, 4, 5,", "The future of AI is"]
    params = SamplingParams(temperature=0, max_tokens=24)
    for output in llm.generate(prompts, params, use_tqdm=False):
        console.print(f"[cyan]{escape(output.prompt or '')}[/]{escape(output.outputs[0].text)}")


def chat(llm: LLM) -> None:
    """Answer a conversation through the model's chat template."""
    heading("chat")
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    params = SamplingParams(temperature=0, max_tokens=64)
    [output] = llm.chat(messages, params, use_tqdm=False)
    answer = output.outputs[0]
    console.print(escape(answer.text))
    console.print(f"[dim]{len(answer.token_ids)} tokens, ended by {answer.finish_reason!r}[/]")
    console.print(f"[dim]{escape(str(output.plan))}[/]")


def several(llm: LLM) -> None:
    """Ask for three answers; the seed makes them the same in every run and in any batch."""
    heading("n = 3 with a seed")
    params = SamplingParams(n=3, seed=5, temperature=0.7, top_p=0.9, max_tokens=14)
    prompt = "My favourite animal is the"
    [alone] = llm.generate(prompt, params, use_tqdm=False)
    crowded = llm.generate([prompt, "Once upon a time", "2 + 2 ="], params, use_tqdm=False)[0]
    for answer in alone.outputs:
        console.print(f"{answer.index}: {escape(answer.text.strip())}")
    same = [a.token_ids for a in alone.outputs] == [b.token_ids for b in crowded.outputs]
    console.print(f"[dim]the same three beside other requests: {same}[/]")


def logprobs(llm: LLM) -> None:
    """See what else the model considered at each position."""
    heading("log-probs: the chosen token and the three best")
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3)
    [output] = llm.generate("The capital of France is", params, use_tqdm=False)
    answer = output.outputs[0]
    for chosen, position in zip(answer.token_ids, answer.logprobs or (), strict=True):
        best = sorted(position.items(), key=lambda item: item[1].rank or 0)
        listed = "  ".join(f"{entry.decoded_token!r} {entry.logprob:.2f}" for _, entry in best)
        console.print(f"{position[chosen].decoded_token!r:>12}   {escape(listed)}")


@functools.cache
def tokens_with(letter: str, llm: LLM) -> torch.Tensor:
    """Return a bool mask over the vocabulary of the ordinary tokens that hold `letter`."""
    tokenizer = llm.get_tokenizer()
    mask = torch.zeros(llm.model_config.vocab_size, dtype=torch.bool)
    for text, token in tokenizer.get_vocab().items():
        mask[token] = letter in text.lower() and token not in tokenizer.all_special_ids
    return mask


def custom_stage(llm: LLM) -> None:
    """Pass a class of one's own in a request; it need not be installed or registered."""
    heading("a stage of ten lines, passed in a request")

    class Without(Stage):
        """Masks every token that holds a letter."""

        name = "without"
        kind = Kind.MASK

        class Params(StageParams):
            letter: str

        @classmethod
        def structure(cls, params: Params) -> str:
            return params.letter  # rows with equal structure run together and see it as rows.mode

        def transform(self, logits: torch.Tensor, rows: RowView) -> None:
            logits.masked_fill_(tokens_with(rows.mode, llm), -torch.inf)

    prompt = "Every morning I"
    plain = SamplingParams(temperature=0, max_tokens=18)
    without = SamplingParams(chain=[Without(letter="e"), "greedy"], max_tokens=18)
    for output, label in zip(
        llm.generate([prompt, prompt], [plain, without], use_tqdm=False),
        ("as the model likes", "without the letter e"),
        strict=True,
    ):
        console.print(f"[cyan]{label}:[/]{escape(output.outputs[0].text)}")


def two_orders(llm: LLM) -> None:
    """Run two chain orders in one batch and look at the tokens that each one keeps."""
    heading("two chain orders in one batch")
    prompt = "The sun rises in the"
    orders = (["top_p", "temperature"], ["temperature", "top_p"])
    params = [
        SamplingParams(
            chain=order,
            temperature=1.3,
            top_p=0.6,
            max_tokens=1,
            logprobs=NUM_WATCHED,
            logprobs_mode="final",  # what the picker saw: tokens that were cut stand at -inf
        )
        for order in orders
    ]
    outputs = llm.generate([prompt, prompt], params, use_tqdm=False)
    console.print(f"[cyan]{prompt}[/] ...")
    for order, output in zip(orders, outputs, strict=True):
        [position] = output.outputs[0].logprobs or [{}]
        alive = [entry for entry in position.values() if entry.logprob > -torch.inf]
        alive.sort(key=lambda entry: -entry.logprob)
        best = "  ".join(
            f"{(entry.decoded_token or '').strip()} {math.exp(entry.logprob):.2f}"
            for entry in alive[:6]
        )
        more = "  ..." if len(alive) > 6 else ""
        console.print(f"[cyan]{' -> '.join(order)}[/] keeps {len(alive)}:  {escape(best)}{more}")
    console.print(
        "[dim]top_p keeps the best tokens until they hold 0.6 of the probability. Where it comes "
        "first, it cuts the model's own row, in which few tokens hold that much. Where the "
        "temperature comes first, the row is flatter when the cut sees it, so that it takes more "
        "tokens. Both requests ran in one batch.[/]"
    )


async def stream() -> None:
    """Read one answer piece by piece while the engine works on a thread of its own."""
    heading("AsyncLLM: a stream of deltas")
    engine = AsyncLLM(max_model_len=512, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=32, output_kind=RequestOutputKind.DELTA)
    messages = [{"role": "user", "content": "Count from 1 to 10."}]
    async for output in engine.chat(messages, params):
        print(output.outputs[0].text, end="", flush=True)
    print()
    engine.shutdown()


def main() -> None:
    """Run every stop of the tour."""
    logging.getLogger("decodekit").setLevel(logging.ERROR)
    llm = LLM(max_model_len=512, max_num_seqs=16, max_logprobs=NUM_WATCHED)
    for stop in (generate, chat, several, logprobs, custom_stage, two_orders):
        stop(llm)
    asyncio.run(stream())


if __name__ == "__main__":
    main()
