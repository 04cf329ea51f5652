"""Tests of the files in which the planner keeps what it has learned."""

import json
import shutil

import pytest

from outrider import LLM, OutriderError, SamplingParams
from outrider.core.params import AUTO
from outrider.core.planner import FixedPlanner
from outrider.drafting.plan.cost_planner import CostPlanner
from outrider.drafting.plan.store import PlanFile, model_fingerprint, proposer_name, restored
from outrider.engine.default_proposer import default_proposer
from outrider.models.loader.embedded import embedded
from outrider.runtime.atomic_files import check_writable, write_whole
from tests.drafting.plan.test_plan import costs, simulate
from tests.lab.tune.commands import CONSTANT, FIFTH, PROMPTS, invoke

pytestmark = pytest.mark.usefixtures("quick")


def unsuccessful_planner():
    """Return a planner whose draft tokens were all rejected."""
    planner = CostPlanner(costs(CONSTANT, FIFTH), max_draft_tokens=12)
    simulate(planner, 1, [0.0] * 12, 400, took=lambda k: (1.0, 0.2 * k))
    return planner


def test_restored_planner_continues_where_it_stopped():
    fresh = CostPlanner(costs(CONSTANT, FIFTH), max_draft_tokens=12)
    restored_planner = CostPlanner(costs(CONSTANT, FIFTH), max_draft_tokens=12)
    state = json.loads(json.dumps(unsuccessful_planner().state()))
    state["proposers"][0]["idle_rounds"] = 0  # so that no trial is due now
    restored_planner.restore(state)
    seconds = {"took": lambda k: (1.0, 0.2 * k)}
    assert restored_planner.state() == state
    fresh_ks = simulate(fresh, 1, [0.0] * 12, 30, **seconds)
    restored_ks = simulate(restored_planner, 1, [0.0] * 12, 30, **seconds)
    assert fresh_ks[0] > restored_ks[0] == 0
    assert sum(fresh_ks) > 2 * sum(restored_ks)


def test_restored_planner_has_the_free_trials_of_a_new_engine():
    """Its texts may differ from those of the process that saved the state."""
    original = unsuccessful_planner()
    restored_planner = CostPlanner(costs(CONSTANT, FIFTH), max_draft_tokens=12)
    restored_planner.restore(original.state())
    seconds = {"took": lambda k: (1.0, 0.2 * k)}
    assert not any(simulate(original, 1, [0.0] * 12, 30, **seconds))
    restored_ks = simulate(restored_planner, 1, [0.0] * 12, 30, **seconds)
    assert restored_ks[0] > 0
    assert not any(restored_ks[8:])


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("proposers"),
        lambda state: state["proposers"].append(state["proposers"][0]),
        lambda state: state["proposers"][0].pop("tau"),
        lambda state: state["proposers"][0]["reached"].pop(),
        lambda state: state["proposers"][0].update(tau=float("nan")),
        lambda state: state["proposers"][0].update(accepted=[-1.0] * 12),
        lambda state: state["proposers"][0].update(reached=[0.0] * 12, accepted=[0.0] * 12),
        *(
            lambda state, name=name, value=value: state["proposers"][0].update({name: value})
            for name, values in {
                "idle_rounds": [float("inf"), float("nan"), 1e308, 10**400, "5", None, [], True, 1.5, -1],
                "estimates_acceptance": ["no", 0, None, []],
                "reached": ["abcdefghijkl", None, 4.0, [[4.0]] * 12, ["4"] * 12, [1e308] * 12, [True] * 12],
                "accepted": [[float("inf")] * 12, {"0": 1}],
                "token_cost": [float("inf"), 1e308, "1", None, [1.0]],
                "tau": [1e308, float("inf"), "2", None, True, 10**400],
                "drafted": [float("-inf"), 1e308],
            }.items()
            for value in values
        ),
    ],
)
def test_damaged_plan_is_an_error(tmp_path, damage):
    file = PlanFile(tmp_path / "plan.json", target=embedded("mini"), proposer="ngram")
    planner = unsuccessful_planner()
    file.save(planner)
    document = json.loads((tmp_path / "plan.json").read_text())
    damage(document["planner"])
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(OutriderError, match="is damaged; delete it"):
        file.restore(planner)


@pytest.mark.parametrize("name", ["token_cost", "tau", "nodes", "drafted", "seen"])
@pytest.mark.parametrize("value", [0.0, 1e-300, 1e14])
def test_extreme_values_of_a_plan_can_be_used(name, value):
    planner = unsuccessful_planner()
    state = planner.state()
    state["proposers"][0][name] = value
    planner.restore(state)
    simulate(planner, 2, [0.5] * 12, 200, took=lambda k: (1.0, 0.2 * k))
    assert json.dumps(planner.state(), allow_nan=False)


def test_plan_is_only_for_its_models(tmp_path):
    def plan(proposer="ngram", target="mini", **options):
        return PlanFile(tmp_path / "plan.json", target=embedded(target), proposer=proposer, **options)

    plan().restore(unsuccessful_planner())  # no effect without a file
    assert not list(tmp_path.iterdir())
    plan(" ngram ").save(unsuccessful_planner())
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    plan().restore(unsuccessful_planner())
    with pytest.raises(OutriderError, match="belongs to proposer ngram, not suffix; use another plan file"):
        plan("suffix").restore(unsuccessful_planner())
    for other in (plan(target="nano"), plan(quantize="int8")):
        with pytest.raises(OutriderError, match="was learned with other models"):
            other.restore(unsuccessful_planner())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "it is not UTF-8 text"),
        (b"{", "is not a plan file"),
        (b"[]", "is not a plan file"),
        (b"[" * 100_000, "is not a plan file"),
        (b'{"format": "outrider plan", "version": 0}', "has version 0, and this program reads version 3"),
    ],
)
def test_file_that_is_not_a_plan(tmp_path, content, message):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(OutriderError, match=message):
        PlanFile(tmp_path / "plan.json", target=embedded("mini"), proposer="ngram").restore(unsuccessful_planner())


