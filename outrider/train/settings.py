"""The options of `outrider train`."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

from outrider.core.config import TARGET_OPTIONS, EngineConfig
from outrider.core.option import OUTPUT, Option, Shown, as_json
from outrider.core.params import check_draft_length
from outrider.errors import OutriderError

DRAFT = "draft"  # the kind that trains a small language model instead of a head
_DEFAULT_MAX_TOKENS = 256
_MAX_COUNT = 256  # layers, heads, modules or draft tokens
_MAX_WIDTH = 1 << 20
_SEED_LIMIT = 1 << 62
# Titles of the panels of the help text.
_DRAFT = "Draft"
_DATA = "Data"
_TRAIN = "Training"
# What trains a draft, where the user does not say otherwise.
TRAINING_ENGINE = EngineConfig(proposer="suffix:100000", max_num_seqs=32, k=5)
# Options that do not change the trained weights.
_NO_CHANGE = {"device", "eval_every", "k", "kernels", "max_minutes", "max_num_seqs", "micro_batch_tokens", "overwrite"}
_NO_CHANGE |= {"proposer", "save_every", "tensorboard", "threads"}
# Paths, and what belongs to them. The contents of the files are hashed instead.
_PATHS = {"cache_dir", "cache_dir_gb", "data", "eval_data", "init_from", "init_target", "out", "target"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSettings:
    """What to train."""

    kind: Annotated[str, Option("KIND", argument=True)]
    """eagle3, eagle31, slim, peagle, mtp, medusa, hydra, dflash, jetspec, dflash2, dspark, xpress, domino, kv-sharing
    or draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of `outrider train`. The constructor checks them."""

    engine: Annotated[
        EngineConfig,
        Shown(
            (*TARGET_OPTIONS, "proposer", "max_num_seqs", "k"),
            notes={
                "dtype": "The draft trains in float32.",
                "quantize": "The draft learns from the quantized target.",
                "proposer": "Here it speeds up the generation of answers.",
                "max_num_seqs": "Here prompts that the target answers at once.",
                "k": "Here a number from 1, of the evaluation.",
            },
        ),
    ] = TRAINING_ENGINE
    out: Annotated[str, Option("DIR")]
    """Folder to write. An interrupted training in it is resumed."""
    data: Annotated[list[str], Option("FILE", _DATA)]
    """JSON lines with prompt or messages, or with source for an encoder-decoder target. Repeatable."""
    eval_data: Annotated[str | None, Option("FILE", _DATA)] = None
    """Prompts for the evaluation. Default: a part of --data that is not trained on."""
    max_prompts: Annotated[int | None, Option(panel=_DATA, min=1)] = None
    """Prompts to train on. Default: all."""
    epochs: Annotated[int, Option(panel=_DATA, min=1)] = 1
    """Passes over the prompts."""
    max_minutes: Annotated[float | None, Option(panel=_TRAIN)] = None
    """Train for so many minutes instead of --epochs: prompts repeat, and the learning rate follows the time.
    Evaluations do not count. A longer time continues a finished training."""
    answers_per_prompt: Annotated[int, Option(panel=_DATA, min=0)] = 0
    """Different answers that the target generates to each prompt. 0: one per epoch."""
    max_tokens: Annotated[int, Option(panel=_DATA, min=1)] = _DEFAULT_MAX_TOKENS
    """Most tokens of an answer."""
    temperature: Annotated[float, Option(panel=_DATA, min=0.0)] = 1.0
    """Sampling temperature of the answers."""
    ignore_eos: Annotated[bool, Option(panel=_DATA)] = False
    """Continue answers after end-of-text, up to --max-tokens."""
    train_on_prompts: Annotated[bool, Option(panel=_DATA)] = False
    """Train on the tokens of the prompts as well as of the answers."""
    init_from: Annotated[str | None, Option("DIR", _DRAFT)] = None
    """Weights to start from: a trained draft of the same kind, or a small model for the kind draft."""
    init_target: Annotated[str | None, Option("DIR", _DRAFT)] = None
    """Target that --init-from was trained for, if it is not --target. Its input projection is fitted to the new
    target."""
    depth: Annotated[int, Option(panel=_DRAFT, min=0)] = 0
    """Decoder layers, or heads of medusa and hydra. 0: one layer, four heads."""
    intermediate_size: Annotated[int, Option(panel=_DRAFT, min=0)] = 0
    """Width of the MLP. 0: 8/3 of the hidden size, as in Llama."""
    hidden_size: Annotated[int | None, Option(panel=_DRAFT, min=1)] = None
    """Width of an EAGLE-3 draft. Default: the width of the target; half of it for slim."""
    draft_vocab_size: Annotated[int, Option(panel=_DRAFT, min=0)] = 0
    """Size of the draft vocabulary: the most frequent tokens. 0: all tokens."""
    own_lm_head: Annotated[bool | None, Option(panel=_DRAFT, flags="--own-lm-head/--shared-lm-head")] = None
    """Train an output layer, or share that of the target. Default: own for the EAGLE-3 kinds."""
    centroids: Annotated[int, Option(panel=_DRAFT, min=0)] = 0
    """Token clusters of kv-sharing. Only the likeliest clusters get logits. 0: all tokens get them."""
    centroid_top_k: Annotated[int, Option(panel=_DRAFT, min=0)] = 0
    """Clusters whose tokens get logits. 0: an eighth of --centroids."""
    draft_tokens: Annotated[int, Option(panel=_DRAFT, min=0)] = 0
    """Draft tokens per pass of peagle and of the kinds that draft a block. 0: 7."""
    mask_token_id: Annotated[int | None, Option(panel=_DRAFT, min=0)] = None
    """Mask a block with the embedding of this token, as other formats do. Default: a trained mask."""
    mtp_modules: Annotated[int, Option(panel=_DRAFT, min=1)] = 1
    """Modules of mtp, one per draft token. 1: one module is applied repeatedly."""
    train_target: Annotated[float | None, Option("WEIGHT", _TRAIN)] = None
    """Train the target together with an mtp draft, on the texts of --data. Weight of the draft's loss, for example
    0.3."""
    ttt_length: Annotated[int | None, Option(panel=_TRAIN, min=1)] = None
    """Draft tokens that training unrolls (training-time test). Default: 4; 1 for a draft model; all for heads, modules
    and blocks."""
    multi_step_share: Annotated[float, Option(panel=_TRAIN, min=0.0, max=1.0)] = 1.0
    """Share of positions that train more than the first draft token."""
    loss_decay: Annotated[float, Option(panel=_TRAIN, min=0.0)] = 0.8
    """Factor of the loss from one draft token to the next."""
    loss: Annotated[str, Option(panel=_TRAIN)] = "ce"
    """ce, kl, kl2, rkl, jsd, tv, nla, hybrid, length; or ce:0.1,tv:0.9."""
    lr: Annotated[float | None, Option(panel=_TRAIN)] = None
    """Peak learning rate. Default: 1e-3; 1e-4 for a draft model."""
    batch_size: Annotated[int, Option(panel=_TRAIN, min=1)] = 16
    """Sequences per step and device."""
    micro_batch_tokens: Annotated[int, Option(panel=_TRAIN, min=1)] = 2048
    """Tokens per forward pass within a step."""
    steps_per_generation: Annotated[int, Option(panel=_TRAIN, min=1)] = 8
    """Steps of a pass over the answers of one generation cycle."""
    passes_per_generation: Annotated[int, Option(panel=_TRAIN, min=1)] = 1
    """Passes over the answers before new ones are generated. More passes train longer on fewer answers."""
    eval_every: Annotated[int, Option(panel=_TRAIN, min=0)] = 8
    """Generation cycles between two measurements of tau. 0: only at the end."""
    save_every: Annotated[int, Option(panel=_TRAIN, min=1)] = 1
    """Generation cycles between two saves."""
    seed: Annotated[int, Option(panel=_TRAIN)] = 0
    """Seed of initial weights, data order and answers."""
    cache_dir: Annotated[str | None, Option("DIR", _DATA)] = None
    """Folder that caches answers and hidden states, for later trainings."""
    cache_dir_gb: Annotated[float | None, Option("GB", _DATA)] = None
    """Most gigabytes of --cache-dir. Default: 10."""
    overwrite: Annotated[bool, Option(panel=_TRAIN)] = False
    """Replace a training with other options."""
    tensorboard: Annotated[bool, Option(panel=OUTPUT)] = False
    """Write TensorBoard events. Needs pip install tensorboard."""

    def __post_init__(self) -> None:
        check_draft_length(self.engine.k, least=1)
        if not self.data:
            raise OutriderError("train needs prompts; give --data FILE with JSON lines that have a prompt")
        if (self.lr is not None and not 0 < self.lr < 1) or not 0 < self.loss_decay <= 1:
            raise OutriderError(
                f"--lr is {self.lr} and --loss-decay {self.loss_decay}; use --lr in (0, 1) and --loss-decay in (0, 1]"
            )
        self._check_sizes()
        if self.max_minutes is not None and (not 0 < self.max_minutes < math.inf or self.epochs != 1):
            raise OutriderError(
                f"--max-minutes is {self.max_minutes}; use a number above 0, and leave --epochs"
                " out, because the time decides how often prompts repeat"
            )
        if self.init_target is not None and self.init_from is None:
            raise OutriderError(
                "--init-target names the target that --init-from was trained for; add --init-from DIR, or leave it out"
            )
        if not self.multi_step_share:
            raise OutriderError(
                "--multi-step-share is 0, so only the first draft token would be trained; use --ttt-length 1 for that"
            )
        if self.centroid_top_k and not self.centroids:
            raise OutriderError("--centroid-top-k chooses among --centroids; add --centroids N, or leave it out")
        if self.cache_dir_gb is not None and (self.cache_dir is None or not self.cache_dir_gb > 0):
            raise OutriderError("--cache-dir-gb limits --cache-dir; use a number above 0, with --cache-dir DIR")
        if self.train_target is not None:
            self._check_train_target(self.train_target)

    @property
    def proposer(self) -> str:
        """The expression of what speeds up the generation of answers."""
        return str(self.engine.proposer)

    @property
    def k(self) -> int:
        """Draft tokens per round of the evaluation."""
        return int(self.engine.k)

    def _check_sizes(self) -> None:
        """Reject sizes that do not fit into any machine."""
        limits = (
            ("ttt-length", self.ttt_length or 0, _MAX_COUNT),
            ("depth", self.depth, _MAX_COUNT),
            ("draft-tokens", self.draft_tokens, _MAX_COUNT),
            ("centroids", self.centroids, _MAX_WIDTH),
            ("mtp-modules", self.mtp_modules, _MAX_COUNT),
            ("intermediate-size", self.intermediate_size, _MAX_WIDTH),
            ("hidden-size", self.hidden_size or 0, _MAX_WIDTH),
        )
        for name, size, limit in limits:
            if size > limit:
                raise OutriderError(f"--{name} is {size}; use {limit} at most")
        if not -_SEED_LIMIT <= self.seed < _SEED_LIMIT:
            raise OutriderError(f"--seed is {self.seed}; use a number of fewer than 19 digits")

    def _check_train_target(self, weight: float) -> None:
        """Reject options for the generation of answers, because --train-target trains on the texts of --data.

        Quantized weights are rejected as well.
        """
        answer_options = {
            "--answers-per-prompt": self.answers_per_prompt,
            "--max-tokens": self.max_tokens != _DEFAULT_MAX_TOKENS,
            "--temperature": self.temperature != 1.0,
            "--ignore-eos": self.ignore_eos,
            "--train-on-prompts": self.train_on_prompts,
            "--cache-dir": self.cache_dir,
            "--proposer": self.engine.proposer != TRAINING_ENGINE.proposer,
        }
        if given := [name for name, value in answer_options.items() if value]:
            raise OutriderError(
                f"--train-target trains on the texts of --data and generates no answers; leave {given[0]} out"
            )
        if self.engine.quantize is not None:
            raise OutriderError(
                "--train-target changes the weights of the target, and quantized ones stay as they"
                " are; leave --quantize out"
            )
        if not 0 < weight < math.inf:
            raise OutriderError(f"--train-target is {weight}; use a weight above 0, such as 0.3")

    def identity(self) -> dict[str, Any]:
        """Return the options that a resumed training must share with the interrupted one."""
        return {name: value for name, value in as_json(self).items() if name not in _NO_CHANGE | _PATHS}
