"""Prompts, defaults and lengths over HTTP: DEC-089, 090, 092, 093, 094 and 096."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from decodekit import LLM, SamplingParams
from decodekit.plugins.author.table_model import byte_tokenizer, flat_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cases.conftest import MakeSite, Site

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TALK = [{"role": "user", "content": "hi"}]
KEEPING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% if not loop.last or add_generation_prompt %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TRIMMING = KEEPING.replace("m.content or ''", "(m.content or '') | trim")


def test_dec_089_one_bos_and_the_same_ids_on_every_route(
    make_site: MakeSite, ascii_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = ascii_tokenizer(special=["<s>", "<end>"], bos_token="<s>", eos_token="<end>",
                                adds_bos=True)  # fmt: skip
    tokenizer.chat_template = "{{ bos_token }}" + KEEPING
    site = make_site(flat_table(130), model={"tokenizer": tokenizer})
    own = tokenizer.apply_chat_template(
        TALK, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    answer = site.chat(messages=TALK, max_tokens=1, return_token_ids=True)
    tokens = site.ask("/tokenize", messages=TALK)["tokens"]
    rendered = site.ask(f"{CHAT}/render", messages=TALK)["token_ids"]
    folder = site.server.engine.engine.config.model
    [offline] = LLM(folder).chat(TALK, SamplingParams(max_tokens=1), use_tqdm=False)

    assert answer["prompt_token_ids"] == tokens == rendered == own == offline.prompt_token_ids
    assert own.count(tokenizer.bos_token_id) == 1
    assert answer["usage"]["prompt_tokens"] == len(own)


@pytest.mark.parametrize("template", [KEEPING, TRIMMING], ids=["keeping", "trimming"])
def test_dec_090_continuing_a_message_that_ends_in_white_space(
    make_site: MakeSite, template: str
) -> None:
    tokenizer = byte_tokenizer(special=["<end>"], eos="<end>", chat_template=template)
    site = make_site(flat_table(257), model={"tokenizer": tokenizer})
    for content in ("OK! ", "OK!\n", "OK!"):
        talk = [*TALK, {"role": "assistant", "content": content}]
        answer = site.chat(messages=talk, max_tokens=1, return_token_ids=True,
                           continue_final_message=True, add_generation_prompt=False)  # fmt: skip
        prompt = bytes(token for token in answer["prompt_token_ids"] if token < 256).decode()
        expected = content if template is KEEPING else content.strip()
        assert prompt.endswith(f"[assistant]{expected}")
        assert answer["prompt_token_ids"][-1] != 256


def configured(make_site: MakeSite, **engine: Any) -> Site:
    config = {"temperature": 0.6, "top_k": 1, "top_p": 0.9, "repetition_penalty": 1.3}
    tokenizer = byte_tokenizer(special=["<end>"], eos="<end>", chat_template=KEEPING)
    model = {"tokenizer": tokenizer, "generation_config": config}
    return make_site(flat_table(257), model=model, **engine)


def effective(site: Site, **body: Any) -> dict[str, Any]:
    """Stage -> its first parameter's value, as the plan of the answer tells."""
    answer = site.chat(messages=TALK, max_tokens=1, return_plan=True, **body)
    return {
        step["stage"]: next(iter(step["params"].values()), None)
        for step in answer["choices"][0]["plan"]["order"]
    }


def test_dec_092_the_models_defaults_fill_gaps_over_http(make_site: MakeSite) -> None:
    site = configured(make_site)
    unset = effective(site)
    explicit = effective(site, top_k=-1, top_p=1.0, repetition_penalty=1.0)

    assert (unset["temperature"], unset["top_k"]) == (0.6, 1)
    assert unset["repetition_penalty"] == 1.3
    assert explicit["temperature"] == 0.6
    assert not {"top_k", "top_p", "repetition_penalty"} & set(explicit)
    assert "temperature" not in effective(site, temperature=0)
    off = configured(make_site, generation_config="vllm")
    assert not {"temperature", "top_k", "top_p", "repetition_penalty"} & set(effective(off))


def test_dec_092_the_plan_says_where_a_value_came_from(make_site: MakeSite) -> None:
    answer = configured(make_site).chat(messages=TALK, max_tokens=1, return_plan=True, top_p=0.5)
    told = {
        step["stage"]: set(step["provenance"].values())
        for step in answer["choices"][0]["plan"]["order"]
    }

    assert "generation_config" in told["temperature"]
    assert "request" in told["top_p"]


def test_dec_093_the_default_max_tokens_over_http(make_site: MakeSite) -> None:
    tokenizer = byte_tokenizer(
        special=["<end>"], eos="<end>", chat_template="{{ messages[0].content }}"
    )
    site = make_site(flat_table(257), model={"tokenizer": tokenizer}, max_model_len=128)

    def length(answer: dict[str, Any]) -> int:
        assert answer["choices"][0]["finish_reason"] == "length"
        count: int = answer["usage"]["completion_tokens"]
        return count

    assert length(site.complete(prompt="ab")) == 16
    assert length(site.complete(prompt="ab", max_tokens=None)) == 126
    assert length(site.chat(messages=TALK)) == 126
    assert length(site.chat(messages=TALK, max_tokens=None)) == 126
    assert length(site.chat(messages=TALK, min_tokens=20)) == 126


def test_dec_094_prompt_and_max_tokens_at_the_edge_over_http(make_site: MakeSite) -> None:
    tokenizer = byte_tokenizer(special=["<end>"], eos="<end>")
    site = make_site(flat_table(257), model={"tokenizer": tokenizer}, max_model_len=32)

    for prompt, limit in ((31, 1), (20, 12)):
        answer = site.complete(prompt="a" * prompt, max_tokens=limit)
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, limit)
    for prompt in (32, 33):
        site.refused(COMPLETIONS, {"prompt": "a" * prompt, "max_tokens": 1})
    error = site.refused(COMPLETIONS, {"prompt": "a" * 20, "max_tokens": 13})
    assert all(number in error["message"] for number in ("32", "20", "13"))
    site.check_answers()


@pytest.mark.parametrize("adds_bos", [False, True])
def test_dec_096_empty_prompts_over_http(
    make_site: MakeSite, ascii_tokenizer: Callable[..., Any], adds_bos: bool
) -> None:
    names = {"bos_token": "<s>"} if adds_bos else {}
    tokenizer = ascii_tokenizer(special=["<s>", "<end>"], eos_token="<end>", adds_bos=adds_bos,
                                **names)  # fmt: skip
    tokenizer.chat_template = "{{ '' }}"
    site = make_site(flat_table(130), model={"tokenizer": tokenizer})
    for prompt in ("", [""], ["ok", ""]):
        if adds_bos:
            answer = site.complete(prompt=prompt, max_tokens=2, return_token_ids=True)
            assert answer["choices"][-1]["prompt_token_ids"] == [tokenizer.bos_token_id]
        else:
            site.refused(COMPLETIONS, {"prompt": prompt, "max_tokens": 2})
    for prompt in ([], [[]]):
        site.refused(COMPLETIONS, {"prompt": prompt, "max_tokens": 2})
    site.refused(CHAT, {"messages": TALK})  # the template writes its own BOS, or none
    site.check_answers()