def test_files_are_written_atomically(tmp_path):
    write_whole(tmp_path / "a.json", "one")
    write_whole(tmp_path / "a.json", "two")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["two"]
    with pytest.raises(OutriderError, match=r"b.json cannot be written \(No such file or directory\)"):
        write_whole(tmp_path / "nowhere/b.json", "three")


def test_model_hash_depends_on_the_weights(tmp_path):
    assert model_fingerprint(embedded("mini")) != model_fingerprint(embedded("nano"))
    copy = tmp_path / "copy"
    shutil.copytree(embedded("nano"), copy)
    assert model_fingerprint(copy) == model_fingerprint(embedded("nano"))
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(bytes(weights))
    assert model_fingerprint(copy) != model_fingerprint(embedded("nano"))
    assert proposer_name(FixedPlanner) == "outrider.core.planner:FixedPlanner"


def test_proposer_name_does_not_depend_on_the_path(tmp_path, monkeypatch):
    nano = embedded("nano")
    link = tmp_path / "link"
    link.symlink_to(nano)
    monkeypatch.chdir(nano.parent)
    names = [f"draft:{nano}", "draft:@nano", "draft:nano", "draft: ./nano/", f"draft:{link}", default_proposer(None)]
    assert {proposer_name(name) for name in names} == {"draft:nano"}
    assert proposer_name(f' merge( ngram , tree:"{nano}" )') == "merge(ngram,tree:nano)"
    assert proposer_name(f"retrieval:{nano}:3") == "retrieval:nano:3"
    assert proposer_name("ngram:1-3") == "ngram:1-3" != proposer_name("ngram")
    assert proposer_name("draft:elsewhere/nano") == "draft:elsewhere/nano"


def test_plan_works_with_every_name_of_its_draft(tmp_path):
    plan = tmp_path / "plan.json"
    for name in (default_proposer(None), "draft:@nano", f"draft:{embedded('nano')}"):
        restored(plan, unsuccessful_planner(), target=None, proposer=name, quantize=None).save(unsuccessful_planner())


def test_plan_path_is_checked_before_loading(tmp_path):
    with pytest.raises(OutriderError, match=r"plan.json cannot be written \(No such file .*\); name a file in"):
        make_llm(plan=tmp_path / "nowhere" / "plan.json")
    with pytest.raises(OutriderError, match=r"cannot be written \(Is a directory\)"):
        check_writable(tmp_path)
    with pytest.raises(OutriderError, match=r"cannot be written \(File name too long\)"):
        check_writable(tmp_path / ("x" * 1000))
    (tmp_path / "file").touch()
    with pytest.raises(OutriderError, match=r"cannot be written \(Not a directory\)"):
        check_writable(str(tmp_path / "file" / "plan.json"))
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def make_llm(**options):
    return LLM(None, max_num_seqs=2, max_model_len=96, dtype="float32", threads=1, **{"k": AUTO, **options})


def test_output_is_the_same_with_a_plan(tmp_path):
    prompts = [prompt["prompt"] for prompt in PROMPTS]
    params = SamplingParams(max_tokens=16)
    plan = tmp_path / "plan.json"
    plain = [completion.token_ids for completion in make_llm(k=0).generate(prompts, params)]
    for options in ({}, {"plan": plan}, {"plan": plan}):
        assert [completion.token_ids for completion in make_llm(**options).generate(prompts, params)] == plain
    before = json.loads(plan.read_text())
    llm = make_llm(plan=plan)
    assert llm.parts.planner.state() == before["planner"]
    for _ in llm.stream(PROMPTS[0]["prompt"], params):
        pass
    assert json.loads(plan.read_text()) != before


def test_plan_needs_k_auto(tmp_path):
    with pytest.raises(OutriderError, match="needs k auto, and k is 4; use k auto, or no plan"):
        make_llm(plan=tmp_path / "plan.json", k=4)
    with pytest.raises(OutriderError, match="needs the planner of k auto, and another planner was given"):
        make_llm(plan=tmp_path / "plan.json", planner=FixedPlanner(2))


def test_plans_on_the_command_line(tmp_path, prompts):
    plan = tmp_path / "plan.json"
    options = ["--k", "auto", "--plan", plan, "--proposer", "ngram", "--max-tokens", "6"]
    result = invoke("run", *options, PROMPTS[0]["prompt"])
    assert result.exit_code == 0, result.output
    saved = json.loads(plan.read_text())
    bench_options = ["--prompts", prompts, "--limit", "1", "--repeats", "1"]
    assert invoke("bench", *options, *bench_options).exit_code == 0
    assert json.loads(plan.read_text())["planner"] != saved["planner"]
    for command, arguments in (("run", ["x"]), ("bench", bench_options)):
        result = invoke(command, "--plan", plan, "--k", "4", *arguments)
        assert result.exit_code == 2
        assert "use k auto, or no plan" in result.stderr
    result = invoke("run", "--k", "auto", "--plan", plan, "--proposer", "suffix", "x")
    assert result.exit_code == 2
    assert "belongs to proposer ngram, not suffix" in result.stderr
