"""A simple interface to the engine: takes a list of prompts and returns their outputs."""

from __future__ import annotations

import inspect
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from snapstream.assets import PLAIN_CHAT, is_shipped
from snapstream.cache import CompressedSequence
from snapstream.config import CacheBudget, EngineConfig, SamplingParams
from snapstream.config.pins import Span
from snapstream.engine.cache_settings import Budget
from snapstream.engine.context import Context, Render, continuation, opening
from snapstream.engine.engine import Engine
from snapstream.engine.memory.plan import EnginePlan
from snapstream.engine.requests.admission import Prompt
from snapstream.engine.requests.output import RequestOutput
from snapstream.errors import RequestError
from snapstream.prompt_parts import find_parts, token_spans


class LLM:
    """A model with a fixed number of slots, each with a cache of fixed size.

    Example:
        >>> llm = LLM("path/to/model", budget=4096, slots=8)  # doctest: +SKIP
        >>> llm.generate("A very long text ...")[0].text  # doctest: +SKIP

    Attributes:
        engine: The engine. A server calls its ``add_request``, ``step`` and ``abort`` directly.
        tokenizer: The model's tokenizer.
        chat_template: Chat template to use instead of the tokenizer's own; ``None`` for the tokenizer's.
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
        """Create the engine; see :class:`~snapstream.engine.engine.Engine` for arguments and errors."""
        self.engine = Engine(model, budget=budget, config=config, report_plan=report_plan, **settings)
        self.tokenizer = self.engine.tokenizer
        # The shipped models have no chat template of their own.
        self.chat_template = PLAIN_CHAT.read_text() if is_shipped(model) else None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        context: Context | None = None,
    ) -> list[RequestOutput]:
        """Generate for one or several prompts, which are batched as slots become free.

        Args:
            prompts: Text, token ids, or a list of either.
            params: Sampling parameters, for all prompts or one per prompt; greedy with 128 tokens by default.
            context: A context from :meth:`read` that every prompt continues independently. If it uses the model's chat
                template, a text prompt is the user's question.

        Returns:
            The final output of each prompt, in order.

        Raises:
            RequestError: A prompt or parameter cannot be served; none of the prompts is run.
        """
        many = [self.after(context, prompt) for prompt in _as_list(prompts)]
        past = None if context is None else context.sequence
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else _as_params(params)
        if len(each) != len(many):
            raise RequestError(f"{len(many)} prompts but {len(each)} sampling parameters; give one, or one per prompt")
        names: list[str] = []
        try:
            for prompt, one in zip(many, each, strict=True):
                names.append(
                    self.engine.new_name()
                )  # recorded before it is used, so that an interrupt does not leave the request running
                self.engine.add_request(prompt, one, names[-1], past=past)
            finished: dict[str, RequestOutput] = {}
            while len(finished) < len(names):
                finished.update((o.request_id, o) for o in self.engine.step_for(names) if o.finished)
        finally:  # an error or an interrupt leaves nothing running
            self.engine.discard(names)
        return [finished[name] for name in names]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, context: Context | None = None
    ) -> Iterator[RequestOutput]:
        """Generate for one prompt and yield its output as it grows; closing the iterator aborts the request."""
        name = self.engine.new_name()
        try:
            past = None if context is None else context.sequence
            self.engine.add_request(self.after(context, prompt), params, name, past=past)
            finished = False
            while not finished:
                for output in self.engine.step_for([name]):
                    finished = finished or output.finished
                    yield output
        finally:
            self.engine.discard([name])

    def read(
        self,
        text: Prompt,
        *,
        chat: bool | None = None,
        system: str | None = None,
        budget: CacheBudget | int | None = None,
    ) -> Context:
        """Prefill a text once, to ask any number of questions about it; the engine needs ``sessions=1`` or more.

        The text is compressed when prefill ends, before any question is known. Every question continues from this
        compressed cache, and none of them changes it.

        Args:
            text: The text. Token ids are used unchanged.
            chat: Whether the text begins the first message of a conversation in the model's chat template. Default: if
                the model has a template and ``text`` is not token ids.
            system: The system message of this conversation, which is pinned.
            budget: Cache entries, as for :attr:`SamplingParams.kv_budget`; by default the engine's. Unless this is a
                :class:`CacheBudget`, the policy's variant for contexts is used: ``multiscale-keydiff`` for ``spans``.

        Returns:
            The context, for ``generate(..., context=...)`` and :meth:`save_context`.

        Raises:
            RequestError: The text cannot be processed, for example because it is too long.
        """
        prompt, opened = self.context_tokens(text, chat=chat, system=system)
        plain = SamplingParams(max_tokens=0, kv_budget=self.engine.context_budget(budget))
        if opened is not None and system is not None:
            size = len(self.engine.texts.encode(opened, special=False).tokens)
            plain = replace(plain, pin=[(0, min(size, len(prompt)))])
        name = self.engine.new_name()
        try:
            self.engine.add_request(prompt, plain, name, keep=True)
            while not (outputs := [one for one in self.engine.step_for([name]) if one.finished]):
                pass
        finally:
            self.engine.discard([name])
        saved = outputs[0].saved
        if saved is None:
            raise RequestError(f"the text could not be processed: {outputs[0].error or outputs[0].finish_reason}")
        return self.context_of(saved, opened, system)

    def context_tokens(
        self, text: Prompt, *, chat: bool | None, system: str | None, render: Render | None = None
    ) -> tuple[list[int], str | None]:
        """Tokenize a text for :meth:`read`.

        Args:
            text: See :meth:`read`.
            chat: See :meth:`read`.
            system: See :meth:`read`.
            render: Applies the chat template; :meth:`chat_text` by default.

        Returns:
            The tokens, and the :attr:`Context.opening` of the conversation; ``None`` for plain text.

        Raises:
            RequestError: The text is empty or invalid, or the arguments do not fit together.
        """
        if not isinstance(text, str):
            if chat or system is not None:
                raise RequestError("token ids are used unchanged; leave chat and system out, or give text")
            return self.engine.tokenize(text), None
        if not text.strip():
            raise RequestError("the text is empty; give at least one word")
        if not (self.has_chat_template if chat is None else chat):
            if system is not None:
                raise RequestError("a system message needs the model's chat template, but this text is plain text")
            return self.engine.tokenize(text.rstrip()), None
        opened = opening(system, render or self.chat_text)
        return self.engine.texts.encode(opened + text.rstrip(), special=False).tokens, opened

    def context_of(self, saved: CompressedSequence, opened: str | None, system: str | None) -> Context:
        """Build the context of a text whose :meth:`context_tokens` were prefilled with ``max_tokens=0``."""
        model = self.engine.model
        known = str(Path(model).resolve()) if Path(model).exists() else model
        # Logits for the next token are not needed, because a question follows first.
        return Context(replace(saved, logits=None), opened, system, known)

    def context_prompt(
        self,
        context: Context,
        messages: Sequence[Mapping[str, Any]],
        render: Render | None = None,
    ) -> list[int]:
        """Tokenize what follows a context: the rest of the first message, and all further ones.

        Args:
            context: The context.
            messages: The conversation, without the text of the context; its first message is the first question.
            render: Applies the chat template; :meth:`chat_text` by default.

        Raises:
            RequestError: The messages cannot continue this context.
        """
        return self.engine.texts.after(continuation(context, messages, render or self.chat_text))

    def save_context(self, context: Context, path: str | Path) -> None:
        """Write a context to a file, for this model on any machine. An existing file is replaced atomically.

        Raises:
            CacheFileError: The file could not be written.
        """
        self.engine.files.save(context.sequence, path, note=json.dumps(context.about()))

    def load_context(self, path: str | Path) -> Context:
        """Read a context that :meth:`save_context` wrote.

        Raises:
            CacheFileError: The file does not exist, is corrupt, belongs to another model, or its cache is larger than a
                slot's.
        """
        return Context.of(self.engine.files.load(path))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        pin: bool = True,
    ) -> RequestOutput:
        """Generate the next turn of a conversation, using the model's chat template.

        Args:
            messages: Messages with ``role`` and ``content``.
            params: Sampling parameters; greedy with 128 tokens by default.
            chat_template_kwargs: See :meth:`chat_text`.
            tools: See :meth:`chat_text`. Calls are part of the output's text; a server splits them off.
            pin: Whether :meth:`chat_pins` are pinned, if ``params`` pin nothing else.

        Raises:
            RequestError: The model has no chat template, or it rejects the messages.
        """
        given = (messages, chat_template_kwargs, tools)
        params = SamplingParams() if params is None else params
        if pin and not params.pin:
            params = replace(params, pin=self.chat_pins(*given))
        return self.generate(self.chat_prompt(*given), params)[0]

    def chat_pins(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Span]:
        """Where the system messages and the tools stand in a :meth:`chat_prompt`, for :attr:`SamplingParams.pin`.

        What cannot be found is left out.

        Args:
            messages: The conversation.
            chat_template_kwargs: See :meth:`chat_text`.
            tools: See :meth:`chat_text`.

        Returns:
            Spans of tokens.

        Raises:
            RequestError: The model has no chat template, or it rejects the messages.
        """
        text = self.chat_text(messages, chat_template_kwargs, tools)
        parts = find_parts(
            messages, tools or (), lambda given, shown: self.chat_text(given, chat_template_kwargs, shown), text
        )
        if not parts.standing:
            return []
        return token_spans(parts.standing, self.engine.texts.encode(text, special=False, offsets=True).offsets)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Apply the model's chat template to a conversation, and tokenize the result.

        Templates write special tokens themselves. Tokenizing their text as a prompt would add a second
        beginning-of-sequence token, so this returns tokens rather than text.

        Raises:
            RequestError: The model has no chat template, or it rejects the messages.
        """
        return self.engine.texts.encode(self.chat_text(messages, chat_template_kwargs, tools), special=False).tokens

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Apply the model's chat template to a conversation, up to where the answer begins.

        Args:
            messages: Messages with ``role`` and ``content``.
            chat_template_kwargs: Variables of the template, such as ``{"enable_thinking": False}`` for Qwen3.
            tools: Tools that the model may call, in OpenAI's form, for templates that show them.

        Raises:
            RequestError: The model has no chat template, it rejects the messages, or a variable cannot be set by the
                caller.
        """
        if not self.has_chat_template:
            raise RequestError("this model has no chat template; give a plain prompt instead")
        variables = dict(chat_template_kwargs or {})
        # Parameters of the function itself are not variables of the template.
        own = {"messages", *inspect.signature(self.tokenizer.apply_chat_template).parameters}
        taken = sorted(set(variables) & own)
        if taken:
            raise RequestError(
                f"chat_template_kwargs: {', '.join(taken)} cannot be set here; give variables of the model's template"
            )
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                add_generation_prompt=True,
                chat_template=self.chat_template,
                **variables,
            )
        except Exception as error:  # a template is a program, and may fail as one
            raise RequestError(f"the chat template rejects these messages: {error}") from error
        return str(text)

    def after(self, context: Context | None, prompt: Prompt) -> Prompt:
        """The prompt, or, with a context, the tokens that continue it; a question, if it uses the chat template."""
        if context is None or not isinstance(prompt, str):
            return prompt
        if context.chat:
            return self.context_prompt(context, [{"role": "user", "content": prompt}])
        return self.engine.texts.after(prompt)

    def close(self) -> None:
        """Write cached prefixes to their directory, if there is one (``prefix_dir``); no more calls may follow."""
        self.engine.close()

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template, as :meth:`chat` needs."""
        return bool(self.chat_template or getattr(self.tokenizer, "chat_template", None))

    @property
    def template_source(self) -> str:
        """Source of the chat template, or of all templates if there are several; empty if there is none."""
        template = self.chat_template or getattr(self.tokenizer, "chat_template", None) or ""
        return "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)

    def __repr__(self) -> str:
        """The model, slots, lengths, dtype and device in one line."""
        engine = self.engine
        return (
            f"LLM({engine.model!r}: {engine.spec.architecture}, {engine.config.slots} slots with caches of "
            f"{engine.plan.cache_entries} entries, up to {engine.max_model_len} tokens, "
            f"{engine.plan.weight_formats} on {engine.device})"
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
