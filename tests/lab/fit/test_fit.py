"""Whole fits on a tiny model: run, interrupted and resumed, refused, and used by other commands."""

import json
import shutil
from collections import namedtuple

import pytest
from transformers import AutoModelForCausalLM

from outrider.core.config import QUANTIZE_BITS
from outrider.drafting.plan.pass_cost import CostModel, PassCost
from outrider.errors import OutriderError
from outrider.lab.audit.prompts import DEFAULT
from outrider.lab.common import turns
from outrider.lab.fit import checks, run, stages
from outrider.lab.fit.prompts import read_split
from outrider.lab.fit.settings import Settings, parse_ascending
from outrider.lab.fit.stages import compared_drafts
from outrider.lab.fit.state import State
from outrider.train.run import FACTS
from outrider.train.trainer import STATE
from tests.helpers.commands import invoke, succeed
from tests.helpers.configured import with_engine
from tests.helpers.gguf_files import SIZES, write_gguf
from tests.helpers.tiny import compiles, make_config, save
from tests.lab.fit.made_up import case, certificate, measured

WORDS = ["red", "green", "blue", "black", "white", "grey", "pink", "brown", "gold", "lime"]
PROMPTS = [{"category": "ab"[i % 2], "prompt": f"{word} {word} {word}"} for i, word in enumerate(WORDS)]
CHOSEN = measured(case("ngram", 2, 1.5)).advice
QUICK = {
    "--max-minutes": 0.002,
    "--measure-minutes": 5,
    "--proposers": "ngram;suffix",
    "--k": "2",
    "--max-tokens": 6,
    "--samples": 0,
    "--head": "mtp",
    "--dtype": "float32",
    "--kernels": "torch",
    "--threads": 1,
}


@pytest.fixture(autouse=True, scope="module")
def given_training_costs():
    """Nobody looks at speeds here, so costs need not be measured."""
    cost = PassCost(tokens=(1, 64), seconds=(1.0, 1.0), entry=0.0, pair=0.0)
    with pytest.MonkeyPatch.context() as patch:
        for user in ("train.run", "lab.tune.measure"):
            patch.setattr(
                f"outrider.{user}.known_costs", lambda _, drafts: [CostModel(target=cost, draft=cost) for _ in drafts]
            )
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save(
        tmp_path_factory.mktemp("fit") / "target",
        make_config("LlamaConfig", hidden_size=64, max_position_embeddings=256),
    )


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, PROMPTS)))
    return file


@pytest.fixture(scope="module")
def fit(target, prompts):
    """Runs `outrider fit`."""

    def run(out, *words, **other):
        options = {"--target": target, "--prompts": prompts, "--out": out} | QUICK | other
        return invoke("fit", *(word for pair in options.items() for word in pair), *words)

    return run


@pytest.fixture(scope="module")
def finished(fit, tmp_path_factory):
    """The folder of a finished fit, and its document."""
    out = tmp_path_factory.mktemp("finished") / "out"
    result = fit(out)
    assert result.exit_code == 0, result.output
    return out, json.loads(result.stdout.splitlines()[-1])


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "copied")


def finish(fit, out, **options):
    """Run a fit that must succeed, and return its document."""
    result = fit(out, **options)
    assert result.exit_code == 0, result.output
    return json.loads((out / "fit.json").read_text())


def forbid(patch, *names):
    def never(*_, **__):
        raise AssertionError("a finished stage is repeated")

    for name in names:
        patch.setattr(run, name, never)


def forget(folder, *stages):
    """Leave the state of a fit that was killed before these stages."""
    file = folder / "state.json"
    state = json.loads(file.read_text())
    for stage in stages:
        state["stages"].pop(stage, None)
    file.write_text(json.dumps(state))


