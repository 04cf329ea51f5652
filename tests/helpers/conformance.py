"""All implementations of each protocol, for the conformance tests. Add a new implementation here to test it."""

import random
from collections.abc import Callable, Mapping

from outrider.core.proposer import NoProposer, Proposer, ProposerSetup
from outrider.core.target import Target
from outrider.core.token_text import TokenText
from outrider.drafting.propose.best import Best
from outrider.drafting.propose.combine import First, Merge, Switch
from outrider.drafting.propose.draft_model.cascade import Cascade
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.drafting.propose.draft_model.tree import TreeProposer
from outrider.drafting.propose.lookup.datastore import Datastore
from outrider.drafting.propose.lookup.group import GroupProposer
from outrider.drafting.propose.lookup.lookahead import LookaheadProposer, Sizes
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.drafting.propose.lookup.recycle import RecycleProposer
from outrider.drafting.propose.lookup.replay import Recording, ReplayProposer
from outrider.drafting.propose.lookup.retrieval import RetrievalProposer
from outrider.drafting.propose.lookup.suffix import SuffixProposer
from outrider.drafting.propose.vocabulary.intersection import SharedVocabulary, VocabularyMap
from outrider.drafting.propose.vocabulary.text_draft import TextProposer
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.testing.toy_target import ToyTarget

PROPOSERS: Mapping[str, Callable[[ProposerSetup], Proposer]] = {
    "none": NoProposer,
    "model": lambda setup: DraftModelProposer(setup, ToyTarget(vocab=setup.vocab, slots=setup.slots, seed=99)),
    "padded model": lambda setup: DraftModelProposer(
        setup, ToyTarget(vocab=setup.vocab + 2, slots=setup.slots, seed=98)
    ),
    "foreign model": lambda setup: DraftModelProposer(setup, _foreign(setup)),
    "cascade": lambda setup: DraftModelProposer(setup, Cascade(_foreign(setup))),
    "text draft": lambda setup: TextProposer(
        setup,
        ToyTarget(vocab=setup.vocab + 3, slots=setup.slots, seed=97),
        target=letters(setup.vocab),
        draft=letters(setup.vocab, "bc", " c", "ccb"),
    ),
    "replay": lambda setup: ReplayProposer(setup, [Recording((1, 2), (2, 1) * 40)], acceptance=0.7),
    "short model": lambda setup: DraftModelProposer(
        setup, ToyTarget(vocab=setup.vocab, slots=setup.slots, seed=99, context=24)
    ),
}

# Proposers that learn from past rounds how good their draft tokens are.
LEARNING: Mapping[str, Callable[[ProposerSetup], Proposer]] = {
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
    "suffix with history": lambda setup: SuffixProposer(setup, history=90),
    "group": lambda setup: GroupProposer(setup, history=90, versions=2),
    "recycle": RecycleProposer,
    "lookahead": lambda setup: LookaheadProposer(setup, Sizes(window=2, size=3, guesses=2)),
    "best": lambda setup: Best(setup, [NgramProposer(setup), _toy_model(setup)]),
    "best of three": lambda setup: Best(
        setup, [NgramProposer(setup, shortest=3), SuffixProposer(setup, history=90), _toy_model(setup)]
    ),
    "first": lambda setup: First(setup, [NgramProposer(setup, shortest=3), _toy_model(setup)]),
    "switch": lambda setup: Switch(setup, [NgramProposer(setup), _toy_model(setup)]),
    "retrieval": lambda setup: RetrievalProposer(setup, _toy_store(setup.vocab)),
    "merge": lambda setup: Merge(setup, [NgramProposer(setup), _toy_model(setup)]),
    "merge of two that draw": lambda setup: Merge(setup, [_toy_model(setup), _toy_model(setup)]),
    "tree": lambda setup: TreeProposer(setup, ToyTarget(vocab=setup.vocab, slots=setup.slots, seed=99)),
    "foreign tree": lambda setup: TreeProposer(setup, _foreign(setup)),
}
EVERY = {**PROPOSERS, **LEARNING}


def _toy_store(vocab: int) -> Datastore:
    rng = random.Random(6)
    return Datastore.of([[rng.randrange(vocab) for _ in range(80)] for _ in range(8)], vocab)


def _foreign(setup: ProposerSetup) -> Target:
    """A draft without the target's last token, with tokens of its own, and with the shared ids in reverse order."""
    others = [*range(setup.vocab, 1, -1)]
    draft = ToyTarget(vocab=setup.vocab + 2, slots=setup.slots, seed=97)
    return SharedVocabulary(draft, VocabularyMap([*others, -1], [*others, 1]))


def letters(vocab: int, *words: str) -> TokenText:
    """The texts of tokens: a space, `vocab` - 1 letters, and `words`. A text is cut into the longest tokens."""
    pieces = [" ", *(chr(ord("b") + i) for i in range(vocab - 1)), *words]
    longest = sorted(pieces, key=len, reverse=True)

    def cut(text: str) -> list[int]:
        ids = []
        while text:
            piece = next(piece for piece in longest if text.startswith(piece))
            ids.append(pieces.index(piece))
            text = text[len(piece) :]
        return ids

    spelled = {piece.encode(): id for id, piece in enumerate(pieces)}
    return TokenText(
        pieces=tuple(spelled), ids=spelled, special={}, begin=(), roles={}, cut=lambda texts: [*map(cut, texts)]
    )


def _toy_model(setup: ProposerSetup) -> Proposer:
    return DraftModelProposer(setup, ToyTarget(vocab=setup.vocab, slots=setup.slots, seed=99))


def nano(dtype: str = "float32", kernels: str = "auto") -> Target:
    checkpoint = load_checkpoint(embedded("nano"), dtype=dtype, device="cpu")
    return make_target(checkpoint, slots=4, context=128, kernels=kernels)


def tight() -> Target:
    """A target with hardly more cache memory than its sequences need."""
    target = nano("bfloat16")
    target.cache.resize(10)
    return target


CACHES: Mapping[str, Callable[[], Target]] = {
    "toy": ToyTarget,
    "static": lambda: nano(kernels="torch"),
    "paged": nano,
    "paged in bfloat16": lambda: nano("bfloat16"),
    "paged and tight": tight,
}
