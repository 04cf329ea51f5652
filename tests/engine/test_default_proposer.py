"""Which proposer a target has for which none was chosen."""

import pytest
from transformers import AutoModelForCausalLM

from outrider.core.params import SamplingParams
from outrider.engine import default_proposer as module
from outrider.engine.default_proposer import can_draft_for_itself, default_proposer
from outrider.llm import LLM
from tests.helpers.gguf_files import SIZES, write_gguf
from tests.helpers.tiny import compiles, make_config, save

DEFAULT = "best(suffix:100000,quantized:int4)"
pytestmark = pytest.mark.skipif(not compiles(), reason="no C++ compiler here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("default") / "target", make_config("LlamaConfig", hidden_size=64))


def test_target_drafts_for_itself_on_the_native_kernels(folder):
    assert default_proposer(folder, device="cpu") == DEFAULT
    assert default_proposer(folder, device="cpu", quantize="int8") == DEFAULT
    assert default_proposer(folder, device="cpu", quantize="int4") == "suffix:100000"
    assert default_proposer(folder, device="cpu", kernels="torch") == "suffix:100000"


def test_target_does_not_draft_for_itself_if_memory_is_short(folder, monkeypatch):
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    monkeypatch.setattr(module, "free_memory", lambda: 3 * size)
    assert default_proposer(folder, device="cpu") == "suffix:100000"
    monkeypatch.setattr(module, "free_memory", lambda: 3 * size + 1)
    assert default_proposer(folder, device="cpu") == DEFAULT


def test_missing_or_damaged_target_gets_a_proposer(tmp_path):
    """Loading the target reports the error."""
    assert default_proposer(tmp_path / "nowhere", device="cpu") == "suffix:100000"
    (tmp_path / "config.json").write_text("{")
    assert default_proposer(tmp_path, device="cpu") == "suffix:100000"


def test_files_with_few_bits_have_no_quantized_copy(tmp_path):
    def can(folder):
        return can_draft_for_itself(folder, device="cpu", kernels="auto", quantize=None)

    model = AutoModelForCausalLM.from_config(make_config("LlamaConfig", **SIZES))
    for kind, wide in (("Q8_0", True), ("Q4_0", False)):
        assert can(write_gguf(tmp_path / f"{kind}.gguf", model, kind)) is wide
    assert not can(save(tmp_path / "other", make_config("GPTNeoXConfig", hidden_size=64)))


def test_default_is_chosen_before_the_target_takes_its_memory(folder, monkeypatch):
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    answers = iter([4 * size, size])
    monkeypatch.setattr(module, "free_memory", lambda: next(answers))
    llm = LLM(folder, device="cpu", max_num_seqs=1, max_model_len=64)
    assert llm.parts.proposer_spec == DEFAULT
    assert list(answers) == [size]


def test_default_drafts_and_keeps_the_text(folder):
    options = {"device": "cpu", "max_num_seqs": 2, "max_model_len": 96, "k": 4}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [(5, 6, 7, 5, 6), (9, 8)]
    default, plain = (LLM(folder, proposer=proposer, **options) for proposer in (None, "none"))
    assert default.parts.proposer_spec == DEFAULT
    completions, expected = (llm.generate(prompts, params) for llm in (default, plain))
    assert [each.token_ids for each in completions] == [each.token_ids for each in expected]
    assert default.stats.draft_tokens


def test_plain_decoding_loads_no_draft(folder):
    llm = LLM(folder, device="cpu", max_num_seqs=1, max_model_len=64, k=0)
    assert llm.parts.proposer_spec == "none"
