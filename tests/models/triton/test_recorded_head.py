"""Draft heads whose chains are recorded, with the Triton kernels replaced by their references."""

import random
from dataclasses import replace
from pkgutil import resolve_name

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.core import tree
from outrider.core.types import DraftBudget, Scores
from outrider.errors import UnsupportedModel
from outrider.models.heads.store import make_module, write_head
from outrider.models.heads.targets import registry
from outrider.models.heads.targets.autoregressive import AutoregressiveTarget
from outrider.models.heads.targets.registry import make_head_target
from outrider.testing import random_tree
from outrider.train.model.presets import Sizes, describe
from tests.helpers import heads, tiny
from tests.helpers.configs import make_config
from tests.helpers.no_synchronization import NoSynchronization
from tests.helpers.recorder import FakeRecorder
from tests.models.heads import drive_head

pytest.importorskip("triton")
from outrider.models.heads.targets.recorded_autoregressive import RecordedHead
from outrider.models.triton import decoder, layers
from tests.helpers import triton_reference

# EAGLE-3 with a vocabulary of its own, YaRN and several layers; EAGLE; MTP with gates and half of a head rotated.
EAGLES = ("eagle3 of some tokens", "five taps", "eagle", "gated qwen")
# One of each other kind, and each way to choose the tokens of a block.
OTHERS = (
    "three modules",
    "peagle of speculators",
    "medusa of some tokens",
    "hydra",
    "narrow dflash",
    "dflash with windows",
    "dflash2",
    "domino of speculators",
    "dspark of speculators",
    "xpress of speculators",
)
NAMES = (*EAGLES, *OTHERS)
LAUNCHES = 7  # most of a draft besides the graph: the copies of its inputs and of the tokens
LENGTHS = (9, 100, 24)
TABLES = replace(drive_head.TABLES, embedding=heads.TABLE, head=heads.HEAD)


@pytest.fixture(scope="module", autouse=True)
def reference():
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        triton_reference.use(patch)
        yield


def make(name, make_target=None, **options):
    """Return a head on the Triton kernels, or made by `make_target`."""
    module = heads.random_draft(heads.cases()[name][1])
    make_target = make_target or resolve_name(f"{registry.__package__}.{registry.recorded_kind(module)}")
    return make_target(module, TABLES, slots=3, context=160, **options)


def limited(head, batch):
    """Return a batch whose budgets the head can draft."""
    return batch.limited(tuple(min(budget, head.max_draft_tokens) for budget in batch.draft_budget))


def run_rounds(heads_to_run, check, starts=LENGTHS):
    """Let heads read the same texts and states, which grow over several rounds."""
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(96, (3, 160), generator=generator)
    states = torch.randn(3, 160, len(heads_to_run[0].description.aux_states.layers), 64, generator=generator)
    texts = [tokens[b, :length].tolist() for b, length in enumerate(starts)]
    all_seqs = [drive_head.admit(head, texts) for head in heads_to_run]
    lengths = list(starts)
    for _ in range(4):
        budget = DraftBudget(tuple(rng.randint(1, 4) for _ in lengths))
        results = []
        for head, seqs in zip(heads_to_run, all_seqs, strict=True):
            drive_head.note_states(head, seqs, states, [length - 1 for length in lengths])
            batch = replace(drive_head.next_batch(head, seqs), budget=budget)
            results.append(check(head, batch))
            drive_head.commit_feed(head, batch, tree.empty(3, head.device))
        yield budget.tokens, results
        for b in range(3):
            lengths[b] += rng.randint(1, 4)
            for seqs in all_seqs:
                seqs[b].token_ids = tokens[b, : lengths[b]].tolist()


@pytest.mark.parametrize(
    ("name", "vocab"), [*((name, 96) for name in NAMES), *((name, 50) for name in (NAMES[0], "hydra", "narrow dflash"))]
)
def test_chains_equal_those_of_the_eager_head(name, vocab):
    record = FakeRecorder()
    eager, ours = make(name, make_head_target), make(name, record=record)

    def draft(head, batch):
        return head.draft_greedy(limited(head, batch), vocab)

    for _, (expected, chains) in run_rounds([eager, ours], draft):
        assert int(chains.tokens.max()) < vocab
        assert chains.count == expected.count
        for b, count in enumerate(chains.count):
            assert torch.equal(chains.tokens[b, :count], expected.tokens[b, :count])
    assert record.count > 0


