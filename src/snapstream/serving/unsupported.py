"""Fields of OpenAI's API and of vLLM's that this server does not have: which of them matter, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

UNUSED = frozenset(
    (
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "tool_choice",
    )
)
"""Fields that change nothing here: they are accepted, whatever they say."""

TEXT_ONLY = "this server reads and writes text only"
_NO_CALLS = "the output is not searched for calls; describe what you need in a message"
_FREE_TEXT = "the output is free text, which nothing constrains to a format"
_NO_BEAMS = "it belongs to beam search, which only the cache for transformers has"
_OWN_ANSWER = "the model begins an answer of its own; /v1/completions continues a text"

_REASONS: Sequence[tuple[Sequence[str], str]] = (
    (("tools", "functions", "function_call"), _NO_CALLS),
    (("response_format", "structured_outputs"), _FREE_TEXT),
    (("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _FREE_TEXT),
    (("modalities", "audio", "prompt_embeds", "mm_processor_kwargs"), TEXT_ONLY),
    (("use_beam_search", "length_penalty", "early_stopping"), _NO_BEAMS),
    (("add_generation_prompt", "continue_final_message"), _OWN_ANSWER),
    (("allowed_token_ids", "bad_words", "logits_processors"), "logit_bias can favour tokens or forbid them"),
    (("best_of",), "every answer is returned; give n, and choose among them"),
    (("suffix",), "a text is only continued at its end"),
    (
        ("prediction",),
        "tokens are guessed from the prompt and the output, with --speculative lookup; put the text into the prompt",
    ),
    (
        ("reasoning_effort",),
        "give the variable of the model's chat template in chat_template_kwargs, such as enable_thinking",
    ),
    (("verbosity",), "say in a message how long the answer should be"),
    (("web_search_options",), "nothing is fetched from the web; put what the model should know into a message"),
    (("documents",), "put their text into a message"),
    (("chat_template",), "the operator sets it, with --chat-template"),
    (("add_special_tokens",), "give token ids to decide about every token"),
    (("truncate_prompt_tokens",), "a prompt is read in full or refused"),
    (("prompt_logprobs",), "ask /v1/completions for echo with logprobs"),
    (("include_stop_str_in_output",), "stop strings are never part of the output"),
    (("spaces_between_special_tokens",), "text is as the tokenizer decodes it"),
    (("return_token_ids",), "/tokenize gives the tokens of a text"),
    (("priority",), "requests are served in the order they come in"),
)

UNSUPPORTED: Mapping[str, str] = {
    name: f"{name} is not supported: {reason}" for names, reason in _REASONS for name in names
}
"""What a request is told that asks for something that is not here."""

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "tools": ([],),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "bad_words": ([],),
    "documents": ([],),
    "priority": (0,),
}
"""Values of unsupported fields that ask for nothing: they are accepted, because clients send them unasked."""
