"""Draft heads for Gemma: norms whose weights are offset by 1, scaled embeddings, and local layers with a window."""

import json
from functools import cache

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.train.run import Training
from outrider.train.settings import Settings
from tests.helpers import tiny
from tests.helpers.configs import MIXED
from tests.helpers.configured import with_engine

MEMORIZING = "mtp"  # the kind that is trained until it has learned the answers
KINDS = ["eagle3", "slim", "mtp", "medusa", "dflash", "kv-sharing"]
PROMPTS = [list(b"to be or not to be, that"), list(b"a rose is a rose is a rose")]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Folders of models whose width draft heads can have, with the rotary positions of the larger models of Gemma 3."""
    root = tmp_path_factory.mktemp("targets")
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    }
    common = {"hidden_size": 64, "head_dim": 16, "sliding_window": tiny.WINDOW, "num_key_value_heads": 2}
    gemma3 = tiny.make_config("Gemma3TextConfig", query_pre_attn_scalar=16, layer_types=MIXED, **common)
    gemma3.rope_parameters = ropes
    gemma2 = tiny.make_config("Gemma2Config", query_pre_attn_scalar=16, final_logit_softcapping=3.0, **common)
    return {name: tiny.save(root / name, config) for name, config in (("gemma3", gemma3), ("gemma2", gemma2))}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    texts = [bytes(prompt).decode() for prompt in PROMPTS]
    file.write_text("".join(json.dumps({"prompt": f"{text} {i}"}) + "\n" for i in range(2) for text in texts))
    return file


@pytest.fixture(scope="module")
def trained(targets, data, tmp_path_factory):
    """Trains a head of a kind, once."""

    @cache
    def train(kind, target="gemma3"):
        folder = tmp_path_factory.mktemp(kind)
        settings = with_engine(
            Settings,
            out=str(folder),
            data=[str(data)],
            target=str(targets[target]),
            proposer="none",
            batch_size=2,
            steps_per_generation=4,
            epochs=12 if kind == MEMORIZING else 4,
            temperature=0.0,  # the same answers in each epoch
            max_tokens=16,
            k=2,
            eval_every=0,
            max_num_seqs=2,
            dtype="float32",
            device="cpu",
            lr=1e-2,
        )
        _, lines = Training(kind, settings).run()
        return folder, lines

    return train


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3_text", "gemma3"])
def test_shared_weights_are_those_of_the_pass(name, shelf):
    """The embedding is scaled, and the final norm multiplies by its weights plus 1."""
    tables = shelf.target(name).share_weights()
    model = shelf.model(name)
    ids = torch.arange(7, 40)
    torch.testing.assert_close(tables.embedding[ids], model.get_input_embeddings()(ids))
    text = model.get_decoder()
    state = torch.randn(5, tables.head.shape[1]) * 3
    rms = (state.square().mean(-1, keepdim=True) + tables.epsilon).rsqrt()
    torch.testing.assert_close(state * rms * tables.norm, text.norm(state))
    torch.testing.assert_close(tables.head, model.get_output_embeddings().weight)


OPTIONS = {"dtype": "float32", "device": "cpu", "max_num_seqs": 2, "max_model_len": 96, "threads": 1}
OPTIONS["verifier"] = "coupled"  # which gives a seed the text of plain decoding


def generate(llm):
    """Return greedy and sampled outputs. They are longer than the window of the local layers."""
    params = [SamplingParams(temperature=temperature, seed=4, max_tokens=32) for temperature in (0.0, 1.0)]
    return [completion.token_ids for each in params for completion in llm.generate(PROMPTS, each)]


@pytest.mark.fast_cases("mtp")
@pytest.mark.parametrize("kind", KINDS)
def test_head_for_gemma_3_is_trained_saved_loaded_and_exact(kind, targets, trained):
    check_head(targets["gemma3"], *trained(kind))


def test_head_for_gemma_2_learns_the_capped_distribution(targets, trained):
    check_head(targets["gemma2"], *trained("medusa", "gemma2"))


def check_head(target, folder, lines):
    assert lines[-1]["loss"] < lines[0]["loss"]
    llm = LLM(target, proposer=f"draft:{folder}", k=3, **OPTIONS)
    assert generate(llm) == generate(LLM(target, proposer="none", **OPTIONS))
    assert llm.stats.draft_tokens > 0


def test_head_drafts_what_it_has_learned(targets, trained):
    """Accepted tokens show that states, embedding and norm are the same in training and in use."""
    text = bytes(PROMPTS[0]).decode() + " 0"
    folder, _ = trained(MEMORIZING)
    llm = LLM(targets["gemma3"], proposer=f"draft:{folder}", dtype="float32", device="cpu", max_model_len=64)
    (completion,) = llm.generate([text], SamplingParams(k=2, max_tokens=16))
    assert sum(completion.from_draft) >= 5
