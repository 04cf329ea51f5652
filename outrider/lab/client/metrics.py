"""Reads the counters of speculation in the /metrics of vLLM, SGLang, llama.cpp and Outrider."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from outrider.core.packages import needed_by
from outrider.errors import OutriderError

_Samples = Mapping[str, Mapping[str, float]]  # by name, then by the label "position" ("" without one)

# Names by engine, in the order in which they are looked for. The suffix _total of counters is left out.
_PREFIXES: Mapping[str, str] = MappingProxyType(
    {"vllm:": "vLLM", "sglang:": "SGLang", "llamacpp:": "llama.cpp", "outrider_": "Outrider"}
)
_SHARED = ("vllm:spec_decode_num", "llamacpp:spec_decode_num")  # both have the same names
_DRAFTS = (*(f"{each}_drafts" for each in _SHARED), "outrider_drafts", "sglang:spec_verify_calls")
_DRAFT_TOKENS = (*(f"{each}_draft_tokens" for each in _SHARED), "outrider_draft_tokens")
_ACCEPTED = (*(f"{each}_accepted_tokens" for each in _SHARED), "outrider_accepted_tokens")
_BY_POSITION = (*(f"{each}_accepted_tokens_per_pos" for each in _SHARED), "outrider_accepted_by_position")
_OUTPUT = ("vllm:generation_tokens", "sglang:generation_tokens", "llamacpp:tokens_predicted", "outrider_output_tokens")
_ACCEPT_LENGTH = ("sglang:spec_accept_length",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Counters of speculation, since the start of a server or between two scrapes. None: the server lacks it."""

    engine: str  # "" if it is unknown
    drafts: float | None
    draft_tokens: float | None
    accepted_tokens: float | None
    accepted_by_position: tuple[float, ...]  # draft tokens at each position that were accepted; () if unknown
    output_tokens: float | None
    accept_length: float | None  # a gauge of SGLang: output tokens per pass, lately

    @property
    def known(self) -> bool:
        """Whether the server reports speculation at all."""
        return self.drafts is not None or self.draft_tokens is not None or self.accept_length is not None

    @property
    def on(self) -> bool:
        """Whether draft tokens were verified."""
        return bool(self.drafts or self.draft_tokens or (self.accept_length or 0) > 1)

    @property
    def tau(self) -> float | None:
        """Output tokens per pass that had a draft: accepted draft tokens and one more."""
        if self.drafts and self.accepted_tokens is not None:
            return 1 + self.accepted_tokens / self.drafts
        return self.accept_length

    @property
    def acceptance(self) -> float | None:
        """Share of the draft tokens that were accepted."""
        if not self.draft_tokens or self.accepted_tokens is None:
            return None
        return self.accepted_tokens / self.draft_tokens

    @property
    def reach(self) -> tuple[float, ...]:
        """Share of the drafts whose token at each position was accepted; () if unknown."""
        return tuple(count / self.drafts for count in self.accepted_by_position) if self.drafts else ()

    def since(self, before: Speculation) -> Speculation:
        """Return what was counted after another scrape. The gauge stays as it is."""
        positions = zip(
            self.accepted_by_position,
            (*before.accepted_by_position, *[0.0] * len(self.accepted_by_position)),
            strict=False,
        )
        return Speculation(
            engine=self.engine,
            drafts=_less(self.drafts, before.drafts),
            draft_tokens=_less(self.draft_tokens, before.draft_tokens),
            accepted_tokens=_less(self.accepted_tokens, before.accepted_tokens),
            accepted_by_position=tuple(after - earlier for after, earlier in positions),
            output_tokens=_less(self.output_tokens, before.output_tokens),
            accept_length=self.accept_length,
        )


def read_speculation(text: str) -> Speculation:
    """Return the counters of speculation in a text in the Prometheus format.

    Raises:
        OutriderError: the text is in another format, or the parser is not installed.
    """
    samples = _parse(text)
    engine = ""
    for prefix, name in _PREFIXES.items():
        if not engine and any(key.startswith(prefix) for key in samples):
            engine = name
    by_position = next((samples[name] for name in _BY_POSITION if name in samples), {})
    ordered = sorted((int(position), value) for position, value in by_position.items() if position.isdigit())
    return Speculation(
        engine=engine,
        drafts=_sum(samples, _DRAFTS),
        draft_tokens=_sum(samples, _DRAFT_TOKENS),
        accepted_tokens=_sum(samples, _ACCEPTED),
        accepted_by_position=tuple(value for _, value in ordered),
        output_tokens=_sum(samples, _OUTPUT),
        accept_length=_sum(samples, _ACCEPT_LENGTH),
    )


def _parse(text: str) -> _Samples:
    with needed_by("this", "serve"):
        from prometheus_client.parser import text_string_to_metric_families
    samples: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # Servers with several engines have one series for each; they are summed.
                samples[sample.name.removesuffix("_total")][sample.labels.get("position", "")] += sample.value
    except (ValueError, IndexError, KeyError) as error:
        raise OutriderError(f"/metrics is not in the Prometheus text format ({error}); check the URL") from error
    return samples


def _sum(samples: _Samples, names: tuple[str, ...]) -> float | None:
    return next((sum(samples[name].values()) for name in names if name in samples), None)


def _less(after: float | None, before: float | None) -> float | None:
    return None if after is None else after - (before or 0.0)
