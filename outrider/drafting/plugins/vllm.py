"""Outrider's drafts in vLLM, as a custom proposer class.

    vllm serve TARGET --speculative-config '{"model": "outrider.drafting.plugins.vllm.Drafts",
      "num_speculative_tokens": 8}'

This module does not import vLLM. vLLM makes one object and calls `propose` after each step. It tells neither which
request a row belongs to nor when a request ends, so the texts of the rows themselves are compared.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.drafting.plugins.drafter import Drafter, Row
from outrider.drafting.plugins.settings import HostFacts, PluginSettings
from outrider.errors import OutriderError
from outrider.models.loader.tokenizer import read_tokenizer

_PREFIX = "outrider_"  # of the keys of vLLM's --additional-config
_Ids = npt.NDArray[np.int32]


class _Text:
    """The text of one request at its last step. It stands for the request: no two are equal."""

    def __init__(self) -> None:
        self.tokens: _Ids = np.empty(0, np.int32)

    def continues_as(self, row: _Ids, added: int) -> bool:
        """Return whether a row is this text and `added` more tokens."""
        size = len(self.tokens)
        return len(row) == size + added and np.array_equal(self.tokens, row[:size])


class Drafts:
    """Drafts with a proposer without a model, for the requests where the planner expects a gain.

    Drafts are chains: vLLM verifies no trees. Their lengths differ between requests, up to
    `num_speculative_tokens`. A request whose draft does not pay gets none.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Read vLLM's configuration.

        The keys of `--additional-config` are `outrider_proposer`, an expression such as
        `merge(suffix:100000,ngram)`, and `outrider_k`: `auto`, or a fixed number of draft tokens.

        Raises:
            OutriderError: a setting is unknown, or its value is wrong.
        """
        model = vllm_config.model_config
        most = int(vllm_config.speculative_config.num_speculative_tokens)
        fields = vllm_config.additional_config or {}
        if not isinstance(fields, dict):
            raise OutriderError(f"vLLM's additional_config is {type(fields).__name__}; write it as a JSON object")
        self.drafter = Drafter(
            PluginSettings.read(fields, prefix=_PREFIX, most=most),
            HostFacts(
                vocab=int(model.get_vocab_size()),
                slots=int(vllm_config.scheduler_config.max_num_seqs),
                context=int(model.max_model_len),
                most=most,
                on_cpu=vllm_config.device_config.device_type == "cpu",
                tokenizer=lambda: read_tokenizer(Path(model.tokenizer)),
            ),
        )
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
        texts = [token_ids[i, : num_tokens[i]] for i in range(len(sampled_token_ids))]
        self._texts = self._match(texts, sampled_token_ids)
        decoding = [i for i, sampled in enumerate(sampled_token_ids) if len(sampled)]
        rows = []
        for i in decoding:
            sampled = sampled_token_ids[i]
            rows.append(Row(self._texts[i], sampled, texts[i][: len(texts[i]) - len(sampled)].tolist))
        drafts: list[list[int]] = [[] for _ in texts]
        for i, draft in zip(decoding, self.drafter.step(rows, prefilling=len(rows) < len(texts)), strict=True):
            drafts[i] = draft
        return drafts

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: there are no weights."""

    def _match(self, rows: Sequence[_Ids], sampled: Sequence[Sequence[int]]) -> list[_Text]:
        """Return the request of each row. Rows move when others end; one that is gone has ended."""
        left = dict.fromkeys(self._texts)
        matched = []
        for i, row in enumerate(rows):
            added = len(sampled[i])
            candidates = [*(text for text in self._texts[i : i + 1] if text in left), *left]
            text = next((each for each in candidates if each.continues_as(row, added)), None) or _Text()
            left.pop(text, None)
            text.tokens = row.copy()
            matched.append(text)
        return matched
