"""The built-in engine as a host: each prompt is prefilled once, and every policy decodes from that prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from snapstream.config import CacheBudget, EngineConfig, SamplingParams
from snapstream.config.policy import most_queries
from snapstream.engine import LLM, RequestOutput
from snapstream.engine.output import KeptTokens
from snapstream.errors import ConfigurationError, RequestError
from snapstream.evaluation.grid import Grid
from snapstream.evaluation.hosts import Answer, Job, Prompts
from snapstream.evaluation.tasks import Sample, Task

BINS = 100
"""Parts of the prompt for which the kept share is recorded."""


class EngineHost:
    """One engine with slots as large as the largest variant; each job brings its own budget."""

    def __init__(
        self,
        model: str,
        grid: Grid,
        *,
        config: EngineConfig,
        chat: bool | None,
        telemetry: bool,
    ) -> None:
        """Load the model.

        Args:
            model: Checkpoint directory or hub id.
            grid: All questions that will be asked.
            config: Engine settings; its ``max_model_len`` is set here.
            chat: See :class:`Prompts`.
            telemetry: Record which tokens were kept.
        """
        self.max_length: int | None = max(grid.lengths) + grid.room
        asked = {(v, length) for task in grid.tasks for length in grid.lengths for v in grid.variants_of(task, length)}
        budgets = [variant.budget(length) for variant, length in asked]
        sized = [budget for budget in budgets if budget is not None]
        capacity = self.max_length if None in budgets else max(budget.capacity for budget in sized)
        # As many queries are kept as any of the policies uses.
        queries = most_queries(*(budget.policy.queries for budget in sized))
        self.full = CacheBudget.preset("full", capacity)
        self.model, self.telemetry = model, telemetry
        self.llm = LLM(
            model,
            budget=self.full,
            config=replace(config, max_model_len=self.max_length, kept_queries=queries),
            report_plan=lambda _: None,
        )
        self.prompts = Prompts(self.llm.tokenizer, chat=chat)
        self.count, self.overhead = self.prompts.count, self.prompts.overhead

    def refuses(self, task: Task) -> str | None:
        """A second turn needs a chat template that leaves the first one unchanged."""
        if task.follow_up == "none":
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
            "dtype": str(self.llm.engine.dtype).removeprefix("torch."),
            "device": self.llm.engine.device.type,
            "torch": torch.__version__,
            "chat": self.prompts.chat,
        } | ({} if config.speculative == "off" else {"speculative": config.speculative, "guesses": config.guesses})

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Answer]]:
        """Answer jobs; equal prompts that follow each other are prefilled once."""
        waiting: dict[str, tuple[Job, int]] = {}
        try:
            for job in jobs:
                forced = self.prompts.then(job.sample)
                tokens = self.prompts.first(job.sample)
                budget = job.variant.budget(job.length)
                if job.variant.policy == "truncated":
                    entries = job.variant.entries(job.length)
                    assert entries is not None
                    tokens = self.prompts.truncated(tokens, max(1, entries - len(forced) - job.task.max_tokens))
                params = SamplingParams(
                    max_tokens=len(forced) + job.task.max_tokens,
                    forced=tuple(forced),
                    kv_budget=budget,
                    telemetry=self.telemetry,
                )
                waiting[self.llm.engine.add_request(tokens, params)] = job, len(forced)
            while waiting:
                for output in self.llm.engine.step():
                    if output.finished and output.request_id in waiting:
                        job, forced_tokens = waiting.pop(output.request_id)
                        yield job, self._answer(job, output, forced_tokens)
        finally:
            self.llm.engine.discard(list(waiting))

    def _answer(self, job: Job, output: RequestOutput, forced: int) -> Answer:
        if output.finish_reason in ("error", "abort") or output.cache is None:
            raise RequestError(f"{job.task.name} at {job.length} tokens failed: {output.error or output.finish_reason}")
        use, written = output.cache, output.token_ids[forced:]
        budget = job.variant.budget(job.length) or self.full
        return Answer(
            text=str(self.llm.tokenizer.decode(list(written), skip_special_tokens=True)),
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
