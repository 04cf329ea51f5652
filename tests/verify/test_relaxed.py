"""Relaxed verifiers keep the bounds that they declare, by enumeration, and rules that break them are detected."""

from functools import partial

import pytest
import torch

from outrider.core import tree
from outrider.core.noise import PositionNoise
from outrider.core.types import Draft, DraftKind, Packed
from outrider.testing import ConformanceError
from outrider.testing.bounds import bin_distance, check_bound, group_distance, measure, total_variation
from outrider.testing.enumeration import Case, Instance, prove, round_distributions
from outrider.verify import rules
from outrider.verify.relaxed.bins import bins
from outrider.verify.relaxed.blend import blend
from outrider.verify.relaxed.groups import OverlappingGroups, Partition, pcg
from outrider.verify.relaxed.gsd import gsd
from outrider.verify.relaxed.lantern import lantern, pool
from tests.helpers import unbounded_verifiers

CPU = torch.device("cpu")
H, S = DraftKind.ONE_HOT, DraftKind.SAMPLED
NEIGHBORS = torch.tensor([[1, 2], [0, 2], [3, 1], [2, -1]])
EVERY = torch.tensor([[1, 2, 3], [0, 2, 3], [1, 0, 3], [2, 1, 0]])
OVERLAPPING = [[0, 1], [1, 2]]  # and token 3 alone
LABELS = torch.tensor([0, 0, 1, 0])
ORDER = torch.tensor([2, 0, -1, 1])


def instances(count, kinds=(S, S), vocab=4, **case):
    generator = torch.Generator().manual_seed(1)
    parent = tuple(range(-1, len(kinds) - 1))
    return [Instance.random(vocab, parent, kinds, generator=generator, case=Case(**case)) for _ in range(count)]


