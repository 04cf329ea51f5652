"""Request bodies of OpenAI's API with some extensions."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from outrider.core.constraint import Constraint
from outrider.core.params import MAX_DRAFT_LENGTH, InvalidParam, SamplingParams
from outrider.serve.openai.base import RequestBody, StrictModel, described, type_discriminator
from outrider.serve.openai.foreign import ForeignChatFields, ForeignFields, ForeignStreamOptions, Ignored
from outrider.serve.openai.messages import Message
from outrider.serve.stream.request_stream import StreamContent

_Token = Annotated[int, Field(json_schema_extra={"minimum": 0})]  # the codec checks it, which knows the vocabulary
_Texts = Annotated[  # one text or several, each as a string or token ids
    str | list[str] | list[_Token] | list[list[_Token]],
    described("a string, a list of strings, token ids, or a list of lists of token ids"),
]
_Text = str | list[int]
_MAX_STOP_STRINGS = 16
_MAX_STOP_LENGTH = 1000  # characters
_MAX_TOKEN_ID_DIGITS = 18
_UNLIMITED = -1  # the value of max_tokens, as in llama.cpp
_RANDOM_SEED = -1  # as in llama.cpp
# Request fields of the parameters of `SamplingParams` that have another name there.
_FIELD_NAMES: Mapping[str, str] = MappingProxyType({"scope": "user", "constraint": "structured_outputs"})


class StreamOptions(ForeignStreamOptions):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(
        default=False,
        description="Extension of vLLM. With include_usage, each chunk has the usage of its completion so far.",
    )
    include_tokens: bool = Field(
        default=False, description="Extension. Report for each token whether it is an accepted draft token."
    )
    include_drafts: bool = Field(default=False, description="Extension. Report the draft of each round as well.")


class TextFormat(StrictModel):
    """Text without a constraint."""

    type: Literal["text"]


class ObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(StrictModel):
    """A JSON schema. The name is not used."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Accepted for compatibility. A schema is always enforced.")


class SchemaFormat(StrictModel):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("[text]")]
    | Annotated[ObjectFormat, Tag("[json_object]")]
    | Annotated[SchemaFormat, Tag("[json_schema]")],
    type_discriminator("text", "json_object", "json_schema"),
]


class StructuredOutputs(StrictModel):
    """A constraint of the output, in the format of vLLM. Exactly one field must be set."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema.")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="A grammar in the syntax of Lark or GBNF.")

    def constraint(self) -> Constraint:
        """Return the constraint.

        Raises:
            InvalidParam: no field is set, or several are.
            OutriderError: the constraint is invalid.
        """
        factories: dict[str, Callable[[Any], Constraint]] = {
            "json_": Constraint.json_schema,
            "json_object": lambda _: Constraint.json_object(),
            "regex": Constraint.regex,
            "choice": Constraint.choice,
            "grammar": Constraint.grammar,
        }
        given = [name for name in factories if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidParam(
                "structured_outputs",
                f"structured_outputs has {len(given)} fields; give one of json, json_object, regex, choice and grammar",
            )
        (name,) = given
        return factories[name](getattr(self, name))


class EngineFields(RequestBody):
    """Fields of requests of every API that generates text."""

    seed: int | None = Field(None, ge=-1, lt=2**63, description="-1: a random one.")
    priority: int = Field(0, ge=-100, le=100, description="Extension. Lower values are scheduled first.")
    k: int | None = Field(
        None,
        json_schema_extra={"minimum": 0, "maximum": MAX_DRAFT_LENGTH},  # `SamplingParams` checks it
        description="Extension. Most draft tokens per round. 0: plain decoding.",
    )
    proposer: str | None = Field(None, description="Extension. A proposer of /v1/models. Default: the planner chooses.")
    verifier: str | None = Field(None, description="Extension. An exact verifier of /v1/models.")


class SamplingFields(ForeignFields, EngineFields):
    """The fields that completions and chat completions have in common."""

    model: str | None = Field(None, description="Name of the model, as in /v1/models. Optional.")
    temperature: float = Field(1.0, ge=0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, description="Extension. 0 and -1 keep all tokens.")
    min_p: float = Field(0.0, ge=0, le=1, description="Extension. 0 keeps all tokens.")
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, description="Extension. 1 is off.")
    logit_bias: dict[str, float] | None = Field(None, max_length=1024, description="Added to the logits, by token id.")
    stop: Annotated[str | list[str] | None, described("a string, or a list of strings")] = Field(
        None, description="Strings that end the completion; at most 16."
    )
    stop_token_ids: list[_Token] = Field([], max_length=256, description="Extension. Tokens that end the completion.")
    return_token_ids: bool = Field(
        False,
        description="Extension, as in vLLM. Return the ids of prompt and output, and the versions of the weights.",
    )
    ignore_eos: bool = Field(False, description="Extension. Continue after end-of-text.")
    min_tokens: int = Field(0, ge=0, description="Extension. Fewest output tokens.")
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Prefix caching and learned outputs are separate for each user.")
    metadata: dict[str, str] | None = Field(None, description="Accepted and not used.")
    structured_outputs: StructuredOutputs | None = Field(None, description="Extension. A constraint of the output.")

    def stream_content(self) -> StreamContent:
        """Return what the stream must contain."""
        options = self.stream_options or StreamOptions()
        if options.include_drafts:
            return StreamContent.DRAFTS
        if options.include_tokens:
            return StreamContent.ROUNDS
        return StreamContent.TEXT if self.stream else StreamContent.END

    def num_logprobs(self) -> int | None:
        """Return how many likeliest tokens have log-probabilities; None: no log-probabilities."""
        raise NotImplementedError

    def param_name(self, param: str) -> str:
        """Return the request field of a parameter of `SamplingParams`."""
        return _FIELD_NAMES.get(param, param)

    def constraint(self) -> Constraint | None:
        """Return the constraint of the output, or None."""
        return None if self.structured_outputs is None else self.structured_outputs.constraint()

    def params(
        self, *, max_tokens: int | None, logprobs: int | None, scope: str, constraint: Constraint | None
    ) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            InvalidParam: a value is out of range.
        """
        if max_tokens == 0:
            message = f"max_tokens is 0; use at least 1, or {_UNLIMITED} for the rest of the context"
            raise InvalidParam("max_tokens", message)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > _MAX_STOP_STRINGS:
            raise InvalidParam("stop", f"stop has {len(stop)} strings; use at most {_MAX_STOP_STRINGS}")
        if any(len(string) > _MAX_STOP_LENGTH for string in stop):
            raise InvalidParam(
                "stop", f"stop has a string of more than {_MAX_STOP_LENGTH} characters; use shorter strings"
            )
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_parse_logit_bias(self.logit_bias),
            max_tokens=None if max_tokens == _UNLIMITED else max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            seed=None if self.seed == _RANDOM_SEED else self.seed,
            n=self.n,
            logprobs=logprobs,
            k=self.k,
            proposer=self.proposer,
            verifier=self.verifier,
            constraint=constraint,
            scope=scope,
            priority=self.priority,
        )


