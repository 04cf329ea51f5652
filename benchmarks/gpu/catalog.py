"""The cells of a GPU run: what runs each, on which kernels, and for how many seconds at most. It imports no torch.

A cell has the name GROUP:CELL. The cells of a group share one pair of models, which its cell `load` makes.

| Cell | Question |
|---|---|
| triton_rules, triton_attention, triton_products | do single Triton kernels agree with torch, and what do they take |
| load | seconds and bytes to make the pair and its engine |
| compile_kernels | seconds of compiling the Triton kernels |
| first_token | ms from a request to its first token |
| bandwidth | bytes per second that the GPU reads |
| texts, texts_batched | greedy texts that differ from plain decoding of each prompt alone, and where |
| step, step_uncompiled | ms of a pass over 1 to 64 tokens by cached tokens, and its share of the bandwidth limit |
| split | ms of drafting, of the target's pass and of the rest of a round, for k = 1, 2, 4, 8 |
| compile | seconds of compiling the layers and recording passes |
| race | tokens/s of speculation and plain decoding, one sequence |
| k_auto | what k auto chooses at several acceptances, and tokens/s beside plain decoding and fixed k |
| offline_1 to offline_64 | tokens/s and time to the first token at this batch size, plain and with k auto |
| memory | bytes at the peak, bytes of the graphs, and seconds of recording |
| kernels | kernels of a pass, and the time between them |
| round | ms of a round beyond the target's pass and the draft's steps |
| sampled | the parts of a round at temperature 1, by verifier, and with top-p |
| head | the parts of a round with an EAGLE-3 head of the target's dimensions |
| attention | us of the attention of few queries over long caches on torch, and its share of the bandwidth limit |
| rows | whether a row of a matrix product of torch depends on the number of rows |
| peers | tokens/s of `generate` and assisted generation of transformers |
| gpu | the tests of `make test-gpu` |
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

SIZES = ("8b", "tiny")  # of the models
DTYPES = ("bfloat16", "float16", "float32")
_PARTS = "parts"  # the group of cells without models


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """How the models of some cells run."""

    kernels: str
    quantize: str | None = None

    @property
    def paged(self) -> bool:
        """Whether sequences share the memory of the cache, so that each may be long."""
        return self.kernels == "triton"


@dataclass(frozen=True, slots=True)
class Cell:
    """One question: the function that answers it, and the most seconds that this may take."""

    run: str  # module:function
    seconds: float


GROUPS: Mapping[str, Group] = MappingProxyType(
    {
        "graphs": Group(kernels="graphs"),
        "triton": Group(kernels="triton"),
        "fp8": Group(kernels="triton", quantize="fp8"),
        "int8": Group(kernels="triton", quantize="int8"),
        "int4": Group(kernels="triton", quantize="int4"),
    }
)
_MODEL_CELLS = {
    "load": Cell("pair:loaded", 60),
    "compile_kernels": Cell("ahead:compile_kernels", 60),
    "first_token": Cell("pair:first_token", 30),
    "bandwidth": Cell("passes:bandwidth", 15),
    "texts": Cell("rounds:texts", 40),
    "texts_batched": Cell("rounds:texts_batched", 45),
    "step_uncompiled": Cell("passes:step_uncompiled", 20),
    "compile": Cell("pair:compile_layers", 70),
    "step": Cell("passes:step", 60),
    "split": Cell("rounds:split", 30),
    "race": Cell("rounds:race", 30),
    "k_auto": Cell("rounds:k_auto", 50),
    "offline_1": Cell("offline:one", 25),
    "offline_8": Cell("offline:eight", 60),
    "offline_32": Cell("offline:many", 35),
    "offline_64": Cell("offline:most", 45),
    "memory": Cell("passes:memory", 5),
    "kernels": Cell("passes:kernels", 20),
    "round": Cell("rounds:round_times", 25),
    "sampled": Cell("rounds:sampled", 30),
    "head": Cell("rounds:head", 30),
    "attention": Cell("passes:attention", 20),
    "rows": Cell("passes:rows", 10),
    "peers": Cell("rounds:peers", 60),
}
_PART_CELLS = {
    "triton_rules": Cell("triton_rules:run", 30),
    "triton_attention": Cell("triton_attention:run", 45),
    "triton_products": Cell("triton_products:run", 45),
    "gpu": Cell("tests_on_gpu:run", 300),
}
_FIRST = ("texts", "step", "split", "race", "offline_1", "offline_8", "k_auto")
_BATCHED = ("texts_batched", "offline_32", "offline_64", "memory")
_QUANTIZED = ("compile_kernels", "texts", "step", "race")
_ORDER: tuple[tuple[str, tuple[str, ...]], ...] = (  # the most important first
    (_PARTS, ("triton_rules", "triton_attention", "triton_products")),
    ("triton", ("compile_kernels", "first_token", *_FIRST, *_BATCHED)),
    ("graphs", ("first_token", "bandwidth", "step_uncompiled", "compile", "split", "k_auto", "race")),
    ("graphs", (*_FIRST, *_BATCHED)),
    ("int4", _QUANTIZED),
    ("int8", _QUANTIZED),
    ("fp8", _QUANTIZED),
    ("triton", ("head", "kernels", "round", "sampled")),
    ("graphs", ("kernels", "round", "sampled", "head", "attention", "rows")),
    (_PARTS, ("gpu",)),
)


def default_cells() -> list[str]:
    """Return the names of the cells of a run, in their order."""
    return list(dict.fromkeys(f"{group}:{cell}" for group, cells in _ORDER for cell in cells))


def chosen_cells(names: str) -> list[str]:
    """Return the cells of names separated by commas. A group stands for its cells of `default_cells`.

    Raises:
        KeyError: a name is unknown.
    """
    chosen: list[str] = []
    for name in names.split(","):
        in_group = [cell for cell in default_cells() if group_of(cell) == name]
        for cell in in_group or [name]:
            find(cell)
            chosen.append(cell)
    return chosen


def with_models(names: Iterable[str]) -> list[str]:
    """Return the cells with `GROUP:load` before the first one of each group, where the group changes."""
    cells: list[str] = []
    loaded = _PARTS
    for name in names:
        group = group_of(name)
        load = f"{group}:load"
        if group not in (_PARTS, loaded):
            cells.append(load)
            loaded = group
        if name != load:
            cells.append(name)
    return cells


def after_load_failed(names: Sequence[str], group: str) -> list[str]:
    """Return the cells that are left if the models of a group cannot be made."""
    return [name for name in names if group_of(name) != group]


def find(name: str) -> Cell:
    """Return the cell of a name. Raises KeyError if it is unknown."""
    group, _, cell = name.partition(":")
    if group == _PARTS:
        return _PART_CELLS[cell]
    if group not in GROUPS:
        raise KeyError(name)
    return _MODEL_CELLS[cell]


def group_of(name: str) -> str:
    """Return the group of a cell."""
    return name.partition(":")[0]