def test_whole_fit(finished):
    out, document = finished
    assert (out / "head" / "model.safetensors").is_file()
    assert document["benchmark"] == "outrider fit"
    assert document["fit"]["complete"]
    assert document["fit"]["training"]["trained"]
    assert document["fit"]["training"]["steps"] >= 1
    arguments = json.loads((out / "head" / "training.json").read_text())["arguments"]
    assert arguments["loss"] == "ce:0.1,tv:0.9"
    measured = [option["proposer"] for option in document["fit"]["options"]]
    head = (out / "head").resolve()
    assert set(measured) == {"none", "ngram", "suffix", f"draft:{head}", *(name for name in measured if "best" in name)}
    assert len(measured) == 5
    assert json.loads((out / "fit.json").read_text()) == document
    held_out = (out / "prompts" / "held-out.jsonl").read_text().splitlines()
    assert not set(held_out) & set((out / "prompts" / "train.jsonl").read_text().splitlines())
    assert document["fit"]["prompts"] == {"train": 5, "held_out": 5}


def test_finished_fit_is_not_repeated(fit, copied, finished, monkeypatch):
    forbid(monkeypatch, "measure_proposers", "make_training", "train_head", "certify")
    result = fit(copied)
    assert result.exit_code == 0, result.output
    again = json.loads(result.stdout.splitlines()[-1])
    assert again["cases"] == finished[1]["cases"]


@pytest.mark.slow
@pytest.mark.skipif(not compiles(), reason="no C++ compiler here")
@pytest.mark.parametrize("source", ["file", "option"])
def test_head_is_trained_on_the_quantized_target(source, fit, tmp_path, monkeypatch):
    trained_on = []

    def record(settings, plan, training, progress):
        trained_on.append(training.setup.parts.target.kernels)
        return stages.train_head(settings, plan, training, progress)

    monkeypatch.setattr(run, "train_head", record)
    if source == "file":
        config = make_config("LlamaConfig", **SIZES, head_dim=32, max_position_embeddings=256)
        file = write_gguf(tmp_path / "target.gguf", AutoModelForCausalLM.from_config(config))
        options = {"--target": file, "--dtype": "auto", "--kernels": "auto"}
        kernels = "native Q8_0" if compiles() else "torch"
    else:
        options = {"--dtype": "auto", "--quantize": "int8"}
        kernels = "torch int8"
    document = finish(fit, tmp_path / "out", **options)
    assert trained_on == [kernels]
    assert document["kernels"] == kernels  # of the measurements
    measured = [option["proposer"] for option in document["fit"]["options"] if option["held_out"]]
    assert f"draft:{(tmp_path / 'out' / 'head').resolve()}" in measured


@pytest.mark.skipif(not compiles(), reason="no C++ compiler here")
def test_draft_model_is_compared_with_8_and_4_bits(fit, tmp_path, monkeypatch):
    """Its best weights are measured again, certified, and in the file that --config reads."""
    asked = []
    certified = []

    def record(settings, prompts, proposers, drafts, progress, **named):
        asked.append(dict(drafts))
        document = stages.measure_proposers(settings, prompts, proposers, drafts, progress, **named)
        for each in document["cases"]:
            fastest = each["draft_quantize"] == "int8"
            each["overall"] = {"value": 1.5 if fastest else 1.1, "low": None, "high": None}
        return document

    def certify(settings, target, advice, **_):
        certified.append(advice.draft_quantize)
        return certificate(True)

    draft = f"draft:{save(tmp_path / 'small', make_config('LlamaConfig', hidden_size=64))}"
    monkeypatch.setattr(run, "measure_proposers", record)
    monkeypatch.setattr(run, "certify", certify)
    options = {"--proposers": f"ngram;{draft}", "--kernels": "auto", "--max-minutes": 0, "--samples": 100}
    result = fit(tmp_path / "out", **options)
    assert result.exit_code == 0, result.output
    assert asked == [{draft: (None, "int8", "int4")}, {draft: ("int8",)}]
    assert certified == ["int8"]
    document = json.loads((tmp_path / "out" / "fit.json").read_text())
    weights = {case["draft_quantize"] for case in document["fit"]["first_measurement"]["cases"]}
    assert weights >= {None, "int8"}  # the logits of a random model may differ too much with 4 bits
    (chosen,) = (option for option in document["fit"]["options"] if option["verdict"] == "chosen")
    assert (chosen["proposer"], chosen["draft_quantize"]) == (draft, "int8")