@pytest.mark.fast_cases("some-0.02", "all-0.4")
@pytest.mark.parametrize("delta", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("neighbors", [NEIGHBORS, EVERY], ids=["some", "all"])
def test_lantern_keeps_its_total_variation(neighbors, delta):
    check_bound(lantern(neighbors, delta), total_variation, delta)


def test_lantern_spends_what_it_may_and_accepts_so_much_more():
    for instance in instances(5, (S,)):
        exact = prove(rules.rejection, instance).accepted
        proof = prove(lantern(EVERY, 0.1), instance)
        spent = measure(lantern(EVERY, 0.1), instance, total_variation)
        assert spent > 0.05
        assert proof.accepted == pytest.approx(exact + spent)
        assert proof.logprob_error < 1e-12


def test_published_lantern_breaks_its_bound():
    published = unbounded_verifiers.lantern_by_draft_token(EVERY, 0.1)
    with pytest.raises(ConformanceError, match=r"above 0\.1"):
        check_bound(published, total_variation, 0.1)
    # Every draft token is accepted, and none of them is likely under p.
    far = Instance(
        vocab=4,
        parent=(-1,),
        kinds=(S,),
        target=(torch.tensor([[0.45, 0.45, 0.05, 0.05]]).double(), torch.full((4, 4), 0.25).double()),
        proposal=(torch.tensor([[0.0, 0.0, 0.5, 0.5]]).double(),),
        ends=(torch.zeros(1).double(),),
    )
    near = torch.tensor([[-1], [-1], [0], [1]])
    assert measure(unbounded_verifiers.lantern_by_draft_token(near, 0.45), far, total_variation) > 0.89
    assert measure(lantern(near, 0.45), far, total_variation) == pytest.approx(0.45)


def test_lantern_moves_mass_between_neighbors_only():
    p = torch.tensor([[0.7, 0.1, 0.2]])
    q = torch.tensor([[0.1, 0.8, 0.1]])
    near, none = torch.tensor([[2], [0], [-1]]), torch.tensor([[-1], [-1], [-1]])
    assert torch.allclose(pool(p, q, near, 0.3), torch.tensor([[0.4, 0.4, 0.2]]))
    assert torch.equal(pool(p, q, none, 0.3), p)
    unlikely = torch.tensor([[1.0, 0.0, 0.0]])  # greedy decoding and filters stay as they are
    assert torch.equal(pool(unlikely, q, near, 0.3), unlikely)


@pytest.mark.fast_cases("None", "2")
@pytest.mark.parametrize("size", [None, 1, 2])
def test_gsd_is_exact_for_its_clusters(size):
    def distance(emitted, p):
        order = p.argsort(dim=-1, descending=True, stable=True)
        labels = LABELS.expand(len(p), -1).clone()
        if size is not None:  # divide each cluster by rank, independently of the rule's own code
            for row, likely_first in enumerate(order.tolist()):
                for cluster in (0, 1):
                    members = [token for token in likely_first if LABELS[token] == cluster]
                    for rank, token in enumerate(members):
                        labels[row, token] = 4 * cluster + rank // size
        return group_distance(emitted, p, Partition(labels, 8))

    check_bound(gsd(LABELS, size), distance, 0)


def test_gsd_promises_nothing_within_a_cluster():
    (instance,) = instances(1, (S,), disjoint=True)
    everything = gsd(torch.zeros(4, dtype=torch.int64))
    assert measure(everything, instance, total_variation) < 1e-12  # p gives these draft tokens no probability
    (instance,) = instances(1, (S,))
    assert prove(everything, instance).accepted == pytest.approx(1)
    assert torch.allclose(round_distributions(everything, instance)[0], instance.proposal[0])


def test_published_gsd_is_not_exact_for_its_clusters():
    groups = Partition(LABELS[None], 2)
    published = unbounded_verifiers.gsd_with_token_residual(LABELS)
    with pytest.raises(ConformanceError, match="above 0"):
        check_bound(published, partial(group_distance, groups=groups), 0)


@pytest.mark.fast_cases("[[0, 1], [2, 3]]")
@pytest.mark.parametrize("lists", [OVERLAPPING, [[0, 1, 2], [1, 2, 3], [3, 0, 2]], [[0, 1], [2, 3]]], ids=str)
def test_pcg_is_exact_for_its_groups(lists):
    groups = OverlappingGroups.of(lists, 4, CPU)
    check_bound(pcg(groups), partial(group_distance, groups=groups), 0)


def test_pcg_emits_what_rejection_sampling_of_the_group_does():
    """The rule uses the mean over the groups of a token. The same with a group that is drawn has exactly p's groups."""
    groups = OverlappingGroups.of(OVERLAPPING, 4, CPU)
    pairs = list(zip(groups.token.tolist(), groups.group.tolist(), strict=True))
    for instance in instances(6, (S,), zeros=0.2):
        p, q = instance.target[0], torch.where(instance.target[0] > 0, instance.proposal[0], 0.0)
        p_group, q_group = groups.mass(p)[0], groups.mass(q)[0]
        residual = (p_group - q_group).clamp(min=0)
        joint = torch.zeros(4, groups.count, dtype=torch.float64)  # of the emitted token and its group
        for token, group in pairs:
            share = 1 / int(groups.number[token])
            if q_group[group] > 0:
                joint[token, group] += q[0, token] * share * (p_group[group] / q_group[group]).clamp(max=1)
            if p_group[group] > 0:
                joint[token, group] += residual[group] * p[0, token] * share / p_group[group]
        assert torch.allclose(joint.sum(0), p_group)
        assert torch.allclose(joint.sum(1), round_distributions(pcg(groups), instance)[0][0])


def test_pcg_without_shares_is_not_exact():
    groups = OverlappingGroups.of(OVERLAPPING, 4, CPU)
    broken = unbounded_verifiers.pcg_without_shares(OVERLAPPING, 4)
    with pytest.raises(ConformanceError, match="above 0"):
        check_bound(broken, partial(group_distance, groups=groups), 0)


def test_groups_of_one_token_are_exact():
    for instance in instances(3, zeros=0.3, ending=0.3):
        assert prove(pcg(OverlappingGroups.of([], 4, CPU)), instance).error < 1e-12
        assert prove(gsd(torch.arange(4)), instance).error < 1e-12
        assert prove(bins(torch.arange(4), 0), instance).error < 1e-12


def test_a_sequence_of_groups_is_the_targets_if_only_groups_matter():
    """The target's next distribution depends on the group of the last token only."""
    groups = Partition(LABELS[None], 2)
    for instance in instances(3, (S, S)):
        by_group = {depth: table.clone() for depth, table in enumerate(instance.target)}
        for depth in (1, 2):
            rows = torch.arange(4**depth)
            key = sum(LABELS[rows // 4**i % 4] * 2**i for i in range(depth))
            by_group[depth] = instance.target[depth][[int((key == k).nonzero()[0]) for k in key.tolist()]]
        same = Instance(
            vocab=4,
            parent=instance.parent,
            kinds=instance.kinds,
            target=tuple(by_group.values()),
            proposal=instance.proposal,
            ends=instance.ends,
        )
        assert measure(gsd(LABELS), same, partial(group_distance, groups=groups)) < 1e-12
        joints = []
        for distributions in (round_distributions(gsd(LABELS), same)[:2], same.target[:2]):
            joint = (distributions[0].view(4, 1) * distributions[1]).view(4, 4)
            pairs = (2 * LABELS[:, None] + LABELS).view(-1)
            joints.append(torch.zeros(4, dtype=torch.float64).index_add_(0, pairs, joint.view(-1)))
        assert torch.allclose(*joints)


@pytest.mark.fast_cases("0")
@pytest.mark.parametrize("distance", [0, 1, 2])
def test_bins_stay_within_their_distance(distance):
    check_bound(bins(ORDER, distance), partial(bin_distance, order=ORDER), distance, trees=True, trials=2)


def test_bins_beyond_the_distance_are_detected():
    with pytest.raises(ConformanceError, match="above 0"):
        check_bound(bins(ORDER, 1), partial(bin_distance, order=ORDER), 0)


def test_bins_take_the_nearest_child_and_relax_greedy_drafts():
    def verdict(tokens, own, distance, kind=H):
        size = len(tokens)
        draft = Draft(
            tokens=torch.tensor([tokens]),
            parent=torch.full((1, size), -1),
            count=torch.tensor([size]),
            kind=torch.full((1, size), int(kind)),
            q=None,
            width=(size,),
            depth=(1,),
            chain=size == 1,
        )
        p = torch.zeros(1, 1 + size, 6)
        p[:, :, own] = 1.0
        noise = PositionNoise(torch.tensor([0]), torch.tensor([5]))
        return bins(torch.tensor([0, 1, 2, 3, 4, -1]), distance)(draft, p, noise)

    assert int(verdict([0, 3], 2, 1).path[0, 0]) == 1
    assert int(verdict([0, 3], 2, 2).path[0, 0]) == 1
    assert int(verdict([0, 2, 3], 2, 2).path[0, 0]) == 1
    assert int(verdict([0], 2, 1).accepted) == 0
    assert int(verdict([5], 4, 5).accepted) == 0  # no bin
    assert int(verdict([4], 5, 5).accepted) == 0
    assert int(verdict([5], 5, 0).accepted) == 1
    assert int(verdict([1], 2, 1, kind=S).accepted) == 0  # a sampled token that p excludes


def test_distances():
    p, emitted = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.5, 0.0, 0.5]])
    assert total_variation(emitted, p).tolist() == [0.5]
    assert bin_distance(emitted, p, torch.tensor([0, 1, 2])).tolist() == [1]
    assert bin_distance(emitted, p, torch.tensor([1, 0, 2])).tolist() == [1]
    assert bin_distance(emitted, p, torch.tensor([0, 1, -1])).tolist() == [float("inf")]
    assert group_distance(emitted, p, Partition(torch.tensor([[0, 1, 1]]), 2)).tolist() == [0]
    assert group_distance(emitted, p, Partition(torch.tensor([[0, 0, 1]]), 2)).tolist() == [0.5]
    shared = OverlappingGroups.of([[0, 2], [1, 2]], 3, CPU)
    assert group_distance(emitted, p, shared).tolist() == [0]


