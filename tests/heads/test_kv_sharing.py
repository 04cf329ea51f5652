"""Drafts that look at the target's own keys and values: what they can see, and that they see it as training did."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig
from transformers.utils import logging

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, SharedWeights
from outrider.errors import OutriderError
from outrider.heads.description import Scaling, SharedKV
from outrider.heads.files import read_target_info
from outrider.heads.store import filled, make_module, read_trained, write_head
from outrider.heads.targets.kv_sharing import KVSharingTarget
from outrider.heads.targets.registry import make_head_target
from outrider.llm import LLM
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import embedded
from outrider.loader.make import make_target
from outrider.propose.base import NoProposer
from outrider.propose.draft_model.trained_head import HeadProposer
from outrider.testing.drive import make_row
from outrider.train.data.answers import Recorder
from outrider.train.data.batches import Reader
from outrider.train.data.sample import Sample
from outrider.train.loss.losses import parse
from outrider.train.loss.unroll import unrolled
from outrider.train.model.kv_probe import find_view
from outrider.train.model.presets import Sizes, describe
from outrider.train.model.trainee import make_trainee
from outrider.train.trainer import Trainer
from tests.heads.test_block_heads import admit, batch_of, tell
from tests.helpers import tiny, train_setup
from tests.helpers.engines import make_engine, outputs, run
from tests.helpers.heads import shown
from tests.helpers.train_setup import make_settings, make_setup

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("kv_heads"))


@pytest.mark.parametrize(
    ("name", "layer", "rotary"),
    [("llama", 3, 1.0), ("olmo3", 3, 1.0), ("smollm3", 3, 0.0), ("llama4_text", 2, 0.0), ("gemma4_text", 3, 0.25)],
)
def test_the_last_layer_that_sees_everything_is_found(name, layer, rotary, shelf):
    """With how its keys were turned, if they were, whatever the config says."""
    target = shelf.target(name)
    view = find_view(target, target.share_weights())
    assert (view.layer, view.key_heads, view.rotary) == (layer, 2, rotary)
    assert (view.rope is not None) == (name == "gemma4_text")
    assert target.cache.length(0) == 0


@pytest.mark.parametrize("name", ["glm4", "deepseek_v3", "gpt_oss"])
def test_keys_that_lie_or_turn_otherwise_are_refused(name, shelf):
    """In pairs of neighbours, beside latents, or behind sinks."""
    target = shelf.target(name)
    with pytest.raises(OutriderError, match=r"turn in a way that is not known here; train mtp instead"):
        find_view(target, target.share_weights())
    with pytest.raises(OutriderError, match="this target does not export them"):
        find_view(target, replace(target.share_weights(), kv_view=None))


def kv_head(window=0, seed=0):
    view = SharedKV(layer=5, key_heads=2, dim=16, window=window)
    description = describe("kv-sharing", Sizes(hidden=64, layers=8, vocab=40, epsilon=1e-5, depth=2, view=view))
    torch.manual_seed(seed)
    module = make_module(description).eval().requires_grad_(False)
    for name, weight in module.named_parameters():
        if "norm" in name:
            weight += 0.5 * torch.randn(weight.shape)
    return module


def tables(memory):
    chance = torch.Generator().manual_seed(1)
    both = torch.randn(2, 40, 64, generator=chance)
    return SharedWeights(embedding=both[0], head=both[1], norm=torch.ones(64), epsilon=1e-5, kv_view=memory)


@pytest.mark.parametrize("slots", [[0, 1, 2], [2, 0, 3]])
@pytest.mark.parametrize("window", [0, 4])
def test_a_row_sees_its_own_entries_alone(window, slots):
    """Whoever is asked beside it, as many as the target has committed, and of these the window's."""
    pair = torch.randn(2, 4, 2, 32, 16)
    memory = shown(5, pair)
    head = make_head_target(kv_head(window), tables(memory), slots=4, context=32)
    assert isinstance(head, KVSharingTarget)
    texts, taps = {slots[0]: [1, 2, 3, 4, 5, 6, 7], slots[1]: [8, 9], slots[2]: [5, 6, 7, 8]}, torch.randn(4, 7, 1, 64)
    rows = [make_row(text, slot) for slot, text in texts.items()]
    head.known = dict.fromkeys(slots, 0)
    for row in rows:
        head.cache.admit(row.slot, row.token_ids)
    tell(head, rows, taps, [len(row.token_ids) - 1 for row in rows])
    batch, chain = batch_of(head, rows), tree.chain(torch.tensor([[3], [4], [5]]), (1, 1, 1))
    found = head.score(batch, tree.empty(3, CPU)).logits, head.score(batch, chain, 0).logits
    for b, row in enumerate(rows):
        begin = max(len(row.token_ids) - 1 - window, 0) if window else 0
        pair[:, row.slot, :, :begin] = torch.nan
        pair[:, row.slot, :, len(row.token_ids) - 1 :] = torch.nan
        alone = replace(batch, seqs=(row,), start=batch.start[b : b + 1], feed=batch.feed[b : b + 1])
        one = (
            head.score(alone, tree.empty(1, CPU)).logits,
            head.score(alone, tree.chain(chain.tokens[b : b + 1], (1,)), 0).logits,
        )
        for mine, all_of in zip(one, found, strict=True):
            torch.testing.assert_close(mine[0], all_of[b], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("slots", [[1, 2], [2], [3, 0, 2]])
def test_a_target_shows_the_slots_that_are_asked_for(slots, shelf):
    """In the order of asking, and what another pass left behind a shorter text is nothing but numbers."""
    target, chance = shelf.target("llama"), random.Random(8)
    rows = [tiny.admit(target, slot, tiny.text(chance, 5 + 3 * slot)) for slot in range(4)]
    feeds = tuple(tuple(row.token_ids) for row in rows)
    batch = Batch(seqs=tuple(rows), start=(0,) * 4, feed=feeds, draft_budget=(0,) * 4)
    target.score(batch, tree.empty(4, CPU))
    memory = target.share_weights().kv_view
    found = memory.entries(3, slots, 2, 14)
    for b, slot in enumerate(slots):
        alone = memory.entries(3, [slot], 0, len(feeds[slot]))
        for every, own in zip(found, alone, strict=True):
            assert torch.equal(every[b, :, : own.shape[2] - 2], own[0, :, 2:14])
            assert own.abs().sum() > 0
            assert every.shape[2] == 12
            assert every.isfinite().all()


def test_a_target_without_memory_is_refused():
    with pytest.raises(OutriderError, match="this target shows none; use another draft"):
        make_head_target(kv_head(), tables(None), slots=1, context=32)


def test_nothing_is_kept_of_a_text():
    pair = torch.randn(2, 1, 2, 32, 16)
    head = make_head_target(kv_head(), tables(shown(5, pair)), slots=1, context=32)
    rows = admit(head, [[1, 2, 3, 4, 5]])
    tell(head, rows, torch.randn(1, 4, 1, 64), [4])
    head.score(batch_of(head, rows), tree.empty(1, CPU))
    assert head.cache.bytes() == 4 * 64 * 4  # the states that it was told of, until the round is over


@pytest.fixture(scope="module")
def nano():
    return train_setup.house()


@torch.inference_mode()
def test_what_is_learned_from_is_what_the_target_has_cached(nano):
    """Through rounds with guesses, kept and lost, and rows that come and go."""
    target, tabled = nano.target, nano.tables
    recorders = []

    def make(setup):
        recorders.append(Recorder(HeadProposer(setup, draft), (1,), memory=tabled.kv_view, looked=(0, 1)))
        return recorders[0]

    torch.manual_seed(2)
    view = find_view(target, tabled)
    module = make_module(describe("kv-sharing", Sizes(hidden=128, layers=2, vocab=12288, epsilon=1e-5, view=view)))
    draft = make_head_target(module.eval().requires_grad_(False), tabled, slots=2, context=64)
    engine = make_engine(target, make, k=3, rows=2)
    rows = run(engine, [(1, 2, 3, 4), (5, 6), (7, 8, 9)], SamplingParams(temperature=1.0), limit=20, ends=frozenset())
    assert engine.stats.draft_tokens
    for row in rows:
        states, shown = recorders[0].take(row.request.id)
        assert shown.shape == (len(states), 2 * 2 * view.key_heads * view.dim)
        again = make_row(row.token_ids, 0)
        target.cache.admit(0, again.token_ids)
        feed = tuple(again.token_ids[: len(states)])
        target.score(Batch(seqs=(again,), start=(0,), feed=(feed,), draft_budget=(0,)), tree.empty(1, CPU))
        parts = [
            each[0].transpose(0, 1).flatten(1)
            for layer in (0, 1)
            for each in tabled.kv_view.entries(layer, [0], 0, len(feed))
        ]
        torch.testing.assert_close(shown, torch.cat(parts, 1).bfloat16(), atol=0.02, rtol=0.02)
        target.cache.release(0)


def test_training_lowers_the_loss_and_raises_what_is_kept(nano):
    target, tabled = nano.target, nano.tables
    target.export_hidden_states((1,))
    prompts = [nano.checkpoint.tokenizer.encode(text) for text in ("def add(a, b):", "The old man")]
    greedy = SamplingParams(temperature=0.0)
    said = outputs(run(make_engine(target, NoProposer, k=0, rows=2), prompts, greedy, limit=30, ends=frozenset()))
    torch.manual_seed(3)
    pupil = make_trainee("kv-sharing", make_settings(), make_setup(nano), tabled)
    samples = []
    for prompt, answer in zip(prompts, said, strict=True):
        row = make_row([*prompt, *answer], 0)
        target.cache.admit(0, row.token_ids)
        batch = Batch(seqs=(row,), start=(0,), feed=(tuple(row.token_ids[:-1]),), draft_budget=(0,))
        with torch.inference_mode():
            states = target.score(batch, tree.empty(1, CPU)).feed_hidden_states[1][0][:, None]
            keys, values = (each[0] for each in tabled.kv_view.entries(1, [0], 0, len(states)))
        shown = torch.cat([each.transpose(0, 1).flatten(1) for each in (keys, values)], 1)
        samples.append(
            Sample(id=0, tokens=tuple(row.token_ids), states=states.clone(), prompt=len(prompt), shown=shown.clone())
        )
        target.cache.release(0)
    reader = Reader(pupil.aux_states, (1,), tabled, pupil.ids, views=pupil.shared_kv)
    texts = reader.read(samples, everything=False)
    assert texts.shown[1][0].shape[:2] == (2, 1)
    trainer = Trainer(pupil, losses=parse("ce"), steps=3, decay=0.8, lr=3e-3)

    def tau():
        engine = make_engine(target, lambda setup: pupil.proposer(make_setup(nano)), k=3, rows=2)
        run(engine, prompts, greedy, limit=30, ends=frozenset())
        return engine.stats.tau

    before = tau()
    sums = [trainer.train([texts], progress=step / 50) for step in range(50)]
    assert sums[-1].loss < 0.5 * sums[0].loss
    assert tau() > before + 0.7
    assert len(list(unrolled(pupil.module, texts, 3, 0.5))) == 3


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
@torch.inference_mode()
def test_the_native_kernels_show_their_memory_too(tmp_path):
    checkpoint = load_checkpoint(embedded("mini"), dtype="bfloat16", device="cpu")
    targets = [make_target(checkpoint, slots=1, context=32, kernels=kernels) for kernels in ("native", "torch")]
    views = [find_view(target, target.share_weights()) for target in targets]
    assert views[0] == views[1]
    for target in targets:
        row = make_row(list(range(40, 56)), 0)
        target.cache.admit(0, row.token_ids)
        target.score(
            Batch(seqs=(row,), start=(0,), feed=(tuple(row.token_ids),), draft_budget=(0,)), tree.empty(1, CPU)
        )
    ours, theirs = (target.share_weights().kv_view.entries(7, [0], 0, 16)[0].float() for target in targets)
    assert (ours - theirs).norm() < 0.03 * theirs.norm()
    module = make_module(describe("kv-sharing", Sizes(hidden=384, layers=8, vocab=12288, epsilon=1e-5, view=views[0])))
    write_head(tmp_path / "head", module, dtype=torch.bfloat16)
    options = {
        "dtype": "bfloat16",
        "kernels": "native",
        "max_num_seqs": 2,
        "max_model_len": 96,
        "verifier": "walk",
        "k": 3,
    }
    llms = [LLM(proposer=proposer, **options) for proposer in (f"draft:{tmp_path / 'head'}", "none")]
    params = SamplingParams(temperature=1.0, max_tokens=24, seed=4)
    got, wanted = (llm.generate(["def add(a, b):", "The cat"], params) for llm in llms)
    assert [each.token_ids for each in got] == [each.token_ids for each in wanted]
    assert sum(each.stats.draft_tokens for each in got)


@pytest.fixture
def assistant(shelf, tmp_path, monkeypatch):
    """transformers' own for the small Gemma 4, random; its folder, and that of its target."""
    layers = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16}
    sizes = {
        "vocab_size": tiny.VOCAB,
        "hidden_size": 24,
        "intermediate_size": 40,
        "sliding_window": tiny.WINDOW - 1,
    }
    none = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 3}
    text = Gemma4TextConfig(**layers, **heads, **sizes, **none, initializer_range=0.3)
    torch.manual_seed(6)
    with monkeypatch.context() as patch:  # or a model all of whose layers share keys cannot be made
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(lambda it: ["reuse"] * it.num_hidden_layers))
        model = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=text, backbone_hidden_size=32)).eval()
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name or "layer_scalar" in name:
            weight.data += 0.3 * torch.randn(weight.shape)
    logging.disable_progress_bar()
    model.save_pretrained(tmp_path / "assistant")
    return model, tmp_path / "assistant", shelf.folder("gemma4_text")


