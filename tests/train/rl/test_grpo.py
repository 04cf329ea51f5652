"""The GRPO loop: the same policy with and without speculation, rewards that fail, checkpoints."""

import math
import time
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

from outrider import OutriderError
from outrider.train.model.draft_model import load_trainable
from outrider.train.rl import GRPO, GRPOSettings, Problem, RolloutEngine
from outrider.train.rl.objective import (
    clipped_objective,
    down_sample,
    group_advantages,
    importance_weights,
    kl_estimate,
)
from outrider.train.rl.overlap import Overlap
from outrider.train.rl.report import by_phase
from tests.helpers import tiny

native = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
SETTINGS = GRPOSettings(problems=2, samples=3, max_tokens=8, lr=1e-2, micro_batch=4, beta=0.05, updates=2, seed=4)
PROBLEMS = [Problem(prompt=tuple(range(start, start + 6)), answer=start) for start in (20, 60, 100)]


def even(rollout, problem):
    """More even tokens are better."""
    return sum(token % 2 == 0 for token in rollout.token_ids) / len(rollout.token_ids)


def make(folder, *, reward=even, settings=SETTINGS, **options):
    options = {"proposer": "none", "k": 3, "max_num_seqs": 6, **options}
    engine = RolloutEngine.load(folder, dtype="float32", device="cpu", max_model_len=64, **options)
    return GRPO(load_trainable(folder, torch.device("cpu")).model, engine, reward, settings)


def recorded(run, steps, **arguments):
    """The reports of a run, and the tokens of all its rollouts."""
    tokens = []
    generate = run.engine.generate

    def record(*args, **keywords):
        batch = generate(*args, **keywords)
        tokens.extend(rollout.token_ids for rollout in batch.rollouts)
        return batch

    run.engine.generate = record
    return list(run.train(PROBLEMS, steps, **arguments)), tokens


def same(one, two):
    return all(torch.equal(value, two[name]) for name, value in one.items())


@native
def test_speculation_changes_no_bit_of_the_training(shelf):
    drafted = make(shelf / "policy", proposer=f"draft:{shelf / 'draft'}", verifier="coupled")
    plain = make(shelf / "policy", proposer="none", verifier="coupled")
    (reports, tokens), (plain_reports, plain_tokens) = recorded(drafted, 3), recorded(plain, 3)
    assert tokens == plain_tokens
    assert [report.rewards for report in reports] == [report.rewards for report in plain_reports]
    assert same(drafted.policy.state_dict(), plain.policy.state_dict())
    start = load_trainable(shelf / "policy", torch.device("cpu")).model
    assert not same(drafted.policy.state_dict(), start.state_dict())
    for report, version in zip(reports, (1, 2, 3), strict=True):
        assert report.version == version  # each step samples from the newest weights
        assert report.logprob_error < 1e-4
        assert list(report.by_version) == [str(version)]
        assert list(report.by_draft_age) == [version]  # the draft was never updated
        assert sum(each.tokens for each in report.by_phase.values()) == report.speculation.tokens
        assert report.speculation.tau > 1
        assert report.seconds.total >= report.seconds.generation > 0
        assert 0 < report.seconds.generation_share < 1
        assert report.as_dict()["speculation"]["tokens"] == report.speculation.tokens
    assert plain_reports[0].speculation.tau == 1


def test_rewards_rise(shelf):
    settings = GRPOSettings(problems=3, samples=8, max_tokens=6, lr=5e-3, micro_batch=24)
    run = make(shelf / "policy", settings=settings, max_num_seqs=24)
    reports, _ = recorded(run, 10)
    means = [report.mean_reward for report in reports]
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.1


def test_the_report_compares_answers_with_the_previous_pass(shelf):
    settings = GRPOSettings(problems=3, samples=4, max_tokens=6, lr=1e-9)
    run = make(shelf / "policy", settings=settings)
    reports, tokens = recorded(run, 2)
    first, second = reports
    assert first.overlap.prefix_reuse is None
    old, new = (
        {
            problem.prompt: tokens[at + i * 4 : at + i * 4 + 4]
            for i, problem in enumerate(run.problems_of(PROBLEMS, step))
        }
        for step, at in enumerate((0, 12))
    )
    assert second.overlap == Overlap.of(new, old)
    assert second.overlap.prefix_reuse is not None
    document = second.as_dict()["overlap"]
    assert document == {
        "prefix_reuse": second.overlap.prefix_reuse,
        "distinct_answers": second.overlap.distinct_answers,
        "prefix_diversity": second.overlap.prefix_diversity,
    }


