"""Weight updates of tied models, in pieces, and with an error in one of them."""

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.loader.load import load_checkpoint
from tests.field.models import GREEDY, KERNELS, PROMPTS, llama, token_ids
from tests.helpers import tiny

TABLE = "model.embed_tokens.weight"
OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": 128}


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """The folder of a model with tied embeddings, and other weights for it."""
    root = tmp_path_factory.mktemp("tied")
    config = llama(tie_word_embeddings=True)
    folder = tiny.save(root / "old", config)
    other = load_checkpoint(tiny.save(root / "new", config, seed=1), dtype="float32", device="cpu").model
    weights = {name: value for name, value in other.state_dict().items() if name != "lm_head.weight"}
    return folder, {name: value.clone() for name, value in weights.items()}


@pytest.mark.fast_cases("ngram-native", "itself-torch")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("proposer", ["ngram", "itself"])
def test_head_follows_the_embedding(tied, kernels, proposer, tmp_path):
    """Only the embedding of a tied model is sent (NeMo-RL#2999)."""
    folder, weights = tied
    expression = f"draft:{folder}" if proposer == "itself" else proposer
    llm = LLM(folder, proposer=expression, k=4, kernels=kernels, **OPTIONS)
    before = token_ids(llm.generate(PROMPTS, GREEDY))
    llm.update_weights({TABLE: weights[TABLE]})
    after = token_ids(llm.generate(PROMPTS, GREEDY))
    checkpoint = load_checkpoint(folder, dtype="float32", device="cpu")
    checkpoint.model.load_state_dict({TABLE: weights[TABLE]}, strict=False)
    checkpoint.model.tie_weights()
    saved = tiny.save_model(tmp_path / "fresh", checkpoint.model)
    fresh = LLM(saved, proposer="none", kernels=kernels, **OPTIONS)
    assert after == token_ids(fresh.generate(PROMPTS, GREEDY)) != before


@pytest.mark.parametrize("kernels", KERNELS)
def test_update_in_three_pieces(tied, kernels):
    """The tensors come in three calls, as trainers send them (NeMo-RL#2999)."""
    folder, weights = tied
    llm = LLM(folder, proposer=f"draft:{folder}", k=4, kernels=kernels, **OPTIONS)
    names = sorted(weights)
    for piece in (names[::3], names[1::3], names[2::3]):
        llm.update_weights({name: weights[name] for name in piece})
    assert llm.weights.version == 3
    fresh = LLM(folder, proposer="none", kernels=kernels, **OPTIONS)
    fresh.update_weights(weights)
    assert llm.weights.checksum() == fresh.weights.checksum()
    assert token_ids(llm.generate(PROMPTS, GREEDY)) == token_ids(fresh.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("kernels", KERNELS)
def test_error_in_one_tensor_leaves_the_old_version(tied, kernels):
    """One tensor of many has a wrong dtype or shape: nothing of the update is used (NeMo-RL#2999)."""
    folder, weights = tied
    llm = LLM(folder, proposer=f"draft:{folder}", k=4, kernels=kernels, **OPTIONS)
    before = token_ids(llm.generate(PROMPTS, GREEDY))
    checksum = llm.weights.checksum()
    last = sorted(weights)[-1]
    wrong = (weights[last].to(torch.int32), weights[last][..., 1:], torch.full_like(weights[last], torch.nan))
    for value in wrong:
        with pytest.raises(OutriderError):
            llm.update_weights({**weights, last: value})
        assert (llm.weights.version, llm.weights.checksum()) == (0, checksum)
    assert token_ids(llm.generate(PROMPTS, GREEDY)) == before
    half = {name: value.to(torch.bfloat16) for name, value in weights.items()}
    llm.update_weights(half)  # another float type is converted
    sampled = llm.generate(PROMPTS, SamplingParams(temperature=1.0, seed=1, max_tokens=8, ignore_eos=True))
    assert all(len(completion.token_ids) == 8 for completion in sampled)
