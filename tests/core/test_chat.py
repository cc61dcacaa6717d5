"""Rendered conversations against transformers' `apply_chat_template`, and the rules around them."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import processors

from decodekit.core.chat import choose_template, merge_template_kwargs, render_chat
from decodekit.core.errors import NotInThisVersion, ValidationError
from decodekit.core.tokenizer import Tokenizer, tokenizer_from_hf

MakeTokenizer = Callable[..., Tokenizer]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson }}{{- "}<|eot_id|>" }}
        {%- endfor %}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' -%}
{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
{%- else -%}
{{ raise_exception('Only user and assistant roles are supported!') }}
{%- endif -%}
{%- endfor -%}
"""
QWEN = """{%- if tools %}
<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=none) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == 'ghost' %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content is string and loop.index0 > ns.last %}
        {{- '<think>' + message.reasoning_content + '</think>\\n' }}
    {%- endif %}
    {{- content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' ~ {"name": call.function.name, "arguments": call.function.arguments}
            | tojson ~ '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{%- endif %}
{%- endif %}
"""
TRIMMING = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }};{% endfor %}"
    "{% endfor %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen": QWEN,
    "trimming": TRIMMING,
}

TALK = [
    {"role": "user", "content": " Hi <b>é</b> 好 "},
    {"role": "assistant", "content": "Hello\n"},
    {"role": "user", "content": "Bye"},
]
TOOL = {"type": "function", "function": {"name": "look", "description": "é <x>"}}
TOOL_TALK = [
    {"role": "user", "content": "Look"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "tool_calls": [
            {"id": "1", "function": {"name": "look", "arguments": {"at": "ü", "n": [1, None]}}}
        ],
    },
    {"role": "tool", "content": "seen", "tool_call_id": "1"},
]


@pytest.fixture(scope="module")
def tokenizer(make_byte_tokenizer: MakeTokenizer) -> Tokenizer:
    """Byte tokenizer without a template that puts <s> in front of every text."""
    hf = make_byte_tokenizer().hf
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", hf.bos_token_id)]
    )
    return tokenizer_from_hf(hf)


def oracle(tokenizer: Tokenizer, messages: list[Any], **options: Any) -> str:
    text = tokenizer.hf.apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(text, str)
    return text


def test_embedded_template_gives_the_known_ids(embedded: Tokenizer) -> None:
    text = render_chat([{"role": "user", "content": "Count from 1 to 10."}], embedded)
    ids = embedded.encode(text, add_special_tokens=False)

    assert ids == [
        *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411),
        *(407, 19712, 8182, 2, 198, 1, 4093, 198, 9825, 429, 216, 33, 288, 216, 33, 32, 30, 2),
        *(198, 1, 520, 9531, 198),
    ]


@pytest.mark.parametrize("generation", [True, False])
def test_embedded_template_equals_transformers(embedded: Tokenizer, generation: bool) -> None:
    for messages in (TALK, [{"role": "system", "content": "Be kind"}, *TALK]):
        text = render_chat(messages, embedded, add_generation_prompt=generation)

        assert text == oracle(embedded, messages, add_generation_prompt=generation)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation", [True, False])
def test_templates_equal_transformers(tokenizer: Tokenizer, name: str, generation: bool) -> None:
    options = {"chat_template": TEMPLATES[name], "add_generation_prompt": generation}

    assert render_chat(TALK, tokenizer, **options) == oracle(tokenizer, TALK, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama3", "qwen"])
def test_tools_and_calls_equal_transformers(tokenizer: Tokenizer, name: str) -> None:
    text = render_chat(TOOL_TALK, tokenizer, chat_template=TEMPLATES[name], tools=[TOOL])

    assert text == oracle(
        tokenizer,
        TOOL_TALK,
        chat_template=TEMPLATES[name],
        tools=[TOOL],
        add_generation_prompt=True,
    )
    assert "ü" in text and "None" not in text


def test_strftime_documents_and_variables_equal_transformers(tokenizer: Tokenizer) -> None:
    template = (
        "{{ strftime_now('%Y') }}{{ documents[0].title }}{{ dict(a=1) | tojson(indent=1) }}"
        "{{ answer | tojson }}{{ messages | length }}"
    )
    options: dict[str, Any] = {"chat_template": template, "documents": [{"title": "é", "text": ""}]}

    ours = render_chat(TALK, tokenizer, chat_template_kwargs={"answer": {"<": "é"}}, **options)

    assert ours == oracle(tokenizer, TALK, answer={"<": "é"}, **options)


def test_bos_stands_once_and_ids_are_the_templates_own(tokenizer: Tokenizer) -> None:
    text = render_chat(TALK[:1], tokenizer, chat_template=MISTRAL)
    ids = tokenizer.encode(text, add_special_tokens=False)

    assert tokenizer.encode("x")[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id or 0) == 1
    own = tokenizer.hf.apply_chat_template(TALK[:1], chat_template=MISTRAL, return_dict=True)
    assert ids == own["input_ids"]


def test_callers_messages_are_not_changed(tokenizer: Tokenizer) -> None:
    messages = copy.deepcopy(TOOL_TALK)
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"at": "ü"}'  # type: ignore[index]
    before = copy.deepcopy(messages)

    render_chat(messages, tokenizer, chat_template=QWEN)

    assert messages == before


