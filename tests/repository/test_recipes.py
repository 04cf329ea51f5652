"""Recipes run from end to end, in the smallest size."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.core.params import SamplingParams
from outrider.llm import LLM
from outrider.models.loader.embedded import embedded
from outrider.train.data.prompts import read_prompts
from recipes.arithmetic import grpo
from recipes.arithmetic.problems import is_right, pairs_below, split
from recipes.correction import measure, pairs
from recipes.correction import train as train_correction
from recipes.family import prompts, train
from recipes.family.corpus import is_for_validation, read_texts
from recipes.heads import prompts as head_prompts
from recipes.heads import train as train_head
from recipes.hybrid import heal
from recipes.hybrid import train as train_hybrid
from recipes.moe import train as train_moe
from recipes.moe.model import cluster
from recipes.moe.routing import balance_loss
from recipes.sizes import Size, parse_size
from tests.helpers.recipes import run_recipe

WORDS = ["the", "cat", "and", "a", "dog", "sat", "on", "one", "red", "mat", "while", "two", "men", "went", "home"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "deep").mkdir()
    chance = random.Random(3)
    for i in range(40):
        lines = [" ".join(chance.choices(WORDS, k=9)) + f" {i}" for _ in range(8)]
        (folder / "deep" / f"{i}.txt").write_text("\n".join(lines))
    (folder / "talk.md").write_text("<|user|>the cat<|end|><|assistant|>sat on the mat<|end|>" * 9)
    (folder / "picture").write_bytes(bytes(range(256)))
    (folder / "empty.txt").write_text("\n")
    return folder


def test_arithmetic(tmp_path):
    sizes = ["--steps", "2", "--problems", "1", "--samples", "2", "--max-tokens", "3", "--limit", "3"]
    result = run_recipe(grpo.main, "--model", embedded("nano"), "--checkpoint", tmp_path, *sizes)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line.get("step") for line in lines] == [None, 1, 2, None]
    assert lines[1]["logprob_error"] < 1e-3
    trained, held_out = split(pairs_below(10))
    assert (len(trained), len(held_out)) == (80, 20)
    assert not set(trained) & set(held_out)
    assert is_right("7 + 5 = 12", 12)
    assert not is_right("12 or 13", 12)
    assert not is_right("", 0)


def test_texts_are_those_that_can_be_read(texts):
    found = dict(read_texts(texts))
    assert len(found) == 41
    assert 0 < sum(map(is_for_validation, found)) < 10
    assert [path.name for path, _ in read_texts(texts, [".md"])] == ["talk.md"]


@pytest.fixture(scope="module")
def family(texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("family")
    sizes = "--vocab 320 --target 2x64 --draft 1x32 --tokens 32000 --batch 8 --sequence 64 --context 128 --lr 3e-3"
    result = run_recipe(train.main, texts, "--out", out, "--device", "cpu", *sizes.split())
    assert result.exit_code == 0, result.output
    return out, json.loads(result.stdout.splitlines()[-1])


def test_a_family_learns(family):
    _, report = family
    assert report["vocab"] == 320
    assert report["target"]["parameters"] > report["draft"]["parameters"]
    for role in ("target", "draft"):
        assert report[role]["validation_nats"] < 3.5  # 5.8 is what knowing nothing costs
    assert 0.2 < report["agreement"] <= 1


def test_a_family_speculates(family):
    out, _ = family
    llm = LLM(out / "target", proposer=f"draft:{out / 'draft'}", dtype="float32", k=2, max_num_seqs=1)
    plain = LLM(out / "target", proposer="none", dtype="float32", max_num_seqs=1)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    ours, theirs = (each.generate("<|endoftext|>the cat", params)[0] for each in (llm, plain))
    assert ours.token_ids == theirs.token_ids
    assert ours.stats.tau > 1
    assert llm.parts.tokenizer.encode("<|user|>") == [1]
    assert len(llm.parts.end_ids) == 2
    talk = llm.encode_chat([{"role": "user", "content": "cat"}])
    assert llm.parts.tokenizer.decode(talk) == "<|endoftext|><|user|>cat<|end|><|assistant|>"


def test_texts_become_prompts(texts, tmp_path):
    out, held = tmp_path / "prompts.jsonl", tmp_path / "held.jsonl"
    words = ["--each", 3, "--times", 5, "--special", "<|user|>", "--special", "", "--longest", 200]
    result = run_recipe(prompts.main, texts, "--out", out, "--held-out", held, *words)
    assert result.exit_code == 0, result.output
    found, aside = read_prompts([str(out)]), read_prompts([str(held)])
    said = {path: "<|endoftext|>" + text for path, text in read_texts(texts)}
    assert sum(each.prompt == "<|endoftext|><|user|>" for each in found) == 5
    assert sum(each.prompt == "<|endoftext|>" for each in found) == 5
    for some, is_held in ((found, False), (aside, True)):
        cut = [each for each in some if each.category != "dialogue"]
        assert len(cut) > 2
        homes = [text for path, text in said.items() if is_for_validation(path) is is_held]
        assert all(any(each.prompt in text and not text.endswith(each.prompt) for text in homes) for each in cut)
        assert {each.category for each in cut} <= {"txt", "md"}
        assert all(40 <= len(each.prompt.removeprefix("<|endoftext|>")) <= 200 for each in cut)


def test_recipes_say_what_is_wrong(texts, tmp_path):
    (tmp_path / "none").mkdir()
    for words in ((train.main, tmp_path / "none"), (prompts.main, tmp_path / "none"),
                  (train_head.main, embedded("nano"), "--texts", tmp_path / "none")):  # fmt: skip
        result = run_recipe(*words, "--out", tmp_path / "out")
        assert result.exit_code == 2
        assert "holds no text" in " ".join(result.output.replace("│", " ").split())
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "one.txt").write_text("the cat sat on the mat\n" * 9)
    few = [tmp_path / "few", "--out", tmp_path / "x"]
    assert run_recipe(prompts.main, *few).exit_code == 0
    result = run_recipe(prompts.main, *few, "--held-out", tmp_path / "y")
    assert result.exit_code == 2
    assert "leave --held-out out" in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "y").exists()
    assert run_recipe(prompts.main, texts, "--out", tmp_path / "x", "--shortest", 9, "--longest", 8).exit_code == 2


def test_a_head_is_trained_on_prompts_made_from_files(tmp_path):
    code = 'import os\n\ndef area(width, height):\n    """Return the area."""\n    return width * height\n'
    for i in range(20):
        (tmp_path / f"{i}.py").write_text(f"# {i}\n{code}")
    (tmp_path / "broken.py").write_text("def")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "dangling.py").symlink_to(tmp_path / "missing")
    (tmp_path / "notes.md").write_text("# Notes\n\nThe cat sat on the mat.\n" * 9)
    lines = head_prompts.make_prompts(tmp_path, 70, 0)
    assert lines == head_prompts.make_prompts(tmp_path, 70, 0)
    assert len(lines) == 70
    assert {line["category"] for line in lines} >= {"code_completion", "description", "code_edit", "word_problem"}
    function = code[code.index("def") :].strip()
    for line in lines:
        (message,) = line["messages"]
        if line["category"] in ("code_edit", "description"):
            assert message["content"].endswith(f"```python\n{function}\n```")
    out = tmp_path / "head"
    words = ["--out", out, "--texts", tmp_path, "--minutes", 0.02, "--prompts", 64, "--vocab", 512, "--kind", "mtp"]
    result = run_recipe(train_head.main, embedded("nano"), *words, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["steps"] > 0
    assert (out / "model.safetensors").stat().st_size < 1e6
    assert (out / "README.md").exists()


@pytest.fixture(scope="module")
def correction(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prose")
    chance = random.Random(4)
    for i in range(40):
        lines = ["# " + " ".join(chance.choices(WORDS, k=11)) for _ in range(6)]
        (folder / f"{i}.py").write_text("\n".join(lines))
    out = tmp_path_factory.mktemp("correction")
    sizes = "--vocab 300 --target 2x48 --draft 1x48 --steps 30 --batch 8 --rate 0.2"
    result = run_recipe(train_correction.main, folder, "--out", out, *sizes.split())
    assert result.exit_code == 0, result.output
    return folder, out, json.loads(result.stdout.splitlines()[-1])


def test_typos_change_words():
    text = "the cat sat on the red mat while two men went home"
    assert pairs.with_typos(text, 0, random.Random(0)).source == text
    pair = pairs.with_typos(text, 1, random.Random(0))
    assert pair.text == text
    changed = [old != new for old, new in zip(text.split(), pair.source.split(), strict=True)]
    assert sum(changed) > len(changed) // 2
    assert list(pairs.prose_lines(f"x = 1\n# {text}\nshort line\n{text} {{}}")) == [text]


@pytest.mark.slow
def test_a_correction_pair_trains_and_is_measured(correction):
    folder, out, report = correction
    assert report["target"]["parameters"] > report["draft"]["parameters"]
    for role in ("target", "draft"):
        assert report[role]["validation_nats"] < 5.3  # 5.7 is what knowing nothing costs
    again = run_recipe(train_correction.main, folder, "--out", out, "--vocab", 300, "--steps", 30)
    assert again.exit_code == 0, again.output
    kept = json.loads(again.stdout.splitlines()[-1])
    assert kept["target"]["parameters"] == report["target"]["parameters"]
    options = ["--target", out / "target", "--data", out / "sources.jsonl", "--eval-data", out / "held.jsonl"]
    sizes = ["--max-prompts", 32, "--max-tokens", 8, "--out", out / "head-medusa"]
    head = CliRunner().invoke(app, [*map(str, ["train", "medusa", *options, *sizes])])
    assert head.exit_code == 0, head.output
    result = run_recipe(measure.main, out, "--rounds", 1, "--limit", 3, "--batch", 2)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["texts"] == 3
    assert figures["none"]["tau"] == 1
    assert figures["draft"]["tau"] >= 1
    assert figures["head-medusa"]["tau"] >= 1


def test_correction_ends_with_the_time(correction, tmp_path):
    folder, _, _ = correction
    sizes = "--vocab 300 --target 1x48 --draft 1x48 --steps 1000000 --max-minutes 0.01 --batch 4"
    result = run_recipe(train_correction.main, folder, "--out", tmp_path, *sizes.split())
    assert result.exit_code == 0, result.output
    assert "the time is over after" in result.output


def test_correction_says_what_is_wrong(tmp_path):
    (tmp_path / "few").mkdir()
    result = run_recipe(train_correction.main, tmp_path / "few", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "too few lines of prose" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.slow
def test_a_mixture_of_experts_learns_from_a_dense_model(family, tmp_path):
    source = family[0] / "target"
    lines = [json.dumps({"prompt": f"<|endoftext|>the {word}"}) for word in WORDS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    words = ["--data", tmp_path / "prompts.jsonl", "--out", tmp_path / "moe", "--source", source]
    sizes = "--experts 4 --answers 60 --sequence 16 --layer-minutes 0.03 --minutes 0.06 --lr 3e-3"
    result = run_recipe(train_moe.main, *words, *sizes.split())
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["agreement"] > 0.6
    assert all(0 < share < 1 for share in (*report["usage"]["smallest"], *report["usage"]["largest"]))
    distinct = report["usage"]["distinct"]
    assert distinct["1"]["measured"] == distinct["1"]["uniform"] == 2
    assert 2 < distinct["8"]["measured"] <= 4
    llm = LLM(tmp_path / "moe", proposer="ngram", k=2, max_num_seqs=1, max_model_len=64)
    assert llm.parts.loaded.checkpoint.model.config.model_type == "mixtral"
    assert llm.generate("<|endoftext|>the cat", SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids


@pytest.mark.slow
def test_a_hybrid_is_trained_and_healed(family, tmp_path):
    """The source has two layers, one of which becomes a Mamba-2 layer."""
    data, hybrid, healed = tmp_path / "prompts.jsonl", tmp_path / "hybrid", tmp_path / "healed"
    data.write_text("\n".join(json.dumps({"prompt": f"<|endoftext|>the {word}"}) for word in WORDS))
    words = ["--data", data, "--out", hybrid, "--source", family[0] / "target", "--attention", "1", "--state", "8"]
    sizes = "--answers 40 --sequence 16 --layer-minutes 0.01 --minutes 0.04 --lr 3e-3"
    result = run_recipe(train_hybrid.main, *words, *sizes.split())
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["steps"] > 1
    assert report["layer_steps"] > 0
    assert 0.2 < report["agreement"] <= 1
    result = run_recipe(heal.main, hybrid, "--data", data, "--out", healed, "--minutes", 0.05, "--steps", 2)
    assert result.exit_code == 0, result.output
    old, new = (load_file(folder / "model.safetensors") for folder in (hybrid, healed))
    assert old.keys() == new.keys()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert "mtp.fc.weight" in changed
    assert all(name.startswith("mtp.") for name in changed)
    options = {"dtype": "float32", "device": "cpu", "max_num_seqs": 1, "max_model_len": 64}
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    drafted, plain = (LLM(healed, proposer=name, k=3, **options) for name in ("mtp", "none"))
    assert plain.parts.loaded.checkpoint.model.config.model_type == "bamba"
    ours, theirs = (llm.generate("<|endoftext|>the cat", params)[0] for llm in (drafted, plain))
    assert ours.token_ids == theirs.token_ids
    assert drafted.stats.draft_tokens


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--experts 2 --top 3", "use a smaller --top"),
        ("--width 24", "use a multiple of 16 from 16"),
        ("--answers 1 --sequence 32", "give more --answers"),
    ],
)
def test_a_mixture_of_experts_says_what_is_wrong(words, message, family, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "the cat"}))
    paths = ["--data", tmp_path / "prompts.jsonl", "--out", tmp_path / "moe", "--source", family[0] / "target"]
    result = run_recipe(train_moe.main, *paths, *words.split())
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_clusters_of_directions():
    generator = torch.Generator().manual_seed(0)
    directions = torch.eye(4, 8)
    points = directions.repeat_interleave(10, 0) * torch.rand(40, 1, generator=generator).add(0.5)
    labels, centers = cluster(points, 4, generator)
    assert centers.shape == (4, 8)
    assert set(labels.tolist()) == {0, 1, 2, 3}
    assert cluster(torch.ones(5, 8), 3, generator)[0].unique().tolist() == [0, 1, 2]


def test_balance_loss_is_one_for_even_use():
    even = torch.eye(4).repeat(5, 1) * 20 + torch.eye(4).roll(1, 0).repeat(5, 1) * 20
    assert float(balance_loss([even], 2)) == pytest.approx(1, abs=1e-3)
    collapsed = torch.tensor([[20.0, 20.0, 0.0, 0.0]]).repeat(20, 1)
    assert float(balance_loss([collapsed], 2)) == pytest.approx(2, abs=1e-3)


def test_sizes_are_checked_before_a_training(texts, tmp_path):
    assert parse_size("--target", "8x384", multiple=16) == Size(layers=8, width=384)
    for words, message in (
        ("--target 8", "use LAYERSxWIDTH, such as 8x384"),
        ("--draft 2x0", "use LAYERSxWIDTH, such as 8x384"),
        ("--draft 2x100", "--draft has width 100; use a multiple of 16"),
    ):
        result = run_recipe(train.main, texts, "--out", tmp_path / "family", *words.split())
        assert result.exit_code == 2
        assert message in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "family").exists()
