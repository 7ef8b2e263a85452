"""Grammars of structured outputs: compiled within limits, and followed token by token.

The work is llguidance's. Whatever a client sends, compiling takes a second or two at most, and a mask some
milliseconds, because sizes and steps are limited. A grammar that exceeds a limit is refused, or ends its own request.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from snapstream.config import StructuredOutputs
from snapstream.engine.requests.tokenizing import give_memory_back
from snapstream.errors import RequestError, missing_extra
from snapstream.kernels.sampling import mask_words

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_CHARACTERS = 2**17
"""Maximum length of a schema or a grammar."""
MOST_SYMBOLS, MOST_STATES = 50_000, 25_000
"""Limits of a grammar's size, and on the states of its lexer, which take 1 to 2 KiB each."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Whitespace between JSON tokens. Without a limit, small models write nothing else at times."""
KEPT = 32
"""Compiled grammars that are kept for further requests."""
STACK = 512 * 2**20
"""Stack for constructing a grammar, of which only what is needed takes memory; enough for any of this length."""
T = TypeVar("T")
_starting = threading.Lock()


class GrammarCompiler:
    """Compiles grammars for one model; may be used from several threads.

    Args:
        tokenizer: The model's tokenizer.
        vocab_size: Number of the model's logits.
        ends: Tokens that end an output.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, sorted(ends)
        # A compilation may take seconds; who finds what is compiled does not wait for it.
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._special: Mapping[str, int] | None = None
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def start(self, wanted: StructuredOutputs, ends: Iterable[int] = ()) -> OutputGrammar:
        """Begin an output; the grammar is compiled unless :meth:`compile` was called.

        Args:
            wanted: The shape.
            ends: Tokens that end this output, besides the model's.

        Raises:
            RequestError: It cannot be used; the message says why.
        """
        return OutputGrammar(self.compile(wanted).deep_copy(), self._vocab_size, {*self._ends, *ends})

    def compile(self, wanted: StructuredOutputs) -> LLMatcher:
        """Compile a grammar, or find it among the last ones.

        Raises:
            RequestError: It cannot be used; the message says why.
        """
        kind, text = wanted.kind, wanted.text
        if len(text) > MOST_CHARACTERS:
            raise RequestError(f"the {_NAMES[kind]} has {len(text)} characters; at most {MOST_CHARACTERS}")
        known = self._find(kind, text)
        if known is None:
            with self._compiling:  # one at a time, so that they never take more than one core
                known = self._find(kind, text) or self._make(kind, text)
                with self._lock:
                    self._compiled[kind, text] = known
                    while len(self._compiled) > KEPT:
                        self._compiled.popitem(last=False)
        return known

    def _find(self, kind: str, text: str) -> LLMatcher | None:
        """A compiled grammar, unless outputs have brought what they share to its limits."""
        with self._lock:
            known = self._compiled.get((kind, text))
            if known is not None:
                self._compiled.move_to_end((kind, text))
                copy = known.deep_copy()
                copy.compute_bitmask()
                if copy.is_error():
                    del self._compiled[kind, text]
                    return None
            return known

    def special_tokens(self) -> Mapping[str, int]:
        """Tokens that no text in a grammar stands for, by their text; a grammar names them by their number.

        Raises:
            RequestError: Grammars are not possible.
        """
        if self._special is None:
            with self._compiling:
                vocabulary = self._vocabulary or self._read_vocabulary()
                added = self._tokenizer.added_tokens_decoder
                self._special = {token.content: at for at, token in added.items() if vocabulary.is_special_token(at)}
        return self._special

    def _make(self, kind: str, text: str) -> LLMatcher:
        vocabulary = self._vocabulary or self._read_vocabulary()
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise _missing() from None
        try:
            grammar = definition(kind, text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the {_NAMES[kind]} is invalid: {_brief(str(error))}") from error
        limits = LLParserLimits(max_grammar_size=MOST_SYMBOLS, max_lexer_states=MOST_STATES, verbose_errors=False)

        def construct() -> LLMatcher:
            made = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
            if not made.is_error():
                made.compute_bitmask()  # finds rows that are too long, and warms what copies share
            return made

        try:
            matcher = _on_a_deep_stack(construct)
        except Exception as error:  # text that is no text, for one
            raise RequestError(f"the {_NAMES[kind]} is invalid: {_brief(str(error))}") from error
        if matcher.is_error():
            raise RequestError(f"the {_NAMES[kind]} cannot be used: {_brief(matcher.get_error())}")
        return matcher

    def _read_vocabulary(self) -> LLTokenizer:
        """Read the vocabulary, which takes some seconds for a large one."""
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise _missing() from None
        size = max(self._vocab_size, len(self._tokenizer))
        try:
            backend = copy.copy(self._tokenizer.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            ends = self._ends or self._tokenizer.eos_token_id
            self._vocabulary = LLTokenizer(backend.to_str(), n_vocab=size, eos_token=ends)
        except Exception as error:  # the library raises several kinds
            raise RequestError(f"structured outputs are not possible with this model's tokenizer: {error}") from error
        give_memory_back()  # the tokenizer has been a text of its own size in between
        return self._vocabulary


class OutputGrammar:
    """Where one output is in its grammar.

    Attributes:
        forced: Tokens that come next, because the grammar allows no other text.
        finished: Whether the output is complete.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: Iterable[int]) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._ends = _bits(ends, vocab_size)
        self.finished = False
        self.forced: list[int] = self._next_forced()

    def accept(self, token: int) -> None:
        """Take the next token of the output.

        Raises:
            RequestError: The grammar has exceeded its limits, or does not allow the token.
        """
        if self.forced and self.forced[0] == token:
            self.forced.pop(0)
        else:
            self.forced = []
        if not self._matcher.consume_token(token):
            raise RequestError(f"the grammar cannot be followed further: {_brief(self._matcher.get_error())}")
        self.finished = self._matcher.is_stopped()
        if not self.forced and not self.finished:
            self.forced = self._next_forced()

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the grammar allows next."""
        return int(self._matcher.validate_tokens(list(tokens))) if tokens else 0

    def masks(self, following: Sequence[int], most: int, *, early: int) -> Tensor:
        """The tokens that are allowed next, and after each of some tokens that may follow.

        Args:
            following: Tokens that are allowed to follow.
            most: How many masks are needed; the last ones.
            early: How many places, from the first, may not end the output unless nothing else is allowed.

        Returns:
            One bit per token, int32 ``[most, words]``; all of them where the grammar has failed, which
            :meth:`accept` says.
        """
        places = range(len(following) + 1 - most, len(following) + 1)
        rows = torch.full((most, len(self._ends)), -1, dtype=torch.int32)
        taken = 0
        for row, place in zip(rows, places, strict=True):
            taken += self._matcher.try_consume_tokens(list(following[taken:place]))
            if taken < place or self._matcher.is_stopped():
                break
            self._write(row, may_end=place >= early)
        if taken and not self._matcher.is_error():
            self._matcher.rollback(taken)
        return rows

    def _write(self, row: Tensor, *, may_end: bool) -> None:
        mask = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)
        if not self._matcher.is_error():
            row.copy_(mask[: len(row)])
            if self._vocab_size % 32:
                row[-1] &= (1 << self._vocab_size % 32) - 1
            if not may_end and bool((row & ~self._ends).any()):
                row &= ~self._ends

    def _next_forced(self) -> list[int]:
        tokens = list(self._matcher.compute_ff_tokens())
        is_known = all(token < self._vocab_size for token in tokens) and self.valid(tokens) == len(tokens)
        return tokens if is_known else []


_NAMES = {"json": "JSON schema", "regex": "regular expression", "choice": "list of choices", "grammar": "grammar"}


def definition(kind: str, text: str) -> str:
    """A grammar in the library's form."""
    from llguidance import LLMatcher, grammar_from

    if kind == "grammar" and text.startswith('{"grammars":'):
        return text
    if kind == "json":
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise ValueError("it must be an object")
        written = json.dumps(prepared(schema), allow_nan=False)
        return str(LLMatcher.grammar_from_json_schema(written))
    if kind == "choice":
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(text)))))
    return str(grammar_from("grammar" if kind == "grammar" else "regex", text))


