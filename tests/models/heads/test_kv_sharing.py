"""Draft heads that attend to the target's keys and values: what they attend to, and agreement with training."""

import json
import random
from dataclasses import replace

import pytest
import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig
from transformers.utils import logging

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.proposer import NoProposer
from outrider.core.types import Batch, DraftBudget, SharedWeights
from outrider.drafting.propose.draft_model.trained_head import HeadProposer
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.heads.description import Centroids, Scaling, SharedKV
from outrider.models.heads.files import read_target_info
from outrider.models.heads.modules.centroids import CentroidHead, init_centroids
from outrider.models.heads.store import import_head, load_module, make_module, write_head
from outrider.models.heads.targets.kv_sharing import KVSharingTarget
from outrider.models.heads.targets.registry import make_head_target
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.testing.drive import make_seq
from outrider.train.data.answers import Recorder
from outrider.train.data.batches import Collator
from outrider.train.data.sample import Sample
from outrider.train.loss.losses import parse
from outrider.train.loss.unroll import unrolled
from outrider.train.model.kv_probe import find_shared_kv, find_sliding_kv
from outrider.train.model.presets import Sizes, describe
from outrider.train.model.trainee import make_trainee
from outrider.train.trainer import Trainer
from tests.helpers import tiny, train_setup
from tests.helpers.engines import make_engine, outputs, run
from tests.helpers.heads import make_kv_view
from tests.helpers.train_setup import make_settings, make_setup
from tests.models.heads.drive_head import CPU, admit, next_batch, note_states, random_head


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Small random models of many families."""
    return tiny.Shelf(tmp_path_factory.mktemp("kv_heads"))


@pytest.mark.parametrize(
    ("name", "layer", "rotary"),
    [("llama", 3, 1.0), ("olmo3", 3, 1.0), ("smollm3", 3, 0.0), ("llama4_text", 2, 0.0), ("gemma4_text", 3, 0.25)],
)
def test_last_layer_with_full_attention_is_found(name, layer, rotary, shelf):
    """The rotary positions of its keys are found by a probe, not from the config."""
    target = shelf.target(name)
    shared = find_shared_kv(target, target.share_weights())
    assert (shared.layer, shared.key_heads, shared.rotary) == (layer, 2, rotary)
    assert (shared.rope is not None) == (name == "gemma4_text")
    assert target.cache.length(0) == 0


@pytest.mark.parametrize("name", ["glm4", "deepseek_v3", "gpt_oss"])
def test_unsupported_keys_are_rejected(name, shelf):
    """Interleaved rotary positions, latent attention and attention sinks are not supported."""
    target = shelf.target(name)
    with pytest.raises(OutriderError, match=r"of the keys in layer \d of this target is not supported; use mtp"):
        find_shared_kv(target, target.share_weights())
    with pytest.raises(OutriderError, match="this target does not export them"):
        find_shared_kv(target, replace(target.share_weights(), kv_view=None))


def make_kv_head(window=0, seed=0):
    """Return a module that attends to layer 5 of its target."""
    shared = SharedKV(layer=5, key_heads=2, dim=16, window=window)
    sizes = Sizes(hidden=64, layers=8, vocab=40, epsilon=1e-5, depth=2, view=shared)
    return random_head(describe("kv-sharing", sizes), seed)


def make_tables(kv_view):
    """Return the weights of a target with these keys and values."""
    embedding, lm_head = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(1))
    return SharedWeights(embedding=embedding, head=lm_head, norm=torch.ones(64), epsilon=1e-5, kv_view=kv_view)


@pytest.mark.parametrize("slots", [[0, 1, 2], [2, 0, 3]])
@pytest.mark.parametrize("window", [0, 4])
def test_sequence_attends_only_to_its_own_entries(window, slots):
    """It attends to the committed entries of its slot, or to the last ones in a window, whatever the batch."""
    target_kv = torch.randn(2, 4, 2, 32, 16)
    head = make_head_target(make_kv_head(window), make_tables(make_kv_view(5, target_kv)), slots=4, context=32)
    assert isinstance(head, KVSharingTarget)
    texts = {slots[0]: [1, 2, 3, 4, 5, 6, 7], slots[1]: [8, 9], slots[2]: [5, 6, 7, 8]}
    aux_states = torch.randn(4, 7, 1, 64)
    seqs = [make_seq(text, slot) for slot, text in texts.items()]
    head.num_noted = dict.fromkeys(slots, 0)
    for seq in seqs:
        head.cache.admit(seq.slot, seq.token_ids)
    note_states(head, seqs, aux_states, [len(seq.token_ids) - 1 for seq in seqs])
    batch = next_batch(head, seqs)
    chain = tree.chain(torch.tensor([[3], [4], [5]]), (1, 1, 1))
    batch_logits = head.score(batch, tree.empty(3, CPU)).logits, head.score(batch, chain, 0).logits
    for b, seq in enumerate(seqs):
        length = len(seq.token_ids) - 1
        begin = max(length - window, 0) if window else 0
        # Invisible entries must not matter.
        target_kv[:, seq.slot, :, :begin] = torch.nan
        target_kv[:, seq.slot, :, length:] = torch.nan
        single_batch = replace(batch, seqs=(seq,), start=batch.start[b : b + 1], feed=batch.feed[b : b + 1])
        single_chain = tree.chain(chain.tokens[b : b + 1], (1,))
        single_logits = (
            head.score(single_batch, tree.empty(1, CPU)).logits,
            head.score(single_batch, single_chain, 0).logits,
        )
        for logits, expected in zip(single_logits, batch_logits, strict=True):
            torch.testing.assert_close(logits[0], expected[b], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("slots", [[1, 2], [2], [3, 0, 2]])
def test_target_exports_entries_of_given_slots(slots, shelf):
    """Entries are in the order of the slots. Beyond the end of a sequence they are finite."""
    target = shelf.target("llama")
    rng = random.Random(8)
    seqs = [tiny.admit(target, slot, tiny.text(rng, 5 + 3 * slot)) for slot in range(4)]
    feeds = tuple(tuple(seq.token_ids) for seq in seqs)
    batch = Batch(seqs=tuple(seqs), start=(0,) * 4, feed=feeds, budget=DraftBudget((0,) * 4))
    target.score(batch, tree.empty(4, CPU))
    kv_view = target.share_weights().kv_view
    entries = kv_view.entries(3, slots, 2, 14)
    for b, slot in enumerate(slots):
        slot_entries = kv_view.entries(3, [slot], 0, len(feeds[slot]))
        for tensor, slot_tensor in zip(entries, slot_entries, strict=True):
            assert torch.equal(tensor[b, :, : slot_tensor.shape[2] - 2], slot_tensor[0, :, 2:14])
            assert slot_tensor.abs().sum() > 0
            assert tensor.shape[2] == 12
            assert tensor.isfinite().all()


def test_target_that_exports_no_keys_and_values_is_rejected():
    with pytest.raises(OutriderError, match="which this target does not export; use another draft head"):
        make_head_target(make_kv_head(), make_tables(None), slots=1, context=32)


def test_head_has_no_kv_cache():
    target_kv = torch.randn(2, 1, 2, 32, 16)
    head = make_head_target(make_kv_head(), make_tables(make_kv_view(5, target_kv)), slots=1, context=32)
    seqs = admit(head, [[1, 2, 3, 4, 5]])
    note_states(head, seqs, torch.randn(1, 4, 1, 64), [4])
    head.score(next_batch(head, seqs), tree.empty(1, CPU))
    assert head.cache.bytes() == 4 * 64 * 4  # the four float32 states of this round


@pytest.fixture(scope="module")
def nano():
    return train_setup.load_target()


@torch.inference_mode()
def test_recorded_entries_equal_the_targets_cache(nano):
    """Training data is recorded in rounds with accepted and rejected draft tokens, while sequences start and end."""
    target = nano.target
    tables = nano.tables
    recorders = []

    def make_recorder(setup):
        recorders.append(Recorder(HeadProposer(setup, head), (1,), kv_view=tables.kv_view, kv_layers=(0, 1)))
        return recorders[0]

    torch.manual_seed(2)
    shared = find_shared_kv(target, tables)
    module = make_module(describe("kv-sharing", Sizes(hidden=128, layers=2, vocab=12288, epsilon=1e-5, view=shared)))
    head = make_head_target(module.eval().requires_grad_(False), tables, slots=2, context=64)
    engine = make_engine(target, make_recorder, k=3, rows=2)
    prompts = [(1, 2, 3, 4), (5, 6), (7, 8, 9)]
    seqs = run(engine, prompts, SamplingParams(temperature=1.0), limit=20, ends=frozenset())
    assert engine.stats.draft_tokens
    for seq in seqs:
        states, recorded = recorders[0].take(seq.request.id)
        assert recorded.shape == (len(states), 2 * 2 * shared.key_heads * shared.dim)
        fresh_seq = make_seq(seq.token_ids, 0)
        target.cache.admit(0, fresh_seq.token_ids)
        feed = tuple(fresh_seq.token_ids[: len(states)])
        batch = Batch(seqs=(fresh_seq,), start=(0,), feed=(feed,), budget=DraftBudget((0,)))
        target.score(batch, tree.empty(1, CPU))
        parts = [
            tensor[0].transpose(0, 1).flatten(1)
            for layer in (0, 1)
            for tensor in tables.kv_view.entries(layer, [0], 0, len(feed))
        ]
        torch.testing.assert_close(recorded, torch.cat(parts, 1).bfloat16(), atol=0.02, rtol=0.02)
        target.cache.release(0)


@pytest.mark.fast_cases("96")
@pytest.mark.parametrize("centroids", [0, 96])
def test_training_lowers_the_loss_and_raises_acceptance(centroids, nano):
    target = nano.target
    tables = nano.tables
    target.export_hidden_states((1,))
    prompts = [nano.checkpoint.tokenizer.encode(text) for text in ("def add(a, b):", "The old man")]
    greedy = SamplingParams(temperature=0.0)
    engine = make_engine(target, NoProposer, k=0, rows=2)
    answers = outputs(run(engine, prompts, greedy, limit=30, ends=frozenset()))
    torch.manual_seed(3)
    trainee = make_trainee("kv-sharing", make_settings(centroids=centroids), make_setup(nano), tables)
    samples = []
    for prompt, answer in zip(prompts, answers, strict=True):
        seq = make_seq([*prompt, *answer], 0)
        target.cache.admit(0, seq.token_ids)
        batch = Batch(seqs=(seq,), start=(0,), feed=(tuple(seq.token_ids[:-1]),), budget=DraftBudget((0,)))
        with torch.inference_mode():
            states = target.score(batch, tree.empty(1, CPU)).feed_hidden_states[1][0][:, None]
            entries = [tensor[0] for tensor in tables.kv_view.entries(1, [0], 0, len(states))]
        keys_and_values = torch.cat([tensor.transpose(0, 1).flatten(1) for tensor in entries], 1)
        samples.append(
            Sample(
                id=0,
                tokens=tuple(seq.token_ids),
                states=states.clone(),
                prompt=len(prompt),
                shared_kv=keys_and_values.clone(),
            )
        )
        target.cache.release(0)
    collator = Collator(trainee.aux_states, (1,), tables, trainee.ids, views=trainee.shared_kv)
    trainee.begin(lambda: samples)
    texts = collator.collate(samples, train_on_prompts=False)
    assert texts.shared_kv[1][0].shape[:2] == (2, 1)
    trainer = Trainer(trainee, losses=parse("ce"), steps=3, decay=0.8, lr=3e-3)

    def tau():
        engine = make_engine(target, lambda setup: trainee.proposer(make_setup(nano)), k=3, rows=2)
        run(engine, prompts, greedy, limit=30, ends=frozenset())
        return engine.stats.tau

    tau_before = tau()
    stats = [trainer.train([texts], progress=step / 18) for step in range(18)]
    assert stats[-1].loss < 0.7 * stats[0].loss
    assert tau() > tau_before + 0.4
    assert len(list(unrolled(trainee.module, texts, 3, 0.5))) == 3


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
@torch.inference_mode()
def test_native_kernels_export_keys_and_values(tmp_path):
    checkpoint = load_checkpoint(embedded("mini"), dtype="bfloat16", device="cpu")
    targets = [make_target(checkpoint, slots=1, context=32, kernels=kernels) for kernels in ("native", "torch")]
    native_shared, torch_shared = (find_shared_kv(target, target.share_weights()) for target in targets)
    assert native_shared == torch_shared
    for target in targets:
        seq = make_seq(list(range(40, 56)), 0)
        target.cache.admit(0, seq.token_ids)
        batch = Batch(seqs=(seq,), start=(0,), feed=(tuple(seq.token_ids),), budget=DraftBudget((0,)))
        target.score(batch, tree.empty(1, CPU))
    native_keys, torch_keys = (target.share_weights().kv_view.entries(7, [0], 0, 16)[0].float() for target in targets)
    assert (native_keys - torch_keys).norm() < 0.03 * torch_keys.norm()
    sizes = Sizes(hidden=384, layers=8, vocab=12288, epsilon=1e-5, view=native_shared)
    write_head(tmp_path / "head", make_module(describe("kv-sharing", sizes)), dtype=torch.bfloat16)
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
    completions, expected = (llm.generate(["def add(a, b):", "The cat"], params) for llm in llms)
    assert [completion.token_ids for completion in completions] == [completion.token_ids for completion in expected]
    assert sum(completion.stats.draft_tokens for completion in completions)


@pytest.fixture(params=[False, True], ids=["all logits", "centroids"])
def assistant(request, shelf, tmp_path, monkeypatch):
    """A random assistant of transformers for a small Gemma 4, its folder, and the folder of its target."""
    layers = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16}
    sizes = {"vocab_size": tiny.VOCAB, "hidden_size": 24, "intermediate_size": 40, "sliding_window": tiny.WINDOW - 1}
    other = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 3}
    text_config = Gemma4TextConfig(**layers, **heads, **sizes, **other, initializer_range=0.3)
    torch.manual_seed(6)
    # Without the patch, transformers rejects a model whose layers all share keys and values.
    with monkeypatch.context() as patch:
        modes = property(lambda config: ["reuse"] * config.num_hidden_layers)
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", modes)
        clusters = {"use_ordered_embeddings": request.param, "num_centroids": 16, "centroid_intermediate_top_k": 5}
        config = Gemma4AssistantConfig(text_config=text_config, backbone_hidden_size=32, **clusters)
        model = Gemma4AssistantForCausalLM(config).eval()
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name or "layer_scalar" in name:
            weight.data += 0.3 * torch.randn(weight.shape)
        elif "token_ordering" in name:
            weight.copy_(torch.randperm(tiny.VOCAB))
    logging.disable_progress_bar()
    model.save_pretrained(tmp_path / "assistant")
    return model, tmp_path / "assistant", shelf.folder("gemma4_text")


@pytest.mark.fast_cases("centroids")
@torch.inference_mode()
def test_assistant_agrees_with_transformers(assistant, shelf):
    """Two draft tokens after a small Gemma 4, from transformers' own keys and values, have the same logits."""
    reference, folder, target_folder = assistant
    trained = import_head(folder, read_target_info(target_folder))
    description = trained.description
    assert [shared.layer for shared in description.shared_kv] == [2, 2, 3]
    assert description.shared_kv[2].rope.scaling is Scaling.PROPORTIONAL
    module = load_module(description, trained.weights, where="assistant").eval()
    text = tiny.text(random.Random(5), 21)
    target = shelf.target("gemma4_text", (3,))
    seq = tiny.admit(target, 0, text)
    batch = Batch(seqs=(seq,), start=(0,), feed=(tuple(text[:-1]),), budget=DraftBudget((0,)))
    scores = target.score(batch, tree.empty(1, CPU))
    head = make_head_target(module, target.share_weights(), slots=4, context=64)
    head.num_noted = {0: 0}
    head.cache.admit(0, text)
    note_states(head, [seq], scores.feed_hidden_states[3][0][None, :, None], [20])
    logits = [head.score(next_batch(head, [seq]), tree.empty(1, CPU)).logits[0, 0]]
    chain = tree.chain(torch.tensor([[7]]), (1,))
    logits.append(head.score(next_batch(head, [seq]), chain, 0).logits[0, 0])
    model = shelf.model("gemma4_text")
    target_out = model(input_ids=torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
    state = target_out.hidden_states[-1][:, -1:]
    for token, token_logits in zip((text[-1], 7), logits, strict=True):
        embedding = model.get_input_embeddings()(torch.tensor([[token]]))
        out = reference(
            inputs_embeds=torch.cat([embedding, state], -1),
            position_ids=torch.tensor([[20]]),
            shared_kv_states=dict(target_out.shared_kv_states),
            attention_mask=torch.ones(1, 21),
        )
        expected = out.logits[0, 0]
        if description.centroids:  # transformers gives the tokens of other clusters a number below all logits
            expected = expected.masked_fill(expected == expected.min(), -torch.inf)
            assert int(expected.isfinite().sum()) == 5 * tiny.VOCAB // 16
        torch.testing.assert_close(token_logits, expected, atol=1e-3, rtol=1e-3)
        state = out.last_hidden_state


@pytest.mark.parametrize("name", ["olmo3", "gemma4_text"])
def test_sliding_layers_are_shared_by_all_layers_but_the_last(name, shelf):
    """As in Gemma 4's assistants. The rotary positions of both kinds of layers are found."""
    target = shelf.target(name)
    tables = target.share_weights()
    views = find_shared_kv(target, tables), find_sliding_kv(target, tables)
    assert [view.window for view in views] == [0, tiny.WINDOW]
    sizes = Sizes(hidden=64, layers=4, vocab=tiny.VOCAB, epsilon=1e-6, depth=3, view=views[0], sliding_view=views[1])
    assert describe("kv-sharing", sizes).shared_kv == (views[1], views[1], views[0])
    llama = shelf.target("llama")
    assert find_sliding_kv(llama, llama.share_weights()) is None


@pytest.mark.parametrize("columns", [1, 9], ids=["gathered rows", "all rows"])
def test_only_tokens_of_the_likeliest_clusters_get_logits(columns):
    torch.manual_seed(0)
    head = CentroidHead(16, 96, Centroids(count=12, top_k=2))
    table = torch.randn(96, 16)
    init_centroids(head, table)
    assert sorted(head.token_order.flatten().tolist()) == list(range(96))
    out = torch.randn(columns, 16)
    logits = head(out, table)
    for row, row_logits in zip(out, logits, strict=True):
        best = (head.centroids.weight @ row).topk(2).indices
        tokens = head.token_order[best].flatten()
        expected = torch.full((96,), -torch.inf)
        expected[tokens] = table[tokens] @ row
        torch.testing.assert_close(row_logits, expected)


def test_similar_rows_of_the_lm_head_share_a_cluster():
    torch.manual_seed(0)
    groups = torch.randn(8, 16).repeat_interleave(12, 0)
    head = CentroidHead(16, 96, Centroids(count=8, top_k=1))
    init_centroids(head, groups + 0.01 * torch.randn(96, 16))
    assert {tuple(sorted(tokens)) for tokens in (head.token_order // 12).tolist()} == {
        (group,) * 12 for group in range(8)
    }


def test_centroids_learn_the_probabilities_of_clusters():
    """The loss gives no gradient to the outputs, so it trains the centroids only."""
    torch.manual_seed(1)
    head = CentroidHead(16, 96, Centroids(count=12, top_k=2))
    out = torch.randn(12, 16, requires_grad=True)
    target_probs = torch.randn(12, 96).mul(3).softmax(-1)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.1)
    losses = []
    for _ in range(300):
        loss = head.loss(out, target_probs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert out.grad is None
    cluster_probs = target_probs.view(12, 12, 8).sum(-1)
    entropy = float(-(cluster_probs * cluster_probs.log()).sum())
    assert losses[-1] - entropy < 0.2 * (losses[0] - entropy)


@pytest.mark.fast_cases("centroids")
def test_assistant_drafts_for_its_target(assistant):
    """Chains and trees leave the output of the target unchanged."""
    _, folder, target = assistant
    options = {"dtype": "float32", "device": "cpu", "max_num_seqs": 2, "max_model_len": 64, "verifier": "walk", "k": 3}
    llms = [LLM(target, proposer=proposer, **options) for proposer in (f"draft:{folder}", f"tree:{folder}", "none")]
    rng = random.Random(7)
    prompts = [tiny.text(rng, length) for length in (19, 4, 30)]
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=3)
    chain_completions, tree_completions, plain_completions = (llm.generate(prompts, params) for llm in llms)
    for completions in (chain_completions, tree_completions):
        token_ids = [completion.token_ids for completion in completions]
        assert token_ids == [completion.token_ids for completion in plain_completions]
        assert sum(completion.stats.draft_tokens for completion in completions)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "gemma4_assistant"
