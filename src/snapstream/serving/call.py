"""One request on its way through the engine, and its answer in OpenAI's format, complete or streamed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from snapstream import __version__
from snapstream.cache import Stored
from snapstream.config import SamplingParams
from snapstream.engine import CompressedSequence, Context, RequestOutput
from snapstream.serving.answers import LogprobWriter, cache_of
from snapstream.serving.driver import Batch
from snapstream.serving.errors import ApiError
from snapstream.serving.generation import Job
from snapstream.serving.parts import Parts
from snapstream.serving.prompts import Prompt
from snapstream.serving.protocol import ChatRequest, Generate, budget_of
from snapstream.serving.streams import Emit
from snapstream.serving.turns import Turn

dumps = partial(json.dumps, allow_nan=False)


class Call:
    """One request for completions.

    Call :meth:`begin`, :meth:`start`, then :meth:`collect` or :meth:`stream`, and finally :meth:`close`.

    Args:
        parts: The server's parts.
        body: The request body.
        state: State of the HTTP request: ``request_id``, when it ``began``, and fields of its ``log`` line.
        max_tokens: Maximum number of tokens of an answer.
        logprobs: Number of most likely tokens to report per token; ``None`` for no log-probabilities.
    """

    def __init__(
        self, parts: Parts, body: Generate, state: dict[str, Any], *, max_tokens: int, logprobs: int | None
    ) -> None:
        self.parts, self.body, self.logprobs = parts, body, logprobs
        self.request_id: str = state["request_id"]
        self.log: dict[str, Any] = state["log"]
        self.owner: str = state.get("owner", "")
        self.asked: float = state["began"]
        self.max_tokens = max_tokens
        self.is_chat = isinstance(body, ChatRequest)
        self.number = body.n or 1
        self.created = int(time.time())
        self.prompts: Sequence[Prompt] = ()
        self.turn: Turn | None = None
        self._stored: Stored | None = None
        self.context: Context | None = None
        self._cached = 0
        self.batch: Batch | None = None
        self.writers: list[LogprobWriter] = []

    async def begin(self) -> None:
        """Acquire the session or the context, if the request names one.

        Raises:
            ApiError: It is not available, or both are named.
        """
        if self.body.context_id is not None:
            if self.body.session_id is not None:
                message = "a session is a conversation, but a context never changes; give only one of them"
                raise ApiError(400, message, param="context_id")
            self._stored = stored = await self.parts.contexts.take(self.owner, self.body.context_id)
            assert stored.sequence is not None
            self.context = Context.of(stored.sequence, stored.about)
        if self.body.session_id is not None:
            self.turn = await Turn.begin(self.parts.sessions, (self.owner, self.body.session_id))

    async def start(self, prompts: Sequence[Prompt]) -> None:
        """Queue all answers to all prompts."""
        self.prompts = prompts
        jobs, turn = [], self.turn
        for prompt in prompts:
            tokens = prompt.tokens if turn is None else turn.go_on(prompt)
            keep = None if turn is None else turn.keep
            past = self._past()
            jobs += [
                Job(tokens, self._params(index), past, keep, self.asked, self.owner) for index in range(self.number)
            ]
        self._cached = len(jobs[:: self.number]) * self._reused()
        self.log["prompt_tokens"] = self._cached + sum(len(job.tokens) for job in jobs[:: self.number])
        text_of = self.parts.reader.token_text
        silent = self.parts.llm.engine.special_tokens if self.body.skip_special_tokens is not False else frozenset()
        self.writers = [LogprobWriter(text_of, self._prompt_of(index), silent) for index in range(len(jobs))]
        self.batch = await self.parts.driver.submit(jobs)
        self.log["sequences"] = [generation.name for generation in self.batch.generations]

    def close(self) -> None:
        """Abort what still runs, and end the turn."""
        if self.turn is not None:
            self.turn.end()
        if self._stored is not None:
            self.parts.contexts.store.release(self._stored)
            self._stored = None
        if self.batch is None:
            return
        self.batch.cancel()
        generations = self.batch.generations
        self.log["finish"] = [(one.output and one.output.finish_reason) or "abort" for one in generations]
        self.log["completion_tokens"] = self._completion_tokens()
        first = [one.first_token - one.created for one in generations if one.first_token is not None]
        if first:
            self.log["first_token_s"] = round(min(first), 4)

    async def collect(self) -> bytes:
        """Wait for the complete answer, and return it as JSON."""
        assert self.batch is not None
        texts = await self._echoes()
        async for index, text, output in self.batch.changes():
            texts[index] += text
            self._check(output)
        return await self.parts.reader.write(lambda: dumps(self._whole(texts)).encode())

    async def stream(self, emit: Emit) -> None:
        """Send the answer while it is generated."""
        assert self.batch is not None
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        options = self.body.stream_options
        with_usage = bool(options and options.include_usage)
        always = bool(options and options.continuous_usage_stats)

        def counts() -> dict[str, Any]:
            return {"usage": self._usage()} if always else {"usage": None} if with_usage else {}

        def piece(index: int, text: str, **more: Any) -> dict[str, Any]:
            delta = {"delta": {"content": text}} if self.is_chat else {"text": text}
            choice = {"index": index, **delta, "logprobs": None, "finish_reason": None} | more
            return self._frame(kind, [choice]) | counts()

        def last_event(index: int, text: str, output: RequestOutput) -> str:
            last = self._rest_of_choice(index, output)
            # The last event of a chat stream has no content.
            last |= {"delta": {}} if self.is_chat else {}
            return dumps(piece(index, text, **last) | self._session())

        write, echoes = self.parts.reader.write, await self._echoes()
        for index in range(len(echoes)):
            if self.is_chat:
                await emit(piece(index, "", delta={"role": "assistant", "content": ""}))
            elif echoes[index] and self.logprobs is None:
                await emit(piece(index, echoes[index]))
                echoes[index] = ""
        async for index, new_text, output in self.batch.changes():
            self._check(output)
            # An echo with log-probabilities waits for those of the prompt, which are known only now and may be many.
            is_long = bool(echoes[index])
            text, echoes[index] = echoes[index] + new_text, ""
            if not (text or output.finished or self.logprobs is not None):
                continue
            if not output.finished or (self.is_chat and text):
                scored = partial(self._logprobs, index, output)
                event = piece(index, text, logprobs=await write(scored) if is_long else scored())
                await emit(await write(partial(dumps, event)) if is_long else event)
            if output.finished:
                await emit(await write(partial(last_event, index, text, output)))
        if with_usage:
            await emit(self._frame(kind, []) | {"usage": self._usage()})

    def progress(self) -> str:
        """A short description of the request's progress."""
        assert self.batch is not None
        snapshot, generations = self.parts.driver.snapshot, self.batch.generations
        if any(generation.first_token is not None for generation in generations):
            return "generating"
        reading = [snapshot.reading[one.name] for one in generations if one.name in snapshot.reading]
        if reading:
            return f"reading the prompt: {reading[0][0]} of {reading[0][1]} tokens"
        if any(generation.started is not None for generation in generations):
            return "the prompt has been read"
        return f"waiting: {self.parts.driver.waiting} in the queue"

    # -- parts of answers -------------------------------------------------------------------------------------------

    def _params(self, index: int) -> SamplingParams:
        """Sampling parameters of one answer: the request's, otherwise the model's recommended, otherwise OpenAI's."""
        body, defaults = self.body, self.parts.llm.engine.sampling_defaults
        given = {
            name: getattr(body, name) if getattr(body, name) is not None else defaults.get(name, standard)
            for name, standard in (
                ("temperature", 1.0),
                ("top_p", 1.0),
                ("top_k", 0),
                ("min_p", 0.0),
                ("presence_penalty", 0.0),
                ("frequency_penalty", 0.0),
                ("repetition_penalty", 1.0),
            )
        }
        xargs = None if body.vllm_xargs is None else body.vllm_xargs.kv_budget
        return SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=body.min_tokens or 0,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if getattr(body, "echo", False) else None,
            logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
            stop=tuple(dict.fromkeys([body.stop] if isinstance(body.stop, str) else body.stop or [])),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            skip_special_tokens=body.skip_special_tokens is not False,
            seed=None if body.seed is None else body.seed + index,
            kv_budget=budget_of(body.kv_budget) if body.kv_budget is not None else xargs,
            return_kept_tokens=body.kept_tokens is True,
            # top_p = 0 means the likeliest token alone, whose probability exceeds any tiny number.
            **(given | {"top_k": max(given["top_k"], 0), "top_p": given["top_p"] or 1e-9}),
        )

    def _whole(self, texts: Sequence[str]) -> dict[str, Any]:
        assert self.batch is not None
        choices = []
        for index, (text, generation) in enumerate(zip(texts, self.batch.generations, strict=True)):
            assert generation.output is not None
            choice: dict[str, Any] = {"index": index}
            choice |= {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
            choices.append(choice | self._rest_of_choice(index, generation.output))
        answer = self._frame("chat.completion" if self.is_chat else "text_completion", choices)
        return answer | {"usage": self._usage()} | self._session()

    def _past(self) -> CompressedSequence | None:
        """The compressed sequence that every prompt continues from."""
        if self.context is not None:
            return self.context.sequence
        return None if self.turn is None else self.turn.past

    def _reused(self) -> int:
        """Number of tokens of each prompt that are not prefilled again."""
        past = self._past()
        return 0 if past is None else len(past.tokens)

    def _prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.number]

    async def _echoes(self) -> list[str]:
        """The text that each answer begins with: its prompt, if echoed. Token ids are decoded in a thread."""
        assert self.batch is not None
        if not getattr(self.body, "echo", False):
            return [""] * len(self.batch.generations)
        texts = await self.parts.reader.write(lambda: [self._text_of(prompt) for prompt in self.prompts])
        return [text for text in texts for _ in range(self.number)]

    def _text_of(self, prompt: Prompt) -> str:
        return prompt.text if prompt.text is not None else str(self.parts.llm.tokenizer.decode(list(prompt.tokens)))

    def _logprobs(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        writer = self.writers[index]
        return writer.chat(output) if self.is_chat else writer.completion(output)

    def _rest_of_choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        rest: dict[str, Any] = {"logprobs": self._logprobs(index, output), "finish_reason": output.finish_reason}
        return rest | ({"cache": cache_of(output)} if self.body.kept_tokens else {})

    def _check(self, output: RequestOutput) -> None:
        if output.finish_reason == "error":
            self.log["error"] = output.error
            raise ApiError(500, f"the request failed: {output.error}", code="request_failed")

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": ("chatcmpl-" if self.is_chat else "cmpl-") + self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.parts.settings.model_name,
            "system_fingerprint": f"snapstream-{__version__}",
            "choices": choices,
        }

    def _session(self) -> dict[str, Any]:
        return {} if self.turn is None else {"session": self.turn.report()}

    def _outputs(self) -> list[RequestOutput]:
        assert self.batch is not None
        return [one.output for one in self.batch.generations if one.output is not None]

    def _completion_tokens(self) -> int:
        return sum(output.token_count for output in self._outputs())

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self.log["prompt_tokens"], self._completion_tokens()
        accepted = sum(output.accepted for output in self._outputs())
        rejected = sum(output.drafted for output in self._outputs()) - accepted
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": self._cached + sum(output.reused for output in self._outputs()[:: self.number])
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            },
        }
