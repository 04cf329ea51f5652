"""Choose where a draft model runs under tensor parallelism: whole on each rank, or split over the ranks.

A draft reads its weights once per token, and a split draft also waits for messages (Shoeybi et al. 2019, Megatron-LM,
section 3: two all-reduces per layer in a forward pass). With W bytes of weights that a token reads, B bytes/s of
memory, N ranks, L layers and t seconds of an all-reduce of one hidden state, a pass over one token takes

    replicated   W / B
    sharded      W / (N B) + (2 L + 2) t

Two messages are those of the embedding and of the logits. B and t are measured when the draft is loaded, in all ranks
at once, because ranks on CPUs share their memory. Costs that both passes have, such as kernel launches, do not count.
"""

from pathlib import Path
from time import perf_counter

import torch
from torch import distributed

from outrider.core.config import SHARDED
from outrider.core.params import AUTO
from outrider.core.placement import DraftPlacement, PassEstimate
from outrider.errors import OutriderError
from outrider.models.loader.hub.names import shown
from outrider.models.loader.load import is_recurrent
from outrider.models.loader.paths import is_gguf
from outrider.models.loader.quantized.weights import quantization_of
from outrider.models.torch.submodel import layer_stack
from outrider.runtime.ranks import Ranks

_MESSAGES_PER_LAYER = 2
_OTHER_MESSAGES = 2
_BUFFER = {"cpu": 1 << 28, "cuda": 1 << 30}  # most bytes of the buffer that is read
_REPEATS = 5
_OPERATIONS = 20  # all-reduces of a measurement


def estimate_pass(size: float, *, layers: int, ranks: int, bandwidth: float, all_reduce: float) -> PassEstimate:
    """Estimate a pass over one token.

    Args:
        size: bytes of the weights that the pass reads.
        layers: decoder layers.
        ranks: ranks of tensor parallelism.
        bandwidth: bytes/s of memory reads in each rank.
        all_reduce: seconds of an all-reduce of one hidden state.
    """
    messages = _MESSAGES_PER_LAYER * layers + _OTHER_MESSAGES
    return PassEstimate(replicated=size / bandwidth, sharded=size / (ranks * bandwidth) + messages * all_reduce)


def choose_placement(asked: str, draft: str, ranks: int, estimate: PassEstimate) -> DraftPlacement:
    """Choose the placement of a draft that can be split.

    Args:
        asked: auto, replicated or sharded.
        ranks: ranks of tensor parallelism.
        estimate: the estimated times. auto takes the shorter one, and replicates if they are equal.
    """
    sharded = estimate.sharded < estimate.replicated if asked == AUTO else asked == SHARDED
    reason = "this is estimated to be faster" if asked == AUTO else f"draft_placement is {asked}"
    return DraftPlacement(
        draft=draft, name=shown(draft), ranks=ranks, sharded=sharded, reason=reason, estimate=estimate
    )


def place_draft_model(
    folder: str, ranks: Ranks, *, asked: str, device: torch.device, dtype: torch.dtype
) -> DraftPlacement:
    """Choose the placement of a draft model. All ranks call it, and get the same result.

    Args:
        folder: the folder of the draft model.
        ranks: the ranks of the target.
        asked: auto, replicated or sharded.
        device: the device of this rank.
        dtype: of the draft's weights.

    Raises:
        OutriderError: `asked` is sharded, and the draft cannot be split.
    """
    try:
        _check_can_split(folder, ranks.size)
    except OutriderError as error:
        reason = str(error).partition(";")[0]
        if asked == SHARDED:
            raise OutriderError(
                f"draft_placement is {asked}, and the draft in {folder} cannot be split: {reason}; use auto"
            ) from None
        return replicated(folder, ranks.size, reason)
    size, layers, hidden = pass_work(folder, dtype)
    ranks.barrier()
    bandwidth = _read_bandwidth(int(size), device)
    ranks.barrier()
    all_reduce = _all_reduce_seconds(hidden, device, dtype)
    bandwidth, all_reduce = ranks.share((bandwidth, all_reduce))
    estimate = estimate_pass(size, layers=layers, ranks=ranks.size, bandwidth=bandwidth, all_reduce=all_reduce)
    return choose_placement(asked, folder, ranks.size, estimate)


def place_head(folder: str, ranks: int, *, asked: str) -> DraftPlacement:
    """Return the placement of a draft head, which is never split. Raises OutriderError if `asked` is sharded."""
    if asked == SHARDED:
        raise OutriderError(f"draft_placement is {asked}, and {folder} is a draft head, which is not split; use auto")
    return replicated(folder, ranks, "each rank runs the whole draft head")


def replicated(draft: str, ranks: int, reason: str) -> DraftPlacement:
    """Return the placement of a draft that cannot be split."""
    return DraftPlacement(draft=draft, name=shown(draft), ranks=ranks, sharded=False, reason=reason)


def _check_can_split(folder: str, ranks: int) -> None:
    """Raise an error if a draft model cannot be split, from its config."""
    if is_gguf(folder):
        raise OutriderError("a GGUF file cannot be split; give a folder of safetensors")
    from outrider.models.loader.tensor_parallel import check_plan
    from outrider.models.loader.transformers_checkpoint import read_transformers_config

    config = read_transformers_config(Path(folder).expanduser())
    if quantization_of(config) is not None:
        raise OutriderError("a quantized checkpoint cannot be split; give the unquantized one")
    check_plan(config, ranks, recurrent=is_recurrent(folder))


def pass_work(folder: str, dtype: torch.dtype) -> tuple[float, int, int]:
    """Return the bytes of the weights that one token reads, the number of layers, and the width of hidden states.

    These are the layers and the LM head. Of the experts, a token reads its own.
    """
    from outrider.models.loader.model_class import auto_class
    from outrider.models.loader.transformers_checkpoint import read_transformers_config

    config = read_transformers_config(Path(folder).expanduser())
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    layers = layer_stack(model)[1]
    per_token = getattr(config.get_text_config(decoder=True), "num_experts_per_tok", None) or 0
    count = float(model.get_output_embeddings().weight.numel())
    for name, weight in layers.named_parameters():
        share = min(per_token / len(weight), 1.0) if ".experts." in name and per_token else 1.0
        count += share * weight.numel()
    return count * dtype.itemsize, len(layers), model.get_input_embeddings().embedding_dim


def _read_bandwidth(size: int, device: torch.device) -> float:
    """Return the bytes/s of reading a buffer of the size of the draft's weights, or of the largest buffer."""
    count = max(min(size, _BUFFER.get(device.type, 1 << 28)) // 4, 1)
    buffer = torch.ones(count, dtype=torch.float32, device=device)
    buffer.sum().item()
    seconds = []
    for _ in range(_REPEATS):
        began = perf_counter()
        buffer.sum().item()  # waits for the device
        seconds.append(perf_counter() - began)
    return buffer.nbytes / min(seconds)


def _all_reduce_seconds(hidden: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the seconds of an all-reduce of one hidden state in the process group of the model."""
    state = torch.zeros(hidden, dtype=dtype, device=device)
    seconds = []
    for _ in range(_REPEATS):
        began = perf_counter()
        for _ in range(_OPERATIONS):
            distributed.all_reduce(state)
        state[0].item()  # waits for the device
        seconds.append((perf_counter() - began) / _OPERATIONS)
    return min(seconds)
