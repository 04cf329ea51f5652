"""The draft learns with the policy: acceptance rises, policy gradients do not change, bad updates are taken back."""

from dataclasses import replace

import pytest
import torch

from outrider import OutriderError
from outrider.core.stats import Stats
from outrider.models.torch.submodel import layer_stack
from outrider.train.model.draft_model import load_trainable
from outrider.train.rl import GRPO, DraftTraining, GRPOSettings, Problem, RolloutEngine
from outrider.train.rl.draft_training import acceptance_estimate
from tests.helpers import tiny

native = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
SETTINGS = GRPOSettings(problems=2, samples=4, max_tokens=12, lr=1e-3, seed=2)
PROBLEMS = [Problem(prompt=tuple(range(start, start + 6))) for start in (20, 60)]


def even(rollout, _):
    return sum(token % 2 == 0 for token in rollout.token_ids) / len(rollout.token_ids)


def make(folder, draft, *, kind="draft", trains=True, settings=SETTINGS, **options):
    engine = RolloutEngine.load(
        folder,
        proposer=f"draft:{draft}",
        k=3,
        dtype="float32",
        device="cpu",
        verifier="coupled",
        max_num_seqs=8,
        max_model_len=64,
    )
    training = DraftTraining(engine, draft, kind=kind, **{"lr": 3e-3, **options}) if trains else None
    policy = load_trainable(folder, torch.device("cpu")).model
    return GRPO(policy, engine, even, settings, draft=training)


@native
@pytest.mark.parametrize("kind", ["draft", "mtp"])
def test_the_policy_does_not_notice(shelf, head, kind):
    folder = head if kind == "mtp" else shelf / "draft"
    trained, fixed = (make(shelf / "policy", folder, kind=kind, trains=trains) for trains in (True, False))
    (reports, other_reports) = (list(run.train(PROBLEMS, 3)) for run in (trained, fixed))
    state, other_state = trained.policy.state_dict(), fixed.policy.state_dict()
    assert all(torch.equal(value, other_state[name]) for name, value in state.items())
    assert [report.rewards for report in reports] == [report.rewards for report in other_reports]
    assert [report.grad_norm for report in reports] == [report.grad_norm for report in other_reports]
    assert trained.engine.draft_version == 3 + trained.draft.rollbacks
    assert fixed.engine.draft_version == 0
    assert [list(report.by_draft_age) for report in other_reports] == [[1], [2], [3]]
    assert all(report.seconds.draft > 0 for report in reports)


@native
def test_the_recorded_states_are_those_of_whole_sequences(shelf):
    run = make(shelf / "policy", shelf / "draft", settings=replace(SETTINGS, updates=2))
    samples = []
    run.draft.train = lambda: samples.extend(run.draft.samples)
    (report,) = run.train(PROBLEMS, 1)
    assert 0 < len(samples) <= len(report.rewards)  # once per rollout, not per update
    policy = load_trainable(shelf / "policy", torch.device("cpu")).model.eval()  # before the updates
    outputs = []
    layer_stack(policy)[1][-1].register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    for sample in samples:
        policy(input_ids=torch.tensor([sample.tokens[:-1]]), use_cache=False)
        (states,) = outputs.pop()
        assert torch.allclose(sample.states[:, -1], states.detach(), atol=1e-4)
        assert not sample.states.requires_grad


@native
def test_the_draft_learns(shelf):
    run = make(shelf / "policy", shelf / "draft", settings=GRPOSettings(problems=2, samples=4, max_tokens=12, lr=1e-5))
    reports = list(run.train(PROBLEMS, 10))
    taus = [report.speculation.tau for report in reports]
    assert sum(taus[-3:]) / 3 > sum(taus[:2]) / 2
    assert run.draft.acceptance[0] > 0


@native
def test_an_update_that_costs_acceptance_is_taken_back(shelf):
    run = make(shelf / "policy", shelf / "policy", tolerance=0.2)  # the draft is the policy: tau is as high as can be
    (first,) = run.train(PROBLEMS, 1)
    good = {name: value.clone() for name, value in run.draft.trainee.module.state_dict().items()}
    broken = {name: torch.randn_like(value) for name, value in good.items()}
    run.draft.load_state_dict({**run.draft.state_dict(), "module": broken, "previous": good})
    (second,) = run.train(PROBLEMS, 2)
    assert second.speculation.tau < 0.8 * first.speculation.tau
    assert second.draft_rolled_back
    assert run.draft.rollbacks == 1
    (third,) = run.train(PROBLEMS, 3)
    assert third.speculation.tau > 1.2 * second.speculation.tau
    assert not third.draft_rolled_back


@native
def test_a_checkpoint_has_the_draft(shelf, tmp_path):
    whole = list(make(shelf / "policy", shelf / "draft").train(PROBLEMS, 4))
    list(make(shelf / "policy", shelf / "draft").train(PROBLEMS, 2, checkpoint=tmp_path))
    resumed = make(shelf / "policy", shelf / "draft")
    resumed.restore(tmp_path)
    rest = list(resumed.train(PROBLEMS, 4))
    for one, two in zip(whole[2:], rest, strict=True):
        assert one.rewards == two.rewards
        assert one.speculation == two.speculation  # the draft is the same as well


def test_acceptance_does_not_depend_on_the_draft_length():
    passes = [(3, 0, 1)] * 50 + [(3, 1, 2)] * 30 + [(3, 3, 4)] * 20  # draft tokens, accepted, emitted
    estimate = acceptance_estimate(Stats.of_passes(passes))
    tested = torch.tensor([0.0] * 50 + [1.0, 0.0] * 30 + [1.0] * 60)  # by draft token whose ancestors were accepted
    assert estimate.rate == pytest.approx(float(tested.mean()))
    assert estimate.error == pytest.approx(float(tested.std(correction=0)) / len(tested) ** 0.5)
    short = acceptance_estimate(Stats.of_passes([(1, 0, 1)] * 50 + [(1, 1, 2)] * 50))
    assert short.rate == 0.5
    assert acceptance_estimate(Stats.of_passes([(1, 0, 1)] * 5)) is None  # too few to judge


def test_what_is_refused(shelf):
    engine = RolloutEngine.load(shelf / "policy", proposer="ngram", k=2, dtype="float32", device="cpu")
    with pytest.raises(OutriderError, match="no draft with weights"):
        DraftTraining(engine, shelf / "draft")
    for option, message in (({"tolerance": 1.0}, "tolerance is 1.0"), ({"max_tokens": 0}, "max_tokens is 0")):
        with pytest.raises(OutriderError, match=message):
            DraftTraining(engine, shelf / "draft", **option)
