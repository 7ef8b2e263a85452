"""Any OpenAI-compatible endpoint as a host, such as ``vllm serve`` with the SnapStream plugin."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from snapstream.assets import SHIPPED
from snapstream.config import DEFAULT_POLICY
from snapstream.errors import ConfigurationError, RequestError, missing_extra
from snapstream.evaluation.hosts import Answer, Job, Prompts
from snapstream.evaluation.tasks import Task


class EndpointError(RequestError):
    """The endpoint is down, too slow, or refuses a request."""


class EndpointHost:
    """Sends requests over HTTP, several concurrently, with greedy sampling."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None,
        tokenizer: str | None,
        api_key: str | None,
        timeout: float,
        concurrency: int,
        chat: bool | None,
        needs_budgets: bool,
        served_as: str,
    ) -> None:
        """Ask the endpoint what it serves.

        Args:
            url: Base URL, such as ``http://localhost:8000/v1``.
            model: Name of the served model; ``None`` for the first one.
            tokenizer: Directory or hub id of its tokenizer, to size prompts; ``None`` uses what the endpoint reports.
            api_key: API key, if the endpoint requires one.
            timeout: Seconds to wait for one answer; each request is tried three times.
            concurrency: Concurrent requests.
            chat: Use chat completions; ``None`` uses them if the tokenizer has a chat template.
            needs_budgets: Requests will carry a ``kv_budget``; an endpoint that would ignore it is refused.
            served_as: The user's name for the endpoint's own cache, which cannot be determined from here.

        Raises:
            EndpointError: The endpoint is down.
            ConfigurationError: The model is not served, there is no tokenizer, or SnapStream is needed but not there.
        """
        try:
            import openai
        except ImportError as error:
            raise missing_extra("endpoints need the openai client", "eval") from error
        self._openai = openai
        self.url, self.timeout, self.concurrency = url.rstrip("/"), timeout, concurrency
        self.served_as = served_as
        self.client = openai.OpenAI(base_url=self.url, api_key=api_key or "none", timeout=timeout, max_retries=2)
        served = {entry.id: entry for entry in self._call(self.client.models.list).data}
        self.model = model or next(iter(served), "")
        if self.model not in served:
            raise ConfigurationError(
                f"{self.url} does not serve {self.model!r}; it serves {', '.join(served) or 'none'}"
            )
        entry = served[self.model]
        self.max_length: int | None = getattr(entry, "max_model_len", None)
        self.tokenizer_name = tokenizer or getattr(entry, "root", None) or self.model
        self.prompts = Prompts(self._load_tokenizer(), chat=chat)
        self.count, self.overhead = self.prompts.count, self.prompts.overhead
        self.chat = self.prompts.chat
        if needs_budgets:
            self._require_snapstream()

    def refuses(self, task: Task) -> str | None:
        """A request is always a whole prompt: a server has no second turn in a compressed cache."""
        return None if task.follow_up == "none" else "which continues in a compressed cache; an endpoint cannot"

    def describe(self) -> dict[str, Any]:
        """Which model of which kind of endpoint; not where it is."""
        name = Path(self.model).name if Path(self.model).exists() else self.model
        return {"host": "endpoint", "model": name, "served_as": self.served_as, "chat": self.prompts.chat}

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Answer]]:
        """Answer jobs as they finish. After the first error no new request is sent, and running ones are awaited."""
        todo = list(reversed(jobs))
        running: dict[Future[Answer], Job] = {}
        failure: EndpointError | None = None
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            while running or (todo and failure is None):
                while todo and failure is None and len(running) < self.concurrency:
                    job = todo.pop()
                    running[pool.submit(self._ask, job)] = job
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    job = running.pop(done)
                    try:
                        answer = done.result()
                    except EndpointError as error:
                        failure = failure or error
                        continue
                    yield job, answer
        finally:  # an interrupt does not wait for answers
            pool.shutdown(wait=False, cancel_futures=True)
        if failure is not None:
            raise failure

    def _ask(self, job: Job) -> Answer:
        extra: dict[str, Any] = {}
        entries = job.variant.entries(job.length)
        if job.variant.policy == DEFAULT_POLICY:
            # The plugin reads vllm_xargs, the built-in server the plain field.
            extra = {"vllm_xargs": {"kv_budget": entries}, "kv_budget": entries}
        # This API cannot prefill the assistant's turn with the beginning of an answer.
        prompt = job.sample.prompt + ("" if self.prompts.chat else job.sample.lead)
        opening = job.sample.opening or job.sample.begins
        if opening:  # nor can it decode words that the model does not choose, so the model is asked to
            prompt += f"\nBegin with these words: {opening}"
        question = job.sample.question
        limit = (question.max_tokens if question else job.task.max_tokens) + self.prompts.count(opening)
        stop: Any = list(question.stop) if question and question.stop else self._openai.NOT_GIVEN
        if job.variant.policy == "truncated":
            assert entries is not None
            tokens = self.prompts.tokenizer.encode(prompt, add_special_tokens=False)
            room = max(1, entries - self.prompts.overhead - limit)
            prompt = self.prompts.tokenizer.decode(self.prompts.truncated(tokens, room))
        if self.prompts.chat:
            messages: Any = [{"role": "user", "content": prompt}]
            reply = self._call(
                lambda: self.client.chat.completions.create(
                    model=self.model, messages=messages, max_tokens=limit, temperature=0, stop=stop, extra_body=extra
                )
            )
            text = reply.choices[0].message.content or ""
        else:
            reply = self._call(
                lambda: self.client.completions.create(
                    model=self.model, prompt=prompt, max_tokens=limit, temperature=0, stop=stop, extra_body=extra
                )
            )
            text = reply.choices[0].text
        usage = reply.usage
        return Answer(
            text=text.removeprefix(opening),
            prompt_tokens=usage.prompt_tokens if usage else 0,
            output_tokens=usage.completion_tokens if usage else 0,
            finish_reason=reply.choices[0].finish_reason or "",
        )

    def _call(self, request: Any) -> Any:
        """Send a request; errors of the client become one line."""
        openai = self._openai
        try:
            return request()
        except openai.APITimeoutError as error:
            raise EndpointError(
                f"{self.url} did not answer within {self.timeout:g} seconds in three attempts; raise --timeout or "
                "lower --concurrency"
            ) from error
        except openai.APIConnectionError as error:
            raise EndpointError(f"{self.url} cannot be reached ({error.__cause__ or error})") from error
        except openai.APIStatusError as error:
            message = " ".join(str(error.message).split()).removeprefix(f"Error code: {error.status_code} - ")
            raise EndpointError(f"{self.url} answered {error.status_code}: {message}") from error
        except openai.OpenAIError as error:
            raise EndpointError(f"{self.url}: {error}") from error

    def _load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(SHIPPED.get(self.tokenizer_name, self.tokenizer_name))
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"no tokenizer {self.tokenizer_name!r} to size prompts with; give the model's directory or hub id with "
                "--tokenizer"
            ) from error

    def _require_snapstream(self) -> None:
        """Refuse a server without SnapStream: it would ignore budgets, and its results would be mislabeled."""
        root = self.url.removesuffix("/v1")
        try:
            with urllib.request.urlopen(f"{root}/metrics", timeout=self.timeout) as reply:
                metrics = reply.read().decode(errors="replace")
        except (OSError, ValueError) as error:
            raise EndpointError(
                f"{root}/metrics cannot be read ({error}), so the endpoint might ignore budgets"
            ) from error
        # Before the first request there may only be a description. A label value with that name is not a counter.
        if not re.search(r"^(# HELP )?snapstream_prompts_compressed", metrics, re.MULTILINE):
            raise ConfigurationError(
                f"{self.url} shows no SnapStream counters at /metrics, so it would ignore cache budgets; start it with "
                "the plugin, or ask for --policies served"
            )
