"""Draft heads on encoder-decoder targets: states and weights that they read, greedy and sampled outputs, mistakes."""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from fastapi.testclient import TestClient

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.drafting.propose.draft_model.trained_head import HeadProposer, HeadTreeProposer
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.heads.description import Body
from outrider.models.heads.hidden_states import apply_final_norm
from outrider.models.heads.store import write_head
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.serve.app import make_app
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.settings import Settings
from outrider.train.model.presets import Sizes, describe
from tests.helpers import speech, tiny
from tests.helpers.heads import random_draft
from tests.models.torch.expected_outputs import check_three_tokens, three_token_probs

NAMES = tuple(tiny.ENCODER_DECODER)
MAIN = ("t5", "bart", "t5gemma")  # norm and LM head: RMS and scaled, LayerNorm in the layers, RMS and capped
KINDS = ("medusa", "hydra", "mtp", "eagle31", "peagle", "dspark")
OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": 64}
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("encoder_decoder"))


@pytest.fixture(scope="module")
def head(shelf, tmp_path_factory):
    """Return the folder of a random head of a kind for a target."""
    folders = {}

    def find(name, kind):
        if (name, kind) not in folders:
            folders[name, kind] = save_head(tmp_path_factory.mktemp("head"), shelf.target(name), kind)
        return folders[name, kind]

    return find


def save_head(folder, target, kind):
    tables = target.share_weights()
    vocab, hidden = tables.head.shape
    # These targets are narrower than those of the presets.
    description = describe(kind, Sizes(hidden=64, layers=target.layers, vocab=vocab, epsilon=tables.epsilon))
    body = description.body
    if body is not None:
        body = Body(layers=1, hidden=hidden, heads=2, key_heads=1, dim=16, ffn=64, head_norms=body.head_norms)
    description = replace(description, target_hidden=hidden, body=body)
    write_head(folder, random_draft(description, table=tables.embedding), dtype=torch.float32)
    return folder


def sources_of(rng, lengths=(1, 3, 9, 20, 40, 40, 7)):
    return [tiny.text(rng, length) for length in lengths]


@pytest.mark.fast_cases(*tiny.fast(NAMES))
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_exported_state_and_lm_head_give_the_logits(name, shelf):
    target = shelf.target(name, layers=(tiny.LAYERS - 1,))
    tables = target.share_weights()
    seq = tiny.admit(target, 0, [0, 3, 9], [5, 6, 7, 8])
    scores = target.score(tiny.everything([seq]), tree.empty(1, target.device))
    state = scores.feed_hidden_states[target.layers - 1][0][-1]
    logits = apply_final_norm(state, tables) @ tables.head.T
    if tables.softcap is not None:
        logits = tables.softcap * torch.tanh(logits / tables.softcap)
    assert torch.allclose(logits, scores.logits[0, 0], atol=1e-4, rtol=1e-4)
    assert (tables.softcap is not None) == (name == "t5gemma")


@pytest.mark.parametrize("name", ["t5", "t5gemma"])
@torch.inference_mode()
def test_embedding_is_the_input_of_the_first_layer(name, shelf):
    model = shelf.model(name)
    decoder = model.get_decoder()
    first = decoder.block[0] if name == "t5" else decoder.layers[0]
    inputs = []
    hook = first.register_forward_pre_hook(lambda _, args, kwargs: inputs.append(args[0]), with_kwargs=True)
    model(input_ids=torch.tensor([[5, 6]]), decoder_input_ids=torch.tensor([[3, 9]]), use_cache=False)
    hook.remove()
    assert torch.allclose(shelf.target(name).share_weights().embedding[[3, 9]], inputs[0][0], atol=1e-5)


@pytest.mark.parametrize("name", ["bart", "marian"])  # the scale is in the embedding, and in the decoder
def test_embedding_has_the_scale_of_the_config(name, tmp_path):
    config = tiny.ENCODER_DECODER[name]()
    config.scale_embedding = True
    checkpoint = load_checkpoint(tiny.save(tmp_path, config), dtype="float32", device="cpu")
    tables = make_target(checkpoint, slots=1, context=64).share_weights()
    weight = checkpoint.model.get_decoder().get_input_embeddings().weight
    assert torch.allclose(tables.embedding, weight * config.d_model**0.5)


