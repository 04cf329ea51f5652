"""How a draft learns: losses, steps, and what is trained."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.core.params import SamplingParams
from outrider.core.types import SharedWeights
from outrider.errors import OutriderError
from outrider.heads.formats.base import TargetInfo
from outrider.heads.formats.registry import format_of
from outrider.heads.hidden_states import normed
from outrider.heads.store import make_module, read_trained
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import embedded
from outrider.train.loss import chunked
from outrider.train.loss.losses import LOSSES, Distributions, parse, shortfall
from outrider.train.loss.steps import Step
from outrider.train.model.init_weights import directions, init_weights
from outrider.train.model.presets import KINDS, Sizes, describe
from outrider.train.model.trainee import make_trainee
from outrider.train.settings import DRAFT, Settings
from outrider.train.trainer import Sums, Trainer, rate
from tests.helpers import engines, tiny, train_setup
from tests.helpers.train_setup import (
    NANO,
    Still,
    cut,
    make_sample,
    make_settings,
    make_setup,
    make_texts,
    spread,
    watched,
)


@pytest.fixture(scope="module")
def nano():
    return train_setup.house()


# Losses


def _laws(*, guessed=7, vocab=7, seed=0):
    """Random laws of the target over `vocab`, and of a draft over the first `guessed` of them."""
    chance = torch.Generator().manual_seed(seed)
    p = (torch.randn(5, vocab, generator=chance) * 2).softmax(-1)[:, :guessed]
    return Distributions(p, (torch.randn(5, guessed, generator=chance) * 2).log_softmax(-1))


def _by_hand(name, p, q):
    """A loss from its definition, for one pair of laws as lists of floats."""
    alpha, whole = sum(map(min, p, q)), sum(p)
    p = [x / whole for x in p]

    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    middle = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    weight = math.exp(-3 * alpha)
    return {
        "ce": -sum(x * math.log(y) for x, y in zip(p, q, strict=True)),
        "kl": kl(p, q),
        "rkl": kl(q, p),
        "jsd": (kl(p, middle) + kl(q, middle)) / 2,
        "tv": 1 - alpha,
        "nla": -math.log(alpha),
        "hybrid": weight * kl(p, q) + (1 - weight) * (1 - alpha),
    }[name]


@pytest.mark.parametrize("guessed", [7, 4])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_is_what_it_says(name, guessed):
    laws = _laws(guessed=guessed)
    wanted = [_by_hand(name, p, q) for p, q in zip(laws.p.tolist(), laws.log_q.exp().tolist(), strict=True)]
    assert LOSSES[name](laws).tolist() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("name", ["kl", "rkl", "jsd", "tv", "nla", "hybrid"])
def test_nothing_is_lost_by_the_same_law(name):
    p = _laws().p
    assert LOSSES[name](Distributions(p, p.log())).tolist() == pytest.approx([0] * 5, abs=1e-5)


def test_losses_agree_with_each_other():
    laws = _laws()
    swapped = Distributions(laws.log_q.exp(), laws.p.log())
    assert torch.allclose(LOSSES["rkl"](laws), LOSSES["kl"](swapped), atol=1e-5)
    assert torch.allclose(LOSSES["jsd"](laws), LOSSES["jsd"](swapped), atol=1e-6)
    assert LOSSES["jsd"](laws).max() < math.log(2)
    assert torch.equal(LOSSES["tv"](laws), 1 - laws.alpha)
    entropy = -(laws.p * laws.p.log()).sum(-1)
    assert torch.allclose(LOSSES["ce"](laws) - LOSSES["kl"](laws), entropy, atol=1e-5)


def test_cross_entropy_and_divergence_have_one_slope():
    slopes = []
    for name in ("ce", "kl"):
        logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(4)).requires_grad_()
        LOSSES[name](Distributions(_laws().p, logits.log_softmax(-1))).sum().backward()
        slopes.append(logits.grad)
    assert torch.allclose(*slopes, atol=1e-6)


def test_what_cannot_be_guessed_is_lost():
    p = _laws(guessed=4).p
    best = Distributions(p, (p / p.sum(-1, keepdim=True)).log())
    assert torch.allclose(best.alpha, p.sum(-1), atol=1e-6)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_slopes_are_numbers_where_laws_are_extreme(name):
    logits = torch.tensor([[80.0, -80.0, 0.0]], requires_grad=True)
    LOSSES[name](Distributions(torch.tensor([[0.0, 1.0, 0.0]]), logits.log_softmax(-1))).sum().backward()
    assert logits.grad.isfinite().all()


def _shortfall_by_hand(alphas):
    """Expected number of guesses lost, over all ways in which a chain can go."""
    lost = 0.0
    for kept in product((True, False), repeat=len(alphas)):
        chance = math.prod(a if k else 1 - a for a, k in zip(alphas, kept, strict=True))
        lost += chance * (len(alphas) - next((i for i, k in enumerate(kept) if not k), len(alphas)))
    return lost


def test_shortfall_is_the_expected_number_of_lost_guesses():
    alphas = torch.rand(4, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    here = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.bool)
    found = shortfall(alphas, here, [1.0] * 4)
    columns = [alphas[:, c][here[:, c]].tolist() for c in range(3)]
    assert found.tolist() == pytest.approx([_shortfall_by_hand(column) for column in columns], abs=1e-6)
    found.sum().backward()
    assert not alphas.grad[~here].any()


def test_shortfall_has_a_slope_where_a_guess_is_sure_to_be_lost():
    alphas = torch.tensor([[1.0], [0.0], [0.5]], requires_grad=True)
    shortfall(alphas, torch.ones(3, 1, dtype=torch.bool), [1.0] * 3).sum().backward()
    assert alphas.grad.flatten().tolist() == pytest.approx([-1.0, -1.5, 0.0])


@pytest.mark.parametrize("text", [*sorted(LOSSES), "ce:0.3,tv:0.7", "length", "kl:0.5,length:2"])
@pytest.mark.parametrize("at_once", [14, 1 << 20])
def test_a_few_places_at_a_time_have_the_slopes_of_all(at_once, text, monkeypatch):
    monkeypatch.setattr(chunked, "_AT_ONCE", {"cpu": at_once})
    losses, weights = parse(text), torch.arange(1.0, 6.0)

    def run(judge):
        logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(4)).requires_grad_()
        lost, kept = judge(logits)
        whole = (lost * weights).sum()
        (whole + kept.square().sum() if "length" in losses else whole).backward()
        return lost, kept, logits.grad

    def plain(logits):
        laws = Distributions(_laws().p, logits.log_softmax(-1))
        single = [share * LOSSES[name](laws) for name, share in losses.items() if name != "length"]
        return sum(single, torch.zeros(5)), laws.alpha

    ours, theirs = run(lambda logits: chunked.chunked_loss(logits, _laws().p, losses)), run(plain)
    assert ours[1].requires_grad == ("length" in losses)
    for found, wanted in zip(ours, theirs, strict=True):
        assert torch.allclose(found, wanted, atol=1e-6)


def test_weights_of_losses():
    assert parse("ce") == {"ce": 1.0}
    assert parse("ce:0.1, tv:0.9,length") == {"ce": 0.1, "tv": 0.9, "length": 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nll", "loss 'nll' is unknown; use ce, kl"),
        ("", "loss '' is unknown"),
        ("ce:x", "'x' of loss ce is not a number; write ce:0.5"),
        ("ce:0", "not above 0"),
        ("ce:-1", "not above 0"),
        ("ce:inf", "not above 0"),
        ("ce:nan", "not above 0"),
        ("ce,tv,ce", "stands in 'ce,tv,ce' twice"),
    ],
)
def test_losses_that_cannot_be(text, message):
    with pytest.raises(OutriderError, match=message):
        parse(text)


# Steps


def _loss_by_hand(texts, weight, losses, decay):
    total, columns, laws = 0.0, 0, spread(texts.target_probs, texts.learn)
    for b in range(len(texts.learn)):
        length = int(texts.learn[b].sum())
        columns += length
        for c in range(length):
            alphas = []
            for step in range(min(len(weight), length - c)):
                p, q = laws[b, c + step].tolist(), weight[step].softmax(-1).tolist()
                alphas.append(sum(map(min, p, q)))
                shares = [share * _by_hand(name, p, q) for name, share in losses.items() if name != "length"]
                total += decay**step * sum(shares)
            whole = sum(decay**step for step in range(len(weight)))
            total += whole * losses.get("length", 0) * _shortfall_by_hand(alphas)
    return total / whole / columns


@pytest.mark.parametrize("text", ["ce", "kl:0.3,tv:0.7", "length", "ce:0.5,length:2"])
def test_the_loss_of_a_step_is_a_mean_over_columns(text):
    texts, losses = make_texts(vocab=11), parse(text)
    pupil = Still(3, 11)
    trainer = Trainer(pupil, losses=losses, steps=3, decay=0.8, lr=1e-3)
    start = pupil.module.weight.detach().clone()
    sums = trainer.train([texts], progress=0.5)
    assert sums.columns == 19
    assert sums.loss == pytest.approx(_loss_by_hand(texts, start, losses, 0.8), rel=1e-3)


@pytest.mark.parametrize("kind", ["mtp", "medusa"])
def test_parts_and_padding_change_nothing(kind, nano):
    whole, weights = make_texts(), []
    loud = replace(
        whole,
        aux_states=torch.where(whole.learn[..., None, None], whole.aux_states, 1e3),
        tokens=torch.where(torch.nn.functional.pad(whole.learn, (1, 0), value=True), whole.tokens, 5),
    )
    ways = ([whole], [loud], [cut(whole, b, length) for b, length in enumerate((9, 6, 4))])
    for given in ways:
        torch.manual_seed(7)
        pupil = make_trainee(kind, make_settings(), make_setup(nano), nano.tables)
        trainer = Trainer(pupil, losses=parse("ce"), steps=pupil.steps, decay=0.8, lr=1e-3)
        slopes = watched(trainer)
        sums = trainer.train(given, progress=0.5)
        weights.append((sums.loss, slopes[0]))
    (loss, slope), *others = weights
    for other_loss, other in others:
        assert other_loss == pytest.approx(loss, rel=1e-3)
        assert torch.nn.functional.cosine_similarity(slope, other, dim=0) > 0.999


class _Some(Still):
    """Of three chains of equal guesses one goes on, for all of them."""

    def __init__(self, going):
        super().__init__(2, 11)
        self._going = torch.tensor(going)

    def unroll(self, texts, steps):
        yield next(super().unroll(texts, 1))
        count = int(self._going.sum())
        law = texts.target_probs[:1].expand(count, -1)
        logits = self.module.weight[1].expand(count, -1)
        yield Step(logits=logits, target=law, learn=self._going[None], weight=3 / count)


@pytest.mark.parametrize("text", ["ce", "length", "tv:0.5,length:2"])
def test_chains_that_go_on_stand_for_those_that_do_not(text):
    texts = make_texts(lengths=(3,), vocab=11)
    texts = replace(texts, target_probs=texts.target_probs[:1].expand(3, -1))
    found = []
    for going in ([True, True, True], [False, True, False]):
        trainer = Trainer(_Some(going), losses=parse(text), steps=2, decay=0.8, lr=1e-3)
        slopes = watched(trainer)
        found.append((trainer.train([texts], progress=0.5).loss, slopes[0]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-6)


def test_a_step_without_anything_to_learn_changes_nothing():
    pupil = Still(2, 11)
    before = pupil.module.weight.detach().clone()
    trainer = Trainer(pupil, losses=parse("ce"), steps=2, decay=0.8, lr=1e-3)
    texts = make_texts(vocab=11)
    for given in ([], [replace(texts, learn=torch.zeros_like(texts.learn))]):
        assert trainer.train(given, progress=0.5).columns == 0
    assert trainer.step == 2
    assert torch.equal(pupil.module.weight, before)


def test_a_loss_that_is_no_number_ends_the_training():
    pupil = Still(2, 11)
    with torch.no_grad():
        pupil.module.weight[0, 0] = torch.nan
    before = pupil.module.weight.detach().clone()
    trainer = Trainer(pupil, losses=parse("ce"), steps=2, decay=0.8, lr=1e-3)
    with pytest.raises(OutriderError, match=r"at step 0 the loss is nan .* use a smaller --lr"):
        trainer.train([make_texts(vocab=11)], progress=0.5)
    assert torch.equal(pupil.module.weight.nan_to_num(), before.nan_to_num())


def test_a_judge_learns_how_often_guesses_are_kept(nano):
    torch.manual_seed(1)
    pupil = make_trainee("dspark", make_settings(draft_tokens=2), make_setup(nano), nano.tables)
    trainer = Trainer(pupil, losses=parse("tv"), steps=2, decay=1.0, lr=1e-2)
    (step, *_) = list(pupil.unroll(make_texts(), 2))
    assert step.confidence is not None
    for _ in range(30):
        trainer.train([make_texts()], progress=0.5)
    step, _ = pupil.unroll(make_texts(), 2)
    laws = Distributions(step.target, step.logits.log_softmax(-1))
    assert (step.confidence.sigmoid().mean() - laws.alpha.mean()).abs() < 0.1


def test_the_rate_rises_and_falls():
    marks = [rate(i / 1000) for i in range(1001)]
    top = marks.index(max(marks))
    assert marks[top] == pytest.approx(1, abs=0.01)
    assert 20 <= top <= 40
    assert marks[:top] == sorted(marks[:top])
    assert marks[top:] == sorted(marks[top:], reverse=True)
    assert marks[0] > 0
    assert marks[-1] == pytest.approx(0.05)


def test_a_mask_may_be_a_tokens_embedding_and_stays_it(nano, tmp_path):
    pupil = make_trainee("dflash", make_settings(draft_tokens=2, mask_token_id=9), make_setup(nano), nano.tables)
    texts = make_texts()
    taps = torch.randn(*texts.aux_states.shape[:2], len(pupil.aux_states.layers), 128)
    trainer = Trainer(pupil, losses={"ce": 1.0}, steps=2, decay=1.0, lr=1e-2)
    before = pupil.module.fuse.weight.clone()
    trainer.train([replace(texts, aux_states=taps)], progress=0.5)
    assert not torch.equal(pupil.module.fuse.weight, before)
    assert torch.equal(pupil.module.mask, nano.tables.embedding[9])
    pupil.save(tmp_path / "draft")
    found = read_trained(tmp_path / "draft")
    partner = TargetInfo(vocab=12288, hidden=128, layers=2, embedding=lambda: nano.tables.embedding)
    config, _ = format_of("dflash").write(found.description, found.weights, partner)
    assert config["dflash_config"]["mask_token_id"] == 9


def test_kept_guesses_are_seen_by_position():
    sums = Sums()
    sums.see(0, torch.tensor([0.5, 1.0]))
    sums.see(1, torch.tensor([]))
    sums.see(0, torch.tensor([0.0]))
    assert sums.acceptance == [0.5, 0.0]


_TWO = """
import sys, torch
from torch import distributed
from outrider.train.loss.losses import parse
from outrider.train.distributed import meet, part, rank
from outrider.train.data.batches import frequent
from outrider.train.trainer import Trainer
from tests.helpers.train_setup import CPU, Still, cut, make_sample, make_texts, watched
torch.set_num_threads(1)
meet(CPU)
texts, pupil = make_texts(vocab=11), Still(3, 11)
trainer = Trainer(pupil, losses=parse("ce:0.5,length:2"), steps=3, decay=0.8, lr=1e-3)
own = [[cut(texts, 0, 9)], [cut(texts, 1, 6), cut(texts, 2, 4)]][rank()]
slopes = watched(trainer)
sums = trainer.train(own, progress=0.5)
ids = frequent([make_sample([[0, 5, 5, 6], [0, 7, 7, 6]][rank()])], 10, 3, CPU)
torch.save([sums.loss, sums.columns, slopes[0], ids], f"{sys.argv[1]}/{rank()}.pt")
part()
"""


@pytest.mark.slow
def test_two_processes_learn_as_one_does(tmp_path):
    (tmp_path / "two.py").write_text(_TWO)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(tmp_path / "two.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    pupil = Still(3, 11)
    trainer = Trainer(pupil, losses=parse("ce:0.5,length:2"), steps=3, decay=0.8, lr=1e-3)
    slopes = watched(trainer)
    sums = trainer.train([make_texts(vocab=11)], progress=0.5)
    for at in range(2):
        loss, columns, slope, ids = torch.load(tmp_path / f"{at}.pt")
        assert (loss, columns) == (pytest.approx(sums.loss, rel=1e-5), 19)
        assert torch.allclose(slope.flatten(), slopes[0], atol=1e-6)
        assert ids.tolist() == [5, 6, 7]


# What is trained


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("dflash", {"draft_vocab_size": 99999}, "--draft-vocab-size is 99999, and the target has 12288 tokens"),
        ("medusa", {"intermediate_size": 64}, "leave --intermediate-size out"),
        ("medusa", {"ttt_length": 3}, "medusa drafts 4 tokens and trains all of them; leave --ttt-length out"),
        ("hydra", {"depth": 1}, "use 2 or more"),
        ("mtp", {"draft_tokens": 5}, "mtp has no block; leave --draft-tokens out"),
        ("mtp", {"mask_token_id": 5}, "mtp has no block; leave --mask-token-id out"),
        ("mtp", {"ttt_length": 1, "multi_step_share": 0.5}, "--ttt-length 1 trains only the first draft token"),
        ("dflash", {"mask_token_id": 12288}, "--mask-token-id is 12288, and the target has 12288 tokens"),
        ("eagle3", {}, "reads three layers, and this target has 2"),
        ("slim", {}, "reads three layers, and this target has 2"),
        ("mtp", {"hidden_size": 64}, "mtp is as wide as its target; leave --hidden-size out"),
        (DRAFT, {}, "name its folder with --init-from DIR"),
        (DRAFT, {"init_from": NANO, "depth": 2}, "--depth shapes a new draft"),
        (DRAFT, {"init_from": NANO, "hidden_size": 64}, "--hidden-size shapes a new draft"),
        (DRAFT, {"init_from": NANO, "own_lm_head": True}, "--own-lm-head shapes a new draft"),
        (
            DRAFT,
            {"init_from": NANO, "multi_step_share": 0.5},
            "a draft model trains all draft tokens at every position; leave --multi-step-share out",
        ),
        (
            "hydra",
            {"multi_step_share": 0.5},
            "hydra trains all draft tokens at every position; leave --multi-step-share out",
        ),
        (
            "mtp",
            {"mtp_modules": 2, "multi_step_share": 0.5},
            "mtp trains all draft tokens at every position; leave --multi-step-share out",
        ),
        (DRAFT, {"init_from": "out"}, "--init-from and --out are both out"),
        (DRAFT, {"init_from": "nowhere"}, "nowhere is not a folder"),
    ],
)
def test_options_that_a_kind_does_not_have(kind, options, message, nano):
    with pytest.raises(OutriderError, match=message):
        make_trainee(kind, make_settings(**options), make_setup(nano), nano.tables)


@pytest.mark.parametrize("kind", ["eagle3", "eagle31", "slim", "peagle"])
def test_a_narrow_draft_has_tables_of_its_own(kind):
    sizes = Sizes(hidden=384, layers=8, vocab=40, epsilon=1e-5)
    narrow = describe(kind, replace(sizes, width=128))
    assert (narrow.width, narrow.own_lm_head, narrow.own_embedding) == (128, True, True)
    assert describe("slim", sizes).width == 192
    with pytest.raises(OutriderError, match="leave --shared-lm-head out, or --hidden-size"):
        describe(kind, replace(sizes, width=128, own_lm_head=False))
    with pytest.raises(OutriderError, match="--hidden-size is 512, and the target is 384 wide"):
        describe(kind, replace(sizes, width=512))
    with pytest.raises(OutriderError, match="does not divide into heads"):
        describe(kind, replace(sizes, width=100))


def test_a_narrow_draft_begins_with_the_main_directions_of_the_tables():
    torch.manual_seed(1)
    few, norm = torch.randn(64, 128), torch.rand(128) + 0.5
    tables = SharedWeights(
        embedding=torch.randn(90, 128), head=torch.randn(90, 64) @ few / norm, norm=norm, epsilon=1e-6
    )
    sizes = Sizes(hidden=128, layers=4, vocab=90, epsilon=1e-6, width=64, draft_vocab=9)
    module = make_module(describe("slim", sizes))
    module.ids.copy_(torch.arange(3, 12))
    torch.nn.init.zeros_(module.fuse.weight)
    init_weights(module, tables)
    state = torch.randn(5, 64) @ torch.linalg.qr(few.T).Q.T  # of which these tables see everything
    through = module.fuse.weight[:, -128:].detach()
    law = (normed(state, tables) @ tables.head.T).float()[:, 3:12].softmax(-1)
    assert torch.allclose(module.logits(state @ through.T).softmax(-1), law, atol=1e-4)
    assert torch.allclose(directions(few, 9).T @ directions(few, 9), torch.eye(9), atol=1e-5)


def test_a_narrow_draft_goes_on_as_what_it_is(tmp_path):
    mini = train_setup.house(str(embedded("mini")))
    setup = make_setup(mini)
    made = make_trainee("slim", make_settings(hidden_size=64, draft_vocab_size=50), setup, mini.tables)
    made.save(tmp_path / "slim")
    with pytest.raises(OutriderError, match="at its projection, and eagle3 does so at its attention; train"):
        make_trainee("eagle31", make_settings(init_from=str(tmp_path / "slim")), setup, mini.tables)
    again = make_trainee("slim", make_settings(init_from=str(tmp_path / "slim")), setup, mini.tables)
    assert again.ids.tolist() == made.ids.tolist()
    assert again.module.description.width == 64


def test_a_draft_of_another_vocabulary_is_refused(nano):
    setup = make_setup(nano)
    other = SimpleNamespace(get_vocab=lambda: {"a": 0})
    with pytest.raises(OutriderError, match="another vocabulary than the target"):
        make_trainee(DRAFT, make_settings(init_from=NANO), replace(setup, tokenizer=other), nano.tables)


def test_an_option_that_came_later_stops_no_training_that_does_without():
    assert "mask_token_id" not in make_settings().identity()
    assert make_settings(mask_token_id=0).identity()["mask_token_id"] == 0


def test_settings_that_cannot_be():
    for options, message in (
        ({"lr": 0.0}, "use --lr in"),
        ({"loss_decay": 1.5}, "use --lr in"),
        ({"cache_gb": 3.0}, "with --cache-dir DIR"),
        ({"seed": 1 << 64}, "--seed is 18446744073709551616; use a number"),
        ({"ttt_length": 10**9}, "--ttt-length is 1000000000; use 256 at most"),
        ({"mtp_modules": 10**9}, "--mtp-modules is 1000000000; use 256 at most"),
        ({"intermediate_size": 10**15}, "use 1048576 at most"),
        ({"cache_dir": "x", "cache_gb": 0.0}, "above 0"),
    ):
        with pytest.raises(OutriderError, match=message):
            make_settings(**options)
    with pytest.raises(OutriderError, match="train needs prompts"):
        Settings(out="out", data=[])


@pytest.mark.parametrize("kind", ["mtp", "medusa", "dspark"])
def test_a_head_that_was_trained_before_goes_on(kind, nano, tmp_path):
    setup = make_setup(nano)
    first = make_trainee(kind, make_settings(draft_vocab_size=50), setup, nano.tables)
    first.begin(lambda: [make_sample([1, 2, 3, 9, 70, 700])])
    with torch.no_grad():
        for weight in first.module.parameters():
            weight.add_(0.1)
    first.save(tmp_path / "head")
    again = make_trainee(kind, make_settings(init_from=str(tmp_path / "head")), setup, nano.tables)
    again.begin(lambda: pytest.fail("it knows what it guesses"))
    assert again.ids.tolist() == first.ids.tolist()
    for name, weight in first.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[name], weight.to(torch.bfloat16).to(weight.dtype))
    texts = make_texts(lengths=(6, 4))
    texts = replace(texts, target_probs=texts.target_probs[:, again.ids])
    trainer = Trainer(again, losses=parse("ce"), steps=2, decay=0.8, lr=1e-3)
    assert trainer.train([texts], progress=0.5).columns
    other = "hydra" if kind == "medusa" else "medusa"
    with pytest.raises(OutriderError, match=f"is of kind {kind}, for a target with"):
        make_trainee(other, make_settings(init_from=str(tmp_path / "head")), setup, nano.tables)
    with pytest.raises(OutriderError, match="defines the shape of the draft; leave --depth"):
        make_trainee(kind, make_settings(init_from=str(tmp_path / "head"), draft_vocab_size=9), setup, nano.tables)


def test_a_draft_model_guesses_as_transformers_has_it(nano):
    pupil = make_trainee(DRAFT, make_settings(init_from=NANO), make_setup(nano), nano.tables)
    texts = make_texts(lengths=(9, 6))
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    wanted = model(texts.tokens[:, :9]).logits
    steps = list(pupil.unroll(texts, 3))
    for at, step in enumerate(steps):
        assert torch.allclose(step.logits, wanted[:, at:][step.learn], atol=1e-4)
        assert torch.equal(step.target, spread(texts.target_probs, texts.learn)[:, at:][step.learn])
        assert torch.equal(step.learn, texts.learn[:, at:])


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss", "mixtral"])
def test_models_of_many_kinds_can_be_taught(name, tmp_path):
    for role, kind in (("target", "llama"), ("draft", name)):
        tiny.save(tmp_path / role, tiny.ARCHITECTURES[kind](), seed=len(role))
    house = train_setup.house(tmp_path / "target")
    pupil = make_trainee(DRAFT, make_settings(init_from=str(tmp_path / "draft")), make_setup(house), house.tables)
    texts = make_texts(hidden=32, vocab=tiny.VOCAB)
    trainer = Trainer(pupil, losses=parse("ce"), steps=1, decay=0.8, lr=1e-2)
    losses = [trainer.train([texts], progress=0.5).loss for _ in range(5)]
    assert losses[-1] < losses[0]
    pupil.save(tmp_path / "taught")
    engine = engines.make_engine(house.target, lambda _: pupil.proposer(make_setup(house)), k=3, rows=2)
    engines.run(engine, [(1, 2, 3), (4, 5)], SamplingParams(temperature=1.0), limit=9)
    assert engine.stats.draft_tokens
    again = load_checkpoint(tmp_path / "taught", dtype="float32", device="cpu").model.state_dict()
    ours = pupil.module.state_dict()
    assert again.keys() == ours.keys()
    assert all(torch.equal(again[name], value.bfloat16().float()) for name, value in ours.items())


@pytest.mark.parametrize("kind", ["mtp", "dspark", DRAFT])
def test_a_proposer_is_a_copy_and_costs_no_luck(kind, nano):
    torch.manual_seed(5)
    pupil = make_trainee(kind, make_settings(init_from=NANO if kind == DRAFT else None), make_setup(nano), nano.tables)
    state = torch.get_rng_state()
    weights = [weight.detach().clone() for weight in pupil.module.parameters()]
    proposer = pupil.proposer(make_setup(nano))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(weights, pupil.module.parameters(), strict=True))
    assert all(weight.requires_grad for weight in pupil.module.parameters())
    held = proposer.model.bytes()
    with torch.no_grad():
        for weight in pupil.module.parameters():
            weight.zero_()
    assert proposer.model.bytes() == held


def test_every_kind_is_told_of():
    message = "|".join(KINDS)
    from outrider.cli.drafts import train

    help = next(iter(train.__annotations__["kind"].__metadata__)).help
    assert all(kind in help for kind in [*message.split("|"), DRAFT])
