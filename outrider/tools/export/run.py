"""Runs `outrider export`: writes the draft, the command and the files that another engine needs."""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.errors import OutriderError
from outrider.models.heads.description import Feedback, FuseNorm, HeadDescription, Kind
from outrider.models.heads.files import read_config
from outrider.models.heads.formats.base import ImportedHead
from outrider.models.heads.formats.registry import find
from outrider.models.heads.store import KEY, import_head
from outrider.models.loader.embedded import model_folder
from outrider.runtime.report.console import print_plain
from outrider.tools.convert import empty_folder, run_convert
from outrider.tools.export.engines import FOLDER, GGUF, IN_TARGET, MASKED, MODEL, SUFFIX, Draft, Recipe, engine_of
from outrider.tools.export.gguf_model import same_tokens, write_gguf
from outrider.tools.export.length import find_length
from outrider.tools.export.mtp import architecture_of, write_in_target
from outrider.tools.export.target import find_target, tokenizer_note
from outrider.tools.settings import ExportSettings
from outrider.train.report.card import FILE as CARD

_DRAFT = "draft"  # the folder of the draft inside of --out
_SCRIPT = "run.sh"
# Files of a model that engines read.
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_LLAMACPP_LAYERS = 3  # hidden states that llama.cpp gives an EAGLE-3 head


def run_export(settings: ExportSettings, *, console: Console) -> dict[str, Any]:
    """Write a draft in the layout of another engine, with the command that runs it.

    Args:
        settings: the draft, the engine, and the folder to write.
        console: the console for messages.

    Returns:
        A summary as JSON values.

    Raises:
        OutriderError: the engine does not run such drafts, or the draft cannot be read. Nothing is written then.
    """
    engine, folder, target = settings.engine, settings.folder, settings.target
    chosen = engine_of(engine)
    source = None if folder == SUFFIX else model_folder(folder)
    path = empty_folder(settings.out)
    head = _head(source) if source else None
    kind = SUFFIX if source is None else MODEL if head is None else _kind(head.description)
    recipe = chosen.recipe(kind)
    if head is not None:
        _check(engine, head)
    if recipe.layout == IN_TARGET:
        _check_family(chosen.title, recipe, target)
    description = head.description if head else None
    length = find_length(settings, description, recipe, title=chosen.title)
    written = path / (f"{_DRAFT}.gguf" if recipe.layout == GGUF else _DRAFT)
    named = find_target(target, recipe, path)
    draft = Draft(
        path=str(written), target=named.name, target_gguf=named.gguf, converts_target=named.converts, k=length.k
    )
    command = recipe.command(draft)
    labels = [_label(recipe), *filter(None, (length.note, tokenizer_note(named, recipe)))]
    comments = "".join(f"# {label}\n" for label in labels)
    files = {_SCRIPT: f"#!/bin/sh\n{comments}{command}\n", **recipe.files(draft)}
    models: dict[Path, Callable[[], None]] = {}
    if source:
        files[CARD] = _card(source, target, command, chosen.title)
        models[written] = partial(_write, source, recipe, written, target)
    if named.source:
        models[Path(named.gguf)] = partial(_write_gguf, named.source, Path(named.gguf))
    _write_all(path, models, files)
    names = [*(model.name for model in models), *files]
    for line in (f"{settings.out}: {', '.join(names)} for {chosen.title}", *labels, command):
        print_plain(console, line)
    return {
        "engine": engine,
        "kind": kind,
        "layout": recipe.layout,
        "draft": str(written) if source else None,
        "k": length.k,
        "tested": recipe.tested or None,
        "command": command,
        "notes": labels[1:],
        "files": list(files),
    }


def _card(source: Path, target: str | Path | None, command: str, title: str) -> str:
    """Return the card of an exported draft: that of its training, if it has one, with the command of the engine."""
    file = source / CARD
    base = f"base_model: {target}\n" if target else ""
    card = f"---\n{base}tags:\n- speculative-decoding\n- draft-model\n---\n\n# Draft for {title}\n"
    if file.is_file():
        card = file.read_text("utf-8")
    return f"{card}\n## {title}\n\n```sh\n{command}\n```\n"


