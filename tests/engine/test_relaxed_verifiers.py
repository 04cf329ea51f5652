"""Relaxed verifiers in an engine: their spelling, their tables, their labels, and where they are refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from outrider import LLM, SamplingParams
from outrider.core.bound import BinDistance, GroupExact, TotalVariation
from outrider.core.config import EngineConfig
from outrider.core.proposer import NoProposer
from outrider.core.stats import Stats
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.engine.verifiers import find_verifier
from outrider.errors import OutriderError
from outrider.lab.tune.config import settings_dict
from outrider.serve.openai.responses import usage
from outrider.testing import ToyTarget
from outrider.train.rl.rollout import RolloutEngine
from outrider.verify.relaxed.registry import RELAXED, relaxed_verifier, with_absolute_table
from outrider.verify.rules import TargetFacts
from tests.helpers import tiny
from tests.helpers.engines import make_engine, outputs, run

OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "max_num_seqs": 4, "k": 3}
PROMPTS = [[5, 6, 7], [9, 8], [11, 12, 13, 14]]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=3)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
EXPRESSIONS = [
    "lantern:delta=0.3,k=8",
    "gsd:clusters=8",
    "gsd:clusters=8,size=3",
    "pcg:k=2",
    "bins:distance=9,first=4,last=60",
]


def facts(vocab=6, embedding=None):
    return TargetFacts(
        vocab=vocab, device=torch.device("cpu"), embedding=lambda: torch.eye(vocab) if embedding is None else embedding
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.15}
    for seed, name in enumerate(("target", "draft")):
        tiny.save(root / name, tiny.make_config("LlamaConfig", **sizes, max_position_embeddings=256), seed=seed)
    return root


def load(pair, verifier, **options):
    return LLM(pair / "target", proposer=f"draft:{pair / 'draft'}", verifier=verifier, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def exact(pair):
    llm = load(pair, "rejection")
    return llm.generate(PROMPTS, GREEDY), llm.generate(PROMPTS, SAMPLED), llm.stats


@pytest.mark.fast_cases(
    "lantern:delta=0.3,k=8-auto",
    "gsd:clusters=8-torch",
    "gsd:clusters=8,size=3-auto",
    "pcg:k=2-torch",
    "bins:distance=9,first=4,last=60-auto",
)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_relaxed_rule_accepts_more_and_says_so(expression, kernels, pair, exact):
    llm = load(pair, expression, kernels=kernels)
    sampled = llm.generate(PROMPTS, SAMPLED)
    greedy, _, stats = exact
    assert sum(llm.stats.accepted) / llm.stats.passes > 1.3 * sum(stats.accepted) / stats.passes
    assert not llm.stats.exact
    assert llm.stats.bound == relaxed_verifier(expression).bound
    assert llm.parts.verifier.name == expression
    assert all(len(completion.token_ids) == 24 and completion.finish_reason == "length" for completion in sampled)
    document = usage(sampled, len(PROMPTS))["speculation"]
    assert document["exact"] is False
    assert document["bound"] == relaxed_verifier(expression).bound.as_dict()
    json.dumps(llm.stats.as_dict())
    again = llm.generate(PROMPTS, GREEDY)
    same = [one.token_ids == other.token_ids for one, other in zip(again, greedy, strict=True)]
    assert all(same) is not expression.startswith("bins")  # only bins relax greedy decoding
    one_exact = llm.generate(PROMPTS[0], SamplingParams(max_tokens=24, ignore_eos=True, verifier="walk"))[0]
    assert one_exact.token_ids == greedy[0].token_ids


def test_greedy_bins_are_near_the_targets_own_tokens():
    target = ToyTarget(vocab=12, spread=1.0)
    draft = ToyTarget(vocab=12, spread=1.0, seed=7)
    order = torch.tensor([-1, -1, *range(10)])
    rule = relaxed_verifier("bins:distance=2,first=2,last=11").for_target(facts(12))
    engine = make_engine(target, lambda setup: DraftModelProposer(setup, draft), verifier=rule, k=4)
    rows = run(engine, [[1, i] for i in range(12)], SamplingParams(), limit=30, ends=frozenset())
    changed = 0
    for row in rows:
        for i in range(2, len(row.token_ids)):
            own = int(target.table[row.token_ids[i - 2], row.token_ids[i - 1]].argmax())
            token = row.token_ids[i]
            changed += token != own
            both = order[[token, own]]
            assert token == own or (int(both.min()) >= 0 and int((both[0] - both[1]).abs()) <= 2)
    assert changed > 20


@pytest.mark.parametrize("expression", ["lantern:delta=0.2,k=2", "bins:distance=2,first=0,last=11"])
def test_filters_hold(expression):
    """No rule emits a token that top-k excludes, if the target samples."""
    target, draft = ToyTarget(vocab=12, spread=1.0), ToyTarget(vocab=12, spread=1.0, seed=7)
    rule = relaxed_verifier(expression).for_target(facts(12, torch.arange(12.0)[:, None]))
    engine = make_engine(target, lambda setup: DraftModelProposer(setup, draft), verifier=rule)
    params = SamplingParams(temperature=1.0, top_k=4, seed=1)
    for row in run(engine, [[1, i] for i in range(12)], params, limit=30, ends=frozenset()):
        for i in range(2, len(row.token_ids)):
            allowed = target.table[row.token_ids[i - 2], row.token_ids[i - 1]].topk(4).indices
            assert row.token_ids[i] in allowed.tolist()


def test_without_drafts_every_rule_is_exact():
    for expression in ("lantern:delta=0.2,k=2", "gsd:clusters=2", "pcg:k=1", "bins:distance=2,first=0,last=5"):
        rule = relaxed_verifier(expression).for_target(facts())
        engine = make_engine(ToyTarget(), NoProposer, verifier=rule)
        plain = make_engine(ToyTarget(), NoProposer, verifier="coupled" if "bins" in expression else "walk")
        params = SamplingParams(temperature=1.0, seed=4)
        results = [outputs(run(each, [[1, 2], [3]], params, limit=20)) for each in (engine, plain)]
        assert results[0] == results[1]


def test_bounds_say_what_they_promise():
    assert relaxed_verifier("lantern:delta=0.25").bound == TotalVariation(0.25)
    assert relaxed_verifier("bins:distance=3,first=1,last=9").bound == BinDistance(3)
    groups = relaxed_verifier("gsd:clusters=8,size=2").bound
    assert isinstance(groups, GroupExact)
    assert str(groups) == (
        "exact for groups of tokens: 8 clusters of the target's embedding, each divided by the target's probability"
        " into clusters of 2"
    )
    assert TotalVariation(0.25).as_dict() == {"kind": "tvd", "value": 0.25}
    assert str(BinDistance(3)) == "at most 3 bins from the target's own token"
    lossy = Stats(exact=False, bound=TotalVariation(0.25))
    assert (lossy + Stats()).bound == (Stats() + lossy).bound == (lossy + lossy).bound == TotalVariation(0.25)
    assert (lossy + Stats(exact=False, bound=BinDistance(1))).bound is None
    assert (lossy + Stats(exact=False)).bound is None


def test_rollouts_refuse_relaxed_rules_unless_named(pair):
    llm = load(pair, "lantern:delta=0.3,k=8")
    with pytest.raises(OutriderError, match="k=8 is lossy"):
        RolloutEngine(llm)
    provenance = RolloutEngine(llm, allow_lossy="lantern:delta=0.3,k=8").provenance
    assert not provenance.exact
    assert provenance.bound == TotalVariation(0.3)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("lantern", "needs a number delta above 0 and below 1, as in lantern:delta=0.1"),
        ("lantern:delta=0", "needs a number delta above 0"),
        ("lantern:delta=1.5", "needs a number delta above 0"),
        ("lantern:delta=nan", "needs a number delta above 0"),
        ("lantern:delta=much", "needs a number delta above 0"),
        ("lantern:0.1", "has the option '0.1'; write OPTION=VALUE"),
        ("lantern:delta=0.1,delta=0.2", "has the option 'delta=0.2'"),
        ("lantern:delta=0.1,distance=3", "unknown option distance; use delta, k, table, first or last"),
        ("lantern:delta=0.1,k=0", "whole number k of at least 1"),
        ("lantern:delta=0.1,table=nowhere.json", "nowhere.json cannot be read"),
        ("gsd", "whole number clusters of at least 1"),
        ("gsd:clusters=4,size=0", "whole number size of at least 1"),
        ("pcg:k=two", "whole number k of at least 1"),
        ("bins:distance=3", "needs a table of bins, or first and last"),
        ("bins:first=3,last=4", "whole number distance of at least 0"),
        ("bins:distance=3,first=3", "needs a table of bins, or first and last"),
        ("lanterns:delta=0.1", "is unknown; use walk.*lantern, gsd, pcg, bins"),
    ],
)
def test_wrong_expressions(expression, message):
    with pytest.raises(OutriderError, match=message):
        find_verifier(expression, "none")


def test_trees_are_refused_by_rules_for_chains():
    with pytest.raises(OutriderError, match="verifies chains only, and suffix drafts trees"):
        find_verifier("lantern:delta=0.1", "suffix")
    assert find_verifier("bins:distance=1,first=0,last=9", "suffix").trees


@pytest.mark.parametrize(
    ("name", "content", "expression", "message"),
    [
        ("t.json", {"vocab": 7, "groups": [[0, 1]]}, "pcg:table=", "vocabulary of 7 tokens, and the target has 6"),
        ("t.json", {"vocab": 6, "groups": [[0, 6]]}, "pcg:table=", "names token 6, and the target has the ids 0 to 5"),
        ("t.json", {"vocab": 6, "groups": [[0, 0]]}, "pcg:table=", "lists token 0 twice"),
        ("t.json", {"vocab": 6, "groups": [[0, -1]]}, "pcg:table=", "groups that are not lists of token ids"),
        ("t.json", {"vocab": 6, "groups": []}, "pcg:table=", "has empty groups"),
        ("t.json", {"groups": [[0, 1]]}, "pcg:table=", "needs the number vocab and one of"),
        ("t.json", {"vocab": 6, "groups": [[0, 1]]}, "bins:distance=1,table=", "holds groups, and the rule takes bins"),
        ("t.json", {"vocab": 6, "groups": [[0, 1], [1, 2]]}, "gsd:table=", "groups overlap; use pcg"),
        ("t.json", {"vocab": 6, "groups": [[0, 1]]}, "gsd:clusters=2,table=", "its table has groups; give one of them"),
        ("t.json", {"vocab": 6, "bins": [0, 9]}, "bins:distance=1,table=", "names token 9"),
        ("t.json", {"vocab": 6, "bins": [0, 1]}, "bins:distance=1,first=0,table=", "leave them out"),
        ("t.json", {"vocab": 6, "bins": [0, 1]}, "bins:distance=1,last=5,table=", "leave them out"),
        ("t.json", {"vocab": 6, "neighbors": {"9": [0]}}, "lantern:delta=0.1,table=", "names token 9"),
        ("t.json", {"vocab": 6, "neighbors": {"x": [0]}}, "lantern:delta=0.1,table=", "not by token id"),
        ("t.json", "{", "pcg:table=", "cannot be read"),
        ("t.safetensors", {"embedding": torch.eye(5)}, "pcg:k=1,table=", "has 5 rows, and the target has 6 tokens"),
        ("t.safetensors", {"embedding": torch.eye(6) / 0}, "pcg:k=1,table=", "no finite tensor embedding"),
        ("t.safetensors", {"table": torch.eye(6)}, "pcg:k=1,table=", "no finite tensor embedding"),
        (
            "t.safetensors",
            {"embedding": torch.eye(3), "tokens": torch.tensor([0, 2, 8])},
            "pcg:k=1,table=",
            "names token 8",
        ),
        (
            "t.safetensors",
            {"embedding": torch.eye(3), "tokens": torch.tensor([0, 2])},
            "pcg:k=1,table=",
            "one id per row",
        ),
        ("t.safetensors", {"embedding": torch.eye(6)}, "pcg:k=6,table=", "use a smaller k"),
        ("t.safetensors", {"embedding": torch.eye(6)}, "gsd:clusters=7,table=", "use fewer"),
        ("t.safetensors", {"embedding": torch.eye(6)}, "gsd:clusters=2,first=1,table=", "leave them out"),
    ],
)
def test_wrong_tables(name, content, expression, message, tmp_path):
    path = tmp_path / name
    if isinstance(content, str):
        path.write_text(content)
    elif name.endswith("json"):
        path.write_text(json.dumps(content))
    else:
        save_file(content, path)
    with pytest.raises(OutriderError, match=message):
        relaxed_verifier(f"{expression}{path}").for_target(facts())


def test_wrong_ranges_and_embeddings():
    with pytest.raises(OutriderError, match="first and last are 3 and 9, and the target has the ids 0 to 5"):
        relaxed_verifier("bins:distance=1,first=3,last=9").for_target(facts())
    with pytest.raises(OutriderError, match="has 4 rows for 6 tokens; give table=FILE"):
        relaxed_verifier("pcg:k=1").for_target(facts(embedding=torch.eye(4)))
    with pytest.raises(OutriderError, match="has no target yet"):
        relaxed_verifier("pcg:k=1").rule(None, None, None)


def test_tables_from_files_mean_what_they_say(tmp_path):
    """The neighbors, groups and clusters of a file are those of the embedding that it was made from."""
    places = torch.tensor([[0.0], [1.0], [10.0], [11.5], [30.0]])
    save_file({"embedding": places, "tokens": torch.tensor([4, 0, 2, 3, 1])}, tmp_path / "places.safetensors")
    near = {4: [0], 0: [4], 2: [3], 3: [2], 1: [3]}
    (tmp_path / "near.json").write_text(json.dumps({"vocab": 6, "neighbors": near}))
    (tmp_path / "groups.json").write_text(json.dumps({"vocab": 6, "groups": [[4, 0], [2, 3], [1, 3]]}))
    (tmp_path / "bins.json").write_text(json.dumps({"vocab": 6, "bins": [4, 0, 2, 3, 1]}))
    pairs = [
        ("lantern:delta=0.2,k=1,table=places.safetensors", "lantern:delta=0.2,table=near.json"),
        ("pcg:k=1,table=places.safetensors", "pcg:table=groups.json"),
    ]
    for expressions in pairs:
        results = []
        for expression in expressions:
            verifier = relaxed_verifier(expression.replace("table=", f"table={tmp_path}/")).for_target(facts())
            make = lambda setup: DraftModelProposer(setup, ToyTarget(seed=1))  # noqa: E731
            engine = make_engine(ToyTarget(), make, verifier=verifier)
            params = SamplingParams(temperature=1.0, seed=4)
            results.append(outputs(run(engine, [[1, 2], [3]], params, limit=30)))
        assert results[0] == results[1]
    assert relaxed_verifier(f"bins:distance=1,table={tmp_path}/bins.json").for_target(facts()).bound == BinDistance(1)


def test_settings_name_tables_by_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert with_absolute_table("pcg:table=a.json") == f"pcg:table={tmp_path}/a.json"
    assert with_absolute_table("lantern:delta=0.1,k=3") == "lantern:delta=0.1,k=3"
    assert with_absolute_table("walk") == "walk"
    settings = settings_dict(EngineConfig(), proposer="ngram", k=2, verifier="bins:distance=1,table=b.json")
    assert settings["verifier"] == f"bins:distance=1,table={tmp_path}/b.json"
    assert {*RELAXED} == {"lantern", "gsd", "pcg", "bins", "blend"}


def test_the_log_probability_of_a_token_that_p_excludes_is_null_in_json(pair):
    from outrider.cli.output import logprob_entry

    llm = load(pair, "bins:distance=9,first=4,last=60")
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0)
    entries = [entry for each in llm.generate(PROMPTS, params) for entry in each.logprobs]
    values = [logprob_entry(entry)["sampled_logprob"] for entry in entries]
    assert None in values
    assert 0.0 in values
    assert all(entry.logprob > -50 for entry in entries)
    json.dumps(values, allow_nan=False)
