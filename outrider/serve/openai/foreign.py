"""Fields that other servers accept and that have no effect here. Clients of these servers may send them.

A field is listed here if it does not change the text, or if the value that it may have asks for
what this server does in any case. A field that would change the text is honored or an error.
"""

from typing import Annotated, Any

from pydantic import Field

from outrider.serve.openai.base import RequestBody, StrictModel, Unused

Ignored = Annotated[Any, Unused(), Field(description="Accepted and not used.")]
Verbosity = Annotated[Any, Unused(("medium",)), Field(description='Only "medium" is accepted.')]
_Off = Annotated[Any, Unused((False,)), Field(description="Only false is accepted.")]
_Zero = Annotated[Any, Unused((0,)), Field(description="Only 0, which is off, is accepted.")]
_One = Annotated[Any, Unused((1,)), Field(description="Only 1, which is off, is accepted.")]


class OpenAIFields(RequestBody):
    """Fields of any request of OpenAI's API that have no effect."""

    service_tier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    safety_identifier: Ignored = None


class ForeignFields(OpenAIFields):
    """Fields of a completion or a chat completion that have no effect."""

    # OpenAI
    store: Ignored = None
    prediction: Ignored = None  # a hint for speculation, which does not change the text

    # vLLM and SGLang
    request_id: Ignored = None
    use_beam_search: _Off = None
    include_stop_str_in_output: _Off = None
    return_tokens_as_token_ids: _Off = None
    length_penalty: _One = None
    skip_special_tokens: Annotated[Any, Unused((True,)), Field(description="Only true is accepted.")] = None
    spaces_between_special_tokens: Annotated[Any, Unused((True,)), Field(description="Only true is accepted.")] = None

    # llama.cpp and Ollama
    cache_prompt: Ignored = None
    id_slot: Ignored = None
    timings_per_token: Ignored = None
    keep_alive: Ignored = None
    repeat_penalty: Annotated[
        Any, Unused((1,), "use repetition_penalty"), Field(description="Only 1, which is off, is accepted.")
    ] = None
    repeat_last_n: Ignored = None  # belongs to repeat_penalty
    typical_p: _One = None
    typ_p: _One = None
    tfs_z: _One = None
    xtc_probability: _Zero = None
    xtc_threshold: Ignored = None  # belongs to xtc_probability
    dynatemp_range: _Zero = None
    dynatemp_exponent: Ignored = None  # belongs to dynatemp_range
    mirostat: _Zero = None
    mirostat_tau: Ignored = None  # this and the next belong to mirostat
    mirostat_eta: Ignored = None
    dry_multiplier: _Zero = None
    dry_base: Ignored = None  # this and the next three belong to dry_multiplier
    dry_allowed_length: Ignored = None
    dry_penalty_last_n: Ignored = None
    dry_sequence_breakers: Ignored = None
    n_keep: _Zero = None
    n_probs: _Zero = None
    min_keep: _Zero = None


class ForeignChatFields(ForeignFields):
    """Fields of a chat completion that have no effect."""

    modalities: Annotated[Any, Unused((["text"],)), Field(description='Only ["text"] is accepted.')] = None
    verbosity: Verbosity = None
    functions: Annotated[Any, Unused(([],), "use tools"), Field(description="Only [] is accepted.")] = None
    function_call: Annotated[
        Any, Unused(("none", "auto"), "use tool_choice"), Field(description='Only "none" and "auto" are accepted.')
    ] = None
    echo: _Off = None
    best_of: Annotated[Any, Unused((1,), "use n"), Field(description="Only 1 is accepted.")] = None


class ForeignStreamOptions(StrictModel):
    """Options of a stream that have no effect."""

    include_obfuscation: Ignored = None


class ForeignMessageFields(StrictModel):
    """Fields of messages of other servers that no chat template reads."""

    annotations: Ignored = None
    reasoning_details: Ignored = None
    thinking_blocks: Ignored = None
    provider_specific_fields: Ignored = None
    cache_control: Ignored = None
    audio: Annotated[Any, Unused((), "send its transcript as content"), Field(description="Only null is accepted.")] = (
        None
    )
    function_call: Annotated[Any, Unused((), "use tool_calls"), Field(description="Only null is accepted.")] = None
