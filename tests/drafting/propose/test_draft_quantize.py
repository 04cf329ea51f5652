"""Drafts whose weights have 8 or 4 bits: the output stays the target's, and some drafts are refused."""

import shutil

import pytest
import torch

from outrider.core import tree
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.drafting.propose.leaves import draft_models
from outrider.drafting.propose.vocabulary.reduced import write_draft_vocabulary
from outrider.drafting.propose.vocabulary.wrapped_target import unwrapped
from outrider.engine.build import LoadedTarget, build_engine, load_target
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.heads.store import make_module
from outrider.models.heads.targets.autoregressive import NativeAutoregressiveTarget
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.train.model.presets import describe
from tests.helpers import tiny
from tests.helpers.gguf_files import SIZES, write_gguf
from tests.helpers.heads import far, feed, write_new_head
from tests.models.heads.test_heads import MINI

NANO = embedded("nano")
VOCAB = 12288
PROMPTS = ["def add(a, b):", "The cat"]
native = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A draft model with a reduced vocabulary, and random draft heads for the embedded target."""
    root = tmp_path_factory.mktemp("drafts")
    made = {"reduced": shutil.copytree(NANO, root / "reduced")}
    write_draft_vocabulary(made["reduced"], torch.arange(0, VOCAB, 3))
    for kind in ("mtp", "eagle3", "peagle", "medusa"):
        made[kind] = write_new_head(root / kind, kind)
    return made


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(request) -> LoadedTarget:
    return load_target(EngineConfig(dtype=request.param, device="cpu", max_num_seqs=2, max_model_len=96))


def run(loaded, proposer, params, **options):
    """Return the output of a loaded target, and its engine."""
    config = EngineConfig(proposer=proposer, verifier="walk", k=0 if proposer == "none" else 3, **options)
    llm = LLM.from_parts(build_engine(loaded, config))
    return [each.token_ids for each in llm.generate(PROMPTS, params)], llm


@pytest.mark.fast_cases("bfloat16-1.0")
@native
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_does_not_change(temperature, loaded, folders):
    params = SamplingParams(temperature=temperature, max_tokens=16, seed=1)
    expected, _ = run(loaded, "none", params)
    drafts = [f"draft:{folders[name]}" for name in ("reduced", "mtp", "peagle")]
    drafts += [f"draft:{NANO}", f"tree:{folders['eagle3']}", f"cascade:{NANO}", f"draft-text:{NANO}"]
    for i, draft in enumerate(drafts):
        name = ("int4", "int8")[i % 2]
        text, llm = run(loaded, draft, params, draft_quantize=name)
        assert text == expected
        assert llm.stats.draft_tokens
        (model,) = draft_models(llm.parts.proposer)
        assert unwrapped(model).kernels == f"native {name}"


@native
@torch.inference_mode()
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_kernels_read_the_quantized_weights_of_a_head(kind):
    """Logits have an error that is larger for fewer bits, and the copy of the target's LM head is counted."""
    torch.manual_seed(0)
    checkpoint = load_checkpoint(embedded("mini"), dtype="float32", device="cpu")
    tables = make_target(checkpoint, slots=1, context=64, kernels="native").share_weights()
    module = make_module(describe(kind, MINI)).eval().requires_grad_(False)
    text = list(range(300, 330))
    states = torch.randn(len(text) - 1, len(module.description.aux_states.layers), 384)

    def make(bits):
        head = NativeAutoregressiveTarget(module, tables, slots=1, context=64, bits=bits)
        batch = feed(head, module.description, text, states)
        return head.score(batch, tree.empty(1, head.device)).logits, head.bytes()

    (whole, size), (eight, size_8), (four, size_4) = map(make, (16, 8, 4))
    assert 1e-4 < far(eight, whole) < 0.03 < far(four, whole) < 0.4
    own_head = module.description.own_lm_head
    head_bytes = VOCAB * 384  # with 8 bits, without scales
    parameters = sum(weight.nbytes for weight in module.parameters())
    linear = size - parameters - (4 * head_bytes if own_head else 0)  # packed float32
    assert head_bytes + linear / 4 < size_8 - parameters < 1.1 * (head_bytes + linear / 4)
    assert size_4 - parameters < 0.6 * (size_8 - parameters)


@native
def test_draft_model_takes_less_memory(loaded):
    sizes = []
    for name in (None, "int8", "int4"):
        _, llm = run(loaded, f"draft:{NANO}", SamplingParams(max_tokens=1), draft_quantize=name)
        sizes.append(draft_models(llm.parts.proposer)[0].bytes())
    assert sizes[0] > sizes[1] > sizes[2]


@native
def test_lm_head_of_a_quantized_target_is_shared(folders):
    """A copy with as many bits would only take memory."""
    config = EngineConfig(quantize="int8", device="cpu", max_num_seqs=2, max_model_len=96)
    target = load_target(config)
    sizes = []
    for name in ("int8", "int4"):
        _, llm = run(target, f"draft:{folders['mtp']}", SamplingParams(max_tokens=8), draft_quantize=name)
        sizes.append(draft_models(llm.parts.proposer)[0].bytes())
    assert sizes[1] > sizes[0] + VOCAB * 384 // 4  # it has a LM head of 4 bits, and linear layers with fewer bits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_quantize": "int3"}, "draft_quantize 'int3' is unknown; use int8 or int4"),
        (
            {"draft_quantize": "int4", "kernels": "torch"},
            "draft_quantize is int4, and kernels is torch; use kernels auto",
        ),
        (
            {"draft_quantize": "int4", "device": "cuda", "kernels": "graphs"},
            "does not quantize on cuda; use kernels auto",
        ),
        ({"draft_quantize": "int4", "proposer": "ngram"}, "draft_quantize is int4 and the proposer ngram has no draft"),
        ({"draft_quantize": "int8", "proposer": "quantized:int4"}, "quantized:int4 has no draft"),
    ],
)
def test_settings_that_do_not_fit(options, message):
    with pytest.raises(OutriderError, match=message):
        LLM(None, **options)


@native
def test_drafts_that_do_not_run_on_the_kernels(folders, tmp_path):
    drafts = {
        "llama": tiny.save(tmp_path / "llama", tiny.make_config("LlamaConfig")),
        "mamba": tiny.save(tmp_path / "mamba", tiny.ARCHITECTURES["mamba2"]()),
    }
    with pytest.raises(OutriderError, match=r"mamba2 does not run on the native kernels; leave draft_quantize out"):
        LLM(drafts["llama"], proposer=f"draft:{drafts['mamba']}", device="cpu", draft_quantize="int4")
    with pytest.raises(OutriderError, match="run only autoregressive heads of one module; leave draft_quantize out"):
        LLM(None, proposer=f"draft:{folders['medusa']}", device="cpu", max_model_len=96, draft_quantize="int4")
    with pytest.raises(OutriderError, match="a target in bfloat16 or float32; leave draft_quantize out"):
        LLM(
            None,
            proposer=f"draft:{folders['mtp']}",
            dtype="float16",
            device="cpu",
            max_model_len=96,
            draft_quantize="int4",
        )


@native
def test_draft_that_is_quantized_already(tmp_path):
    config = tiny.make_config("LlamaConfig", **SIZES)
    model = load_checkpoint(tiny.save(tmp_path / "model", config), dtype="float32", device="cpu").model
    file = write_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(OutriderError, match=r"is quantized already \(Q8_0\); leave draft_quantize out"):
        LLM(file, proposer=f"draft:{file}", max_model_len=64, max_num_seqs=1, draft_quantize="int4")
