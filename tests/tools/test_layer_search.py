"""The search for layers to leave out: what it foretells is what rounds come to, and it finds what does nothing."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.measure.prompts import Prompt
from outrider.tools.layer_search import LayerSearch, Text, agreement, expression, halves, measure, rounds, write
from tests.helpers import tiny

SIZES = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.2}
IDLE = (1, 2)  # layers that add nothing
FAINT = 3  # a layer that adds little


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.make_config("LlamaConfig", **SIZES))
    with torch.no_grad():
        for at, share in ((IDLE[0], 0.0), (IDLE[1], 0.0), (FAINT, 0.4)):
            model.model.layers[at].self_attn.o_proj.weight *= share
            model.model.layers[at].mlp.down_proj.weight *= share
    return tiny.save_model(tmp_path_factory.mktemp("search") / "model", model)


@pytest.fixture(scope="module")
def llm(folder):
    return load(folder)


def load(folder, proposer="none", k=0):
    return LLM(folder, proposer=proposer, k=k, dtype="float32", device="cpu", max_num_seqs=2, max_model_len=96)


def asked(count):
    chance = random.Random(2)
    letters = "abcdefgh "
    words = ["".join(chance.choice(letters) for _ in range(chance.randint(3, 10))) for _ in range(count)]
    return [
        Prompt(id=str(i), category="one" if i % 3 else "two", prompt=word, messages=None)
        for i, word in enumerate(words)
    ]


def searching(llm, texts, max_trials=100):
    return LayerSearch(llm.parts.target, texts, max_trials=max_trials, told=lambda _: None)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 8])
def test_rounds_are_what_walking_through_them_gives(k):
    for agree in itertools.chain.from_iterable(itertools.product([False, True], repeat=n) for n in range(9)):
        left, count = list(agree), 0
        while left:
            kept = next((i for i, right in enumerate(left[:k]) if not right), min(k, len(left)))
            left, count = left[kept + 1 :], count + 1
        assert rounds(agree, k) == count


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("kept", [(0,), (0, 1, 2), (0, 3), (1, 3)])
def test_what_is_foretold_is_what_rounds_come_to(kept, k, folder, llm):
    texts = write(llm, asked(5), 24)
    part = llm.parts.target.make_submodel(kept)
    foretold = sum(rounds(agreement(part, text), k) for text in texts)
    run = load(folder, expression(kept, tiny.LAYERS), k)
    done = run.generate([text.prompt for text in texts], SamplingParams(max_tokens=24))
    assert [each.token_ids for each in done] == [text.tokens for text in texts]
    assert run.stats.passes == foretold
    assert sum(len(text.tokens) for text in texts) == run.stats.output_tokens


def test_layers_that_do_nothing_are_left_out(llm):
    texts = write(llm, asked(6), 24)
    search = searching(llm, texts)
    found = search.best_skip()
    assert set(IDLE) <= set(range(tiny.LAYERS)) - set(found.accepted)
    both = search.report(found, write(llm, asked(9)[6:], 24))
    assert (both.accepted, both.k) == (found.accepted, found.k)
    assert found.speedup > 1.2
    exits = search.best_exit()
    assert exits.expression == f"exit:{len(exits.accepted)}"
    assert exits.accepted == (0,)  # two idle layers follow, and only a faint one after them
    assert search.tried <= tiny.LAYERS**2
    idle = search.report(found, texts)
    assert idle.agreement == found.agreement
    everything = agreement(llm.parts.target.make_submodel(tuple(set(range(tiny.LAYERS)) - set(IDLE))), texts[0])
    assert all(everything)


def test_the_same_search_finds_the_same(folder, llm):
    texts = write(llm, asked(4), 16)
    one, two = (searching(each, texts) for each in (llm, load(folder)))
    assert (one.best_exit(), one.best_skip()) == (two.best_exit(), two.best_skip())
    chosen = [halves(asked(9), seed) for seed in (5, 5, 6)]
    assert chosen[0] == chosen[1] != chosen[2]
    searched, held = chosen[0]
    assert abs(len(searched) - len(held)) <= 1
    assert sorted(p.id for p in searched + held) == sorted(p.id for p in asked(9))
    assert {p.category for p in held} == {"one", "two"}


def test_it_keeps_to_its_budget(llm):
    texts = write(llm, asked(2), 8)
    search = searching(llm, texts, max_trials=2)
    assert search.best_exit().accepted in ((0,), (0, 1))
    assert search.best_skip() is None
    assert search.tried == 2
    search = searching(llm, texts, max_trials=5)
    assert len(search.best_skip().accepted) in (tiny.LAYERS - 1, tiny.LAYERS - 2)
    assert search.tried == 5


def test_costs_are_shares_of_a_pass(llm):
    texts = [Text(prompt=(1, 2, 3), tokens=(4, 5, 6))]
    search = searching(llm, texts)
    costs = [search._figures(tuple(range(count)), texts, ks=(1,)).cost for count in range(1, tiny.LAYERS + 1)]
    assert costs == sorted(costs)
    assert costs[-1] == pytest.approx(1)
    assert costs[0] > 1 / tiny.LAYERS  # the head is read as well


def test_passes_are_timed(llm):
    text = write(llm, asked(1), 8)[0]
    found = searching(llm, [text]).best_exit()
    timing = measure(llm.parts.target, found, text)
    assert min(timing.draft, timing.plain, timing.verify) > 0
    wanted = found.tau * timing.plain / (found.k * timing.draft + timing.verify)
    assert timing.speedup(found) == pytest.approx(wanted)


def test_names():
    assert expression((0, 1), 4) == "exit:2"
    assert expression((1, 3), 4) == "skip:0+2"


def test_mistakes_are_answered(llm, tmp_path):
    text = Text(prompt=(1, 2), tokens=(3, 4))
    with pytest.raises(OutriderError, match="use at least 1"):
        searching(llm, [text], max_trials=0)
    with pytest.raises(OutriderError, match="needs two prompts"):
        halves(asked(1), 0)
    recurrent = tiny.save(tmp_path / "mamba2", tiny.ARCHITECTURES["mamba2"]())
    with pytest.raises(OutriderError, match="no layers to choose from"):
        searching(load(recurrent), [text])


def test_the_verb(folder, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"category": prompt.category, "prompt": prompt.prompt} for prompt in asked(6)]
    file.write_text("\n".join(map(json.dumps, lines)))
    words = ["layers", "--target", str(folder), "--prompts", str(file), "--max-tokens", "12", "--dtype", "float32"]
    result = CliRunner().invoke(app, [*words, "--threads", "1", "--max-trials", "9", "--limit", "3"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["tried"] <= document["max_trials"] == 9
    assert document["prompts"] == {"searched": 3, "held_out": 2}
    assert [each["expression"].split(":")[0] for each in document["found"]] == ["exit", "skip"]
    for each in document["found"]:
        assert each["speedup"] == pytest.approx(each["tau"] / (1 + each["k"] * each["cost"]))
        assert each["expression"] in result.stdout
    assert "Use it as: --proposer" in result.stdout
