"""Flag weak retrieval answers: `python examples/weak_answers.py`. Needs no network.

Each question is answered from the passage that a (made-up) search returned. For some the passage
holds the answer, for others it does not. The observer "confidence" looks at how likely the model
itself held the tokens of its answer: below the threshold the answer is flagged, counted in a metric
and named in the log, and an application would search again or say that it does not know. A low
mean log-prob is a hint and no proof: a model may be wrong and sure of it.
"""

from __future__ import annotations

import logging
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from decodekit import LLM, SamplingParams

THRESHOLD = -0.45  # mean log-prob of a token; fit it on answers of your own
RETRIEVED = [
    (
        "In what year was the bridge opened?",
        "The bridge over the Aller was opened in 1912. It is 240 metres long.",
    ),
    (
        "How long is the bridge?",
        "The bridge over the Aller was opened in 1912. It is 240 metres long.",
    ),
    (
        "Who designed the bridge?",
        "The market takes place on Saturdays. Fish, cheese and flowers are sold until noon.",
    ),
    (
        "Why was the old mill closed?",
        "Our office is open from nine to five. Please ring the bell twice.",
    ),
]


def conversation(question: str, passage: str) -> list[dict[str, str]]:
    """Ask one question about one passage."""
    text = f"Passage: {passage}\n\nQuestion: {question}\nAnswer in one short sentence."
    return [{"role": "user", "content": text}]


def main() -> None:
    """Answer every question and show which answers are weak."""
    logging.basicConfig(format="log: %(message)s")
    llm = LLM(max_model_len=512, max_num_seqs=8)
    params = SamplingParams(
        temperature=0,
        max_tokens=32,
        observers=[{"observer": "confidence", "threshold": THRESHOLD}],
    )
    questions = [conversation(question, passage) for question, passage in RETRIEVED]
    answers = [output.outputs[0] for output in llm.chat(questions, params, use_tqdm=False)]

    table = Table("question", "answer", "mean log-prob", "")
    for (question, _), answer in zip(RETRIEVED, answers, strict=True):
        mark = "[red]weak[/]" if answer.low_confidence else "[green]ok[/]"
        mean = f"{answer.mean_logprob or 0.0:.2f}"
        table.add_row(question, escape(answer.text.strip()), mean, mark)
    console = Console(highlight=False, width=110)
    console.print(table)
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    weak, checked = counts["decodekit:low_confidence"], counts["decodekit:confidence_checked"]
    console.print(f"{weak} of {checked} answers are weak (threshold {THRESHOLD})")


if __name__ == "__main__":
    main()
