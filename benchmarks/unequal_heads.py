"""Would heads of unequal size answer more questions? Measured by masks, with as many entries in total.

    python -m benchmarks.unequal_heads MODEL --questions FILE.jsonl --ask with,after --share 1/8

Each prompt is read once into a full cache. For each policy, entries that it drops are masked: equally many in all heads
of a layer, or by Ada-KV's rule (arXiv 2407.11550): a layer's pinned entries go to the heads whose scores are among the
best of all its heads, but a fifth is shared equally. Questions are answered in these caches.

For questions that come after the text, KVzip (arXiv 2505.23416) is compared, too: the model repeats the text, and a
token is rated by the largest weight that it is given. Its entries are shared equally, by the rule, or among all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.questions import plan_of, question_parser
from snapstream import LLM, CacheBudget, SamplingParams
from snapstream.attention.sdpa import SdpaAttention
from snapstream.compression import choose_entries, lay_out, layout_tensors
from snapstream.compression.keys import key_differences
from snapstream.compression.scoring import observation_votes, pool_votes
from snapstream.config import LayerPrompt
from snapstream.config import policy as policies
from snapstream.config.policy import ALL, Policy
from snapstream.evaluation.hosts import Prompts
from snapstream.evaluation.markdown import as_gap, as_lines
from snapstream.evaluation.policies import Variant
from snapstream.evaluation.questions.plan import QuestionPlan
from snapstream.evaluation.questions.scores import score
from snapstream.evaluation.scoring import interval, paired_difference

KNOWN, LATER = ("spans", "mixed", "snapstream"), ("multiscale-keydiff", "local-keydiff")
"""Policies for questions at the end of the prompt, and for those that come later."""
FLOOR = 0.2
"""Share of the pinned entries that all heads have alike."""

PIECE = 2048
"""Tokens that are repeated at once."""

masks: dict[str, list[Tensor]] = {}
"""Which tokens each layer's heads keep, bool ``[N, L]``, by policy; of the prompt that was read last."""
repetitions: dict[int, list[Tensor]] = {}
"""By layer, the ratings ``[N, L]`` of a text by each of its pieces; of the text that was repeated last."""


@dataclass(frozen=True, kw_only=True)
class Recorder(Policy):
    """Records what other policies would keep; what it keeps itself does not matter."""

    name: ClassVar[str] = "recorder"
    pins: ClassVar[bool] = True
    later: bool = False
    capacity: int = 0

    @classmethod
    def parts(cls, capacity: int) -> tuple[int, int, int]:
        return 4, 32, capacity - 36

    @classmethod
    def sized(cls, capacity: int) -> Recorder:
        return cls()

    @property
    def queries(self) -> int:
        return 64

    def votes(self, prompt: LayerPrompt) -> Tensor:
        length = int(prompt.layout.length[0])
        for name in LATER if self.later else KNOWN:
            budget = CacheBudget.preset(name, self.capacity)
            shown = replace(
                prompt,
                queries=prompt.queries[:, :, -budget.window :],
                layout=layout_tensors([lay_out(length, budget)], prompt.keys.device),
                sink=budget.sink,
            )
            N = prompt.keys.shape[1]
            for kind, counts in (("equal", [budget.top_k] * N), ("unequal", self.shared(shown, budget))):
                kept = torch.zeros(N, length, dtype=torch.bool)
                for head, count in enumerate(counts):
                    chosen = of_head(shown, head, replace(budget, top_k=count), length)
                    kept[head, chosen[chosen >= 0]] = True
                masks.setdefault(f"{name}, {kind}", []).append(kept)
        return torch.zeros(prompt.keys.shape[:3])

    def shared(self, prompt: LayerPrompt, budget: CacheBudget) -> list[int]:
        """Pinned entries of each head."""
        layout, N, K = prompt.layout, prompt.keys.shape[1], budget.top_k
        if self.later:
            scores = key_differences(prompt.keys, layout, sink=budget.sink, near=32)
        else:
            votes = observation_votes(prompt.queries, prompt.keys, layout, sink=budget.sink, **prompt.attention)
            scores = pool_votes(votes, pooling="avg", kernel=7)
        best = scores[0].flatten().topk(N * K).indices // scores.shape[-1]
        won = torch.bincount(best, minlength=N)
        counts = [int(FLOOR * K + (1 - FLOOR) * int(each)) for each in won]
        counts[int(won.argmax())] += N * K - sum(counts)
        return counts

    def smooth(self, votes: Tensor, prompt: LayerPrompt) -> Tensor:
        return votes


