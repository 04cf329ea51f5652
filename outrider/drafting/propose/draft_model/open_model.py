"""Open draft models: load the checkpoint, split it over ranks, and fit it to the target and the settings."""

import logging
from dataclasses import dataclass

import torch

from outrider.core.config import FULL_BITS, SHARDED
from outrider.core.params import AUTO
from outrider.core.placement import DraftPlacement
from outrider.core.proposer import Proposer, ProposerSetup
from outrider.core.target import Target
from outrider.core.token_text import TokenText
from outrider.drafting.propose.draft_model.quantized_draft import draft_bits, quantize_error
from outrider.drafting.propose.draft_model.window import MIN_WINDOW, windowed
from outrider.drafting.propose.placement import place_draft_model, replicated
from outrider.drafting.propose.vocabulary.candidates import use_candidates
from outrider.drafting.propose.vocabulary.counterparts import faithful_text
from outrider.drafting.propose.vocabulary.intersection import SharedVocabulary, VocabularyMap
from outrider.drafting.propose.vocabulary.reduced import has_draft_vocabulary, read_draft_vocabulary, reduce_vocabulary
from outrider.drafting.propose.vocabulary.text_draft import TextProposer
from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.loader.check import make_checked_target
from outrider.models.loader.load import check_model, load_checkpoint
from outrider.models.native.support import may_run
from outrider.models.torch.checkpoint import Checkpoint
from outrider.runtime.ranks import Ranks, all_ranks, current

_MIN_SHARE = 0.1  # smallest share of the target's tokens for drafting by tokens
_CHECKED_CONTEXT = 64  # tokens of the check of a sharded draft
_log = logging.getLogger("outrider")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """The checkpoint of a draft model and the setup of its proposer."""

    setup: ProposerSetup
    folder: str
    checkpoint: Checkpoint

    @property
    def same_vocabulary(self) -> bool:
        """Whether both tokenizers give the same ids, whatever the padding of the vocabularies."""
        return bool(self.setup.tokenizer.get_vocab() == self.checkpoint.tokenizer.get_vocab())

    @property
    def _may_be_native(self) -> bool:
        """Whether the native kernels run the architecture of the draft model."""
        return self.checkpoint.source is None and may_run(self.checkpoint.config)

    def model(self, tokens_per_token: int = 1) -> Target:
        """Make the draft model.

        Its context has `tokens_per_token` tokens per token of the target's context. If the
        checkpoint allows fewer, or the setup asks for it, the draft model reads a window.
        """
        context = tokens_per_token * self.setup.context
        size = min(context, self._window_size())
        kernels = self.setup.kernels
        model = self._quantized(size) if self.setup.draft_quantize else self._make(size, kernels=kernels)
        ids = read_draft_vocabulary(self.folder, self.checkpoint.vocab)
        if ids is not None:
            model = reduce_vocabulary(model, self.checkpoint, ids, kernels=kernels)
        if self.setup.draft_candidates is not None:
            use_candidates(model, self.checkpoint, self.setup.draft_candidates)
        if size == context:
            return model
        _log.info("the draft in %s reads the last %d of at most %d tokens", self.folder, size, context)
        return windowed(model, context=context)

    def _make(self, size: int, *, kernels: str, bits: int = FULL_BITS) -> Target:
        setup = self.setup
        return make_checked_target(
            self.checkpoint,
            slots=setup.slots,
            context=size,
            kernels=kernels,
            bits=bits,
            kv_dtype=setup.kv_dtype if self._may_be_native else AUTO,
            check=setup.check,
        ).target

    def _quantized(self, size: int) -> Target:
        """Make the draft model with quantized weights.

        Raises:
            OutriderError: it is quantized already, or it does not run on the native kernels.
        """
        setup = self.setup
        if types := self.checkpoint.block_types:
            raise OutriderError(
                f"the draft in {self.folder} is quantized already ({', '.join(types)}); leave draft_quantize out"
            )
        bits = draft_bits(setup)
        config = self.checkpoint.config
        on_gpu = setup.kernels == "triton" or (setup.kernels == "auto" and setup.device.type == "cuda")
        kernels = "triton" if on_gpu else "native"
        try:
            if kernels == "native" and not self._may_be_native:
                raise UnsupportedModel(f"{config.model_type} does not run on the native kernels")
            return self._make(size, kernels=kernels, bits=bits)
        except UnsupportedModel as reason:
            raise quantize_error(self.folder, setup, reason) from reason

    def _window_size(self) -> int:
        """Return how many tokens the draft model may read at once."""
        asked = self.setup.draft_window
        most = self.checkpoint.context
        if asked is None:
            return most
        if not MIN_WINDOW <= asked <= most:
            raise OutriderError(
                f"draft_window is {asked}; the draft in {self.folder} takes from {MIN_WINDOW} to {most} tokens"
            )
        return asked

    def vocabulary_map(self) -> VocabularyMap:
        """Return the map from the target's ids to the draft model's."""
        target, draft = self._token_texts()
        return VocabularyMap.of(target, draft, (self.setup.vocab, self.checkpoint.vocab))

    def with_target_ids(self) -> Target:
        """Make the draft model, wrapped if its ids differ from the target's.

        Raises:
            OutriderError: the draft model has too few of the target's tokens.
        """
        if self.same_vocabulary:
            return self.model()
        vocabulary_map = self.vocabulary_map()
        if vocabulary_map.shared_fraction < _MIN_SHARE:
            raise OutriderError(
                f"the draft in {self.folder} has {vocabulary_map.shared_fraction:.1%} of the"
                f" target's {vocabulary_map.tokens} tokens, too few to draft by tokens; use"
                f" draft-text:{self.folder}"
            )
        return SharedVocabulary(self.model(), vocabulary_map)

    def text_proposer(self) -> Proposer:
        """Make a proposer that drafts by text."""
        target, draft = self._token_texts()
        return TextProposer(self.setup, self.model(tokens_per_token=2), target=target, draft=draft)

    def _token_texts(self) -> tuple[TokenText, TokenText]:
        return faithful_text(self.setup.tokenizer, "the target"), faithful_text(self.checkpoint.tokenizer, self.folder)


