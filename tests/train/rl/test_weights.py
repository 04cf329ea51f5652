"""Weight updates of an engine: what follows them, what they refuse, and what they cost."""

import gc
import json
import shutil
import sys
from dataclasses import replace
from statistics import median

import pytest
import torch

from outrider import LLM, OutriderError, SamplingParams
from outrider.drafting.propose.leaves import draft_models
from outrider.drafting.propose.vocabulary.reduced import write_draft_vocabulary
from outrider.drafting.propose.vocabulary.wrapped_target import unwrapped
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.runtime import heap
from tests.helpers import tiny

native = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
KERNELS = pytest.mark.parametrize("kernels", [pytest.param("native", marks=native), "torch"])
SAMPLED = SamplingParams(temperature=1.0, max_tokens=16, seed=5, n=2, logprobs=0, ignore_eos=True)
PROMPT = tuple(range(10, 90))


def load(folder, **options):
    settings = {"proposer": "ngram", "k": 3, "dtype": "float32", "device": "cpu", "max_num_seqs": 4}
    return LLM(folder, **{**settings, **options})


def tokens(llm, params=SAMPLED, prompt=PROMPT):
    return [completion.token_ids for completion in llm.generate(prompt, params)]


def reload(tmp_path, folder, weights):
    """A folder with these weights and the tokenizer of another."""
    checkpoint = load_checkpoint(folder, dtype="float32", device="cpu")
    checkpoint.model.load_state_dict(weights)
    return tiny.save_model(tmp_path / "new", checkpoint.model)


@KERNELS
@pytest.mark.parametrize("name", ["policy", "tied"])
def test_an_update_equals_loading_the_new_weights(shelf, tmp_path, changed, kernels, name):
    weights = changed(shelf / name)
    llm = load(shelf / name, kernels=kernels)
    before = tokens(llm)  # also fills the prefix cache, which must be dropped
    old = llm.weights.checksum()
    assert llm.update_weights(weights) == 1
    fresh = load(reload(tmp_path, shelf / name, weights), kernels=kernels)
    assert llm.weights.checksum() == fresh.weights.checksum() != old
    assert tokens(llm) == tokens(fresh) != before
    original = load_checkpoint(shelf / name, dtype="float32", device="cpu").model.state_dict()
    llm.update_weights(original, version=7)
    assert llm.weights.version == 7
    assert llm.weights.checksum() == old
    assert tokens(llm) == before


@KERNELS
def test_a_folder_of_weights(shelf, tmp_path, changed, kernels):
    weights = changed(shelf / "tied")
    folder = reload(tmp_path, shelf / "tied", weights)
    (folder / "tokenizer.json").unlink()
    one, two = load(shelf / "tied", kernels=kernels), load(shelf / "tied", kernels=kernels)
    one.update_weights(folder)
    two.update_weights(weights.items())
    assert one.weights.checksum() == two.weights.checksum()


@KERNELS
def test_a_bad_update_changes_nothing(shelf, changed, kernels):
    llm = load(shelf / "tied", kernels=kernels)
    weights = changed(shelf / "tied")
    before, checksum = tokens(llm), llm.weights.checksum()
    norm, table = "model.norm.weight", "model.embed_tokens.weight"
    hole = weights[norm].clone()
    hole[3] = torch.nan
    for bad, message in (
        ({"model.zork": torch.zeros(1)}, "no weight 'model.zork'"),
        ({"base_model.model.zork": torch.zeros(1)}, r"not merged; give outrider.train.rl.merged_weights\(model\)"),
        ({"zork.base_layer.weight": torch.zeros(1)}, r"not merged; give outrider.train.rl.merged_weights\(model\)"),
        ({norm: weights[norm][1:]}, r"has shape \(63,\); give \(64,\)"),
        ({norm: torch.ones(64, dtype=torch.int64)}, "has dtype int64"),
        ({norm: hole}, "NaN or infinite in float32; the old weights stay"),
        ({norm: torch.full((64,), torch.inf)}, "NaN or infinite"),
        ({"lm_head.weight": weights[table] + 1}, "are one weight of this model"),
        ({norm: [1.0] * 64}, "is a list; give torch tensors"),
    ):
        with pytest.raises(OutriderError, match=message):
            llm.update_weights({**weights, **bad})
    with pytest.raises(OutriderError, match="the weights are of type int; give a mapping"):
        llm.update_weights(5)
    for version in (0, -1, True, "1"):
        with pytest.raises(OutriderError, match="use a whole number above it"):
            llm.update_weights(weights, version=version)
    assert (llm.weights.version, llm.weights.checksum()) == (0, checksum)
    assert tokens(llm) == before


