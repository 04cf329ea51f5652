"""Tests of the layer search: its simulation equals real rounds, and it removes layers that have no effect."""

import itertools
import json
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.core.params import SamplingParams
from outrider.core.prompts import Prompt
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.tools.layer_search import (
    LayerSearch,
    Text,
    agreement,
    expression,
    generate_texts,
    measure,
    rounds,
    split_prompts,
)
from tests.helpers import tiny
from tests.helpers.commands import succeed

SIZES = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.2}
NO_EFFECT = (1, 2)  # layers whose output is zero
SMALL_EFFECT = 3  # a layer whose output is small


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.make_config("LlamaConfig", **SIZES))
    with torch.no_grad():
        for layer, scale in ((NO_EFFECT[0], 0.0), (NO_EFFECT[1], 0.0), (SMALL_EFFECT, 0.4)):
            model.model.layers[layer].self_attn.o_proj.weight *= scale
            model.model.layers[layer].mlp.down_proj.weight *= scale
    return tiny.save_model(tmp_path_factory.mktemp("search") / "model", model)


@pytest.fixture(scope="module")
def llm(folder):
    return load(folder)


def load(folder, proposer="none", k=0):
    return LLM(folder, proposer=proposer, k=k, dtype="float32", device="cpu", max_num_seqs=2, max_model_len=96)


def random_prompts(count):
    rng = random.Random(2)
    letters = "abcdefgh "
    words = ["".join(rng.choice(letters) for _ in range(rng.randint(3, 10))) for _ in range(count)]
    return [
        Prompt(id=str(i), category="one" if i % 3 else "two", prompt=word, messages=None)
        for i, word in enumerate(words)
    ]


def make_search(llm, texts, max_trials=100):
    return LayerSearch(llm.parts.target, texts, max_trials=max_trials, on_progress=lambda _: None)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 8])
def test_rounds_equal_a_simulation(k):
    for agree in itertools.chain.from_iterable(itertools.product([False, True], repeat=n) for n in range(9)):
        remaining = list(agree)
        count = 0
        while remaining:
            accepted = next((i for i, agrees in enumerate(remaining[:k]) if not agrees), min(k, len(remaining)))
            remaining = remaining[accepted + 1 :]
            count += 1
        assert rounds(agree, k) == count


@pytest.mark.fast_cases("(0,)-1", "(0, 1, 2)-4", "(0, 3)-1", "(1, 3)-4")
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("kept", [(0,), (0, 1, 2), (0, 3), (1, 3)], ids=str)
def test_predicted_passes_equal_real_passes(kept, k, folder, llm):
    texts = generate_texts(llm, random_prompts(5), 24)
    submodel = llm.parts.target.make_submodel(kept)
    predicted = sum(rounds(agreement(submodel, text), k) for text in texts)
    speculative = load(folder, expression(kept, tiny.LAYERS), k)
    completions = speculative.generate([text.prompt for text in texts], SamplingParams(max_tokens=24))
    assert [completion.token_ids for completion in completions] == [text.tokens for text in texts]
    assert speculative.stats.passes == predicted
    assert sum(len(text.tokens) for text in texts) == speculative.stats.output_tokens


def test_layers_without_effect_are_removed(llm):
    texts = generate_texts(llm, random_prompts(6), 24)
    search = make_search(llm, texts)
    best_skip = search.best_skip()
    assert set(NO_EFFECT) <= set(range(tiny.LAYERS)) - set(best_skip.layers)
    held_out = search.report(best_skip, generate_texts(llm, random_prompts(9)[6:], 24))
    assert (held_out.layers, held_out.k) == (best_skip.layers, best_skip.k)
    assert best_skip.speedup > 1.2
    best_exit = search.best_exit()
    assert best_exit.expression == f"exit:{len(best_exit.layers)}"
    assert best_exit.layers == (0,)  # the layers after it have no effect or a small one
    assert search.tried <= tiny.LAYERS**2
    assert search.report(best_skip, texts).agreement == best_skip.agreement
    effective = tuple(set(range(tiny.LAYERS)) - set(NO_EFFECT))
    assert all(agreement(llm.parts.target.make_submodel(effective), texts[0]))


