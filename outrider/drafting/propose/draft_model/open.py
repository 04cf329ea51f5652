"""Open draft models and draft heads from their folders."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.core.config import FULL_BITS, SHARDED, draft_weight_bits
from outrider.core.params import AUTO
from outrider.core.placement import DraftPlacement
from outrider.core.proposer import Proposer, ProposerSetup
from outrider.core.target import Target, WeightSharer
from outrider.core.token_text import TokenText
from outrider.core.types import SharedWeights
from outrider.drafting.propose.draft_model.cascade import cascade
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.drafting.propose.draft_model.trained_head import HeadProposer, HeadTreeProposer
from outrider.drafting.propose.draft_model.tree import TreeProposer
from outrider.drafting.propose.draft_model.window import MIN_WINDOW, windowed
from outrider.drafting.propose.placement import place_draft_model, place_head, replicated
from outrider.drafting.propose.vocabulary.candidates import use_candidates
from outrider.drafting.propose.vocabulary.counterparts import faithful_text
from outrider.drafting.propose.vocabulary.intersection import SharedVocabulary, VocabularyMap
from outrider.drafting.propose.vocabulary.reduced import has_draft_vocabulary, read_draft_vocabulary, reduce_vocabulary
from outrider.drafting.propose.vocabulary.text_draft import TextProposer
from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.heads.files import read_context, read_target_info
from outrider.models.heads.formats.base import TargetInfo
from outrider.models.heads.formats.registry import check_projection
from outrider.models.heads.store import HeadModule, is_head, read_head
from outrider.models.heads.targets.base import HeadTarget
from outrider.models.heads.targets.registry import is_autoregressive, make_head_target
from outrider.models.loader.check import make_checked_target
from outrider.models.loader.load import check_model, load_checkpoint
from outrider.models.native.support import may_run
from outrider.models.torch.checkpoint import Checkpoint
from outrider.runtime.ranks import Ranks, all_ranks, current

# Share of the target's tokens that a draft model must have, so that drafting by tokens is as good
# as by text.
_GOOD_SHARE = 0.9
_MIN_SHARE = 0.1  # smallest share for drafting by tokens
_CHECKED_CONTEXT = 64  # tokens of the check of a sharded draft
_log = logging.getLogger("outrider")


def draft_proposer(folder: str, setup: ProposerSetup) -> Proposer:
    """Make `draft:DIR` of a draft head or a draft model.

    A model with another vocabulary drafts by tokens if it has most of the target's tokens, and by
    text otherwise.
    """
    if is_head(folder, lambda: _head_partner(setup)):
        return HeadProposer(setup, _open_head(folder, setup))
    opened = _open_model(folder, setup)
    if opened.same_vocabulary:
        return DraftModelProposer(setup, opened.model())
    vocabulary_map = opened.vocabulary_map()
    by_tokens = vocabulary_map.shared_fraction >= _GOOD_SHARE
    _log.warning(
        "the draft in %s has another vocabulary: of the target's %d tokens it has %.0f%%, and it drafts by %s",
        folder,
        vocabulary_map.tokens,
        100 * vocabulary_map.shared_fraction,
        "tokens" if by_tokens else "text",
    )
    if by_tokens:
        return DraftModelProposer(setup, SharedVocabulary(opened.model(), vocabulary_map))
    return opened.text_proposer()


def mtp_proposer(setup: ProposerSetup) -> Proposer:
    """Make `mtp`, the module for multi-token prediction in the target's own checkpoint.

    Raises:
        OutriderError: the checkpoint has no such module, or it is damaged, or its kind is not
            supported.
    """
    folder = setup.target_folder
    if not (folder and is_head(folder, lambda: _head_partner(setup))):
        if folder and Path(folder).is_dir():
            check_projection(Path(folder))
        raise OutriderError(
            "the target's checkpoint has no module for multi-token prediction; use ngram, draft:DIR or quantized:int4"
        )
    return HeadProposer(setup, _open_head(folder, setup))


def draft_tokens_proposer(folder: str, setup: ProposerSetup) -> Proposer:
    """Make `draft-tokens:DIR`, a draft model that drafts by tokens."""
    return DraftModelProposer(setup, _open_model(folder, setup).with_target_ids())


def draft_text_proposer(folder: str, setup: ProposerSetup) -> Proposer:
    """Make `draft-text:DIR`, a draft model that drafts by text."""
    return _open_model(folder, setup).text_proposer()


def cascade_proposer(folder: str, setup: ProposerSetup) -> Proposer:
    """Make `cascade:DIR`, a draft model that drafts by tokens with n-gram lookup."""
    return DraftModelProposer(setup, cascade(_open_model(folder, setup).with_target_ids()))


def tree_proposer(folder: str, setup: ProposerSetup) -> Proposer:
    """Make `tree:DIR`, a draft head or a draft model that drafts trees."""
    if is_head(folder, lambda: _head_partner(setup)):
        return HeadTreeProposer(setup, _open_head(folder, setup))
    return TreeProposer(setup, _open_model(folder, setup).with_target_ids())


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenedModel:
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
        bits = _bits(setup)
        config = self.checkpoint.config
        on_gpu = setup.kernels == "triton" or (setup.kernels == "auto" and setup.device.type == "cuda")
        kernels = "triton" if on_gpu else "native"
        try:
            if kernels == "native" and not self._may_be_native:
                raise UnsupportedModel(f"{config.model_type} does not run on the native kernels")
            return self._make(size, kernels=kernels, bits=bits)
        except UnsupportedModel as reason:
            raise _not_quantized(self.folder, setup, reason) from reason

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


def _open_head(folder: str, setup: ProposerSetup) -> HeadTarget:
    """Make the target that runs a draft head.

    Raises:
        OutriderError: the target does not export hidden states, or the head belongs to another
            target.
    """
    if not isinstance(setup.target, WeightSharer):
        raise OutriderError(
            f"{folder} needs hidden states that this target does not export; use draft:DIR of a draft model"
        )
    weights = setup.target.share_weights()
    info = _target_info(weights, setup.target.layers)
    if setup.ranks > 1 and all(placement.draft != folder for placement in setup.placements):
        setup.placements.append(place_head(folder, setup.ranks, asked=setup.draft_placement))
    module = read_head(folder, dtype=setup.dtype, device=setup.device, target=info)
    description = module.description
    trained_on = (description.vocab, description.target_hidden, description.target_layers)
    if trained_on != (info.vocab, info.hidden, info.layers):
        raise OutriderError(
            f"{folder} was trained on a target with vocabulary {description.vocab}, width"
            f" {description.target_hidden} and {description.target_layers} layers; this target has"
            f" {info.vocab}, {info.hidden} and {info.layers}, so use the target that the head was"
            " trained on"
        )
    if setup.draft_candidates is not None:
        raise OutriderError(
            f"draft_candidates is {setup.draft_candidates}, and {folder} is a draft head, which shares the"
            " target's LM head; leave draft_candidates out"
        )
    bits = _bits(setup)
    window = _head_window(folder, module, setup)
    try:
        return make_head_target(
            module,
            weights,
            slots=setup.slots,
            context=setup.context,
            window=window,
            kernels=setup.kernels,
            bits=bits,
        )
    except UnsupportedModel as reason:
        if bits == FULL_BITS:
            raise
        raise _not_quantized(folder, setup, reason) from reason


def _bits(setup: ProposerSetup) -> int:
    """Return the bits per weight of the draft.

    Raises:
        OutriderError: the setup asks for fewer bits, and its device or kernels do not support them.
    """
    return draft_weight_bits(setup.draft_quantize, kernels=setup.kernels, device=setup.device.type)


def _not_quantized(folder: str, setup: ProposerSetup, reason: UnsupportedModel) -> OutriderError:
    """Return the error of a draft that cannot be quantized, because it cannot run on the native kernels."""
    return OutriderError(
        f"draft_quantize is {setup.draft_quantize}, and the draft in {folder} cannot have it:"
        f" {reason}; leave draft_quantize out"
    )


def _head_window(folder: str, module: HeadModule, setup: ProposerSetup) -> int | None:
    """Return how many tokens a draft head attends to; None: all tokens of a sequence.

    Raises:
        OutriderError: the setup asks for a window that this kind of head does not support.
    """
    asked = setup.draft_window
    if not is_autoregressive(module):
        if asked is None:
            return None
        raise OutriderError(
            f"draft_window is {asked}, and the head in {folder} supports none: only autoregressive"
            " heads of one module do; leave draft_window out"
        )
    if asked is not None and asked < MIN_WINDOW:
        raise OutriderError(f"draft_window is {asked}; use at least {MIN_WINDOW} tokens")
    size = read_context(folder) if asked is None else asked
    if size is None or size >= setup.context:
        return None
    _log.info("the head in %s attends to the last %d of at most %d tokens", folder, size, setup.context)
    return size


def _head_partner(setup: ProposerSetup) -> TargetInfo | None:
    """Return the facts of the target that a head must match; None if it does not export hidden states."""
    if not isinstance(setup.target, WeightSharer):
        return None
    try:
        return _target_info(setup.target.share_weights(), setup.target.layers)
    except OutriderError:
        return None


def _target_info(weights: SharedWeights, layers: int) -> TargetInfo:
    vocab, hidden = weights.head.shape
    return TargetInfo(
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        head=lambda: weights.head,
        embedding=lambda: weights.embedding,
        layer_types=tuple(weights.kv_view.layer_config.get("layer_types") or ()) if weights.kv_view else (),
    )


def check_draft(folder: str, *, heads: bool) -> None:
    """Check the files of a draft folder before any model is loaded.

    Args:
        folder: the folder of the draft.
        heads: whether draft heads are allowed.

    Raises:
        OutriderError: the folder is not a draft, or does not fit this proposer.
    """
    # The target is not known yet, so assume that a head belongs to the model in its own folder.
    if not (heads and is_head(folder, lambda: _own_target_info(folder))):
        check_model(folder)


def _own_target_info(folder: str) -> TargetInfo | None:
    """Return the facts of the model in a folder as the target of its own head; None if its sizes are unknown."""
    try:
        return read_target_info(folder)
    except OutriderError:
        return None


def _open_model(folder: str, setup: ProposerSetup) -> _OpenedModel:
    """Load the checkpoint of a draft model."""
    check_draft(folder, heads=False)
    dtype = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}[setup.dtype]
    if _bits(setup) < FULL_BITS:
        dtype = "bfloat16"  # of what is not quantized, also for a target in float32
    checkpoint = _load_sharded(folder, setup, dtype) or load_checkpoint(folder, dtype=dtype, device=str(setup.device))
    opened = _OpenedModel(setup=setup, folder=folder, checkpoint=checkpoint)
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


def _check_source(opened: _OpenedModel) -> None:
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
