"""lm-evaluation-harness with the built-in engine: its tasks, answered from a compressed cache.

``python -m snapstream.evaluation.harness run --model snapstream --model_args pretrained=DIR,budget=1024 --tasks ...``
is lm-eval's own command with one more model.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from tqdm import tqdm

from snapstream.config import DEFAULT_POLICY, CacheBudget, EngineConfig, SamplingParams
from snapstream.engine import LLM, RequestOutput
from snapstream.errors import ConfigurationError, RequestError, SnapStreamError, missing_extra

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
except ModuleNotFoundError as error:
    raise missing_extra("the lm-eval adapter needs lm-eval", "eval") from error

logger = logging.getLogger(__name__)

NAME = "snapstream"
"""Value of ``--model``."""

Job = tuple[list[int], SamplingParams]

_BUDGET_FIELDS = dict.fromkeys(
    ("sink", "recent", "top_k", "window", "kernel", "key_kernel", "near", "seed"), "int"
) | dict.fromkeys(("pooling", "normalize", "ring", "selection"), "str")
_SAMPLING = ["top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"]


class SnapStreamLM(TemplateLM):  # type: ignore[misc]
    """A model of lm-eval: prompts are prefilled and compressed once, and the rest is decoded from what was kept.

    This applies to scores as well as to generated text. The context of a log-likelihood request is a prompt, and its
    continuation is decoded token by token through the compressed cache. The first token after a prompt comes from
    prefill, which sees all of it: a task whose choices are single tokens does not depend on the budget at all.

    Example:
        >>> model = SnapStreamLM("path/to/model", budget=1024)  # doctest: +SKIP
        >>> lm_eval.simple_evaluate(model=model, tasks=["gsm8k"])  # doctest: +SKIP
    """

    def __init__(
        self,
        pretrained: str = "",
        budget: int | str | None = None,
        policy: str | None = None,
        max_length: int | None = None,
        slots: int | None = None,
        prefill_chunk: int | None = None,
        dtype: str = "auto",
        weights: str = "auto",
        kv_dtype: str = "auto",
        device: str = "auto",
        compiled: bool = True,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_gen_toks: int | None = None,
        **budget_fields: Any,
    ) -> None:
        """Load the model. Every argument may also be a string, as ``--model_args`` passes it.

        Args:
            pretrained: Directory of a checkpoint, or a hub id.
            budget: Cache entries per sequence; ``None`` is a full cache.
            policy: What the budget keeps: ``spans`` (the default with a budget), ``snapstream``, ``mixed``,
                ``multiscale-keydiff``, ``local-keydiff``, ``keydiff``, ``streaming``, ``sage-kv``, ``random``; or
                ``full``, without a budget.
            max_length: Longest prompt plus output; by default the model's own limit.
            slots: Sequences decoded concurrently; by default the batch size.
            prefill_chunk: Prompt tokens per prefill launch.
            dtype: As in :class:`EngineConfig`.
            weights: As in :class:`EngineConfig`.
            kv_dtype: As in :class:`EngineConfig`.
            device: As in :class:`EngineConfig`.
            compiled: On CUDA, capture decode steps as graphs: faster.
            batch_size: lm-eval's ``--batch_size``; ``auto`` is the engine's default.
            max_batch_size: lm-eval's ``--max_batch_size``: the batch size, if that is ``auto``.
            max_gen_toks: Maximum tokens to generate, for tasks that do not specify it; 256 by default.
            **budget_fields: Fields of :class:`CacheBudget`, such as ``window``, ``kernel`` or ``ring``.

        Raises:
            ConfigurationError: An argument is unknown, or its value is not allowed.
        """
        super().__init__()
        unknown = sorted(set(budget_fields) - set(_BUDGET_FIELDS))
        if unknown:
            own = [name for name in inspect.signature(SnapStreamLM).parameters if name != "budget_fields"]
            allowed = ", ".join([*own, *_BUDGET_FIELDS])
            raise ConfigurationError(f"model_args: unknown argument {', '.join(unknown)}; allowed: {allowed}")
        if not pretrained:
            raise ConfigurationError("model_args: pretrained is missing; give a checkpoint directory or a hub id")
        if str(batch_size).startswith("auto"):
            batch_size = max_batch_size
        sizes = {
            "max_model_len": _whole("max_length", max_length),
            "slots": _whole("slots", batch_size if _given(slots) is None else slots),
            "prefill_chunk": _whole("prefill_chunk", prefill_chunk),
        }
        given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
        config = EngineConfig(
            dtype=str(dtype),
            weights=str(weights),
            kv_dtype=str(kv_dtype),
            device=_device(str(device)),
            enforce_eager=not _flag("compiled", compiled),
            **given,
        )
        self._max_gen_toks = _whole("max_gen_toks", max_gen_toks)
        self.llm = LLM(
            str(pretrained),
            budget=_budget(budget, policy, budget_fields),
            config=config,
            report_plan=lambda plan: logger.info(plan.summary()),
        )
        self.tokenizer = self.llm.tokenizer
        self._device = self.llm.engine.device

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> SnapStreamLM:
        """Create a model from ``--model_args`` and the arguments that lm-eval adds.

        lm-eval always adds a batch size and a device, whether or not the user gave them, so ``model_args`` take
        precedence.
        """
        added = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls(**(added | dict(arg_dict)))

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> SnapStreamLM:
        """The same from ``name=value,name=value``."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # -- what lm-eval asks about the model ----------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """End-of-sequence token."""
        return self.tokenizer.eos_token_id  # type: ignore[no-any-return]

    @property
    def prefix_token_id(self) -> int:
        """Token for an empty context: beginning of sequence, or end of sequence if there is none."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def max_length(self) -> int:
        """Longest prompt plus output."""
        return self.llm.engine.max_model_len

    @property
    def max_gen_toks(self) -> int:
        """Maximum tokens to generate, for tasks that do not specify it."""
        return 256 if self._max_gen_toks is None else self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        """Part of the name under which lm-eval caches prepared requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results: how the cache was compressed."""
        budget = self.llm.engine.budget
        return {
            "kv_budget": budget.as_dict() | {"capacity": budget.capacity},
            "max_model_len": self.llm.engine.max_model_len,
            "model_dtype": self.llm.engine.plan.weight_formats,
            "kv_dtype": self.llm.engine.plan.entry_type,
        }

    def apply_chat_template(self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Format a conversation; without a generation prompt, its last message is left open, to be continued.

        Raises:
            RequestError: The model has no chat template.
        """
        if not self.tokenizer.chat_template:
            raise RequestError("this model has no chat template; run without --apply_chat_template")
        return str(
            self.tokenizer.apply_chat_template(
                list(chat_history),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **_: Any
    ) -> list[int]:
        """Tokens of a text, or the last ``left_truncate_len`` of them if that is given.

        By default, special tokens are added unless the text begins with them, as the text of a chat template does.
        """
        if add_special_tokens is None:
            begin = self.tokenizer.bos_token
            add_special_tokens = not (begin and string.startswith(begin))
        tokens = list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))
        return tokens[-left_truncate_len:] if left_truncate_len else tokens

    # -- the three kinds of requests ----------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generated texts, each up to a stop string or its maximum length."""
        # Parse all settings before anything runs: a mistake in the last ones must not abort a run of hours.
        asked = [(request.args[0], self._sampling(request.args[1])) for request in requests]
        jobs = ((self._fitting(self.tok_encode(context), params), params) for context, params in asked)
        texts = [""] * len(requests)
        for number, output in self._run(jobs, len(requests), "generate_until", disable_tqdm):
            texts[number] = output.text
            self.cache_hook.add_partial("generate_until", requests[number].args, output.text)
        return texts

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of whole texts, in windows of ``max_length`` tokens.

        The prompt of a window is short, the prefix token or the overlap with the window before, and all else is
        decoded. So there is no prompt to compress, and beyond the budget the ring determines what is seen: the first
        tokens and the last ones.
        """
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            made = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,  # the engine counts the last token, lm-eval does not
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(window)) for window in made]
            owners += [number] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[number] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding would have generated it."""
        # Longest first, so that the remaining time is over- rather than underestimated. Equal contexts are adjacent, so
        # that they are prefilled once.
        order = sorted(range(len(requests)), key=lambda number: (-len(requests[number][1]), requests[number][1]))
        forced = [self._forcing(continuation) for _, _, continuation in requests]
        contexts = (requests[number][1] or [self.prefix_token_id] for number in order)
        jobs = ((self._fitting(context, forced[n]), forced[n]) for n, context in zip(order, contexts, strict=True))
        answers = [(0.0, False)] * len(requests)
        for place, output in self._run(jobs, len(requests), "loglikelihood", disable_tqdm):
            number = order[place]
            steps = output.logprobs or ()
            answer = sum(step.logprob for step in steps), all(step.token_id in step.top for step in steps)
            answers[number] = answer
            key = requests[number][0]
            if key is not None:  # a window of a longer text has none
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    # -- inside -------------------------------------------------------------------------------------------------------

    def _run(self, jobs: Iterable[Job], total: int, what: str, quiet: bool) -> Iterator[tuple[int, RequestOutput]]:
        """Final outputs with the indices of their jobs, in the order in which they finish."""
        # Equal prompts are prefilled once if they wait together.
        alike = groupby(enumerate(jobs), lambda numbered: numbered[1][0])
        queue = 2 * self.llm.engine.config.slots  # every slot has work, and prompts are tokenized as needed
        waiting: dict[str, int] = {}
        try:
            with tqdm(total=total, desc=f"Running {what} requests", disable=quiet) as bar:
                while True:
                    while len(waiting) < queue and (group := next(alike, None)) is not None:
                        for number, (prompt, params) in group[1]:
                            waiting[self.llm.engine.add_request(prompt, params)] = number
                    if not waiting:
                        return
                    for output in self.llm.engine.step():
                        if not output.finished or output.request_id not in waiting:
                            continue
                        number = waiting.pop(output.request_id)
                        if output.finish_reason == "error":
                            raise RequestError(f"a {what} request failed: {output.error}")
                        bar.update()
                        yield number, output
        finally:  # an error or an interrupt leaves nothing running
            self.llm.engine.discard(list(waiting))

    def _fitting(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """The prompt, or its end if the prompt and its output are too long."""
        room = self.max_length - params.max_tokens
        if len(prompt) > room:
            logger.warning(
                "a prompt of %d tokens is truncated to its last %d; max_length is %d",
                len(prompt),
                room,
                self.max_length,
            )
        return prompt[-room:]

    def _forcing(self, continuation: Sequence[int]) -> SamplingParams:
        if not continuation:
            raise RequestError("a continuation to score has no tokens; every choice needs at least one")
        if len(continuation) >= self.max_length:
            raise RequestError(
                f"a continuation has {len(continuation)} tokens; at most {self.max_length - 1} fit, "
                f"with max_length={self.max_length}"
            )
        return SamplingParams(max_tokens=len(continuation), forced=tuple(continuation), logprobs=1, ignore_eos=True)

    def _sampling(self, settings: Mapping[str, Any]) -> SamplingParams:
        given = {name: v for name, v in normalize_gen_kwargs(settings, self.max_gen_toks).items() if v is not None}
        until = [stop for stop in given.pop("until") if stop]
        max_tokens = given.pop("max_gen_toks")
        if max_tokens >= self.max_length:
            raise RequestError(
                f"max_gen_toks is {max_tokens}, which leaves no room for a prompt in max_length={self.max_length}; "
                "raise max_length, or give a smaller max_gen_toks with --gen_kwargs"
            )
        # lm-eval's temperature applies only if it samples; transformers samples at 1 by default.
        temperature = float(given.pop("temperature", 1.0))
        if not given.pop("do_sample"):
            temperature = 0.0
        if given.pop("num_beams", 1) != 1:
            raise RequestError("generation settings: num_beams must be 1, because there is no beam search")
        unknown = sorted(set(given) - set(_SAMPLING))
        if unknown:
            allowed = ", ".join(["until", "max_gen_toks", "do_sample", "temperature", *_SAMPLING])
            raise RequestError(f"generation settings: unknown {', '.join(unknown)}; allowed: {allowed}")
        if given.get("top_k") == -1:  # also means all tokens
            given["top_k"] = 0
        if not max_tokens:
            raise RequestError("generation settings: max_gen_toks is 0; give at least 1")
        # Special tokens are not part of the text that is searched for stop strings.
        special = self.tokenizer.get_added_vocab()
        ends = {special[stop] for stop in until if stop in special} | {self.tokenizer.eos_token_id}
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            stop=tuple(until),
            stop_token_ids=tuple(end for end in ends if end is not None),
            **given,
        )


def register() -> None:
    """Register ``--model snapstream`` with lm-eval, unless its entry points have done so."""
    import lm_eval.models  # noqa: F401  # adds lm-eval's own models, which it adds by itself only to an empty registry

    if NAME not in model_registry:
        model_registry.register(NAME, target="snapstream.evaluation.harness:SnapStreamLM")


def main() -> None:
    """lm-eval's command line, with one more model."""
    from lm_eval.__main__ import cli_evaluate

    register()
    try:
        cli_evaluate()
    except SnapStreamError as error:
        sys.exit(f"error: {error}")


def _budget(budget: object, policy: str | None, settings: Mapping[str, Any]) -> CacheBudget | None:
    given = {name: _whole(name, value) if _BUDGET_FIELDS[name] == "int" else value for name, value in settings.items()}
    capacity, policy = _whole("budget", budget), _given(policy)
    if policy == "full" and (capacity is not None or given):
        raise ConfigurationError("model_args: policy=full keeps everything; leave budget and its settings out")
    if capacity is not None:
        return CacheBudget.parse({"capacity": capacity, "policy": policy or DEFAULT_POLICY} | given)
    if policy not in (None, "full"):
        raise ConfigurationError(f"model_args: policy={policy} needs a budget, such as budget=1024")
    return CacheBudget.parse(given) if given else None


def _device(name: str) -> str:
    # lm-eval's command line defaults to cuda:0.
    if name == "cuda:0" and not torch.cuda.is_available():
        logger.warning("device is cuda:0, but there is no CUDA device here: running on the CPU")
        return "cpu"
    return name


def _given(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() in ("", "none") else value


def _whole(name: str, value: object) -> int | None:
    """A whole number, which lm-eval's parsers also pass as a float or a string; ``None`` if not given."""
    value = _given(value)
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ConfigurationError(f"model_args: {name} is {value!r}; it must be a whole number")


def _flag(name: str, value: object) -> bool:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise ConfigurationError(f"model_args: {name} is {value!r}; it must be true or false")
    return text == "true"


if __name__ == "__main__":
    main()
