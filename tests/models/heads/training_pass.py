"""A training pass over random texts, with which the drafting of an engine is compared."""

import torch

from outrider.core import tree
from outrider.core.types import SequenceState
from outrider.models.heads.hidden_states import apply_final_norm
from outrider.models.heads.store import HeadModule
from outrider.train.loss.steps import TrainingBatch
from outrider.train.loss.unroll import unrolled
from tests.helpers.train_setup import scatter
from tests.models.heads.drive_head import CPU, TABLES, admit, commit_feed, next_batch, note_states

LENGTHS = (14, 9, 14)  # of the texts
_SIZE = max(LENGTHS)
_BEGIN = 5  # tokens with which sequences start


class TrainingPass:
    """The steps of a module for three random texts."""

    def __init__(self, module: HeadModule, num_steps: int) -> None:
        description = module.description
        self.tokens = torch.randint(0, 40, (3, _SIZE + 1))
        self.aux_states = torch.randn(3, _SIZE, len(description.aux_states.layers), 64)
        loss_mask = torch.arange(_SIZE) < torch.tensor(LENGTHS)[:, None]
        self._target_probs = torch.rand(3, _SIZE, description.output_vocab)
        texts = TrainingBatch(
            tokens=self.tokens,
            # Training batches hold the last state after the final norm. The engine applies the norm itself.
            aux_states=apply_final_norm(self.aux_states, TABLES) if description.aux_states.final else self.aux_states,
            target_probs=self._target_probs[loss_mask],
            loss_mask=loss_mask,
        )
        self.steps = list(unrolled(module, texts, num_steps))
        self._ids = module.ids
        self._logits = [scatter(step.logits, step.loss_mask) for step in self.steps]
        self._targets = [scatter(step.target, step.loss_mask) for step in self.steps]

    def start(self, head, chunks: tuple[int, ...], draft_budget: int = 0) -> list[SequenceState]:
        """Start a sequence for each text, and prefill it in chunks of so many tokens. Return the sequences."""
        seqs = admit(head, self.tokens[:, :_BEGIN].tolist())
        note_states(head, seqs, self.aux_states, [_BEGIN - 1] * 3)
        for max_tokens in chunks:
            chunk = next_batch(head, seqs, max_tokens).limited((draft_budget,) * 3)
            head.score(chunk, tree.empty(3, CPU))
            commit_feed(head, chunk, tree.empty(3, CPU))
        return seqs

    def check(self, depth: int, seq: SequenceState, logits: torch.Tensor) -> bool:
        """Check the logits [V] of the draft token at a depth, after the tokens of a sequence, and its target.

        Return False if the text has ended there, so that there is nothing to compare.
        """
        position = len(seq.token_ids) - 1
        loss_mask = self.steps[depth].loss_mask[seq.slot]
        is_trained = position <= len(loss_mask) and bool(loss_mask[position - 1])
        assert is_trained == (position + depth < LENGTHS[seq.slot])
        if is_trained:
            assert (logits[self._ids] - self._logits[depth][seq.slot, position - 1]).abs().max() < 1e-3
            target = self._targets[depth][seq.slot, position - 1]
            assert torch.equal(target, self._target_probs[seq.slot, position + depth])
        return is_trained
