"""Prompt lookup: longest word, latest place; equal to transformers' where only one place fits."""

import random
from collections.abc import Sequence

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from decodekit.core.proposer import ProposerContext
from decodekit.plugins.draft.prompt_lookup import PromptLookup

CONTEXT = ProposerContext(100, 100, 512, (), None)


def lookup(high: int = 3, low: int = 1) -> PromptLookup:
    params = PromptLookup.validate(
        {"prompt_lookup_max": high, "prompt_lookup_min": low}, "speculation"
    )
    return PromptLookup(PromptLookup.bind(params, CONTEXT), None)  # type: ignore[arg-type]


def brute(tokens: Sequence[int], high: int, low: int, k: int) -> list[int]:
    """The definition, place by place."""
    for size in range(high, low - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if list(tokens[end - size : end]) == list(tokens[len(tokens) - size :]):
                return list(tokens[end : end + k])
    return []


def test_the_guess_is_what_followed_the_longest_word_at_its_latest_place() -> None:
    dice = random.Random(1)
    for _ in range(300):
        prompt = [dice.randint(0, 5) for _ in range(dice.randint(0, 20))]
        output = [dice.randint(0, 5) for _ in range(dice.randint(1, 20))]
        high = dice.randint(1, 4)
        low, k = dice.randint(1, high), dice.randint(1, 6)

        found = lookup(high, low).propose(prompt, output, k)

        assert list(found) == brute([*prompt, *output], high, low, k)


def test_transformers_guesses_the_same_where_one_place_fits() -> None:
    dice = random.Random(2)
    compared = 0
    for _ in range(200):
        tokens = dice.sample(range(100), 30)  # no token twice
        copied = dice.randint(2, 20)
        output = tokens[copied - 2 : copied]
        theirs = PromptLookupCandidateGenerator(
            num_output_tokens=6, max_matching_ngram_size=2, max_length=500
        )
        candidates, _ = theirs.get_candidates(torch.tensor([[*tokens, *output]]))

        found = lookup(2).propose(tokens, output, 6)

        assert list(found) == candidates[0, len(tokens) + 2 :].tolist()
        compared += len(found) == 6
    assert compared > 150


def test_a_growing_output_is_followed_as_if_read_anew() -> None:
    dice = random.Random(3)
    prompt = [dice.randint(0, 4) for _ in range(10)]
    output: list[int] = []
    keeps = lookup()
    for _ in range(60):
        output += [dice.randint(0, 4) for _ in range(dice.randint(1, 3))]

        assert list(keeps.propose(prompt, output, 5)) == brute([*prompt, *output], 3, 1, 5)


def test_an_output_that_was_taken_back_is_read_anew() -> None:
    dice = random.Random(4)
    prompt = [dice.randint(0, 3) for _ in range(10)]
    output = [dice.randint(0, 3) for _ in range(20)]
    keeps = lookup()
    for _ in range(40):
        keeps.propose(prompt, output, 5)
        del output[len(output) - dice.randint(1, 4) :]
        output += [dice.randint(0, 3) for _ in range(dice.randint(1, 6))]

        assert list(keeps.propose(prompt, output, 5)) == brute([*prompt, *output], 3, 1, 5)


def test_the_bound_that_is_not_given_fits_the_other() -> None:
    def sizes(**given: int) -> list[int]:
        params = PromptLookup.validate(given, "speculation")
        return list(PromptLookup.bind(params, CONTEXT))

    assert sizes() == [5, 4, 3, 2]
    assert sizes(prompt_lookup_max=1) == [1]
    assert sizes(prompt_lookup_max=3) == [3, 2]
    assert sizes(prompt_lookup_min=1) == [5, 4, 3, 2, 1]
    assert sizes(prompt_lookup_min=7) == [7]
