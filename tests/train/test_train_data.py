"""What a draft learns from, and what is kept: texts and states, batches, prompts, files."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, FinishReason, Request, SequenceState
from outrider.errors import OutriderError
from outrider.heads.description import AuxStates
from outrider.heads.files import save_tensors
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.make import make_target
from outrider.measure.prompts import Prompt
from outrider.propose.lookup.ngram import NgramProposer
from outrider.propose.lookup.suffix import SuffixProposer
from outrider.train.data import prompts
from outrider.train.data.answers import Recorder, written
from outrider.train.data.batches import Reader, frequent, parts, shares
from outrider.train.data.feature_cache import FeatureCache
from outrider.train.loss.losses import parse
from outrider.train.report import log
from outrider.train.trainer import Sums, Trainer, read_state
from tests.helpers import engines, train_setup
from tests.helpers.train_setup import CPU, NANO, Still, make_request, make_sample, make_texts


@pytest.fixture(scope="module")
def nano():
    return train_setup.house()


# Texts and their states


@torch.inference_mode()
def _fresh(target, tokens, layers):
    """States [L, layers, H] of a text that is read at once, and [V] logits after its end."""
    row = SequenceState(request=make_request(prompt=tuple(tokens)), slot=0, token_ids=list(tokens))
    target.cache.admit(0, tokens)
    batch = Batch(seqs=(row,), start=(0,), feed=(tuple(tokens),), draft_budget=(0,))
    scores = target.score(batch, tree.empty(1, CPU))
    target.cache.release(0)
    return torch.stack([scores.feed_hidden_states[at][0] for at in layers], 1), scores.logits[0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("make", [NgramProposer, SuffixProposer])
def test_states_are_those_of_a_fresh_pass(make, temperature):
    checkpoint = load_checkpoint(NANO, dtype="float32", device="cpu")
    target = make_target(checkpoint, slots=3, context=96)
    layers = (0, 1)
    target.export_hidden_states(layers)
    kept = []

    def recorder(setup):
        kept.append(Recorder(make(setup), layers))
        return kept[0]

    engine = engines.make_engine(target, recorder, k=4, rows=3, chunk=16)
    texts = ["a b a b a b a b a b", "def f(x):\n    return x\n" * 3, "x", "1, 2, 3, 4, 1, 2, 3", "The cat"]
    asked = [tuple(checkpoint.tokenizer.encode(text)) for text in texts]
    params = SamplingParams(temperature=temperature)
    requests = [
        Request(
            id=i, prompt_token_ids=prompt, params=params, seed=i, end_ids=checkpoint.end_ids, max_tokens=40 if i else 1
        )
        for i, prompt in enumerate(asked)
    ]
    with torch.inference_mode():
        samples = {sample.id: sample for sample in written(engine, kept[0], requests)}
    assert sorted(samples) == list(range(5))
    assert engine.stats.output_tokens > engine.stats.passes  # guesses were kept, and their states with them
    for sample in samples.values():
        assert sample.tokens[: sample.prompt] == asked[sample.id]
        assert len(sample.states) == len(sample.tokens) - 1
        states, _ = _fresh(target, sample.tokens[:-1], layers)
        assert torch.allclose(sample.states.float(), states, rtol=0.01, atol=1e-3)
    assert kept[0].take(0) is None


def test_a_text_that_failed_is_left_out():
    rows = [
        SimpleNamespace(request=make_request(id=i), finish_reason=finish, token_ids=[1, 2, 3])
        for i, finish in enumerate((None, FinishReason.ERROR, FinishReason.LENGTH))
    ]
    steps = iter([rows])
    engine = SimpleNamespace(add=lambda request: None, busy=iter([True, False]).__next__, step=lambda: next(steps))
    states = SimpleNamespace(take=lambda id: (torch.zeros(4, 1, 8, dtype=torch.bfloat16), None))
    (sample,) = written(engine, states, [])
    assert (sample.id, sample.tokens, len(sample.states)) == (2, (1, 2, 3), 2)


def _reader(nano, ids=None, *, final=True):
    ids = torch.arange(nano.target.vocab) if ids is None else ids
    return Reader(AuxStates(layers=(1,), final=final), (1,), nano.tables, ids)


def test_laws_are_the_targets_own(nano):
    """Place by place, against transformers' own pass over the same text."""
    tokens = nano.checkpoint.tokenizer.encode("def add(a, b):\n    return a + b\n")
    states, _ = _fresh(nano.target, tokens[:-1], (1,))
    texts = _reader(nano).read([make_sample(tokens, states=states)], everything=True)
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    wanted = model(torch.tensor([tokens[:-1]])).logits[0].softmax(-1)
    assert texts.target_probs.shape == wanted.shape
    assert torch.minimum(texts.target_probs, wanted).sum(-1).min() > 0.97
    few = torch.tensor([3, 7, 300])
    some = _reader(nano, few).read([make_sample(tokens, states=states)], everything=True)
    assert torch.equal(some.target_probs, texts.target_probs[..., few])


