"""A tokenizer that does without ``transformers`` until something is asked that texts and tokens do not need.

Importing ``transformers`` takes a second and more, which is most of the time in which a small model starts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

NO_LIMIT = int(1e30)
"""``model_max_length`` of a tokenizer that does not limit texts."""
_PLAIN = {"return_attention_mask": False, "return_token_type_ids": False}


class LazyTokenizer:
    """Stands in for a ``PreTrainedTokenizerFast``, created on first use of anything that is not defined here.

    What is defined here needs only the ``tokenizers`` library, and has the names, parameters and results that
    ``transformers`` has for them. Once there is a full tokenizer, it tokenizes and decodes, too, because
    ``transformers`` leaves settings of a call, such as truncation, in the backend until its own next call.

    Args:
        backend: The ``tokenizers.Tokenizer``. All named tokens are among its added tokens.
        named: Special tokens by name: ``bos_token``, ``eos_token``, ``unk_token``, ``pad_token``.
        chat_template: The chat template, if there is one.
    """

    def __init__(self, backend: Any, named: dict[str, str], chat_template: str | None) -> None:
        # The lock is held while the backend is used from here, since creating the full tokenizer changes it.
        own = {"_backend": backend, "_named": named, "_template": chat_template, "_full": None}
        vars(self).update(own, _lock=threading.RLock())

    # -- texts and tokens ---------------------------------------------------------------------------------------------

    @property
    def backend_tokenizer(self) -> Any:
        """The ``tokenizers.Tokenizer``."""
        return self._backend

    def __call__(self, text: Any, *args: Any, add_special_tokens: bool = True, **settings: Any) -> Any:
        """Tokenize a text; as in ``transformers``."""
        offsets = settings.pop("return_offsets_mapping", False)
        with self._lock:
            if self._full is None and type(text) is str and not args and settings == _PLAIN:
                encoded = self._backend.encode(text, add_special_tokens=add_special_tokens)
                return _Encoding({"input_ids": encoded.ids} | ({"offset_mapping": encoded.offsets} if offsets else {}))
        settings |= {"add_special_tokens": add_special_tokens, "return_offsets_mapping": offsets}
        return self.full_tokenizer()(text, *args, **settings)

    def encode(self, text: Any, *args: Any, add_special_tokens: bool = True, **settings: Any) -> list[int]:
        """The tokens of a text; as in ``transformers``."""
        with self._lock:
            if self._full is None and type(text) is str and not args and not settings:
                tokens: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
                return tokens
        tokens = self.full_tokenizer().encode(text, *args, add_special_tokens=add_special_tokens, **settings)
        return tokens

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **settings: Any) -> Any:
        """The text of tokens; as in ``transformers``."""
        is_plain = isinstance(token_ids, list) and all(type(each) is int for each in token_ids) and not settings
        with self._lock:
            if self._full is None and is_plain:
                return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self.full_tokenizer().decode(token_ids, skip_special_tokens=skip_special_tokens, **settings)

    # -- the vocabulary -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def __bool__(self) -> bool:
        return True

    def get_vocab(self) -> dict[str, int]:
        """All tokens and their numbers."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Special and other added tokens, by their numbers."""
        return dict(sorted(self._backend.get_added_tokens_decoder().items()))

    def get_added_vocab(self) -> dict[str, int]:
        """Special and other added tokens, and their numbers."""
        return {token.content: number for number, token in self.added_tokens_decoder.items()}

    def convert_ids_to_tokens(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> Any:
        """The tokens with these numbers; as in ``transformers``."""
        if skip_special_tokens:
            return self.full_tokenizer().convert_ids_to_tokens(ids, skip_special_tokens=True)
        if isinstance(ids, int):
            return self._backend.id_to_token(ids)
        return [self._backend.id_to_token(int(each)) for each in ids]

    @property
    def chat_template(self) -> Any:
        """The chat template, if there is one."""
        return self._template if self._full is None else self._full.chat_template

    # -- everything else ----------------------------------------------------------------------------------------------

    def full_tokenizer(self) -> Any:
        """The ``PreTrainedTokenizerFast``; created once, whichever thread asks first."""
        with self._lock:
            while self._full is None:
                try:
                    vars(self)["_full"] = self._create()
                except RuntimeError as error:  # another thread uses the backend itself, which is about to be changed
                    if "borrowed" not in str(error):
                        raise
                    time.sleep(0.01)
        return self._full

    def _create(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=_Uncopied(self._backend),
            chat_template=self._template,
            clean_up_tokenization_spaces=False,
            model_max_length=NO_LIMIT,
            **self._named,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # numpy and others probe for protocols, such as __array__
            raise AttributeError(name)
        if self._full is None:
            if name in self._named:
                return self._named[name]
            if name.removesuffix("_id") in self._named:
                return self._backend.token_to_id(self._named[name.removesuffix("_id")])
        return getattr(self.full_tokenizer(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.full_tokenizer(), name, value)

    def __reduce__(self) -> Any:
        if self._full is None:
            return LazyTokenizer, (self._backend, self._named, self._template)
        return _itself, (self._full,)


class _Encoding(dict[str, Any]):
    """Tokens of a text; as a ``BatchEncoding``, it has its keys as attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class _Uncopied:
    """Hands a backend over: ``transformers`` would copy it, which takes as long as building it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: object) -> Any:
        return self._backend


def _itself(tokenizer: Any) -> Any:
    return tokenizer
