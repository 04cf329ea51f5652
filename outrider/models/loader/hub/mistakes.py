"""Explain a failure with a model of the Hub in one line that names the fix."""

import errno
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from outrider.errors import OutriderError
from outrider.models.loader.hub.names import HubName

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOG_IN = "log in with hf auth login, or set HF_TOKEN"
_UNAUTHORIZED = (401, 403)


def explain(name: HubName, error: Exception) -> OutriderError:
    """Return the error of a model that cannot be fetched, for an exception of huggingface_hub or what it uses."""
    hub = constants.ENDPOINT
    folder = constants.HF_HUB_CACHE
    parent = name.repo.partition("/")[0]
    nowhere = (
        f"the folder {parent} here has no {name}" if Path(parent).is_dir() else f"{name} is no folder or file here"
    )
    if isinstance(error, GatedRepoError):
        return OutriderError(f"{name.repo} is gated: accept its conditions at {hub}/{name.repo}, then {_LOG_IN}")
    if isinstance(error, RepositoryNotFoundError):
        return OutriderError(f"{nowhere}, and no model on {hub}; correct the name, or for a private model {_LOG_IN}")
    if isinstance(error, HFValidationError):
        return OutriderError(f"{nowhere}, and no name of a model on {hub}; correct it")
    if isinstance(error, RevisionNotFoundError):
        return OutriderError(f"{name.repo} has no revision {name.revision}; use a branch, a tag or a commit of it")
    if isinstance(error, LocalEntryNotFoundError):
        if constants.is_offline_mode():
            return OutriderError(
                f"{nowhere}, and not complete in the cache {folder}; HF_HUB_OFFLINE is set: unset"
                " it to download it, or give a folder"
            )
        return OutriderError(
            f"{nowhere}, and not complete in the cache {folder}; {hub} cannot be reached"
            f" ({_reason(error.__cause__ or error)}): check the connection, or give a folder"
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        fix = f"{_LOG_IN} with a token that may read it" if status in _UNAUTHORIZED else "try again later"
        return OutriderError(f"{name} cannot be downloaded: {hub} answers {_reason(error)}; {fix}")
    if getattr(error, "errno", None) in _FULL or "No space left" in str(error):
        return OutriderError(
            f"{name} does not fit on the disk of {folder}; free some space, or set HF_HOME to a folder on another disk"
        )
    if isinstance(error, PermissionError):
        return OutriderError(f"{folder} cannot be written ({error.strerror}); set HF_HOME to a folder of yours")
    return OutriderError(
        f"the download of {name} broke off ({_reason(error)}); run the same command again, which"
        " goes on after the files that are complete"
    )


def _reason(error: BaseException) -> str:
    """Return the first line of what an exception says, or its name."""
    if isinstance(error, HfHubHTTPError):
        return " ".join(filter(None, [f"status {error.response.status_code}", error.server_message]))
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
