"""Messages to a prompt: choice of the chat template, clean messages, rendering in a sandbox.

Renders with jinja2 directly, under the environment that transformers gives its templates, so that
the text equals `apply_chat_template` without importing transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .chat_messages import clean_documents, clean_messages, clean_tools, plain_data
from .chat_template import CompiledTemplate, compile_template
from .errors import ValidationError
from .param_rules import shown
from .tokenizer import Tokenizer

ContentFormat = Literal["auto", "string", "openai"]

_ODD_SPACE = "\N{LINE TABULATION}\N{EM SPACE}"


def render_chat(
    messages: Sequence[Any],
    tokenizer: Tokenizer,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    default_chat_template_kwargs: Mapping[str, Any] | None = None,
    content_format: ContentFormat = "auto",
    allow_template_file: bool = True,
) -> str:
    """Render a conversation to the prompt text; every refusal is a ValidationError.

    The caller's messages are not altered. With `continue_final_message` the text ends where the
    last message's content ends. `allow_template_file` False keeps a remote caller's
    `chat_template` from naming a file of this machine. Encode the result without special tokens.
    """
    template = compile_template(
        choose_template(tokenizer, chat_template, bool(tools), allow_file=allow_template_file)
    )
    extra = merge_template_kwargs(default_chat_template_kwargs, chat_template_kwargs)
    # Both switches may also come under chat_template_kwargs, where they win.
    is_open = bool(extra.pop("continue_final_message", continue_final_message))
    generation = bool(extra.pop("add_generation_prompt", add_generation_prompt))
    if is_open and generation:
        raise ValidationError(
            "continue_final_message must be False while add_generation_prompt is True: either the"
            " last message goes on, or the next one begins",
            parameter="continue_final_message",
            value=True,
        )
    conversation = clean_messages(messages, template, content_format)
    variables = {
        **tokenizer.special_tokens,
        **{k: plain_data(v) for k, v in extra.items() if k in template.variables},
        "tools": clean_tools(tools),
        "documents": clean_documents(documents),
        "add_generation_prompt": generation,
    }
    if is_open:
        return _render_open(template, conversation, variables)
    return template.render(conversation, variables)


def choose_template(
    tokenizer: Tokenizer,
    chat_template: str | None = None,
    has_tools: bool = False,
    *,
    allow_file: bool = True,
) -> str:
    """Source of the template to use.

    1. `chat_template`: one of the tokenizer's named templates, else a text, else a file's path.
    2. The tokenizer's own; of several named ones "tool_use" if there are tools, else "default".
    """
    own = tokenizer.chat_template
    if chat_template is not None:
        if isinstance(own, dict) and chat_template in own:
            return own[chat_template]
        return load_template(chat_template, allow_file=allow_file, names=own)
    if isinstance(own, str):
        return own
    if not own:
        raise ValidationError(
            "chat_template is needed: this model's tokenizer has none; pass a template or a path",
            parameter="chat_template",
        )
    if has_tools and "tool_use" in own:
        return own["tool_use"]
    if "default" in own:
        return own["default"]
    raise ValidationError(
        f"chat_template must name one of this tokenizer's templates ({', '.join(sorted(own))}),"
        " as none of them is the default",
        parameter="chat_template",
    )


def load_template(value: str, *, allow_file: bool = True, names: object = None) -> str:
    """Take a template given as text, or read it from the file that `value` names."""
    if not isinstance(value, str):
        raise ValidationError(
            f"chat_template must be a string, got {shown(value)}",
            parameter="chat_template",
            value=value,
        )
    if any(mark in value for mark in ("{", "}", "\n")):
        return value
    if allow_file:
        try:
            return Path(value).read_text(encoding="utf-8")
        except (OSError, ValueError):  # no such file, a folder, no text, a NUL in the name
            pass  # refused below, with the other meanings that it might have had
    known = f" ({', '.join(sorted(names))})" if isinstance(names, dict) else ""
    file = ", a readable file" if allow_file else ""
    raise ValidationError(
        f"chat_template must be a Jinja template{file} or the name of one of the tokenizer's"
        f" templates{known}, got {shown(value)}",
        parameter="chat_template",
        value=value,
    )


def merge_template_kwargs(
    defaults: Mapping[str, Any] | None, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Lay a request's template variables over the defaults; None and "auto" count as not given."""
    for key in ("chat_template", "tokenize", "messages", "tools", "documents"):
        if key in (given or {}):
            raise ValidationError(
                f"chat_template_kwargs must not hold {key!r}, which is an argument of its own",
                parameter="chat_template_kwargs",
                value=key,
            )
    chosen = {k: v for k, v in (given or {}).items() if v is not None and v != "auto"}
    return {**(defaults or {}), **chosen}


def _render_open(
    template: CompiledTemplate, conversation: list[dict[str, Any]], variables: Mapping[str, Any]
) -> str:
    """Render with a marker behind the last content, and cut there.

    Searching for the content itself would find earlier copies of it, or nothing where the template
    trims. White space that no template writes shows behind the marker whether it trims; if so, the
    content is rendered without the white space at its end.
    """
    last = conversation[-1]
    content = last.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    holder = next((part for part in reversed(parts) if isinstance(part.get("text"), str)), None)
    if holder is None:
        raise _cannot_continue(f"needs text in the last message's content, got {shown(content)}")
    text: str = holder["text"]
    marker = _unused_marker(template.source + repr(conversation) + repr(variables))

    def render(ending: str) -> tuple[str, str, str]:
        whole = [{**part, "text": ending} if part is holder else part for part in parts]
        body = whole if isinstance(content, list) else ending
        rendered = template.render([*conversation[:-1], {**last, "content": body}], variables)
        return rendered.rpartition(marker)

    space = text[len(text.rstrip()) :]
    before, found, after = render(text + marker + _ODD_SPACE + space)
    if space and found and not after.startswith(_ODD_SPACE + space):
        before, found, _ = render(text.rstrip() + marker)
    if not found:
        raise _cannot_continue(
            "does not work with this chat template: it leaves out or rewrites the last message's"
            " content"
        )
    return before


def _cannot_continue(reason: str) -> ValidationError:
    return ValidationError(
        f"continue_final_message {reason}", parameter="continue_final_message", value=True
    )


def _unused_marker(text: str) -> str:
    number = 0
    while (marker := f"0continue{number}here0") in text:
        number += 1
    return marker