@dataclass(frozen=True, kw_only=True)
class Repetition(Policy):
    """Rates a text by the attention of the last tokens, which repeat a piece of it; what it keeps does not matter."""

    name: ClassVar[str] = "repetition"
    text: int = 0
    piece: int = 0

    @property
    def queries(self) -> int:
        return ALL

    def votes(self, prompt: LayerPrompt) -> Tensor:
        keys, queries = prompt.keys[0].float(), prompt.queries[0, :, -self.piece :].float()
        (N, L, D), at_once = keys.shape, 256
        best = torch.zeros(N, self.text)
        for start in range(0, self.piece, at_once):
            some = queries[:, start : start + at_once]
            logits = (some.reshape(N, -1, D) @ keys.mT * prompt.scale).view(N, -1, some.shape[1], L)
            last = torch.arange(some.shape[1]) + L - self.piece + start
            weights = logits.masked_fill(torch.arange(L) > last[:, None], -torch.inf).softmax(-1)
            best = torch.maximum(best, weights[..., : self.text].amax((1, 2)))
        repetitions.setdefault(int(prompt.layer), []).append(best)
        return torch.zeros(prompt.keys.shape[:3])


def repeat(llm: LLM, tokens: list[int], saved: Any, opened: str | None) -> list[Tensor]:
    """KVzip's ratings of a text, ``[N, L]`` for each layer."""
    context = llm.context_of(saved, opened, None)
    repetitions.clear()
    begin = 0 if opened is None else len(llm.tokenizer.encode(opened, add_special_tokens=False))
    for start in range(begin, len(tokens), PIECE):
        ask = "Repeat the previous context exactly."
        if start > begin:
            before = llm.tokenizer.decode(tokens[start - 8 : start])
            ask = f"Repeat the part of the previous context exactly, starting with {before}"
        piece = tokens[start : start + PIECE]
        asked = llm.engine.tokenize(llm.after(context, ask))
        budget = CacheBudget(4, 32, 64, policy=Repetition(text=len(tokens), piece=len(piece)))
        run(llm, [*asked, *piece], SamplingParams(max_tokens=1, kv_budget=budget), past=saved)
    return [torch.stack(repetitions[layer]).amax(0) for layer in sorted(repetitions)]


def shared_among(scores: Tensor, capacity: int, floor: float) -> Tensor:
    """Which tokens heads keep that share their entries: sinks, recent tokens, a part of the best, and the best of all.

    Args:
        scores: ``[heads, L]``, of one layer or of several.
        capacity: Entries per head, on average.
        floor: Share of them that each head has.
    """
    rated = scores.clone()
    rated[:, :4] = rated[:, -32:] = torch.inf
    kept = torch.zeros_like(rated, dtype=torch.bool)
    kept.scatter_(1, rated.topk(max(36, int(floor * capacity))).indices, True)
    left = len(rated) * capacity - int(kept.sum())
    others = rated.masked_fill(kept, -1.0).flatten().topk(left).indices
    return kept.flatten().index_fill(0, others, True).view_as(kept)


def repeated_masks(scores: list[Tensor], capacity: int) -> dict[str, list[Tensor]]:
    """What KVzip keeps, by how heads share their entries."""
    all_layers = shared_among(torch.cat(scores), capacity, FLOOR / 2)
    return {
        "kvzip, equal": [shared_among(each, capacity, 1.0) for each in scores],
        "kvzip, unequal": [shared_among(each, capacity, FLOOR) for each in scores],
        "kvzip over all layers, unequal": list(all_layers.split([len(each) for each in scores])),
    }


def of_head(prompt: LayerPrompt, head: int, budget: CacheBudget, length: int) -> Tensor:
    """Positions that one head keeps."""
    group = prompt.queries.shape[1] // prompt.keys.shape[1]
    one = replace(
        prompt,
        queries=prompt.queries[:, head * group : (head + 1) * group],
        keys=prompt.keys[:, head : head + 1],
        layout=layout_tensors([lay_out(length, budget)], prompt.keys.device),
    )
    return choose_entries(one, budget)[0, 0]


def with_masks() -> None:
    """From now on, torch's attention does not see keys that are all zero."""
    prefill = SdpaAttention.prefill

    def masked(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
        """Queries ``[T, H, D]``, keys ``[N, L, D]``, and what each sees, ``[N, T, L]``."""
        T, N = len(query), len(keys)
        grouped = query.view(T, N, -1, query.shape[-1]).permute(1, 2, 0, 3)
        logits = (grouped.flatten(1, 2) @ keys.mT).float().view(N, -1, T, keys.shape[1]) * scale
        weights = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1).to(values.dtype)
        out = (weights.flatten(1, 2) @ values).view(N, -1, T, values.shape[-1])
        return out.permute(2, 0, 1, 3).reshape(query.shape)

    def masked_prefill(
        self: Any, query: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float, **more: Any
    ) -> Tensor:
        first = int(start)
        end = first + len(query)
        there = (keys[:, :end] != 0).any(-1)
        if there.all():
            return prefill(self, query, keys, values, start, scale, **more)
        seen = torch.arange(end) <= torch.arange(first, end)[:, None]
        return masked(query, keys[:, :end], values[:, :end], seen & there[:, None], scale)

    def masked_decode(
        self: Any, query: Tensor, keys: Tensor, values: Tensor, valid: Tensor, scale: float, **more: Any
    ) -> Tensor:
        rows = []
        for row, end in enumerate(valid.clamp(min=1).tolist()):
            there = (keys[row, :, :end] != 0).any(-1)
            rows.append(masked(query[row, None], keys[row, :, :end], values[row, :, :end], there[:, None], scale))
        return torch.cat(rows)

    SdpaAttention.prefill, SdpaAttention.decode = masked_prefill, masked_decode  # type: ignore[method-assign]