def test_family_is_measured_as_drafts(fit, tmp_path):
    """A folder with the tokenizer of the target, smaller than it, is a proposer of the first measurement."""
    small = save(tmp_path / "models" / "small", make_config("LlamaConfig", hidden_size=32))
    words = {"--family": tmp_path / "models", "--max-minutes": 0, "--proposers": "ngram"}
    result = fit(tmp_path / "out", **words)
    document = json.loads(result.stdout.splitlines()[-1])
    (draft,) = document["fit"]["drafts"]
    assert draft["proposer"] == f"draft:{small}"
    assert draft["token_ms"] > 0
    assert any(f"--proposer draft:{small} --k 2" in line for line in document["fit"]["summary"])
    assert "draft models: small" in result.stderr
    assert "This takes 10 minutes at most: 10 minutes for the 2 measurements." in result.stderr
    outcome = fit(tmp_path / "none", **words | {"--family": small / "models"})
    assert "which is no folder; name folders" in one_line(outcome)


def test_only_drafts_with_full_weights_are_compared_in_8_and_4_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "draft_weight_bits", lambda *_, **__: 8)
    model = AutoModelForCausalLM.from_config(make_config("LlamaConfig", **SIZES))
    full, blocks = (f'draft:"{write_gguf(tmp_path / f"{kind}.gguf", model, kind)}"' for kind in ("F16", "Q8_0"))
    assert compared_drafts(Settings(out=str(tmp_path / "out")), [full, blocks, "ngram"]) == {
        full: (None, *QUANTIZE_BITS)
    }
    stored = {tmp_path / "F16.gguf": frozenset({"int8"})}  # the other file
    assert compared_drafts(Settings(out=str(tmp_path / "out")), [full, blocks], stored) == {full: (None, "int4")}


@pytest.mark.slow
def test_head_is_trained_on_a_hybrid(fit, tmp_path):
    layers = {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}
    config = make_config("BambaConfig", hidden_size=64, max_position_embeddings=256, **layers)
    document = finish(fit, tmp_path / "out", **{"--target": save(tmp_path / "target", config)})
    measured = [option["proposer"] for option in document["fit"]["options"] if option["held_out"]]
    assert f"draft:{(tmp_path / 'out' / 'head').resolve()}" in measured


def test_training_has_the_options_of_the_target(finished):
    facts = json.loads((finished[0] / "head" / FACTS).read_text())
    assert {name: facts["arguments"][name] for name in ("dtype", "kernels")} == {"dtype": "float32", "kernels": "torch"}


def test_both_temperatures_are_measured(finished):
    _, document = finished
    for stage in (document, document["fit"]["first_measurement"]):
        assert [plain["temperature"] for plain in stage["plain"]] == [0.0, 1.0]
        assert stage["advice"]["temperatures"] == [0.0, 1.0]
    for option in document["fit"]["options"]:
        assert [speed["temperature"] for speed in option["by_temperature"]] == [0.0, 1.0]
    assert set(document["fit"]["training"]["expected"]) == {"temperature 0", "temperature 1"}


def test_temperatures_are_a_list_as_in_tune():
    assert Settings(out="out").temperatures == (0.0, 1.0)
    assert parse_ascending("--temperature", "1,0,0.7,0") == (0.0, 0.7, 1.0)


def test_table_in_words(finished, fit, copied):
    result = fit(copied)
    for text in ("T=0", "T=1", "over plain decoding", "no weights", "Chosen:", "Use it: outrider run"):
        assert text in result.stdout
    for text in ("1 of 4: measure 2 proposers", "2 of 4: train a head", "3 of 4", "4 of 4: certify"):
        assert text in result.stderr


@pytest.mark.parametrize("command", ["run", "bench"])
def test_config_of_other_commands(command, finished, prompts, tmp_path):
    _, document = finished
    file = tmp_path / "fit.json"
    settings = document["settings"] | {"proposer": "suffix", "k": 2}
    file.write_text(json.dumps(document | {"settings": settings}))
    words = ["red red", "--max-tokens", "4"] if command == "run" else ["--prompts", str(prompts), "--max-tokens", "4"]
    words += ["--repeats", "1", "--limit", "1"] if command == "bench" else ["--json"]
    succeed(command, "--config", file, "--threads", "1", *words)