@torch.inference_mode()
def test_an_assistant_is_transformers_own(assistant, shelf):
    """Beside a small Gemma 4, guess by guess, on transformers' own keys and values."""
    theirs, folder, target_folder = assistant
    found = read_trained(folder, read_target_info(target_folder))
    it = found.description
    assert [view.layer for view in it.shared_kv] == [2, 2, 3]
    assert it.shared_kv[2].rope.scaling is Scaling.PROPORTIONAL
    module = filled(it, found.weights, where="assistant").eval()
    text = tiny.text(random.Random(5), 21)
    target = shelf.target("gemma4_text", (3,))
    row = tiny.admit(target, 0, text)
    batch = Batch(seqs=(row,), start=(0,), feed=(tuple(text[:-1]),), draft_budget=(0,))
    scores = target.score(batch, tree.empty(1, CPU))
    head = make_head_target(module, target.share_weights(), slots=4, context=64)
    head.known = {0: 0}
    head.cache.admit(0, text)
    tell(head, [row], scores.feed_hidden_states[3][0][None, :, None], [20])
    ours = [head.score(batch_of(head, [row]), tree.empty(1, CPU)).logits[0, 0]]
    chain = tree.chain(torch.tensor([[7]]), (1,))
    ours.append(head.score(batch_of(head, [row]), chain, 0).logits[0, 0])
    model = shelf.model("gemma4_text")
    said = model(input_ids=torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
    state, memory = said.hidden_states[-1][:, -1:], said.shared_kv_states
    for token, logits in zip((text[-1], 7), ours, strict=True):
        both = torch.cat([model.get_input_embeddings()(torch.tensor([[token]])), state], -1)
        out = theirs(
            inputs_embeds=both,
            position_ids=torch.tensor([[20]]),
            shared_kv_states=dict(memory),
            attention_mask=torch.ones(1, 21),
        )
        torch.testing.assert_close(logits, out.logits[0, 0], atol=1e-3, rtol=1e-3)
        state = out.last_hidden_state


def test_an_assistant_guesses_for_its_target(assistant):
    _, folder, target = assistant
    options = {"dtype": "float32", "device": "cpu", "max_num_seqs": 2, "max_model_len": 64, "verifier": "walk", "k": 3}
    llms = [LLM(target, proposer=proposer, **options) for proposer in (f"draft:{folder}", f"tree:{folder}", "none")]
    chance = random.Random(7)
    prompts = [tiny.text(chance, length) for length in (19, 4, 30)]
    draft, grown, wanted = (
        llm.generate(prompts, SamplingParams(temperature=1.0, max_tokens=20, seed=3)) for llm in llms
    )
    for got in (draft, grown):
        assert [each.token_ids for each in got] == [each.token_ids for each in wanted]
        assert sum(each.stats.draft_tokens for each in got)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "gemma4_assistant"
