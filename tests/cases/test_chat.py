"""Conversations as prompts: DEC-080, DEC-086 and DEC-089 to DEC-091."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from decodekit import SamplingParams
from decodekit.plugins.author.table_model import blank_table, byte_tokenizer

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make

KEEPING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }}){% endfor %}"
    "{% if not loop.last or add_generation_prompt %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TRIMMING = KEEPING.replace("m.content or ''", "(m.content or '') | trim")
LINE = {"temperature": 0.0, "max_tokens": 2}
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": "sky"}'},
}


def prompt_of(bench: Bench, messages: list[dict[str, Any]], **options: Any) -> str:
    """The prompt text that `chat` runs."""
    output = bench.llm.chat(messages, SamplingParams(**LINE), use_tqdm=False, **options)[0]  # type: ignore[arg-type]
    text: str = bench.llm.get_tokenizer().decode(output.prompt_token_ids)
    return text


@pytest.fixture(scope="module")
def talker(make: Make) -> Callable[[str], Bench]:
    """Return a maker of engines with a chat template, on byte tokens."""
    made: dict[str, Bench] = {}

    def build(template: str) -> Bench:
        if template not in made:
            tokenizer = byte_tokenizer(special=["<end>"], eos="<end>", chat_template=template)
            made[template] = make(blank_table(257), model={"tokenizer": tokenizer})
        return made[template]

    return build


@pytest.mark.parametrize("template", [KEEPING, TRIMMING])
@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": [{"type": "text", "text": part} for part in "ab"]},
    ],
)
def test_dec_080_empty_and_null_content_in_the_history(
    talker: Callable[[str], Bench], template: str, turn: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": "hi"}, turn, {"role": "user", "content": "so?"}]

    text = prompt_of(talker(template), messages)

    assert "None" not in text
    called = "(look)" if "tool_calls" in turn else ""
    parts = {"a\nb", "ab", "a b"} if isinstance(turn.get("content"), list) else {""}
    right = {f"[user]hi<end>[assistant]{p}{called}<end>[user]so?<end>[assistant]" for p in parts}
    assert text in right


def test_dec_086_lone_surrogates_and_nul_in_the_text(talker: Callable[[str], Bench]) -> None:
    bench = talker(KEEPING)
    lone, pair = "a\ud800b", "a\U0001f642b"
    line = SamplingParams(**LINE)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="surrogate"):
        bench.llm.chat([{"role": "user", "content": lone}], line, use_tqdm=False)
    with pytest.raises(ValueError, match="surrogate"):
        bench.generate([lone], line)
    with pytest.raises(ValueError, match="surrogate"):
        bench.generate(["a"], SamplingParams(stop=[lone], **LINE))  # type: ignore[arg-type]
    for good in ("a\0b", pair):
        assert good in prompt_of(bench, [{"role": "user", "content": good}])
        stopped = SamplingParams(stop=[good], **LINE)  # type: ignore[arg-type]
        assert len(bench.generate([good], stopped)[0].outputs[0].token_ids) == 2
    bench.check_idle()


def test_dec_089_one_bos_and_the_same_ids_on_every_chat_route(
    make: Make, ascii_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = ascii_tokenizer(
        special=["<s>"],
        adds_bos=True,
        bos_token="<s>",
        chat_template="{{ bos_token }}" + KEEPING,
    )
    bench = make(blank_table(129), model={"tokenizer": tokenizer})
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]
    messages.append({"role": "user", "content": "again"})
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )

    output = bench.llm.chat(messages, SamplingParams(**LINE), use_tqdm=False)[0]  # type: ignore[arg-type]

    assert tokenizer.encode("hello")[0] == 128  # it does add one to plain text
    assert list(output.prompt_token_ids or ()) == expected
    assert expected.count(128) == 1
    assert list(bench.llm.chat_prompt(messages)["prompt_token_ids"]) == expected
    assert bench.generate(["hello"], SamplingParams(**LINE))[0].prompt_token_ids == (  # type: ignore[arg-type]
        tokenizer.encode("hello")
    )


@pytest.mark.parametrize("content", ["OK! ", "OK!\n", "OK!"])
def test_dec_090_continuing_a_final_message_that_ends_in_white_space(
    talker: Callable[[str], Bench], content: str
) -> None:
    messages = [{"role": "user", "content": "well"}, {"role": "assistant", "content": content}]
    options = {"continue_final_message": True, "add_generation_prompt": False}

    kept = prompt_of(talker(KEEPING), messages, **options)
    trimmed = prompt_of(talker(TRIMMING), messages, **options)

    assert kept == f"[user]well<end>[assistant]{content}"
    assert trimmed == "[user]well<end>[assistant]OK!"


def test_dec_091_the_final_message_repeats_an_earlier_one(talker: Callable[[str], Bench]) -> None:
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "Yes"},
        {"role": "assistant", "content": "Yes "},
    ]

    text = prompt_of(
        talker(TRIMMING), messages, continue_final_message=True, add_generation_prompt=False
    )

    assert text == "[user]Go<end>[assistant]Yes<end>[user]Yes<end>[assistant]Yes"
