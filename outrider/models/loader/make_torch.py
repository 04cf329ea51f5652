"""Make a target that runs on torch, with the layers of transformers."""

from outrider.core.target import Target
from outrider.models.torch.attention_target import AttentionTarget
from outrider.models.torch.checkpoint import Checkpoint
from outrider.models.torch.cuda_recorder import CudaRecorder, Recorder
from outrider.models.torch.encoder_decoder_target import EncoderDecoderTarget
from outrider.models.torch.quantize import quantize_model
from outrider.models.torch.recurrent_target import RecurrentTarget
from outrider.models.torch.speech.target import SpeechTarget


def make_torch_target(checkpoint: Checkpoint, *, slots: int, context: int, bits: int, record: bool) -> Target:
    """Make the target for a checkpoint on torch.

    Args:
        checkpoint: the loaded model.
        slots: maximum number of running sequences.
        context: tokens of a sequence.
        bits: bits per weight of linear layers, as in `make_target`.
        record: whether passes on a GPU are recorded.

    Raises:
        UnsupportedModel: the model cannot be quantized.
    """
    if bits < 16:
        quantize_model(checkpoint.model, bits)
    recorder = recorder_of(checkpoint) if record else None
    if checkpoint.source is not None:
        kind = EncoderDecoderTarget if checkpoint.source.speech is None else SpeechTarget
        target: Target = kind(checkpoint, slots=slots, context=context)
    elif checkpoint.recurrent:
        target = RecurrentTarget(checkpoint, slots=slots, context=context, record=recorder)
    else:
        target = AttentionTarget(checkpoint, slots=slots, context=context, record=recorder)
    target.kernels += "" if bits == 16 else f" int{bits}"
    return target


def recorder_of(checkpoint: Checkpoint) -> Recorder | None:
    """Return what records the passes of a model; None: every pass is eager.

    Ranks on GPUs use NCCL, whose operations can be recorded. Ranks on CPUs use gloo, and there are
    no graphs on CPUs.
    """
    return CudaRecorder(checkpoint.device) if checkpoint.device.type == "cuda" else None