@pytest.mark.parametrize(
    ("name", "window"),
    [
        (NAMES[0], None),
        (NAMES[0], 70),
        *((name, None) for name in OTHERS if "of speculators" in name),
        (OTHERS[0], None),
    ],
)
def test_scores_of_trees_equal_those_of_the_eager_head(name, window):
    record = FakeRecorder()
    options = {"window": window} if window else {}

    def score(head, batch):
        rng = random.Random(len(batch.feed[0]))
        draft = random_tree([3, 2, 3], 96, rng)
        batch = replace(batch, budget=DraftBudget((3,) * 3))
        results = [head.score(batch, tree.empty(3, head.device)).logits]
        for first in range(3):
            level = tree.cut(draft, (first + 1,) * 3)
            scores = head.score(batch, level, first=first)
            results.append(scores.logits[[b for b, width in enumerate(level.width) if width > first]])
        return results

    eager, ours = make(name, make_head_target, **options), make(name, record=record, **options)
    for _, (expected, logits) in run_rounds([eager, ours], score):
        for one, other in zip(logits, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert record.count > 0


def test_states_of_a_path_are_read_without_an_upload():
    nodes = torch.arange(12.0).view(1, 6, 2)
    scores = Scores(
        logits=torch.empty(0), hidden_states={1: nodes, 2: -nodes}, feed_hidden_states={1: (nodes[0],), 2: (-nodes[0],)}
    )
    with NoSynchronization("index"):
        states = scores.states((1, 2), 0, (0, 3))
    expected = torch.cat([nodes[0], nodes[0, [1, 4]]])
    assert torch.equal(states, torch.stack([expected, -expected], 1))


def draft_without_waiting(head, batch):
    with NoSynchronization():
        head.draft_greedy(limited(head, batch), 96)


def without_waiting(head, batch):
    """Draft a chain and a tree where no operation may wait for a GPU."""
    draft = random_tree([3, 2, 3], 96, random.Random(0))
    levels = [tree.cut(draft, (first + 1,) * 3) for first in range(3)]
    with NoSynchronization():
        head.draft_greedy(batch, 96)
        head.score(batch, tree.empty(3, head.device))
        for first, level in enumerate(levels):
            head.score(batch, level, first=first)


def test_blocks_need_memory_behind_the_sequence():
    ours = make("dflash2")
    ours.cache.resize(3)
    block = 64
    assert ours.cache.fits({0: 3 * block - ours.module.block.size})
    assert not ours.cache.fits({0: 3 * block - ours.module.block.size + 1})


def no_kernels(monkeypatch):
    """Replace kernels whose references would wait."""
    for module in (decoder, layers):
        monkeypatch.setattr(module, "rotate_and_write", lambda qkv, *rest, **norms: qkv.view(len(qkv), -1, 16)[:, :4])
    for kernel in ("attend", "attend_prompt"):
        monkeypatch.setattr(decoder, kernel, lambda query, *rest, **settings: query + 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_function_does_not_wait_for_the_device(name, monkeypatch):
    no_kernels(monkeypatch)
    recorded = FakeRecorder()

    def record(run):
        run()
        with NoSynchronization():
            return recorded(run)

    ours = make(name, record=record)
    check = draft_without_waiting if name in OTHERS else without_waiting
    for _ in run_rounds([ours], check):
        pass
    assert recorded.count
    used = {bucket for bucket in ours.graphs.buckets() if bucket.steps and bucket.columns <= 16}
    ours._reset()
    ours.graphs.warm(rows=3, length=0, columns=(1, 4), steps=range(1, 5))
    assert used <= set(ours.graphs.buckets())


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_is_one_graph_and_few_launches(name, monkeypatch):
    no_kernels(monkeypatch)
    recorded = []

    def record(run):
        run()
        recorded.append(run())
        return lambda result=recorded[-1]: replays.append(1) or result

    def draft(head, batch):
        replays.clear()
        with NoSynchronization() as operations:
            head.draft_greedy(limited(head, batch), 96)
        return len(replays), operations.launches

    replays = []
    known = 0
    compared = 0
    for _, [(graphs, launches)] in run_rounds([make(name, record=record)], draft, starts=(9, 20, 2)):
        assert graphs == 1
        if known == len(recorded):  # recording has launches of its own
            compared += 1
            assert launches <= LAUNCHES
        known = len(recorded)
    assert compared


def test_weight_update_and_new_tables_reach_recorded_chains():
    name = "eagle"
    ours = make(name, record=FakeRecorder())
    other = heads.random_draft(ours.description, seed=7)
    changed = replace(TABLES, head=TABLES.head.flip(0))
    drafts = []

    def draft(head, batch):
        return head.draft_greedy(batch, 96).tokens

    for tables, seed in ((TABLES, 0), (TABLES, 7), (changed, 7)):
        eager = AutoregressiveTarget(heads.random_draft(ours.description, seed=seed), tables, slots=3, context=160)
        if seed:
            ours.update_weights(other.state_dict(), 1)
        if tables is changed:
            ours.refresh_shared(tables)
        for budget, (expected, tokens) in run_rounds([eager, ours], draft):
            for b, count in enumerate(budget):
                assert torch.equal(tokens[b, :count], expected[b, :count])
        drafts.append(tokens)
    assert not torch.equal(drafts[0], drafts[1])


def test_small_windows_and_other_kernels_run_on_torch():
    with pytest.raises(UnsupportedModel, match="at least 64"):
        make("eagle", window=16)
    assert type(make("eagle", make_head_target, kernels="triton")) is RecordedHead
    assert type(make("eagle", make_head_target)) is AutoregressiveTarget


@pytest.mark.parametrize(
    ("kind", "head", "temperature"),
    [("draft", "eagle3", 0.0), ("tree", "eagle3", 1.0), ("draft", "domino", 0.0), ("tree", "mtp", 1.0)],
)
def test_texts_equal_plain_decoding(kind, head, temperature, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 16}
    path = tiny.save(tmp_path / "model", make_config("LlamaConfig", **sizes, max_position_embeddings=256))
    torch.manual_seed(1)
    module = make_module(describe(head, Sizes(hidden=64, layers=4, vocab=tiny.VOCAB, epsilon=1e-5, modules=2)))
    write_head(tmp_path / "head", module, dtype=torch.float32)
    texts = []
    for proposer in ("none", f"{kind}:{tmp_path / 'head'}"):
        options = {"device": "cpu", "dtype": "float32", "kernels": "triton", "max_model_len": 192, "check": "never"}
        llm = LLM(path, proposer=proposer, k=3, verifier="coupled" if temperature else None, **options)
        params = SamplingParams(max_tokens=8, temperature=temperature, seed=3, ignore_eos=True)
        done = llm.generate([[1, 2, 3], list(range(90))], params)
        texts.append([each.token_ids for each in done])
    assert llm.parts.proposer.model.kernels == "triton"
    assert sum(each.stats.draft_tokens for each in done)
    assert texts[0] == texts[1]
