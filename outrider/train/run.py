"""The verb `train`: answers, steps, measurements, and what is written about them."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from outrider import machine
from outrider.build import House, build
from outrider.errors import OutriderError
from outrider.heads.follower import Follower
from outrider.heads.independent import Independent
from outrider.heads.store import make_module, write_head
from outrider.noise import mix_int
from outrider.params import AUTO, SamplingParams
from outrider.prompts import Prompt
from outrider.proposers import find_proposer
from outrider.target import Lender
from outrider.train.answers import Recorder, Sample, written
from outrider.train.batches import Reader, frequent, parts, shares
from outrider.train.kinds import Shape, describe
from outrider.train.log import Log
from outrider.train.losses import parse
from outrider.train.measure import Gauge
from outrider.train.prompts import read_prompts, split
from outrider.train.settings import Settings
from outrider.train.trainer import Sums, Trainer, meet, rank, read_state
from outrider.types import Request

_CHUNK = 1024  # tokens of prompts read in a round


class Training:
    """One run, from wherever the last one was stopped."""

    def __init__(self, kind: str, settings: Settings) -> None:
        """Load everything.

        Raises:
            OutriderError: the data, the target or the options do not allow it; the message says how they would.
        """
        self._began, self._settings, self._kind = perf_counter(), settings, kind
        self._out = Path(settings.out).expanduser()
        machine.use_threads(settings.threads)
        losses = parse(settings.loss)
        texts, self._held = split(
            read_prompts(settings.data, limit=settings.limit), settings.held_out, seed=settings.seed
        )
        self._recorder: Recorder | None = None
        self._house = self._build()
        self._state = self._found()
        meet(self._house.device)
        own = [prompt for i, prompt in enumerate(texts) if i % rank()[1] == rank()[0]]
        self._prompts = [self._read(prompt) for prompt in own]
        each = settings.batch * settings.waves
        self._waves = max(len(texts) // rank()[1] // each, 1)  # of an epoch, as many for each process
        torch.manual_seed(settings.seed)
        self._module, self._reader = self._make()
        self._trainer = Trainer(self._module, losses=losses, steps=settings.steps, decay=settings.decay, lr=settings.lr)
        self._wave = 0
        if self._state:
            self._trainer.load(self._state)
            self._wave = self._state["wave"]
        self._gauge = Gauge(
            self._house, [self._read(prompt) for prompt in self._held], k=settings.k, tokens=128, seed=settings.seed
        )

    def run(self, progress: Console) -> dict[str, Any]:
        """Train to the end.

        Returns:
            What came of it, fit for JSON.
        """
        settings, total = self._settings, self._waves * self._settings.epochs
        log = Log(self._out, begin=self._wave, events=settings.tensorboard) if not rank()[0] else None
        figures: dict[str, Any] = {}
        with _bar(progress) as bar:
            task = bar.add_task("training", total=total, completed=self._wave, told="")
            while self._wave < total:
                sums = self._run_wave(total)
                self._wave += 1
                last = self._wave == total
                if last or (settings.check_every and self._wave % settings.check_every == 0):
                    figures = self._gauge.measure(self._module)
                if log:
                    log.add(self._wave, sums, figures, tokens=int(sum(each.columns for each in sums)))
                    self._save(figures)
                bar.update(task, advance=1, told=_told(sums, figures))
        if log:
            log.close()
        return self._document(figures or self._gauge.measure(self._module))

    def _run_wave(self, total: int) -> list[Sums]:
        settings = self._settings
        samples = list(self._answers(self._wave))
        random.Random(mix_int(settings.seed, self._wave)).shuffle(samples)
        out = []
        for i, some in enumerate(shares(len(samples), settings.waves)):
            grouped = parts([samples[at] for at in some], settings.part)
            texts = [self._reader.read(part, everything=settings.everything) for part in grouped]
            out.append(self._trainer.train(texts, progress=(self._wave + i / settings.waves) / total))
        return out

    def _answers(self, wave: int) -> Iterator[Sample]:
        """Texts of one wave; which prompts they answer, and how, depends on nothing that came before."""
        settings, assigned = self._settings, self._settings.batch * self._settings.waves
        epoch, place = divmod(wave, self._waves)
        order = random.Random(mix_int(settings.seed, epoch)).sample(range(len(self._prompts)), len(self._prompts))
        chosen = order[place * assigned : (place + 1) * assigned]
        params = SamplingParams(
            temperature=settings.temperature, max_tokens=settings.answer_tokens, ignore_eos=settings.go_on
        )
        house, most = self._house, settings.answer_tokens
        requests = []
        for i in chosen:
            prompt = self._prompts[i][: house.context - 1]
            limit = min(most, house.context - len(prompt))
            ends = frozenset[int]() if settings.go_on else house.end_ids
            seed = mix_int(mix_int(settings.seed, epoch), i)
            requests.append(Request(id=i, prompt=prompt, params=params, seed=seed, end_ids=ends, limit=limit))
        assert self._recorder is not None
        with torch.inference_mode():
            yield from written(house.engine, self._recorder, requests)

    def _build(self) -> House:
        settings = self._settings
        layers: list[int] = []

        def maker(setup: Any) -> Recorder:
            if not isinstance(setup.target, Lender):
                raise OutriderError("this target shows no states; drafts are trained on attention models")
            shape = self._shape(setup.target, setup.vocab)
            layers.extend(sorted({*describe(self._kind, shape).taps.layers, setup.target.layers - 1}))
            self._recorder = Recorder(find_proposer(settings.proposer, setup), layers)
            self._layers = layers
            return self._recorder

        return build(
            settings.target,
            proposer=maker,
            k=AUTO,
            verifier="walk",
            dtype="auto",
            kernels="auto",
            quantize=None,
            device=settings.device,
            rows=settings.rows,
            context=None,
            chunk=_CHUNK,
            planner=None,
        )

    def _shape(self, target: Any, vocab: int) -> Shape:
        settings, tables = self._settings, target.lend()
        if settings.draft_vocab > vocab:
            raise OutriderError(f"draft-vocab is {settings.draft_vocab}, and the target has {vocab} tokens; use fewer")
        return Shape(
            hidden=tables.head.shape[1],
            layers=target.layers,
            vocab=vocab,
            epsilon=tables.epsilon,
            draft_vocab=settings.draft_vocab % vocab,
            depth=settings.depth,
            ffn=settings.ffn,
        )

    def _make(self) -> tuple[Follower | Independent, Reader]:
        target = self._house.target
        assert isinstance(target, Lender)
        tables = target.lend()
        description = describe(self._kind, self._shape(target, self._house.vocab))
        module = make_module(description).to(self._house.device)
        if description.draft_vocab:
            if self._state is None:  # what is guessed is settled by the first answers
                first = list(self._answers(0))
                module.ids.copy_(frequent(first, description.vocab, description.draft_vocab))
            else:
                module.ids.copy_(self._state["module"]["ids"])
        module.lend(tables.embedding.float(), tables.head.float())
        if isinstance(module, Follower) and description.own_head:
            with torch.no_grad():
                module.head.weight.copy_(tables.head[module.ids])
        return module, Reader(description.taps, self._layers, tables, module.ids)

    def _read(self, prompt: Prompt) -> tuple[int, ...]:
        house = self._house
        if prompt.messages is not None:
            chat = house.tokenizer.apply_chat_template(
                list(prompt.messages), add_generation_prompt=True, return_dict=True
            )
            return tuple(chat["input_ids"])[: house.context // 2]
        return tuple(house.tokenizer.encode(prompt.prompt))[: house.context // 2]

    def _found(self) -> dict[str, Any] | None:
        state = None if self._settings.restart else read_state(self._out)
        if state and state["identity"] != self._identity():
            raise OutriderError(
                f"{self._out} holds a training with other options; use another --out, or --restart to begin anew"
            )
        return state

    def _identity(self) -> str:
        return json.dumps({"kind": self._kind, **self._settings.identity(), "data": self._hashes()}, sort_keys=True)

    def _hashes(self) -> dict[str, str]:
        files = [*self._settings.data, *([self._settings.held_out] if self._settings.held_out else [])]
        return {Path(file).name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files}

    def _save(self, figures: dict[str, Any]) -> None:
        self._trainer.save(self._out, wave=self._wave, identity=self._identity())
        write_head(self._out, self._module, dtype=torch.bfloat16)
        facts = {**self._document(figures), "arguments": asdict(self._settings), "data": self._hashes()}
        (self._out / "training.json").write_text(json.dumps(facts, indent=2, default=str) + "\n", "utf-8")

    def _document(self, figures: dict[str, Any]) -> dict[str, Any]:
        settings, house = self._settings, self._house
        return {
            "benchmark": "outrider train",
            "kind": self._kind,
            "out": self._out.name,
            "target": Path(settings.target).name if settings.target else "the embedded one",
            "waves": self._wave,
            "steps": self._trainer.step,
            "parameters": sum(weight.numel() for weight in self._module.parameters()),
            "k": settings.k,
            "held_out": figures,
            "seconds": round(perf_counter() - self._began, 1),
            "hardware": machine.hardware(str(house.device)),
            "versions": machine.versions(),
            "commit": machine.commit(),
        }


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[told]}"))
    return Progress(*columns, console=console)


def _told(sums: Sequence[Sums], figures: dict[str, Any]) -> str:
    last = sums[-1]
    kept = " ".join(f"{100 * share:.0f}" for share in next((s.acceptance for s in sums if s.met), []))
    taus = ", ".join(f"{each['tau']:.2f}" for each in figures.values())
    return f"loss {last.loss:.3f}, kept {kept}%" + (f", tau {taus}" if taus else "")
