"""Training data: answers and hidden states, batches, prompts, the feature cache and the log."""

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
from outrider.core.prompts import Prompt
from outrider.core.types import Batch, DraftBudget, FinishReason, Request, SequenceState
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.drafting.propose.lookup.suffix import SuffixProposer
from outrider.engine.turns import Turns
from outrider.errors import OutriderError
from outrider.models.heads.description import AuxStates
from outrider.models.heads.files import save_tensors
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.train.data import prompts
from outrider.train.data.answers import Recorder, generate_samples
from outrider.train.data.batches import Collator, micro_batches, most_frequent_tokens, split_evenly
from outrider.train.data.feature_cache import FeatureCache
from outrider.train.loss.losses import parse
from outrider.train.report import log
from outrider.train.trainer import StepStats, Trainer, read_state
from tests.helpers import engines
from tests.helpers.train_setup import CPU, NANO, ConstantTrainee, make_batch, make_request, make_sample

# Answers and hidden states


@torch.inference_mode()
def _score_in_one_pass(target, tokens, layers):
    """Return states [L, layers, H] of a sequence scored in one pass, and the logits [V] after its last token."""
    seq = SequenceState(request=make_request(prompt=tuple(tokens)), slot=0, token_ids=list(tokens))
    target.cache.admit(0, tokens)
    batch = Batch(seqs=(seq,), start=(0,), feed=(tuple(tokens),), budget=DraftBudget((0,)))
    scores = target.score(batch, tree.empty(1, CPU))
    target.cache.release(0)
    return torch.stack([scores.feed_hidden_states[layer][0] for layer in layers], 1), scores.logits[0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("make_proposer", [NgramProposer, SuffixProposer])
def test_recorded_states_equal_states_of_one_pass(make_proposer, temperature):
    checkpoint = load_checkpoint(NANO, dtype="float32", device="cpu")
    target = make_target(checkpoint, slots=3, context=96)
    layers = (0, 1)
    target.export_hidden_states(layers)
    recorders = []

    def make_recorder(setup):
        recorders.append(Recorder(make_proposer(setup), layers))
        return recorders[0]

    engine = engines.make_engine(target, make_recorder, k=4, rows=3, chunk=16)
    texts = ["a b a b a b a b a b", "def f(x):\n    return x\n" * 3, "x", "1, 2, 3, 4, 1, 2, 3", "The cat"]
    prompts = [tuple(checkpoint.tokenizer.encode(text)) for text in texts]
    params = SamplingParams(temperature=temperature)
    requests = [
        Request(
            id=i, prompt_token_ids=prompt, params=params, seed=i, end_ids=checkpoint.end_ids, max_tokens=40 if i else 1
        )
        for i, prompt in enumerate(prompts)
    ]
    with torch.inference_mode():
        samples = {sample.id: sample for sample in generate_samples(engine, recorders[0], requests)}
    assert sorted(samples) == list(range(5))
    # The engine accepted draft tokens, so states of draft tokens are recorded.
    assert engine.stats.output_tokens > engine.stats.passes
    for sample in samples.values():
        assert sample.tokens[: sample.prompt] == prompts[sample.id]
        assert len(sample.states) == len(sample.tokens) - 1
        states, _ = _score_in_one_pass(target, sample.tokens[:-1], layers)
        assert torch.allclose(sample.states.float(), states, rtol=0.01, atol=1e-3)
    assert recorders[0].take(0) is None


def test_failed_request_gives_no_sample():
    seqs = [SimpleNamespace(request=make_request(id=i), finish_reason=None, token_ids=[1, 2, 3]) for i in range(2)]

    def step():
        for seq, reason in zip(seqs, (FinishReason.ERROR, FinishReason.LENGTH), strict=True):
            seq.finish_reason = reason
        return seqs

    engine = SimpleNamespace(add=lambda request: seqs[request.id], step=step, turns=Turns())
    recorder = SimpleNamespace(take=lambda id: (torch.zeros(4, 1, 8, dtype=torch.bfloat16), None))
    (sample,) = generate_samples(engine, recorder, [seq.request for seq in seqs])
    assert (sample.id, sample.tokens, len(sample.states)) == (1, (1, 2, 3), 2)


# Batches


def _collator(nano, ids=None, *, final=True):
    ids = torch.arange(nano.target.vocab) if ids is None else ids
    return Collator(AuxStates(layers=(1,), final=final), (1,), nano.tables, ids)


def test_target_probs_equal_those_of_transformers(nano):
    tokens = nano.checkpoint.tokenizer.encode("def add(a, b):\n    return a + b\n")
    states, _ = _score_in_one_pass(nano.target, tokens[:-1], (1,))
    texts = _collator(nano).collate([make_sample(tokens, states=states)], train_on_prompts=True)
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    expected = model(torch.tensor([tokens[:-1]])).logits[0].softmax(-1)
    assert texts.target_probs.shape == expected.shape
    assert torch.minimum(texts.target_probs, expected).sum(-1).min() > 0.97
    draft_ids = torch.tensor([3, 7, 300])
    draft_texts = _collator(nano, draft_ids).collate([make_sample(tokens, states=states)], train_on_prompts=True)
    assert torch.equal(draft_texts.target_probs, texts.target_probs[..., draft_ids])


def test_target_with_scaled_logits_is_rejected(nano):
    tokens = tuple(nano.checkpoint.tokenizer.encode("import os\nimport"))
    _collator(nano).check(nano.target, tokens)
    scaled = replace(nano.tables, head=nano.tables.head * 0.2)
    collator = Collator(AuxStates(layers=(1,), final=True), (1,), scaled, torch.arange(nano.target.vocab))
    with pytest.raises(OutriderError, match="its logits are scaled"):
        collator.check(nano.target, tokens)


def test_loss_mask_covers_answers_but_not_padding(nano):
    samples = [make_sample(range(9), prompt=4), make_sample(range(5), prompt=1), make_sample(range(3), prompt=3)]
    loss_mask = _collator(nano).collate(samples, train_on_prompts=False).loss_mask
    # Position t has the distribution after token t, so the last prompt token is trained, too.
    assert loss_mask.tolist() == [[False] * 3 + [True] * 5, [True] * 4 + [False] * 4, [False] * 8]
    everything = _collator(nano).collate(samples, train_on_prompts=True).loss_mask
    assert everything.tolist() == [[True] * 8, [True] * 4 + [False] * 4, [True] * 2 + [False] * 6]


def test_final_aux_states_are_normed(nano):
    sample = make_sample(range(6))
    raw = _collator(nano, final=False).collate([sample], train_on_prompts=True).aux_states
    final = _collator(nano, final=True).collate([sample], train_on_prompts=True).aux_states
    assert torch.equal(raw[0], sample.states.float())
    scale = raw.square().mean(-1, keepdim=True).add(nano.tables.epsilon).rsqrt()
    assert torch.allclose(final, raw * scale * nano.tables.norm, atol=1e-5)


def test_micro_batches_have_every_sample_once_and_respect_the_limit():
    rng = random.Random(2)
    samples = [make_sample(range(rng.randint(2, 30)), id=i, states=torch.zeros(0, 1, 8)) for i in range(40)]
    groups = micro_batches(samples, 60)
    assert sorted(sample.id for group in groups for sample in group) == list(range(40))
    for group in groups:
        assert len(group) == 1 or len(group) * max(len(sample.tokens) for sample in group) <= 60
    assert len(micro_batches(samples, 1)) == 40
    assert micro_batches([], 60) == []


def test_most_frequent_tokens_count_only_answers():
    samples = [make_sample([9, 9, 9, 5, 5, 3], prompt=3), make_sample([9, 7, 3, 7, 1], prompt=1)]
    assert most_frequent_tokens(samples, 10, 3, CPU).tolist() == [3, 5, 7]
    assert most_frequent_tokens(samples, 10, 4, CPU).tolist() == [1, 3, 5, 7]
    # Among tokens that do not occur, the smallest ids come first.
    assert most_frequent_tokens(samples, 10, 6, CPU).tolist() == [0, 1, 2, 3, 5, 7]


@pytest.mark.parametrize(("size", "count"), [(10, 3), (3, 8), (0, 4), (8, 8), (7, 1)])
def test_split_evenly(size, count):
    ranges = split_evenly(size, count)
    assert [i for indices in ranges for i in indices] == list(range(size))
    assert len(ranges) == count
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


# Prompts


def _file(folder, *lines, name="data.jsonl"):
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
    return str(path)


def test_read_prompts(tmp_path):
    turns = [{"role": "user", "content": "Hi"}]
    odd = "one\u2028two\x85three"  # characters that end a line in Unicode, but not in JSON lines
    file = _file(
        tmp_path,
        {"prompt": "a"},
        "",
        {"messages": turns, "prompt": "unused", "category": "talk"},
        json.dumps({"prompt": odd}, ensure_ascii=False),
        {"turns": ["Hi", "Ho"], "category": 3},
    )
    result = prompts.read_prompts([file, file], limit=6)
    assert [prompt.prompt for prompt in result] == ["a", None, odd, None, "a", None]
    assert result[1].messages == result[3].messages == tuple(turns)
    assert [prompt.category for prompt in result] == ["", "talk", "", "3", "", "talk"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"}', ":1: no prompt and no messages, but text; use"),
        ('{"prompt": ""}', ":1: prompt must be a string of at least one character"),
        ('{"prompt": 3}', ":1: prompt must be a string"),
        ("[1]", ":1: not a JSON object; write one object per line, like"),
        ('{"prompt"', ":1: not JSON"),
        (r'{"prompt": "\ud800"}', ":1: the text has half of a surrogate pair"),
        (r'{"messages": [{"role": "user", "content": "\udc00"}]}', ":1: the text has half of a surrogate pair"),
        ('{"messages": []}', "messages must be a list"),
        ('{"messages": [{"role": "user"}]}', "message 1 has no content"),
        ("", "holds no prompts"),
    ],
)
def test_invalid_prompt_lines_are_rejected(line, message, tmp_path):
    with pytest.raises(OutriderError, match=message):
        prompts.read_prompts([_file(tmp_path, line)])