@pytest.mark.fast_cases(
    "t5-medusa-draft",
    "t5-eagle31-draft",
    "t5-dspark-draft",
    "t5gemma-peagle-draft",
    "bart-hydra-tree",
    "t5gemma-mtp-tree",
)
@pytest.mark.parametrize(
    ("name", "kind", "shape"),
    [
        *product(["t5"], KINDS, ["draft"]),
        *product(["bart"], ["hydra", "mtp", "eagle31"], ["draft"]),
        *product(["t5gemma"], ["medusa", "mtp", "peagle", "dspark"], ["draft"]),
        *zip(MAIN, ["medusa", "hydra", "mtp"], ["tree"] * 3, strict=True),
        *((name, "medusa", "draft") for name in NAMES if name not in MAIN),
    ],
)
def test_greedy_equals_transformers(name, kind, shape, shelf, head):
    sources = sources_of(random.Random(0))
    llm = LLM(shelf.folder(name), proposer=f"{shape}:{head(name, kind)}", k=4, max_num_seqs=4, **OPTIONS)
    assert isinstance(llm.parts.proposer, HeadProposer if shape == "draft" else HeadTreeProposer)
    completions = llm.generate(sources=sources, params=PARAMS)
    outputs = [list(completion.token_ids) for completion in completions]
    assert list(map(len, outputs)) == [PARAMS.max_tokens] * len(sources)
    assert outputs == tiny.ranked_first_of_sources(shelf.model(name), sources, outputs)
    assert llm.stats.draft_tokens > 0


@pytest.mark.fast_cases("bart-mtp-draft")
@pytest.mark.parametrize(
    ("name", "kind", "shape"), [("t5", "medusa", "draft"), ("bart", "mtp", "draft"), ("bart", "hydra", "tree")]
)
def test_sampled_output_has_the_distribution_of_the_model(name, kind, shape, shelf, head):
    source = tiny.text(random.Random(4), 12)
    llm = LLM(shelf.folder(name), proposer=f"{shape}:{head(name, kind)}", k=3, max_num_seqs=64, **OPTIONS)
    check_three_tokens(llm, source, three_token_probs(shelf.model(name), source))


def test_head_follows_new_weights(shelf, head):
    llm = LLM(shelf.folder("t5"), proposer=f"draft:{head('t5', 'medusa')}", k=4, **OPTIONS)
    changed = {name: value * 1.5 for name, value in shelf.model("t5").state_dict().items() if name == "shared.weight"}
    before = llm.parts.proposer.model.module.logits(torch.ones(1, 32))
    llm.update_weights(changed)
    after = llm.parts.proposer.model.module.logits(torch.ones(1, 32))
    assert torch.allclose(after, 1.5 * before, rtol=1e-4)


def test_server_drafts_with_a_head(shelf, head):
    options = {"proposer": f"draft:{head('bart', 'mtp')}", "k": 4, **OPTIONS}
    expected = LLM(shelf.folder("bart"), **options).generate(sources=["a b c", "x"], params=PARAMS)
    llm = AsyncLLM(LLM(shelf.folder("bart"), max_num_seqs=4, **options), max_queued_requests=8, max_num_seqs=4)
    app = make_app(llm, Settings(max_queued_requests=8), name="tiny")
    body = {"source": ["a b c", "x"], "max_tokens": PARAMS.max_tokens, "temperature": 0, "ignore_eos": True}
    with TestClient(app) as client:
        reply = client.post("/v1/completions", json=body)
    assert [choice["text"] for choice in reply.json()["choices"]] == [each.text for each in expected]
    assert llm.stats.draft_tokens > 0


def test_speech_target_takes_a_head(tmp_path):
    folder = speech.save_whisper(tmp_path / "target", **speech.MULTILINGUAL)
    plain = LLM(folder, proposer="none", **OPTIONS)
    save_head(tmp_path / "head", plain.parts.target, "medusa")
    llm = LLM(folder, proposer=f"draft:{tmp_path / 'head'}", k=4, **OPTIONS)
    sources = [speech.recording(seed, samples) for seed, samples in enumerate((9000, 16000, 4000))]
    prompts = [llm.start_tokens("de", "translate")] * len(sources)
    outputs = [[each.token_ids for each in model.generate(prompts, PARAMS, sources=sources)] for model in (plain, llm)]
    assert outputs[0] == outputs[1]
    assert llm.stats.draft_tokens > 0


def test_lm_head_with_a_bias_is_refused(tmp_path, head):
    folder = tiny.save(tmp_path, tiny.ENCODER_DECODER["bart"]())
    model = load_checkpoint(folder, dtype="float32", device="cpu").model
    model.final_logits_bias[0, 3] = 1.0
    tiny.save_model(folder, model)
    with pytest.raises(OutriderError, match="do not support this bart model: its LM head has a bias"):
        LLM(folder, proposer=f"draft:{head('bart', 'medusa')}", **OPTIONS)


def test_head_of_another_target_is_refused(shelf, head, tmp_path):
    config = tiny.ENCODER_DECODER["bart"]()
    config.decoder_layers = 1
    smaller = tiny.save(tmp_path, config)
    with pytest.raises(OutriderError, match="was trained on a target with vocabulary 256, width 32 and 4 layers"):
        LLM(smaller, proposer=f"draft:{head('bart', 'medusa')}", **OPTIONS)
