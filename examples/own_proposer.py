"""A proposer of your own: test it against the law of its protocol, then plug it in by its dotted path.

From the folder that holds this file:  outrider run --proposer own_proposer:Echo "a b a b a b"
"""

import torch

from outrider import LLM
from outrider.core import tree
from outrider.core.types import Needs
from outrider.testing import check_proposer


class Echo:
    """Guesses that the text repeats itself with the period of its last token."""

    needs = Needs()

    def __init__(self, setup):
        self.device = setup.device

    def admit(self, slot, request): ...

    def propose(self, batch):
        texts = [row.token_ids for row in batch.seqs]
        # Distance back to the last token's previous occurrence; 0 where there is none, and then nothing is guessed.
        gaps = [next((i for i in range(1, len(t)) if t[-1 - i] == t[-1]), 0) for t in texts]
        width = tuple(budget if gap else 0 for budget, gap in zip(batch.draft_budget, gaps, strict=True))
        most = max(width)
        guesses = [[t[i % (g or 1) - g] for i in range(most)] for t, g in zip(texts, gaps, strict=True)]
        return tree.chain(torch.tensor(guesses, dtype=torch.int64, device=self.device).view(len(texts), most), width)

    def commit(self, round): ...

    def release(self, slot): ...


if __name__ == "__main__":
    check_proposer(Echo)
    print(LLM(proposer=Echo).generate("<|endoftext|>x = [0, 0, 0, 0,")[0].text)