class CompletionRequest(SamplingFields):
    """The body of `/v1/completions`."""

    prompt: _Texts | None = Field(
        None,
        description="A string, a list of strings, token ids, or a list of token ids. Optional with a source.",
    )
    source: _Texts | None = Field(
        None,
        description="Extension. The input of an encoder-decoder model's encoder, one per prompt, in the same forms.",
    )
    max_tokens: int = Field(16, ge=-1, description="-1: the rest of the context. 0: with echo, no completion.")
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = Field(False, description="Return the prompt before the completion, with its log-probabilities.")
    suffix: str | None = Field(None, description="The text after the completion, for models with tokens for it.")
    best_of: int | None = Field(
        None, ge=1, description="Completions of each prompt. The n likeliest ones are returned."
    )

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def check_echo(self) -> None:
        """Raise InvalidParam if echo, suffix, best_of or max_tokens do not fit the other fields."""
        if self.echo and self.stream:
            raise InvalidParam("echo", "echo needs the whole response; leave stream out, or leave echo out")
        if self.echo and (self.suffix is not None or self.source is not None or self.return_token_ids):
            raise InvalidParam("echo", "echo cannot be combined with suffix, source or return_token_ids; leave it out")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidParam("max_tokens", "max_tokens is 0, which needs echo; use at least 1")
        if self.suffix is not None and not isinstance(self.prompt, str):
            raise InvalidParam("suffix", "suffix needs one prompt that is a text; send the prompt as a string")
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidParam("best_of", f"best_of is {self.best_of} and n is {self.n}; use a best_of of at least n")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise InvalidParam("best_of", "best_of above n needs the whole response; leave stream out")

    def inputs(self) -> list[tuple[_Text | None, _Text | None]]:
        """Return pairs of a prompt and its source, each as text or token ids, or None.

        Raises:
            InvalidParam: there is neither, or their numbers differ.
        """
        prompts = _as_list(self.prompt)
        sources = _as_list(self.source)
        if prompts is None and sources is None:
            raise InvalidParam("prompt", "prompt is missing; give a prompt")
        for name, values in (("prompt", prompts), ("source", sources)):
            if values == []:
                raise InvalidParam(name, f"{name} is an empty list; give at least one {name}")
        prompts = [None] * len(sources or ()) if prompts is None else prompts
        sources = [None] * len(prompts) if sources is None else sources
        if len(prompts) != len(sources):
            message = f"source has {len(sources)} sources for {len(prompts)} prompts; give one per prompt"
            raise InvalidParam("source", message)
        return list(zip(prompts, sources, strict=True))


