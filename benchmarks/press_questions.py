"""kvpress' presses and policies on a real model and public questions, which stand at the end of the prompt.

    python -m benchmarks.press_questions MODEL.gguf --questions kv75.jsonl.gz --half odd --samples 12 --output DIR

Everything runs in transformers, in float32, from the same weights. One prefill with full attention serves the full
cache and all presses: each of them is given every layer's keys, values and hidden states, as its own hooks would be.
``KVzip`` then repeats the prompt behind that cache. Policies have a prefill of their own, in the drop-in cache.
Records are those of ``snapstream eval``; the same command continues a run that was stopped. Needs kvpress, which is
installed in a separate environment (``make bench-press-questions``).

KVzap is not included: it needs a scoring network that was trained for the model.
"""

from __future__ import annotations

import argparse
import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from kvpress import CURPress, ExpectedAttentionPress, KVzipPress
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks import presses
from benchmarks.real_results import tables
from benchmarks.transformers_model import read
from snapstream.evaluation.hosts import Answer, Job, Prompts
from snapstream.evaluation.lab import run_questions
from snapstream.evaluation.policies import Variant, parse_sizes, split_names
from snapstream.evaluation.questions.files import read_all_questions
from snapstream.evaluation.questions.plan import HALVES, QuestionPlan
from snapstream.evaluation.records import RecordFile
from snapstream.evaluation.tasks import Task
from snapstream.integrations.transformers import SnapStreamCache
from snapstream.models.gguf.tokenizer import load_gguf_tokenizer

SCORERS: dict[str, Callable[[float], Any]] = {
    **{
        name: presses.PRESSES[f"kvpress {name}"] for name in ("SnapKV", "StreamingLLM", "KeyDiff", "LagKV", "Compactor")
    },
    "ExpectedAttention": ExpectedAttentionPress,
    "CUR": CURPress,
}
"""Presses that choose a layer's entries as soon as the layer has run."""
REPEATERS: dict[str, Callable[[float], Any]] = {
    "KVzip": presses.PRESSES["kvpress KVzip"],
    "KVzip+": lambda ratio: KVzipPress(ratio, layerwise=True, kvzip_plus_normalization=True),
}
"""Presses that run the model over the prompt again."""
PRESSES = SCORERS | REPEATERS
OWN = ("snapstream", "spans")


