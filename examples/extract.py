"""Extract an object of a nested pydantic model from text; a regex, a choice, and a growing value.

What comes back always fits the model: the grammar lets nothing else through. Whether it is *true*
is up to the model that writes it, and the embedded one is small.

    python examples/extract.py
"""

from __future__ import annotations

import asyncio
from datetime import date
from enum import StrEnum

from pydantic import BaseModel, Field

from decodekit import LLM, AsyncLLM, SamplingParams
from decodekit.core.params import RequestOutputKind, StructuredOutputsParams

TEXT = (
    "On 14 March 2024 Zoë Müller from München ordered two bags of coffee and a blue mug. "
    "She wrote: please deliver quickly ☕"
)
PROMPT = (
    "Extract the order as JSON.\n\n"
    "Text: On 2 May 2023 Ana Ruiz from Cádiz ordered a tea pot. Notes: none\n"
    'JSON: {{"customer": {{"name": "Ana Ruiz", "city": "Cádiz"}}, "date": "2023-05-02", '
    '"items": [{{"what": "tea pot", "count": 1, "kind": "ware"}}], "note": null}}\n\n'
    "Text: {text}\nJSON:"
)


class Kind(StrEnum):
    FOOD = "food"
    DRINK = "drink"
    WARE = "ware"


class Customer(BaseModel, extra="forbid"):
    name: str = Field(max_length=40)
    city: str | None = Field(max_length=40)


class Item(BaseModel, extra="forbid"):
    what: str = Field(max_length=40)
    count: int = Field(ge=1, le=99)
    kind: Kind


class Order(BaseModel, extra="forbid"):
    customer: Customer
    date: date
    items: list[Item] = Field(min_length=1, max_length=4)
    note: str | None = Field(max_length=60)


def extract(llm: LLM, text: str) -> Order | None:
    """Return the order that `text` tells of, or None if the answer was cut."""
    params = SamplingParams(temperature=0, max_tokens=300, structured_outputs=Order)
    (output,) = llm.generate([PROMPT.format(text=text)], params, use_tqdm=False)
    if output.outputs[0].parsed is None:
        print("no order:", output.outputs[0].parse_error)
    return output.outputs[0].parsed


def other_constraints(llm: LLM) -> list[str]:
    """Return a postcode by a regular expression and a colour by a list."""
    asked = [
        ("A German postcode in Berlin is", StructuredOutputsParams(regex=r" \d{5}")),
        ("The colour of the sky is", StructuredOutputsParams(choice=[" blue", " green", " red"])),
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=12, structured_outputs=want) for _, want in asked
    ]
    outputs = llm.generate([prompt for prompt, _ in asked], params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


async def watch(text: str) -> list[object]:
    """Return the order as it grew, each state once."""
    engine = AsyncLLM()
    params = SamplingParams(
        temperature=0,
        max_tokens=300,
        structured_outputs=Order,
        output_kind=RequestOutputKind.CUMULATIVE,
    )
    states: list[object] = []
    async for output in engine.generate(PROMPT.format(text=text), params):
        value = output.outputs[0].parsed
        if value is not None and (not states or value != states[-1]):
            states.append(value)
    engine.shutdown()
    return states


def main() -> None:
    llm = LLM()
    order = extract(llm, TEXT)
    if order is not None:
        print(f"{order.customer.name}, {order.customer.city}, {order.date}: {order.items}")
    print(other_constraints(llm))
    states = asyncio.run(watch(TEXT))
    print(f"the object grew in {len(states)} steps, from {states[0]} to {states[-1]!r}")


if __name__ == "__main__":
    main()