def test_certificate_of_chosen_proposer(fit, copied, monkeypatch):
    asked = []

    def audit(settings, *, console):
        asked.append((settings.engine.proposer, settings.engine.k))
        return {"passed": False, "replay": {"texts": 3}, "distribution": {"samples": 100, "tests": []}}

    monkeypatch.setattr(stages, "run_audit", audit)
    state = json.loads((copied / "state.json").read_text())
    for each in state["stages"]["final"]["cases"]:
        each["overall"] = {"value": 1.5 if each["proposer"] == "ngram" else 1.0, "low": None, "high": None}
    (copied / "state.json").write_text(json.dumps(state))
    result = fit(copied, **{"--samples": 100})
    assert result.exit_code == 1, result.output
    assert asked == [("ngram", 2)]
    document = json.loads((copied / "fit.json").read_text())
    assert (document["settings"]["proposer"], document["settings"]["k"]) == ("none", 0)
    assert document["fit"]["certificate"]["passed"] is False


@pytest.mark.slow
def test_real_audit(target, monkeypatch):
    monkeypatch.setattr("outrider.lab.audit.prompts.DEFAULT", DEFAULT[:2])
    settings = with_engine(Settings, out="out", target=str(target), samples=100, threads=1, kernels="torch")
    found = stages.certify(settings, target, CHOSEN, native=False, tokens_per_s=1e6)
    assert found["passed"] is True


def test_audit_that_does_not_fit_into_memory_is_left_out(target, monkeypatch):
    monkeypatch.setattr("outrider.models.loader.memory.free_memory", lambda: 1000)
    settings = with_engine(Settings, out="out", target=str(target), device="cpu")
    found = stages.certify(settings, target, CHOSEN, native=False, tokens_per_s=1e6)
    assert found["passed"] is None
    assert "are free" in found["reason"]