@native
def test_a_killed_run_goes_on_with_the_same_tokens(shelf, tmp_path):
    whole, tokens = recorded(make(shelf / "policy"), 4)
    _, first = recorded(make(shelf / "policy"), 2, checkpoint=tmp_path / "run")
    resumed = make(shelf / "policy")
    resumed.restore(tmp_path / "run")
    reports, second = recorded(resumed, 4)
    assert first + second == tokens
    assert [report.rewards for report in reports] == [report.rewards for report in whole[2:]]
    assert [report.version for report in reports] == [report.version for report in whole[2:]]
    assert [report.overlap for report in reports] == [report.overlap for report in whole[2:]]  # with answers of step 1
    other = make(shelf / "policy", settings=GRPOSettings(problems=2, samples=4))
    with pytest.raises(OutriderError, match="made with samples 3, and samples is 4 now"):
        other.restore(tmp_path / "run")
    with pytest.raises(OutriderError, match="does not exist"):
        other.restore(tmp_path / "zork")


def test_a_failing_reward_fails_its_own_sample(shelf):
    def reward(rollout, problem):
        match (rollout.prompt, rollout.sample):
            case (0, 0):
                raise ValueError("no such answer")
            case (0, 1):
                time.sleep(30)
            case (1, 2):
                return math.nan
        return even(rollout, problem)

    settings = GRPOSettings(problems=2, samples=4, max_tokens=6, reward_timeout=0.5)
    run = make(shelf / "policy", reward=reward, settings=settings, max_num_seqs=8)
    began = time.monotonic()
    (report,), _ = recorded(run, 1)
    assert time.monotonic() - began < 25
    assert [reward is None for reward in report.rewards] == [True, True, False, False, False, False, True, False]
    assert [error.split("function ")[1] for error in report.errors] == [
        "raised ValueError: no such answer",
        "took more than 0.5 s",
        "returned nan",
    ]
    assert math.isfinite(report.loss)


def test_advantages():
    rewards = torch.tensor([[1.0, 0.0, math.nan, 0.5], [2.0, 2.0, 2.0, 2.0], [math.nan] * 4], dtype=torch.float64)
    expected = torch.tensor([0.5, -0.5, 0.0, 0.0], dtype=torch.float64)
    assert torch.allclose(group_advantages(rewards, scale=False)[0], expected)
    assert torch.allclose(group_advantages(rewards)[0], expected / (0.5 + 1e-4))
    assert not group_advantages(rewards)[1:].any()


def test_speculation_by_phase():
    rounds = ((3, 3, 4), (3, 0, 1), (2, 1, 2), (2, 2, 3))  # they begin at output tokens 0, 4, 5 and 7
    rollouts = [SimpleNamespace(rounds=rounds), SimpleNamespace(rounds=rounds[:1])]
    phases = by_phase(rollouts, 4)
    assert list(phases) == [0, 4]
    assert (phases[0].rollouts, phases[0].tokens, phases[0].tau) == (2, 8, 4.0)
    assert phases[0].acceptance == (1.0, 1.0, 1.0)
    assert (phases[4].rollouts, phases[4].tokens, phases[4].tau) == (1, 6, 2.0)
    assert phases[4].acceptance == (2 / 3, 1 / 2, 0.0)


