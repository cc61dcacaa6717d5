"""Classify sentences by the probability of each label, and compare with reading the answer.

`LLM.choose` adds up the probabilities of every way to write a label; nothing is generated. The
other way is to let the model write and to look for a label in the text: a draw may pick the less
likely label, the text may name none, and it cannot say how sure the model is.

    python examples/classify.py
"""

from __future__ import annotations

from typing import Any

from decodekit import LLM, SamplingParams

LABELS = ["positive", "negative"]
SHOTS = """\
Review: I loved every minute of it.
Sentiment: positive
Review: A complete waste of money.
Sentiment: negative
Review: It broke after two days.
Sentiment: negative
Review: The best dinner we had all year.
Sentiment: positive
Review: {text}
Sentiment:"""
CHAT = "Classify the sentiment of this review as positive or negative: {text}"

REVIEWS = [
    ("A wonderful film with great acting.", "positive"),
    ("The worst hotel I have ever stayed in.", "negative"),
    ("Delicious food and friendly staff.", "positive"),
    ("The screen cracked on the first day.", "negative"),
    ("I would buy this again without thinking.", "positive"),
    ("Boring, slow and far too long.", "negative"),
    ("My children adore this game.", "positive"),
    ("It arrived late and the box was empty.", "negative"),
    ("Works perfectly, I am very happy with it.", "positive"),
    ("Terrible sound, I sent it back.", "negative"),
    ("What a beautiful and moving story.", "positive"),
    ("The soup was cold and the waiter was rude.", "negative"),
    ("Excellent value for the price.", "positive"),
    ("I regret buying it.", "negative"),
    ("An amazing trip that we will never forget.", "positive"),
    ("The app crashes every time I open it.", "negative"),
]


def parsed(text: str) -> str | None:
    """Return the label that stands first in a generated text, or None."""
    places = {label: text.lower().find(label) for label in LABELS}
    found = {label: place for label, place in places.items() if place >= 0}
    return min(found, key=found.__getitem__) if found else None


def accuracy(answers: list[str | None]) -> float:
    """Return the share of right answers; no answer is wrong."""
    return sum(a == label for a, (_, label) in zip(answers, REVIEWS, strict=True)) / len(REVIEWS)


def compare(llm: LLM, prompts: list[Any]) -> str:
    """Return both accuracies, and how often the written text names no label, as a line."""
    chosen = llm.choose(prompts, LABELS)
    line = f"choose {accuracy([item.choice for item in chosen]):.0%} right"
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, seed=0, max_tokens=16)
        written = llm.generate(prompts, params, use_tqdm=False)
        found = [parsed(output.outputs[0].text) for output in written]
        line += (
            f"; text at temperature {temperature} {accuracy(found):.0%} right "
            f"({found.count(None)} of {len(found)} name no label)"
        )
    return line


def main() -> None:
    llm = LLM()
    print("with examples:", compare(llm, [SHOTS.format(text=text) for text, _ in REVIEWS]))
    asked = [[{"role": "user", "content": CHAT.format(text=text)}] for text, _ in REVIEWS]
    print("as a chat:", compare(llm, [llm.chat_prompt(messages) for messages in asked]))
    (one,) = llm.choose([SHOTS.format(text="Good, but much too expensive.")], LABELS)
    shares = ", ".join(f"{label} {share:.2f}" for label, share in one.probs.items())
    print(f"Good, but much too expensive: {shares} (the model writes one of them: {one.mass:.2f})")


if __name__ == "__main__":
    main()
