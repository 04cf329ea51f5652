"""Prefix sharing, multi-token prediction and recurrent states together, with eviction, chunks and cancellation."""

import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.core.params import SamplingParams
from outrider.engine.default_proposer import default_proposer
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.heads.description import AuxStates, Body, Feedback, FusionPoint, HeadDescription, InputFusion, Kind
from outrider.models.heads.formats.registry import format_of
from outrider.models.heads.store import make_module
from outrider.models.torch.recurrent.rows import CHUNK
from tests.helpers import tiny

VOCAB = 64  # few tokens, so that a random module is often accepted
NAMINGS = {"bamba": "mtp-qwen", "lfm2": "mtp-qwen", "nemotron_h": "mtp-nemotron"}  # by architecture
DEFAULT = "best(suffix:100000,mtp)"  # of a checkpoint with a module
OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": 320, "verifier": "coupled"}


def save_with_module(folder, name):
    """Write a random model with a random module for multi-token prediction in the same checkpoint."""
    config = tiny.RECURRENT[name]()
    config.initializer_range = 0.05
    config.vocab_size = VOCAB
    config.max_position_embeddings = 512
    tiny.save(folder, config, size=tiny.VOCAB)
    nemotron = name == "nemotron_h"
    body = Body(
        layers=1,
        hidden=32,
        heads=4,
        key_heads=2,
        dim=8,
        ffn=48,
        gated=not nemotron,
        rotary=0.0 if nemotron else 1.0,
        epsilon=1e-5,
    )
    description = HeadDescription(
        kind=Kind.MTP,
        target_hidden=32,
        target_layers=tiny.LAYERS,
        vocab=VOCAB,
        aux_states=AuxStates(layers=(tiny.LAYERS - 1,), final=True),
        input_fusion=InputFusion(at=FusionPoint.PROJECTION),
        body=body,
        feedback=Feedback.NORMED,
    )
    torch.manual_seed(1)
    module = make_module(description)
    _, tensors = format_of(NAMINGS[name]).write(description, dict(module.state_dict()), None)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {key: value.contiguous() for key, value in tensors.items()}, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hybrids")
    return {name: save_with_module(root / name, name) for name in NAMINGS}


def prompts_with_common_prefixes():
    """Prompts that share prefixes of several lengths, before, at and after the ends of chunks."""
    rng = random.Random(1)
    common = [rng.randrange(1, VOCAB) for _ in range(2 * CHUNK + 20)]
    cuts = (3, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 30, 2 * CHUNK, 2 * CHUNK + 11)
    prompts = [common[:cut] + [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 9))] for cut in cuts]
    return prompts + prompts[::-1]


def outputs(llm, prompts, params):
    return [list(completion.token_ids) for completion in llm.generate(prompts, params)]


@pytest.mark.fast_cases("lfm2")
@pytest.mark.parametrize("name", NAMINGS)
def test_outputs_equal_plain_decoding(name, folders):
    prompts = prompts_with_common_prefixes()
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=3)
    plain = LLM(folders[name], proposer="none", prefix_caching=False, max_num_seqs=4, **OPTIONS)
    expected = outputs(plain, prompts, params)
    assert len({tuple(tokens) for tokens in expected}) > len(prompts) // 4
    # Conversations go on: each prompt is an earlier one with its answer.
    longer = [prompt + tokens + [5, 9] for prompt, tokens in zip(prompts, expected, strict=True)]
    expected_longer = outputs(plain, longer, params)
    for proposer, k, chunk, slots in (("mtp", 3, 512, 5), (DEFAULT, 7, 32, 2)):
        llm = LLM(folders[name], proposer=proposer, k=k, max_num_seqs=slots, max_num_batched_tokens=chunk, **OPTIONS)
        assert outputs(llm, prompts, params) == expected, (proposer, k, chunk, slots)
        assert sum(llm.stats.accepted) > 0
        assert llm.engine.cache_usage().hit_tokens >= CHUNK  # prefixes were shared
        assert outputs(llm, longer, params) == expected_longer, (proposer, k, chunk, slots)


@pytest.mark.slow
def test_every_rejection_position_occurs(folders):
    llm = LLM(folders["bamba"], proposer="mtp", k=4, max_num_seqs=4, **OPTIONS)
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=8)
    llm.generate(prompts_with_common_prefixes() * 3, params)
    stats = llm.stats
    assert len(stats.accepted) == 4
    assert all(0 < accepted < reached for accepted, reached in zip(stats.accepted, stats.reached, strict=True))


