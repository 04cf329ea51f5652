"""The options of `outrider train`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

import typer

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

    out: Annotated[str, typer.Option(metavar="DIR", help="Folder to write. An interrupted training in it is resumed.")]
    data: Annotated[
        list[str],
        typer.Option(
            metavar="FILE",
            help="JSON lines with prompt or messages, or with source for an encoder-decoder target. Repeatable.",
            rich_help_panel=_DATA,
        ),
    ]
    target: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the target, a GGUF file, or a model of the Hugging Face Hub: org/name. Default: @mini, an"
            " embedded model.",
        ),
    ] = None
    eval_data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Prompts for the evaluation. Default: a part of --data that is not trained on.",
            rich_help_panel=_DATA,
        ),
    ] = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="Prompts to train on. Default: all.", rich_help_panel=_DATA)
    ] = None
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the prompts.", rich_help_panel=_DATA)] = 1
    max_minutes: Annotated[
        float | None,
        typer.Option(
            help="Train for so many minutes instead of --epochs: prompts repeat, and the learning rate follows the"
            " time. Evaluations do not count. A longer time continues a finished training.",
            rich_help_panel=_TRAIN,
        ),
    ] = None
    answers_per_prompt: Annotated[
        int,
        typer.Option(
            min=0,
            help="Different answers that the target generates to each prompt. 0: one per epoch.",
            rich_help_panel=_DATA,
        ),
    ] = 0
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.", rich_help_panel=_DATA)] = (
        _DEFAULT_MAX_TOKENS
    )
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature of the answers.", rich_help_panel=_DATA)
    ] = 1.0
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Continue answers after end-of-text, up to --max-tokens.", rich_help_panel=_DATA
        ),
    ] = False
    train_on_prompts: Annotated[
        bool,
        typer.Option(
            "--train-on-prompts",
            help="Train on the tokens of the prompts as well as of the answers.",
            rich_help_panel=_DATA,
        ),
    ] = False
    init_from: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Weights to start from: a trained draft of the same kind, or a small model for the kind draft.",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    init_target: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Target that --init-from was trained for, if it is not --target. Its input"
            " projection is fitted to the new target.",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    depth: Annotated[
        int,
        typer.Option(
            min=0,
            help="Decoder layers, or heads of medusa and hydra. 0: one layer, four heads.",
            rich_help_panel=_DRAFT,
        ),
    ] = 0
    intermediate_size: Annotated[
        int,
        typer.Option(min=0, help="Width of the MLP. 0: 8/3 of the hidden size, as in Llama.", rich_help_panel=_DRAFT),
    ] = 0
    hidden_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Width of an EAGLE-3 draft. Default: the width of the target; half of it for slim.",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    draft_vocab_size: Annotated[
        int,
        typer.Option(
            min=0, help="Size of the draft vocabulary: the most frequent tokens. 0: all tokens.", rich_help_panel=_DRAFT
        ),
    ] = 0
    own_lm_head: Annotated[
        bool | None,
        typer.Option(
            "--own-lm-head/--shared-lm-head",
            help="Train an output layer, or share that of the target. Default: own for the EAGLE-3 kinds.",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    centroids: Annotated[
        int,
        typer.Option(
            min=0,
            help="Token clusters of kv-sharing. Only the likeliest clusters get logits. 0: all tokens get them.",
            rich_help_panel=_DRAFT,
        ),
    ] = 0
    centroid_top_k: Annotated[
        int,
        typer.Option(
            min=0, help="Clusters whose tokens get logits. 0: an eighth of --centroids.", rich_help_panel=_DRAFT
        ),
    ] = 0
    draft_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Draft tokens per pass of peagle, dflash, dspark and xpress. 0: 7.", rich_help_panel=_DRAFT
        ),
    ] = 0
    mask_token_id: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Mask a block with the embedding of this token, as other formats do. Default: a trained mask.",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    mtp_modules: Annotated[
        int,
        typer.Option(
            min=1,
            help="Modules of mtp, one per draft token. 1: one module is applied repeatedly.",
            rich_help_panel=_DRAFT,
        ),
    ] = 1
    train_target: Annotated[
        float | None,
        typer.Option(
            metavar="WEIGHT",
            help="Train the target together with an mtp draft, on the texts of --data."
            " Weight of the draft's loss, for example 0.3.",
            rich_help_panel=_TRAIN,
        ),
    ] = None
    ttt_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Draft tokens that training unrolls (training-time test). Default: 4; 1 for"
            " a draft model; all for heads, modules and blocks.",
            rich_help_panel=_TRAIN,
        ),
    ] = None
    multi_step_share: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of positions that train more than the first draft token.",
            rich_help_panel=_TRAIN,
        ),
    ] = 1.0
    loss_decay: Annotated[
        float,
        typer.Option(min=0.0, help="Factor of the loss from one draft token to the next.", rich_help_panel=_TRAIN),
    ] = 0.8
    loss: Annotated[
        str,
        typer.Option(help="ce, kl, kl2, rkl, jsd, tv, nla, hybrid, length; or ce:0.1,tv:0.9.", rich_help_panel=_TRAIN),
    ] = "ce"
    lr: Annotated[
        float | None,
        typer.Option(help="Peak learning rate. Default: 1e-3; 1e-4 for a draft model.", rich_help_panel=_TRAIN),
    ] = None
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per step and device.", rich_help_panel=_TRAIN)] = 16
    micro_batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per forward pass within a step.", rich_help_panel=_TRAIN)
    ] = 2048
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Prompts that the target answers at once.", rich_help_panel=_TRAIN)
    ] = 32
    steps_per_generation: Annotated[
        int,
        typer.Option(min=1, help="Steps of a pass over the answers of one generation cycle.", rich_help_panel=_TRAIN),
    ] = 8
    passes_per_generation: Annotated[
        int,
        typer.Option(
            min=1,
            help="Passes over the answers before new ones are generated. More passes train longer on fewer answers.",
            rich_help_panel=_TRAIN,
        ),
    ] = 1
    eval_every: Annotated[
        int,
        typer.Option(
            min=0, help="Generation cycles between two measurements of tau. 0: only at the end.", rich_help_panel=_TRAIN
        ),
    ] = 8
    save_every: Annotated[
        int, typer.Option(min=1, help="Generation cycles between two saves.", rich_help_panel=_TRAIN)
    ] = 1
    k: Annotated[
        int,
        typer.Option(
            "--k",
            min=1,
            max=MAX_DRAFT_LENGTH,
            help="Draft tokens per round of the evaluation.",
            rich_help_panel=_TRAIN,
        ),
    ] = 5
    seed: Annotated[
        int, typer.Option(help="Seed of initial weights, data order and answers.", rich_help_panel=_TRAIN)
    ] = 0
    proposer: Annotated[
        str, typer.Option(help="Proposer that speeds up the generation of answers.", rich_help_panel=_DATA)
    ] = _DEFAULT_PROPOSER
    cache_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder that caches answers and hidden states, for later trainings.",
            rich_help_panel=_DATA,
        ),
    ] = None
    cache_gb: Annotated[
        float | None,
        typer.Option("--cache-gb", help="Most gigabytes of --cache-dir. Default: 10.", rich_help_panel=_DATA),
    ] = None
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="auto, float32, bfloat16 or float16, for the target. The draft trains in float32.",
            rich_help_panel=_TRAIN,
        ),
    ] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...", rich_help_panel=_TRAIN)] = "auto"
    kernels: Annotated[
        str, typer.Option(metavar="NAME", help="auto, native or torch, for the target.", rich_help_panel=_TRAIN)
    ] = "auto"
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="int8 or int4 weights for the target, on a CPU. The draft learns from the quantized target. Default:"
            " the weights as stored.",
            rich_help_panel=_TRAIN,
        ),
    ] = None
    threads: Annotated[int | None, typer.Option(help="CPU threads.", rich_help_panel=_TRAIN)] = None
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace a training with other options.", rich_help_panel=_TRAIN),
    ] = False
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard", help="Write TensorBoard events. Needs pip install tensorboard.", rich_help_panel=_OUT
        ),
    ] = False
    report: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='Write an HTML page with plots, for example report.html. Needs pip install "outrider\\[report]".',
            rich_help_panel=_OUT,
        ),
    ] = None

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