@KERNELS
def test_an_update_inside_of_a_completion(shelf, changed, kernels):
    """The tokens after the update are those that the new weights give after the tokens so far."""
    weights = changed(shelf / "policy")
    llm = load(shelf / "policy", kernels=kernels, k=0)
    one = SamplingParams(temperature=1.0, max_tokens=24, seed=5, logprobs=0, ignore_eos=True)
    (request,) = llm.request_maker.of_prompt(PROMPT, one)
    row = llm.add(request)
    for _ in range(8):
        llm.engine.step()
    llm.update_weights(weights)
    while not row.finish_reason:
        llm.engine.step()
    done = llm.completion(row)
    assert done.weight_versions == ((0, 0), (8, 1))
    new = load(shelf / "policy", kernels=kernels, k=0)
    new.update_weights(weights)
    prefix = [*PROMPT, *done.token_ids[:8]]
    (request,) = new.request_maker.of_prompt(
        prefix, SamplingParams(temperature=1.0, max_tokens=16, seed=5, ignore_eos=True)
    )
    row = new.add(request)  # noise depends on the position in the text, so the seed gives the same tokens
    while not row.finish_reason:
        new.engine.step()
    assert new.completion(row).token_ids == done.token_ids[8:]


@native
@pytest.mark.parametrize("proposer", ["quantized:int8", "exit:1", "skip:0"])
def test_a_draft_of_the_target_follows_it(shelf, tmp_path, changed, proposer):
    weights = changed(shelf / "policy", scale=0.3)
    settings = {"proposer": proposer, "dtype": "bfloat16", "verifier": "coupled"}
    llm = load(shelf / "policy", **settings)
    llm.update_weights(weights)
    fresh = load(reload(tmp_path, shelf / "policy", weights), **settings)
    one, two = (each.generate(PROMPT, SAMPLED) for each in (llm, fresh))
    assert [each.token_ids for each in one] == [each.token_ids for each in two]
    assert [each.stats.accepted for each in one] == [each.stats.accepted for each in two]


@pytest.mark.fast_cases("gsd:clusters=8")
@pytest.mark.parametrize("verifier", ["lantern:delta=0.6,k=8", "gsd:clusters=8", "pcg:k=2"])
def test_tables_of_a_relaxed_verifier_follow_the_embedding(shelf, tmp_path, changed, monkeypatch, verifier):
    weights = changed(shelf / "policy", scale=0.3)
    settings = {"proposer": f"draft:{shelf / 'draft'}", "verifier": verifier, "kernels": "torch"}
    llm = load(shelf / "policy", **settings)
    stale = load(shelf / "policy", **settings)
    llm.update_weights(weights)
    with monkeypatch.context() as patch:
        patch.setattr("outrider.engine.weights.reads_embedding", lambda name: False)
        stale.update_weights(weights)
    fresh = load(reload(tmp_path, shelf / "policy", weights), **settings)
    params = replace(SAMPLED, max_tokens=64)
    assert tokens(llm, params) == tokens(fresh, params) != tokens(stale, params)


def test_tables_of_files_are_kept(shelf, tmp_path, changed):
    table = tmp_path / "groups.json"
    table.write_text(json.dumps({"vocab": tiny.VOCAB, "groups": [[5, 6], [7, 8]]}))
    settings = {"proposer": f"draft:{shelf / 'draft'}", "verifier": f"gsd:table={table}", "kernels": "torch"}
    llm = load(shelf / "policy", **settings)
    before = llm.engine.verifier
    llm.update_weights(changed(shelf / "policy", scale=0.3))
    assert llm.engine.verifier is before


@KERNELS
def test_a_head_uses_the_new_embedding_of_its_target(shelf, head, tmp_path, changed, kernels):
    weights = changed(shelf / "policy", scale=0.3)
    settings = {"proposer": f"draft:{head}", "verifier": "coupled", "kernels": kernels}
    llm = load(shelf / "policy", **settings)
    old = drafts(llm)
    llm.update_weights(weights)
    fresh = load(reload(tmp_path, shelf / "policy", weights), **settings)
    assert drafts(llm) == drafts(fresh) != old
    module = draft_models(llm.parts.proposer)[0].module
    llm.weights.update_draft({name: torch.ones_like(value) for name, value in module.state_dict().items()})
    assert llm.weights.draft_version == 1
    assert drafts(llm) != drafts(fresh)


@native
def test_quantized_drafts_are_quantized_again(shelf, head, tmp_path, changed):
    """A head packs the target's new LM head, and a draft model its own new weights."""
    weights = changed(shelf / "policy", scale=0.3)
    folder = reload(tmp_path, shelf / "policy", weights)
    settings = {"proposer": f"draft:{head}", "verifier": "coupled", "dtype": "bfloat16", "draft_quantize": "int4"}
    llm = load(shelf / "policy", **settings)
    old = drafts(llm)
    llm.update_weights(weights)
    assert drafts(llm) == drafts(load(folder, **settings)) != old
    llm, fresh = (
        load(shelf / "policy", **{**settings, "proposer": f"draft:{draft}"}) for draft in (shelf / "draft", folder)
    )
    old = drafts(llm)
    llm.weights.update_draft(weights)
    assert drafts(llm) == drafts(fresh) != old


