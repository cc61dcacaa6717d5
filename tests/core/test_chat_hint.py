"""Which raw prompts get a note, under chat templates of several families."""

import pytest

from decodekit.core.chat_hint import ChatHint
from decodekit.core.tokenizer import tokenizer_from_hf
from decodekit.plugins.author.table_model import byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
NAMED = "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}ASSISTANT:"
BROKEN = "{{ raise_exception('only one message') }}"


def hint(template: str | None) -> ChatHint:
    hf = byte_tokenizer(
        special=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        bos="<s>",
        eos="</s>",
        chat_template=template,
    )
    return ChatHint(tokenizer_from_hf(hf))


@pytest.mark.parametrize(
    ("template", "prompt", "marker"),
    [
        (CHATML, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"),
        (INST, "<s>[INST] hi [/INST]", "[/INST]"),
        (NAMED, "USER: hi\nASSISTANT:", "USER:"),
    ],
)
def test_a_prompt_with_role_markers_is_noted(template: str, prompt: str, marker: str) -> None:
    note = hint(template).note(prompt)

    assert note is not None
    assert "`chat`" in note
    assert "role marker" in note
    assert marker in hint(template).markers


@pytest.mark.parametrize("template", [CHATML, INST, NAMED])
def test_a_plain_question_is_noted(template: str) -> None:
    for prompt in ("What is the capital of France?", "What is it? \n", "法国的首都是哪里？"):
        note = hint(template).note(prompt)
        assert note is not None and "plain question" in note and "`chat`" in note


@pytest.mark.parametrize("template", [CHATML, INST, NAMED])
@pytest.mark.parametrize(
    "prompt", ["Once upon a time", "Q: Who?\nA:", "<s>Once", "Is it? Yes.", "", "a < b > c [1]"]
)
def test_other_prompts_are_not(template: str, prompt: str) -> None:
    assert hint(template).note(prompt) is None


@pytest.mark.parametrize("template", [None, BROKEN])
def test_a_model_without_a_template_that_renders_gets_no_notes(template: str | None) -> None:
    found = hint(template)

    assert not found.is_chat_model
    assert found.note("What is it?") is None
    assert found.note("<|im_start|>user") is None
    assert ChatHint(None).note("What is it?") is None
