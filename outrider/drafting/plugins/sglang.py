"""Outrider's drafts in SGLang, as the speculative algorithm OUTRIDER.

    python -m sglang.launch_server --model-path TARGET --speculative-algorithm OUTRIDER

SGLang calls `register` by the entry point `sglang.srt.plugins`. The worker is SGLang's own for n-grams, with drafts of
ours in the place of those of its corpus, so SGLang scores and verifies them. It verifies the same number of nodes for
each request in every step. So the planner has nothing to decide, and short drafts are filled up.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.drafting.plugins.drafter import Drafter, Row
from outrider.drafting.plugins.settings import HostFacts, PluginSettings
from outrider.errors import OutriderError

NAME = "OUTRIDER"
_PROPOSER = "OUTRIDER_PROPOSER"  # environment variable
_DEVICES = ("cuda", "cpu", "xpu")  # where SGLang verifies n-grams
_NODES = 12  # default nodes of a request in a step, as for SGLang's n-grams
_RUNNING = 48  # the same for requests at once
_FILLER = 0  # token of a node that stands for nothing


def register() -> None:
    """Register the algorithm. SGLang calls this in each of its processes."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # type: ignore[import-not-found]
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo  # type: ignore[import-not-found]

    algorithm = type("OutriderAlgorithm", (AsNgram, CustomSpecAlgo), {})
    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=algorithm)(make_worker)


def make_worker(_: Any) -> type:
    """Return the class of the worker."""
    from sglang.srt.speculative.ngram_worker import NGRAMWorker  # type: ignore[import-not-found]

    return type("OutriderWorker", (DraftsInWorker, NGRAMWorker), {})


class AsNgram:
    """The properties of SGLang's n-grams that differ from the defaults of its class for added algorithms."""

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    def handle_server_args(self, server_args: Any) -> None:
        """Set what SGLang sets for n-grams. Drafts are chains, which all of its attention backends verify."""
        if server_args.device not in _DEVICES:
            devices = ", ".join(_DEVICES)
            raise OutriderError(f"the drafts run on {devices}, not on {server_args.device}; leave {NAME} out")
        if server_args.device == "cpu":
            server_args.disable_overlap_schedule = True
        if server_args.max_running_requests is None:
            server_args.max_running_requests = _RUNNING
        if server_args.speculative_num_draft_tokens is None:
            server_args.speculative_num_draft_tokens = _NODES
        server_args.enable_mixed_chunk = False
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_steps = server_args.speculative_num_draft_tokens


class DraftsInWorker:
    """Replaces the corpus of SGLang's worker for n-grams."""

    def alloc_memory_pool(self: Any, **pools: Any) -> None:
        """Make the drafter. The number of requests is known only now.

        Raises:
            OutriderError: the environment variable OUTRIDER_PROPOSER names no proposer that can
                run here.
        """
        super().alloc_memory_pool(**pools)  # type: ignore[misc]
        most = self.draft_token_num - 1
        fields = {"outrider_proposer": os.environ[_PROPOSER]} if _PROPOSER in os.environ else {}
        model = self.model_runner.model_config
        self.drafter = Drafter(
            PluginSettings.read({**fields, "outrider_k": most}, prefix="outrider_", most=most),
            HostFacts(
                vocab=int(model.vocab_size),
                slots=int(self.max_batch_size),
                context=int(model.context_len),
                most=most,
                on_cpu=self.device == "cpu",
                tokenizer=lambda: self._target_worker.tokenizer,
            ),
        )
        self.known_tokens: dict[str, int] = {}  # of each running request, by its id

    def _prepare_draft_tokens(self: Any, batch: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the nodes [B * N] of all requests, and which nodes each one sees [B * N * N]."""
        rows = []
        last_tokens = []
        for req, late in zip(batch.reqs, self._late_tokens(batch), strict=True):
            text = [*req.origin_input_ids_unpadded, *req.output_ids, *late]
            known = self.known_tokens.get(req.rid, len(req.origin_input_ids_unpadded))
            before = text[:known]
            rows.append(Row(req.rid, text[known:], before.copy))
            last_tokens.append(text[-1])
        lengths = (len(row.before()) + len(row.sampled) for row in rows)
        self.known_tokens = {row.key: length for row, length in zip(rows, lengths, strict=True)}
        trees = [
            nodes_of(last, draft, self.draft_token_num)
            for last, draft in zip(last_tokens, self.drafter.step(rows), strict=True)
        ]
        return np.concatenate([nodes for nodes, _ in trees]), np.concatenate([seen.ravel() for _, seen in trees])

    def _late_tokens(self: Any, batch: Any) -> list[Sequence[int]]:
        """Return the tokens [B] of the last step that the requests do not hold yet, because steps overlap."""
        if not self.enable_overlap or batch.grammar_needs_sync():
            return [()] * len(batch.reqs)
        tokens = batch.spec_info.accept_tokens.tolist()
        counts = batch.spec_info.accept_lens.tolist()
        width = self.draft_token_num
        return [tokens[b * width : b * width + count] for b, count in enumerate(counts)]

    def _update_ngram_corpus(self, batch: Any) -> None:
        """Do nothing: the drafter learns from the text in the next step."""


def nodes_of(last: int, draft: Sequence[int], size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the nodes [size] of a chain after the last token, and which nodes each one sees [size, size].

    Nodes after the draft are fillers. They follow the last token, so no draft token depends on
    them.
    """
    nodes = np.full(size, _FILLER, np.int64)
    nodes[: 1 + len(draft)] = [last, *draft]
    seen = np.eye(size, dtype=np.bool_)
    seen[:, 0] = True
    chain = 1 + len(draft)
    seen[:chain, :chain] = np.tri(chain, dtype=np.bool_)
    return nodes, seen
