"""The default profile."""

from decodekit.plugins.profiles import DEFAULT, decodekit_profiles


def test_the_default_order_is_the_documented_one() -> None:
    documented = (
        "grammar allowed_tokens suppress_tokens bad_words min_tokens thinking_budget logit_bias "
        "per_request repetition_penalty frequency_penalty presence_penalty temperature min_p "
        "top_k top_p"
    )

    assert list(decodekit_profiles()) == [DEFAULT]
    assert DEFAULT.name == "default"
    assert DEFAULT.order == ("vocab_padding", *documented.split())
    assert (DEFAULT.picker, DEFAULT.greedy) == ("race", "greedy")
