"""Detokenizes the output of one stream."""

from collections.abc import Callable, Sequence

from outrider.core.text import TextStream
from outrider.core.types import Completion


class StreamText:
    """Detokenizes in the event loop, so that the engine thread does not have to."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        token_text: Callable[[int], str],
        stop: Sequence[str],
        prompt: Sequence[int] = (),
    ) -> None:
        """Decode with a tokenizer that no other thread uses.

        Args:
            decode: returns the text of several tokens.
            token_text: returns the text of a single token.
            stop: stop strings. Text that may be part of one is held back.
            prompt: the tokens before the completion.
        """
        self._token_text = token_text
        self._stream = TextStream(decode, stop, prompt=prompt)
        self._num_returned = 0  # characters that `add_tokens` has returned
        self._added_text = ""  # text of the tokens added last, including text that is held back
        # The same text, decoded token by token. It is slower, so it lags behind until its result is
        # needed.
        self._token_stream = TextStream(decode, prompt=prompt)
        self._token_stream_backlog: list[int] = []

    def add_tokens(self, tokens: Sequence[int], completion: Completion | None) -> str:
        """Add tokens and return the new characters that no later token can change.

        With the completion, return all characters that have not been returned yet.
        """
        length_before = len(self._stream.text)
        for token in tokens:
            self._stream.add_token(token, stoppable=False)  # the engine decides where the completion stops
        decoded = self._stream.text
        self._added_text = decoded[length_before:]
        text = completion.text if completion else decoded[: self._stream.safe_length()]
        new_text = text[self._num_returned :]
        self._num_returned = max(self._num_returned, len(text))
        return new_text

    def token_texts(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Return what each of the tokens added last contributes to the text.

        The last token of a character contributes the whole character.
        """
        single_texts = tuple(map(self._token_text, tokens))
        if "".join(single_texts) == self._added_text:  # the usual case with byte-level tokenizers
            self._token_stream_backlog += tokens
            return single_texts
        for token in self._token_stream_backlog:
            self._token_stream.add_token(token)
        self._token_stream_backlog.clear()
        texts = []
        for token in tokens:
            length_before = len(self._token_stream.text)
            self._token_stream.add_token(token)
            texts.append(self._token_stream.text[length_before:])
        return tuple(texts)