def test_down_sampling_keeps_the_largest_variance():
    rewards = torch.tensor([[0.1, 0.9, 0.5, 0.4, 1.0, 0.5], [1.0, math.nan, 1.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
    kept = down_sample(rewards, 3)
    assert torch.equal(kept[0].nan_to_num(-1), torch.tensor([0.1, 0.9, -1, -1, 1.0, -1], dtype=torch.float64))
    best = max(float(rewards[0][list(choice)].var(correction=0)) for choice in combinations(range(6), 3))
    assert float(kept[0][~kept[0].isnan()].var(correction=0)) == pytest.approx(best)
    assert (~kept[1].isnan()).sum() == 3
    assert kept[1, 3] == 0
    assert kept[1, 1].isnan()  # a sample without a reward is never kept
    assert (~down_sample(rewards[1:], 6).isnan()).sum() == 5


@native
def test_update_uses_some_of_the_answers(shelf):
    settings = GRPOSettings(problems=2, samples=4, trained_samples=2, max_tokens=8, lr=1e-2, seed=4)
    run = make(shelf / "policy", settings=settings)
    counts = []
    split = run.updater.micro_batches

    def record(rollouts, advantages):
        counts.append(len(rollouts))
        return split(rollouts, advantages)

    run.updater.micro_batches = record
    (report,) = run.train(PROBLEMS, 1)
    assert len(report.rewards) == 8
    assert 0 < counts[0] <= 4
    with pytest.raises(OutriderError, match="trained_samples is 5; use 2 to 4"):
        GRPOSettings(samples=4, trained_samples=5)


@pytest.mark.parametrize(("updates", "beta"), [(1, 0.0), (3, 0.0), (1, 0.05)])
def test_an_update_has_one_pass_for_each_prompt_and_its_answers(shelf, updates, beta):
    settings = GRPOSettings(problems=2, samples=4, max_tokens=8, updates=updates, beta=beta)
    run = make(shelf / "policy", settings=settings, reward=lambda rollout, _: float(rollout.sample))
    passes = {"policy": 0, "reference": 0}
    models = {"policy": run.policy}
    if beta:
        models["reference"] = run.updater.reference
    for name, model in models.items():
        model.register_forward_hook(lambda *_, name=name: passes.update({name: passes[name] + 1}))
    (report,) = run.train(PROBLEMS, 1)
    assert passes == {"policy": 2 * 2 * updates, "reference": 2 * 2 if beta else 0}
    assert report.logprob_error < 1e-4
    assert report.kl == 0 or updates > 1  # policy and reference are the same before the first update


def test_objective_and_divergence():
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    new = old + torch.tensor([0.0, 0.5, -0.5, 0.1])
    up, down = (clipped_objective(new, old, torch.tensor(sign), 0.2) for sign in (1.0, -1.0))
    assert torch.allclose(-up, torch.tensor([1.0, 1.2, math.exp(-0.5), math.exp(0.1)]))
    assert torch.allclose(down, torch.tensor([1.0, math.exp(0.5), 0.8, math.exp(0.1)]))
    p, q = torch.tensor([0.2, 0.8]), torch.tensor([0.5, 0.5])
    estimate = (p * kl_estimate(p.log(), q.log())).sum()
    assert torch.allclose(estimate, (p * (p / q).log()).sum())
    assert (kl_estimate(new, old) >= 0).all()


def test_a_damaged_checkpoint_is_one_clear_error(shelf, tmp_path):
    run = make(shelf / "policy")
    (tmp_path / "grpo.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(OutriderError, match=r"grpo.pt cannot be read .*start a new run"):
        run.restore(tmp_path)
    torch.save({"policy": {}}, tmp_path / "grpo.pt")
    with pytest.raises(OutriderError, match="is not a checkpoint of GRPO; give another checkpoint"):
        run.restore(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutriderError, match=r"grpo.pt cannot be written .*give another folder"):
        run.save(tmp_path / "file")


def test_a_run_needs_problems_and_steps_between_checkpoints(shelf, tmp_path):
    run = make(shelf / "policy")
    with pytest.raises(OutriderError, match="there are no problems to train on; give at least one"):
        next(run.train([], 1))
    with pytest.raises(OutriderError, match="every is 0; use a number of steps above 0"):
        next(run.train(PROBLEMS, 1, checkpoint=tmp_path, every=0))


def test_bad_settings():
    for setting, message in (
        ({"samples": 1}, "has no advantage"),
        ({"problems": 0}, "problems is 0"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"beta": -1.0}, "beta is -1.0"),
    ):
        with pytest.raises(OutriderError, match=message):
            GRPOSettings(**setting)


@native
def test_importance_weights_correct_rollouts_of_a_blend(shelf):
    draft = f"draft:{shelf / 'draft'}"
    options = {"proposer": draft, "verifier": "blend:share=0.5", "allow_lossy": "blend:share=0.5"}
    settings = GRPOSettings(problems=2, samples=3, max_tokens=8, importance_cap=1.5, seed=4)
    run = make(shelf / "policy", settings=settings, **options)
    (report,) = run.train(PROBLEMS, 1)
    assert report.logprob_error > 0.01  # the rollouts have the log-probabilities of the blend
    logprobs, law = torch.tensor([[0.0, -1.0, -2.0]]), torch.tensor([[0.0, -2.0, -1.0]])
    weights = importance_weights(logprobs, law, 1.5)
    assert torch.allclose(weights, torch.tensor([[1.0, 1.5, math.exp(-1)]]))
    with pytest.raises(OutriderError, match="and correct it by importance weights"):
        make(shelf / "policy", **{**options, "allow_lossy": None})
    with pytest.raises(OutriderError, match=r"importance_cap is 0\.5"):
        GRPOSettings(importance_cap=0.5)