def test_arguments_given_as_json_text_are_parsed(tokenizer: Tokenizer) -> None:
    messages = copy.deepcopy(TOOL_TALK)
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"at": "ü", "n": [1, null]}'  # type: ignore[index]

    assert render_chat(messages, tokenizer, chat_template=QWEN) == render_chat(
        TOOL_TALK, tokenizer, chat_template=QWEN
    )


@pytest.mark.parametrize("arguments", ["{", "[1]", "7", 7])
def test_arguments_that_are_no_object_are_refused(tokenizer: Tokenizer, arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]

    with pytest.raises(ValidationError, match="must be a JSON object") as caught:
        render_chat(messages, tokenizer, chat_template=QWEN)
    assert caught.value.parameter == "messages[0].tool_calls[0].function.arguments"


def test_reasoning_is_offered_as_reasoning_content(tokenizer: Tokenizer) -> None:
    messages = [TALK[0], {"role": "assistant", "content": "x", "reasoning": "because"}]

    text = render_chat(messages, tokenizer, chat_template=QWEN)

    assert "<think>because</think>" in text
    assert text == oracle(tokenizer, messages, chat_template=QWEN, add_generation_prompt=True)


# Continuing the last message.


@pytest.mark.parametrize("content", ["OK! ", "OK!\n", "OK!", "OK!\n\n \t", " OK", ""])
def test_a_faithful_template_ends_with_the_content(tokenizer: Tokenizer, content: str) -> None:
    text = _continued(tokenizer, CHATML, [TALK[0], {"role": "assistant", "content": content}])

    assert (
        text
        == f"<|im_start|>user\n{TALK[0]['content']}<|im_end|>\n<|im_start|>assistant\n{content}"
    )


@pytest.mark.parametrize("content", ["OK! ", "OK!\n", "OK!", "  OK! \n", "", " \n"])
def test_a_trimming_template_ends_with_the_trimmed_content(
    tokenizer: Tokenizer, content: str
) -> None:
    text = _continued(tokenizer, TRIMMING, [TALK[2], {"role": "assistant", "content": content}])

    assert text == f"[user] Bye\n</turn>\n[assistant] {content.strip()}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_continuing_equals_transformers_where_it_works(tokenizer: Tokenizer, name: str) -> None:
    messages = [TALK[2], {"role": "assistant", "content": "OK then"}]
    template = TEMPLATES[name]

    assert _continued(tokenizer, template, messages) == oracle(
        tokenizer, messages, chat_template=template, continue_final_message=True
    )


def test_a_repeated_last_message_keeps_the_whole_conversation(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "Yes"},
        {"role": "assistant", "content": "Yes "},
    ]

    text = _continued(tokenizer, TRIMMING, messages)

    assert text == (
        "[user] Go\n</turn>\n[assistant] Yes\n</turn>\n[user] Yes\n</turn>\n[assistant] Yes"
    )


def test_the_last_text_part_is_continued(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
    messages = [TALK[2], {"role": "assistant", "content": parts}]

    assert _continued(tokenizer, PARTS, messages) == "[user]Bye;[assistant]a;b "


def test_content_that_holds_our_marker_is_safe(tokenizer: Tokenizer) -> None:
    content = "0continue0here0 and on"

    assert _continued(tokenizer, CHATML, [{"role": "assistant", "content": content}]).endswith(
        f"assistant\n{content}"
    )


@pytest.mark.parametrize("content", [None, []])
def test_a_last_message_without_text_cannot_be_continued(
    tokenizer: Tokenizer, content: object
) -> None:
    messages = [{"role": "assistant", "content": content}]

    with pytest.raises(ValidationError, match="needs text in the last message"):
        _continued(tokenizer, PARTS, messages)


def test_a_template_that_drops_the_last_message_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValidationError, match="does not work with this chat template") as caught:
        _continued(tokenizer, "{{ messages[0].role }}", TALK)
    assert caught.value.parameter == "continue_final_message"


def test_generating_and_continuing_exclude_each_other(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValidationError, match="add_generation_prompt") as caught:
        render_chat(TALK, tokenizer, chat_template=CHATML, continue_final_message=True)
    assert caught.value.parameter == "continue_final_message"


def _continued(tokenizer: Tokenizer, template: str, messages: list[Any]) -> str:
    return render_chat(
        messages,
        tokenizer,
        chat_template=template,
        add_generation_prompt=False,
        continue_final_message=True,
    )


