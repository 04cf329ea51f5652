"""Write docs/reference/architectures.md from the table of the tests. With --check, exit 1 if the page is out of date.

The page depends on the version of transformers, so --check does nothing with another version than the page names.
"""

import json
import re
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for the table in tests/

import transformers  # noqa: E402
from transformers import (  # noqa: E402
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
)

from outrider.errors import OutriderError, UnsupportedModel  # noqa: E402
from outrider.llm import LLM  # noqa: E402
from outrider.models.loader.load import check_model  # noqa: E402
from tests.helpers import tiny  # noqa: E402
from tests.helpers.architectures import Architecture  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "architectures.md"
VERSION = re.compile(r"transformers (\S+)\.$", re.MULTILINE)
HEAD = """\
# Architectures

`docs/generate_models.py` writes this page from the table in `tests/helpers/architectures.py`, which the tests run, and
from the messages of the loader. It holds for transformers {version}.

[Supported models](models.md) explains targets, backends and options.

## Models that run

Each name is a small random model. In float32, its greedy text with chains of draft tokens is that of
`transformers.generate`, token by token, in batches of different lengths, and the logits of each branch of a token tree
are those of the branch alone (`tests/models/torch/test_architectures.py`, `test_encoder_decoder.py`, `test_speech.py`).

| Column | Yes means | Test |
|---|---|---|
| Prefixes | requests share the cache of a common prefix | `tests/models/torch/test_support.py` |
| `--quantize int8` | all large linear layers are quantized on torch | the same |
| Native | the native CPU kernels run it; they quantize experts as well | the same |
| CUDA graphs | a pass has a fixed shape and never waits for the host, which is tested without a GPU | the same, and \
`tests/gpu` on a GPU |

On a GPU, mixtures of experts in float32 and Gemma 3n wait for the host in code of torch or transformers. Their passes
are not recorded there; they run eagerly, with a warning.

"""
MAPPINGS = (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
)
TITLES = {
    "attention": "### Attention",
    "recurrent": "### Recurrent layers, alone or beside attention",
    "encoder-decoder": "### Encoder-decoder models",
    "speech": "### Speech models",
}
ROW_HEAD = """\
| Prefixes | `--quantize int8` | Native | CUDA graphs | Architectures |
|---|---|---|---|---|
"""


_REFUSED_HEAD = "| Message | `model_type` |\n|---|---|\n"


def main() -> None:
    """Write the page, or compare it."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(render(), "utf-8")
        return
    old = PAGE.read_text("utf-8") if PAGE.is_file() else ""
    named = VERSION.search(old)
    if named and named[1] != transformers.__version__:
        return
    if old != render():
        sys.exit(f"{PAGE.name} is out of date; run python docs/generate_models.py")


def render() -> str:
    """Return the text of the page."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    parts = [HEAD.format(version=transformers.__version__)]
    for kind, title in TITLES.items():
        labels: dict[str, list[str]] = defaultdict(list)  # by the cells that the architectures share
        for name, each in sorted(tiny.TABLE.items()):
            if each.kind == kind:
                labels[_cells(each)].append(_label(name, each))
        rows = [f"| {cells} | {', '.join(names)} |\n" for cells, names in labels.items()]
        parts.append(f"{title}\n\n{ROW_HEAD}{''.join(rows)}\n")
    refused, untested = _loader_answers()
    parts += [_refused_at_load(refused), _refused_by_check(), _unknown(), _untested(untested)]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _label(name: str, architecture: Architecture) -> str:
    model_type = architecture.config().model_type
    label = f"`{model_type}`"
    if name != model_type:
        rest = name.removeprefix(model_type).strip()
        label += f" {rest}" if name.startswith(f"{model_type} ") else f" ({rest})"
    return label


def _cells(architecture: Architecture) -> str:
    answers = (architecture.prefixes, architecture.native, architecture.graphs)
    prefixes, native, graphs = ("yes" if answer else "no" for answer in answers)
    return f"{prefixes} | {architecture.quantized} | {native} | {graphs}"


def _loader_answers() -> tuple[dict[str, list[str]], list[str]]:
    """Return the language models of transformers that the loader refuses, by message, and those without a test."""
    refused: dict[str, list[str]] = defaultdict(list)
    untested = []
    tested = {type(each.config()) for each in tiny.TABLE.values()}
    tested |= {type(config()) for config, _ in tiny.REFUSED_BY_CHECK.values()}
    for model_type in sorted(CONFIG_MAPPING.keys()):
        config_class = CONFIG_MAPPING[model_type]
        if not any(config_class in mapping for mapping in MAPPINGS):
            continue
        message = _answer({"model_type": model_type})
        if "cannot be read" in message:
            continue  # its defaults are invalid
        if message:
            refused[message].append(model_type)
        elif config_class not in tested:
            untested.append(model_type)
    return refused, untested


def _answer(config: Mapping[str, str]) -> str:
    """Return the message of the loader for a config.json, without its model_type; empty if it goes on to load."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            check_model(folder)
        except OutriderError as error:
            return _message(error, config["model_type"], folder)
    return ""


def _message(error: OutriderError, model_type: str, folder: str | Path) -> str:
    text = str(error).replace(f"{folder}/", "").removeprefix(f"{model_type}: ").removeprefix(f"{model_type} ")
    return text.split("; ")[0]


def _refused_at_load(refused: dict[str, list[str]]) -> str:
    rows = "".join(f"| {_cell(message)} | {_names(names)} |\n" for message, names in sorted(refused.items()))
    return (
        "## Models that are refused\n\nOutrider refuses these models of transformers when it reads `config.json`, with"
        f" the settings that transformers has as defaults.\n\n{_REFUSED_HEAD}{rows}"
    )


def _refused_by_check() -> str:
    rows = []
    for name, (config, _) in sorted(tiny.REFUSED_BY_CHECK.items()):
        with tempfile.TemporaryDirectory() as folder:
            try:
                LLM(tiny.save(Path(folder), config()), dtype="float32", device="cpu")
            except UnsupportedModel as error:
                # The size of the difference depends on the machine.
                message = re.sub(r"by [\d.]+%", "by ...%", _message(error, name, folder))
                rows.append(f"| {_cell(message)} | `{name}` |\n")
    return f"The [load check](models.md#the-load-check) refuses these.\n\n{_REFUSED_HEAD}{''.join(rows)}"


def _unknown() -> str:
    message = _answer({"model_type": tiny.NOT_IN_TRANSFORMERS[0]})
    return (
        "## Models that transformers does not have\n\n"
        f"The installed transformers has no {_names(tiny.NOT_IN_TRANSFORMERS)}. For `{tiny.NOT_IN_TRANSFORMERS[0]}` the"
        f" message is:\n\n```text\n{message}\n```\n"
    )


def _untested(names: Iterable[str]) -> str:
    return (
        "## Models without a test\n\nThe loader accepts these, and no test runs them. The"
        f" [load check](models.md#the-load-check) decides when one is loaded.\n\n{_names(names)}\n"
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    main()