def _prompt(text, category=""):
    return Prompt(id=text, category=category, prompt=text, messages=None)


def test_evaluation_prompts_are_held_out():
    common = [_prompt("<|user|>")] * 30
    rare = [_prompt(f"text {i}") for i in range(10)]
    train, held_out = prompts.split(common + rare, None, seed=3)
    assert len(held_out) == 2
    assert Counter(prompt.prompt for prompt in train + held_out) == Counter(prompt.prompt for prompt in common + rare)
    assert {prompt.prompt for prompt in train}.isdisjoint(prompt.prompt for prompt in held_out)
    assert prompts.split(common + rare, None, seed=3) == (train, held_out)
    assert len(prompts.split([_prompt(str(i)) for i in range(5000)], None, seed=0)[1]) == 64


def test_one_prompt_needs_evaluation_data(tmp_path):
    with pytest.raises(OutriderError, match="one prompt is not enough"):
        prompts.split([_prompt("a")], None, seed=0)
    file = _file(tmp_path, *({"prompt": f"{i}", "category": "ab"[i % 2]} for i in range(200)))
    train, held_out = prompts.split([_prompt("a")], file, seed=0)
    assert [prompt.prompt for prompt in train] == ["a"]
    assert Counter(prompt.category for prompt in held_out) == {"a": 32, "b": 32}


