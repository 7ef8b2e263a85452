"""The built-in engine as a host: each prompt is prefilled once, and every policy decodes from that prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from snapstream.config import CacheBudget, EngineConfig, SamplingParams
from snapstream.config.policy import most_queries
from snapstream.engine import LLM, Context, RequestOutput
from snapstream.engine.requests.output import KeptTokens
from snapstream.errors import ConfigurationError, RequestError
from snapstream.evaluation.hosts import Answer, Job, Prompts
from snapstream.evaluation.policies import Variant
from snapstream.evaluation.tasks import Sample, Task

BINS = 100
"""Parts of the prompt for which the kept share is recorded."""


class EngineHost:
    """One engine with slots as large as the largest variant; each job brings its own budget."""

    def __init__(
        self,
        model: str,
        *,
        max_length: int,
        budgets: Sequence[CacheBudget | None],
        config: EngineConfig,
        chat: bool | None,
        return_kept_tokens: bool,
    ) -> None:
        """Load the model.

        Args:
            model: Checkpoint directory or hub id.
            max_length: Longest prompt plus output, in tokens.
            budgets: All caches that jobs will have; ``None`` for a full one.
            config: Engine settings; its ``max_model_len`` is set here.
            chat: See :class:`Prompts`.
            return_kept_tokens: Record which tokens were kept.
        """
        self.max_length: int | None = max_length
        sized = [budget for budget in budgets if budget is not None]
        capacity = max_length if None in budgets else max(budget.capacity for budget in sized)
        # As many queries are kept as any of the policies uses.
        queries = most_queries(*(budget.policy.queries for budget in sized))
        self.full = CacheBudget.preset("full", capacity)
        self.model, self.return_kept_tokens = model, return_kept_tokens
        self.llm = LLM(
            model,
            budget=self.full,
            config=replace(config, max_model_len=max_length, kept_queries=queries),
            report_plan=lambda _: None,
        )
        self.prompts = Prompts(self.llm.tokenizer, chat=chat)
        self.count, self.overhead = self.prompts.count, self.prompts.overhead
        self.chat = self.prompts.chat

    def refuses(self, task: Task) -> str | None:
        """A second turn needs a chat template that leaves the first one unchanged."""
        if task.follow_up in ("none", "context"):
            return None
        try:
            self.prompts.then(Sample("", 0, "a", "", " b", " c", "", ()))
        except ConfigurationError as error:
            return str(error)
        return None

    def describe(self) -> dict[str, Any]:
        """Model, a fingerprint of its weights, and how it is run."""
        import torch

        config = self.llm.engine.config
        return {
            "host": "engine",
            "model": Path(self.model).name if Path(self.model).exists() else self.model,
            "checkpoint": self.llm.engine.files.model,
            "dtype": self.llm.engine.plan.weight_formats,
            "device": self.llm.engine.device.type,
            "torch": torch.__version__,
            "chat": self.prompts.chat,
            **({} if config.kv_dtype == "auto" else {"kv_dtype": config.kv_dtype}),
            **({} if config.speculative == "off" else {"speculative": config.speculative, "guesses": config.guesses}),
        }

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Answer]]:
        """Answer jobs; equal prompts that follow each other are prefilled once, and so are texts of contexts."""
        contexts = self._contexts([job for job in jobs if job.task.follow_up == "context"])
        waiting: dict[str, tuple[Job, int]] = {}
        try:
            for job in jobs:
                tokens, forced, context = self._turn(job, contexts)
                past = None if context is None else context.sequence
                question = job.sample.question
                most = question.max_tokens if question else job.task.max_tokens
                if job.variant.policy == "truncated":
                    entries = job.variant.entries(job.length)
                    assert entries is not None
                    tokens = self.prompts.truncated(tokens, max(1, entries - len(forced) - most))
                params = SamplingParams(
                    max_tokens=len(forced) + most,
                    forced=tuple(forced),
                    stop=question.stop if question else (),
                    kv_budget=job.variant.budget(job.length),
                    return_kept_tokens=self.return_kept_tokens,
                )
                waiting[self.llm.engine.add_request(tokens, params, past=past)] = job, len(forced)
            while waiting:
                for output in self.llm.engine.step():
                    if output.finished and output.request_id in waiting:
                        job, forced_tokens = waiting.pop(output.request_id)
                        yield job, self._answer(job, output, forced_tokens)
        finally:
            self.llm.engine.discard(list(waiting))

    def _turn(
        self, job: Job, contexts: dict[tuple[str, Variant], Context]
    ) -> tuple[list[int], list[int], Context | None]:
        """Tokens that are prefilled, tokens that are forced after them, and the context that they continue."""
        if job.task.follow_up != "context":
            return self.prompts.first(job.sample), self.prompts.then(job.sample), None
        context, asked = contexts[job.sample.prompt, job.variant], job.sample.second
        tokens = self.llm.after(context, asked if context.chat else f"\n\n{asked}")
        return self.llm.engine.tokenize(tokens), self.prompts.opening(job.sample), context

    def _contexts(self, jobs: Sequence[Job]) -> dict[tuple[str, Variant], Context]:
        """Texts that are stored before a question is known, compressed as each variant does it."""
        asked = {(job.sample.prompt, job.variant): job for job in jobs}
        made: dict[tuple[str, Variant], Context] = {}
        waiting: dict[str, tuple[tuple[str, Variant], str | None]] = {}
        try:
            for key, job in asked.items():
                budget = job.variant.budget(job.length) or self.full
                tokens, opened = self.llm.context_tokens(job.sample.prompt, chat=self.prompts.chat, system=None)
                # A budget that is given whole is used unchanged: it needs the policy's variant for contexts.
                budget = replace(budget, policy=budget.policy.for_contexts)
                params = SamplingParams(max_tokens=0, kv_budget=budget)
                waiting[self.llm.engine.add_request(tokens, params, keep=True)] = key, opened
            while waiting:
                for output in self.llm.engine.step():
                    if output.finished and output.request_id in waiting:
                        key, opened = waiting.pop(output.request_id)
                        if output.saved is None:
                            raise RequestError(f"a text could not be processed: {output.error or output.finish_reason}")
                        made[key] = self.llm.context_of(output.saved, opened, None)
        finally:
            self.llm.engine.discard(list(waiting))
        return made

    def _answer(self, job: Job, output: RequestOutput, forced: int) -> Answer:
        if output.finish_reason in ("error", "abort") or output.cache is None:
            raise RequestError(f"{job.task.name} at {job.length} tokens failed: {output.error or output.finish_reason}")
        use, written = output.cache, output.token_ids[forced:]
        budget = job.variant.budget(job.length) or self.full
        text = str(self.llm.tokenizer.decode(list(written), skip_special_tokens=True))
        for stop in job.sample.question.stop if job.sample.question else ():
            text = text.partition(stop)[0]
        return Answer(
            text=text,
            prompt_tokens=use.prompt_tokens,
            output_tokens=len(written),
            finish_reason=output.finish_reason or "",
            settings=budget.as_dict() | {"capacity": budget.capacity},
            mass=None if use.kept is None else tuple(round(mass, 5) for mass in use.kept.mass),
            kept=None if use.kept is None else _binned(use.kept, use.prompt_tokens),
            drafted=output.drafted,
            accepted=output.accepted,
        )


def _binned(kept: KeptTokens, length: int) -> list[list[list[float]]]:
    """Share of tokens kept in each hundredth of the prompt, per layer and KV head."""
    bins = min(BINS, length)
    totals = [0] * bins
    for position in range(length):
        totals[position * bins // length] += 1
    result = []
    for layer in kept.positions:
        heads = []
        for head in layer:
            counts = [0] * bins
            for position in head:
                counts[position * bins // length] += 1
            heads.append([round(n / total, 3) for n, total in zip(counts, totals, strict=True)])
        result.append(heads)
    return result