def test_canceled_requests_leave_no_trace(folders):
    prompts = prompts_with_common_prefixes()
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=3)
    llm = LLM(folders["bamba"], proposer="mtp", k=3, max_num_seqs=3, **OPTIONS)
    expected = outputs(llm, prompts, params)
    for steps in (1, 4):
        ids = [id for prompt in prompts[:5] for id in llm.submit(prompt, params)]
        for _ in range(steps):
            llm.engine.step()
        for id in ids:
            llm.abort(id)
        while llm.engine.busy():
            llm.engine.step()
        assert outputs(llm, prompts, params) == expected


def test_preempted_requests_continue(folders, monkeypatch):
    prompts = prompts_with_common_prefixes()
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=3)
    llm = LLM(folders["bamba"], proposer="mtp", k=3, max_num_seqs=4, **OPTIONS)
    expected = outputs(llm, prompts, params)
    rng = random.Random(4)
    monkeypatch.setattr(llm.parts.target.cache, "fits", lambda ends: len(ends) < 2 or rng.random() < 0.8)
    assert outputs(llm, prompts, params) == expected
    assert llm.engine.cache_usage().preempted > 5


def test_module_in_the_checkpoint_is_the_default(folders, tmp_path):
    assert default_proposer(folders["bamba"]) == DEFAULT
    without = tiny.save(tmp_path / "without", tiny.RECURRENT["bamba"]())
    assert default_proposer(without) == "suffix:100000"
    with pytest.raises(OutriderError, match="no module for multi-token prediction; use ngram"):
        LLM(without, proposer="mtp", dtype="float32", device="cpu")
    with pytest.raises(OutriderError, match="mtp takes no argument"):
        LLM(without, proposer="mtp:2", dtype="float32", device="cpu")


PROJECTIONS = {"bamba": "mtp.fc.weight", "nemotron_h": "mtp.layers.0.eh_proj.weight"}


def copy_changed(source, folder, change):
    """Copy a model, with its tensors changed."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("proposer", ["mtp", None])
def test_module_without_its_projection_is_an_error(name, proposer, folders, tmp_path):
    missing = PROJECTIONS[name]
    damaged = copy_changed(folders[name], tmp_path / "damaged", lambda tensors: tensors.pop(missing))
    with pytest.raises(OutriderError, match=f"has no tensor '{missing}'; copy the checkpoint again, or use") as error:
        LLM(damaged, proposer=proposer, **OPTIONS)
    assert "\n" not in str(error.value)
    plain = LLM(damaged, proposer="ngram", **OPTIONS)
    assert plain.generate([[3, 4, 5]], SamplingParams(max_tokens=2))[0].token_ids


@pytest.mark.parametrize("proposer", ["mtp", None])
def test_module_without_a_norm_is_an_error(proposer, folders, tmp_path):
    damaged = copy_changed(folders["bamba"], tmp_path / "damaged", lambda tensors: tensors.pop("mtp.norm.weight"))
    with pytest.raises(OutriderError, match=r"there is no tensor 'mtp\.norm\.weight'; copy"):
        LLM(damaged, proposer=proposer, **OPTIONS)


@pytest.mark.parametrize(
    ("name", "stored", "own"),
    [
        ("bamba", "mtp.pre_fc_norm_embedding.weight", "embedding_norm.weight"),
        ("bamba", "mtp.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("nemotron_h", "mtp.layers.0.hnorm.weight", "state_norm.weight"),
        ("nemotron_h", "mtp.layers.1.final_layernorm.weight", "norm.weight"),
    ],
)
def test_sizes_that_do_not_fit_are_named_as_in_the_checkpoint(name, stored, own, folders, tmp_path):
    def lengthen(tensors):
        tensors[stored] = torch.cat([tensors[stored], tensors[stored]])

    damaged = copy_changed(folders[name], tmp_path / "damaged", lengthen)
    with pytest.raises(OutriderError) as error:
        LLM(damaged, proposer="mtp", **OPTIONS)
    assert f": {stored} ({own} in Outrider) has shape (" in str(error.value)


def test_missing_weight_of_the_layer_is_named_as_in_the_checkpoint(folders, tmp_path):
    missing = "mtp.layers.0.mlp.up_proj.weight"
    damaged = copy_changed(folders["bamba"], tmp_path / "damaged", lambda tensors: tensors.pop(missing))
    with pytest.raises(OutriderError, match=f"lacks '{missing}' \\(and 0 more\\)"):
        LLM(damaged, proposer="mtp", **OPTIONS)