@pytest.mark.fast_cases("0.05")
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_blend_keeps_its_total_variation(share):
    check_bound(blend(share), total_variation, share)


def test_blend_samples_from_the_blend_and_records_it():
    for instance in instances(5, (S,)):
        emitted = round_distributions(blend(0.3), instance)[0][0]
        p, q = instance.target[0][0], instance.proposal[0][0]
        assert torch.allclose(emitted / emitted.sum(), 0.7 * p + 0.3 * q)
    generator = torch.Generator().manual_seed(2)
    p, q = (torch.rand(200, 2, 4, generator=generator).softmax(-1) for _ in range(2))
    token = torch.multinomial(q[:, 0], 1, generator=generator)
    packed = Packed(values=q[:, 0], at=torch.arange(200)[:, None])
    draft = tree.chain(token, (1,) * 200, kind=torch.full_like(token, S), q=packed)
    noise = PositionNoise(torch.arange(200), torch.zeros(200, dtype=torch.int64))
    verdict = blend(0.3)(draft, p, noise)
    blended = 0.7 * p[:, 0] + 0.3 * q[:, 0]
    emitted = torch.where(verdict.accepted > 0, token[:, 0], verdict.bonus)
    assert 0 < int(verdict.accepted.sum()) < 200
    assert torch.allclose(verdict.logprob[:, 0], blended.gather(1, emitted[:, None])[:, 0].log(), atol=1e-5)
    after = verdict.accepted > 0  # the bonus token after an accepted draft is sampled from p
    assert torch.allclose(
        verdict.logprob[after, 1], p[after, 1].gather(1, verdict.bonus[after, None])[:, 0].log(), atol=1e-5
    )
