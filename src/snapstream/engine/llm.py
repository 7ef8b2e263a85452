"""The engine with a plain interface: a list of prompts in, their outputs back."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from snapstream.assets import PLAIN_CHAT, is_shipped
from snapstream.config import CacheBudget, EngineConfig, SamplingParams
from snapstream.engine.admission import Prompt
from snapstream.engine.engine import Engine
from snapstream.engine.memory import EnginePlan
from snapstream.engine.output import RequestOutput
from snapstream.errors import RequestError


class LLM:
    """A model with a fixed number of slots, each with a cache of fixed size.

    Example:
        >>> llm = LLM("path/to/model", budget=4096, slots=8)  # doctest: +SKIP
        >>> llm.generate("A very long text ...")[0].text  # doctest: +SKIP

    Attributes:
        engine: What does the work; a server drives its ``add_request``, ``step`` and ``abort`` by itself.
        tokenizer: The model's.
        chat_template: Used instead of the tokenizer's own, if not ``None``.
    """

    def __init__(
        self,
        model: str,
        *,
        budget: CacheBudget | int | None = None,
        config: EngineConfig | None = None,
        report_plan: Callable[[EnginePlan], None] | None = None,
        **settings: Any,
    ) -> None:
        """Make the engine; see :class:`~snapstream.engine.engine.Engine` for arguments and errors."""
        self.engine = Engine(model, budget=budget, config=config, report_plan=report_plan, **settings)
        self.tokenizer = self.engine.tokenizer
        # The shipped models have none of their own.
        self.chat_template = PLAIN_CHAT.read_text() if is_shipped(model) else None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, batched as slots come free.

        Args:
            prompts: Text, or token ids, or a list of either.
            params: One for all, or one per prompt; greedy with 128 tokens by default.

        Returns:
            The final output of each prompt, in order.

        Raises:
            RequestError: A prompt or parameter that cannot be served; nothing of this call is run then.
        """
        many = _as_list(prompts)
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else _as_params(params)
        if len(each) != len(many):
            raise RequestError(f"{len(many)} prompts but {len(each)} sampling parameters; give one, or one per prompt")
        names: list[str] = []
        try:
            for prompt, one in zip(many, each, strict=True):
                names.append(self.engine.new_name())  # known before it is in use: an interrupt could leave it behind
                self.engine.add_request(prompt, one, names[-1])
            finished: dict[str, RequestOutput] = {}
            while len(finished) < len(names):
                finished.update((o.request_id, o) for o in self.engine.step_for(names) if o.finished)
        finally:  # an error or an interrupt leaves nothing running
            self.engine.discard(names)
        return [finished[name] for name in names]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Generate for one prompt and yield its output as it grows; closing the iterator aborts the request."""
        name = self.engine.new_name()
        try:
            self.engine.add_request(prompt, params, name)
            finished = False
            while not finished:
                for output in self.engine.step_for([name]):
                    finished = finished or output.finished
                    yield output
        finally:
            self.engine.discard([name])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """Generate the next turn of a conversation, laid out by the model's chat template.

        Args:
            messages: Each with ``role`` and ``content``.
            params: How to sample; greedy with 128 tokens by default.
            chat_template_kwargs: See :meth:`chat_text`.

        Raises:
            RequestError: The model has no chat template, or it rejects the messages.
        """
        return self.generate(self.chat_prompt(messages, chat_template_kwargs), params)[0]

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Lay a conversation out with the model's chat template; returns tokens.

        Tokens rather than text: templates write the special tokens themselves, and encoding their text as a prompt
        would add another beginning-of-sequence.

        Raises:
            RequestError: The model has no chat template, or it rejects the messages.
        """
        text = self.chat_text(messages, chat_template_kwargs)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> str:
        """The text of a conversation as the model's chat template lays it out, up to where the answer begins.

        Args:
            messages: Each with ``role`` and ``content``.
            chat_template_kwargs: Variables of the template, such as ``{"enable_thinking": False}`` of Qwen3.

        Raises:
            RequestError: The model has no chat template, it rejects the messages, or a variable is not the caller's
                to set.
        """
        if not self.has_chat_template:
            raise RequestError("this model has no chat template; give a plain prompt instead")
        variables = dict(chat_template_kwargs or {})
        # What the function takes for itself is not the template's.
        own = {"messages", *inspect.signature(self.tokenizer.apply_chat_template).parameters}
        taken = sorted(set(variables) & own)
        if taken:
            raise RequestError(
                f"chat_template_kwargs: {', '.join(taken)} cannot be set here; give variables of the model's template"
            )
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=True,
                chat_template=self.chat_template,
                **variables,
            )
        except Exception as error:  # a template is a program, and may fail as one
            raise RequestError(f"the chat template rejects these messages: {error}") from error
        return str(text)

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`chat` can lay out messages."""
        return bool(self.chat_template or getattr(self.tokenizer, "chat_template", None))

    def __repr__(self) -> str:
        """What it is, in one line."""
        engine = self.engine
        return (
            f"LLM({engine.model!r}: {engine.spec.architecture}, {engine.config.slots} slots with caches of "
            f"{engine.budget.capacity} entries, up to {engine.max_model_len} tokens, {engine.dtype} on {engine.device})"
        )


def _as_params(params: Sequence[SamplingParams]) -> list[SamplingParams | None]:
    if not isinstance(params, list | tuple):
        raise RequestError(
            f"params is {params!r}; give SamplingParams(max_tokens=..., ...), or a list with one per prompt"
        )
    return list(params)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    try:
        items: list[Any] = list(prompts)
    except TypeError:
        raise RequestError(f"prompts is {prompts!r}; give text, token ids, or a list of either") from None
    try:
        operator.index(items[0])
    except (IndexError, TypeError):
        return items
    return [items]  # a list of token ids is one prompt
