"""A language model whose likeliest answer is a given list of tokens, behind all of `LLM` and the server."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from outrider import LLM
from outrider.core.planner import FixedPlanner
from outrider.core.types import Batch, Draft, Scores
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Scheduler
from outrider.testing import ToyTarget
from tests.helpers import tiny
from tests.helpers.published_tokenizers import save_tokenizer, small_tokenizer

_SURELY = 30.0  # added to the logit of a token of the script
_CONTEXT = 2048
_SLOTS = 4


class ScriptTarget(ToyTarget):
    """A toy whose likeliest token at each place of the output is that of a script, whatever came before."""

    def __init__(self, script: Sequence[int], *, vocab: int, slots: int) -> None:
        super().__init__(vocab=2, slots=slots, context=_CONTEXT)
        self.vocab = vocab
        self._script = torch.tensor(script)
        self._noise = torch.randn(len(script) + 1, vocab, generator=torch.Generator().manual_seed(0))

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        parents = draft.parent.tolist()
        rows = []
        for b, seq in enumerate(batch.seqs):
            depth = [batch.start[b] + len(batch.feed[b]) - len(seq.request.prompt_token_ids)]
            for node in range(draft.size):
                depth.append(depth[parents[b][node] + 1] + 1)
            rows.append(depth[max(first + 1, 0) :])
        at = torch.tensor(rows).clamp(0, len(self._script))
        logits = self._noise[at]
        inside = at < len(self._script)
        likeliest = self._script[at.clamp(max=len(self._script) - 1)]
        logits.scatter_add_(-1, likeliest[..., None], inside[..., None] * _SURELY)
        return Scores(logits=logits)


def base_llm(folder: Path, tokenizer: str) -> LLM:
    """Make an `LLM` with the small tokenizer of this name, for `scripted_llm`. `folder` gets its checkpoint."""
    config = tiny.ARCHITECTURES["llama"]()
    config.vocab_size = small_tokenizer(tokenizer).model_vocab
    tiny.save(folder, config)
    save_tokenizer(tokenizer, folder)
    return LLM(folder, proposer="none", dtype="float32", k=0, max_num_seqs=_SLOTS)


def scripted_llm(base: LLM, script: Sequence[int], *, k: int, accepts: bool = True) -> LLM:
    """Make an `LLM` that answers with a script.

    Args:
        base: from `base_llm`.
        script: the tokens of the answer, with the end token.
        k: draft tokens of each round. The draft is the target itself.
        accepts: False: the draft has other tokens at each place, so that all of them are rejected.
    """
    parts = base.parts
    target = ScriptTarget(script, vocab=parts.vocab, slots=_SLOTS)
    other = [(token + 1) % parts.vocab for token in script]
    draft = ScriptTarget(script if accepts else other, vocab=parts.vocab, slots=_SLOTS)
    setup = replace(parts.setup, target=target, context=_CONTEXT, slots=_SLOTS)
    proposer = DraftModelProposer(setup, draft)
    engine = Engine(
        target=target,
        proposer=proposer,
        verifier=parts.verifier,
        planner=FixedPlanner(k),
        scheduler=Scheduler(slots=_SLOTS, chunk=512, context=_CONTEXT),
    )
    return LLM.from_parts(replace(parts, engine=engine, setup=setup, proposer=proposer))


def script_of(base: LLM, text: str) -> list[int]:
    """Return the tokens of a text, and an end token."""
    return [*base.parts.tokenizer.encode(text, add_special_tokens=False), max(base.parts.end_ids)]
