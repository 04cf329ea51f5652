"""Weights that draft heads share with their target."""

import pytest
import torch
from torch import nn

from outrider.errors import OutriderError
from outrider.models.heads.hidden_states import apply_final_norm
from outrider.models.torch.submodel import shared_weights
from tests.helpers import tiny


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
@torch.no_grad()
def test_the_final_norm_is_that_of_the_model(name, tmp_path):
    model = tiny.Shelf(tmp_path).model(name)
    norm = model.get_decoder().norm
    norm.weight.copy_(torch.rand_like(norm.weight))
    states = torch.randn(3, 5, model.config.hidden_size)
    tables = shared_weights(model)
    assert torch.allclose(apply_final_norm(states, tables), norm(states), atol=1e-5)


def test_another_norm_is_refused(tmp_path):
    class TwiceRMSNorm(nn.Module):
        eps = 1e-6

        def __init__(self, size):
            super().__init__()
            self.weight = nn.Parameter(torch.full((size,), 3.0))

        def forward(self, states):
            return 2 * self.weight * states

    model = tiny.Shelf(tmp_path).model("llama")
    model.model.norm = TwiceRMSNorm(model.config.hidden_size)
    with pytest.raises(OutriderError, match="do not support the final norm TwiceRMSNorm"):
        shared_weights(model)
