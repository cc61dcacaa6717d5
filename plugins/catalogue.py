"""The built-in plugins, by module name inside the package, in the order in which they are loaded.

A missing or broken module here is an error at start. Take a name out to take the plugin out.
"""

BUILT_INS: tuple[str, ...] = (
    "logits_processors.mask.vocab_padding",
    "logits_processors.mask.allowed",
    "logits_processors.mask.bad_words",
    "logits_processors.mask.min_tokens",
    "logits_processors.force.thinking_budget",
    "logits_processors.bias.logit_bias",
    "logits_processors.per_request",
    "logits_processors.bias.penalties",
    "logits_processors.shape.temperature",
    "logits_processors.cut.min_p",
    "logits_processors.cut.top_k",
    "logits_processors.cut.top_p",
    "plugins.pick.greedy",
    "plugins.pick.race",
    "plugins.stop.tokens",
    "plugins.stop.repetition",
    "plugins.observe.logprobs",
    "plugins.observe.kept_set",
    "plugins.observe.tensors",
    "plugins.observe.confidence",
    "plugins.profiles",
    "plugins.attention",
    "plugins.console.chat",
    "plugins.console.generate",
    "plugins.console.explain",
    "plugins.console.doctor",
    "plugins.console.demo",
    "plugins.author.command",
)