def run(llm: LLM, tokens: list[int], params: SamplingParams, past: Any = None, keep: bool = False) -> Any:
    """One request; returns its last output."""
    llm.engine.add_request(tokens, params, past=past, keep=keep)
    last = None
    while llm.engine.busy:
        for output in llm.engine.step():
            last = output
    assert last is not None
    assert last.error is None, last.error
    return last


def answers(llm: LLM, plan: QuestionPlan, prompts: Prompts, share: Fraction) -> Iterator[tuple[str, str, float]]:
    """Task, policy and score of each question."""
    asked = [job for group in plan for job in group]
    for number, job in enumerate(asked):
        later, question = job.task.follow_up == "context", job.sample.question
        assert question is not None
        if later:
            tokens, opened = llm.context_tokens(job.sample.prompt, chat=prompts.chat, system=None)
        else:
            tokens, opened = prompts.first(job.sample), None
        tokens = llm.engine.tokenize(tokens) if isinstance(tokens, str) else list(tokens)
        recorder = Recorder(later=later, capacity=int(share * len(tokens)))
        masks.clear()
        run(llm, tokens, SamplingParams(max_tokens=1, kv_budget=CacheBudget(4, 32, 64, policy=recorder)))
        saved = run(llm, tokens, SamplingParams(max_tokens=0), keep=True).saved
        if later:
            masks.update(repeated_masks(repeat(llm, tokens, saved, opened), recorder.capacity))
        kept = {"full": None, **masks}
        for name, layers in list(kept.items()):
            copied = [layer.clone() for layer in saved.layers]
            for layer, mask in zip(copied, layers or (), strict=False):
                layer.keys[0][:, : mask.shape[1]] *= mask[..., None]
            past = replace(saved, layers=copied)
            if later:
                context = llm.context_of(past, opened, None)
                text = llm.after(context, job.sample.second if context.chat else f"\n\n{job.sample.second}")
                new, forced, begun = llm.engine.tokenize(text), prompts.opening(job.sample), []
            else:
                forced = prompts.then(job.sample)
                begun = [] if forced else [int(saved.logits.argmax())]
                new, forced = forced[:1] or begun, forced[1:]
            most = len(forced) + question.max_tokens
            params = SamplingParams(max_tokens=most, forced=tuple(forced), stop=question.stop)
            output = run(llm, list(new), params, past=past)
            written = [*begun, *output.token_ids[len(forced) :]]
            made = llm.tokenizer.decode(written, skip_special_tokens=True)
            for stop in question.stop:
                made = made.partition(stop)[0]
            yield job.task.name, name, score(question.scoring, made)
        print(f"{number + 1} of {len(asked)}", flush=True)


def main() -> None:
    """Ask, and print a table per task."""
    parser = question_parser(__doc__)
    parser.add_argument("--share", type=Fraction, default=Fraction(1, 8))
    arguments = parser.parse_args()
    policies._BUILT_IN["recorder"] = "benchmarks.unequal_heads:Recorder"
    probe = LLM(arguments.model, budget=64, max_model_len=128, slots=1, prefix_cache=0, report_plan=lambda plan: None)
    prompts = Prompts(probe.tokenizer, chat=None)
    plan = plan_of(arguments, [Variant("full")], prompts, probe.engine.spec.max_position)
    del probe
    llm = LLM(
        arguments.model,
        max_model_len=plan.longest + 16 + (PIECE if "after" in arguments.ask else 0),
        slots=1,
        sessions=2,
        attention="sdpa",
        kept_queries=ALL if "after" in arguments.ask else 64,
        prefix_cache="2GiB",
        report_plan=lambda plan: None,
    )
    with_masks()
    found: dict[str, dict[str, list[float]]] = {}
    for task, name, right in answers(llm, plan, prompts, arguments.share):
        found.setdefault(task, {}).setdefault(name, []).append(right)
    for task, names in found.items():
        table, count = [["heads", "answered", "unequal - equal"]], len(next(iter(names.values())))
        for name, scores in names.items():
            low, high = interval(sum(scores), count)
            cell, gap = f"{100 * sum(scores) / count:.0f} ({100 * low:.0f}-{100 * high:.0f})", ""
            if name.endswith("unequal"):
                equal = names[name.replace("unequal", "equal").replace(" over all layers", "")]
                difference = paired_difference([a - b for a, b in zip(scores, equal, strict=True)])
                gap = as_gap((*difference, count), digits=0)
            table.append([name, cell, gap])
        print("\n".join(["", f"### {task}, {count} questions, {arguments.share}", "", *as_lines(table)]))


if __name__ == "__main__":
    main()
