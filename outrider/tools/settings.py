"""The options of the tools for drafts: `inspect`, `convert`, `export`, `index` and `layers`."""

from dataclasses import dataclass, field
from typing import Annotated

from outrider.core.config import TARGET_OPTIONS, EngineConfig
from outrider.core.option import MEASURE, MODEL, OUTPUT, SAMPLING, Option, Shown
from outrider.lab.common.settings import PromptSettings

# The target alone.
PLAIN_ENGINE = EngineConfig(proposer="none", k=0, prefix_caching=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """The options of `outrider index`."""

    files: Annotated[list[str], Option("FILES", argument=True)]
    """Texts, a document each; *.jsonl and *.ndjson hold a document in each line."""
    engine: Annotated[EngineConfig, Shown(("target",))] = field(default_factory=EngineConfig)
    out: Annotated[str, Option("DIR", OUTPUT)]
    """Folder to write."""
    field: Annotated[str | None, Option("NAME")] = None
    """Field of a JSON line that holds its text or messages. Default: the first of text, prompt and messages that
    exists."""
    force: Annotated[bool, Option(panel=OUTPUT)] = False
    """Replace a datastore that is there already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """A trained draft head, and the model that it belongs to."""

    folder: Annotated[str, Option("DIR", argument=True)]
    """Folder of a trained draft head, in any supported format, or its name on the Hub."""
    target: Annotated[str | None, Option("DIR", MODEL)] = None
    """Folder of the model that the draft belongs to, or its name on the Hugging Face Hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertSettings(HeadSettings):
    """The options of `outrider convert`."""

    to: Annotated[str, Option("FORMAT", OUTPUT)]
    """Name of the format; docs/reference/formats.md lists them."""
    out: Annotated[str, Option("DIR", OUTPUT)]
    """Folder to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings(HeadSettings):
    """The options of `outrider export`."""

    folder: Annotated[str, Option("DRAFT", argument=True)]
    """Folder of a draft model or a draft head, its name on the Hub, or suffix."""
    engine: Annotated[str, Option("ENGINE", flags="--for")]
    """vllm, sglang, llama.cpp, mlx, ollama or tensorrt-llm."""
    out: Annotated[str, Option("DIR", OUTPUT)]
    """An empty or new folder to write."""
    k: Annotated[int | None, Option("N")] = None
    """Draft tokens per round. Without it, give --advice."""
    advice: Annotated[str | None, Option("FILE")] = None
    """Take the k that `outrider tune --out FILE` found to be the fastest."""
    batch: Annotated[int | None, Option("N", min=1)] = None
    """With --advice: sequences at once on the engine. Default: 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersSettings(PromptSettings):
    """The options of `outrider layers`."""

    engine: Annotated[EngineConfig, Shown(TARGET_OPTIONS)] = PLAIN_ENGINE
    limit: Annotated[int | None, Option(panel=MEASURE)] = 4
    """Prompts of each category."""
    max_tokens: Annotated[int, Option(panel=SAMPLING)] = 64
    max_trials: Annotated[int, Option(panel=MEASURE)] = 100
    """Most sets of layers to try."""
