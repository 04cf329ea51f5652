"""Modules for multi-token prediction (MTP) that are part of a target, with the tensor names of several model families.

All modules consist of a projection of two normalized vectors and a decoder layer. They differ in ways that tensors do
not show: the order of the two vectors, the hidden state that is taken from the target, the state that is fed back, and
whether the embedding at position 0 is replaced by zeros. As in vLLM, the family decides. Several DeepSeek modules feed
each other. For several modules of other families this is not defined, so only the first is used, once per draft token.

| naming | order | the target's last state | fed back | embedding at position 0 |
|---|---|---|---|---|
| DeepSeek | embedding, state | after its final norm | the layer's output | zeros |
| MiMo | state, embedding | before its final norm | the same after the final norm | zeros |
| Qwen | embedding, state | after its final norm | the same after the final norm | unchanged |
| speculators | embedding, state | after its final norm | the same after the final norm | unchanged |
| Nemotron-H | embedding, state | after its final norm | the same after the final norm | unchanged |
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from outrider.errors import OutriderError
from outrider.models.heads.config import ConfigReader
from outrider.models.heads.description import AuxStates, Body, Feedback, FusionPoint, HeadDescription, InputFusion, Kind
from outrider.models.heads.formats.base import Config, Format, Source, TargetInfo, Tensors, Written, refuse
from outrider.models.heads.formats.llama import (
    LLAMAS,
    layer_tensors,
    read_body,
    refuse_strange,
    take_layer,
    unlike,
    write_body,
)
from outrider.models.heads.formats.speculators import speculators

# Families that store the weights of norms minus 1, and whose attention may have a gate.
_QWEN_FAMILIES = ("qwen3_next", "qwen3_5")
# Hybrids whose attention layers, and so the layer of a module, are those of Llama.
_HYBRIDS = frozenset({"bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "olmo_hybrid"})
_GATED_MODEL_TYPE = "qwen3_5_text"  # the model type under which a layer with a gate is exported
_OUTER = ("embedding_norm", "state_norm", "project", "norm", "head", "embedding")  # names in the module
_PROJECT = 2  # index in `_OUTER`
_NUM_REQUIRED = 4  # the first ones of `_OUTER`; the others are the target's if they are missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtp(Format):
    """The tensor names and conventions of one model family.

    A `prefix` in the methods is that of a module's tensors, ending in a dot.
    """

    name: str
    title: str
    place: str  # prefix of a module; {} stands for its number
    outer: tuple[str, ...]  # names of `_OUTER`, after the prefix
    layer: str = ""  # prefix of the decoder layer, after the prefix of the module
    parts: tuple[str, ...] = ("self_attn", "mlp")  # of the layer, by which a module without its projection is found
    embedding_first: bool = True
    recycle: Feedback = Feedback.NORMED
    zero_first: bool = False
    final: bool = True  # takes the target's last state after the target's final norm
    after: bool = False  # numbers of modules continue those of the target's layers
    several: bool = False  # supports several modules, each of which takes the output of the one before
    nested: str = ""  # key in config.json of the target's config

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return self.module(names) is not None and (not self.nested or self.nested in config)

    def module(self, names: Collection[str]) -> str | None:
        return self._first_prefix(re.escape(self.outer[_PROJECT]) + r"\Z", names)

    def missing_projection(self, names: Collection[str]) -> str | None:
        """Return the name of the first module's projection if the checkpoint has other tensors of it, but not this."""
        prefix = self._first_prefix(self._member_pattern(), names)
        projection = None if prefix is None else prefix + self.outer[_PROJECT]
        return None if projection in names else projection

    def stored_name(self, names: Collection[str], name: str) -> str:
        """Return the name in the checkpoint of a weight of the draft head.

        Args:
            names: the names of all tensors in the checkpoint.
            name: the name of the weight in the draft head.
        """
        prefix = self.module(names) or ""
        if later := re.match(r"deeper\.(\d+)\.", name):
            number = int(module_number(prefix)) + 1 + int(later[1])
            return self._stored_in_module(f"{_before_number(prefix)}{number}.", name[later.end() :])
        return self._stored_in_module(prefix, name)

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        if missing := self.missing_projection(source.names):
            raise OutriderError(f"there is no tensor {missing!r}; copy the draft head again")
        config = self._target_config(source)
        prefix = self.module(source.names) or ""
        layers = self._target_layers(config)
        if self.after:
            expected = f"{_before_number(prefix)}{layers}."
            if prefix != expected:
                raise OutriderError(
                    f"the first module is {prefix}, but num_hidden_layers says {expected}; correct config.json"
                )
        prefixes = self._module_prefixes(config, source, prefix)
        tensor_prefixes = tuple(map(self._tensor_prefix, prefixes))
        refuse_strange([name for name in source.names if name.startswith(tensor_prefixes)])
        self._ignore_other_modules(source, prefix, len(prefixes))
        source.ignore((name for name in source.names if not name.startswith(tensor_prefixes)), "weights of the target")
        body = self._body(config, source, prefix)
        weights = self._take_module(source, prefix)
        for i, later_prefix in enumerate(prefixes[1:]):
            later_weights = self._take_later_module(source, later_prefix, weights)
            weights |= {f"deeper.{i}.{name}": value for name, value in later_weights.items()}
        if config.string("model_type", "").startswith(_QWEN_FAMILIES):
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
            modules=len(prefixes),
            feedback=self.recycle,
            own_lm_head="head.weight" in weights,
            own_embedding="embedding.weight" in weights,
        )
        return description, weights

    def write(self, description: HeadDescription, weights: Tensors, target: TargetInfo | None) -> Written:
        body = description.body
        fusion = description.input_fusion
        other_kind = description.kind is not Kind.MTP or body is None or fusion is None
        refuse(self.name, {f"is of kind {description.kind}": other_kind})
        assert body is not None
        assert fusion is not None
        refuse(self.name, self._reasons(description, body, fusion))
        if body.attention_gate:
            weights = {name: value.float() - 1 if _is_norm(name) else value for name, value in weights.items()}
        first_number = description.target_layers if self.after else 0
        tensors: Tensors = {}
        for i in range(description.modules):
            tensors |= self._module_tensors(fusion, weights, i, self.place.format(first_number + i))
        config = {**self._layer_config(body, description.vocab, target), "num_hidden_layers": description.target_layers}
        if not self.nested:
            return {**config, "num_nextn_predict_layers": description.modules}, tensors
        common = speculators("mtp", "MTPDraftModel", target)
        return {**common, self.nested: config, "num_nextn_predict_layers": 1}, tensors

    def _first_prefix(self, rest: str, names: Collection[str]) -> str | None:
        """Return the prefix of the first module with a tensor whose remaining name matches the pattern `rest`."""
        place = re.escape(self.place).replace(r"\{\}", r"(?P<number>\d+)")
        pattern = re.compile(f"(?P<prefix>{place}){rest}")
        matches = filter(None, map(pattern.match, names))
        first = min(matches, key=lambda match: int(match.groupdict().get("number", 0)), default=None)
        return first["prefix"] if first else None

    def _member_pattern(self) -> str:
        """Return a pattern for the names after the prefix that no layer of a target has."""
        outer = [re.escape(name) + "$" for name in self.outer]
        return f"(?:{'|'.join([*outer, *(re.escape(f'{self.layer}{part}.') for part in self.parts)])})"

    def _stored_in_module(self, prefix: str, name: str) -> str:
        """Return the name in the checkpoint of a weight of the module with this prefix."""
        stored = {f"{outer}.weight": stored for outer, stored in zip(_OUTER, self.outer, strict=False)}
        return prefix + stored.get(name, self.layer + name.removeprefix("layers.0."))

    def _tensor_prefix(self, prefix: str) -> str:
        """Return the common prefix of all tensors of a module."""
        return prefix

    def _target_config(self, source: Source) -> ConfigReader:
        """Return the config of the target's language model."""
        config = source.config.object(self.nested) if self.nested else source.config
        return config.object("text_config") if "text_config" in config else config

    def _module_prefixes(self, config: ConfigReader, source: Source, prefix: str) -> list[str]:
        """Return the prefixes of all modules that are used. `prefix` is that of the first one."""
        if not self.several:
            return [prefix]
        begin = _before_number(prefix)
        first = int(module_number(prefix))
        num_stored = next(n for n in count(1) if f"{begin}{first + n}.{self.outer[_PROJECT]}" not in source)
        num_modules = config.size("num_nextn_predict_layers", num_stored)
        if num_modules > num_stored:
            raise OutriderError(
                f"num_nextn_predict_layers is {num_modules}, but the checkpoint has {num_stored} modules; copy it again"
            )
        return [f"{begin}{first + n}." for n in range(num_modules)]

    def _ignore_other_modules(self, source: Source, prefix: str, num_used: int) -> None:
        """Ignore the tensors of modules after the ones that are used. `prefix` is that of the first module."""
        if self.after:
            numbered = prefix
            first = int(module_number(prefix))
        else:
            numbered = prefix + self.layer
            first = 0
        pattern = re.compile(re.escape(_before_number(numbered)) + r"(\d+)\.")
        matches = ((name, match) for name in source.names if (match := pattern.match(name)))
        unused = [name for name, match in matches if int(match[1]) >= first + num_used]
        if num_used == 1:
            source.ignore(unused, "modules after the first, which is used for all draft tokens")
        else:
            source.ignore(unused, "more modules than num_nextn_predict_layers")

    def _take_module(self, source: Source, prefix: str) -> Tensors:
        """Return the weights of one module by their names in the module."""
        weights = self._take_layers(source, prefix)
        for i, (name, stored) in enumerate(zip(_OUTER, self.outer, strict=False)):
            if i < _NUM_REQUIRED or prefix + stored in source:
                weights[f"{name}.weight"] = source.take(prefix + stored)
        return weights

    def _take_later_module(self, source: Source, prefix: str, first: Tensors) -> Tensors:
        """Return the weights of a module after the first one. It must have the first one's embedding and LM head."""
        weights = self._take_module(source, prefix)
        for name in _OUTER[_NUM_REQUIRED:]:
            table = weights.pop(f"{name}.weight", None)
            if table is not None and not (f"{name}.weight" in first and torch.equal(table, first[f"{name}.weight"])):
                raise OutriderError(
                    f"{prefix} has a {name}.weight that differs from the first module's, which is"
                    " not supported; use a draft head whose modules share it"
                )
        return weights

    def _module_tensors(self, fusion: InputFusion, weights: Tensors, i: int, prefix: str) -> Tensors:
        """Return the tensors of module `i` by their stored names, with the tables that all modules share."""
        if i:
            inner_prefix = f"deeper.{i - 1}."
            inner = {
                name.removeprefix(inner_prefix): value
                for name, value in weights.items()
                if name.startswith(inner_prefix)
            }
            shared_names = {f"{name}.weight" for name in _OUTER[_NUM_REQUIRED:]}
            weights = inner | {name: value for name, value in weights.items() if name in shared_names}
        if fusion.embedding_first != self.embedding_first:
            first_half, second_half = weights["project.weight"].chunk(2, 1)
            weights = {**weights, "project.weight": torch.cat([second_half, first_half], 1)}
        tensors = self._layer_tensors(weights, prefix)
        for name, stored in zip(_OUTER, self.outer, strict=False):
            if f"{name}.weight" in weights:
                tensors[prefix + stored] = weights[f"{name}.weight"]
        return tensors

    def _target_layers(self, config: ConfigReader) -> int:
        return config.size("num_hidden_layers")

    def _body(self, config: ConfigReader, source: Source, prefix: str) -> Body:
        """Return the decoder layer of a module."""
        model_type = config.string("model_type", "llama")
        is_qwen = model_type.startswith(_QWEN_FAMILIES)
        if model_type not in LLAMAS | _HYBRIDS and not is_qwen:
            supported = ", ".join([*sorted(LLAMAS | _HYBRIDS), *_QWEN_FAMILIES])
            raise OutriderError(f"the layers of model_type {model_type!r} are not supported; supported are {supported}")
        body = read_body(config, 1, lambda name: prefix + self.layer + name in source)
        query_size = source.take(f"{prefix}{self.layer}self_attn.q_proj.weight").shape[0]
        return replace(body, attention_gate=is_qwen and query_size == 2 * body.heads * body.dim)

    def _take_layers(self, source: Source, prefix: str) -> Tensors:
        """Return the weights of a module's decoder layer by their names in the module."""
        outer = {prefix + stored for stored in self.outer}
        layer = take_layer(source, prefix + self.layer, "layers.0.")
        return {
            name: value for name, value in layer.items() if prefix + self.layer + name[len("layers.0.") :] not in outer
        }

    def _layer_tensors(self, weights: Tensors, prefix: str) -> Tensors:
        """Return the tensors of a module's decoder layer by their stored names."""
        return layer_tensors(weights, 0, prefix + self.layer)

    def _layer_config(self, body: Body, vocab: int, target: TargetInfo | None) -> Config:
        config = write_body(body, vocab, target)
        return {**config, "model_type": _GATED_MODEL_TYPE} if body.attention_gate else config

    def _reasons(self, description: HeadDescription, body: Body, fusion: InputFusion) -> dict[str, bool]:
        """Return why this naming cannot represent a draft head, or why its engines would run it differently."""
        aux = description.aux_states
        takes_last_state = aux.layers == (description.target_layers - 1,) and aux.final is self.final and not aux.fused
        supports_gate = "qwen" in self.name or "speculators" in self.name
        return {
            "combines embeddings and states at the attention": fusion.at is not FusionPoint.PROJECTION,
            "combines embeddings and states without norms, or with a bias": not fusion.norms or fusion.bias,
            f"{'replaces' if fusion.zero_first else 'does not replace'} the embedding at position 0 by zeros, unlike"
            " engines that use this format": fusion.zero_first is not self.zero_first,
            f"feeds back the {description.feedback} state, unlike engines that use this format": (
                description.feedback is not self.recycle
            ),
            f"takes another state than the target's last {'after' if self.final else 'before'} its final norm": (
                not takes_last_state
            ),
            "has a reduced draft vocabulary": bool(description.draft_vocab),
            "has no norm before its layer or after it": not (body.first_norm and description.final_norm),
            "has more than one decoder layer": body.layers > 1,
            "has several modules; use --to mtp-deepseek": description.modules > 1 and not self.several,
            "has its own embedding or LM head": (
                len(self.outer) <= _NUM_REQUIRED and (description.own_lm_head or description.own_embedding)
            ),
            **self._layer_reasons(body),
            "has a gate after its attention": body.attention_gate and not supports_gate,
        }

    def _layer_reasons(self, body: Body) -> dict[str, bool]:
        """Return why this naming cannot represent the decoder layer."""
        return unlike(replace(body, attention_gate=False, rotary=1.0) if body.attention_gate else body)


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def module_number(prefix: str) -> str:
    """Return the digits before the last dot of a prefix, as in "model.layers.61."."""
    return prefix[:-1].rpartition(".")[2]


def _before_number(prefix: str) -> str:
    """Return a prefix without its last number and dot."""
    return prefix[: -len(module_number(prefix)) - 1]


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
        parts=(),  # the target's layers have the same names
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
