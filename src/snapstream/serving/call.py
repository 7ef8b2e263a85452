"""One request on its way through the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from snapstream.config import SamplingParams, StructuredOutputs
from snapstream.config.pins import Span
from snapstream.engine import RequestOutput
from snapstream.serving.answers import CompletionDetails, PromptDetails, Usage
from snapstream.serving.driver import Batch
from snapstream.serving.generation import Job
from snapstream.serving.parts import Parts
from snapstream.serving.past import Past
from snapstream.serving.prompts import Prompt
from snapstream.serving.protocol import Generate, budget_of
from snapstream.serving.tools.base import Tools
from snapstream.serving.tools.definitions import ToolFields
from snapstream.serving.tools.formats import AnswerReader

_STANDARD = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling parameters where neither the request nor the model says anything: OpenAI's."""


class Call:
    """The sequences of one request for completions; :meth:`close` must be called.

    Args:
        parts: The server's parts.
        body: The request body.
        past: What it continues from.
        max_tokens: Maximum number of tokens of an answer.
        logprobs: Number of most likely tokens to report per token; ``None`` for no log-probabilities.
        tools: The JSON schema of the arguments of each tool that may be called; ``None`` for plain texts.
    """

    def __init__(
        self,
        parts: Parts,
        body: Generate,
        past: Past,
        *,
        max_tokens: int,
        logprobs: int | None,
        tools: Tools | None = None,
    ) -> None:
        self.parts, self.body, self.past, self.logprobs = parts, body, past, logprobs
        self._tools, self._is_chat = tools or {}, tools is not None
        self._shape: StructuredOutputs | None = None
        self.number = body.n or 1
        self.prompts: Sequence[Prompt] = ()
        self._max_tokens, self._prompt_tokens, self._cached = max_tokens, 0, 0
        self._batch: Batch | None = None

    @property
    def batch(self) -> Batch:
        """The sequences, once they are queued."""
        assert self._batch is not None
        return self._batch

    async def start(self, prompts: Sequence[Prompt], *, asked: float, salt: str) -> None:
        """Queue all answers to all prompts.

        Args:
            prompts: The prompts.
            asked: When the request arrived; see :class:`Job`.
            salt: See :class:`Job`.
        """
        self.prompts = prompts
        wanted = self._wanted(prompts[0])
        self._shape = None if wanted is None else await self.parts.reader.compiled(wanted)
        jobs: list[Job] = []
        for prompt in prompts:
            tokens, past = self.past.new_tokens(prompt), self.past.sequence
            pin = self.past.pins(prompt, tokens)
            jobs += [
                Job(tokens, self._params(index, pin), past, self.past.keep, asked, salt) for index in range(self.number)
            ]
        self._cached = len(prompts) * self.past.tokens
        self._prompt_tokens = self._cached + sum(len(job.tokens) for job in jobs[:: self.number])
        self._batch = await self.parts.driver.submit(jobs)

    @property
    def shows_special(self) -> bool:
        """Whether texts have special tokens: requested, or needed to tell the parts of answers apart."""
        needed = self._is_chat and self.parts.answers.shows_special(tools=bool(self._tools))
        return needed or self.body.skip_special_tokens is False

    def reader(self, prompt: Prompt) -> AnswerReader:
        """What splits an answer into its parts."""
        if not self._is_chat:
            return AnswerReader(None, None)
        parallel = not isinstance(self.body, ToolFields) or self.body.parallel
        ending, strict = self.parts.reader.ending(prompt), self._shape is not None
        return self.parts.answers.reader(ending, self._tools, parallel=parallel, strict=strict)

    def _wanted(self, prompt: Prompt) -> Callable[[], StructuredOutputs] | None:
        """What makes the shape of the answers; ``None`` if they may be any text."""
        shape, body, answers = self.body.shape(), self.body, self.parts.answers
        if not self._is_chat or not isinstance(body, ToolFields):
            return None if shape is None else lambda: shape
        ending, tools = self.parts.reader.ending(prompt), self._tools
        if tools and body.must_call:
            return lambda: answers.must_call(ending, tools, parallel=body.parallel)
        if tools and (shape is not None or body.is_strict):
            return lambda: answers.may_call(ending, tools, shape, parallel=body.parallel)
        return None if shape is None else lambda: answers.after_reasoning(ending, shape)

    def close(self) -> None:
        """Abort what still runs."""
        if self._batch is not None:
            self._batch.cancel()

    def progress(self) -> str:
        """A short description of the request's progress."""
        snapshot, generations = self.parts.driver.snapshot, self.batch.generations
        if any(generation.first_token is not None for generation in generations):
            return "generating"
        reading = [snapshot.reading[one.name] for one in generations if one.name in snapshot.reading]
        if reading:
            return f"reading the prompt: {reading[0][0]} of {reading[0][1]} tokens"
        if any(generation.started is not None for generation in generations):
            return "the prompt has been read"
        return f"waiting: {self.parts.driver.waiting} in the queue"

    def for_log(self) -> dict[str, Any]:
        """What the server's log says of the request, so far."""
        if self._batch is None:
            return {"prompt_tokens": self._prompt_tokens} if self._prompt_tokens else {}
        generations = self._batch.generations
        said: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "sequences": [one.name for one in generations],
            "finish": [(one.output and one.output.finish_reason) or "abort" for one in generations],
            "completion_tokens": self._completion_tokens(),
        }
        failed = [one.error for one in self._outputs() if one.finish_reason == "error"]
        first = [one.first_token - one.created for one in generations if one.first_token is not None]
        said |= {"error": failed[0]} if failed else {}
        return said | ({"first_token_s": round(min(first), 4)} if first else {})

    def usage(self) -> Usage:
        """Token counts, so far."""
        completion, outputs = self._completion_tokens(), self._outputs()
        accepted = sum(output.accepted for output in outputs)
        reused = sum(output.reused for output in outputs[:: self.number])
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion,
            total_tokens=self._prompt_tokens + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=self._cached + reused),
            completion_tokens_details=CompletionDetails(
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=sum(output.drafted for output in outputs) - accepted,
            ),
        )

    def _outputs(self) -> list[RequestOutput]:
        return [one.output for one in self.batch.generations if one.output is not None]

    def _completion_tokens(self) -> int:
        return sum(output.token_count for output in self._outputs())

    def _params(self, index: int, pin: Sequence[Span]) -> SamplingParams:
        """Sampling parameters of one answer: the request's, otherwise the model's recommended, otherwise OpenAI's."""
        body, defaults = self.body, self.parts.llm.engine.sampling_defaults
        given = {
            name: getattr(body, name) if getattr(body, name) is not None else defaults.get(name, standard)
            for name, standard in _STANDARD.items()
        }
        xargs = None if body.vllm_xargs is None else body.vllm_xargs.kv_budget
        return SamplingParams(
            max_tokens=self._max_tokens,
            min_tokens=body.min_tokens or 0,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if getattr(body, "echo", False) else None,
            logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
            stop=tuple(dict.fromkeys([body.stop] if isinstance(body.stop, str) else body.stop or [])),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            skip_special_tokens=not self.shows_special,
            structured_outputs=self._shape,
            seed=None if body.seed is None else body.seed + index,
            kv_budget=budget_of(body.kv_budget) if body.kv_budget is not None else xargs,
            pin=pin,
            return_kept_tokens=body.kept_tokens is True,
            # top_p = 0 means the likeliest token alone, whose probability exceeds any tiny number.
            **(given | {"top_k": max(given["top_k"], 0), "top_p": given["top_p"] or 1e-9}),
        )