class Function(StrictModel):
    """A function that the model may call."""

    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="A JSON schema of the arguments. Default: no arguments."
    )
    strict: bool | None = Field(None, description="Accepted for compatibility. A schema is always enforced.")


class Tool(StrictModel):
    """A tool. Only functions are supported."""

    type: Literal["function"]
    function: Function
    cache_control: Ignored = None


class FunctionName(StrictModel):
    """The name of a function."""

    name: str


class NamedTool(StrictModel):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(ForeignChatFields, SamplingFields):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=-1, description="The older name of max_completion_tokens.")
    max_completion_tokens: int | None = Field(
        None, ge=-1, description="Most output tokens. Default, and -1: the rest of the context."
    )
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool | None = Field(
        None, description="Whether one response may have several calls. Default: true."
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="Extension, as in vLLM. Whether the prompt ends with the beginning of an answer. Default: true,"
        " except with continue_final_message.",
    )
    continue_final_message: bool = Field(
        False, description="Extension, as in vLLM. Continue the last message, which is the assistant's."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Extension, as in vLLM. Variables of the chat template, which must read them."
    )
    enable_thinking: bool | None = Field(None, description="Extension. Whether the model may reason.")
    reasoning_effort: str | None = Field(
        None, description='For chat templates that read it. "none": as enable_thinking false.'
    )

    def param_name(self, param: str) -> str:
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.structured_outputs is None:
            names["constraint"] = "tools" if self.tools else "response_format"
        return names.get(param) or super().param_name(param)

    def constraint(self) -> Constraint | None:
        """Return the constraint of `response_format` or `structured_outputs`, or None. Tools are not included."""
        response_format = self.response_format
        structured_outputs = super().constraint()
        if response_format is None or isinstance(response_format, TextFormat):
            return structured_outputs
        if structured_outputs:
            raise InvalidParam(
                "response_format", "response_format and structured_outputs both constrain the output; give one of them"
            )
        if isinstance(response_format, ObjectFormat) or response_format.json_schema.schema_ is None:
            return Constraint.json_object()
        return Constraint.json_schema(response_format.json_schema.schema_)

    def max_output_tokens(self) -> int | None:
        """Return the most output tokens; None: the rest of the context."""
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise InvalidParam("max_completion_tokens", "max_tokens and max_completion_tokens differ; give one of them")
        return given.pop() if given else None

    def check_continuation(self) -> None:
        """Raise InvalidParam if the last message cannot be continued as `continue_final_message` asks."""
        if not self.continue_final_message:
            return
        last = self.messages[-1]
        if self.add_generation_prompt:
            raise InvalidParam(
                "add_generation_prompt",
                "add_generation_prompt begins a new answer and continue_final_message continues one; set one of them",
            )
        if last.role != "assistant" or last.tool_calls or not last.text().strip():
            raise InvalidParam(
                "continue_final_message",
                "continue_final_message needs a last message of the assistant with a text and"
                " without tool_calls; add one, or leave continue_final_message out",
            )

    def num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParam("top_logprobs", "top_logprobs needs logprobs true; set it, or remove top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(RequestBody):
    """The body of `/tokenize`."""

    model: str | None = None
    prompt: str


class DetokenizeRequest(RequestBody):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[_Token]


def _as_list(texts: _Texts | None) -> list[_Text | None] | None:
    """Return texts as a list. A single one is a string or a list of token ids."""
    if texts is None:
        return None
    is_single = isinstance(texts, str) or (texts and isinstance(texts[0], int))
    many: list[Any] = [texts] if is_single else list(texts)
    return many


def _parse_logit_bias(logit_bias: dict[str, float] | None) -> dict[int, float]:
    """Return the biases by token id. A bias of -100 forbids a token, as in OpenAI's API."""
    biases: dict[int, float] = {}
    for token, bias in (logit_bias or {}).items():
        if not token.isdecimal() or len(token) > _MAX_TOKEN_ID_DIGITS:
            key = token[:_MAX_TOKEN_ID_DIGITS]
            raise InvalidParam("logit_bias", f"logit_bias has the key {key!r}; use token ids")
        if not -100 <= bias <= 100:
            raise InvalidParam("logit_bias", f"logit_bias.{token}: use a number from -100 (never) to 100")
        biases[int(token)] = float("-inf") if bias == -100 else bias
    return biases


def field_of(error: Mapping[str, Any]) -> str | None:
    """Return the field of a validation error in the names of the API; None: the whole body."""
    location = (*error["loc"], *error.get("ctx", {}).get("path", ()))
    names = [str(part) for part in location if part not in ("body", "query", "path")]
    # Skip the name of a union member, which clients do not know.
    return ".".join(name for name in names if name not in ("str", "int", "float") and "[" not in name) or None
