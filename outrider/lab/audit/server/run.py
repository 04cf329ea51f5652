"""Run the audit of a server: the greedy replay, the sampling tests, and the diagnosis."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from rich.console import Console

from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.lab.audit.pair import Pair
from outrider.lab.audit.prompts import Prompt, read_prompts
from outrider.lab.audit.server.client import Completions, has_completions, open_completions
from outrider.lab.audit.server.diagnosis import diagnose, powers
from outrider.lab.audit.server.distribution import CASES, Designer, Sampled, cases_of, judge, level_of, run_case
from outrider.lab.audit.server.hypotheses import hypotheses
from outrider.lab.audit.server.model import Model, Texts, Tokens
from outrider.lab.audit.server.replay import replay
from outrider.lab.audit.server.report import show
from outrider.lab.audit.server.result import DistributionResult, Sampling, ServerAuditResult
from outrider.lab.audit.server.settings import ServerOptions
from outrider.lab.audit.settings import Settings
from outrider.lab.client.server import Server, connect, find_model
from outrider.models.loader.embedded import model_folder
from outrider.runtime.machine import use_threads
from outrider.runtime.progress import stage

_ROOM = 16  # tokens after a prompt, beside those that are replayed
_LIKELY = 64  # likeliest tokens whose logits are compared to measure rounding


def run_server_audit(settings: Settings, options: ServerOptions, *, console: Console | None) -> dict[str, Any]:
    """Test whether the output of a running server is that of a model.

    Args:
        settings: the model and the prompts. k is the draft length of the server, for the diagnosis.
        options: the server, and how to audit it.
        console: where to print results; None: print nothing.

    Returns:
        A JSON document: `passed`, and the sections `replay`, `distribution` and `diagnosis`.

    Raises:
        OutriderError: the audit cannot run. The message says how to fix it.
    """
    cases_of(options.tests)  # raises if a name is wrong
    engine = settings.engine
    use_threads(engine.threads)
    began = perf_counter()
    result = replace(asyncio.run(_audit(settings, options)), seconds=perf_counter() - began)
    if console is not None:
        show(result, console)
    return result.as_dict()


async def _audit(settings: Settings, options: ServerOptions) -> ServerAuditResult:
    assert options.server is not None
    prompts = read_prompts(settings.prompts)
    async with connect(options.server, api_key=options.api_key, timeout=options.timeout) as server:
        name = await find_model(server, options.model)  # before a model is loaded
        chat = options.chat or not await has_completions(server, name)
        audit = _Audit(replace(settings, engine=replace(settings.engine, proposer="none")), options)
        return await audit.run(server, name, _asked(prompts, chat), chat)


@dataclass(frozen=True, slots=True)
class _Audit:
    """One audit. The models are loaded one after another, the server's type first."""

    settings: Settings
    options: ServerOptions

    @property
    def config(self) -> EngineConfig:
        return self.settings.engine

    @property
    def k(self) -> int:
        """Draft tokens per round of the server."""
        return int(self.settings.engine.k)

    async def run(self, server: Server, name: str, prompts: tuple[Prompt, ...], chat: bool) -> ServerAuditResult:
        folder = str(model_folder(self.config.target))
        pair, dtype, rounding = self._load(folder, prompts)
        encoded = list(zip(prompts, pair.prompts, strict=True))
        completions = await open_completions(server, name, *encoded[0], chat=chat, concurrency=self.options.concurrency)
        texts = Texts(pair.tokenizer, pair.vocab)
        with stage("greedy", len(encoded)) as asked:
            completions.on_done = asked.advance
            greedy = await self._greedy(completions, encoded)
        replayed = replay(pair, texts, encoded, greedy, dtype=dtype, rounding=rounding)
        sampling = await self._sample(completions, pair, texts, encoded, rounding)
        return ServerAuditResult(
            settings=self.settings,
            options=self.options,
            model=name,
            abilities=completions.abilities,
            dtype=str(dtype).removeprefix("torch."),
            rounding=rounding,
            replay=replayed,
            sampling=sampling,
            retries=server.retries,
        )

    def _pair(self, folder: str, prompts: Sequence[Prompt], dtype: str) -> Pair:
        config = replace(self.config, target=folder, dtype=dtype)
        with stage("loading models"):
            return Pair(config, prompts, room=self.options.max_tokens + _ROOM)

    def _load(self, folder: str, prompts: tuple[Prompt, ...]) -> tuple[Pair, torch.dtype, float]:
        """Return the model in float32, the type of the server's numbers, and how far rounding moves a logit."""
        pair = self._pair(folder, prompts, self.options.server_dtype)
        dtype = pair.dtype
        if dtype is torch.float32:
            return pair, dtype, self.options.tolerance or 0.0
        logits = [pair.logits(tokens).cpu() for tokens in pair.prompts]
        del pair  # its memory is free before the model is loaded in float32
        pair = self._pair(folder, prompts, "float32")
        if self.options.tolerance is not None:
            return pair, dtype, self.options.tolerance
        gaps = []
        for tokens, rounded in zip(pair.prompts, logits, strict=True):
            exact = pair.logits(tokens).cpu()
            likely = exact.topk(min(_LIKELY, len(exact))).indices
            gap = (rounded - exact)[likely]
            gaps.append((gap - gap.mean()).square().mean())
        return pair, dtype, float(torch.stack(gaps).mean().sqrt())

    async def _greedy(self, completions: Completions, encoded: Sequence[tuple[Prompt, Tokens]]) -> list[Any]:
        params = SamplingParams(temperature=0.0)
        asked = (completions.ask(*each, params, max_tokens=self.options.max_tokens) for each in encoded)
        return list(await asyncio.gather(*asked))

    async def _sample(
        self,
        completions: Completions,
        pair: Pair,
        texts: Texts,
        encoded: Sequence[tuple[Prompt, Tokens]],
        rounding: float,
    ) -> Sampling:
        with stage("planning the tests"):
            draft = self._draft(pair, [prompt for prompt, _ in encoded])
            defects = hypotheses(draft=draft is not None, k=self.k)
            designer = Designer(
                Model(pair),
                draft,
                None if completions.abilities.token_ids else texts,
                encoded,
                defects,
                rounding=rounding,
            )
            plans = [(case, designer.choose(case)) for case in cases_of(self.options.tests)]
        sampled: list[Sampled] = []
        refused: dict[str, str] = {}
        with stage("sampling", self.settings.samples * sum(plan is not None for _, plan in plans)) as asked:
            completions.on_done = asked.advance
            for case, plan in plans:
                if plan is None:
                    continue
                prompt, tree = plan
                seed = self.options.seed * len(CASES) + CASES.index(case)
                if (problem := await completions.refusal(prompt, tree.prompt, case.params)) is not None:
                    refused[case.name] = problem
                    continue
                result = await run_case(
                    completions, case, plan, samples=self.settings.samples, seed=seed, rounding=rounding
                )
                sampled.append(result)
        level = level_of(len(sampled))
        tests = [judge(each, level=level) for each in sampled]
        passed = bool(tests) and all(test.passed for test in tests)
        distribution = DistributionResult(
            passed=passed,
            significance=level,
            tests=tests,
            skipped=[case.name for case, plan in plans if plan is None],
            refused=refused,
            power=powers(sampled, defects, level=level),
        )
        return Sampling(
            distribution=distribution, diagnosis=None if passed else diagnose(sampled, defects, level=level)
        )

    def _draft(self, pair: Pair, prompts: Sequence[Prompt]) -> Model | None:
        if self.options.draft is None:
            return None
        draft = self._pair(str(model_folder(self.options.draft)), prompts, "float32")
        if draft.prompts != pair.prompts:
            raise OutriderError(f"{self.options.draft} has another tokenizer than the target; leave --draft out")
        return Model(draft, vocab=pair.vocab)


def _asked(prompts: tuple[Prompt, ...], chat: bool) -> tuple[Prompt, ...]:
    """Return the prompts as messages, for servers that only chat."""
    if not chat:
        return prompts
    return tuple(({"role": "user", "content": each},) if isinstance(each, str) else each for each in prompts)
