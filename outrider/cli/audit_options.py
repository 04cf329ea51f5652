"""The options of `outrider audit`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from outrider.cli.options import (
    MODEL,
    Device,
    Kernels,
    PromptFile,
    Proposer,
    Quantize,
    Samples,
    Target,
    TensorParallel,
    Threads,
    Verifier,
)
from outrider.core.params import AUTO
from outrider.drafting.propose.options import DraftPlacement, DraftQuantize, DraftWindow

# There is no `--k auto`: every test needs rounds with the same draft length.
DraftLength = Annotated[
    int,
    typer.Option(
        "--k",
        metavar="N",
        help="Draft tokens per round, from 1 to 256; 1, 4 and 8 are tested as well.",
        rich_help_panel=MODEL,
    ),
]
_FOR_SERVER = ("target", "k", "prompts", "samples", "device", "kernels", "quantize", "threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """What to audit, and how."""

    target: Target = None
    proposer: Proposer = None
    k: DraftLength = 4
    draft_window: DraftWindow = None
    draft_quantize: DraftQuantize = None
    verifier: Verifier = None
    prompts: PromptFile = None
    samples: Samples = 2000
    device: Device = "auto"
    kernels: Kernels = "auto"
    quantize: Quantize = None
    threads: Threads = None
    tp: TensorParallel = 1
    draft_placement: DraftPlacement = AUTO

    def for_pair(self) -> dict[str, Any]:
        """Return the arguments of `run_audit`."""
        return asdict(self)

    def for_server(self) -> dict[str, Any]:
        """Return the arguments of `run_server_audit`, which reads fewer options."""
        return {name: getattr(self, name) for name in _FOR_SERVER}
