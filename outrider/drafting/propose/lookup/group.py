"""Draft from other outputs for the same prompt: samples that run at the same time, and those of earlier policies.

Reinforcement learning samples a group of outputs for each prompt, and samples the same prompts again in the next epoch.
These outputs resemble each other. Published systems draft from the suffix trees of a group (Seer, arXiv 2511.14617), of
a problem over a window of recent policies (DAS, arXiv 2511.13841), and of the previous epoch (RhymeRL, arXiv
2508.18588). Draft tokens are chosen without randomness, so that they are exact without stored log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.proposer import Proposer, ProposerSetup, parse_count
from outrider.core.types import Round, SequenceState
from outrider.drafting.propose.lookup.suffix import SuffixProposer, parse_history_size
from outrider.drafting.propose.lookup.suffix_history import History
from outrider.errors import OutriderError

_HISTORY = 10**6  # default tokens
_CHUNK = 16  # tokens of a running sequence that its siblings see at once


class GroupProposer(SuffixProposer):
    """Drafts what followed the longest known suffix in the sequence and in the outputs of its group.

    A group is `Request.group`, or the prompt if there is none. Each group has suffix trees of its
    own. A running sequence adds its tokens in chunks; its whole output replaces them when it ends.
    """

    def __init__(self, setup: ProposerSetup, *, history: int = _HISTORY, versions: int | None = None) -> None:
        """Keep up to `history` tokens of outputs, of the last `versions` weights of the target (None: of all)."""
        super().__init__(setup, history=history)
        assert self._history is not None
        self.groups = self._history
        self._versions = versions
        self._version = 0
        self._chunks: dict[int, list[int]] = {}  # by id of a running request: the outputs that are its chunks
        self._published: dict[int, int] = {}  # by id of a running request: output tokens in its chunks
        self._scopes: dict[int, str] = {}  # by id of a running request: see `_scope`

    def target_updated(self, version: int) -> None:
        """Note that the target has new weights. Outputs before the window are dropped."""
        self._version = version
        if self._versions is not None:
            self.groups.remove_before(version - self._versions + 1)

    def commit(self, round: Round) -> None:
        super().commit(round)
        for seq in round.batch.seqs:
            id = seq.request.id
            known = self._published.get(id, 0)
            if seq.num_output_tokens - known >= _CHUNK:
                begin = len(seq.request.prompt_token_ids) + known
                chunk = self.groups.learn(
                    self._scope(seq), seq.token_ids[:begin], seq.token_ids[begin:], version=self._version
                )
                self._published[id] = seq.num_output_tokens
                if chunk is not None:
                    self._chunks.setdefault(id, []).append(chunk)

    def _learn(self, history: History, seq: SequenceState, prompt: Sequence[int], output: Sequence[int]) -> None:
        history.remove(self._chunks.pop(seq.request.id, ()))
        self._published.pop(seq.request.id, None)
        history.learn(self._scope(seq), prompt, output, version=self._version)
        del self._scopes[seq.request.id]

    def _scope(self, seq: SequenceState) -> str:
        """Return the scope of the request and its group. Groups of two scopes never meet."""
        request = seq.request
        if request.id not in self._scopes:  # a long prompt would be joined again in each round
            group = request.group or ",".join(map(str, request.prompt_token_ids))
            self._scopes[request.id] = f"{request.params.scope}\0{group}"
        return self._scopes[request.id]


def group_proposer(argument: str, setup: ProposerSetup) -> Proposer:
    """Make `group`, `group:TOKENS` or `group:TOKENS:VERSIONS`."""
    tokens, versions = _sizes(argument)
    return GroupProposer(setup, history=tokens, versions=versions)


def parse_group_size(argument: str) -> int:
    """Parse the tokens of `group:TOKENS:VERSIONS`.

    Raises:
        OutriderError: the argument does not have this form, or there are too many tokens.
    """
    return _sizes(argument)[0]


def _sizes(argument: str) -> tuple[int, int | None]:
    """Return the tokens and the versions; None: all versions."""
    tokens, colon, versions = argument.partition(":")
    window = parse_count(versions)
    if colon and not window:
        raise OutriderError(
            f"group:{argument} has no valid number of versions; write group:{tokens or _HISTORY}:8"
            " to keep the outputs of the last 8 versions of the weights"
        )
    return parse_history_size(tokens) or _HISTORY, window
