"""Models of every architecture, small and random, and a tokenizer of single bytes."""

import copy
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, WhisperFeatureExtractor

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.target import Target
from outrider.core.types import AudioFeatures, Batch, Draft, DraftBudget, Request, SequenceState, SpeechOutput
from outrider.errors import UnsupportedModel
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.models.loader.model_class import auto_class
from outrider.models.native.library import load_library
from outrider.models.torch.checkpoint import Checkpoint
from outrider.testing import random_tree
from outrider.testing.drive import append, make_round
from tests.helpers.architectures import ARCHITECTURES as ARCHITECTURES
from tests.helpers.architectures import ATTENTION as ATTENTION
from tests.helpers.architectures import ENCODER_DECODER as ENCODER_DECODER
from tests.helpers.architectures import EVERY as EVERY
from tests.helpers.architectures import FAST
from tests.helpers.architectures import NOT_IN_TRANSFORMERS as NOT_IN_TRANSFORMERS
from tests.helpers.architectures import RECURRENT as RECURRENT
from tests.helpers.architectures import REFUSED as REFUSED
from tests.helpers.architectures import REFUSED_BY_CHECK as REFUSED_BY_CHECK
from tests.helpers.architectures import SPEECH as SPEECH
from tests.helpers.architectures import TABLE as TABLE
from tests.helpers.configs import LAYERS as LAYERS
from tests.helpers.configs import VOCAB as VOCAB
from tests.helpers.configs import WINDOW as WINDOW
from tests.helpers.configs import make_config as make_config

_LOUDER = {"decoder.embed": 5, "encoder_attn": 4, "conv": 4}  # factors of weights of speech models


def save(folder: Path, config: PreTrainedConfig, *, seed: int = 0, size: int = VOCAB) -> Path:
    """Write a random model of a configuration, and a tokenizer of `size` tokens. Each weight has an effect."""
    torch.manual_seed(seed)
    model = auto_class(config).from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:  # norms, biases and sinks, which start as ones and zeros
                weight += 0.2 * torch.randn(weight.shape)
        for name, weight in model.named_parameters():
            if name.endswith(".wo.weight"):  # of T5, which otherwise repeats its last token
                weight *= 12
            if config.model_type == "whisper":  # which otherwise repeats one token, whatever it hears
                factors = (factor for part, factor in _LOUDER.items() if part in name)
                weight *= next(factors, 1) if weight.dim() > 1 else 1
    if config.model_type == "whisper":
        extractor(config).save_pretrained(folder)
    save_model(folder, model, size=size)
    if model.config.model_type != config.model_type:  # transformers writes that of the text part alone
        config.save_pretrained(folder)
    return folder


def extractor(config: PreTrainedConfig) -> WhisperFeatureExtractor:
    """The feature extractor of a small speech model, whose recordings have at most one second."""
    assert config.max_source_positions == 50
    return WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=1)


def save_model(folder: Path, model: PreTrainedModel, *, size: int = VOCAB) -> Path:
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer(size).save_pretrained(folder)
    return folder