def test_messages_need_a_chat_template():
    class Tokenizer:
        chat_template = None
        bos_token_id = None

        def encode(self, text, **_):
            return list(text.encode())

    dialogue = Prompt(id="f:1", category="", prompt=None, messages=({"role": "user", "content": "Hi"},))
    with pytest.raises(OutriderError, match="f:1 has messages, and this target has no chat template"):
        prompts.encode_prompt(Tokenizer(), dialogue)
    assert prompts.encode_prompt(Tokenizer(), _prompt("ab")) == (97, 98)
    with pytest.raises(OutriderError, match="f:2: the text holds half of a surrogate pair"):
        prompts.encode_prompt(Tokenizer(), Prompt(id="f:2", category="", prompt="a\ud800", messages=None))


# The feature cache


def _cache(folder, gigabytes=1.0, origin="here", layers=(1,)):
    return FeatureCache(folder, gigabytes=gigabytes, origin=origin, layers=layers)


def test_cached_sample_is_read(tmp_path):
    sample = make_sample([1, 2, 3, 4], prompt=2)
    _cache(tmp_path).write(make_request(), sample)
    cached = _cache(tmp_path).read(make_request(id=7))
    assert (cached.id, cached.tokens, cached.prompt, cached.shared_kv) == (7, sample.tokens, 2, None)
    assert torch.equal(cached.states, sample.states)
    with_kv = replace(sample, shared_kv=torch.randn(3, 8).bfloat16())
    _cache(tmp_path, origin="with KV").write(make_request(), with_kv)
    assert torch.equal(_cache(tmp_path, origin="with KV").read(make_request()).shared_kv, with_kv.shared_kv)
    for other in (
        make_request(seed=1),
        make_request(temperature=0.5),
        make_request(limit=8),
        make_request(prompt=(1,)),
    ):
        assert _cache(tmp_path).read(other) is None
    assert _cache(tmp_path, origin="there").read(make_request()) is None


