"""A tokenizer that does without ``transformers`` until something is asked that texts and tokens do not need.

Importing ``transformers`` takes a second and more, which is most of the time in which a small model starts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

NO_LIMIT = int(1e30)
"""``model_max_length`` of a tokenizer that does not limit texts."""
_PLAIN = {"return_attention_mask": False, "return_token_type_ids": False}


class LazyTokenizer:
    """Behaves as a ``PreTrainedTokenizerFast``, which is made when one of its other members is used.

    Those that are here need the ``tokenizers`` library alone. They have the names, parameters and results of
    ``transformers``; calls with other parameters, chat templates and everything else go to its tokenizer.

    Args:
        made: The ``tokenizers.Tokenizer``.
        named: Special tokens by name: ``bos_token``, ``eos_token``, ``unk_token``, ``pad_token``.
        chat_template: The chat template, if there is one.
    """

    def __init__(self, made: Any, named: dict[str, str], chat_template: str | None) -> None:
        own = {"_made": made, "_named": named, "_template": chat_template, "_whole": None, "_making": threading.Lock()}
        vars(self).update(own)

    # -- texts and tokens ---------------------------------------------------------------------------------------------

    @property
    def backend_tokenizer(self) -> Any:
        """The ``tokenizers.Tokenizer``."""
        return self._made

    def __call__(self, text: Any, *args: Any, add_special_tokens: bool = True, **settings: Any) -> Any:
        """Tokenize a text; as in ``transformers``."""
        offsets = settings.pop("return_offsets_mapping", False)
        if type(text) is not str or args or settings != _PLAIN:
            own = {"add_special_tokens": add_special_tokens, "return_offsets_mapping": offsets}
            return self.whole()(text, *args, **own, **settings)
        encoded = self._made.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids} | ({"offset_mapping": encoded.offsets} if offsets else {})

    def encode(self, text: Any, *args: Any, add_special_tokens: bool = True, **settings: Any) -> list[int]:
        """The tokens of a text; as in ``transformers``."""
        if type(text) is not str or args or settings:
            tokens: list[int] = self.whole().encode(text, *args, add_special_tokens=add_special_tokens, **settings)
        else:
            tokens = self._made.encode(text, add_special_tokens=add_special_tokens).ids
        return tokens

    def decode(self, tokens: Any, skip_special_tokens: bool = False, **settings: Any) -> Any:
        """The text of tokens; as in ``transformers``."""
        if isinstance(tokens, list) and all(type(each) is int for each in tokens) and not settings:
            return self._made.decode(tokens, skip_special_tokens=skip_special_tokens)
        return self.whole().decode(tokens, skip_special_tokens=skip_special_tokens, **settings)

    # -- the vocabulary -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return int(self._made.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        """All tokens and their numbers."""
        return dict(self._made.get_vocab(with_added_tokens=True))

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Special and other added tokens, by their numbers."""
        return dict(sorted(self._made.get_added_tokens_decoder().items()))

    def get_added_vocab(self) -> dict[str, int]:
        """Special and other added tokens, and their numbers."""
        return {token.content: number for number, token in self.added_tokens_decoder.items()}

    def convert_ids_to_tokens(self, tokens: int | Sequence[int], **settings: Any) -> Any:
        """The tokens with these numbers; as in ``transformers``."""
        if settings:
            return self.whole().convert_ids_to_tokens(tokens, **settings)
        if isinstance(tokens, int):
            return self._made.id_to_token(tokens)
        return [self._made.id_to_token(int(each)) for each in tokens]

    @property
    def chat_template(self) -> Any:
        """The chat template, if there is one."""
        return self._template if self._whole is None else self._whole.chat_template

    # -- everything else ----------------------------------------------------------------------------------------------

    def whole(self) -> Any:
        """The ``PreTrainedTokenizerFast``; made once, whichever thread asks first."""
        with self._making:
            if self._whole is None:
                from transformers import PreTrainedTokenizerFast

                vars(self)["_whole"] = PreTrainedTokenizerFast(
                    tokenizer_object=_Uncopied(self._made),
                    chat_template=self._template,
                    clean_up_tokenization_spaces=False,
                    model_max_length=NO_LIMIT,
                    **self._named,
                )
        return self._whole

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for what may not be there
            raise AttributeError(name)
        named = self._named
        if name in named:
            return named[name]
        if name.removesuffix("_id") in named:
            return self._made.token_to_id(named[name.removesuffix("_id")])
        return getattr(self.whole(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.whole(), name, value)


class _Uncopied:
    """Hands a tokenizer over: ``transformers`` would copy it, which takes as long as building it."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __deepcopy__(self, memo: object) -> Any:
        return self._made
