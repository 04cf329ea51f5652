"""The drafts that can be trained."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.core.params import SamplingParams
from outrider.core.types import SharedWeights
from outrider.errors import OutriderError
from outrider.models.heads.hidden_states import apply_final_norm
from outrider.models.heads.store import make_module
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.train.loss.losses import parse
from outrider.train.model.init_weights import init_weights, principal_directions
from outrider.train.model.presets import KINDS, Sizes, describe
from outrider.train.model.trainee import make_trainee
from outrider.train.settings import DRAFT, Settings
from outrider.train.trainer import Trainer
from tests.helpers import engines, tiny, train_setup
from tests.helpers.train_setup import NANO, make_batch, make_sample, make_settings, make_setup, scatter


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
        ("kv-sharing", {"centroids": 100}, "--centroids is 100, and 12288 tokens do not divide .* use 96"),
        ("kv-sharing", {"centroids": 96, "centroid_top_k": 97}, "--centroid-top-k is 97, and there are 96 clusters"),
        ("mtp", {"centroids": 96}, "mtp has no token clusters; leave --centroids out"),
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
def test_options_that_do_not_fit_the_kind_are_rejected(kind, options, message, nano):
    with pytest.raises(OutriderError, match=message):
        make_trainee(kind, make_settings(**options), make_setup(nano), nano.tables)


@pytest.mark.parametrize("kind", ["eagle3", "eagle31", "slim", "peagle"])
def test_narrow_draft_has_own_embedding_and_lm_head(kind):
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


def test_narrow_draft_starts_with_principal_directions_of_the_tables():
    torch.manual_seed(1)
    basis = torch.randn(64, 128)
    norm = torch.rand(128) + 0.5
    tables = SharedWeights(
        embedding=torch.randn(90, 128), head=torch.randn(90, 64) @ basis / norm, norm=norm, epsilon=1e-6
    )
    sizes = Sizes(hidden=128, layers=4, vocab=90, epsilon=1e-6, width=64, draft_vocab=9)
    module = make_module(describe("slim", sizes))
    module.ids.copy_(torch.arange(3, 12))
    torch.nn.init.zeros_(module.fuse.weight)
    init_weights(module, tables)
    state = torch.randn(5, 64) @ torch.linalg.qr(basis.T).Q.T  # in the subspace on which the logits depend
    projection = module.fuse.weight[:, -128:].detach()
    target_probs = (apply_final_norm(state, tables) @ tables.head.T).float()[:, 3:12].softmax(-1)
    assert torch.allclose(module.logits(state @ projection.T).softmax(-1), target_probs, atol=1e-4)
    directions = principal_directions(basis, 9)
    assert torch.allclose(directions.T @ directions, torch.eye(9), atol=1e-5)


def test_narrow_draft_is_trained_further_as_the_same_kind(tmp_path):
    mini = train_setup.load_target(str(embedded("mini")))
    setup = make_setup(mini)
    first = make_trainee("slim", make_settings(hidden_size=64, draft_vocab_size=50), setup, mini.tables)
    first.save(tmp_path / "slim")
    with pytest.raises(OutriderError, match="at its projection, and eagle3 does so at its attention; train"):
        make_trainee("eagle31", make_settings(init_from=str(tmp_path / "slim")), setup, mini.tables)
    second = make_trainee("slim", make_settings(init_from=str(tmp_path / "slim")), setup, mini.tables)
    assert second.ids.tolist() == first.ids.tolist()
    assert second.module.description.width == 64


def test_draft_model_with_another_vocabulary_is_rejected(nano):
    setup = make_setup(nano)
    other_tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0})
    with pytest.raises(OutriderError, match="another vocabulary than the target"):
        make_trainee(DRAFT, make_settings(init_from=NANO), replace(setup, tokenizer=other_tokenizer), nano.tables)


def test_identity_has_what_changes_the_weights():
    identity = make_settings().identity()
    for change in ({"mask_token_id": 0}, {"dtype": "float32"}, {"quantize": "int8"}):
        assert make_settings(**change).identity() == identity | change != identity
    assert make_settings(threads=1, k=3, max_num_seqs=2, target="x", tensorboard=True).identity() == identity


def test_invalid_settings_are_rejected():
    for options, message in (
        ({"lr": 0.0}, "use --lr in"),
        ({"loss_decay": 1.5}, "use --lr in"),
        ({"cache_dir_gb": 3.0}, "with --cache-dir DIR"),
        ({"seed": 1 << 64}, "--seed is 18446744073709551616; use a number"),
        ({"ttt_length": 10**9}, "--ttt-length is 1000000000; use 256 at most"),
        ({"mtp_modules": 10**9}, "--mtp-modules is 1000000000; use 256 at most"),
        ({"intermediate_size": 10**15}, "use 1048576 at most"),
        ({"cache_dir": "x", "cache_dir_gb": 0.0}, "above 0"),
    ):
        with pytest.raises(OutriderError, match=message):
            make_settings(**options)
    with pytest.raises(OutriderError, match="train needs prompts"):
        Settings(out="out", data=[])


@pytest.mark.parametrize("kind", ["mtp", "medusa", "dspark"])
def test_trained_head_can_be_trained_further(kind, nano, tmp_path):
    setup = make_setup(nano)
    first = make_trainee(kind, make_settings(draft_vocab_size=50), setup, nano.tables)
    first.begin(lambda: [make_sample([1, 2, 3, 9, 70, 700])])
    with torch.no_grad():
        for weight in first.module.parameters():
            weight.add_(0.1)
    first.save(tmp_path / "head")
    second = make_trainee(kind, make_settings(init_from=str(tmp_path / "head")), setup, nano.tables)
    second.begin(lambda: pytest.fail("the head already has its draft vocabulary"))
    assert second.ids.tolist() == first.ids.tolist()
    for name, weight in first.module.state_dict().items():
        assert torch.equal(second.module.state_dict()[name], weight.to(torch.bfloat16).to(weight.dtype))
    texts = make_batch(lengths=(6, 4))
    texts = replace(texts, target_probs=texts.target_probs[:, second.ids])
    trainer = Trainer(second, losses=parse("ce"), steps=2, decay=0.8, lr=1e-3)
    assert trainer.train([texts], progress=0.5).columns
    other_kind = "hydra" if kind == "medusa" else "medusa"
    with pytest.raises(OutriderError, match=f"is of kind {kind}, for a target with"):
        make_trainee(other_kind, make_settings(init_from=str(tmp_path / "head")), setup, nano.tables)
    with pytest.raises(OutriderError, match="defines the shape of the draft; leave --depth"):
        make_trainee(kind, make_settings(init_from=str(tmp_path / "head"), draft_vocab_size=9), setup, nano.tables)


def test_draft_model_has_the_logits_of_transformers(nano):
    trainee = make_trainee(DRAFT, make_settings(init_from=NANO), make_setup(nano), nano.tables)
    texts = make_batch(lengths=(9, 6))
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    logits = model(texts.tokens[:, :9]).logits
    target_probs = scatter(texts.target_probs, texts.loss_mask)
    for i, step in enumerate(list(trainee.unroll(texts, 3))):
        assert torch.allclose(step.logits, logits[:, i:][step.loss_mask], atol=1e-4)
        assert torch.equal(step.target, target_probs[:, i:][step.loss_mask])
        assert torch.equal(step.loss_mask, texts.loss_mask[:, i:])


@pytest.mark.fast_cases("qwen3", "gpt_oss")
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss", "mixtral"])
def test_draft_models_of_several_architectures_can_be_trained(name, tmp_path):
    for role, architecture in (("target", "llama"), ("draft", name)):
        tiny.save(tmp_path / role, tiny.ARCHITECTURES[architecture](), seed=len(role))
    loaded = train_setup.load_target(tmp_path / "target")
    settings = make_settings(init_from=str(tmp_path / "draft"))
    trainee = make_trainee(DRAFT, settings, make_setup(loaded), loaded.tables)
    texts = make_batch(hidden=32, vocab=tiny.VOCAB)
    trainer = Trainer(trainee, losses=parse("ce"), steps=1, decay=0.8, lr=1e-2)
    losses = [trainer.train([texts], progress=0.5).loss for _ in range(5)]
    assert losses[-1] < losses[0]
    trainee.save(tmp_path / "trained")
    engine = engines.make_engine(loaded.target, lambda _: trainee.proposer(make_setup(loaded)), k=3, rows=2)
    engines.run(engine, [(1, 2, 3), (4, 5)], SamplingParams(temperature=1.0), limit=9)
    assert engine.stats.draft_tokens
    saved_state = load_checkpoint(tmp_path / "trained", dtype="float32", device="cpu").model.state_dict()
    trained_state = trainee.module.state_dict()
    assert saved_state.keys() == trained_state.keys()
    assert all(torch.equal(saved_state[name], value.bfloat16().float()) for name, value in trained_state.items())


@pytest.mark.parametrize("kind", ["mtp", "dspark", DRAFT])
def test_proposer_is_a_copy_and_uses_no_random_numbers(kind, nano):
    torch.manual_seed(5)
    settings = make_settings(init_from=NANO if kind == DRAFT else None)
    trainee = make_trainee(kind, settings, make_setup(nano), nano.tables)
    state = torch.get_rng_state()
    weights = [weight.detach().clone() for weight in trainee.module.parameters()]
    proposer = trainee.proposer(make_setup(nano))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(weights, trainee.module.parameters(), strict=True))
    assert all(weight.requires_grad for weight in trainee.module.parameters())
    num_bytes = proposer.model.bytes()
    with torch.no_grad():
        for weight in trainee.module.parameters():
            weight.zero_()
    assert proposer.model.bytes() == num_bytes


def test_command_help_lists_all_kinds():
    from outrider.cli.drafts import train

    help = next(iter(train.__annotations__["kind"].__metadata__)).help
    assert all(kind in help for kind in [*KINDS, DRAFT])
