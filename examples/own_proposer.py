"""Write a proposer, test it with the conformance suite, and run it.

On the command line, from the folder of this file: outrider run --proposer own_proposer:RepeatProposer "a b a b a b"
"""

import torch

from outrider import LLM
from outrider.plugin import Needs, chain
from outrider.testing import check_proposer


class RepeatProposer:
    """Drafts that the text repeats with the period of its last token."""

    needs = Needs()  # nothing from the target's hidden states

    def __init__(self, setup):
        self.device = setup.device

    def admit(self, slot, request):
        """A request begins in a slot. This proposer keeps no state."""

    def propose(self, batch):
        drafts = [
            self._repeat(seq.token_ids, budget) for seq, budget in zip(batch.seqs, batch.draft_budget, strict=True)
        ]
        longest = max(map(len, drafts))
        padded = [draft + [0] * (longest - len(draft)) for draft in drafts]
        tokens = torch.tensor(padded, dtype=torch.int64, device=self.device).view(len(drafts), longest)
        return chain(tokens, tuple(map(len, drafts)))

    def commit(self, round):
        """A round is over: `round.emitted` holds the accepted tokens."""

    def release(self, slot):
        """The request in a slot is done."""

    def _repeat(self, token_ids, budget):
        last = len(token_ids) - 1
        for period in range(1, last + 1):
            if token_ids[last - period] == token_ids[last]:
                return [token_ids[last - period + 1 + i % period] for i in range(budget)]
        return []


if __name__ == "__main__":
    check_proposer(RepeatProposer)
    print(LLM(proposer=RepeatProposer).generate("<|endoftext|>x = [0, 0, 0, 0,")[0].text)