def _write_all(path: Path, models: Mapping[Path, Callable[[], None]], files: Mapping[str, str]) -> None:
    """Write models and files of text into a folder. If one cannot be written, nothing remains."""
    is_new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        for write in models.values():
            write()
    except OutriderError:
        _remove(path if is_new else None, *models)
        raise
    for name, text in files.items():
        (path / name).write_text(text, encoding="utf-8")


def _remove(folder: Path | None, *written: Path) -> None:
    """Remove what was written, folders and files, and the folder that was made for it."""
    for path in written:
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
    if folder is not None:
        folder.rmdir()


def _head(folder: Path) -> ImportedHead | None:
    """Return the draft head of a folder, or None if it holds a draft model."""
    config = read_config(folder)
    if KEY not in config:
        found = find(folder)
        if found is None or found.whole():
            return None
    return import_head(folder)


def _kind(description: HeadDescription) -> str:
    """Return the kind of a head. Most engines ignore the attention masks of a DFlash head, so such a head is apart."""
    has_masks = description.kind is Kind.DFLASH and description.block is not None and bool(description.block.views)
    return MASKED if has_masks else str(description.kind)


def _check(engine: str, head: ImportedHead) -> None:
    """Refuse what an engine would drop silently, or fail to load."""
    description = head.description
    if engine == "vllm" and description.kind is Kind.MEDUSA and description.draft_vocab:
        raise OutriderError(
            "vLLM 0.32 loads no Medusa heads with a reduced draft vocabulary (it takes token_map"
            " for a missing weight); train with --draft-vocab-size 0"
        )
    if description.kind is not Kind.EAGLE3:
        return
    aux = description.aux_states
    normed = aux.norm is not FuseNorm.NONE or description.feedback is Feedback.NORMED
    if normed and engine != "vllm":
        raise OutriderError(
            f"{engine} drops the norms of EAGLE-3.1 without a message, and then accepts almost"
            " nothing; train an eagle3 head, or use --for vllm"
        )
    if engine == "llama.cpp" and len(aux.layers) != _LLAMACPP_LAYERS:
        raise OutriderError(
            f"llama.cpp gives an EAGLE-3 head the states of {_LLAMACPP_LAYERS} layers, and this one"
            f" reads {len(aux.layers)}; train one with {_LLAMACPP_LAYERS}"
        )


def _check_family(title: str, recipe: Recipe, target: str | None) -> None:
    """Check the target of an MTP module."""
    if target is None:
        raise OutriderError(f"{title} reads MTP modules from the checkpoint of their target; give it with --target DIR")
    architecture = architecture_of(model_folder(target, weights=False))
    if architecture not in recipe.families:
        raise OutriderError(
            f"{title} is not known to run MTP modules of {architecture or 'a target without architectures'}; use a"
            f" target of {', '.join(recipe.families)}, or another kind of draft"
        )


def _write(source: Path, recipe: Recipe, written: Path, target: str | None) -> None:
    if recipe.layout == GGUF:
        _write_gguf(source, written)
    elif recipe.layout == IN_TARGET:
        write_in_target(source, model_folder(target or ""), written)
    elif recipe.layout == FOLDER:
        written.mkdir()
        for pattern in _MODEL_FILES:
            for file in source.glob(pattern):
                shutil.copyfile(file, written / file.name)
    else:
        silent = Console(quiet=True)
        run_convert(str(source), to=recipe.layout, out=str(written), target=target, console=silent)


def _write_gguf(source: Path, file: Path) -> None:
    write_gguf(source, file)
    if not same_tokens(file, source):
        raise OutriderError(
            f"the tokenizer of {source} changes when it is written as GGUF; use convert_hf_to_gguf.py of llama.cpp"
        )


def _label(recipe: Recipe) -> str:
    note = f"; {recipe.note}" if recipe.note else ""
    if recipe.tested:
        return f"tested: {recipe.tested}{note}"
    return f"untested: written from the engine's documentation and source; it was not run with this engine{note}"
