"""The search for smaller models with the tokenizer of a target."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.errors import OutriderError
from outrider.models.loader.family import count_parameters, find_smaller
from tests.helpers.gguf_files import SIZES, write_gguf
from tests.helpers.tiny import make_config, save


def llama(folder, hidden=64, **options):
    return save(folder, make_config("LlamaConfig", hidden_size=hidden), **options)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("target") / "large", 128)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_smaller_models_with_the_tokenizer_are_found(target, tmp_path):
    small = llama(tmp_path / "models" / "a" / "small", 32)
    medium = llama(tmp_path / "models" / "medium", 64)
    llama(tmp_path / "models" / "other", 32, size=300)  # another tokenizer
    shutil.copytree(target, tmp_path / "models" / "copy")
    (llama(tmp_path / "models" / "damaged", 32) / "model.safetensors").unlink()
    (tmp_path / "models" / "not.gguf").write_bytes(b"GGUF")
    family = find_smaller(target, [str(tmp_path / "models")])
    assert family.smaller == (small, medium)
    assert {path.name: reason.split(" (")[0] for path, reason in family.left_out.items()} == {
        "other": "with another tokenizer",
        "copy": "with more than 90% of the target's parameters",
        "damaged": "as it cannot be read",
        "not.gguf": "as it cannot be read",
    }
    assert "left out, with another tokenizer: other" in family.reasons


def test_cache_of_the_hub_is_searched_and_a_model_in_two_revisions_is_one(target, hub):
    first = llama(hub / "models--org--small" / "snapshots" / "1")
    shutil.copytree(first, hub / "models--org--small" / "snapshots" / "2")
    assert find_smaller(target, ["hub"]).smaller == (first,)


def test_gguf_files_are_found_and_a_split_one_is_one(tmp_path):
    def write(path, **sizes):
        path.parent.mkdir(exist_ok=True)
        config = make_config("LlamaConfig", **SIZES | sizes)
        return write_gguf(path, AutoModelForCausalLM.from_config(config))

    target = write(tmp_path / "large.gguf", num_hidden_layers=6)
    small = write(tmp_path / "models" / "small-00001-of-00001.gguf", num_hidden_layers=1)
    shutil.copy(small, tmp_path / "models" / "mmproj-small.gguf")
    shutil.copy(small, tmp_path / "models" / "lost-00002-of-00002.gguf")
    assert find_smaller(target, [str(tmp_path / "models"), str(tmp_path)]).smaller == (small,)


def test_one_file_of_a_model_stays_for_each_width(tmp_path):
    """Files of another model with the same sizes are not among them."""
    torch.manual_seed(0)
    config = make_config("LlamaConfig", **SIZES, num_hidden_layers=1, tie_word_embeddings=True)

    def files(name, *kinds):
        model = AutoModelForCausalLM.from_config(config)
        torch.nn.init.uniform_(model.model.norm.weight)
        return [write_gguf(tmp_path / "models" / f"{name}-{kind}.gguf", model, kind) for kind in kinds]

    (tmp_path / "models").mkdir()
    full, eight, _, four = files("a", "F16", "Q8_0", "Q5_0", "Q4_0")
    (other,) = files("b", "F16")
    target = write_gguf(
        tmp_path / "large.gguf",
        AutoModelForCausalLM.from_config(make_config("LlamaConfig", **SIZES, num_hidden_layers=6)),
    )
    family = find_smaller(target, [str(tmp_path / "models")])
    assert set(family.smaller) == {full, eight, four, other}
    assert family.reasons == ["left out, as another file of the model has about as many bits: a-Q5_0.gguf"]
    assert family.stored == {full: {"int8", "int4"}, other: frozenset()}
    assert len({family.models[file] for file in (full, eight, four)}) == 1
    assert family.models[other] == other


def test_parameters_are_those_without_the_lm_head_in_each_format(target, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(target)
    tied = AutoModelForCausalLM.from_config(make_config("LlamaConfig", **SIZES, tie_word_embeddings=True))
    tied.save_pretrained(tmp_path / "tied")
    other = save(tmp_path / "other", make_config("GPTNeoXConfig"))  # not on the native kernels
    assert count_parameters(target) == sum(each.numel() for each in model.model.parameters())
    files = [write_gguf(tmp_path / f"{kind}.gguf", tied, kind) for kind in ("F16", "Q8_0")]
    body = sum(each.numel() for each in tied.model.parameters())
    assert [count_parameters(path) for path in (tmp_path / "tied", *files)] == [body] * 3
    tied.config.tie_word_embeddings = False
    assert count_parameters(write_gguf(tmp_path / "untied.gguf", tied, "F16")) == body
    assert count_parameters(other) > 0


def test_nothing_found_names_the_fix(target, hub, tmp_path):
    with pytest.raises(OutriderError, match=r"no model in .* is smaller than .* name other folders, or leave --family"):
        find_smaller(target, [str(tmp_path), "hub"])  # the cache is not there yet
    other = llama(tmp_path / "other", 32, size=300)
    with pytest.raises(OutriderError, match="left out, with another tokenizer: other"):
        find_smaller(target, [str(other)])
    with pytest.raises(OutriderError, match="which is no folder; name folders, or hub for the Hub's cache"):
        find_smaller(target, [str(tmp_path / "missing")])
