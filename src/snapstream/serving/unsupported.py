"""Unsupported fields of OpenAI's and vLLM's APIs: which of them have an effect, and what to do instead."""

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
        "guided_decoding_backend",
    )
)
"""Fields that have no effect here; they are accepted with any value."""

TEXT_ONLY = "this server reads and writes text only"
_NO_BEAMS = "it is part of beam search, which only the cache for transformers supports"
_OWN_ANSWER = "the model always starts a new answer; /v1/completions continues a text"

_REASONS: Sequence[tuple[Sequence[str], str]] = (
    (("functions", "function_call"), "use tools and tool_choice"),
    (("guided_whitespace_pattern",), "whitespace between JSON tokens is limited to 40 characters"),
    (("modalities", "audio", "prompt_embeds", "mm_processor_kwargs"), TEXT_ONLY),
    (("use_beam_search", "length_penalty", "early_stopping"), _NO_BEAMS),
    (("add_generation_prompt", "continue_final_message"), _OWN_ANSWER),
    (("allowed_token_ids", "bad_words", "logits_processors"), "logit_bias can favor tokens or forbid them"),
    (("best_of",), "every answer is returned; set n, and choose among them"),
    (("suffix",), "a text can only be continued at its end"),
    (
        ("prediction",),
        "tokens are drafted from the prompt and the output, with --speculative lookup; put the text into the prompt",
    ),
    (("verbosity",), "say in a message how long the answer should be"),
    (("web_search_options",), "nothing is fetched from the web; put what the model should know into a message"),
    (("documents",), "put their text into a message"),
    (("chat_template",), "only the operator can set it, with --chat-template"),
    (("add_special_tokens",), "give token ids to control every token"),
    (("truncate_prompt_tokens",), "a prompt is used in full or refused"),
    (("prompt_logprobs",), "ask /v1/completions for echo with logprobs"),
    (("include_stop_str_in_output",), "stop strings are never part of the output"),
    (("spaces_between_special_tokens",), "the text is what the tokenizer decodes"),
    (("return_token_ids",), "/tokenize returns the tokens of a text"),
    (("priority",), "requests are served in order of arrival"),
)

UNSUPPORTED: Mapping[str, str] = {
    name: f"{name} is not supported: {reason}" for names, reason in _REASONS for name in names
}
"""Error messages for requests that use unsupported fields."""

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "functions": ([],),
    "function_call": ("none",),
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
"""Values of unsupported fields that request nothing; they are accepted, because some clients send them by default."""