def test_cached_sample_with_more_layers_is_used(tmp_path):
    states = torch.randn(3, 4, 8).to(torch.bfloat16)
    sample = make_sample([1, 2, 3, 4], prompt=2, states=states)
    _cache(tmp_path, layers=(0, 2, 5, 7)).write(make_request(), sample)
    for layers, indices in (((7,), [3]), ((0, 5), [0, 2]), ((0, 2, 5, 7), [0, 1, 2, 3])):
        assert torch.equal(_cache(tmp_path, layers=layers).read(make_request()).states, states[:, indices])
    assert _cache(tmp_path, layers=(1, 7)).read(make_request()) is None


def test_cache_size_is_limited(tmp_path):
    sample = make_sample(range(101))
    sample_bytes = 100 * 128 * 2 + 8 * 101
    cache = _cache(tmp_path, gigabytes=2.5 * sample_bytes / 1e9)
    for seed in range(4):
        cache.write(make_request(seed=seed, prompt=(0,)), sample)
    is_cached = [bool(cache.read(make_request(seed=seed, prompt=(0,)))) for seed in range(4)]
    assert is_cached == [True, True, False, False]
    reopened = _cache(tmp_path, gigabytes=2.9 * sample_bytes / 1e9)
    reopened.write(make_request(seed=9, prompt=(0,)), sample)
    assert reopened.read(make_request(seed=9, prompt=(0,))) is None


def test_damaged_sample_is_ignored(tmp_path):
    cache = _cache(tmp_path)
    cache.write(make_request(), make_sample([1, 2, 3, 4], prompt=2))
    (file,) = tmp_path.glob("*/*.safetensors")
    file.write_bytes(file.read_bytes()[:-20])
    assert cache.read(make_request()) is None
    cache.write(make_request(), make_sample([1, 2, 3, 4], prompt=2))
    assert cache.read(make_request())


def test_full_disk_only_stops_caching(tmp_path, monkeypatch, caplog):
    cache = _cache(tmp_path)

    def raise_full(file, _):
        file.touch()
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", raise_full)
    cache.write(make_request(), make_sample([1, 2, 3], prompt=2))
    cache.write(make_request(seed=2), make_sample([1, 2, 3], prompt=2))
    assert caplog.text.count("no more states are cached") == 1
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_save_tensors_reports_a_full_disk():
    """torch.save itself only reports the position of its writer."""
    with pytest.raises(OSError, match="No space left on device"):
        save_tensors({"a": torch.zeros(100_000)}, Path("/dev/full"))


