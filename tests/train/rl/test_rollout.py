"""Rollouts: the same tokens with and without speculation, true log-probabilities, several versions of a policy."""

import pytest
import torch

from outrider import LLM, OutriderError, SamplingParams
from outrider.core.types import FinishReason
from outrider.models.loader.load import load_checkpoint
from outrider.train.rl import RolloutEngine
from tests.helpers import tiny

native = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
PROMPTS = [tuple(range(20, 30)), tuple(range(100, 108)), tuple(range(20, 30))]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12)
FILTERED = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, max_tokens=12, ignore_eos=True)


def engine(folder, **options):
    settings = {"k": 4, "dtype": "float32", "device": "cpu", "max_num_seqs": 6, "max_model_len": 128}
    return RolloutEngine.load(folder, **{**settings, **options})


def facts(rollouts):
    return [(r.token_ids, r.logprobs, r.sampled_logprobs, r.finish_reason, r.seed) for r in rollouts]


@native
@pytest.mark.parametrize(("dtype", "params"), [("float32", FILTERED), ("bfloat16", SAMPLED)])
def test_speculation_changes_no_bit(shelf, dtype, params):
    draft = f"draft:{shelf / 'draft'}"
    for proposer, verifier in ((draft, "coupled"), ("group", "walk"), (f"merge(ngram,{draft})", "coupled")):
        drafted, plain = (
            engine(shelf / "policy", proposer=name, verifier=verifier, dtype=dtype).generate(
                PROMPTS, params, n=2, seed=9
            )
            for name in (proposer, "none")
        )
        assert facts(drafted.rollouts) == facts(plain.rollouts)
        assert drafted.provenance.same_tokens
        assert drafted.provenance.exact
        assert drafted.stats.draft_tokens > 0
        assert plain.stats.draft_tokens == 0


def recomputed(folder, rollouts, dtype=torch.float32, *, temperature=1.0, weights=None):
    """A trainer's own log-probabilities of rollouts, [B][tokens], with transformers' model."""
    model = load_checkpoint(folder, dtype="float32", device="cpu").model.to(dtype)
    model.set_attn_implementation("eager")
    if weights is not None:
        model.load_state_dict(weights)
    values = []
    for rollout in rollouts:
        start = len(rollout.prompt_token_ids)
        ids = torch.tensor([rollout.prompt_token_ids + rollout.token_ids])
        with torch.no_grad():
            logprobs = (model(ids).logits[0, start - 1 : -1].float() / temperature).log_softmax(-1)
        values.append(logprobs.gather(1, ids[0, start:, None])[:, 0])
    return values


@pytest.mark.parametrize("kernels", [pytest.param("native", marks=native), "torch"])
def test_logprobs_equal_the_recompute_of_a_trainer(shelf, kernels):
    params = SamplingParams(temperature=0.7, max_tokens=20, ignore_eos=True)
    batch = engine(shelf / "policy", proposer=f"draft:{shelf / 'draft'}", kernels=kernels).generate(
        PROMPTS, params, n=2
    )
    assert sum(batch.stats.accepted) > 0
    at_one = recomputed(shelf / "policy", batch.rollouts)
    sampled = recomputed(shelf / "policy", batch.rollouts, temperature=0.7)
    for rollout, one, own in zip(batch.rollouts, at_one, sampled, strict=True):
        assert torch.tensor(rollout.logprobs).sub(one).abs().max() < 1e-4
        assert torch.tensor(rollout.sampled_logprobs).sub(own).abs().max() < 1e-4


@native
def test_logprobs_in_bfloat16_are_within_the_stated_bound(shelf):
    """The engine and transformers round differently."""
    batch = engine(shelf / "policy", proposer="ngram", dtype="bfloat16").generate(PROMPTS, SAMPLED, n=8)
    expected = recomputed(shelf / "policy", batch.rollouts, torch.bfloat16)
    errors = torch.cat([torch.tensor(r.logprobs) - e for r, e in zip(batch.rollouts, expected, strict=True)])
    assert errors.abs().max() < 0.25
    assert errors.abs().mean() < 0.05


