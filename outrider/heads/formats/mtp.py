"""Modules for multi-token prediction that came with a target, by the names that families give them.

All are the same thing, a projection of two normed vectors and a decoder layer, and differ where it does not show: in
the order of the two vectors, in the state that the target gives and the one that goes round, in whether the text's
first embedding is taken for zeros. In vLLM's models these are settled by the family, and so they are here. Of several
modules, DeepSeek's feed each other; what those of other families do with several is not settled, so there the first is
taken, and applied again and again.

| naming | order | the target's last state | goes round | first embedding |
|---|---|---|---|---|
| DeepSeek | embedding, state | after its final norm | the layer's output | zeros |
| MiMo | state, embedding | before its final norm | the same after the final norm | zeros |
| Qwen | embedding, state | after its final norm | the same after the final norm | as it is |
| speculators | embedding, state | after its final norm | the same after the final norm | as it is |
| Nemotron-H | embedding, state | after its final norm | the same after the final norm | as it is |
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from outrider.errors import OutriderError
from outrider.heads.config import Settings
from outrider.heads.description import AuxStates, Body, Feedback, FusionPoint, HeadDescription, InputFusion, Kind
from outrider.heads.formats.base import Config, Source, TargetInfo, Tensors, refuse
from outrider.heads.formats.llama import (
    LLAMAS,
    layer_tensors,
    read_body,
    refuse_strange,
    take_layer,
    unlike,
    write_body,
)
from outrider.heads.formats.speculators import speculators

_FROM_ONE = ("qwen3_next", "qwen3_5")  # whose norms' weights are stored less 1, and whose attention has a gate
_GATED = "qwen3_5_text"  # as which such a layer is written
_OUTER = ("embedding_norm", "state_norm", "project", "norm", "head", "embedding")  # in our module
_NEEDED = 4  # the first of these; the others are the target's where they are missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtp:
    """One naming."""

    name: str
    title: str
    place: str  # what the names of a module begin with; {} is its number, or the layers of the target and its number
    outer: tuple[str, ...]  # theirs for `_OUTER`, behind that
    layer: str = ""  # what its decoder layer's names begin with, behind that
    embedding_first: bool = True
    recycle: Feedback = Feedback.NORMED
    zero_first: bool = False
    final: bool = True  # the target's last state is read after the target's final norm
    after: bool = False  # numbers go on behind the target's layers
    several: bool = False  # modules, each of which reads the states of the one before
    nested: str = ""  # where in config.json the target's config is
    file: str = "model.safetensors"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return self.module(names) is not None and (not self.nested or self.nested in config)

    def module(self, names: Collection[str]) -> str | None:
        found = [at for name in names if (at := self._pattern().fullmatch(name))]
        first = min(found, key=lambda at: int(at["number"] or 0), default=None)
        return first["at"] if first else None

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        config = self._config(source)
        at = self.module(source.names) or ""
        layers = self._target_layers(config)
        if self.after and at != (place := f"{at[: -len(number(at)) - 1]}{layers}."):
            raise OutriderError(f"its module is {at} and num_hidden_layers says {place}; mend config.json")
        places = self._places(config, source, at)
        own = tuple(map(self._own, places))
        refuse_strange([name for name in source.names if name.startswith(own)])
        self._leave(source, at, len(places))
        source.ignore((n for n in source.names if not n.startswith(own)), "the target's own")
        body = self._body(config, source, at)
        weights = self._weights(source, at)
        for i, place in enumerate(places[1:]):
            weights |= {f"deeper.{i}.{name}": value for name, value in self._more(source, place, weights).items()}
        if config.text("model_type", "").startswith(_FROM_ONE):
            weights = {name: value.float() + 1 if _is_norm(name) else value for name, value in weights.items()}
        description = HeadDescription(
            kind=Kind.MTP,
            target_hidden=body.hidden,
            target_layers=layers,
            vocab=config.size("vocab_size"),
            aux_states=AuxStates(layers=(layers - 1,), final=self.final),
            input_fusion=InputFusion(
                at=FusionPoint.PROJECTION, embedding_first=self.embedding_first, zero_first=self.zero_first
            ),
            body=body,
            modules=len(places),
            feedback=self.recycle,
            own_lm_head="head.weight" in weights,
            own_embedding="embedding.weight" in weights,
        )
        return description, weights

    def write(
        self, description: HeadDescription, weights: Tensors, partner: TargetInfo | None
    ) -> tuple[Config, Tensors]:
        it, body, join = description, description.body, description.input_fusion
        refuse(self.name, {f"is of kind {it.kind}": it.kind is not Kind.MTP or body is None or join is None})
        assert body is not None
        assert join is not None
        self._refuse(it, body, join)
        if body.attention_gate:
            weights = {name: value.float() - 1 if _is_norm(name) else value for name, value in weights.items()}
        tensors: Tensors = {}
        for i in range(it.modules):
            tensors |= self._named(join, weights, i, self.place.format(i + (it.target_layers if self.after else 0)))
        config = {**self._written(body, it.vocab, partner), "num_hidden_layers": it.target_layers}
        if not self.nested:
            return {**config, "num_nextn_predict_layers": it.modules}, tensors
        head = speculators("mtp", "MTPDraftModel", partner)
        return {**head, self.nested: config, "num_nextn_predict_layers": 1}, tensors

    def _pattern(self) -> re.Pattern[str]:
        """The projection's name: where it begins, and which module's it is."""
        place = re.escape(self.place).replace(r"\{\}", r"(?P<number>\d+)")
        if "number" not in place:
            place += "(?P<number>)"
        return re.compile(rf"(?P<at>{place}){re.escape(self.outer[2])}")

    def _own(self, at: str) -> str:
        """What the names of all the module's tensors begin with."""
        return at

    def _config(self, source: Source) -> Settings:
        config = source.config.table(self.nested) if self.nested else source.config
        return config.table("text_config") if "text_config" in config else config

    def _places(self, config: Settings, source: Source, at: str) -> list[str]:
        """What the names of each module begin with that is read, from the first one on."""
        if not self.several:
            return [at]
        begin, first = at[: -len(number(at)) - 1], int(number(at))
        there = next(n for n in count(1) if f"{begin}{first + n}.{self.outer[2]}" not in source)
        said = config.size("num_nextn_predict_layers", there)
        if said > there:
            raise OutriderError(f"num_nextn_predict_layers is {said}, and {there} modules are there; copy it again")
        return [f"{begin}{first + n}." for n in range(said)]

    def _leave(self, source: Source, at: str, taken: int) -> None:
        """Set the modules behind those that are taken aside."""
        why = "modules behind the first, which is applied again for each further guess"
        if self.after:
            begin, first = at[: -len(number(at)) - 1], int(number(at))
            found = re.compile(re.escape(begin) + r"(\d+)\.")
        else:
            begin, first = at + self.layer, 0
            found = re.compile(re.escape(begin[: -len(number(begin)) - 1]) + r"(\d+)\.")
        numbered = ((name, met) for name in source.names if (met := found.match(name)))
        why = why if taken == 1 else "modules of which the config does not speak"
        source.ignore([name for name, met in numbered if int(met[1]) >= first + taken], why)

    def _weights(self, source: Source, at: str) -> Tensors:
        """Of one module, by our names."""
        weights = self._layers(source, at)
        for i, (ours, theirs) in enumerate(zip(_OUTER, self.outer, strict=False)):
            if i < _NEEDED or at + theirs in source:
                weights[f"{ours}.weight"] = source.take(at + theirs)
        return weights

    def _more(self, source: Source, at: str, first: Tensors) -> Tensors:
        """Of a module behind the first, whose tables it must have."""
        weights = self._weights(source, at)
        for table in (f"{name}.weight" for name in _OUTER[_NEEDED:]):
            mine = weights.pop(table, None)
            if mine is not None and not (table in first and torch.equal(mine, first[table])):
                raise OutriderError(f"{at} has a table of its own ({table}), other than the first module's")
        return weights

    def _named(self, join: InputFusion, weights: Tensors, i: int, at: str) -> Tensors:
        """A module's tensors by their names, with tables that belong to all."""
        if i:
            own = f"deeper.{i - 1}."
            shared = {f"{name}.weight" for name in _OUTER[_NEEDED:]}
            inner = {name.removeprefix(own): value for name, value in weights.items() if name.startswith(own)}
            weights = inner | {name: value for name, value in weights.items() if name in shared}
        if join.embedding_first != self.embedding_first:
            weights = {**weights, "project.weight": torch.cat(weights["project.weight"].chunk(2, 1)[::-1], 1)}
        tensors = self._layer_names(weights, at)
        for ours, theirs in zip(_OUTER, self.outer, strict=False):
            if f"{ours}.weight" in weights:
                tensors[at + theirs] = weights[f"{ours}.weight"]
        return tensors

    def _target_layers(self, config: Settings) -> int:
        return config.size("num_hidden_layers")

    def _body(self, config: Settings, source: Source, at: str) -> Body:
        kind = config.text("model_type", "llama")
        if kind not in LLAMAS and not kind.startswith(_FROM_ONE):
            known = ", ".join([*sorted(LLAMAS), *_FROM_ONE])
            raise OutriderError(
                f"model_type is {kind!r}, and what its layers compute is not known here; known: {known}"
            )
        body = read_body(config, 1, lambda name: at + self.layer + name in source)
        asked = source.take(f"{at}{self.layer}self_attn.q_proj.weight").shape[0]
        return replace(body, attention_gate=kind.startswith(_FROM_ONE) and asked == 2 * body.heads * body.dim)

    def _layers(self, source: Source, at: str) -> Tensors:
        outer = {at + name for name in self.outer}
        found = take_layer(source, at + self.layer, "layers.0.")
        return {ours: value for ours, value in found.items() if at + self.layer + ours[len("layers.0.") :] not in outer}

    def _layer_names(self, weights: Tensors, at: str) -> Tensors:
        return layer_tensors(weights, 0, at + self.layer)

    def _written(self, body: Body, vocab: int, partner: TargetInfo | None) -> Config:
        config = write_body(body, vocab, partner)
        return {**config, "model_type": _GATED} if body.attention_gate else config

    def _refuse(self, it: HeadDescription, body: Body, join: InputFusion) -> None:
        gate = body.attention_gate and not any(each in self.name for each in ("qwen", "speculators"))
        last = (it.target_layers - 1,), self.final, False
        other = (it.aux_states.layers, it.aux_states.final, it.aux_states.fused) != last
        reasons = {
            "is joined at the attention": join.at is not FusionPoint.PROJECTION,
            "joins without norms, or with a bias": not join.norms or join.bias,
            f"{'takes' if join.zero_first else 'does not take'} the text's first embedding for zeros, where engines"
            " that read this naming do the opposite": join.zero_first is not self.zero_first,
            f"carries its {it.feedback} state on, where engines that read this naming carry on the other": it.feedback
            is not self.recycle,
            f"reads another state than the target's last {'after' if self.final else 'before'} its final norm": other,
            "guesses a part of the vocabulary": bool(it.draft_vocab),
            "has no norm before its layer or behind it": not (body.first_norm and it.final_norm),
            "has more than one decoder layer": body.layers > 1,
            "has several modules: write mtp-deepseek": it.modules > 1 and not self.several,
            "has tables of its own, for which this naming has no place": len(self.outer) <= _NEEDED
            and (it.own_lm_head or it.own_embedding),
            **self._strange(body),
        }
        refuse(self.name, {**reasons, "has a gate behind its attention": gate})

    def _strange(self, body: Body) -> dict[str, bool]:
        return unlike(replace(body, attention_gate=False, rotary=1.0) if body.attention_gate else body)


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def number(at: str) -> str:
    """The digits before the dot that a prefix ends with."""
    return at[:-1].rpartition(".")[2]


_MIMO = ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight", "final_layernorm.weight")
NAMINGS: tuple[Mtp, ...] = (
    Mtp(
        name="mtp-deepseek",
        title="MTP (DeepSeek-V3's names)",
        place="model.layers.{}.",
        outer=(
            "enorm.weight",
            "hnorm.weight",
            "eh_proj.weight",
            "shared_head.norm.weight",
            "shared_head.head.weight",
            "embed_tokens.weight",
        ),
        recycle=Feedback.RAW,
        zero_first=True,
        after=True,
        several=True,
    ),
    Mtp(
        name="mtp-qwen",
        title="MTP (names of Qwen3-Next and 3.5)",
        place="mtp.",
        outer=("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight", "norm.weight"),
        layer="layers.0.",
    ),
    Mtp(
        name="mtp-mimo",
        title="MTP (MiMo's names)",
        place="model.mtp_layers.{}.",
        outer=_MIMO,
        embedding_first=False,
        zero_first=True,
        final=False,
    ),
    Mtp(
        name="mtp-speculators",
        title="MTP (speculators)",
        place="mtp_layers.{}.",
        outer=_MIMO,
        nested="transformer_layer_config",
    ),
)
