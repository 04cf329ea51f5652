"""Small policies in float32, whose generation the native kernels and torch run."""

import pytest
import torch

from outrider.models.heads.store import make_module, write_head
from outrider.models.loader.load import load_checkpoint
from outrider.train.model.presets import Sizes, describe
from tests.helpers import tiny


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    """Folders of small random models: `policy` and `draft` of one vocabulary, and `tied`."""
    root = tmp_path_factory.mktemp("policies")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.15}
    for seed, (name, tied) in enumerate({"policy": False, "draft": False, "tied": True}.items()):
        config = tiny.make_config(
            "LlamaConfig", **sizes, tie_word_embeddings=tied, eos_token_id=3, max_position_embeddings=256
        )
        tiny.save(root / name, config, seed=seed)
    return root


@pytest.fixture(scope="session")
def head(shelf):
    """The folder of a random MTP head for `policy`."""
    torch.manual_seed(1)
    sizes = Sizes(hidden=64, layers=2, vocab=tiny.VOCAB, epsilon=1e-6)
    module = make_module(describe("mtp", sizes))
    write_head(shelf / "head", module, dtype=torch.float32)
    return shelf / "head"


@pytest.fixture
def changed():
    """A function that returns the weights of a folder with some noise."""

    def weights(folder, *, seed=0, scale=0.02):
        model = load_checkpoint(folder, dtype="float32", device="cpu").model
        noise = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            weight += scale * torch.randn(weight.shape, generator=noise)
        return {name: value.clone() for name, value in model.state_dict().items()}

    return weights
