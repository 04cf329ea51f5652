"""The options of `outrider audit`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from outrider.core.option import MEASURE, MODEL, Option
from outrider.core.params import AUTO

# There is no `--k auto`: every test needs rounds with the same draft length.
_FOR_SERVER = ("target", "k", "prompts", "samples", "device", "kernels", "quantize", "threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """What to audit, and how."""

    target: Annotated[str | None, Option("DIR", MODEL)] = None
    """Folder of a language model, a GGUF file, or a model of the Hugging Face Hub: org/name, org/name@revision or
    org/name:Q4_K_M. Default: @mini, an embedded model."""
    proposer: Annotated[str | None, Option("NAME", MODEL)] = None
    """What drafts. Without a model: none, ngram[:MIN-MAX], suffix[:TOKENS], recycle, lookahead[:WxNxG], group[:TOKENS],
    retrieval:DIR[:MIN]. A draft model or a trained head: draft:DIR, tree:DIR, cascade:DIR; with another vocabulary:
    draft-tokens:DIR, draft-text:DIR. The target itself: mtp, quantized:int4, exit:LAYERS, skip:A+B. Your own:
    pkg.module:Class. Combinations: best(A,B), merge(A,B), first(A,B), switch(A,B). See
    docs/how-to/choose-a-proposer.md. DIR may also be a model of the Hugging Face Hub. Default: the embedded draft model
    for the embedded target; for any other, the first of best(suffix:100000,mtp), best(suffix:100000,quantized:int4) and
    ngram that fits."""
    k: Annotated[int, Option("N", MODEL)] = 4
    """Draft tokens per round, from 1 to 256; 1, 4 and 8 are tested as well."""
    draft_window: Annotated[int | None, Option("TOKENS", MODEL)] = None
    """The latest tokens that a draft model or draft head reads. Default: as many as it was made for."""
    draft_quantize: Annotated[str | None, Option("NAME", MODEL)] = None
    """int8 or int4 weights for a draft model or draft head, LM head included, on the native kernels of a CPU. The
    output does not change. Default: the weights as stored."""
    verifier: Annotated[str | None, Option("NAME", MODEL)] = None
    """walk, coupled, rejection, block, siblings or traversal; typical and lenient are not exact. Relaxed rules are not
    exact either, and declare a bound: lantern:delta=D, gsd:clusters=N, pcg:k=N, bins:distance=R and blend:share=S, with
    more options after commas, such as table=FILE. Default: block for chains of a draft model, traversal for its trees
    and for merges, walk for all other proposers."""
    prompts: Annotated[str | None, Option("FILE", MEASURE)] = None
    """JSON lines with prompt or messages, and optionally category. Default: an embedded set."""
    samples: Annotated[int, Option(panel=MEASURE)] = 2000
    """Samples of each statistical test."""
    device: Annotated[str, Option("NAME", MODEL)] = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    kernels: Annotated[str, Option("NAME", MODEL)] = "auto"
    """auto, native or torch. auto: the fastest that support the model. The native kernels run on CPUs in bfloat16 and
    float32; a C++ compiler builds them once per machine."""
    quantize: Annotated[str | None, Option("NAME", MODEL)] = None
    """int8 or int4 weights for the target, on a CPU. The quantized model is then the target, exactly. Default: the
    weights as stored."""
    threads: Annotated[int | None, Option(panel=MODEL)] = None
    """CPU threads. Default: OMP_NUM_THREADS, or else the physical cores of one NUMA node."""
    tp: Annotated[int, Option("N", MODEL, min=1)] = 1
    """Split the target over N processes that torchrun has started: torchrun --nproc-per-node N -m outrider ..."""
    draft_placement: Annotated[str, Option("NAME", MODEL)] = AUTO
    """With --tp: replicated (each rank runs the whole draft model), sharded (it is split, too), or auto (the faster
    one, by measured costs)."""

    def for_pair(self) -> dict[str, Any]:
        """Return the arguments of `run_audit`."""
        return asdict(self)

    def for_server(self) -> dict[str, Any]:
        """Return the arguments of `run_server_audit`, which reads fewer options."""
        return {name: getattr(self, name) for name in _FOR_SERVER}