def drafts(llm):
    """The draft tokens of all rounds of some completions."""
    tokens = []
    llm.engine.on_round = lambda round: tokens.extend(round.draft.tokens.tolist())
    llm.generate(PROMPT, SAMPLED)
    assert tokens
    return tokens


@native
def test_a_draft_without_weights_of_its_own_is_not_updated(shelf, changed):
    llm = load(shelf / "policy")
    with pytest.raises(OutriderError, match="0 draft models with weights of their own"):
        llm.weights.update_draft(changed(shelf / "policy"))


@KERNELS
def test_a_draft_update_changes_acceptance_only(shelf, kernels):
    llm = load(shelf / "policy", proposer=f"draft:{shelf / 'draft'}", kernels=kernels, verifier="coupled")
    before = llm.generate(PROMPT, SAMPLED)
    policy = load_checkpoint(shelf / "policy", dtype="float32", device="cpu").model.state_dict()
    assert llm.weights.update_draft(policy) == 1
    after = llm.generate(PROMPT, SAMPLED)
    if kernels == "native":
        assert [c.token_ids for c in before] == [c.token_ids for c in after]
    accepted = [sum(sum(c.stats.accepted) for c in each) for each in (before, after)]
    assert accepted[1] > accepted[0]
    assert (llm.weights.version, llm.weights.draft_version) == (0, 1)
    with pytest.raises(OutriderError, match="no weight 'x'"):
        llm.weights.update_draft({"x": torch.zeros(1)})
    assert llm.weights.draft_version == 1


@pytest.mark.slow
@native
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_many_updates_take_no_more_memory(changed):
    folder = embedded("nano")
    weights = changed(folder)  # 14 MB
    # The system gives memory to pages of a KV cache when they are first used. So the cache is small, and the warm-up
    # uses all of it.
    llm = load(folder, proposer="quantized:int4", dtype="bfloat16", max_model_len=128)
    for _ in range(20):
        _update(llm, weights, 1)
    before = _resident_bytes(llm, weights)
    _update(llm, weights, 195)
    growth = _resident_bytes(llm, weights) / before - 1
    assert llm.weights.version == 225
    assert growth < 0.02, f"the process has grown by {growth:.1%}"


def _update(llm, weights, count):
    for i in range(count):
        llm.update_weights(weights)
        if i % 20 == 0:
            llm.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))


def _resident_bytes(llm, weights):
    """The resident memory of the process: the median after each of 5 more updates, without free memory."""
    readings = []
    for _ in range(5):
        _update(llm, weights, 1)
        gc.collect()
        if libc := heap.glibc():
            libc.malloc_trim(0)
        readings.append(heap.resident_bytes())
    return median(readings)


@pytest.mark.fast_cases("1-native", "2-torch")
@KERNELS
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(shelf, kernels, level):
    weights = load_checkpoint(shelf / "tied", dtype="float32", device="cpu").model.state_dict()
    weights = {name: value.clone() for name, value in weights.items()}
    llm = load(shelf / "tied", kernels=kernels, proposer=f"draft:{shelf / 'draft'}", verifier="coupled")
    expected = tokens(llm)
    (id,) = llm.submit(PROMPT, SamplingParams(max_tokens=6, ignore_eos=True))
    llm.engine.step()
    llm.weights.sleep(level)
    assert llm.parts.target.cache.bytes() == 0
    with pytest.raises(OutriderError, match="call wake first"):
        llm.engine.step()
    with pytest.raises(OutriderError, match="sleeps already"):
        llm.weights.sleep()
    with pytest.raises(OutriderError, match="call wake before the weights"):
        llm.update_weights(weights)
    llm.weights.wake()
    with pytest.raises(OutriderError, match="does not sleep"):
        llm.weights.wake()
    if level == 2:
        with pytest.raises(OutriderError, match="load all with update_weights"):
            llm.engine.step()
        with pytest.raises(OutriderError, match="were freed by sleep"):
            llm.update_weights({"model.norm.weight": weights["model.norm.weight"]})
        weights.pop("lm_head.weight", None)
        llm.update_weights(weights)
    while llm.engine.busy():
        done = llm.engine.step()
    assert [row.request.id for row in done if row.finish_reason] == [id]  # the request has survived
    assert tokens(llm) == expected
    with pytest.raises(OutriderError, match="level is 3"):
        llm.weights.sleep(3)


@native
def test_sleep_frees_the_cache_of_a_draft_inside_of_wrappers(shelf, tmp_path):
    """A window around a reduced vocabulary around the draft model."""
    draft = shutil.copytree(shelf / "draft", tmp_path / "draft")
    write_draft_vocabulary(draft, torch.arange(0, tiny.VOCAB, 2))
    llm = load(shelf / "tied", kernels="native", proposer=f"draft:{draft}", verifier="coupled", draft_window=32)
    expected = tokens(llm)
    (model,) = draft_models(llm.parts.proposer)
    assert unwrapped(model) is not model.inner is not model
    llm.weights.sleep()
    assert model.cache.bytes() == 0
    llm.weights.wake()
    assert tokens(llm) == expected
