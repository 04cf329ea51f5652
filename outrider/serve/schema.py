"""What clients send: OpenAI's requests, and a few fields more. A field that is not known is refused, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from outrider.errors import OutriderError
from outrider.params import SamplingParams

_Token = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    """How a stream ends."""

    include_usage: bool = False
    include_tokens: bool = Field(
        False, description="Extension. Tell of each token whether it was a guess that was kept."
    )


class ResponseFormat(_Strict):
    """What form the text has."""

    type: Literal["text"] = "text"


class Sampling(_Strict):
    """What both kinds of completion take."""

    model: str | None = Field(None, description="The model's name, as /v1/models tells it; left out, there is but one.")
    temperature: float = Field(1.0, ge=0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="Extension. 0 keeps every token.")
    min_p: float = Field(0.0, ge=0, le=1, description="Extension. 0 keeps every token.")
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, description="Extension. 1 is off.")
    logit_bias: dict[str, float] | None = Field(None, max_length=1024, description="By token id; -100 forbids.")
    stop: str | list[str] | None = Field(None, description="Strings that end the completion; at most 16.")
    stop_token_ids: list[_Token] = Field([], max_length=256, description="Extension. Tokens that end the completion.")
    ignore_eos: bool = Field(False, description="Extension. Go on past end-of-text.")
    min_tokens: int = Field(0, ge=0, description="Extension.")
    seed: int | None = Field(None, ge=0, lt=2**63)
    k: int | None = Field(None, ge=0, description="Extension. Guesses a round at most; 0 is plain decoding.")
    priority: int = Field(0, ge=-100, le=100, description="Extension. Lower ones are served first.")
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Whose request it is: what speculation learned serves its own user.")
    metadata: dict[str, str] | None = Field(None, description="Kept by nobody.")
    store: Literal[False] | None = Field(None, description="Nothing is stored.")

    def params(self, *, most: int | None, logprobs: int | None, scope: str) -> SamplingParams:
        """The same for the engine.

        Raises:
            OutriderError: a value is out of range.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > _STOPS:
            raise OutriderError(f"stop holds {len(stops)} strings; use at most {_STOPS}")
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_biases(self.logit_bias),
            max_tokens=most,
            min_tokens=self.min_tokens,
            stop=tuple(stops),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            n=self.n,
            logprobs=logprobs,
            guesses=self.k,
            scope=scope,
            priority=self.priority,
        )


class CompletionRequest(Sampling):
    """`/v1/completions`."""

    prompt: str | list[str] | list[_Token] | list[list[_Token]] = Field(description="Text or tokens, one or several.")
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] = False
    best_of: Literal[1] | None = None
    suffix: None = None

    def prompts(self) -> list[str | list[int]]:
        """One for each completion, before `n`."""
        one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        many: list[Any] = [self.prompt] if one else list(self.prompt)
        return many


class Message(_Strict):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TextPart(_Strict):
    """A part of a turn."""

    type: Literal["text"]
    text: str


class ChatRequest(Sampling):
    """`/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, description="The older name of max_completion_tokens.")
    max_completion_tokens: int | None = Field(None, ge=1, description="Left out: as far as the context goes.")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None

    def most(self) -> int | None:
        """Tokens of the answer."""
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise OutriderError("max_tokens and max_completion_tokens differ; give one of them")
        return self.max_completion_tokens or self.max_tokens

    def wanted(self) -> int | None:
        """Likeliest tokens whose log-probabilities are reported; None: none at all."""
        if self.top_logprobs is not None and not self.logprobs:
            raise OutriderError("top_logprobs needs logprobs true; set it, or leave top_logprobs out")
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(_Strict):
    """`/tokenize`."""

    model: str | None = None
    prompt: str


def _biases(given: dict[str, float] | None) -> dict[int, float]:
    out: dict[int, float] = {}
    for token, bias in (given or {}).items():
        if not token.isdecimal():
            raise OutriderError(f"logit_bias has the key {token!r}; use token ids")
        out[int(token)] = float("-inf") if bias == -100 else bias
    return out


def field_of(location: Any) -> str | None:
    """The field that a validation error is about, as a client spells it."""
    names = [str(part) for part in location if part not in ("body", "query")]
    return ".".join(names) or None


_STOPS = 16
Message.model_rebuild()
