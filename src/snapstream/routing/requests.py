"""Splits a request in two: one for the prompt and the first token, one for the rest.

A request is only split if the result is the same as from a single instance. Other requests go unchanged to a decode
instance, which then prefills the prompt itself.
"""

from __future__ import annotations

from typing import Any

_SAMPLING = {
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "ignore_eos", "skip_special_tokens", "min_tokens"),
    *("spaces_between_special_tokens", "include_stop_str_in_output", "vllm_xargs", "user", "priority", "n"),
    *("max_tokens", "stream", "stream_options"),
}
_OF_PROMPT = {
    "completions": {"prompt", "add_special_tokens", "echo", "best_of"},
    "chat/completions": {
        *("messages", "max_completion_tokens", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
        *("continue_final_message", "add_special_tokens", "documents"),
    },
}
_DEFAULT_TOKENS = 16  # of OpenAI's completions


def reason_for_whole(kind: str, body: dict[str, Any]) -> str | None:
    """Why a request cannot be split, in a few words; ``None`` if it can.

    Args:
        kind: ``completions`` or ``chat/completions``.
        body: The client's request.
    """
    if kind not in _OF_PROMPT:
        return "another API"
    given = {name for name, value in body.items() if value is not None}
    if unknown := given - _SAMPLING - _OF_PROMPT[kind]:
        return f"field {min(unknown)}"
    options = body.get("stream_options") or {}
    is_random = body.get("temperature") != 0
    prompt = body.get("prompt")
    obstacles = [
        (body.get("n") not in (None, 1), "several choices"),
        (body.get("best_of") not in (None, 1), "several choices"),
        (bool(body.get("echo")), "echo"),
        (not isinstance(options, dict) or set(options) - {"include_usage"}, "stream options"),
        # These depend on where the output starts, but the second instance sees the first output token as prompt.
        (bool(body.get("presence_penalty")) or bool(body.get("frequency_penalty")), "penalties"),
        (body.get("seed") is not None and is_random, "a seed"),
        (
            kind == "completions" and not isinstance(prompt, str) and not _is_tokens(prompt),
            "several prompts",
        ),
        (kind == "chat/completions" and not _is_text(body.get("messages")), "messages that are not text"),
    ]
    return next((text for is_met, text in obstacles if is_met), None)


def prefill_request(body: dict[str, Any]) -> dict[str, Any]:
    """The request to a prefill instance: prefill the prompt and generate one token."""
    changed = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    changed |= {"max_tokens": 1, "return_token_ids": True, "kv_transfer_params": {"do_remote_decode": True}}
    if body.get("max_completion_tokens") is not None:
        changed["max_completion_tokens"] = 1
    if body.get("min_tokens"):
        changed["min_tokens"] = 1
    return changed


def wanted_tokens(kind: str, body: dict[str, Any]) -> int | None:
    """Maximum number of tokens of the answer; ``None``: as many as fit."""
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None:
            return int(body[name])
    return _DEFAULT_TOKENS if kind == "completions" else None


def decode_request(
    kind: str, body: dict[str, Any], tokens: list[int], transfer: dict[str, Any], longest: int
) -> dict[str, Any]:
    """The request to a decode instance: continue after the first token, always as a completion of token ids.

    Args:
        kind: Kind of the client's request.
        body: The client's request.
        tokens: Tokens of the prompt, and the first token of the answer.
        transfer: ``kv_transfer_params`` returned by the prefill instance.
        longest: ``max_model_len`` of the instance, in tokens; 0 if unknown.
    """
    wanted = wanted_tokens(kind, body)
    left = wanted - 1 if wanted is not None else max(1, (longest or 2**20) - len(tokens))
    changed = {name: value for name, value in body.items() if name in _SAMPLING and value is not None}
    changed |= {"prompt": tokens, "max_tokens": left, "kv_transfer_params": transfer}
    if body.get("stream"):  # usage in every chunk: the answer may end at a stop string that only the router detects
        changed["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if body.get("min_tokens"):
        changed["min_tokens"] = max(0, body["min_tokens"] - 1)
    return changed


def _is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def _is_text(messages: Any) -> bool:
    """Whether all messages are plain text, without images, tools or content parts."""
    if not isinstance(messages, list):
        return False
    return all(
        isinstance(message, dict)
        and isinstance(message.get("content"), str)
        and set(message) <= {"role", "content", "name"}
        for message in messages
    )