def test_search_is_deterministic(folder, llm):
    texts = generate_texts(llm, random_prompts(4), 16)
    first, second = (make_search(model, texts) for model in (llm, load(folder)))
    assert (first.best_exit(), first.best_skip()) == (second.best_exit(), second.best_skip())
    splits = [split_prompts(random_prompts(9), seed) for seed in (5, 5, 6)]
    assert splits[0] == splits[1] != splits[2]
    searched, held_out = splits[0]
    assert abs(len(searched) - len(held_out)) <= 1
    assert sorted(prompt.id for prompt in searched + held_out) == sorted(prompt.id for prompt in random_prompts(9))
    assert {prompt.category for prompt in held_out} == {"one", "two"}


def test_search_stops_after_max_trials(llm):
    texts = generate_texts(llm, random_prompts(2), 8)
    search = make_search(llm, texts, max_trials=2)
    assert search.best_exit().layers in ((0,), (0, 1))
    assert search.best_skip() is None
    assert search.tried == 2
    search = make_search(llm, texts, max_trials=5)
    assert len(search.best_skip().layers) in (tiny.LAYERS - 1, tiny.LAYERS - 2)
    assert search.tried == 5


def test_draft_cost_is_a_share_of_a_pass(llm):
    texts = [Text(prompt=(1, 2, 3), tokens=(4, 5, 6))]
    search = make_search(llm, texts)
    found = search.best_exit()
    prefixes = [tuple(range(count)) for count in range(1, tiny.LAYERS + 1)]
    costs = [search.report(replace(found, layers=layers), texts).cost for layers in prefixes]
    assert costs == sorted(costs)
    assert costs[-1] == pytest.approx(1)
    assert costs[0] > 1 / tiny.LAYERS  # a pass also reads the output layer


def test_measured_times_and_their_speedup(llm):
    text = generate_texts(llm, random_prompts(1), 8)[0]
    figures = make_search(llm, [text]).best_exit()
    timing = measure(llm.parts.target, figures, text)
    assert min(timing.draft, timing.plain, timing.verify) > 0
    expected = figures.tau * timing.plain / (figures.k * timing.draft + timing.verify)
    assert timing.speedup(figures) == pytest.approx(expected)


def test_proposer_expressions():
    assert expression((0, 1), 4) == "exit:2"
    assert expression((1, 3), 4) == "skip:0+2"


def test_errors_of_invalid_searches(llm, tmp_path):
    text = Text(prompt=(1, 2), tokens=(3, 4))
    with pytest.raises(OutriderError, match="use at least 1"):
        make_search(llm, [text], max_trials=0)
    with pytest.raises(OutriderError, match="needs at least two prompts"):
        split_prompts(random_prompts(1), 0)
    recurrent = tiny.save(tmp_path / "mamba2", tiny.ARCHITECTURES["mamba2"]())
    with pytest.raises(OutriderError, match="cannot skip layers"):
        make_search(load(recurrent), [text])


def test_command_line(folder, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"category": prompt.category, "prompt": prompt.prompt} for prompt in random_prompts(6)]
    file.write_text("\n".join(map(json.dumps, lines)))
    words = ["layers", "--target", str(folder), "--prompts", str(file), "--max-tokens", "12", "--dtype", "float32"]
    result = succeed(*words, "--threads", "1", "--max-trials", "9", "--limit", "3")
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["tried"] <= document["max_trials"] == 9
    assert document["prompts"] == {"searched": 3, "held_out": 2}
    assert [entry["expression"].split(":")[0] for entry in document["found"]] == ["exit", "skip"]
    for entry in document["found"]:
        assert entry["speedup"] == pytest.approx(entry["tau"] / (1 + entry["k"] * entry["cost"]))
        assert entry["expression"] in result.stdout
    assert "Use it with --proposer" in result.stdout
