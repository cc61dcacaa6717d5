"""A conversation: history, commands, refusals, one answer for a script."""

import pytest

from decodekit.core.engine import LLMEngine
from decodekit.core.errors import ValidationError
from decodekit.core.inputs import TokensPrompt
from decodekit.core.params import SamplingParams
from decodekit.plugins.console.chat import Conversation, parse_fields
from decodekit.plugins.console.options import Sampling

from .conftest import Decodekit

GREEDY = ("--temperature", "0", "--max-tokens", "4")


@pytest.fixture
def conversation(engine: LLMEngine) -> Conversation:
    return Conversation(engine, Sampling({"temperature": 0, "max_tokens": 4}), None)


@pytest.fixture
def prompts(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text of each prompt that reaches the engine."""
    seen: list[str] = []
    add = engine.add_request

    def note(name: str, prompt: TokensPrompt, params: SamplingParams) -> str:
        assert engine.parts.tokenizer is not None
        ids = prompt["prompt_token_ids"]
        seen.append(engine.parts.tokenizer.decode(ids, skip_special_tokens=False))
        return add(name, prompt, params)

    monkeypatch.setattr(engine, "add_request", note)
    return seen


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def test_the_next_answer_sees_what_was_said(conversation: Conversation, prompts: list[str]) -> None:
    first = conversation.say("one")
    second = conversation.say("two")

    open_turn = "<|im_start|>assistant\n"
    said = turn("user", "one") + turn("assistant", first.text) + turn("user", "two")
    assert prompts == [turn("user", "one") + open_turn, said + open_turn]
    assert conversation.messages[-1] == {"role": "assistant", "content": second.text}


def test_the_system_message_stands_in_front(engine: LLMEngine, prompts: list[str]) -> None:
    Conversation(engine, Sampling({"max_tokens": 4}), "S").say("hi")

    assert prompts[0].startswith(turn("system", "S") + turn("user", "hi"))


def test_a_refused_message_is_no_part_of_the_conversation(conversation: Conversation) -> None:
    with pytest.raises(ValidationError, match="tokens"):
        conversation.say("x" * 1000)

    assert conversation.messages == []


def test_several_answers_at_once_are_refused(engine: LLMEngine) -> None:
    with pytest.raises(ValidationError, match="n must be 1"):
        Conversation(engine, Sampling({"n": 2}), None).say("hi")


def test_reset_and_system_start_over(conversation: Conversation) -> None:
    conversation.say("one")
    conversation.command("/reset")
    assert conversation.messages == []

    conversation.say("one")
    assert "Be brief." in conversation.command("/system Be brief.")
    assert (conversation.messages, conversation.system) == ([], "Be brief.")
    conversation.command("/system")
    assert conversation.system is None


def test_params_sets_and_unsets_fields(conversation: Conversation) -> None:
    said = conversation.command("/params temperature=0.5 top_k=3 stop='[\"x\"]'")
    assert "temperature=0.5" in said
    assert conversation.sampling.fields["stop"] == ["x"]

    conversation.command("/params top_k=null")
    assert "top_k" not in conversation.sampling.fields


def test_chain_sets_shows_and_unsets_the_chain(conversation: Conversation) -> None:
    conversation.command("/params temperature=null")
    said = conversation.command("/chain temperature=0.5,top_k=3")
    assert said.index("temperature") < said.index("top_k") < said.index("race")

    conversation.command("/chain off")
    assert conversation.sampling.chain is None


@pytest.mark.parametrize(
    "line", ["/params top_p=9", "/params topp=0.9", "/params top_p", "/chain topp=1", "/rest"]
)
def test_a_refused_command_changes_nothing(conversation: Conversation, line: str) -> None:
    before = conversation.sampling

    with pytest.raises(ValidationError):
        conversation.command(line)

    assert conversation.sampling is before


def test_fields_are_json_or_words() -> None:
    assert parse_fields("a=1 b=0.5 c=null d=word e='two words' f='[1, 2]'") == {
        "a": 1,
        "b": 0.5,
        "c": None,
        "d": "word",
        "e": "two words",
        "f": [1, 2],
    }


def test_one_message_gives_one_answer_on_standard_output(
    decodekit: Decodekit, conversation: Conversation
) -> None:
    result = decodekit("chat", "TINY", "-m", "hi", *GREEDY)

    answer = conversation.say("hi")
    assert result.exit_code == 0
    assert result.stdout == f"{answer.text}\n"
    assert result.stderr.startswith("greedy | 4 tokens | ")
    assert result.stderr.endswith("tokens/s | length\n")


def test_a_script_can_hold_a_conversation(decodekit: Decodekit) -> None:
    lines = 'one\n\n/system S\n"""two\nlines"""\n/nosuch\n/params\n/exit\nnever\n'

    result = decodekit("chat", "TINY", *GREEDY, input=lines)

    assert result.exit_code == 0
    assert result.stderr.count("greedy | ") == 2
    assert "error: there is no command /nosuch; /help lists them" in result.stderr
    assert "SamplingParams(" in result.stdout


def test_the_end_of_the_input_ends_the_program(decodekit: Decodekit) -> None:
    assert decodekit("chat", "TINY", *GREEDY, input="hi\n").exit_code == 0


def test_a_conversation_that_is_too_long_goes_on_after_a_hint(decodekit: Decodekit) -> None:
    result = decodekit("chat", "TINY", *GREEDY, input=f"{'x' * 1000}\nhi\n")

    assert result.exit_code == 0
    assert "(/reset starts over)" in result.stderr
    assert result.stderr.count("greedy | ") == 1


def test_a_chain_that_cannot_run_is_refused_before_the_first_message(decodekit: Decodekit) -> None:
    result = decodekit("chat", "TINY", "--chain", "topp=0.9", input="hi\n")

    assert result.exit_code == 2
    assert "did you mean 'top_p'?" in result.stderr
