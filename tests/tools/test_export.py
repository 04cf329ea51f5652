"""Tests of `outrider export`: layouts, commands, the k of tune, and refusals."""

import json
import shutil
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, LlamaForCausalLM

from outrider.drafting.plugins.vllm import Drafts
from outrider.errors import OutriderError
from outrider.models.heads.description import Kind
from outrider.models.heads.files import read_target_info
from outrider.models.heads.formats.registry import format_of
from outrider.models.heads.store import import_head, write_head
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.torch.gguf_linear import expand_blocks
from outrider.tools.export.engines import ENGINES, MODEL, Draft, engine_of, words
from outrider.tools.export.gguf_model import find_rule
from outrider.tools.export.length import tuned_k
from tests.helpers import tiny
from tests.helpers.commands import document, invoke, refuse, succeed
from tests.helpers.heads import cases, random_draft, write_new_head, write_random_head


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small Llama in bfloat16 with a byte-level BPE tokenizer."""
    torch.manual_seed(0)
    network = LlamaForCausalLM(tiny.make_config("LlamaConfig", num_hidden_layers=2, tie_word_embeddings=True))
    folder = tiny.save_model(tmp_path_factory.mktemp("model"), network.to(torch.bfloat16))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words_by_id = {token: word for word, token in tokenizer["model"]["vocab"].items()}
    words_by_id[max(words_by_id)] = "ab"  # a tokenizer without merges cannot be read from a GGUF file
    tokenizer["model"] |= {"vocab": {word: token for token, word in words_by_id.items()}, "merges": [["a", "b"]]}
    file.write_text(json.dumps(tokenizer))
    return folder


def exported(*arguments):
    """Return the summary of an export."""
    return document("export", *arguments, "--json")


def refused(*arguments):
    return refuse("export", *arguments)


def test_a_draft_model_for_vllm(model, tmp_path):
    out = tmp_path / "out"
    summary = exported(model, "--for", "vllm", "--out", out, "--k", 5, "--target", "models/big model")
    assert summary["kind"] == MODEL
    command = words(summary["command"])
    config = json.loads(command[command.index("--speculative-config") + 1])
    assert config == {"method": "draft_model", "model": str(out / "draft"), "num_speculative_tokens": 5}
    assert command[:3] == ["vllm", "serve", "models/big model"]
    assert (out / "run.sh").read_text().startswith("#!/bin/sh\n# tested: vLLM 0.32.0")
    card = (out / "README.md").read_text()
    assert card.startswith("---\nbase_model: models/big model\ntags:\n")
    assert f"## vLLM\n\n```sh\n{summary['command']}\n```" in card
    copied = load_checkpoint(out / "draft", dtype="float32", device="cpu")
    assert copied.vocab == tiny.VOCAB


def test_the_card_of_a_training_is_kept(model, tmp_path):
    draft = shutil.copytree(model, tmp_path / "trained")
    (draft / "README.md").write_text("# My draft\n")
    exported(draft, "--for", "vllm", "--out", tmp_path / "out", "--k", 5)
    assert (tmp_path / "out" / "README.md").read_text().startswith("# My draft\n\n## vLLM\n")


def test_batch_needs_advice(model, tmp_path):
    message = refused(model, "--for", "vllm", "--out", tmp_path / "out", "--k", 5, "--batch", 8)
    assert "--batch chooses a k of --advice" in message
    message = refused(model, "--for", "vllm", "--out", tmp_path / "out", "--advice", tmp_path / "nowhere.json")
    assert "cannot be read (No such file or directory)" in message
    assert not (tmp_path / "out").exists()


def test_a_draft_model_for_llamacpp_is_read_back(model, tmp_path):
    out = tmp_path / "out"
    summary = exported(model, "--for", "llama.cpp", "--out", out, "--k", 3)
    assert words(summary["command"])[-4:] == ["--spec-type", "draft-simple", "--spec-draft-n-max", "3"]
    written = load_checkpoint(out / "draft.gguf", dtype="float32", device="cpu")
    own = load_checkpoint(model, dtype="float32", device="cpu")
    text = "def abc(x):\n    return 1234 * x  # it's\n"
    assert written.tokenizer.encode(text) == own.tokenizer.encode(text)
    expand_blocks(written.model)
    for each in (written, own):
        each.model.set_attn_implementation("eager")
    ids = torch.tensor([own.tokenizer.encode(text)])
    with torch.inference_mode():
        logits = [each.model.float()(ids).logits for each in (written, own)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def test_the_stored_rule_of_a_gguf_file_is_read_back(model, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.tools.export.gguf_model.find_rule", lambda *_: "unknown")
    message = refused(model, "--for", "llama.cpp", "--out", tmp_path / "out", "--k", 3)
    assert "splits text by the rule 'unknown'; supported are" in message


def test_the_rule_of_a_tokenizer_is_found_by_its_tokens():
    tokenizer = AutoTokenizer.from_pretrained(embedded("mini"))
    assert find_rule(tokenizer, embedded("mini")) == "llama-bpe"
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(OutriderError, match="splits text by a rule that is not known here"):
        find_rule(tokenizer, embedded("mini"))


def test_heads_are_written_in_the_format_of_the_engine(tmp_path):
    out = tmp_path / "out"
    head = embedded("eagle31")
    summary = exported(head, "--for", "vllm", "--out", out, "--k", 4, "--target", embedded("mini"))
    assert summary["layout"] == "eagle3-speculators"
    assert import_head(out / "draft").description.kind is Kind.EAGLE3
    for engine in ("sglang", "llama.cpp", "mlx", "tensorrt-llm"):
        message = refused(head, "--for", engine, "--out", tmp_path / engine, "--k", 4)
        assert f"{engine} drops the norms of EAGLE-3.1" in message
        assert not (tmp_path / engine).exists()


def test_a_medusa_head_needs_an_older_vllm(tmp_path):
    head = write_new_head(tmp_path / "head", "medusa")
    summary = exported(head, "--for", "vllm", "--out", tmp_path / "out", "--k", 2, "--target", embedded("mini"))
    assert summary["layout"] == "medusa-vllm"
    assert "vLLM 0.33 has removed Medusa" in (tmp_path / "out" / "run.sh").read_text()


def folders_of(command):
    """Return the words of a command that name a folder or a file of the target."""
    after = ("serve", "--model-path", "--model", "-m", "trtllm-serve")
    return [
        Path(word) for before, word in pairwise(words(command)) if before in after and word != "sglang.launch_server"
    ]


# llama.cpp needs the target as a GGUF file, which takes seconds to write.
@pytest.mark.fast_cases("vllm", "sglang", "mlx", "tensorrt-llm")
@pytest.mark.parametrize("engine", [name for name, each in ENGINES.items() if MODEL in each.recipes])
def test_included_models_are_named_by_what_exists(engine, tmp_path):
    summary = exported("@nano", "--for", engine, "--out", tmp_path / "out", "--k", 3, "--target", "@mini")
    (target,) = folders_of(summary["command"])
    assert target.exists()
    assert "@" not in summary["command"]
    if engine == "llama.cpp":
        assert target == tmp_path / "out" / "target.gguf"
        tokens = GGUFReader(target).fields["tokenizer.ggml.tokens"].data
        assert len(tokens) == read_target_info(embedded("mini")).vocab
    else:
        assert target == embedded("mini")
    message = refused("@nano", "--for", engine, "--out", tmp_path / "other", "--k", 3, "--target", "@none")
    assert "@none does not come with Outrider; use @eagle31" in message
    assert not (tmp_path / "other").exists()


def test_the_gguf_file_of_a_target(model, tmp_path):
    def command(name, target):
        summary = exported(model, "--for", "llama.cpp", "--out", tmp_path / name, "--k", 3, "--target", target)
        return summary["command"]

    # The first line of the command writes the file.
    first, second = command("a", model).replace("\\\n", "").splitlines()
    assert words(first)[-1] == words(second)[2] == str(tmp_path / "a" / "target.gguf")
    assert words(first)[:3] == ["python", "convert_hf_to_gguf.py", str(model)]
    own = tmp_path / "own"
    own.mkdir()
    file = Path(f"{own}.gguf")
    file.touch()
    for name, target in (("beside", own), ("itself", file)):
        assert words(command(name, target))[:3] == ["llama-server", "-m", str(file)]
    assert words(command("c", "some/model"))[2] == "some/model.gguf"


@pytest.fixture
def block_head(tmp_path):
    """A function that writes a head that fills in a block of 4 draft tokens. Its target is @mini."""

    def write(kind):
        info = read_target_info(embedded("mini"))
        _, description = cases(info.hidden, info.vocab)[kind]
        write_head(tmp_path / kind, random_draft(description, table=info.embedding().float()), dtype=torch.float32)
        return tmp_path / kind

    return write


def test_other_engines_compute_blocks_of_k_tokens(block_head, tmp_path):
    head = block_head("dflash")

    def run(out, *arguments, engine="vllm"):
        where = ("--for", engine, "--out", tmp_path / out, "--target", "@mini")
        return exported(head, *where, *arguments)

    assert run("whole", "--k", 4)["notes"] == []
    (note,) = run("short", "--k", 2)["notes"]
    assert "k is 2: vLLM computes a shorter block" in note
    assert note in (tmp_path / "short" / "run.sh").read_text()
    advice = tmp_path / "advice.json"
    case = {"proposer": f"draft:{head}", "k": 2, "batch": 1, "overall": {"value": 1.5}}
    advice.write_text(json.dumps({"benchmark": "outrider tune", "cases": [case]}))
    summary = run("tuned", "--advice", advice)
    assert summary["k"] == 4
    assert "k is 4, the whole block of this head, in place of 2 of the advice" in summary["notes"][0]
    llamacpp = run("llama", "--k", 4, engine="llama.cpp")
    assert "the converter stops at the tokenizer" in llamacpp["notes"][0]
    assert (tmp_path / "llama" / "target.gguf").is_file()


@pytest.mark.parametrize(("case", "engine"), [("causal dflash", "vllm"), ("dflash2", "vllm"), ("dflash2", "sglang")])
def test_blocks_with_attention_masks_keep_them_in_the_flat_format(case, engine, block_head, tmp_path):
    head, out = str(block_head(case)), str(tmp_path / "out")
    succeed("export", head, "--for", engine, "--target", "@mini", "--k", "4", "--out", out)
    config = json.loads((tmp_path / "out" / "draft" / "config.json").read_text())
    inner = config["dflash_config"]
    assert inner["causal"] is (case == "causal dflash")
    assert config["architectures"] == ["DFlash2DraftModel" if case == "dflash2" else "DFlashDraftModel"]
    assert inner.get("selector_top_k") == (5 if case == "dflash2" else None)


def test_engines_that_ignore_attention_masks_are_refused(block_head, tmp_path):
    head = str(block_head("causal dflash"))
    out = str(tmp_path / "out")
    message = refused(head, "--for", "sglang", "--target", "@mini", "--k", "4", "--out", out)
    assert "SGLang cannot run a draft of kind a block with windows or causal layers" in message


def test_sglang_runs_dspark_heads_with_the_whole_block_only(block_head, tmp_path):
    head = block_head("dspark")
    message = refused(head, "--for", "sglang", "--out", tmp_path / "out", "--k", 2, "--target", "@mini")
    assert "SGLang runs this head with its whole block only; use --k 4" in message
    assert exported(head, "--for", "sglang", "--out", tmp_path / "out", "--k", 4, "--target", "@mini")["k"] == 4


def test_suffix_has_a_command_and_no_files(tmp_path):
    out = tmp_path / "out"
    summary = exported("suffix", "--for", "vllm", "--out", out, "--k", 6, "--target", "models/big")
    assert (summary["kind"], summary["draft"], summary["files"]) == ("suffix", None, ["run.sh"])
    assert [file.name for file in out.iterdir()] == ["run.sh"]
    command = words(summary["command"])
    config = json.loads(command[command.index("--speculative-config") + 1])
    module, _, name = config["model"].rpartition(".")
    assert getattr(import_module(module), name) is Drafts
    assert (config["method"], config["num_speculative_tokens"]) == ("custom_class", 6)


def test_refusals_name_the_reason(model, tmp_path):
    medusa = write_random_head(tmp_path / "head", "medusa of some tokens")
    for folder, engine, message in (
        (medusa, "vllm", "loads no Medusa heads with a reduced draft vocabulary"),
        ("suffix", "sglang", "cannot run a draft of kind suffix"),
        (embedded("mtp"), "vllm", "vLLM reads MTP modules from the checkpoint of their target; give it with --target"),
        (embedded("mtp"), "ollama", "no command for MTP modules was checked; it runs dflash"),
        ("suffix", "mlx", "it runs dflash, draft model, eagle3"),
        (model, "ollama", "it takes every separate draft for a DFlash head"),
        (model, "lmdeploy", "use vllm, sglang, llama.cpp, mlx, ollama or tensorrt-llm"),
    ):
        assert message in refused(folder, "--for", engine, "--out", tmp_path / "out", "--k", 4)
        assert not (tmp_path / "out").exists()
    assert "give one of --k N and --advice FILE" in refused(model, "--for", "vllm", "--out", tmp_path / "out")


@pytest.fixture
def family(tmp_path):
    """A function that writes an MTP module and a target of its family, which has another module."""

    def write(case, architecture):
        layout, description = cases()[case]
        module = random_draft(description)
        write_head(tmp_path / "head", module, dtype=torch.float32)
        config, tensors = format_of(layout).write(description, random_draft(description, seed=1).state_dict(), None)
        target = tmp_path / "target"
        target.mkdir()
        (target / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
        names = sorted(tensors)
        shards = {
            "model-00001-of-00002.safetensors": {names[0]: tensors[names[0]], "model.norm.weight": torch.ones(64)},
            "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[1:]},
        }
        for file, values in shards.items():
            save_file({name: value.contiguous() for name, value in values.items()}, target / file)
        weight_map = {name: file for file, values in shards.items() for name in values}
        weight_map["mtp.old.weight" if layout == "mtp-qwen" else "model.mtp_layers.1.old"] = file
        (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return module, target

    return write


@pytest.mark.parametrize(("case", "architecture"), [("gated qwen", "Qwen3_5ForCausalLM"), ("mimo", "MiMoForCausalLM")])
def test_a_module_replaces_that_of_its_target(case, architecture, family, tmp_path):
    module, target = family(case, architecture)
    is_qwen = architecture.startswith("Qwen")
    out = tmp_path / "out"
    summary = exported(tmp_path / "head", "--for", "vllm", "--out", out, "--k", 3, "--target", target)
    command = words(summary["command"])
    assert command[:3] == ["vllm", "serve", str(out / "draft")]
    assert json.loads(command[-1]) == {"method": "mtp", "num_speculative_tokens": 3}
    count = "mtp_num_hidden_layers" if is_qwen else "num_nextn_predict_layers"
    assert json.loads((out / "draft" / "config.json").read_text())[count] == 1
    written = import_head(out / "draft")
    assert written.description == module.description
    for name, value in module.state_dict().items():
        if name != "ids":
            torch.testing.assert_close(written.weights[name], value, msg=name)
    files = sorted(file.name for file in (out / "draft").glob("*.safetensors"))
    stored = {name: file for file in files for name in load_file(out / "draft" / file)}
    index = json.loads((out / "draft" / "model.safetensors.index.json").read_text())["weight_map"]
    assert stored == index
    assert "model.norm.weight" in stored
    words_of_b = ("--for", "llama.cpp", "--out", tmp_path / "b", "--k", 3, "--target", target)
    result = invoke("export", tmp_path / "head", *words_of_b)
    assert (result.exit_code == 0) is is_qwen, result.output


def test_a_module_that_does_not_fit_its_target(family, tmp_path):
    _, target = family("mimo", "MiMoForCausalLM")
    file = target / "config.json"
    config = json.loads(file.read_text())
    for change, message in (
        ({"architectures": ["LlamaForCausalLM"]}, "is not known to run MTP modules of LlamaForCausalLM; use a target"),
        ({"architectures": []}, "modules of a target without architectures; use a target of MiMo"),
        ({"rope_theta": 5.0}, "was trained for a different layer configuration"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "body.theta was 10000.0 and is 5.0"),
        ({"num_hidden_layers": 3}, "and the given target has 96, 64 and 3; give the target of the head"),
    ):
        file.write_text(json.dumps({**config, **change}))
        said = refused(tmp_path / "head", "--for", "vllm", "--out", tmp_path / "out", "--k", 3, "--target", target)
        assert message in said
        assert not (tmp_path / "out").exists()


def test_untested_commands_say_so(model, tmp_path):
    summary = exported(model, "--for", "tensorrt-llm", "--out", tmp_path / "out", "--k", 2)
    assert summary["tested"] is None
    assert "# untested" in (tmp_path / "out" / "run.sh").read_text()
    assert "max_draft_len: 2" in (tmp_path / "out" / "speculation.yaml").read_text()


def test_every_command_has_the_k():
    for engine in ENGINES.values():
        for recipe in engine.recipes.values():
            draft = Draft(path="d", target="t", target_gguf="t.gguf", k=7)
            text = recipe.command(draft) + " ".join(recipe.files(draft).values())
            assert "7" in text or "8" in text  # some engines count the token of the target as well
            assert words(recipe.command(draft))
    draft = Draft(path="/e/d", target="/t", target_gguf="/t.gguf", k=7)
    modelfile = ENGINES["ollama"].recipe(Kind.DFLASH).files(draft)["Modelfile"]
    assert modelfile.splitlines() == ["FROM /t.gguf", "DRAFT /e/d/dflash.gguf", "PARAMETER draft_num_predict 7"]
    with pytest.raises(OutriderError, match="use vllm, sglang"):
        engine_of("x")


def test_the_k_of_tune(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()

    def case(k, batch, value, proposer=f"draft:{folder}"):
        return {"proposer": proposer, "k": k, "batch": batch, "overall": {"value": value}}

    file = tmp_path / "advice.json"
    cases = [case(2, 1, 1.2), case(6, 1, 1.5), case(2, 8, 1.1), case(6, 8, 0.9), case("auto", 8, 2.0)]
    document = {"benchmark": "outrider tune", "cases": [*cases, case(9, 1, 3.0, "ngram")]}
    file.write_text(json.dumps(document))
    assert [tuned_k(str(file), folder, batch) for batch in (1, 4, 8, 64)] == [6, 6, 2, 2]
    file.write_text(json.dumps(document | {"cases": [case(3, 1, 1.1, "draft:@nano")]}))
    assert tuned_k(str(file), embedded("nano"), 1) == 3
    file.write_text(json.dumps(document))
    with pytest.raises(OutriderError, match="has no fixed draft length"):
        tuned_k(str(file), tmp_path / "other", 1)
    with pytest.raises(OutriderError, match="tune --proposers suffix"):
        tuned_k(str(file), None, 1)
    file.write_text(json.dumps(document | {"cases": [case(3, 1, 1.1, "suffix:1000"), case(5, 1, 1.0, "suffix")]}))
    assert tuned_k(str(file), None, 1) == 3
    file.write_text("{}")
    with pytest.raises(OutriderError, match="is not a file of outrider tune"):
        tuned_k(str(file), folder, 1)
