"""From the results of the stages to an answer: what each option brings and costs, which one is chosen, and why.

Pure functions of the results, so that tests can make them up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from outrider.fit.rules import ranked
from outrider.propose.expression import command_line_form, short
from outrider.report.console import count_text
from outrider.tune.advice import WORTHWHILE

PLAIN = "plain decoding"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to decode, with its best draft length."""

    proposer: str  # an expression; "none" for plain decoding
    k: int | str
    speedup: float  # over plain decoding, from the prompts to the last token
    low: float | None  # of the 95% interval
    high: float | None
    tau: float
    memory_bytes: int  # weights and KV cache of the draft
    held_out: bool  # measured on the held-out prompts; otherwise only in the first measurement
    verdict: str

    @property
    def name(self) -> str:
        """What people read."""
        return PLAIN if self.proposer == "none" else f"{short(self.proposer)}, k {self.k}"

    @property
    def interval(self) -> str:
        """The speedup and its interval."""
        if self.low is None or self.high is None:
            return f"{self.speedup:.2f}"
        return f"{self.speedup:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of the finished stages. None: the stage has not run."""

    first: Mapping[str, Any]  # document of the first measurement
    final: Mapping[str, Any] | None  # document of the second measurement
    training: Mapping[str, Any] | None
    certificate: Mapping[str, Any] | None
    prompts: Mapping[str, int]  # number of prompts to train on, and held out
    out: str

    @property
    def complete(self) -> bool:
        """Whether the decision is made on held-out prompts."""
        return self.final is not None

    @property
    def speculates(self) -> bool:
        """Whether a proposer is chosen: it pays, and no test of the certificate failed."""
        return bool(self._measured["advice"]["speculate"]) and not self._failed

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """All ways to decode: plain decoding, then the fastest first, then those of the first measurement only."""
        return tuple(self._options())

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
            "options": [asdict(option) for option in self.options],
            "summary": list(self.sentences()),
        }

    def sentences(self) -> Iterator[str]:
        """Say which option was chosen and why, and how to use it."""
        yield self._choice()
        yield from self._training()
        yield from self._certificate()
        if not self.complete:
            yield "The fit is not finished. This is the best so far; the same command continues."
        yield f'Use it: outrider run --config {self.out}/fit.json "..."'

    @property
    def _measured(self) -> Mapping[str, Any]:
        return self.first if self.final is None else self.final

    @property
    def _failed(self) -> bool:
        return self.certificate is not None and self.certificate["passed"] is False

    def _options(self) -> Iterator[Option]:
        verdict = "the model itself" if self.speculates else "chosen"
        yield Option(
            proposer="none",
            k=0,
            speedup=1.0,
            low=None,
            high=None,
            tau=1.0,
            memory_bytes=0,
            held_out=self.complete,
            verdict=verdict,
        )
        advice = self._measured["advice"]
        chosen = (advice["proposer"], advice["k"])
        seen = set()
        for case in _best_cases(self._measured, chosen):
            seen.add(case["proposer"])
            yield self._option(case, self._measured, held_out=self.complete)
        if self.final is not None:
            for case in ranked(self.first["cases"]):
                if case["proposer"] not in seen:
                    yield self._option(case, self.first, held_out=False)

    def _option(self, case: Mapping[str, Any], document: Mapping[str, Any], *, held_out: bool) -> Option:
        memory = document["memory"][case["proposer"]]
        overall = case["overall"]
        return Option(
            proposer=case["proposer"],
            k=case["k"],
            speedup=overall["value"],
            low=overall["low"],
            high=overall["high"],
            tau=case["total"]["tau"],
            memory_bytes=memory["draft_weight_bytes"] + memory["draft_cache_bytes"],
            held_out=held_out,
            verdict=self._verdict(case, held_out=held_out),
        )

    def _verdict(self, case: Mapping[str, Any], *, held_out: bool) -> str:
        advice = self._measured["advice"]
        value, low = case["overall"]["value"], case["overall"]["low"]
        if held_out == self.complete and (case["proposer"], case["k"]) == (advice["proposer"], advice["k"]):
            return "not exact here: the certificate failed" if self._failed else "chosen"
        if not held_out and self.complete:
            return "first measurement only"
        if value < 1:
            return "slower than plain decoding"
        if value < WORTHWHILE or (low is not None and low <= 1):
            return "no sure gain"
        return "faster than plain decoding"

    def _choice(self) -> str:
        advice = self._measured["advice"]
        if self._failed:
            return (
                f"Chosen: plain decoding. {short(advice['proposer'])} was faster, but a test of its certificate failed;"
                " see outrider audit."
            )
        if not advice["speculate"]:
            return "Chosen: plain decoding. No proposer is surely faster on these prompts."
        option = next(each for each in self.options if each.verdict == "chosen")
        held_out = count_text(self.prompts["held_out"], "held-out prompt")
        where = held_out if self.complete else "the first measurement"
        memory = f" It takes {size(option.memory_bytes)} of memory." if option.memory_bytes else " It needs no weights."
        return (
            f"Chosen: {command_line_form(option.proposer)} with k {option.k}. On {where} it is {option.interval} times"
            f" as fast as plain decoding, with {option.tau:.2f} tokens per pass.{memory}"
        )

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
            f" {taus}. More minutes continue its training."
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


def size(count: int) -> str:
    """Return a number of bytes in words."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _best_cases(document: Mapping[str, Any], chosen: tuple[str, int | str]) -> list[Mapping[str, Any]]:
    """Return one case per proposer: the chosen one, or the fastest."""
    cases = document["cases"]
    taken = [case for case in cases if (case["proposer"], case["k"]) == chosen]
    others = [case for case in ranked(cases) if case["proposer"] != chosen[0]]
    return [*taken, *others]