def tokenizer(size: int = VOCAB) -> PreTrainedTokenizerFast:
    """One token per byte, and special ones up to `size`."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens([f"<{i}>" for i in range(len(letters), size)])
    return PreTrainedTokenizerFast(tokenizer_object=bytewise)


def fast(names: Iterable[str]) -> list[str]:
    """Of the architectures of a test, those that the fast tests run."""
    return [name for name in names if name in FAST]


def _config(name: str) -> PreTrainedConfig:
    """The configuration of an architecture. Skip the test if the installed transformers does not have it."""
    try:
        return EVERY[name]()
    except AttributeError as error:
        if "transformers has no attribute" not in str(error):
            raise
        pytest.skip(f"{error} in version {transformers.__version__}")


class Shelf:
    """Folders of models by name, each made once, and models read from them, each once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[str, Any] = {}
        self._checkpoints: dict[tuple[str, str], Checkpoint] = {}

    def folder(self, name: str) -> Path:
        path = self._root / name
        return path if path.exists() else save(path, _config(name))

    def model(self, name: str) -> Any:
        """The model of transformers, with eager attention."""
        if name not in self._models:
            folder = self.folder(name)
            config = AutoConfig.from_pretrained(folder)
            model_class = auto_class(config)
            attention = "sdpa" if config.model_type == "falcon" else "eager"  # its eager one adds the ALiBi bias twice
            model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
            self._models[name] = model.eval()
        return self._models[name]

    def checkpoint(self, name: str, dtype: str = "float32") -> Checkpoint:
        """A checkpoint with a model of its own. A copy takes a tenth of the time of reading the folder again."""
        if (name, dtype) not in self._checkpoints:
            self._checkpoints[name, dtype] = load_checkpoint(self.folder(name), dtype=dtype, device="cpu")
        checkpoint = self._checkpoints[name, dtype]
        return checkpoint.with_model(copy.deepcopy(checkpoint.model))

    def target(self, name: str, layers: Sequence[int] = (), dtype: str = "float32") -> Target:
        target = make_target(self.checkpoint(name, dtype), slots=4, context=128)
        target.export_hidden_states(layers)
        return target


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """transformers' own greedy completion."""
    ids = torch.tensor([prompt])
    for module in model.modules():
        if hasattr(module, "conv1d_state"):  # RecurrentGemma keeps the state of the sequence before
            module.conv1d_state = None
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def ranked_first(model: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens that transformers ranks first after each prompt and after each beginning of its output.

    They equal the outputs if and only if transformers' own greedy completions do. One pass without a cache computes
    them all, because no token sees the padding behind it.
    """
    texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    first = model(_padded(texts), use_cache=False).logits.argmax(-1).tolist()
    return [row[len(prompt) - 1 : len(text) - 1] for row, prompt, text in zip(first, prompts, texts, strict=True)]


def greedy_of_source(model: Any, source: Sequence[int], count: int) -> list[int]:
    """transformers' own greedy output of an encoder-decoder model."""
    ids = torch.tensor([source])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return out[0, 1:].tolist()


@torch.inference_mode()
def ranked_first_of_sources(
    model: Any, sources: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> list[list[int]]:
    """`ranked_first` of an encoder-decoder model, whose outputs begin with token 0."""
    texts = [[0, *output[:-1]] for output in outputs]
    logits = model(
        input_ids=_padded(sources),
        attention_mask=_mask(sources),
        decoder_input_ids=_padded(texts),
        decoder_attention_mask=_mask(texts),
        use_cache=False,
    ).logits
    return [row[: len(text)] for row, text in zip(logits.argmax(-1).tolist(), texts, strict=True)]


def _padded(texts: Sequence[Sequence[int]]) -> torch.Tensor:
    longest = max(map(len, texts))
    return torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])


def _mask(texts: Sequence[Sequence[int]]) -> torch.Tensor:
    return _padded([[1] * len(text) for text in texts])


def text(rng: random.Random, length: int) -> list[int]:
    """Random tokens, of which some repeat."""
    fresh = [rng.randrange(VOCAB) for _ in range(length)]
    return [fresh[i % 5] if rng.random() < 0.7 else token for i, token in enumerate(fresh)]


def admit(
    target: Target,
    slot: int,
    tokens: Sequence[int],
    source: Sequence[int] | AudioFeatures = (),
    speech_output: SpeechOutput = SpeechOutput.TEXT,
) -> SequenceState:
    request = Request(
        id=slot,
        prompt_token_ids=tuple(tokens),
        params=SamplingParams(),
        seed=0,
        end_ids=frozenset(),
        max_tokens=10**6,
        source_token_ids=() if isinstance(source, AudioFeatures) else tuple(source),
        source_features=source if isinstance(source, AudioFeatures) else None,
        speech_output=speech_output,
    )
    row = SequenceState(request=request, slot=slot, token_ids=list(tokens))
    row.num_cached_tokens = target.cache.admit(slot, tokens)
    return row


def everything(rows: Sequence[SequenceState]) -> Batch:
    """A batch in which each row feeds all tokens that are not in the cache."""
    feeds = tuple(tuple(row.token_ids[row.num_cached_tokens :]) for row in rows)
    return Batch(
        seqs=tuple(rows),
        start=tuple(row.num_cached_tokens for row in rows),
        feed=feeds,
        budget=DraftBudget((6,) * len(rows)),
    )


def branch(draft: Draft, b: int, node: int) -> list[int]:
    """Nodes of row b from the root's child to `node`."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(draft.parent[b, node])
    return path


def grow(target: Target, rows: Sequence[SequenceState], rng: random.Random) -> None:
    """Run one round: draft random trees, accept the branch of a random node, and append a random bonus."""
    batch = everything(rows)
    draft = random_tree([rng.randint(1, 6), *(rng.randint(0, 6) for _ in rows[1:])], VOCAB, rng)
    draft = tree.one_hot_tree(draft.tokens.to(target.device), draft.parent.to(target.device), draft.width)
    scores = target.score(batch, draft)
    paths = [branch(draft, b, rng.randint(-1, width - 1)) for b, width in enumerate(draft.width)]
    emitted = [(*(int(draft.tokens[b, node]) for node in path), rng.randrange(VOCAB)) for b, path in enumerate(paths)]
    done = make_round(batch, draft, scores, [tuple(path) for path in paths], emitted)
    target.cache.commit(done)
    append(done)


def compiles() -> bool:
    """Return whether the native kernels can be compiled or loaded here."""
    try:
        return bool(load_library())
    except UnsupportedModel:
        return False
