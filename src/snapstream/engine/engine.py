"""The engine of one model: plans its memory, loads it, and takes requests for it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snapstream.cache import CompressedSequence, SequenceDirectory, SequenceStore
from snapstream.config import CacheBudget, EngineConfig, SamplingParams
from snapstream.config.policy import ALL
from snapstream.engine.cache_settings import Budget
from snapstream.engine.core import EngineCore
from snapstream.engine.drafters import NextToken, make_drafter
from snapstream.engine.files import SequenceFiles
from snapstream.engine.memory.available import available_memory
from snapstream.engine.memory.plan import EnginePlan
from snapstream.engine.memory.planner import plan_engine
from snapstream.engine.requests.admission import Admission, Prompt
from snapstream.engine.requests.grammar import GrammarCompiler
from snapstream.engine.requests.tokenizing import PromptTokenizer, give_memory_back
from snapstream.engine.runner import ModelRunner, Runner
from snapstream.engine.settings import Setup, load_sampling_defaults, load_tokenizer, set_up
from snapstream.engine.speculation import SpeculativeRunner
from snapstream.errors import ConfigurationError
from snapstream.kernels import cpu as cpu_kernels
from snapstream.models import load_model, resolve_checkpoint

logger = logging.getLogger(__name__)


class Engine(EngineCore):
    """A model, its slots, and the requests that run in them.

    A server drives it with :meth:`add_request`, :meth:`step` and :meth:`abort`. An engine belongs to one thread and
    does no locking. Only :meth:`tokenize` may be called from other threads.
    """

    def __init__(
        self,
        model: str,
        *,
        budget: Budget = None,
        config: EngineConfig | None = None,
        report_plan: Callable[[EnginePlan], None] | None = None,
        **settings: Any,
    ) -> None:
        """Plan memory, load the model and, on CUDA, build kernels and capture decode steps.

        Args:
            model: Directory of a Hugging Face checkpoint, or a hub id.
            budget: Cache of one sequence: a :class:`CacheBudget`, its number of entries, or a size such as ``"2GiB"``
                (:class:`MemoryBudget`); ``None`` for a full cache of ``max_model_len`` entries.
            config: Engine settings.
            report_plan: Called with the memory plan before anything is loaded; by default, its summary is printed to
                stderr.
            **settings: Fields of :class:`EngineConfig`, instead of ``config``: ``max_model_len``, ``slots``,
                ``prefill_chunk``, ``dtype``, ``device``, ...

        Raises:
            ConfigurationError: The settings are invalid or incompatible with each other.
            CheckpointError: The checkpoint is missing, corrupt or unsupported.
            MemoryPlanError: The engine does not fit into memory; the message says which settings would fit.
        """
        if config is not None and settings:
            raise ConfigurationError(f"give config or individual settings, not both ({', '.join(sorted(settings))})")
        if config is None:
            unknown = sorted(set(settings) - set(EngineConfig.__dataclass_fields__))
            if unknown:
                allowed = ", ".join(sorted(EngineConfig.__dataclass_fields__))
                raise ConfigurationError(f"unknown engine setting {', '.join(unknown)}; allowed: {allowed}")
            config = EngineConfig(**settings)
        setup = set_up(model, budget, config)
        spec = setup.spec
        if budget is not None and not spec.has_budget:
            logger.warning(
                "Every layer of this model has a sliding window, so its cache has a fixed size already: the budget has "
                "no effect."
            )
        self.model, self.config, self.spec, self.device, self.types = model, config, spec, setup.device, setup.types
        self.max_model_len, self.budget = setup.max_model_len, setup.budget
        plan = plan_engine(setup, available_memory(self.device, config.memory_fraction))
        self.plan = plan.ours
        (report_plan or _print_plan)(plan)
        plan.check()
        checkpoint = resolve_checkpoint(model)  # for a hub id, weights are downloaded only now
        self.files = SequenceFiles(setup, checkpoint)
        self.tokenizer = load_tokenizer(str(checkpoint))
        self._admission = Admission(self.tokenizer, spec, self.budget, config, max_model_len=self.max_model_len)
        self.sampling_defaults = load_sampling_defaults(str(checkpoint))
        if self.device.type == "cpu":
            cpu_kernels.available()  # builds them now: programs check for them
        loaded = load_model(checkpoint, spec, self.types.weights, self.device)
        drafter = make_drafter(setup, self.tokenizer)
        self._prefixes = _prefix_store(setup, checkpoint, self.plan.prefixes)
        self.model_runner = inner = ModelRunner(setup, loaded, self.plan.lanes, self._prefixes)
        inner.warm_up()
        if inner.decoder.mtp is not None:
            drafter = NextToken(inner.decoder.mtp)
        runner: Runner = inner
        if drafter is not None:
            runner = SpeculativeRunner(inner, drafter, guesses=config.guesses, eager=setup.eager)
        # Spare memory: holds compressed prompts that were prefilled for several requests until those have a slot.
        spare = self.plan.slots if plan.available is None else max(0, plan.available - self.plan.total)
        sizes = spec.sizes(self.types.cache)
        super().__init__(runner, slots=config.slots, sizes=sizes, spare=spare, max_gap=config.max_gap)
        give_memory_back()  # a tokenizer is built from lists that are larger than itself

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        past: CompressedSequence | None = None,
        keep: bool = False,
        first: bool = False,
        salt: str = "",
    ) -> str:
        """Queue a request.

        Args:
            prompt: Text or token ids; only the new part if there is a ``past``.
            params: Sampling parameters; greedy by default.
            request_id: An id that is not in use; generated by default.
            past: Earlier turns: the ``saved`` of an earlier output, or a sequence from a file (:attr:`files`). The
                prompt is prefilled over this compressed cache, and both are compressed again at its end. With an empty
                prompt, a cache that was prefilled with ``max_tokens=0`` is decoded unchanged.
            keep: Whether to return the compressed cache with the last output, for a next turn or a file.
            first: Whether to put the request at the head of the queue.
            salt: Requests with different ones share no cached prefixes, so their times tell nothing about each other.

        Returns:
            The request's id.

        Raises:
            RequestError: The request cannot be served; the message says why. No other request is affected.
        """
        self.check_process()
        name = self.new_name() if request_id is None else request_id
        self.add(self._admission.admit(name, prompt, params, past=past, keep=keep, salt=salt), first=first)
        return name

    @property
    def prefix_bytes(self) -> int:
        """Bytes in the prefix cache."""
        return 0 if self._prefixes is None else self._prefixes.nbytes

    def close(self) -> None:
        """Write what is in the prefix cache to its directory, if it has one; no more requests may follow."""
        if self._prefixes is not None:
            self._prefixes.close()

    @property
    def special_tokens(self) -> frozenset[int]:
        """The tokenizer's special tokens, which are not text."""
        return self._admission.special_tokens

    def context_budget(self, asked: int | CacheBudget | None = None) -> CacheBudget:
        """The cache budget of a stored context; see :meth:`CacheBudget.for_context`."""
        return self.budget.for_context(asked, self.config.kept_queries)

    def kept_bytes(self, tokens: int, kv_budget: int | CacheBudget | None = None) -> int:
        """Bytes of the compressed cache of a prompt of ``tokens`` tokens, if it is returned (``keep``).

        Raises:
            RequestError: The budget is invalid.
        """
        budget = self.budget.for_request(kv_budget, self.config.kept_queries)
        return self._sizes.saved([group.lay_out(tokens, budget).count for group in self.spec.groups])

    @property
    def grammars(self) -> GrammarCompiler:
        """The compiler of grammars; may be used from any thread, so that :meth:`add_request` finds what it needs."""
        return self._admission.grammars

    @property
    def texts(self) -> PromptTokenizer:
        """The tokenizer of prompts, which stops where a prompt can no longer fit."""
        return self._admission.texts

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Tokenize a prompt as the engine does; may be called from any thread.

        Raises:
            RequestError: The prompt is not valid text, or has tokens that are not in the model's vocabulary.
        """
        return self._admission.tokenize(prompt)


def _prefix_store(setup: Setup, checkpoint: Path, nbytes: int) -> SequenceStore | None:
    """The store of the prefix cache, unless it has no memory or policies look at all queries of a prompt."""
    config = setup.config
    if not nbytes or setup.queries == ALL:
        if config.prefix_dir is not None:
            reason = "the policy looks at all queries of a prompt" if nbytes else "no memory is left for it"
            logger.warning("There is no prefix cache, although prefix_dir is given: %s.", reason)
        return None
    directory = None
    if config.prefix_dir is not None:
        files = SequenceFiles(setup, checkpoint, of_prefixes=True)
        directory = SequenceDirectory(Path(config.prefix_dir), files, kind="prefix", max_bytes=config.prefix_disk)
    return SequenceStore(nbytes, directory)


def _print_plan(plan: EnginePlan) -> None:
    print(plan.summary(), file=sys.stderr)
