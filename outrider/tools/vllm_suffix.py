"""The proposer `suffix` as a custom proposer class of vLLM.

    vllm serve TARGET --speculative-config \
      '{"method": "custom_class", "model": "outrider.tools.vllm_suffix.VllmSuffix", "num_speculative_tokens": 8}'

This module does not import vLLM. vLLM makes one object and calls `propose` after each step. It tells neither which
request a row belongs to nor when a request ends, so the texts of the rows themselves are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.core import tree
from outrider.drafting.propose.lookup.suffix_history import History
from outrider.drafting.propose.lookup.suffix_text import SuffixIndex, suffix_index_factory
from outrider.drafting.propose.lookup.suffix_tree import ShareCalibration, SuffixDraft
from outrider.errors import OutriderError

_HISTORY = "outrider_suffix_history"  # key of vLLM's --additional-config
_NODES_PER_TOKEN = 4  # nodes of the tree for each token of the longest chain
_SCOPE = ""  # vLLM does not tell the scope of a request
_Ids = npt.NDArray[np.int32]


class _Text:
    """The indexed text of one request, and what was drafted for it in the last step."""

    def __init__(self, index: SuffixIndex, prompt: int) -> None:
        self.index = index
        self.prompt = prompt  # tokens before the first sampled one
        self.tokens: _Ids = np.empty(0, np.int32)
        self.draft = SuffixDraft()

    def begins(self, row: _Ids) -> bool:
        """Whether a row continues this text."""
        size = len(self.tokens)
        return size <= len(row) and np.array_equal(self.tokens, row[:size])

    def extend(self, row: _Ids) -> None:
        self.index.extend(row[len(self.tokens) :].tolist())
        self.tokens = row.copy()


class VllmSuffix:
    """Drafts what followed the longest known suffix of a request, in it and in outputs that have ended.

    Drafts are chains: vLLM verifies no trees. A draft token of low estimated acceptance is left
    out, so a draft may have fewer tokens than `num_speculative_tokens`, or none.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Read k and the context from vLLM's configuration.

        `--additional-config '{"outrider_suffix_history": 100000}'` keeps so many tokens of ended
        outputs. They are shared by all requests.

        Raises:
            OutriderError: the history is no number of tokens.
        """
        self._k = int(vllm_config.speculative_config.num_speculative_tokens)
        self._context = int(vllm_config.model_config.max_model_len)
        history = (vllm_config.additional_config or {}).get(_HISTORY, 0)
        if not isinstance(history, int) or history < 0:
            raise OutriderError(f"{_HISTORY} is {history!r}; use a number of tokens, such as 100000, or 0 for none")
        self._history = History(history) if history else None
        self._calibration = ShareCalibration()
        self._make_index = suffix_index_factory("auto")
        self._texts: list[_Text] = []  # by row

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens: Sequence[int], token_ids: _Ids, **_: Any
    ) -> list[list[int]]:
        """Return a chain of draft tokens for each row of the batch.

        Args:
            sampled_token_ids: [B][...] the tokens that this step has added to each row; none: the
                row still prefills.
            num_tokens: [B or more] tokens of each row, with the sampled ones.
            token_ids: [B or more, context] the tokens of each row.
        """
        rows = [token_ids[i, : num_tokens[i]] for i in range(len(sampled_token_ids))]
        self._texts = self._match(rows, sampled_token_ids)
        drafts = []
        for text, row, sampled in zip(self._texts, rows, sampled_token_ids, strict=True):
            self._calibration.learn(text.draft, sampled)
            if self._history:
                self._history.mark_useful(text.draft.outputs(sampled))
            text.extend(row)
            # The last token of the context is the target's own.
            budget = min(self._k, self._context - len(row) - 1)
            text.draft = self._grow(text, budget) if len(sampled) and budget > 0 else SuffixDraft()
            drafts.append(list(text.draft.builder.tokens))
        return drafts

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: there are no weights."""

    def _match(self, rows: Sequence[_Ids], sampled: Sequence[Sequence[int]]) -> list[_Text]:
        """Return the text of each row. Rows move when others end; one that is gone has ended."""
        left = list(self._texts)
        texts = []
        for i, row in enumerate(rows):
            same_row = self._texts[i : i + 1]
            candidates = [*(text for text in same_row if text in left), *left]
            text = next((each for each in candidates if each.begins(row)), None)
            if text is None:
                text = _Text(self._make_index(), len(row) - len(sampled[i]))
            else:
                left.remove(text)
            texts.append(text)
        if self._history:
            for text in left:
                tokens = text.tokens.tolist()
                self._history.learn(_SCOPE, tokens[: text.prompt], tokens[text.prompt :])
        return texts

    def _grow(self, text: _Text, budget: int) -> SuffixDraft:
        """Return the likeliest chain of up to `budget` tokens."""
        nodes = _NODES_PER_TOKEN * budget
        if self._history is None:
            return likeliest_chain(text.index.grow([], 0, self._calibration.factors, nodes), budget)
        continuations, matched = self._history.continuations(_SCOPE, text.tokens.tolist(), budget)
        return likeliest_chain(text.index.grow(continuations, matched, self._calibration.factors, nodes), budget)


def likeliest_chain(draft: SuffixDraft, most: int) -> SuffixDraft:
    """Return the path that takes the likeliest child of each node, up to `most` nodes, as a draft of its own."""
    path: list[int] = []
    last = -1
    for node, parent in enumerate(draft.builder.parent):
        # Siblings are in order of their acceptance, so the first child of a node is its likeliest
        # one.
        if parent == last and len(path) < most:
            path.append(node)
            last = node
    kinds = tree.pick(draft.kinds, path)
    return SuffixDraft(draft.builder.select(path), kinds, tree.pick(draft.masks, path), draft.continuations)
