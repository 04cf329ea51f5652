"""The options of `outrider train`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

from outrider.core.option import OUTPUT, Option
from outrider.core.params import MAX_DRAFT_LENGTH
from outrider.errors import OutriderError

DRAFT = "draft"  # the kind that trains a small language model instead of a head
_DEFAULT_MAX_TOKENS = 256
_DEFAULT_PROPOSER = "suffix:100000"
_MAX_COUNT = 256  # layers, heads, modules or draft tokens
_MAX_WIDTH = 1 << 20
_SEED_LIMIT = 1 << 62
# Titles of the panels of the help text.
_DRAFT = "Draft"
_DATA = "Data"
_TRAIN = "Training"
_OUT = "Output"
# Options that do not change the trained weights, and paths. The contents of these files are hashed instead.
_NOT_IN_IDENTITY = frozenset(
    {
        "out",
        "target",
        "init_from",
        "init_target",
        "data",
        "eval_data",
        "overwrite",
        "tensorboard",
        "report",
        "threads",
        "device",
        "kernels",
        "eval_every",
        "save_every",
        "k",
        "max_num_seqs",
        "proposer",
        "micro_batch_tokens",
        "cache_dir",
        "cache_gb",
        "max_minutes",
    }
)
# Options that older versions do not have. They are part of the identity only if they do not have their default.
_OPTIONAL_IDENTITY = frozenset(
    {"mask_token_id", "train_target", "hidden_size", "dtype", "quantize", "passes_per_generation"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of `outrider train`. The constructor checks them."""

    out: Annotated[str, Option("DIR")]
    """Folder to write. An interrupted training in it is resumed."""
    data: Annotated[list[str], Option("FILE", _DATA)]
    """JSON lines with prompt or messages, or with source for an encoder-decoder target. Repeatable."""
    target: Annotated[str | None, Option("DIR")] = None
    """Folder of the target, a GGUF file, or a model of the Hugging Face Hub: org/name. Default: @mini, an embedded
    model."""
    eval_data: Annotated[str | None, Option("FILE", _DATA)] = None
    """Prompts for the evaluation. Default: a part of --data that is not trained on."""
    limit: Annotated[int | None, Option(panel=_DATA, min=1)] = None
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
    """Draft tokens per pass of peagle, dflash, dspark and xpress. 0: 7."""
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
    max_num_seqs: Annotated[int, Option(panel=_TRAIN, min=1)] = 32
    """Prompts that the target answers at once."""
    steps_per_generation: Annotated[int, Option(panel=_TRAIN, min=1)] = 8
    """Steps of a pass over the answers of one generation cycle."""
    passes_per_generation: Annotated[int, Option(panel=_TRAIN, min=1)] = 1
    """Passes over the answers before new ones are generated. More passes train longer on fewer answers."""
    eval_every: Annotated[int, Option(panel=_TRAIN, min=0)] = 8
    """Generation cycles between two measurements of tau. 0: only at the end."""
    save_every: Annotated[int, Option(panel=_TRAIN, min=1)] = 1
    """Generation cycles between two saves."""
    k: Annotated[int, Option(panel=_TRAIN, min=1, max=MAX_DRAFT_LENGTH)] = 5
    """Draft tokens per round of the evaluation."""
    seed: Annotated[int, Option(panel=_TRAIN)] = 0
    """Seed of initial weights, data order and answers."""
    proposer: Annotated[str, Option(panel=_DATA)] = _DEFAULT_PROPOSER
    """Proposer that speeds up the generation of answers."""
    cache_dir: Annotated[str | None, Option("DIR", _DATA)] = None
    """Folder that caches answers and hidden states, for later trainings."""
    cache_gb: Annotated[float | None, Option(panel=_DATA)] = None
    """Most gigabytes of --cache-dir. Default: 10."""
    dtype: Annotated[str, Option("NAME", _TRAIN)] = "auto"
    """auto, float32, bfloat16 or float16, for the target. The draft trains in float32."""
    device: Annotated[str, Option(panel=_TRAIN)] = "auto"
    """auto, cpu, cuda, ..."""
    kernels: Annotated[str, Option("NAME", _TRAIN)] = "auto"
    """auto, native or torch, for the target."""
    quantize: Annotated[str | None, Option("NAME", _TRAIN)] = None
    """int8 or int4 weights for the target, on a CPU. The draft learns from the quantized target. Default: the weights
    as stored."""
    threads: Annotated[int | None, Option(panel=_TRAIN)] = None
    """CPU threads."""
    overwrite: Annotated[bool, Option(panel=_TRAIN)] = False
    """Replace a training with other options."""
    tensorboard: Annotated[bool, Option(panel=OUTPUT)] = False
    """Write TensorBoard events. Needs pip install tensorboard."""
    report: Annotated[str | None, Option("FILE", OUTPUT)] = None
    """Write an HTML page with plots, for example report.html. Needs pip install "outrider[report]"."""

    def __post_init__(self) -> None:
        if not self.data:
            raise OutriderError("train needs prompts; give --data FILE with JSON lines that have a prompt")
        if (self.lr is not None and not 0 < self.lr < 1) or not 0 < self.loss_decay <= 1:
            raise OutriderError(
                f"--lr is {self.lr} and --loss-decay {self.loss_decay}; use --lr in (0, 1) and --loss-decay in (0, 1]"
            )
        self._check_sizes()
        if self.max_minutes is not None and (not 0 < self.max_minutes < math.inf or self.epochs != 1):
            raise OutriderError(
                f"--max-minutes is {self.max_minutes}; use a number above 0, and leave --epochs out, because the time"
                " decides how often prompts repeat"
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
        if self.cache_gb is not None and (self.cache_dir is None or not self.cache_gb > 0):
            raise OutriderError("--cache-gb limits --cache-dir; use a number above 0, with --cache-dir DIR")
        if self.train_target is not None:
            self._check_train_target(self.train_target)

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
            "--proposer": self.proposer != _DEFAULT_PROPOSER,
        }
        if given := [name for name, value in answer_options.items() if value]:
            raise OutriderError(
                f"--train-target trains on the texts of --data and generates no answers; leave {given[0]} out"
            )
        if self.quantize is not None:
            raise OutriderError(
                "--train-target changes the weights of the target, and quantized ones stay as they are; leave"
                " --quantize out"
            )
        if not 0 < weight < math.inf:
            raise OutriderError(f"--train-target is {weight}; use a weight above 0, such as 0.3")

    def identity(self) -> dict[str, Any]:
        """Return the options that a resumed training must have in common with the interrupted one."""
        defaults = {field.name: field.default for field in fields(self)}
        unused = {name for name in _OPTIONAL_IDENTITY if getattr(self, name) == defaults[name]}
        return {name: value for name, value in asdict(self).items() if name not in _NOT_IN_IDENTITY | unused}
