"""Code as people write it for vLLM's offline API; only the package named in the imports differs.

Replace `decodekit` by `vllm` and give a model name, and it runs there: generate, chat, n, stop,
log-probs, and a custom processor in vLLM's batch interface.
"""

from __future__ import annotations

import torch

from decodekit import LLM, SamplingParams
from decodekit.config import VllmConfig
from decodekit.v1.sample.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]


class OnlyTarget(LogitsProcessor):
    """Let a request write one token only, the one in its `extra_args["target_token"]`."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        target = (params.extra_args or {}).get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token must be an integer, got {target!r}")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.targets.pop(index, None)
        for index, params, _prompt_ids, _output_ids in batch_update.added:
            target = (params.extra_args or {}).get("target_token")
            if target is None:
                self.targets.pop(index, None)
            else:
                self.targets[index] = target
        for source, target_index, direction in batch_update.moved:
            moved = self.targets.pop(source, None)
            other = self.targets.pop(target_index, None)
            if moved is not None:
                self.targets[target_index] = moved
            if other is not None and direction == MoveDirectionality.SWAP:
                self.targets[source] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.targets:
            return logits
        rows = torch.tensor(list(self.targets), device=logits.device)
        columns = torch.tensor(list(self.targets.values()), device=logits.device)
        kept = logits[rows, columns]
        logits[rows] = float("-inf")
        logits[rows, columns] = kept
        return logits


def main() -> None:
    """Run the examples one after another."""
    llm = LLM(logits_processors=[OnlyTarget], seed=0)

    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    for output in llm.generate(PROMPTS, sampling_params):
        print(f"Prompt: {output.prompt!r}, generated: {output.outputs[0].text!r}")

    conversation = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    for output in llm.chat(conversation, SamplingParams(temperature=0.0, max_tokens=32)):
        print(f"Chat: {output.outputs[0].text!r}")

    several = SamplingParams(n=3, temperature=0.8, seed=7, max_tokens=12)
    for output in llm.generate(PROMPTS[0], several):
        for completion in output.outputs:
            print(f"n=3, {completion.index}: {completion.text!r}")

    stopping = SamplingParams(temperature=0.0, max_tokens=64, stop=[".", "\n"])
    for output in llm.generate(PROMPTS[2], stopping):
        completion = output.outputs[0]
        print(f"Stopped on {completion.stop_reason!r}: {completion.text!r}")

    scored = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2)
    for output in llm.generate(PROMPTS[2], scored):
        for position in output.outputs[0].logprobs or ():
            best = {entry.decoded_token: round(entry.logprob, 2) for entry in position.values()}
            print(f"Log-probs: {best}")

    mixed = [
        SamplingParams(temperature=0.0, max_tokens=4, extra_args={"target_token": 33}),
        SamplingParams(temperature=0.0, max_tokens=4),
    ]
    for output in llm.generate(PROMPTS[:2], mixed):
        print(f"Custom processor: {list(output.outputs[0].token_ids)}")


if __name__ == "__main__":
    main()
