"""Verify the draft of a round: from the logits of the target to the accepted tokens on the host."""

import torch

from outrider.core.types import Batch, Round, Scores
from outrider.engine.constraints import ConstrainedDraft
from outrider.engine.readback import read_greedy, read_verdict
from outrider.models.triton.fastest import fastest_verifier
from outrider.verify.rules import EXACT, Verifier
from outrider.verify.sampling import (
    BatchSampling,
    SamplingKernels,
    SamplingTensors,
    apply_sampling,
    apply_sampling_packed,
)
from outrider.verify.verdict import select_by_name


class Verification:
    """Verifies each sequence with the verifier that its request names, or with the default one."""

    def __init__(self, default: Verifier, *, vocab: int, device: torch.device, kernels: SamplingKernels) -> None:
        """Verify logits of `vocab` ids on `device`. `kernels` compute target probabilities from them."""
        self.default = default
        self._kernels = kernels
        self._device = device
        self._verifiers = {default.name: default}  # the default one and those of requests, by name
        self._sampling = BatchSampling(vocab, device)
        self._prepared: SamplingTensors | None = None  # the sampling that the next two values are of
        self._names: list[str] = []  # [B] of verifiers
        self._takes_likeliest = False  # whether every sequence takes the likeliest token of unmodified logits

    def replace_default(self, verifier: Verifier) -> None:
        """Use another implementation of the default verifier, which has its name."""
        assert verifier.name == self.default.name
        self.default = verifier
        self._verifiers[verifier.name] = verifier
        self._prepared = None

    def verify(self, batch: Batch, constrained: ConstrainedDraft, scores: Scores) -> Round:
        """Verify a scored draft and read the result. This waits for the device."""
        draft = constrained.draft
        masks = constrained.masks
        sampling = self._sampling.of(batch.seqs)
        if sampling is not self._prepared:
            self._prepare(sampling)
        if self._takes_likeliest:
            return constrained.drop_failed(read_greedy(batch, draft, scores, masks))
        noise = self._sampling.noise(batch.seqs)
        names = self._names
        packed = scores.packed
        if packed is None:
            logits = scores.logits if masks is None else masks.apply(scores.logits)
            p = apply_sampling(logits, sampling, draft, kernels=self._kernels)
            verdicts = {name: self._named(name).rule(draft, p, noise) for name in set(names)}
        else:
            packed = packed if masks is None else masks.apply_packed(packed)
            probs = apply_sampling_packed(packed, sampling, draft, kernels=self._kernels)
            verdicts = {name: self._named(name).verify(draft, probs, noise) for name in set(names)}
        return constrained.drop_failed(read_verdict(batch, draft, scores, select_by_name(verdicts, names)))

    def _prepare(self, sampling: SamplingTensors) -> None:
        """Find the verifiers of a batch. It is the same in most rounds."""
        self._prepared = sampling
        self._names = [seq.request.params.verifier or self.default.name for seq in sampling.seqs]
        relaxed = any(self._named(name).relaxes_greedy for name in set(self._names))
        self._takes_likeliest = sampling.plain_greedy and not relaxed

    def _named(self, name: str) -> Verifier:
        if name not in self._verifiers:
            self._verifiers[name] = fastest_verifier(EXACT[name], self._device)
        return self._verifiers[name]
