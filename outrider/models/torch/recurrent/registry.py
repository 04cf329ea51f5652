"""The recurrent layers of transformers that Outrider runs, by class name."""

from typing import Any

from outrider.models.torch.recurrent.compressed_attention import CompressedProjection
from outrider.models.torch.recurrent.gated_delta import KimiDeltaLayer, OlmoDeltaLayer, QwenDeltaLayer
from outrider.models.torch.recurrent.griffin import GriffinLayer
from outrider.models.torch.recurrent.layer import RecurrentLayer, StateReader
from outrider.models.torch.recurrent.lightning import LightningLayer
from outrider.models.torch.recurrent.mamba import MambaLayer, ZambaLayer
from outrider.models.torch.recurrent.mamba2 import Mamba2Layer
from outrider.models.torch.recurrent.rwkv import RwkvChannelMix, RwkvTimeMix
from outrider.models.torch.recurrent.short_conv import ShortConvLayer

LAYERS: dict[str, type[RecurrentLayer]] = {
    "MambaMixer": MambaLayer,
    "FalconMambaMixer": MambaLayer,
    "JambaMambaMixer": MambaLayer,
    "ZambaMambaMixer": ZambaLayer,
    "Mamba2Mixer": Mamba2Layer,
    "BambaMixer": Mamba2Layer,
    "FalconH1Mixer": Mamba2Layer,
    "GraniteMoeHybridMambaLayer": Mamba2Layer,
    "NemotronHMamba2Mixer": Mamba2Layer,
    "Zamba2MambaMixer": Mamba2Layer,
    "Qwen3NextGatedDeltaNet": QwenDeltaLayer,
    "Qwen3_5GatedDeltaNet": QwenDeltaLayer,
    "Qwen3_5MoeGatedDeltaNet": QwenDeltaLayer,
    "LaraMiniGatedDeltaNet": QwenDeltaLayer,
    "OlmoHybridGatedDeltaNet": OlmoDeltaLayer,
    "KimiLinearDeltaAttention": KimiDeltaLayer,
    "BailingHybridDeltaAttention": KimiDeltaLayer,
    "Lfm2ShortConv": ShortConvLayer,
    "Lfm2MoeShortConv": ShortConvLayer,
    "Lfm3ShortConv": ShortConvLayer,
    "MiniMaxLightningAttention": LightningLayer,
    "ZayaCCAProjection": CompressedProjection,
    "RecurrentGemmaRecurrentBlock": GriffinLayer,
    "RwkvSelfAttention": RwkvTimeMix,
    "RwkvFeedForward": RwkvChannelMix,
}


def replace_layers(model: Any, states: StateReader) -> list[RecurrentLayer]:
    """Let Outrider run the recurrent layers of a model. Returns them in order."""
    found = [module for module in model.modules() if type(module).__name__ in LAYERS]
    return [LAYERS[type(module).__name__](module, number, states) for number, module in enumerate(found)]
