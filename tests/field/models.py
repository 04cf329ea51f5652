"""A small random target, and the proposers that the situations run with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.core.planner import Planner
from outrider.core.types import Completion
from outrider.engine.build import LoadedTarget, build_engine, load_target
from outrider.llm import LLM
from tests.helpers import tiny

# A draft that is the target itself has all its tokens accepted, and a random one almost none.
PROPOSERS = ("ngram", "suffix", "itself", "random")
KERNELS = (pytest.param("native", marks=pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")), "torch")
EVERY = pytest.mark.parametrize("name", PROPOSERS)
BOTH = pytest.mark.parametrize("pair", KERNELS, indirect=True)
CONTEXT = 256
IDS: Mapping[str, int] = tiny.tokenizer().get_vocab()  # one token per byte
# The bias of a request that writes the letters a, b and c only.
LETTERS = {id: -100.0 for text, id in IDS.items() if text not in "abc"}
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = ("abcabcab", "to be or not to be", "x = 1\ny = 1\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target that is loaded once, and a random draft model with the same vocabulary."""

    folder: Path
    draft: Path
    loaded: LoadedTarget

    def proposer(self, name: str) -> str:
        """Return the expression of one of `PROPOSERS`."""
        folders = {"itself": self.folder, "random": self.draft}
        return f"draft:{folders[name]}" if name in folders else name

    def llm(self, name: str, *, planner: Planner | None = None, **options: Any) -> LLM:
        """Return an engine with a proposer. Engines of a pair share the target, so only the latest may run."""
        config = EngineConfig(proposer=self.proposer(name), **{"k": 8, **options})
        return LLM.from_parts(build_engine(self.loaded, config, planner=planner))

    def generate(
        self, name: str, prompts: Any, params: SamplingParams | Sequence[SamplingParams], **options: Any
    ) -> list[Completion]:
        return self.llm(name, **options).generate(prompts, params)


def make_pair(target: Path, draft: Path, *, kernels: str = "auto", slots: int = 4, context: int = CONTEXT) -> Pair:
    config = EngineConfig(
        target=target, dtype="float32", device="cpu", kernels=kernels, max_num_seqs=slots, max_model_len=context
    )
    return Pair(folder=target, draft=draft, loaded=load_target(config))


def llama(**settings: Any) -> Any:
    """The configuration of a small Llama that the native kernels run."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": CONTEXT}
    return tiny.make_config("LlamaConfig", **{**sizes, **settings})


def token_ids(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]
