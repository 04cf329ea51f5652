"""A tokenizer with the interface of transformers, without importing transformers, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class FastTokenizer:
    """Encodes and decodes texts, and renders conversations.

    Attributes that it lacks come from a tokenizer of transformers, which is made on first use.
    Threads may share it, since encoding does not change it.
    """

    def __init__(
        self, backend: Tokenizer, named: Mapping[str, str], chat_template: str | None, make_full: Callable[[], Any]
    ) -> None:
        """Wrap a tokenizer.

        Args:
            named: the named special tokens, such as `{"eos_token": "<|end|>"}`.
            chat_template: the chat template; None: there is none.
            make_full: makes the tokenizer of transformers.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(named)
        self.chat_template = chat_template
        self._make_full = make_full

    @cached_property
    def full(self) -> Any:
        """The tokenizer of transformers."""
        return self._make_full()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in NAMED:
            return self.special_tokens_map.get(name)
        if name.removesuffix("_id") in NAMED:
            token = self.special_tokens_map.get(name.removesuffix("_id"))
            return None if token is None else self.backend_tokenizer.token_to_id(token)
        return getattr(self.full, name)

    def __deepcopy__(self, memo: object) -> FastTokenizer:
        return self  # threads may share it

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True, **options: Any) -> Any:
        if options:
            return self.full(text, add_special_tokens=add_special_tokens, **options)
        if isinstance(text, str):
            return {"input_ids": self.encode(text, add_special_tokens=add_special_tokens)}
        batch = self.backend_tokenizer.encode_batch(list(text), add_special_tokens=add_special_tokens)
        return {"input_ids": [each.ids for each in batch]}

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        """Return the ids of a text. `verbose` is an option of transformers, whose warnings do not exist here."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Return the text of ids. Spaces are not cleaned up: byte-pair encodings keep them."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def batch_decode(self, sequences: Sequence[Sequence[int]], **options: Any) -> list[str]:
        """Return the text of each sequence of ids. The options are those of `decode`."""
        return [self.decode(sequence, **options) for sequence in sequences]

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The added tokens by their ids."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the named and the other special tokens."""
        return [id for id, token in sorted(self.added_tokens_decoder.items()) if token.special]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the tokens of ids, as the vocabulary writes them."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(int(id)) for id in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the ids of tokens; unknown tokens have that of the unknown token, or None."""
        if isinstance(tokens, str):
            id = self.backend_tokenizer.token_to_id(tokens)
            return self.unk_token_id if id is None else id
        return list(map(self.convert_tokens_to_ids, tokens))

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **options: Any,
    ) -> Any:
        """Return a conversation as text or as ids, with the arguments of transformers."""
        messages = (*conversation, *(tools or ()))
        is_plain = not tokenize and not continue_final_message and all(isinstance(each, dict) for each in messages)
        if not is_plain or not self.chat_template or not conversation or "chat_template" in options:
            return self.full.apply_chat_template(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=tokenize,
                **{"chat_template": self.chat_template, **options},
            )
        from outrider.core.chat_template import render

        values = {"documents": None, "add_generation_prompt": add_generation_prompt, **self.special_tokens_map}
        return render(self.chat_template, conversation, tools=tools, **{**values, **options})
