"""The environment variables of options, such as OUTRIDER_TARGET for --target."""

from copy import copy
from typing import Annotated, Any, get_args, get_origin

PREFIX = "OUTRIDER_"
# Options that say what runs and where, and mean the same in all commands. Options of a single
# measurement have no variable, because a forgotten one would change its results.
_OPTIONS = frozenset(
    {
        "target",
        "proposer",
        "config",
        "verifier",
        "device",
        "kernels",
        "quantize",
        "kv_dtype",
        "threads",
        "draft_window",
        "draft_quantize",
        "draft_candidates",
        "max_model_len",
        "host",
        "port",
        "served_model_name",
        "api_key",
        "api_keys",
        "tls_cert",
        "tls_key",
        "max_num_seqs",
        "max_queued_requests",
        "request_timeout",
        "allow_origin",
        "log_format",
        "shutdown_timeout",
    }
)


def with_variable(name: str, kind: Any) -> Any:
    """Return the annotation of a parameter of a command, with the environment variable of its option if it has one."""
    if name not in _OPTIONS or get_origin(kind) is not Annotated:
        return kind
    value, option, *others = get_args(kind)
    option = copy(option)  # commands share options
    option.envvar = PREFIX + name.upper()
    return Annotated[(value, option, *others)]
