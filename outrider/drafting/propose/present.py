"""Check the files of models before torch is imported, which takes seconds."""

from pathlib import Path

from outrider.core.json_lines import read_lines
from outrider.drafting.propose.registry import NAMED, Argument, Maker, check_names, parse
from outrider.models.loader.embedded import check_is_folder, model_folder
from outrider.models.loader.hub.names import hub_name
from outrider.models.loader.paths import is_gguf


def check_present(target: str | Path | None, *proposers: str | Maker | None, prompts: str | None = None) -> None:
    """Check a file of prompts, and the files of a target and of the draft models in expressions, without torch.

    GGUF files must have whole headers and all bytes of their tensors, and folders their config.json and weights. Models
    on the Hugging Face Hub are not checked.

    Raises:
        OutriderError: a file is missing, damaged or truncated, or an expression is not valid.
    """
    if prompts is not None:
        for _ in read_lines(prompts, form='{"prompt": "..."}'):
            pass
    if target is not None:
        _check(target, with_weights=True)
    for proposer in (each for each in proposers if isinstance(each, str)):
        check_names(proposer)
        for leaf in parse(proposer).leaves():
            kind = NAMED[leaf.name].argument if leaf.name in NAMED else Argument.NONE
            if kind in (Argument.MODEL, Argument.DRAFT) and leaf.argument:
                _check(leaf.argument, with_weights=False)  # a draft head may have other files of weights


def _check(name: str | Path, *, with_weights: bool) -> None:
    if hub_name(name) is not None:
        return
    path = model_folder(name)
    if not is_gguf(path):
        check_is_folder(path)  # which imports nothing
        from outrider.models.loader.folder import check_folder, check_weights  # here, because they import numpy

        check_folder(path)
        if with_weights:
            check_weights(path, None)
        return
    from outrider.models.loader.gguf.file import read_gguf  # here, because it imports numpy

    read_gguf(path)