def test_filters_renormalize_the_sampled_logprobs(shelf):
    batch = engine(shelf / "policy", proposer="none").generate(PROMPTS[:1], FILTERED, n=4)
    for rollout in batch.rollouts:
        # A kept token is likelier than without filters, and temperature below 1 sharpens.
        assert all(value <= 0 for value in rollout.sampled_logprobs)
        assert sum(rollout.sampled_logprobs) > sum(rollout.logprobs)
    greedy = engine(shelf / "policy", proposer="none").generate(PROMPTS[:1], SamplingParams(max_tokens=4))
    assert set(greedy.rollouts[0].sampled_logprobs) == {0.0}
    assert all(value < 0 for value in greedy.rollouts[0].logprobs)


def test_seeds_determine_rollouts(shelf):
    policy = engine(shelf / "policy", proposer="ngram")
    batch = policy.generate(PROMPTS, SAMPLED, n=3, seed=1)
    assert [(r.prompt, r.sample) for r in batch.rollouts] == [(i, j) for i in range(3) for j in range(3)]
    assert len({rollout.seed for rollout in batch.rollouts}) == 9
    assert facts(policy.generate(PROMPTS, SAMPLED, n=3, seed=1).rollouts) == facts(batch.rollouts)
    assert facts(policy.generate(PROMPTS, SAMPLED, n=2, seed=1).rollouts[:2]) == facts(batch.rollouts[:2])
    assert facts(policy.generate(PROMPTS, SAMPLED, n=3, seed=2).rollouts) != facts(batch.rollouts)
    assert [len(group) for group in batch.groups()] == [6, 3]  # two prompts are equal
    named = policy.generate(PROMPTS, SAMPLED, groups=["a", "b", "c"])
    assert [rollout.group for rollout in named.rollouts] == ["a", "b", "c"]


def test_tensors(shelf):
    batch = engine(shelf / "policy", proposer="ngram").generate(PROMPTS, SAMPLED, n=2)
    tensors = batch.tensors(pad_token_id=0)
    for b, rollout in enumerate(batch.rollouts):
        mask = tensors.completion_mask[b]
        assert tuple(tensors.token_ids[b][mask].tolist()) == rollout.token_ids
        assert tuple(tensors.token_ids[b][tensors.attention_mask[b]].tolist()) == (
            rollout.prompt_token_ids + rollout.token_ids
        )
        assert torch.equal(tensors.logprobs[b][mask], torch.tensor(rollout.logprobs))
        assert set(tensors.versions[b][mask].tolist()) == {0}
        assert set(tensors.versions[b][~mask].tolist()) <= {-1}


def test_asynchronous_rollouts_say_which_version_sampled_which_token(shelf, changed):
    policy = engine(shelf / "policy", proposer="ngram")
    ids = []
    for length in (6, 16):
        params = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True)
        ids += policy.submit(PROMPTS, params, seed=length)
    done = []
    for rollout in policy.completed():
        done.append(rollout)
        if len(done) == 3:  # of the short ones
            policy.update_weights(changed(shelf / "policy"))
    assert len(done) == len(ids) == 6
    mixed = [rollout for rollout in done if rollout.version is None]
    assert [len(rollout.token_ids) for rollout in mixed] == [16] * 3
    assert {rollout.version for rollout in done[:3]} == {0}
    for rollout in done:
        versions = rollout.token_versions()
        assert len(versions) == len(rollout.token_ids) == len(rollout.logprobs)
        assert list(versions) == sorted(versions)
        for first, version in rollout.weight_versions:
            assert versions[first] == version
    old_values = recomputed(shelf / "policy", mixed)
    new_values = recomputed(shelf / "policy", mixed, weights=changed(shelf / "policy"))
    for rollout, old, new in zip(mixed, old_values, new_values, strict=True):
        first = rollout.weight_versions[1][0]
        own = torch.tensor(rollout.logprobs)
        assert (own[:first] - old[:first]).abs().max() < 1e-4
        assert (own[first:] - new[first:]).abs().max() < 1e-4
        assert (new - old).abs().min() > 1e-4


def test_regimes_count_the_full_batch_and_its_tail(shelf):
    policy = engine(shelf / "policy", proposer="ngram", k=2)
    long = policy.submit(PROMPTS[:1], SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True))
    batch = policy.generate(PROMPTS, SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True))
    full = batch.regimes[0]
    assert (full.least, full.most) == (3, 4)
    list(policy.completed())
    (tail,) = policy.regimes.take()
    assert (tail.least, tail.most) == (1, 1)
    assert full.tokens + sum(each.tokens for each in batch.regimes[1:]) + tail.tokens == 3 * 4 + 20
    assert tail.tau >= 1
    assert tail.tokens_per_s > 0
    assert 0 < tail.draft_length <= 2
    assert policy.regimes.take() == ()
    assert len(long) == 1


