"""Random JSON schemas, small tokenizers, and a toy target that samples their tokens."""

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
from outrider.engine.drive import drive
from outrider.engine.engine import Engine
from outrider.testing.toy_target import ToyTarget

VOCAB = 320
_NAMES = ["name", "age", "kind", "tags", "a b", "größe", 'say "so"', "x", "items", "list_of_things"]
_PATTERNS = ["^[a-z]{2,4}$", "^(ab|cd)+$", "^[A-Z][0-9]{1,3}$", "^\\d{3}-\\d{2}$"]


def schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A random schema with up to `depth` levels, whose values have a bounded length."""
    makers = [_string, _integer, _number, _choice, lambda _: {"type": rng.choice(["boolean", "null"])}]
    if depth:
        makers += 2 * [
            lambda rng: _object(rng, depth),
            lambda rng: _array(rng, depth),
            lambda rng: {"anyOf": [schema(rng, depth - 1) for _ in range(2)]},
        ]
    return rng.choice(makers)(rng)


def whole(rng: random.Random) -> dict[str, Any]:
    """A random schema of an object, with a part that it names."""
    out = _object(rng, 3)
    if rng.random() < 0.3:
        out["$defs"] = {"part": schema(rng, 1)}
        out["properties"]["part"] = {"$ref": "#/$defs/part"}
    return out


def _string(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(["date", "uuid", "time"])}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)}


def _integer(rng: random.Random) -> dict[str, Any]:
    least = rng.randint(-500, 500)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 3000)}


def _number(rng: random.Random) -> dict[str, Any]:
    least = round(rng.uniform(-5, 5), 2)
    return {"type": "number", "minimum": least, "exclusiveMaximum": least + rng.randint(1, 9)}


def _choice(rng: random.Random) -> dict[str, Any]:
    some = ["red", "redder", "green", "", 5, -1.5, True, None, ["a", 1], {"k": "v"}]
    return {"const": rng.choice(some)} if rng.random() < 0.3 else {"enum": rng.sample(some, 3)}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "array", "items": schema(rng, depth - 1), "minItems": least, "maxItems": least + 2}


@cache
def words() -> PreTrainedTokenizerFast:
    """Bytes, and some dozens of the pieces that JSON is made of; id 0 ends a text."""
    rng = random.Random(5)
    texts = [json.dumps({name: rng.choice(_NAMES) for name in rng.sample(_NAMES, 4)}) for _ in range(200)]
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
        rng = torch.Generator().manual_seed(seed)
        self.parts = [torch.randn(vocab, vocab, generator=rng) for _ in range(2)]
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
    rows = []
    for i, (prompt, want) in enumerate(zip(prompts, params, strict=True)):
        request = Request(
            id=i,
            prompt_token_ids=tuple(prompt),
            params=want,
            seed=derive_seed(want.seed or 0, i),
            end_ids=frozenset({0}) if not want.ignore_eos else frozenset(want.stop_token_ids),
            max_tokens=limit,
            grammar=None if want.constraint is None else grammars.compile(want.constraint),
        )
        rows.append(engine.add(request))
    for _ in drive(engine, rows):
        pass
    return rows


def nested(depth: int) -> dict[str, Any]:
    """A schema of 2**depth parts."""
    inner = nested(depth - 1) if depth else {"type": "integer"}
    return {"type": "object", "properties": {"a": inner, "b": inner}}


def forms(count: int, seed: int = 0) -> list[Constraint]:
    """Random schemas that can be compiled, as constraints."""
    rng = random.Random(seed)
    return [Constraint.json_schema(whole(rng)) for _ in range(count)]
