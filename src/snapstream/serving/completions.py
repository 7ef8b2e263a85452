"""From a request to its answer: submit, collect or stream, and end what nobody waits for."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from snapstream import __version__
from snapstream.config import SamplingParams
from snapstream.engine import LLM, RequestOutput
from snapstream.serving.answers import LogprobWriter, cache_of
from snapstream.serving.driver import Batch, EngineDriver, Job
from snapstream.serving.errors import ApiError
from snapstream.serving.prompts import Prompt, PromptReader
from snapstream.serving.protocol import ChatRequest, CompletionRequest, Generate
from snapstream.serving.sessions import Key, Session, SessionBusyError, SessionStore
from snapstream.serving.settings import ServerSettings
from snapstream.serving.streams import DisconnectedError, Emit, EventStream, until_disconnect


@dataclass
class Turn:
    """A session's part in one request."""

    key: Key
    reused: int = 0
    reason: str | None = None
    kept: bool = False


class Completions:
    """Answers completions and chat completions.

    Args:
        llm: The engine; only what never changes is read here.
        driver: Runs it.
        settings: The server's.
        reader: Reads prompts.
        sessions: Kept conversations.
    """

    def __init__(
        self,
        llm: LLM,
        driver: EngineDriver,
        settings: ServerSettings,
        reader: PromptReader,
        sessions: SessionStore,
    ) -> None:
        self.llm, self.driver, self.settings = llm, driver, settings
        self.reader, self.sessions = reader, sessions

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Answer ``/v1/completions``."""
        if body.echo and body.logprobs is not None:
            raise ApiError(400, "echo and logprobs together are not supported: prompts have no logprobs", param="echo")
        given: list[Any] = [body.prompt] if _is_one(body.prompt) else list(body.prompt)
        self._check_choices(len(given) * (body.n or 1))

        async def prompts() -> list[Prompt]:
            return [await self.reader.text(p) if isinstance(p, str) else self.reader.tokens(p) for p in given]

        return await self._answer(body, request, prompts, max_tokens=body.max_tokens or 16, logprobs=body.logprobs)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer ``/v1/chat/completions``."""
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        self._check_choices(body.n or 1)

        async def prompts() -> list[Prompt]:
            return [await self.reader.messages([message.for_template() for message in body.messages])]

        limit = body.max_completion_tokens or body.max_tokens or self.llm.max_model_len
        wanted = (body.top_logprobs or 0) if body.logprobs else None
        return await self._answer(body, request, prompts, max_tokens=limit, logprobs=wanted)

    def _check_choices(self, number: int) -> None:
        most = self.settings.max_choices
        if number > most:
            raise ApiError(400, f"{number} answers were asked for (prompts times n); at most {most}", param="n")

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served.

        Raises:
            ApiError: It is not.
        """
        if name is not None and name != self.settings.model_name:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; {self.settings.model_name!r} is",
                param="model",
                code="model_not_found",
            )

    async def _answer(
        self,
        body: Generate,
        request: Request,
        read: Callable[[], Awaitable[list[Prompt]]],
        *,
        max_tokens: int,
        logprobs: int | None,
    ) -> Response:
        self.check_model(body.model)
        state = request.scope["state"]
        deadline = anyio.current_time() + self.settings.request_timeout
        call = _Call(self, body, state["request_id"], state["log"], max_tokens=max_tokens, logprobs=logprobs)
        answer: dict[str, Any] = {}

        async def start() -> None:
            await call.start(read)
            if not body.stream:
                answer.update(await call.collect())

        try:
            with anyio.fail_after(self.settings.request_timeout):
                await until_disconnect(request.receive, start)
        except BaseException as error:
            call.close()
            if isinstance(error, DisconnectedError):
                state["log"]["disconnected"] = True
                return Response(status_code=499)
            raise
        if body.stream:
            return EventStream(call.stream, call.close, deadline, call.request_id)
        call.close()
        return JSONResponse(answer)


class _Call:
    """One request on its way."""

    def __init__(
        self,
        server: Completions,
        body: Generate,
        request_id: str,
        log: dict[str, Any],
        *,
        max_tokens: int,
        logprobs: int | None,
    ) -> None:
        self.server, self.body, self.request_id, self.log = server, body, request_id, log
        self.max_tokens, self.logprobs = max_tokens, logprobs
        self.is_chat = isinstance(body, ChatRequest)
        self.prompts: list[Prompt] = []
        self.batch: Batch | None = None
        self.turn: Turn | None = None
        self._session: Session | None = None
        self.created = int(time.time())
        self.writers: list[LogprobWriter] = []

    async def start(self, read: Callable[[], Awaitable[list[Prompt]]]) -> None:
        """Read the prompts and queue them."""
        body = self.body
        if body.session_id is not None:
            self.turn = self._begin_turn(body.session_id)
        self.prompts = await read()
        past, rest = None, None
        if self.turn is not None:
            past, rest = self._go_on()
        number = body.n or 1
        jobs = []
        for prompt in self.prompts:
            before = 0 if past is None else len(past.saved.tokens)
            for answer in range(number):
                jobs.append(
                    Job(
                        rest if rest is not None else prompt.tokens,
                        self._params(answer),
                        past=None if past is None else past.saved,
                        keep=self.turn is not None,
                    )
                )
            self._log_add("prompt_tokens", before + len(jobs[-1].tokens))
            offset = len(prompt.text or "") if getattr(body, "echo", False) else 0
            self.writers += [LogprobWriter(self.server.llm.tokenizer, offset) for _ in range(number)]
        self.batch = await self.server.driver.submit(jobs)

    def close(self) -> None:
        """End what still runs."""
        if self.batch is not None:
            self.batch.cancel()
            self.log["finish"] = [_finish(one.output) or "abort" for one in self.batch.generations]
            self.log["completion_tokens"] = self._completion_tokens()
            first = [one.first_token - one.created for one in self.batch.generations if one.first_token is not None]
            if first:
                self.log["first_token_s"] = round(min(first), 4)
        if self.turn is not None and not self.turn.kept:
            self.server.sessions.end(self.turn.key, None)

    async def collect(self) -> dict[str, Any]:
        """The whole answer."""
        assert self.batch is not None
        texts = [self._echo(index) for index in range(len(self.batch.generations))]
        async for index, text, output in self.batch.changes():
            texts[index] += text
            self._check(output)
        choices = []
        for index, (text, generation) in enumerate(zip(texts, self.batch.generations, strict=True)):
            assert generation.output is not None
            choice: dict[str, Any] = {"index": index}
            choice |= {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
            choices.append(choice | self._rest_of_choice(index, generation.output))
        self._end_turn()
        answer = self._frame("chat.completion" if self.is_chat else "text_completion", choices)
        answer["usage"] = self._usage()
        return answer | self._session_use()

    async def stream(self, emit: Emit) -> None:
        """Send the answer as it grows."""
        assert self.batch is not None
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        with_usage = bool(self.body.stream_options and self.body.stream_options.include_usage)
        silent: dict[str, Any] = {"usage": None} if with_usage else {}

        def piece(index: int, text: str, **more: Any) -> dict[str, Any]:
            delta = {"delta": {"content": text}} if self.is_chat else {"text": text}
            choice = {"index": index, **delta, "logprobs": None, "finish_reason": None} | more
            return self._frame(kind, [choice]) | silent

        for index in range(len(self.batch.generations)):
            if self.is_chat:
                await emit(piece(index, "", delta={"role": "assistant", "content": ""}))
            elif self._echo(index):
                await emit(piece(index, self._echo(index)))
        async for index, text, output in self.batch.changes():
            self._check(output)
            if not (text or output.finished or self.logprobs is not None):
                continue
            if not output.finished or (self.is_chat and text):
                await emit(piece(index, text, logprobs=self._logprobs(index, output)))
            if output.finished:
                self._end_turn()
                last = self._rest_of_choice(index, output)
                # What ends a chat stream has no content of its own.
                last |= {"delta": {}} if self.is_chat else {}
                await emit(piece(index, text, **last) | self._session_use())
        if with_usage:
            await emit(self._frame(kind, []) | {"usage": self._usage()})

    # -- sessions ---------------------------------------------------------------------------------------------------

    def _begin_turn(self, name: str) -> Turn:
        sessions = self.server.sessions
        if not sessions.limit:
            raise ApiError(400, "this server keeps no sessions; start it with --sessions N", param="session_id")
        prompts = getattr(self.body, "prompt", "")
        if (self.body.n or 1) > 1 or not _is_one(prompts):
            raise ApiError(400, "a session has one prompt and one answer; leave out n", param="session_id")
        key = (self.log.get("key", ""), name)
        try:
            self._session = sessions.begin(key)
        except SessionBusyError:
            raise ApiError(
                409,
                f"the session {name!r} has a turn running; wait for its end",
                param="session_id",
                code="session_busy",
            ) from None
        return Turn(key)

    def _go_on(self) -> tuple[Session | None, Sequence[int] | None]:
        """The session to go on from and the tokens that are new, or why everything has to be read."""
        assert self.turn is not None
        if self._session is None:
            self.turn.reason = "there is no such session: it is new, or was not used for too long"
            return None, None
        prompt = self.prompts[0]
        rest = self._session.rest_of(prompt.text, prompt.tokens, prompt.offsets)
        if isinstance(rest, str):
            self.turn.reason = rest
            return None, None
        self.turn.reused = len(self._session.saved.tokens)
        return self._session, rest

    def _end_turn(self) -> None:
        if self.turn is None or self.batch is None:
            return
        output = self.batch.generations[0].output
        if output is not None and output.saved is not None:
            text = self.prompts[0].text
            session = Session(output.saved, None if text is None else text + output.saved.answer)
            self.server.sessions.end(self.turn.key, session)
            self.turn.kept = True

    def _session_use(self) -> dict[str, Any]:
        if self.turn is None or self.batch is None:
            return {}
        return {
            "session": {
                "id": self.turn.key[1],
                "kept": self.turn.kept,
                "reused_tokens": self.turn.reused,
                "read_tokens": len(self.batch.generations[0].job.tokens),
                "reason": self.turn.reason,
            }
        }

    # -- parts of answers -------------------------------------------------------------------------------------------

    def _params(self, answer: int) -> SamplingParams:
        body, defaults = self.body, self.server.llm.sampling_defaults
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
            logprobs=self.logprobs,
            logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
            stop=tuple(dict.fromkeys([body.stop] if isinstance(body.stop, str) else body.stop or [])),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            seed=None if body.seed is None else body.seed + answer,
            kv_budget=body.kv_budget if body.kv_budget is not None else xargs,
            telemetry=bool(body.telemetry),
            **(given | {"top_k": max(given["top_k"], 0)}),
        )

    def _echo(self, index: int) -> str:
        if not getattr(self.body, "echo", False):
            return ""
        prompt = self.prompts[index // (self.body.n or 1)]
        return prompt.text if prompt.text is not None else str(self.server.llm.tokenizer.decode(list(prompt.tokens)))

    def _logprobs(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        writer = self.writers[index]
        return writer.chat(output) if self.is_chat else writer.completion(output)

    def _rest_of_choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        rest: dict[str, Any] = {"logprobs": self._logprobs(index, output), "finish_reason": _finish(output)}
        return rest | ({"cache": cache_of(output)} if self.body.telemetry else {})

    def _check(self, output: RequestOutput) -> None:
        if output.finish_reason == "error":
            raise ApiError(500, f"the request failed: {output.error}", code="request_failed")

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": ("chatcmpl-" if self.is_chat else "cmpl-") + self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.server.settings.model_name,
            "system_fingerprint": f"snapstream-{__version__}",
            "choices": choices,
        }

    def _completion_tokens(self) -> int:
        assert self.batch is not None
        return sum(len(one.output.token_ids) for one in self.batch.generations if one.output is not None)

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self.log["prompt_tokens"], self._completion_tokens()
        reused = self.turn.reused if self.turn else 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": reused},
        }

    def _log_add(self, name: str, number: int) -> None:
        self.log[name] = self.log.get(name, 0) + number


def _is_one(prompt: Any) -> bool:
    return isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))


def _finish(output: RequestOutput | None) -> str | None:
    return None if output is None else output.finish_reason