def test_rollouts_of_two_calls_are_not_confused(shelf):
    policy = engine(shelf / "policy", proposer="ngram")
    short = SamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True)
    first = policy.submit(PROMPTS, short, seed=1)
    policy.step()
    batch = policy.generate(PROMPTS, SAMPLED, n=2, seed=2)  # the others end in the meantime
    assert [(rollout.prompt, rollout.sample) for rollout in batch.rollouts] == [
        (i, j) for i in range(3) for j in (0, 1)
    ]
    rest = sorted(policy.completed(), key=lambda rollout: rollout.prompt)
    assert len(rest) == len(first) == 3
    assert facts(rest) == facts(policy.generate(PROMPTS, short, seed=1).rollouts)
    with pytest.raises(OutriderError, match="no rollout runs or waits"):
        policy.step()


def test_long_groups_start_first(shelf):
    rollouts = engine(shelf / "policy", proposer="none", max_num_seqs=1)
    added = []
    add = rollouts.llm.add

    def record(request):
        added.append(request.group)
        return add(request)

    rollouts.llm.add = record
    for group, length in (("short", 2), ("long", 9)):
        params = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True)
        rollouts.generate(PROMPTS[:1], params, groups=[group])
    added.clear()
    batch = rollouts.generate(PROMPTS, SAMPLED, n=2, groups=["short", "long", "new"])
    assert added == ["new", "new", "long", "long", "short", "short"]
    assert [rollout.group for rollout in batch.rollouts] == ["short", "short", "long", "long", "new", "new"]
    again = engine(shelf / "policy", proposer="none", max_num_seqs=1).generate(PROMPTS, SAMPLED, n=2)
    assert [rollout.token_ids for rollout in batch.rollouts] == [rollout.token_ids for rollout in again.rollouts]


def test_canceled_rollouts_and_finish_reasons(shelf):
    policy = engine(shelf / "policy", proposer="ngram")
    ids = policy.submit(PROMPTS, SAMPLED)
    policy.cancel(ids[:1])
    assert {rollout.prompt for rollout in policy.completed()} == {1, 2}
    assert not policy.llm.engine.busy()
    ended = policy.generate(PROMPTS, SamplingParams(temperature=3.0, max_tokens=60), n=8)
    reasons = {rollout.finish_reason for rollout in ended.rollouts}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    for rollout in ended.rollouts:
        assert (rollout.token_ids[-1] == 3) == (rollout.finish_reason is FinishReason.STOP)  # the end token is kept


def test_what_is_refused(shelf):
    policy = engine(shelf / "policy", proposer="ngram")
    for arguments, message in (
        (("text",), "no list of prompts"),
        (([],), "no list of prompts"),
        ((PROMPTS, SamplingParams(n=2)), "arguments of the call"),
        ((PROMPTS, SamplingParams(seed=2)), "arguments of the call"),
    ):
        with pytest.raises(OutriderError, match=message):
            policy.generate(*arguments)
    with pytest.raises(OutriderError, match="n is 0"):
        policy.generate(PROMPTS, n=0)
    with pytest.raises(OutriderError, match="3 prompts came with 1 groups"):
        policy.generate(PROMPTS, groups=["a"])
    with pytest.raises(OutriderError, match="is not in the vocabulary"):
        policy.generate([PROMPTS[0], [10**6]])
    assert not policy.llm.engine.busy()  # nothing of a refused call is queued


def test_lossy_rules_need_their_name_and_are_labeled(shelf):
    options = {"proposer": "ngram", "k": 2, "dtype": "float32", "device": "cpu", "max_model_len": 128}
    lossy = LLM(shelf / "policy", verifier="typical", **options)
    for name in (None, "lenient"):
        with pytest.raises(OutriderError, match="typical is lossy"):
            RolloutEngine(lossy, allow_lossy=name)
    batch = RolloutEngine(lossy, allow_lossy="typical").generate(PROMPTS, SAMPLED)
    assert (batch.provenance.verifier, batch.provenance.exact, batch.provenance.same_tokens) == (
        "typical",
        False,
        False,
    )
    with pytest.raises(OutriderError, match="is exact; leave it out"):
        RolloutEngine.load(shelf / "policy", **options, allow_lossy="walk")