# The choice of the template.


def named(**templates: str) -> Any:
    return SimpleNamespace(chat_template=templates or None, special_tokens={})


@pytest.mark.parametrize(
    ("given", "has_tools", "expected"),
    [
        (None, False, "{D}"),
        (None, True, "{T}"),
        ("rag", True, "{R}"),
        ("{mine}", True, "{mine}"),
    ],
)
def test_choice_among_named_templates(given: str | None, has_tools: bool, expected: str) -> None:
    own = named(default="{D}", tool_use="{T}", rag="{R}")

    assert choose_template(own, given, has_tools) == expected


def test_a_template_may_be_a_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("from file é", encoding="utf-8")

    assert choose_template(named(), str(path)) == "from file é"
    with pytest.raises(ValidationError, match="must be a Jinja template or the name") as caught:
        choose_template(named(), str(path), allow_file=False)
    assert "from file" not in str(caught.value)


def test_a_missing_template_is_refused() -> None:
    with pytest.raises(ValidationError, match="chat_template is needed"):
        choose_template(named())
    with pytest.raises(ValidationError, match="rag, tool_use"):
        choose_template(named(rag="{R}", tool_use="{T}"))
    with pytest.raises(ValidationError, match=r"\(default\), got 'no/such.jinja'"):
        choose_template(named(default="{D}"), "no/such.jinja")


# chat_template_kwargs.


def test_request_variables_win_over_defaults_unless_unset() -> None:
    merged = merge_template_kwargs({"a": 1, "b": 2, "c": 3}, {"a": 9, "b": None, "c": "auto"})

    assert merged == {"a": 9, "b": 2, "c": 3}


@pytest.mark.parametrize("key", ["chat_template", "tokenize", "messages", "tools"])
def test_fixed_keys_are_refused(tokenizer: Tokenizer, key: str) -> None:
    with pytest.raises(ValidationError, match=key) as caught:
        render_chat(TALK, tokenizer, chat_template=CHATML, chat_template_kwargs={key: 1})
    assert caught.value.parameter == "chat_template_kwargs"


def test_thinking_can_be_switched_off_and_unknown_keys_are_dropped(tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"chat_template": QWEN, "chat_template_kwargs": {"unknown": object()}}

    on = render_chat(TALK, tokenizer, **options)
    off = render_chat(
        TALK, tokenizer, default_chat_template_kwargs={"enable_thinking": False}, **options
    )

    assert off == on + "<think></think>"


def test_add_generation_prompt_may_come_as_a_variable(tokenizer: Tokenizer) -> None:
    text = render_chat(
        TALK,
        tokenizer,
        chat_template=CHATML,
        chat_template_kwargs={"add_generation_prompt": False},
    )

    assert text == render_chat(TALK, tokenizer, chat_template=CHATML, add_generation_prompt=False)


# Content.


@pytest.mark.parametrize(
    ("template", "content_format", "expected"),
    [
        (CHATML, "auto", "a\nb"),
        (CHATML, "string", "a\nb"),
        (PARTS, "auto", "a;b;"),
        (PARTS, "openai", "a;b;"),
    ],
)
def test_parts_become_what_the_template_reads(
    tokenizer: Tokenizer, template: str, content_format: Any, expected: str
) -> None:
    parts = [{"type": "text", "text": "a"}, "b"]

    text = render_chat(
        [{"role": "user", "content": parts}],
        tokenizer,
        chat_template=template,
        content_format=content_format,
        add_generation_prompt=False,
    )

    assert expected in text


def test_a_string_reaches_a_template_that_only_knows_parts(tokenizer: Tokenizer) -> None:
    text = render_chat([{"role": "user", "content": "whole"}], tokenizer, chat_template=PARTS)

    assert text == "[user]whole;"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "video_url", "video_url": {}},
        {"image_pil": object()},
    ],
)
def test_media_parts_are_refused_by_type(tokenizer: Tokenizer, part: dict[str, Any]) -> None:
    kind = part.get("type", "image_pil")
    messages = [TALK[0], {"role": "user", "content": [{"type": "text", "text": "a"}, part]}]

    with pytest.raises(NotInThisVersion, match=f"'{kind}', and this version has no multimodal"):
        render_chat(messages, tokenizer, chat_template=CHATML)


@pytest.mark.parametrize(
    ("messages", "parameter"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "txt"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "tool_calls": 3}], "messages[0].tool_calls"),
    ],
)
def test_misshapen_messages_are_refused_by_place(
    tokenizer: Tokenizer, messages: Any, parameter: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        render_chat(messages, tokenizer, chat_template=CHATML)
    assert caught.value.parameter == parameter


def test_unknown_roles_reach_the_template(tokenizer: Tokenizer) -> None:
    text = render_chat([{"role": "oracle", "content": "x"}], tokenizer, chat_template=CHATML)

    assert text.startswith("<|im_start|>oracle\n")