def test_a_target_whose_head_does_more_is_refused(nano):
    text = tuple(nano.checkpoint.tokenizer.encode("import os\nimport"))
    _reader(nano).check(nano.target, text)
    scaled = replace(nano.tables, head=nano.tables.head * 0.2)
    reader = Reader(AuxStates(layers=(1,), final=True), (1,), scaled, torch.arange(nano.target.vocab))
    with pytest.raises(OutriderError, match="its logits are scaled or capped"):
        reader.check(nano.target, text)


def test_answers_are_learned_from_and_padding_never(nano):
    samples = [make_sample(range(9), prompt=4), make_sample(range(5), prompt=1), make_sample(range(3), prompt=3)]
    learn = _reader(nano).read(samples, everything=False).learn
    # Place t holds the law after token t: the prompt's last one leads to the answer's first.
    assert learn.tolist() == [
        [False] * 3 + [True] * 5,
        [True] * 4 + [False] * 4,
        [False] * 8,
    ]
    everything = _reader(nano).read(samples, everything=True).learn
    assert everything.tolist() == [[True] * 8, [True] * 4 + [False] * 4, [True] * 2 + [False] * 6]


def test_taps_are_normed_where_they_are_final(nano):
    sample = make_sample(range(6))
    raw, final = (_reader(nano, final=how).read([sample], everything=True).aux_states for how in (False, True))
    assert torch.equal(raw[0], sample.states.float())
    scale = raw.square().mean(-1, keepdim=True).add(nano.tables.epsilon).rsqrt()
    assert torch.allclose(final, raw * scale * nano.tables.norm, atol=1e-5)


def test_parts_hold_every_sample_once_and_no_more_than_they_may():
    chance = random.Random(2)
    samples = [make_sample(range(chance.randint(2, 30)), id=i, states=torch.zeros(0, 1, 8)) for i in range(40)]
    found = parts(samples, 60)
    assert sorted(sample.id for part in found for sample in part) == list(range(40))
    for part in found:
        assert len(part) == 1 or len(part) * max(len(sample.tokens) for sample in part) <= 60
    assert len(parts(samples, 1)) == 40
    assert parts([], 60) == []


def test_frequent_tokens_are_those_of_answers():
    samples = [make_sample([9, 9, 9, 5, 5, 3], prompt=3), make_sample([9, 7, 3, 7, 1], prompt=1)]
    assert frequent(samples, 10, 3, CPU).tolist() == [3, 5, 7]
    assert frequent(samples, 10, 4, CPU).tolist() == [1, 3, 5, 7]
    assert frequent(samples, 10, 6, CPU).tolist() == [0, 1, 2, 3, 5, 7]  # of those never written the smallest


@pytest.mark.parametrize(("things", "count"), [(10, 3), (3, 8), (0, 4), (8, 8), (7, 1)])
def test_shares_are_nearly_equal(things, count):
    runs = shares(things, count)
    assert [at for run in runs for at in run] == list(range(things))
    assert len(runs) == count
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


# Prompts


def _file(folder, *lines, name="data.jsonl"):
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
    return str(path)


def test_prompts_are_read(tmp_path):
    turns = [{"role": "user", "content": "Hi"}]
    odd = "one\u2028two\x85three"  # ends of lines for some, and none in JSON
    file = _file(
        tmp_path,
        {"prompt": "a"},
        "",
        {"messages": turns, "category": "talk"},
        json.dumps({"prompt": odd}, ensure_ascii=False),
    )
    found = prompts.read_prompts([file, file], limit=5)
    assert [each.prompt for each in found] == ["a", None, odd, "a", None]
    assert found[1].messages == tuple(turns)
    assert [each.category for each in found] == ["", "talk", "", "", "talk"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"}', ":1: no prompt; give lines like"),
        ('{"prompt": ""}', ":1: no prompt"),
        ('{"prompt": 3}', ":1: no prompt"),
        ("[1]", ":1: not a JSON object; use"),
        ('{"prompt"', ":1: not JSON"),
        (r'{"prompt": "\ud800"}', ":1: half a character"),
        (r'{"messages": [{"role": "user", "content": "\udc00"}]}', ":1: half a character"),
        ('{"messages": []}', "messages must be a list"),
        ('{"messages": [{"role": "user"}]}', "messages must be a list"),
        ("", "holds no prompts"),
    ],
)
def test_prompts_that_cannot_be_read(line, message, tmp_path):
    with pytest.raises(OutriderError, match=message):
        prompts.read_prompts([_file(tmp_path, line)])