_EXCLUDING = re.compile(r'(?<!\\)\[\^(?=[^\]]*["\\])')
"""The beginning of a class that excludes quotes or backslashes. llguidance (1.9) lets their escaped forms through,
unless the class excludes control characters, too."""
_COMBINING = frozenset(("anyOf", "oneOf", "$ref", "if", "dependentSchemas"))
_SCHEMAS = ("items", "additionalProperties", "contains")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "prefixItems")
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_OPEN = frozenset(("additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties"))


def prepared(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema for the library, with its options; see :func:`closed`, :data:`WHITESPACE` and :data:`_EXCLUDING`."""
    made = closed(schema)
    for part in _parts(made):
        if isinstance(part.get("pattern"), str):
            part["pattern"] = _EXCLUDING.sub(r"[^\\x00-\\x1f", part["pattern"])
    return made | {"x-guidance": {"whitespace_pattern": WHITESPACE}}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy of a schema whose objects have no other properties than those that it names, unless it says that they may.

    A schema allows others by default, and small models then find no end. It is left alone if several of its parts
    describe the same object.
    """
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    parts = list(_parts(copy))
    if not any("allOf" in part or ("properties" in part and not _COMBINING.isdisjoint(part)) for part in parts):
        for part in parts:
            if "properties" in part and _OPEN.isdisjoint(part):
                part["additionalProperties"] = False
    return copy


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all schemas in it."""
    if not isinstance(schema, dict):
        return
    inner = [schema.get(name) for name in _SCHEMAS]
    for name in _LISTS_OF_SCHEMAS:
        inner += each if isinstance(each := schema.get(name), list) else ()
    for name in _MAPS_OF_SCHEMAS:
        inner += each.values() if isinstance(each := schema.get(name), dict) else ()
    yield schema
    for part in inner:
        yield from _parts(part)


def _on_a_deep_stack(work: Callable[[], T]) -> T:
    """Run something in a thread with a deep stack: constructing a grammar recurses as deep as its rules are nested."""
    results, errors = list[T](), list[Exception]()

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    with _starting:
        usual = threading.stack_size(STACK)
        try:
            thread = threading.Thread(target=run, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _missing() -> RequestError:
    return RequestError(str(missing_extra("structured outputs need llguidance", "structured")))


def _bits(tokens: Iterable[int], vocab_size: int) -> Tensor:
    """A mask of these tokens."""
    flat = torch.zeros(mask_words(vocab_size) * 4, 8, dtype=torch.uint8)
    for token in tokens:
        if token < vocab_size:
            flat[token // 8, token % 8] = 1 << token % 8
    return flat.sum(1, dtype=torch.uint8).view(torch.int32)


def _brief(message: str) -> str:
    """The first line of an error, which may quote what a client has sent."""
    line = next(iter(message.strip().splitlines()), "unknown")
    return line if len(line) <= 300 else f"{line[:299]}…"
