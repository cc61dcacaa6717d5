"""Draws the pictures of the parameter guide: `python docs/make_pictures.py` writes docs/img/*.svg.

Every bar is a probability that the embedded model's engine reports for the token after one text
(`logprobs_mode="final"`: what the picker sees), so a picture shows what a stage really does. The
penalties need tokens that were generated; there the stage is run on the model's own logits.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from decodekit import LLM, SamplingParams
from decodekit.logits_processors.bias.penalties import (
    FrequencyPenalty,
    PresencePenalty,
    RepetitionPenalty,
)
from decodekit.plugins.author.rows import apply_stage

FOLDER = Path(__file__).with_name("img")
TEXT = "She opened the door and saw a"
WRITTEN = " young man, a young woman and a"  # what the model is taken to have written after TEXT
NUM_BARS = 10  # the best tokens; one more bar holds the rest
BEFORE, AFTER, GONE = "#b9c2d0", "#3f51b5", "#d9534f"

plt.rcParams.update(
    {
        "svg.hashsalt": "decodekit",  # the same file in every run
        "svg.fonttype": "path",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
    }
)


class Model:
    """The embedded model, asked for whole next-token distributions."""

    def __init__(self) -> None:
        self.llm = LLM(max_logprobs=-1)
        self.tokenizer = self.llm.get_tokenizer()

    def ids(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def token(self, word: str) -> int:
        """Return the id of a word that is one token."""
        [found] = self.ids(word)
        return found

    def after(self, text: str, mode: str = "final", **fields: Any) -> Tensor:
        """Return the log-probability of every token after `text`, float32 [vocab]."""
        params = SamplingParams(
            max_tokens=1, logprobs=-1, flat_logprobs=True, logprobs_mode=mode, **fields
        )
        [output] = self.llm.generate(text, params, use_tqdm=False)
        flat: Any = output.outputs[0].logprobs
        row = torch.full((self.llm.model_config.vocab_size,), -torch.inf)
        row[torch.tensor(flat.token_ids)] = torch.tensor(flat.logprobs)
        return row

    def penalised(self, stage: Any, **params: object) -> Tensor:
        """Return the distribution after TEXT + WRITTEN under one penalty, [vocab]."""
        logits = self.after(TEXT + WRITTEN, mode="raw_logits")[None]
        prompt, written = self.ids(TEXT), self.ids(WRITTEN)
        changed = apply_stage(stage, logits, [params], prompts=[prompt], outputs=[written])
        return changed[0].softmax(0)


def bars(axes: Any, model: Model, before: Tensor, after: Tensor, title: str) -> None:
    """Draw the best tokens of `before`: pale what they had, in colour what they have."""
    best = before.topk(NUM_BARS).indices
    names = [model.tokenizer.decode([int(token)]).strip() for token in best]
    places = list(range(NUM_BARS + 1))
    old = [*before[best].tolist(), 1 - float(before[best].sum())]
    new = [*after[best].tolist(), 1 - float(after[best].sum())]
    axes.bar(places, old, width=0.84, color=BEFORE, label="model")
    axes.bar(places, new, width=0.5, color=AFTER, label="after the stage")
    for place, value in zip(places, new, strict=True):
        if value < 1e-9:
            axes.plot(place, 0.004, marker="x", color=GONE, markersize=5, clip_on=False)
    axes.set_xticks(places, [*names, "all others"], rotation=50, ha="right", rotation_mode="anchor")
    axes.tick_params(axis="x", length=0)
    axes.set_title(title)
    axes.margins(x=0.01)


def panels(titles: Sequence[str], height: float = 2.7) -> tuple[Any, Sequence[Any]]:
    """Make a figure with one panel a title, side by side on one scale."""
    figure, axes = plt.subplots(
        1, len(titles), figsize=(8.4, height), sharey=True, squeeze=False, layout="constrained"
    )
    axes[0][0].set_ylabel("probability")
    return figure, axes[0]


def save(figure: Any, name: str) -> None:
    """Write one picture, without the indents and comments that make a third of the file."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside upper right", ncols=2)
    text = io.StringIO()
    figure.savefig(text, metadata={"Date": None, "Creator": None}, facecolor="white", format="svg")
    plt.close(figure)
    lines = [line.strip() for line in text.getvalue().splitlines()]
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.svg"
    path.write_text("\n".join(line for line in lines if not line.startswith("<!--")) + "\n")
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


def kept(row: Tensor) -> int:
    """Count the tokens that are left."""
    return int((row > 0).sum())


def draw(model: Model) -> None:
    """Draw every picture."""
    plain = model.after(TEXT, mode="raw").exp()

    figure, axes = panels("abc")
    for panel, t in zip(axes, (0.5, 1.0, 1.5), strict=True):
        bars(panel, model, plain, model.after(TEXT, temperature=t).exp(), f"temperature={t:g}")
    save(figure, "temperature")

    cuts: dict[str, list[dict[str, Any]]] = {
        "top_k": [{"top_k": 3}, {"top_k": 8}],
        "top_p": [{"top_p": 0.3}, {"top_p": 0.6}],
        "min_p": [{"min_p": 0.3}, {"min_p": 0.05}],
    }
    for name, settings in cuts.items():
        figure, axes = panels("ab")
        for panel, fields in zip(axes, settings, strict=True):
            after = model.after(TEXT, **fields).exp()
            title = f"{name}={fields[name]:g} keeps {kept(after)} of {len(after):,} tokens"
            bars(panel, model, plain, after, title)
            if name == "min_p":
                bar = fields[name] * float(plain.max())
                panel.axhline(bar, color=GONE, linewidth=0.8, linestyle="--")
        save(figure, name)

    history = model.after(TEXT + WRITTEN, mode="raw").exp()
    figure, axes = panels("abc")
    for panel, stage, penalty in (
        (axes[0], RepetitionPenalty, 1.3),
        (axes[1], FrequencyPenalty, 0.8),
        (axes[2], PresencePenalty, 0.8),
    ):
        after = model.penalised(stage, penalty=penalty)
        bars(panel, model, history, after, f"{stage.name}={penalty:g}")
    save(figure, "penalties")

    figure, axes = panels("a")
    bias = {" woman": 1.5, " group": -1.5, " young": -torch.inf}
    after = model.after(TEXT, logit_bias={model.token(w): b for w, b in bias.items()}).exp()
    shown = ", ".join(f"{word.strip()} {b:+g}" for word, b in bias.items())
    bars(axes[0], model, plain, after, f"logit_bias: {shown}")
    save(figure, "logit_bias")

    figure, axes = panels("ab")
    chains: list[list[str]] = [["top_p", "temperature"], ["temperature", "top_p"]]
    for panel, chain in zip(axes, chains, strict=True):
        after = model.after(TEXT, chain=chain, temperature=2.0, top_p=0.5).exp()
        bars(panel, model, plain, after, f"{' then '.join(chain)}: {kept(after):,} tokens are left")
    save(figure, "order")


if __name__ == "__main__":
    torch.set_num_threads(1)
    draw(Model())
