"""The drafts that other engines read: vLLM 0.33, SGLang 0.5.23, llama.cpp of October 2026, mlx-lm 0.32, mlx-vlm 0.7,
Ollama and TensorRT-LLM 1. A recipe is tested if the engine has run such a draft of ours."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote, split
from types import MappingProxyType
from typing import Any

from outrider.errors import OutriderError, either
from outrider.models.heads.description import Kind

MODEL = "draft model"  # a whole small language model; other kinds are those of draft heads, and `SUFFIX`
GGUF = "gguf"  # a layout: one GGUF file
FOLDER = "folder"  # a layout: the folder of the model as it is
IN_TARGET = "in target"  # a layout: the checkpoint of the target with the module in it
NOTHING = "nothing"  # a layout: no files, because the proposer has no weights
TARGET = "TARGET"  # in commands, if no target is given
MASKED = "a block with windows or causal layers"  # a kind: a DFlash head with such an attention
SUFFIX = "suffix"  # the proposer of this name, which runs inside of the engine

_VLLM_DRAFTS = "outrider.drafting.plugins.vllm.Drafts"  # its default proposer is `suffix` with a history
_NO_MTP = "no command for MTP modules was checked"
_QWEN = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
_FAMILIES = ("MiMoForCausalLM", *_QWEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The subject of a recipe's commands."""

    path: str  # of the written draft
    target: str  # folder of the target, the name of a model on the Hub, or TARGET
    target_gguf: str  # the target as one GGUF file
    converts_target: bool = False  # the command first writes `target_gguf` with the converter of llama.cpp
    k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one engine runs one kind of draft."""

    layout: str  # `FOLDER`, `GGUF`, `NOTHING`, or a format of draft heads
    command: Callable[[Draft], str]  # the lines of a shell script
    tested: str = ""  # what was run; "": nothing
    files: Callable[[Draft], Mapping[str, str]] = lambda draft: {}  # more files by name
    note: str = ""
    families: tuple[str, ...] = ()  # with `IN_TARGET`: architectures of the targets whose modules the engine runs
    needs_target_gguf: bool = False  # the command reads the target as a GGUF file
    converts_head: bool = False  # the command converts the head with the tokenizer of the target
    needs_whole_block: bool = False  # the engine refuses a k that is not that of the whole block of a head


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherEngine:
    """An engine, and what it does with each kind of draft."""

    title: str
    recipes: Mapping[str, Recipe]
    reasons: Mapping[str, str]  # why it runs no other kinds, by kind; "" for all that are not named

    def recipe(self, kind: str) -> Recipe:
        """Return the recipe of a kind of draft. Raises OutriderError if the engine does not run it."""
        if kind in self.recipes:
            return self.recipes[kind]
        reason = self.reasons.get(kind, self.reasons.get("", "it has no such drafts"))
        known = ", ".join(sorted(self.recipes))
        raise OutriderError(f"{self.title} cannot run a draft of kind {kind}: {reason}; it runs {known}")


def _vllm(method: str, **others: Any) -> Callable[[Draft], str]:
    def command(draft: Draft) -> str:
        config = {"method": method, "model": draft.path, "num_speculative_tokens": draft.k, **others}
        return f"vllm serve {quote(draft.target)} \\\n  --speculative-config {quote(json.dumps(config))}"

    return command


def _vllm_mtp(draft: Draft) -> str:
    config = json.dumps({"method": "mtp", "num_speculative_tokens": draft.k})
    return f"vllm serve {quote(draft.path)} \\\n  --speculative-config {quote(config)}"


def _vllm_suffix(draft: Draft) -> str:
    return _vllm("custom_class")(replace(draft, path=_VLLM_DRAFTS))


def _sglang(algorithm: str) -> Callable[[Draft], str]:
    def command(draft: Draft) -> str:
        return (
            f"python -m sglang.launch_server --model-path {quote(draft.target)} \\\n"
            f"  --speculative-algorithm {algorithm} --speculative-draft-model-path {quote(draft.path)} \\\n"
            f"  --speculative-num-steps {draft.k} --speculative-eagle-topk 1"
            f" --speculative-num-draft-tokens {draft.k + 1}"
        )

    return command


def _sglang_mtp(draft: Draft) -> str:
    return (
        f"python -m sglang.launch_server --model-path {quote(draft.path)} \\\n"
        f"  --speculative-algorithm NEXTN --speculative-num-steps {draft.k} --speculative-eagle-topk 1"
        f" --speculative-num-draft-tokens {draft.k + 1}"
    )


def _target_conversion(draft: Draft) -> str:
    """Return the line that writes the target as a GGUF file, if there is none."""
    if not draft.converts_target:
        return ""
    return (
        f"python convert_hf_to_gguf.py {quote(draft.target)} --outtype bf16 \\\n"
        f"  --outfile {quote(draft.target_gguf)}\n"
    )


def _head_conversion(draft: Draft, file: str) -> str:
    return (
        f"python convert_hf_to_gguf.py {quote(draft.path)} --target-model-dir {quote(draft.target)} \\\n"
        f"  --outtype bf16 --outfile {quote(file)}\n"
    )


def _llamacpp_head(kind: str) -> Callable[[Draft], str]:
    def command(draft: Draft) -> str:
        file = f"{draft.path}/{kind}.gguf"
        return (
            f"{_target_conversion(draft)}{_head_conversion(draft, file)}"
            f"llama-server -m {quote(draft.target_gguf)} -md {quote(file)} \\\n"
            f"  --spec-type draft-{kind} --spec-draft-n-max {draft.k}"
        )

    return command


def _llamacpp_mtp(draft: Draft) -> str:
    file = quote(f"{draft.path}.gguf")
    return (
        f"python convert_hf_to_gguf.py {quote(draft.path)} --outtype bf16 --outfile {file}\n"
        f"llama-server -m {file} --spec-type draft-mtp --spec-draft-n-max {draft.k}"
    )


def _llamacpp_model(draft: Draft) -> str:
    return (
        f"{_target_conversion(draft)}llama-server -m {quote(draft.target_gguf)} -md {quote(draft.path)} \\\n"
        f"  --spec-type draft-simple --spec-draft-n-max {draft.k}"
    )


def _mlx_model(draft: Draft) -> str:
    return f"mlx_lm.server --model {quote(draft.target)} --draft-model {quote(draft.path)} --num-draft-tokens {draft.k}"


def _mlx_head(kind: str) -> Callable[[Draft], str]:
    def command(draft: Draft) -> str:
        return (
            f"python -m mlx_vlm.generate --model {quote(draft.target)} --draft-model {quote(draft.path)} \\\n"
            f"  --draft-kind {kind} --draft-block-size {draft.k + 1} --prompt 'def add(a, b):'"
        )

    return command


def _ollama(draft: Draft) -> str:
    file = f"{draft.path}/dflash.gguf"
    modelfile = Path(draft.path).parent / "Modelfile"
    return (
        f"{_target_conversion(draft)}{_head_conversion(draft, file)}"
        f"ollama create with-draft -f {quote(str(modelfile))}\nollama run with-draft"
    )


def _modelfile(draft: Draft) -> Mapping[str, str]:
    """Return the Modelfile. Ollama reads relative paths from the folder of the file, so all paths are absolute."""
    target = draft.target_gguf if draft.target == TARGET else str(Path(draft.target_gguf).absolute())
    head = Path(draft.path, "dflash.gguf").absolute()
    return {"Modelfile": f"FROM {target}\nDRAFT {head}\nPARAMETER draft_num_predict {draft.k}\n"}


def _trtllm(draft: Draft) -> str:
    return f"trtllm-serve {quote(draft.target)} --backend pytorch --config {quote(draft.path)}/../speculation.yaml"


def _trtllm_config(kind: str) -> Callable[[Draft], Mapping[str, str]]:
    def files(draft: Draft) -> Mapping[str, str]:
        lines = (
            "speculative_config:",
            f"  decoding_type: {kind}",
            f"  max_draft_len: {draft.k}",
            f"  speculative_model: {json.dumps(str(Path(draft.path).absolute()))}",
        )
        return {"speculation.yaml": "\n".join(lines) + "\n"}

    return files


_COMPARED = "vLLM 0.32.0 for CPU, with the accepted lengths of Outrider (docs/how-to/export.md)"
_LLAMACPP = "llama.cpp b11549"

ENGINES: Mapping[str, OtherEngine] = MappingProxyType(
    {
        "vllm": OtherEngine(
            title="vLLM",
            recipes={
                MODEL: Recipe(layout=FOLDER, command=_vllm("draft_model"), tested=_COMPARED),
                Kind.EAGLE: Recipe(layout="eagle", command=_vllm("eagle")),
                Kind.EAGLE3: Recipe(layout="eagle3-speculators", command=_vllm("eagle3"), tested=_COMPARED),
                Kind.PEAGLE: Recipe(
                    layout="peagle-speculators", command=_vllm("eagle3", parallel_drafting=True), tested=_COMPARED
                ),
                Kind.DFLASH: Recipe(layout="dflash-speculators", command=_vllm("dflash"), tested=_COMPARED),
                MASKED: Recipe(layout="dflash", command=_vllm("dflash")),
                Kind.DFLASH2: Recipe(layout="dflash2", command=_vllm("dflash"), note="needs a GPU"),
                Kind.DSPARK: Recipe(
                    layout="dspark-speculators", command=_vllm("dspark"), note="needs a GPU; vLLM for CPU refuses it"
                ),
                Kind.MEDUSA: Recipe(
                    layout="medusa-vllm",
                    command=_vllm("medusa"),
                    tested=_COMPARED,
                    note="vLLM 0.33 has removed Medusa: use vLLM 0.32",
                ),
                Kind.MTP: Recipe(
                    layout=IN_TARGET,
                    command=_vllm_mtp,
                    tested="vLLM 0.32.0 for CPU with a MiMo target (docs/how-to/export.md); Qwen3.5 was not run",
                    families=_FAMILIES,
                ),
                SUFFIX: Recipe(
                    layout=NOTHING,
                    command=_vllm_suffix,
                    tested=_COMPARED,
                    note="install Outrider in the environment of vLLM",
                ),
            },
            reasons={},
        ),
        "sglang": OtherEngine(
            title="SGLang",
            recipes={
                MODEL: Recipe(layout=FOLDER, command=_sglang("STANDALONE")),
                Kind.EAGLE: Recipe(layout="eagle", command=_sglang("EAGLE")),
                Kind.EAGLE3: Recipe(layout="eagle3", command=_sglang("EAGLE3")),
                Kind.DFLASH: Recipe(layout="dflash", command=_sglang("DFLASH")),
                Kind.DFLASH2: Recipe(layout="dflash2", command=_sglang("DFLASH")),
                Kind.DSPARK: Recipe(layout="dspark", command=_sglang("DSPARK"), needs_whole_block=True),
                Kind.MTP: Recipe(layout=IN_TARGET, command=_sglang_mtp, families=_FAMILIES),
            },
            reasons={},
        ),
        "llama.cpp": OtherEngine(
            title="llama.cpp",
            recipes={
                MODEL: Recipe(
                    layout=GGUF,
                    command=_llamacpp_model,
                    needs_target_gguf=True,
                    tested="llama-server of llama.cpp 0c1e570 loads the file and accepts its draft tokens",
                ),
                Kind.EAGLE3: Recipe(
                    layout="eagle3",
                    command=_llamacpp_head("eagle3"),
                    needs_target_gguf=True,
                    converts_head=True,
                    tested=f"{_LLAMACPP}, with the accepted lengths of Outrider (docs/how-to/export.md)",
                ),
                Kind.DFLASH: Recipe(
                    layout="dflash",
                    command=_llamacpp_head("dflash"),
                    needs_target_gguf=True,
                    converts_head=True,
                    tested=f"{_LLAMACPP}, with 4% shorter accepted lengths at k = block size - 1",
                ),
                Kind.DSPARK: Recipe(
                    layout="dspark",
                    command=_llamacpp_head("dspark"),
                    needs_target_gguf=True,
                    converts_head=True,
                    tested="llama.cpp b11434, with 2 to 3% shorter accepted lengths (docs/how-to/export.md)",
                ),
                Kind.MTP: Recipe(
                    layout=IN_TARGET,
                    command=_llamacpp_mtp,
                    tested="llama.cpp b11434 with a Qwen3.5 target (docs/how-to/export.md)",
                    families=_QWEN,
                ),
            },
            reasons={},
        ),
        "mlx": OtherEngine(
            title="MLX",
            recipes={
                MODEL: Recipe(layout=FOLDER, command=_mlx_model),
                Kind.EAGLE3: Recipe(layout="eagle3", command=_mlx_head("eagle3")),
                Kind.DFLASH: Recipe(layout="dflash", command=_mlx_head("dflash")),
            },
            reasons={Kind.MTP: _NO_MTP},
        ),
        "ollama": OtherEngine(
            title="Ollama",
            recipes={
                Kind.DFLASH: Recipe(
                    layout="dflash", command=_ollama, files=_modelfile, needs_target_gguf=True, converts_head=True
                )
            },
            reasons={"": "it takes every separate draft for a DFlash head", Kind.MTP: _NO_MTP},
        ),
        "tensorrt-llm": OtherEngine(
            title="TensorRT-LLM",
            recipes={
                MODEL: Recipe(layout=FOLDER, command=_trtllm, files=_trtllm_config("Draft_Target")),
                Kind.EAGLE3: Recipe(layout="eagle3", command=_trtllm, files=_trtllm_config("Eagle3")),
                Kind.DFLASH: Recipe(layout="dflash", command=_trtllm, files=_trtllm_config("DFlash")),
                Kind.DSPARK: Recipe(layout="dspark", command=_trtllm, files=_trtllm_config("DSpark")),
            },
            reasons={Kind.MTP: _NO_MTP, Kind.MEDUSA: "its PyTorch backend has no Medusa"},
        ),
    }
)


def engine_of(name: str) -> OtherEngine:
    """Return an engine by its name. Raises OutriderError if there is no such engine."""
    if name not in ENGINES:
        raise OutriderError(f"--for is {name!r}; use {either(ENGINES)}")
    return ENGINES[name]


def words(command: str) -> list[str]:
    """Return the words of a command, for checks."""
    return split(command.replace("\\\n", " "))
