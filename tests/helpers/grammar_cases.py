"""Schemas by the hundred, and a target that speaks words of a small tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outrider.core.constraint import Constraint
from outrider.core.grammar import Grammars
from outrider.core.noise import derive_seed
from outrider.core.params import SamplingParams
from outrider.core.types import Request, SequenceState
from outrider.engine.engine import Engine
from outrider.testing.toy_target import ToyTarget

VOCAB = 320
_NAMES = ["name", "age", "kind", "tags", "a b", "größe", 'say "so"', "x", "items", "list_of_things"]
_PATTERNS = ["^[a-z]{2,4}$", "^(ab|cd)+$", "^[A-Z][0-9]{1,3}$", "^\\d{3}-\\d{2}$"]


def schema(chance: random.Random, depth: int = 3) -> dict[str, Any]:
    """A random schema whose values are not endless, of up to `depth` levels."""
    makers = [_string, _integer, _number, _choice, lambda _: {"type": chance.choice(["boolean", "null"])}]
    if depth:
        makers += 2 * [
            lambda chance: _object(chance, depth),
            lambda chance: _array(chance, depth),
            lambda chance: {"anyOf": [schema(chance, depth - 1) for _ in range(2)]},
        ]
    return chance.choice(makers)(chance)


def whole(chance: random.Random) -> dict[str, Any]:
    """A random schema of an object, with a part that it names."""
    out = _object(chance, 3)
    if chance.random() < 0.3:
        out["$defs"] = {"part": schema(chance, 1)}
        out["properties"]["part"] = {"$ref": "#/$defs/part"}
    return out


def _string(chance: random.Random) -> dict[str, Any]:
    kind = chance.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": chance.choice(_PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": chance.choice(["date", "uuid", "time"])}
    least = chance.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 5)}


def _integer(chance: random.Random) -> dict[str, Any]:
    least = chance.randint(-500, 500)
    return {"type": "integer", "minimum": least, "maximum": least + chance.randint(0, 3000)}


def _number(chance: random.Random) -> dict[str, Any]:
    least = round(chance.uniform(-5, 5), 2)
    return {"type": "number", "minimum": least, "exclusiveMaximum": least + chance.randint(1, 9)}


def _choice(chance: random.Random) -> dict[str, Any]:
    some = ["red", "redder", "green", "", 5, -1.5, True, None, ["a", 1], {"k": "v"}]
    return {"const": chance.choice(some)} if chance.random() < 0.3 else {"enum": chance.sample(some, 3)}


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(_NAMES, chance.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: schema(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
        "additionalProperties": False,
    }


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(0, 2)
    return {"type": "array", "items": schema(chance, depth - 1), "minItems": least, "maxItems": least + 2}


@cache
def words() -> PreTrainedTokenizerFast:
    """Bytes, and some dozens of the pieces that JSON is made of; id 0 ends a text."""
    chance = random.Random(5)
    texts = [json.dumps({name: chance.choice(_NAMES) for name in chance.sample(_NAMES, 4)}) for _ in range(200)]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<end>"], initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def letters(alphabet: str) -> PreTrainedTokenizerFast:
    """A token a letter; id 0 ends a text."""
    made = Tokenizer(models.BPE(vocab={"<end>": 0} | {c: 1 + i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


class _Sum:
    """A table over two tokens as the sum of two tables over one."""

    def __init__(self, vocab: int, seed: int, *, like: _Sum | None = None) -> None:
        chance = torch.Generator().manual_seed(seed)
        self.parts = [torch.randn(vocab, vocab, generator=chance) for _ in range(2)]
        if like:
            self.parts = [0.3 * own + other for own, other in zip(self.parts, like.parts, strict=True)]

    def __getitem__(self, last: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.parts[0][last[0]] + self.parts[1][last[1]]


class WordTarget(ToyTarget):
    """A toy with words for tokens."""

    def __init__(self, *, slots: int = 16, context: int = 640, like: WordTarget | None = None) -> None:
        super().__init__(vocab=2, slots=slots, context=context)
        self.vocab = VOCAB
        self.table: Any = _Sum(VOCAB, 1 if like else 0, like=like.table if like else None)


def complete(
    engine: Engine,
    grammars: Grammars,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    limit: int = 200,
) -> list[SequenceState]:
    """Run all prompts together, under their constraints; the finished rows in the order of the prompts."""
    for i, (prompt, want) in enumerate(zip(prompts, params, strict=True)):
        engine.add(
            Request(
                id=i,
                prompt_token_ids=tuple(prompt),
                params=want,
                seed=derive_seed(want.seed or 0, i),
                end_ids=frozenset({0}) if not want.ignore_eos else frozenset(want.stop_token_ids),
                max_tokens=limit,
                grammar=None if want.constraint is None else grammars.compile(want.constraint),
            )
        )
    done: dict[int, SequenceState] = {}
    while engine.busy():
        done |= {row.request.id: row for row in engine.step() if row.finish_reason}
    return [done[i] for i in range(len(prompts))]


def nested(depth: int) -> dict[str, Any]:
    """A schema of 2**depth parts."""
    inner = nested(depth - 1) if depth else {"type": "integer"}
    return {"type": "object", "properties": {"a": inner, "b": inner}}


def forms(count: int, seed: int = 0) -> list[Constraint]:
    """Random schemas that can be compiled, as constraints."""
    chance = random.Random(seed)
    return [Constraint.json_schema(whole(chance)) for _ in range(count)]