def _prompt(text, category=""):
    return Prompt(id=text, category=category, prompt=text, messages=None)


def test_what_is_measured_on_is_not_trained_on():
    common, rare = [_prompt("<|user|>")] * 30, [_prompt(f"text {i}") for i in range(10)]
    train, held = prompts.split(common + rare, None, seed=3)
    assert len(held) == 2
    assert Counter(each.prompt for each in train + held) == Counter(each.prompt for each in common + rare)
    assert {each.prompt for each in train}.isdisjoint(each.prompt for each in held)
    assert prompts.split(common + rare, None, seed=3) == (train, held)
    assert len(prompts.split([_prompt(str(i)) for i in range(5000)], None, seed=0)[1]) == 64


def test_one_prompt_alone(tmp_path):
    with pytest.raises(OutriderError, match="one prompt is not enough"):
        prompts.split([_prompt("a")], None, seed=0)
    file = _file(tmp_path, *({"prompt": f"{i}", "category": "ab"[i % 2]} for i in range(200)))
    train, held = prompts.split([_prompt("a")], file, seed=0)
    assert [each.prompt for each in train] == ["a"]
    assert Counter(each.category for each in held) == {"a": 32, "b": 32}


def test_messages_need_a_template():
    class Tokens:
        chat_template = None

        def encode(self, text, **_):
            return list(text.encode())

    talk = Prompt(id="f:1", category="", prompt=None, messages=({"role": "user", "content": "Hi"},))
    with pytest.raises(OutriderError, match="f:1 holds messages, and this target has no chat template"):
        prompts.encoded(Tokens(), talk)
    assert prompts.encoded(Tokens(), _prompt("ab")) == (97, 98)
    with pytest.raises(OutriderError, match="f:2: the text holds half of a surrogate pair"):
        prompts.encoded(Tokens(), Prompt(id="f:2", category="", prompt="a\ud800", messages=None))


# On disk


def _keep(folder, gigabytes=1.0, origin="here", layers=(1,)):
    return FeatureCache(folder, gigabytes=gigabytes, origin=origin, layers=layers)


def test_samples_are_kept(tmp_path):
    sample = make_sample([1, 2, 3, 4], prompt=2)
    _keep(tmp_path).write(make_request(), sample)
    again = _keep(tmp_path).read(make_request(id=7))
    assert (again.id, again.tokens, again.prompt, again.shown) == (7, sample.tokens, 2, None)
    assert torch.equal(again.states, sample.states)
    looked = replace(sample, shown=torch.randn(3, 8).bfloat16())
    _keep(tmp_path, origin="looked").write(make_request(), looked)
    assert torch.equal(_keep(tmp_path, origin="looked").read(make_request()).shown, looked.shown)
    for other in (
        make_request(seed=1),
        make_request(temperature=0.5),
        make_request(limit=8),
        make_request(prompt=(1,)),
    ):
        assert _keep(tmp_path).read(other) is None
    assert _keep(tmp_path, origin="there").read(make_request()) is None


def test_what_was_kept_with_more_layers_will_do(tmp_path):
    states = torch.randn(3, 4, 8).to(torch.bfloat16)
    sample = make_sample([1, 2, 3, 4], prompt=2, states=states)
    _keep(tmp_path, layers=(0, 2, 5, 7)).write(make_request(), sample)
    for layers, at in (((7,), [3]), ((0, 5), [0, 2]), ((0, 2, 5, 7), [0, 1, 2, 3])):
        assert torch.equal(_keep(tmp_path, layers=layers).read(make_request()).states, states[:, at])
    assert _keep(tmp_path, layers=(1, 7)).read(make_request()) is None


def test_a_cache_is_bounded(tmp_path):
    sample = make_sample(range(101))
    held = 100 * 128 * 2 + 8 * 101
    kept = _keep(tmp_path, gigabytes=2.5 * held / 1e9)
    for seed in range(4):
        kept.write(make_request(seed=seed, prompt=(0,)), sample)
    assert [bool(kept.read(make_request(seed=seed, prompt=(0,)))) for seed in range(4)] == [True, True, False, False]
    again = _keep(tmp_path, gigabytes=2.9 * held / 1e9)
    again.write(make_request(seed=9, prompt=(0,)), sample)
    assert again.read(make_request(seed=9, prompt=(0,))) is None