def test_cache_folder_that_is_a_file_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutriderError, match="give --cache-dir another folder"):
        _cache(tmp_path / "file")


# The log


def test_log_of_a_resumed_training_drops_later_cycles(tmp_path, monkeypatch):
    first = log.Log(tmp_path, begin=0, events=False)
    stats = [StepStats(loss=2.0, columns=5.0), StepStats(loss=1.0, columns=7.0)]
    for cycle in (1, 2, 3):
        first.add(
            cycle,
            stats,
            {"temperature 0": {"tau": cycle, "acceptance": [0.5]}},
            {"answers_per_prompt": 1.0, "ttt_length": 2.0},
        )
    assert log.read_log(tmp_path)[-1] == {
        "cycle": 3,
        "loss": 1.5,
        "alpha": [],
        "tokens": 12,
        "evaluation": {"temperature 0": {"tau": 3, "acceptance": [0.5]}},
        "seconds": {"answers_per_prompt": 1.0, "ttt_length": 2.0},
    }
    with (tmp_path / log.FILE).open("a") as file:
        file.write('{"cycle": 4, "lo')
    resumed = log.Log(tmp_path, begin=2, events=False)
    assert [line["cycle"] for line in resumed.lines] == [1, 2]
    assert resumed.last_evaluation["temperature 0"]["tau"] == 2
    assert log.read_log(tmp_path) == resumed.lines
    assert log.Log(tmp_path, begin=0, events=False).last_evaluation == {}


def test_log_on_a_full_disk_is_an_error(tmp_path, monkeypatch):
    opened = log.Log(tmp_path, begin=0, events=False)

    def raise_full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "open", raise_full)
    with pytest.raises(OutriderError, match=r"No space left on device.*; free some space"):
        opened.add(1, [StepStats()], {}, {})
    monkeypatch.setattr(Path, "write_text", raise_full)
    with pytest.raises(OutriderError, match="free some space"):
        log.Log(tmp_path, begin=0, events=False)


def test_tensorboard_events(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(OutriderError, match="pip install tensorboard"):
        log.Log(tmp_path, begin=0, events=True)
    calls = []
    writer = SimpleNamespace(add_scalar=lambda *args: calls.append(args), close=lambda: calls.append("closed"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=lambda folder: writer))
    opened = log.Log(tmp_path, begin=0, events=True)
    stats = StepStats(loss=2.0, columns=1.0)
    stats.add_alpha(0, torch.tensor([0.5]))
    opened.add(1, [stats], {"temperature 0": {"tau": 1.5, "acceptance": []}}, {})
    opened.close()
    assert calls == [("loss", 2.0, 1), ("alpha/1", 0.5, 1), ("tau/temperature 0", 1.5, 1), "closed"]


# The state of a training


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), "cannot be read .* use --overwrite"),
        (lambda file: file.write_bytes(b"garbage"), "cannot be read .* use --overwrite"),
        (lambda file: file.write_bytes(b""), "cannot be read .* use --overwrite"),
        (lambda file: torch.save({"other": 1}, file), "is not the state of a training; use --overwrite"),
        (lambda file: torch.save([1], file), "is not the state of a training"),
    ],
)
def test_damaged_state_is_rejected(damage, message, tmp_path):
    assert read_state(tmp_path) is None
    trainer = Trainer(ConstantTrainee(2, 11), losses=parse("ce"), steps=2, decay=0.8, lr=1e-3)
    trainer.train([make_batch(vocab=11)], progress=0.5)
    trainer.save(tmp_path, cycle=1, identity="me")
    assert read_state(tmp_path)["cycle"] == 1
    damage(tmp_path / "state.pt")
    with pytest.raises(OutriderError, match=message):
        read_state(tmp_path)
