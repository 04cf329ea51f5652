"""Every checkpoint format of draft heads: export, import, and the output with an imported head."""

import json
from dataclasses import replace

import pytest

from outrider.core.params import SamplingParams
from outrider.drafting.propose.draft_model.trained_head import HeadProposer, HeadTreeProposer
from outrider.llm import LLM
from outrider.models.heads.files import TensorFiles, read_target_info, write_folder
from outrider.models.heads.formats.base import Source, TargetRequired
from outrider.models.heads.formats.registry import FORMATS, format_of
from outrider.models.heads.store import import_head, is_head
from outrider.models.loader.embedded import embedded
from outrider.tools.convert import checked
from tests.helpers.heads import PROMPTS, guessed_by, random_draft
from tests.models.heads.checkpoints import MINI, SMALL, TARGET, all_equal, export_case, export_changed, random_case

# Cases that cannot be read without their target: it has the layers that an assistant attends to, tables that these
# heads share, or the embedding with the mask.
CASES_THAT_NEED_THE_TARGET = [
    "assistant",
    "assistant with centroids",
    "legacy medusa",
    "medusa with the target's head",
    *(
        case
        for case, (_, description) in SMALL.items()
        if description.block and not (description.own_lm_head and description.own_embedding)
    ),
]
OPTIONS = {"dtype": "float32", "max_num_seqs": 3, "max_model_len": 128, "verifier": "walk", "k": 3}


def token_ids(completions):
    """Return the output tokens of each completion."""
    return [completion.token_ids for completion in completions]


def test_every_format_has_a_case():
    assert {name for name, _ in SMALL.values()} == {format.name for format in FORMATS}


@pytest.mark.parametrize("case", SMALL)
def test_import_of_an_export_gives_the_same_draft_head(case, tmp_path):
    module = export_case(tmp_path, case)
    trained = import_head(tmp_path, TARGET)
    assert trained.description == module.description
    # Both Medusa formats of the authors are recognized as the first one.
    title = format_of(SMALL[case][0]).title.replace("(its authors', safetensors)", "(its authors')")
    assert trained.format == title
    assert not trained.ignored
    assert all_equal(trained.weights, module.state_dict())
    checked(tmp_path, TARGET)


@pytest.mark.parametrize("case", SMALL)
def test_export_of_an_import_gives_the_same_checkpoint(case):
    name, description = SMALL[case]
    config, tensors = format_of(name).write(description, random_draft(description).state_dict(), TARGET)
    source = Source(config, tensors, TARGET)
    imported_description, weights = format_of(name).read(source)
    assert not source.close()
    new_config, new_tensors = format_of(name).write(imported_description, weights, TARGET)
    assert new_config == config
    assert all_equal(new_tensors, tensors)


@pytest.mark.parametrize("case", [case for case in SMALL if case not in CASES_THAT_NEED_THE_TARGET])
def test_import_without_the_target(case, tmp_path):
    module = export_case(tmp_path, case)
    assert import_head(tmp_path).description == module.description


@pytest.fixture(scope="module")
def plain_output():
    """The greedy output of the embedded target without drafting."""
    params = SamplingParams(temperature=0, max_tokens=12)
    return token_ids(LLM(proposer="none", **OPTIONS).generate(PROMPTS, params))


@pytest.mark.fast_cases(
    "eagle3",
    "speculators",
    "peagle",
    "eagle",
    "medusa safe",
    "medusa with the target's head",
    "deepseek",
    "modules with tables",
    "mimo",
    "causal dflash",
    "narrow dflash",
    "anchored dflash",
    "dflash2",
    "domino of speculators",
    "xpress of speculators",
)
@pytest.mark.parametrize("case", [case for case in MINI if "assistant" not in case])  # its target is a Gemma 4
def test_output_equals_plain_decoding(case, plain_output, tmp_path):
    export_case(tmp_path, case, read_target_info(embedded("mini")), of=MINI)
    llm = guessed_by(f"draft:{tmp_path}", k=3)
    assert isinstance(llm.parts.proposer, HeadProposer)
    completions = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
    assert token_ids(completions) == plain_output
    assert sum(completion.stats.draft_tokens for completion in completions)


@pytest.mark.fast_cases("eagle3.1")
@pytest.mark.parametrize("case", ["eagle3.1", "medusa", "gated qwen"])
def test_output_with_draft_trees_equals_plain_decoding(case, plain_output, tmp_path):
    export_case(tmp_path, case, read_target_info(embedded("mini")), of=MINI)
    llm = LLM(proposer=f"tree:{tmp_path}", **OPTIONS)
    assert isinstance(llm.parts.proposer, HeadTreeProposer)
    completions = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
    assert token_ids(completions) == plain_output


def test_error_if_the_target_is_needed(tmp_path):
    folder = export_changed(tmp_path / "a", "eagle", lambda config, _: config.pop("num_target_layers"))
    with pytest.raises(TargetRequired, match="give the target with --target DIR"):
        import_head(folder)
    default_layers = export_changed(tmp_path / "b", "eagle3", lambda config, _: config.pop("num_target_layers"))
    # Layers 1, 3 and 4 are the default for a target with 8 layers.
    assert import_head(default_layers).description.target_layers == 8
    with pytest.raises(TargetRequired, match="uses its target's"):
        format_of("medusa-vllm").write(*random_case("legacy medusa"), None)


def test_full_model_is_a_draft_head_only_for_its_own_target(plain_output, tmp_path):
    """A copy of the embedded model with an MTP module is given as `draft:` to the embedded model."""
    config = json.loads((embedded("mini") / "config.json").read_text())
    name, description = MINI["qwen"]
    _, tensors = format_of(name).write(description, random_draft(description).state_dict(), None)
    body = description.body
    config |= {"num_attention_heads": body.heads, "head_dim": body.dim, "intermediate_size": body.ffn}
    write_folder(tmp_path, config, {**tensors, **TensorFiles(embedded("mini"))}, "model.safetensors")
    trained = import_head(tmp_path)
    assert "weights of the target" in trained.ignored
    assert not is_head(tmp_path)
    assert not is_head(tmp_path, lambda: replace(TARGET, vocab=12288))
    assert is_head(tmp_path, lambda: read_target_info(embedded("mini")))
    llm = LLM(proposer=f"draft:{tmp_path}", **OPTIONS)
    assert isinstance(llm.parts.proposer, HeadProposer)
    completions = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
    assert token_ids(completions) == plain_output