def test_ctrl_c_keeps_best_so_far_and_resumes(fit, tmp_path, monkeypatch):
    """Also if the training was saved and not recorded: it resumes from its own state."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    def interrupt_in(stage):
        with monkeypatch.context() as patch:
            patch.setattr(run, stage, interrupted)
            result = fit(out)
        assert result.exit_code == 130
        return result

    out = tmp_path / "out"
    assert "the same command continues" in interrupt_in("measure_proposers").stderr
    assert not (out / "fit.json").exists()
    result = interrupt_in("train_head")
    assert "Best so far" in result.stderr
    assert "The same command continues" in result.stderr
    document = json.loads((out / "fit.json").read_text())
    assert not document["fit"]["complete"]
    assert document["settings"]["proposer"] in ("none", "ngram", "suffix")
    first = document["fit"]["first_measurement"]
    interrupt_in("finalists")  # begins the stage after the training
    assert (out / "head" / STATE).is_file()
    steps = json.loads((out / "state.json").read_text())["stages"]["training"]["steps"]
    forget(out, "training")
    document = finish(fit, out)
    assert document["fit"]["complete"]
    assert document["fit"]["first_measurement"] == first
    assert document["fit"]["training"]["steps"] == steps


def test_resume_between_training_and_second_measurement(fit, copied, monkeypatch):
    forget(copied, "final", "certificate")
    forbid(monkeypatch, "make_training", "train_head")
    assert finish(fit, copied)["fit"]["complete"]


def test_finished_fit_leaves_no_state_of_its_training(finished):
    assert not (finished[0] / "head" / STATE).exists()
    assert not list(finished[0].glob("*.runs"))


def test_interrupted_measurement_resumes_from_its_runs(fit, tmp_path, monkeypatch):
    """Also that no head is trained in 0 minutes."""
    out = tmp_path / "out"
    unchanged, runs = turns.run, []

    def interrupt_later(*words):
        runs.append(words)
        if len(runs) > 14:
            raise KeyboardInterrupt
        return unchanged(*words)

    with monkeypatch.context() as patch:
        patch.setattr(turns, "run", interrupt_later)
        result = fit(out, **{"--max-minutes": 0})
    assert result.exit_code == 130
    assert "Its runs so far are kept" in result.stderr
    stored = (out / "first.runs").read_text().splitlines()
    assert len(stored) > 2
    document = finish(fit, out, **{"--max-minutes": 0})
    assert [plain["batches"] for plain in document["fit"]["first_measurement"]["plain"]] == [5, 5]
    assert not (out / "first.runs").exists()
    assert not (out / "head").exists()
    assert {option["proposer"] for option in document["fit"]["options"]} == {"none", "ngram", "suffix"}


@pytest.mark.slow
def test_more_minutes_train_the_head_of_a_finished_fit_anew(fit, copied, finished):
    document = finish(fit, copied, **{"--max-minutes": 0.05})
    assert document["fit"]["training"]["minutes"] == 0.05
    assert document["fit"]["training"]["steps"] > finished[1]["fit"]["training"]["steps"]
    assert document["fit"]["first_measurement"] == finished[1]["fit"]["first_measurement"]


@pytest.mark.slow
def test_head_that_does_not_fit_is_left_out(fit, tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OutriderError("this target has no hidden states")

    monkeypatch.setattr(run, "make_training", refused)
    result = fit(tmp_path / "named")
    assert result.exit_code == 2
    assert "this target has no hidden states" in result.stderr
    assert "Finished stages are kept" in result.stderr
    result = fit(tmp_path / "auto", **{"--head": "auto"})
    assert result.exit_code == 0, result.output
    assert "No head was trained: this target has no hidden states." in result.stdout


def one_line(result):
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    (error,) = [line for line in lines if line.startswith("error:")]
    return error


def test_changed_options_are_refused(fit, copied, prompts, tmp_path):
    error = one_line(fit(copied, **{"--temperature": 1}))
    assert "a fit with other values of temperature (0,1 there, 1 here); use the same" in error
    other = tmp_path / "other.jsonl"
    other.write_text(prompts.read_text() + '\n{"prompt": "more"}')
    assert "other values of prompts; use" in one_line(fit(copied, **{"--prompts": other}))
    assert "--overwrite" in one_line(fit(copied, **{"--k": "4", "--max-tokens": 5}))
    moved = tmp_path / "moved.jsonl"
    moved.write_text(prompts.read_text())
    assert fit(copied, **{"--prompts": moved}).exit_code == 0


def test_overwrite_starts_again(finished, tmp_path):
    out = shutil.copytree(finished[0], tmp_path / "out")
    assert State.open(out, {}, overwrite=True).get("first") is None
    assert not (out / "fit.json").exists()
    assert not (out / "head").exists()


def test_head_of_another_program_is_not_removed(tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text("{}")
    State.open(tmp_path, {}, overwrite=True)
    assert (tmp_path / "head" / "config.json").exists()


def test_damaged_state_is_refused(fit, copied):
    (copied / "state.json").write_text('{"version": 1')
    assert "state.json cannot be read; use another --out, or --overwrite" in one_line(fit(copied))


@pytest.mark.slow
def test_full_disk_is_one_line_and_keeps_finished_stages(fit, copied, monkeypatch):
    forget(copied, "final", "certificate")
    before = (copied / "state.json").read_text()

    def full(self, *_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        unchanged = stages.measure_proposers

        def filling(*words, **named):
            document = unchanged(*words, **named)
            patch.setattr("pathlib.Path.write_text", full)
            return document

        patch.setattr(run, "measure_proposers", filling)
        error = one_line(fit(copied))
    assert "No space left on device" in error
    assert "the same command continues" in error
    assert (copied / "state.json").read_text() == before
    assert (copied / "head" / "model.safetensors").exists()
    assert fit(copied).exit_code == 0


def test_disk_that_is_full_before_the_first_result(fit, finished, tmp_path, monkeypatch):
    def filling(*_, **__):
        monkeypatch.setattr("outrider.lab.fit.state.write_whole", lambda *_: refuse())
        return finished[1]["fit"]["first_measurement"]

    def refuse():
        raise OutriderError("state.json cannot be written (No space left on device)")

    monkeypatch.setattr(run, "measure_proposers", filling)
    error = one_line(fit(tmp_path / "out"))
    assert error.endswith("state.json cannot be written (No space left on device)")  # and no word of finished stages
    assert not (tmp_path / "out" / "fit.json").exists()


def test_too_little_memory_is_reported_before_loading(fit, tmp_path, monkeypatch):
    forbid(monkeypatch, "measure_proposers")
    monkeypatch.setattr("outrider.models.loader.memory.free_memory", lambda: 100_000)
    error = one_line(fit(tmp_path / "out"))
    assert "GB in memory, and 0.0001 GB are free" in error
    assert not (tmp_path / "out").exists()


def test_too_little_disk_is_reported_before_loading(fit, tmp_path, monkeypatch):
    forbid(monkeypatch, "measure_proposers")
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: usage(2000, 1000, 1000))
    error = one_line(fit(tmp_path / "out"))
    assert "a head of kind mtp and the state of its training take 0.01" in error
    assert "GB are free" in error


def test_missing_target_is_reported(fit, tmp_path):
    assert "is not a folder" in one_line(fit(tmp_path / "out", **{"--target": tmp_path / "nowhere"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--head": "eagle9"}, "--head eagle9 is unknown; use auto, eagle3"),
        ({"--proposers": "ngrams"}, "did you mean ngram"),
        ({"--k": "many"}, "--k is 'many'"),
        ({"--samples": 50}, "use at least 100, or 0"),
        ({"--measure-minutes": 0}, "--measure-minutes is 0"),
        ({"--temperature": "0,-1"}, "temperature is -1"),
        ({"--temperature": "hot"}, "--temperature is 'hot'; use up to 64 numbers such as 0,0.7,1"),
        ({"--draft-window": 8}, "--draft-window is 8; use at least 16 tokens"),
        ({"--draft-candidates": 64}, "draft heads support no --draft-candidates; leave it out, or set --max-minutes 0"),
        ({"--draft-window": 32, "--head": "medusa"}, "heads of kind medusa support no --draft-window"),
        ({"--draft-window": 32, "--max-minutes": 0}, "none of ngram, suffix has a draft that reads the text"),
        (
            {"--draft-quantize": "int4", "--head": "medusa", "--kernels": "auto"},
            "heads of kind medusa support no --draft-quantize",
        ),
        ({"--draft-quantize": "int4", "--kernels": "torch"}, "draft_quantize is int4, and kernels is torch"),
    ],
)
def test_wrong_options(options, message, fit, tmp_path):
    assert message in one_line(fit(tmp_path / "out", **options))
    assert not (tmp_path / "out").exists()


def test_too_few_prompts(fit, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(map(json.dumps, [*PROMPTS[:7], *PROMPTS[:7]])))
    error = one_line(fit(tmp_path / "out", **{"--prompts": few}))
    assert "has 7 different prompts, and fit needs 8 at batch 1" in error
    assert not (tmp_path / "out").exists()


def test_batch_that_is_too_large_for_the_embedded_prompts():
    with pytest.raises(
        OutriderError, match=r"the embedded set has \d+ different prompts.*give --prompts FILE with more"
    ):
        read_split(None, batch=99, seed=0)


def test_messages_without_chat_template(fit, tmp_path):
    talk = tmp_path / "talk.jsonl"
    lines = [{"messages": [{"role": "user", "content": word}]} for word in WORDS]
    talk.write_text("\n".join(map(json.dumps, lines)))
    assert "chat template" in one_line(fit(tmp_path / "out", **{"--prompts": talk}))


def test_split_takes_prompts_of_all_categories(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"category": "common", "prompt": f"{i}"} for i in range(90)]
    lines += [{"category": "rare", "prompt": f"rare {i}"} for i in range(10)]
    file.write_text("\n".join(map(json.dumps, lines)))
    split = read_split(str(file), batch=1, seed=0)
    assert (len(split.held_out), len(split.train)) == (25, 75)
    assert sum(prompt.category == "rare" for prompt in split.held_out) == 10
    assert read_split(str(file), batch=1, seed=0) == split
    assert read_split(str(file), batch=1, seed=1) != split
    assert len(read_split(str(file), batch=40, seed=0).held_out) == 40


def test_embedded_prompts_are_enough():
    split = read_split(None, batch=8, seed=0)
    assert len(split.held_out) == 8
    assert len({prompt.category for prompt in split.held_out}) == 8
