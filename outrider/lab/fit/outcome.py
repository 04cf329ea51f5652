"""Computes the answer of a fit from the results of its stages: gain and cost of each option, and which one is chosen.

The functions are pure, so that they can be tested on made-up results.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from outrider.core.config import EngineConfig
from outrider.drafting.propose.expression import command_line_form, short
from outrider.lab.common.trial import Choice, label
from outrider.lab.fit.drafts import DraftFigures, draft_figures
from outrider.lab.fit.option import Option, Speed, speeds
from outrider.lab.fit.rules import candidates, ranked
from outrider.lab.tune.candidate import Candidate
from outrider.lab.tune.figures import Case
from outrider.lab.tune.measurement import Measurement
from outrider.runtime.report.console import bytes_text, count_text


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of the finished stages. None: the stage has not run."""

    first: Measurement
    final: Measurement | None
    training: Mapping[str, Any] | None
    certificate: Mapping[str, Any] | None
    prompts: Mapping[str, int]  # number of prompts to train on, and held out
    out: str
    engine: EngineConfig  # of the settings

    @property
    def complete(self) -> bool:
        """Whether the decision is made on held-out prompts."""
        return self.final is not None

    @property
    def speculates(self) -> bool:
        """Whether a proposer is chosen: it pays, and no test of the certificate failed."""
        return self._measured.advice.worth and not self._failed

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """All ways to decode: plain decoding, then the fastest first, then those of the first measurement only."""
        return tuple(self._options())

    @cached_property
    def drafts(self) -> tuple[DraftFigures, ...]:
        """The draft models of the first measurement, the fastest first."""
        return draft_figures(self.first)

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome for JSON."""
        certificate = self.certificate and {
            "passed": self.certificate["passed"],
            "reason": self.certificate.get("reason"),
            "samples": self.certificate.get("distribution", {}).get("samples"),
            "texts": self.certificate.get("replay", {}).get("texts"),
        }
        return {
            "complete": self.complete,
            "prompts": dict(self.prompts),
            "training": self.training and dict(self.training),
            "certificate": certificate,
            "options": list(map(asdict, self.options)),
            "drafts": list(map(asdict, self.drafts)),
            "summary": list(self.sentences()),
        }

    def sentences(self) -> Iterator[str]:
        """Yield sentences that say which option was chosen and why, and how to use it."""
        yield self._choice()
        yield from self._training()
        yield from self._certificate()
        if not self.complete:
            yield "The fit is not finished. This is the best so far; the same command continues."
        if self.drafts:
            yield f"The fastest draft model of the first measurement: {self.drafts[0].command(self.engine)}"
        yield f'Use it: outrider run --config {self.out}/fit.json "..."'

    @property
    def _measured(self) -> Measurement:
        return self.first if self.final is None else self.final

    @property
    def _failed(self) -> bool:
        return self.certificate is not None and self.certificate["passed"] is False

    @property
    def _advised(self) -> Choice:
        advice = self._measured.advice
        return Choice(proposer=advice.proposer, k=advice.k, draft_quantize=advice.draft_quantize)

    def _options(self) -> Iterator[Option]:
        yield Option(
            proposer="none",
            k=0,
            speedup=1.0,
            by_temperature=tuple(
                Speed(temperature=plain.temperature, speedup=1.0, tau=1.0) for plain in self._measured.plain
            ),
            memory_bytes=0,
            held_out=self.complete,
            verdict="the model itself" if self.speculates else "chosen",
        )
        seen = set()
        for candidate in _best(self._measured.cases, self._advised):
            seen.add(candidate.proposer)
            yield self._option(candidate, self._measured, held_out=self.complete)
        if self.final is not None:
            for candidate in ranked(self.first.cases):
                if candidate.proposer not in seen:
                    yield self._option(candidate, self.first, held_out=False)

    def _option(self, candidate: Candidate, measured: Measurement, *, held_out: bool) -> Option:
        memory = measured.memory[candidate.label]
        return Option(
            **asdict(candidate.choice),
            speedup=candidate.overall.value,
            by_temperature=tuple(speeds(candidate, measured.cases)),
            memory_bytes=memory.draft_weight_bytes + memory.draft_cache_bytes,
            held_out=held_out,
            verdict=self._verdict(candidate, held_out=held_out),
        )

    def _verdict(self, candidate: Candidate, *, held_out: bool) -> str:
        if held_out == self.complete and candidate.choice == self._advised:
            return "not exact here: the certificate failed" if self._failed else "chosen"
        if not held_out and self.complete:
            return "first measurement only"
        slower = candidate.loses_at
        if len(slower) == len(candidate.speedups):
            return "slower than plain decoding"
        if slower:
            return f"slower at temperature {_listed([f'{temperature:g}' for temperature in slower])}"
        return "faster than plain decoding" if candidate.worthwhile else "no sure gain"

    def _choice(self) -> str:
        advice = self._measured.advice
        if self._failed:
            return (
                f"Chosen: plain decoding. {short(advice.proposer)} was faster, but a test of its certificate failed;"
                " see outrider audit."
            )
        if not advice.worth:
            several = len(self._measured.plain) > 1
            condition = " without being slower at one of the temperatures" if several else ""
            return f"Chosen: plain decoding. No proposer is significantly faster on {self._where()}{condition}."
        option = next(each for each in self.options if each.verdict == "chosen")
        proposer = label(command_line_form(option.proposer), option.draft_quantize)
        first, *others = option.by_temperature
        more = "".join(f", {speed.interval} at temperature {speed.temperature:g}" for speed in others)
        taus = _listed([f"{speed.tau:.2f}" for speed in option.by_temperature])
        memory = (
            f" It takes {bytes_text(option.memory_bytes)} of memory."
            if option.memory_bytes
            else " It needs no weights."
        )
        return (
            f"Chosen: {proposer} with k {option.k}. On {self._where()} it is {first.interval} times as fast as plain"
            f" decoding at temperature {first.temperature:g}{more}, with {taus} tokens per pass.{memory}"
        )

    def _where(self) -> str:
        """Return the words for the prompts that were measured."""
        if self.final is None:
            return "the first measurement"
        held_out = self.prompts["held_out"]
        full, counts = True, []
        for plain in self.final.plain:
            full = full and plain.batches == held_out // plain.batch
            counts.append(f"{plain.batches * plain.batch} of {held_out} at temperature {plain.temperature:g}")
        return count_text(held_out, "held-out prompt") if full else f"held-out prompts ({_listed(counts)})"

    def _training(self) -> Iterator[str]:
        if self.training is None or not self.training["trained"]:
            reason = self.training and self.training.get("reason")
            if reason:
                yield f"No head was trained: {reason}."
            return
        taus = ", ".join(f"{each['tau']:.2f} at {name}" for name, each in self.training["evaluation"].items())
        yield (
            f"The head of kind {self.training['kind']} has {self.training['parameters'] / 1e6:.1f}M parameters and"
            f" trained for {duration(self.training['minutes'])} ({count_text(self.training['steps'], 'step')}): tau"
            f" {taus}. More minutes train it anew."
        )

    def _certificate(self) -> Iterator[str]:
        if self.certificate is None:
            if self.speculates and self.complete:
                yield "It is not certified."
            return
        if self.certificate["passed"] is None:
            yield f"It is not certified, because the audit could not be made: {self.certificate['reason']}."
            return
        verdict = "passed" if self.certificate["passed"] else "failed"
        replay, distribution = self.certificate["replay"], self.certificate["distribution"]
        yield (
            f"The certificate {verdict}: {replay['texts']} texts compared with plain decoding, and"
            f" {len(distribution['tests'])} distribution tests with {distribution['samples']} samples each."
        )


def duration(minutes: float) -> str:
    """Return a number of minutes in words."""
    return f"{minutes:g} minute" + ("" if minutes == 1 else "s")


def _best(cases: Sequence[Case], chosen: Choice) -> list[Candidate]:
    """Return one candidate per proposer: the chosen one, or the best."""
    taken = [each for each in candidates(cases) if each.choice == chosen]
    return [*taken, *(each for each in ranked(cases) if each.proposer != chosen.proposer)]


def _listed(words: Sequence[str]) -> str:
    """Return words as a list: a, b and c."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
