"""Draft models whose vocabulary nearly equals the target's."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.llm import LLM
from tests.field.models import IDS, PROMPTS, llama, token_ids
from tests.helpers import tiny

SIZE = 300  # tokens: one per byte, and special ones
OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": 128}
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("vocabularies") / "target", llama(vocab_size=SIZE), size=SIZE)


@pytest.fixture(scope="module")
def plain(target):
    return token_ids(LLM(target, proposer="none", **OPTIONS).generate(PROMPTS, PARAMS))


def swap_in_tokenizer(folder, first, second):
    """Exchange the ids of two tokens in the files of a tokenizer."""
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(document))


def swap_in_model(folder, first, second):
    """Exchange two rows of the embedding and of the LM head."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight[[first, second]] = weight[[second, first]]
    model.save_pretrained(folder)


@pytest.mark.parametrize("kind", ["draft", "draft-tokens", "tree"])
def test_two_tokens_have_swapped_ids(target, plain, tmp_path, kind):
    """The vocabularies have one size, and the draft is the target with two ids swapped (sglang PR #23838).

    It drafts what the target says only if its ids are mapped by text.
    """
    used = {token for tokens in plain for token in tokens}
    texts = {id: text for text, id in IDS.items()}
    first = texts[next(token for token in plain[0] if token in texts)]
    second = texts[next(token for token in texts if token not in used)]
    draft = tmp_path / "draft"
    shutil.copytree(target, draft)
    swap_in_tokenizer(draft, first, second)
    swap_in_model(draft, IDS[first], IDS[second])
    llm = LLM(target, proposer=f"{kind}:{draft}", k=4, **OPTIONS)
    assert token_ids(llm.generate(PROMPTS, PARAMS)) == plain
    if kind != "tree":
        assert llm.stats.accepted == llm.stats.offered


@pytest.mark.parametrize("lacks", ["target", "draft"])
def test_one_side_lacks_an_added_token(target, plain, tmp_path, lacks):
    """An added token that only one of the two tokenizers has (llama.cpp PR #22358)."""
    other = tiny.save(tmp_path / "other", llama(vocab_size=SIZE + 1), size=SIZE + 1)
    folders = {"target": (target, other), "draft": (other, target)}[lacks]
    tool = SIZE  # its id
    params = SamplingParams(max_tokens=24, ignore_eos=True, logit_bias={tool: 100.0} if lacks == "draft" else {})
    expected = token_ids(LLM(folders[0], proposer="none", **OPTIONS).generate(PROMPTS, params))
    assert all((tool in tokens) is (lacks == "draft") for tokens in expected)
    llm = LLM(folders[0], proposer=f"draft:{folders[1]}", k=4, **OPTIONS)
    assert token_ids(llm.generate(PROMPTS, params)) == expected


@pytest.mark.parametrize(("kind", "verifier"), [("draft", "walk"), ("draft", "rejection"), ("tree", "walk")])
def test_padded_rows_of_a_draft_are_never_emitted(target, tmp_path, kind, verifier):
    """The embedding of the draft has 320 rows for 300 tokens, and the padded ones are likeliest (sglang PR #23838)."""
    draft = tmp_path / "draft"
    model = AutoModelForCausalLM.from_pretrained(target)
    model.resize_token_embeddings(320, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[SIZE:] = 5 * model.lm_head.weight[:20]
    tiny.save_model(draft, model, size=SIZE)
    llm = LLM(target, proposer=f"{kind}:{draft}", verifier=verifier, k=4, **OPTIONS)
    params = SamplingParams(temperature=2.0, seed=1, n=4, max_tokens=24, ignore_eos=True)
    completions = llm.generate(PROMPTS, params)
    assert all(token < SIZE for tokens in token_ids(completions) for token in tokens)
    assert {len(tokens) for tokens in token_ids(completions)} == {24}


def test_unrelated_vocabularies_are_refused_by_name(target, tmp_path):
    """A draft whose tokens are mostly others (llama.cpp PR #22358)."""
    draft = tmp_path / "draft"
    shutil.copytree(target, draft)
    path = draft / "tokenizer.json"
    document = json.loads(path.read_text())
    renamed = {f"zz{text}": id for text, id in document["model"]["vocab"].items()}
    document["model"]["vocab"] = renamed
    path.write_text(json.dumps(document))
    with pytest.raises(OutriderError, match="token"):
        LLM(target, proposer=f"draft-tokens:{draft}", k=4, **OPTIONS)
