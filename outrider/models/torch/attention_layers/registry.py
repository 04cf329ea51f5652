"""The attention layers of transformers that Outrider replaces, by class name."""

from typing import Any

from outrider.models.torch.attention_layers.alibi import BloomLayer, FalconLayer, MptLayer
from outrider.models.torch.attention_layers.doge import DogeLayer
from outrider.models.torch.attention_layers.indexer import IndexerLayer
from outrider.models.torch.attention_layers.layer import AttentionLayer, RunningPass
from outrider.models.torch.attention_layers.others import GptNeoLayer, KeywordLayer, Llama4Layer, NumberedLayer

LAYERS: dict[str, type[AttentionLayer]] = {
    "AXK2Indexer": IndexerLayer,
    "BloomAttention": BloomLayer,
    "DeepseekV32Indexer": IndexerLayer,
    "DogeAttention": DogeLayer,
    "Dots3NoteTextIndexer": IndexerLayer,
    "FalconAttention": FalconLayer,
    "GPTNeoSelfAttention": GptNeoLayer,
    "GlmMoeDsaIndexer": IndexerLayer,
    "HYV4Indexer": IndexerLayer,
    "Llama4TextAttention": Llama4Layer,
    "MistralLarge4TextIndexer": IndexerLayer,
    "MptAttention": MptLayer,
    "NemotronAttention": KeywordLayer,
    "StableLmAttention": KeywordLayer,
    "ZambaAttention": NumberedLayer,
}


def replace_attention(model: Any) -> RunningPass | None:
    """Replace the attention layers of a model that are in `LAYERS`. Returns their pass; None: there are none."""
    running = RunningPass()
    found = False
    for module in model.modules():
        layer_class = LAYERS.get(type(module).__name__)
        if layer_class is not None and layer_class.needed(module):
            layer_class(module, running)
            found = True
    return running if found else None