def test_a_damaged_sample_is_not_there(tmp_path):
    kept = _keep(tmp_path)
    kept.write(make_request(), make_sample([1, 2, 3, 4], prompt=2))
    (file,) = tmp_path.glob("*/*.safetensors")
    file.write_bytes(file.read_bytes()[:-20])
    assert kept.read(make_request()) is None
    kept.write(make_request(), make_sample([1, 2, 3, 4], prompt=2))
    assert kept.read(make_request())


def test_a_full_disk_ends_the_keeping_alone(tmp_path, monkeypatch, caplog):
    kept = _keep(tmp_path)

    def full(file, _):
        file.touch()
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    kept.write(make_request(), make_sample([1, 2, 3], prompt=2))
    kept.write(make_request(seed=2), make_sample([1, 2, 3], prompt=2))
    assert caplog.text.count("no more states are kept") == 1
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_a_full_disk_is_called_that():
    """torch says where its writer stood."""
    with pytest.raises(OSError, match="No space left on device"):
        save_tensors({"a": torch.zeros(100_000)}, Path("/dev/full"))


def test_a_cache_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutriderError, match="give --cache-dir another folder"):
        _keep(tmp_path / "file")


def test_the_log_goes_on_where_the_weights_do(tmp_path, monkeypatch):
    first, sums = log.Log(tmp_path, begin=0, events=False), [Sums(loss=2.0, columns=5.0), Sums(loss=1.0, columns=7.0)]
    for wave in (1, 2, 3):
        first.add(
            wave,
            sums,
            {"temperature 0": {"tau": wave, "acceptance": [0.5]}},
            {"answers_per_prompt": 1.0, "ttt_length": 2.0},
        )
    assert log.read_log(tmp_path)[-1] == {
        "wave": 3,
        "loss": 1.5,
        "alpha": [],
        "tokens": 12,
        "held_out": {"temperature 0": {"tau": 3, "acceptance": [0.5]}},
        "seconds": {"answers_per_prompt": 1.0, "ttt_length": 2.0},
    }
    with (tmp_path / log.FILE).open("a") as file:
        file.write('{"wave": 4, "lo')
    again = log.Log(tmp_path, begin=2, events=False)
    assert [line["wave"] for line in again.lines] == [1, 2]
    assert again.figures["temperature 0"]["tau"] == 2
    assert log.read_log(tmp_path) == again.lines
    assert log.Log(tmp_path, begin=0, events=False).figures == {}


def test_a_log_that_cannot_be_written(tmp_path, monkeypatch):
    kept = log.Log(tmp_path, begin=0, events=False)

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OutriderError, match=r"No space left on device.*; free some space"):
        kept.add(1, [Sums()], {}, {})
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OutriderError, match="free some space"):
        log.Log(tmp_path, begin=0, events=False)


def test_tensorboard_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(OutriderError, match="pip install tensorboard"):
        log.Log(tmp_path, begin=0, events=True)
    seen = []
    writer = SimpleNamespace(add_scalar=lambda *what: seen.append(what), close=lambda: seen.append("closed"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=lambda where: writer))
    kept = log.Log(tmp_path, begin=0, events=True)
    sums = Sums(loss=2.0, columns=1.0)
    sums.see(0, torch.tensor([0.5]))
    kept.add(1, [sums], {"temperature 0": {"tau": 1.5, "acceptance": []}}, {})
    kept.close()
    assert seen == [("loss", 2.0, 1), ("alpha/1", 0.5, 1), ("tau/temperature 0", 1.5, 1), "closed"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), "cannot be read .* use --overwrite"),
        (lambda file: file.write_bytes(b"garbage"), "cannot be read .* use --overwrite"),
        (lambda file: file.write_bytes(b""), "cannot be read .* use --overwrite"),
        (lambda file: torch.save({"other": 1}, file), "is no state of a training; use --overwrite"),
        (lambda file: torch.save([1], file), "is no state of a training"),
    ],
)
def test_states_that_cannot_be_read(spoil, message, tmp_path):
    assert read_state(tmp_path) is None
    trainer = Trainer(Still(2, 11), losses=parse("ce"), steps=2, decay=0.8, lr=1e-3)
    trainer.train([make_texts(vocab=11)], progress=0.5)
    trainer.save(tmp_path, wave=1, identity="me")
    assert read_state(tmp_path)["wave"] == 1
    spoil(tmp_path / "state.pt")
    with pytest.raises(OutriderError, match=message):
        read_state(tmp_path)