def open_model(folder: str, setup: ProposerSetup) -> OpenedModel:
    """Load the checkpoint of a draft model."""
    check_model(folder)
    dtype = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}[setup.dtype]
    if draft_bits(setup) < FULL_BITS:
        dtype = "bfloat16"  # of what is not quantized, also for a target in float32
    checkpoint = _load_sharded(folder, setup, dtype) or load_checkpoint(folder, dtype=dtype, device=str(setup.device))
    opened = OpenedModel(setup=setup, folder=folder, checkpoint=checkpoint)
    _check_source(opened)
    return opened


def _load_sharded(folder: str, setup: ProposerSetup, dtype: str) -> Checkpoint | None:
    """Load this rank's part of a draft model; None: each rank loads the whole draft. Notes the choice in the setup.

    Raises:
        UnsupportedModel: the setup asks for a sharded draft, which does not load or fails the
            check.
        OutriderError: the setup asks for a sharded draft, and this draft cannot be split.
    """
    ranks = current()
    if ranks is None or setup.ranks == 1:
        return None
    known = next((placement for placement in setup.placements if placement.draft == folder), None)
    placement = known or _place(folder, setup, ranks)
    checkpoint = None
    if placement.sharded:
        failure = "another rank cannot load its part"
        try:
            checkpoint = load_checkpoint(folder, dtype=dtype, device=str(setup.device), tp=setup.ranks)
            make_checked_target(checkpoint, slots=1, context=_CHECKED_CONTEXT, kernels="torch", check=setup.check)
        except UnsupportedModel as reason:
            if setup.draft_placement == SHARDED:
                raise
            failure = str(reason)
            checkpoint = None
        alone = f"its part of the draft {folder} cannot be loaded ({failure}); use --draft-placement replicated"
        if not all_ranks(checkpoint is not None, alone):
            checkpoint = None
            placement = replicated(folder, setup.ranks, f"it cannot be split ({failure})")
    if known is None:
        setup.placements.append(placement)
        _log.info("%s", placement)
    return checkpoint


def _place(folder: str, setup: ProposerSetup, ranks: Ranks) -> DraftPlacement:
    """Choose the placement of a draft model."""
    asked = setup.draft_placement
    if has_draft_vocabulary(folder):
        reason = "its LM head is cut to a draft vocabulary"
    elif setup.draft_quantize is not None:
        reason = f"draft_quantize is {setup.draft_quantize}"
    else:
        return place_draft_model(folder, ranks, asked=asked, device=setup.device, dtype=setup.dtype)
    if asked == SHARDED:
        raise OutriderError(
            f"draft_placement is {asked}, and the draft in {folder} cannot be split: {reason}; use auto"
        )
    return replicated(folder, ranks.size, reason)


def _check_source(opened: OpenedModel) -> None:
    """Check that a draft model reads what the target reads.

    Raises:
        OutriderError: only one of them is an encoder-decoder model, or the draft cannot read all
            sources.
    """
    target, draft = opened.setup.source_rules, opened.checkpoint.source
    if target is None and draft is None:
        return
    if target is None or draft is None:
        kinds = ("a decoder-only model", "an encoder-decoder model")
        raise OutriderError(
            f"the draft in {opened.folder} is {kinds[draft is not None]} and the target"
            f" {kinds[target is not None]}; use a draft of the target's kind"
        )
    if not opened.same_vocabulary:
        raise OutriderError(
            f"the draft in {opened.folder} has another vocabulary, with which it cannot read the"
            " target's sources; use a draft with the target's tokenizer"
        )
    if (target.speech is None) != (draft.speech is None):
        raise OutriderError(
            f"the draft in {opened.folder} reads {'text' if draft.speech is None else 'speech'} and"
            f" the target {'text' if target.speech is None else 'speech'}; use a draft that reads"
            " what the target reads"
        )
    if target.speech is not None and draft.speech is not None:
        taken = [(rules.frames, rules.bins) for rules in (target.speech, draft.speech)]
        if taken[0] != taken[1]:
            raise OutriderError(
                f"the draft in {opened.folder} takes {taken[1][0]} frames of {taken[1][1]} bins and"
                f" the target {taken[0][0]} of {taken[0][1]}; use a draft with the target's"
                " features"
            )
    if draft.context < target.context:
        raise OutriderError(
            f"the encoder of the draft in {opened.folder} takes {draft.context} tokens and the"
            f" target's {target.context}; use a draft that takes as many"
        )