class PressHost:
    """A transformers model that answers questions with presses, with policies, and with its full cache."""

    def __init__(self, model: Path) -> None:
        """Load a GGUF file; transformers expands its weights to float32."""
        self.name = model.name
        self.model = AutoModelForCausalLM.from_pretrained(
            model.parent, gguf_file=model.name, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.prompts = Prompts(load_gguf_tokenizer(model), chat=None)
        self.max_length: int | None = self.model.config.max_position_embeddings
        self.count, self.overhead = self.prompts.count, self.prompts.overhead
        self.chat = self.prompts.chat
        presses.give_tokenizer(self.prompts.tokenizer)

    def refuses(self, task: Task) -> str | None:
        """Questions stand at the end of the prompt."""
        return None if task.follow_up == "none" else "which asks in a second turn"

    def describe(self) -> dict[str, Any]:
        """Model and numbers."""
        return {"host": "kvpress", "model": self.name, "dtype": "float32", "torch": torch.__version__, "chat": True}

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Answer]]:
        """Answer jobs; those of one prompt share its prefill."""
        for _, group in groupby(jobs, lambda job: job.sample.prompt):
            asked = list(group)
            tokens = self.prompts.first(asked[0].sample)
            pressed = [job for job in asked if job.variant.policy not in OWN]
            for job, cache, logits in self._press(tokens, pressed):
                yield job, self._answer(job, logits, cache, len(tokens))
            self.model.set_attn_implementation("snapstream")
            for job in asked:
                if job.variant.policy in OWN:
                    cache = SnapStreamCache(self.model.config, job.variant.budget(len(tokens)))
                    yield job, self._answer(job, read(self.model, torch.tensor([tokens]), cache), cache, len(tokens))
            self.model.set_attn_implementation("sdpa")

    @torch.no_grad()
    def _press(self, tokens: list[int], jobs: Sequence[Job]) -> Iterator[tuple[Job, DynamicCache, torch.Tensor]]:
        """A cache per job from one prefill, and its logits; to be used before the next one is taken."""
        if not jobs:
            return
        full, length = DynamicCache(), len(tokens)
        scored = [job for job in jobs if job.variant.policy in SCORERS]
        caches = [DynamicCache() for _ in scored]
        scorers = [SCORERS[job.variant.policy](_dropped(job.variant, length)) for job in scored]
        for press in scorers:
            press.post_init_from_model(self.model)

        def hook(module: Any, given: Any, kwargs: dict[str, Any], output: Any) -> None:
            layer, hidden = full.layers[module.layer_idx], kwargs["hidden_states"]
            for press, cache in zip(scorers, caches, strict=True):
                kept = press.compress(module, hidden, layer.keys, layer.values, output[1], kwargs)
                cache.update(*kept, module.layer_idx)

        with ExitStack() as stack:
            for block in self.model.model.layers:
                block.self_attn.rotary_emb = self.model.model.rotary_emb
                stack.callback(block.self_attn.register_forward_hook(hook, with_kwargs=True).remove)
            logits = read(self.model, torch.tensor([tokens]), full)
        for job, cache in zip(scored, caches, strict=True):
            yield job, cache, logits
        for job in jobs:
            if job.variant.policy in REPEATERS:
                cache = copy.deepcopy(full)
                press = REPEATERS[job.variant.policy](_dropped(job.variant, length))
                with press(self.model):  # what the press would note while it sees the prefill
                    press._context_ids, press._cache = torch.tensor([tokens]), cache
                yield job, cache, logits  # in which attention does not see what was dropped
                for block in self.model.model.layers:
                    block.self_attn.masked_key_indices = None
        for job in jobs:  # last, because decoding adds to this cache
            if job.variant.policy == "full":
                yield job, full, logits

    @torch.no_grad()
    def _answer(self, job: Job, logits: torch.Tensor, cache: Any, length: int) -> Answer:
        """Decode greedily behind a cache; positions are those of the whole prompt."""
        question, tokenizer = job.sample.question, self.prompts.tokenizer
        assert question is not None
        forced = self.prompts.then(job.sample)
        ends = {tokenizer.eos_token_id, *_as_list(self.model.generation_config.eos_token_id)}
        written: list[int] = []
        reason = "length"
        for at in range(len(forced) + question.max_tokens):
            token = forced[at] if at < len(forced) else int(logits.argmax(-1))
            if at >= len(forced):
                if token in ends:
                    reason = "stop"
                    break
                written.append(token)
            place = torch.tensor([[length + at]])
            logits = self.model(torch.tensor([[token]]), past_key_values=cache, position_ids=place).logits[:, -1]
        text = tokenizer.decode(written, skip_special_tokens=True)
        for stop in question.stop:
            text = text.partition(stop)[0]
        return Answer(text, length, len(written), reason)


def _as_list(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _dropped(variant: Variant, length: int) -> float:
    """Share of entries that a press drops."""
    entries = variant.entries(length)
    assert entries is not None
    return 1 - entries / length


def main() -> None:
    """Ask the questions and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--questions", action="append", required=True, help="a file of questions; repeat for several")
    parser.add_argument("--half", choices=HALVES, help="only questions about texts with even or odd numbers")
    parser.add_argument("--samples", type=int, help="questions per file")
    parser.add_argument("--budgets", default="1/8")
    parser.add_argument("--contenders", default=",".join([*PRESSES, *OWN]), help="besides the full cache")
    parser.add_argument("--output", type=Path, default=Path("eval-presses"))
    arguments = parser.parse_args()
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    contenders = split_names(arguments.contenders, "contenders")
    unknown = [name for name in contenders if name not in (*PRESSES, *OWN)]
    if unknown:
        parser.error(f"unknown contender {', '.join(unknown)}; allowed: {', '.join([*PRESSES, *OWN])}")
    sizes = parse_sizes(arguments.budgets)
    variants = [Variant("full"), *(Variant(name, size) for name in contenders for size in sizes)]
    host = PressHost(arguments.model)
    files = read_all_questions(arguments.questions)
    plan = QuestionPlan(
        files, variants, host.prompts, samples=arguments.samples, half=arguments.half, longest=host.max_length
    )
    with RecordFile(arguments.output / "results.jsonl", host.describe()) as file:
        for note in run_questions(host, plan, file):
            print(note)
        print("\n".join(tables(file.records)))


if __name__ == "__main__":
    main()
