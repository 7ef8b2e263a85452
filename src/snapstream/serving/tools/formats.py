"""How a model writes reasoning and calls, told by its chat template; and the grammars of answers with calls."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence

from snapstream.config import StructuredOutputs
from snapstream.engine import LLM
from snapstream.engine.requests.grammar import GrammarCompiler, definition
from snapstream.errors import ConfigurationError, RequestError
from snapstream.serving.settings import ServerSettings
from snapstream.serving.tools.base import CallReader, ToolFormat, Tools
from snapstream.serving.tools.deepseek import DeepSeek, DeepSeek31
from snapstream.serving.tools.events import Event, Text
from snapstream.serving.tools.gemma import FunctionGemma, Gemma
from snapstream.serving.tools.gpt_oss import GptOss
from snapstream.serving.tools.grammar import TEXT, GrammarWriter
from snapstream.serving.tools.hermes import Hermes
from snapstream.serving.tools.llama import LlamaJson, Pythonic
from snapstream.serving.tools.mistral import Mistral, MistralNamed
from snapstream.serving.tools.qwen_coder import QwenCoder
from snapstream.serving.tools.reasoning import KNOWN, ReasoningReader, Tags

FORMATS: Sequence[ToolFormat] = (
    GptOss(),
    FunctionGemma(),
    Gemma(),
    MistralNamed(),
    Mistral(),
    DeepSeek(),
    DeepSeek31(),
    QwenCoder(),
    Hermes(),
    Pythonic(),
    LlamaJson(),
)
"""All formats; the first whose marks are in a template is chosen."""


def find_format(name: str, template: str) -> ToolFormat:
    """The format of a name; for ``auto``, that of a chat template, or Hermes' if it shows none.

    Raises:
        ConfigurationError: There is no such format.
    """
    if name != "auto":
        found = next((each for each in FORMATS if each.name == name), None)
        if found is None:
            allowed = ", ".join(("auto", *(each.name for each in FORMATS)))
            raise ConfigurationError(f"unknown tool parser {name!r}; allowed: {allowed}")
        return found
    return next((each for each in FORMATS if _is_shown(each, template)), Hermes())


def _is_shown(form: ToolFormat, template: str) -> bool:
    if isinstance(form, DeepSeek31):  # both have the same block; V3 writes arguments as Markdown
        return DeepSeek31.marks[0] in template and (type(form) is DeepSeek31 or form.marks[0] in template)
    return any(mark in template for mark in form.marks)


def find_tags(template: str, vocabulary: Mapping[str, int]) -> Tags | None:
    """The tags of reasoning that a chat template or a vocabulary shows; ``None`` for a model without any."""

    def is_shown(tags: Tags) -> bool:
        return any(tag in template or tag.strip() in vocabulary for tag in tags)

    return next(filter(is_shown, KNOWN), None)


class AnswerReader:
    """Splits one answer into reasoning, text and calls, as it comes in."""

    def __init__(
        self, reasoning: ReasoningReader | None, calls: CallReader | None, hidden: re.Pattern[str] | None = None
    ) -> None:
        """Create a reader.

        Args:
            reasoning: Splits off the reasoning, if the model has any.
            calls: Splits off calls, if there may be any.
            hidden: Texts that are left out: special tokens that have no meaning here.
        """
        self._reasoning, self._calls, self._hidden = reasoning, calls, hidden

    def feed(self, text: str, *, last: bool = False) -> list[Event]:
        """Take what comes next; ``last`` says that it is the end."""
        events: list[Event] = []
        if self._hidden is not None:  # the text of a token comes in one piece
            text = self._hidden.sub("", text)
        if self._reasoning is not None:
            events, text = self._reasoning.feed(text, last=last)
        if self._calls is not None:
            return events + self._calls.feed(text, last=last)
        return [*events, Text(text)] if text else events


class AnswerFormat:
    """How a model's answers are written, and what they may be.

    Attributes:
        form: The format of calls.
        tags: The tags of reasoning, if the model has any.
    """

    def __init__(
        self, form: ToolFormat, tags: Tags | None, special: Collection[str], grammars: GrammarCompiler
    ) -> None:
        """Describe a model's answers.

        Args:
            form: The format of calls.
            tags: The tags of reasoning.
            special: Texts of the tokenizer's special tokens, which are usually left out of texts.
            grammars: Knows what grammars have to name.
        """
        self.form, self.tags, self._special, self._grammars = form, tags, special, grammars
        known = [each for each in form.marked if each in special]
        self._calls_are_special = bool(known)
        own = {*known, *(tag.strip() for tag in tags or ())}
        others = [re.escape(each) for each in special if each and each not in own]
        self._hidden = re.compile("|".join(others)) if others else None

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends where the model is already reasoning."""
        return self.tags is not None and prompt.rstrip().endswith(self.tags.begin.rstrip())

    def shows_special(self, *, tools: bool) -> bool:
        """Whether the text of an answer must have special tokens, for its parts to be told apart."""
        of_tags = self.tags is not None and any(tag.strip() in self._special for tag in self.tags)
        return of_tags or self.form.always or (tools and self._calls_are_special)

    def reader(self, prompt: str, tools: Tools, *, parallel: bool = True, strict: bool = False) -> AnswerReader:
        """What splits an answer to a prompt.

        Args:
            prompt: The end of the prompt.
            tools: The tools that may be called.
            parallel: Whether there may be several calls; if not, the first one counts.
            strict: Whether a grammar is followed, so that only what it knows as a call is one.
        """
        reasoning = None if self.tags is None else ReasoningReader(self.tags, is_open=self.is_open(prompt))
        hidden = self._hidden if self.shows_special(tools=bool(tools)) else None
        calls = CallReader(self.form, tools, parallel=parallel, strict=strict) if tools or self.form.always else None
        return AnswerReader(reasoning, calls, hidden)

    def must_call(self, prompt: str, tools: Tools, *, parallel: bool) -> StructuredOutputs:
        """The shape of an answer that calls one of the tools, after the reasoning."""
        write = GrammarWriter(self._grammars.special_tokens(), parallel=parallel)
        return StructuredOutputs(
            grammar=write.write(f"{self._thought(prompt, write)} {self.form.must_call(tools, write)}")
        )

    def may_call(
        self, prompt: str, tools: Tools, shape: StructuredOutputs | None = None, *, parallel: bool
    ) -> StructuredOutputs:
        """The shape of any answer in which calls fit the schemas of their tools.

        Args:
            prompt: The end of the prompt.
            tools: The tools.
            shape: What the answer must be if there are no calls; any text by default.
            parallel: Whether there may be several calls.
        """
        write = GrammarWriter(self._grammars.special_tokens(), parallel=parallel)
        if shape is not None:
            calls = write.rule(self.form.must_call(tools, write))
            return self._shaped(prompt, shape, write, f"{calls} | ")
        answer = write.rule(self.form.may_call(tools, write))
        return StructuredOutputs(grammar=write.write(f"{self._thought(prompt, write)} {answer}"))

    def after_reasoning(self, prompt: str, shape: StructuredOutputs) -> StructuredOutputs:
        """A shape for what comes after the reasoning, if the model has any."""
        if self.tags is None and not self.form.always:
            return shape
        return self._shaped(prompt, shape, GrammarWriter(self._grammars.special_tokens(), parallel=False))

    def _shaped(
        self, prompt: str, shape: StructuredOutputs, write: GrammarWriter, instead: str = ""
    ) -> StructuredOutputs:
        """The reasoning, and then what fits a shape, or something ``instead``.

        Raises:
            RequestError: The shape is invalid.
        """
        thought, inner = self._thought(prompt, write), None
        try:
            if shape.kind == "json":
                answer = write.json(json.loads(shape.text))
            elif shape.kind == "choice":
                answer = f"({' | '.join(map(write.literal, json.loads(shape.text)))})"
            else:
                answer, given = "@answer", definition(shape.kind, shape.text)
                (inner,) = json.loads(given)["grammars"] if given.startswith("{") else [{"lark_grammar": given}]
                inner = dict(inner)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RequestError(f"structured outputs: the {shape.kind} is invalid: {str(error)[:300]}") from error
        whole = write.write(f"{thought} ({instead}{self.form.before_text(write)} {answer})")
        if inner is None:
            return StructuredOutputs(grammar=whole)
        grammars = [{"name": "whole", "lark_grammar": whole}, inner | {"name": "answer"}]
        return StructuredOutputs(grammar=json.dumps({"grammars": grammars}))

    def _thought(self, prompt: str, write: GrammarWriter) -> str:
        """The grammar of the reasoning; empty for a model without any."""
        if self.tags is None:
            return ""
        begin, end = self.tags
        if write.is_special(end):
            until = rf"{TEXT} {write.literal(end)} (/\s+/)?"
        else:
            until = rf"{write.text_until(re.escape(end))} (/\s+/)?"
        return until if self.is_open(prompt) else f"({write.literal(begin)} {until})?"


def find_answers(llm: LLM, settings: ServerSettings) -> AnswerFormat:
    """How a model writes its answers.

    Raises:
        ConfigurationError: There is no such tool parser.
    """
    template, tokenizer = llm.template_source, llm.tokenizer
    form = find_format(settings.tool_parser, template)
    tags = find_tags(template, tokenizer.get_added_vocab()) if settings.reasoning_parser == "auto" else None
    special = tokenizer.convert_ids_to_tokens(sorted(llm.engine.special_tokens))
    return AnswerFormat(form, tags, special, llm.engine.grammars)
