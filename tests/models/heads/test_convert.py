"""The command `outrider convert`."""

import json

from safetensors.torch import load_file

from outrider.models.heads.files import read_target_info
from outrider.models.heads.store import import_head
from outrider.models.loader.embedded import embedded
from tests.models.heads.checkpoints import MINI, all_equal, export_case, invoke


def test_convert_to_other_formats_and_back(tmp_path):
    module = export_case(tmp_path / "a", "eagle3 of some tokens")
    for source, out, format in (("a", "b", "eagle3-speculators"), ("b", "c", "outrider"), ("c", "d", "eagle3")):
        result = invoke("convert", tmp_path / source, "--to", format, "--out", tmp_path / out)
        assert result.exit_code == 0, result.output
        assert "and read back" in result.output
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in "ad")
    assert all_equal(first, last)
    assert import_head(tmp_path / "d").description == module.description
    assert json.loads((tmp_path / "d" / "config.json").read_text())["torch_dtype"] == "float32"


def test_convert_a_block_head_and_back(tmp_path):
    target = read_target_info(embedded("mini"))
    module = export_case(tmp_path / "a", "dflash", target, of=MINI)
    result = invoke("convert", tmp_path / "a", "--to", "outrider", "--out", tmp_path / "b")
    assert result.exit_code == 2
    assert "--target DIR" in result.output
    for source, out, format in (("a", "b", "outrider"), ("b", "c", "dflash-speculators"), ("c", "d", "dflash")):
        arguments = ("convert", tmp_path / source, "--to", format, "--out", tmp_path / out)
        result = invoke(*arguments, "--target", embedded("mini"))
        assert result.exit_code == 0, result.output
        assert "describes the head differently" not in result.output
    assert import_head(tmp_path / "d", target).description == module.description
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in "ad")
    assert all_equal(first, last)
    assert (tmp_path / "a" / "config.json").read_text().count("block_size") == 1


def test_convert_errors(tmp_path):
    export_case(tmp_path / "a", "legacy medusa", of=MINI)
    command = "convert", tmp_path / "a", "--to"
    result = invoke(*command, "medusa-vllm", "--out", tmp_path / "b")
    assert result.exit_code == 2
    assert "--target DIR" in result.output
    assert not (tmp_path / "b").exists()
    result = invoke(*command, "medusa-vllm", "--out", tmp_path / "b", "--target", embedded("mini"))
    assert result.exit_code == 0, result.output
    assert load_file(tmp_path / "b" / "model.safetensors")["lm_head.weight"].shape == (12288, 384)
    for format, message in (("guru", "format 'guru' is unknown; use outrider, "), ("eagle", "is of kind medusa")):
        result = invoke(*command, format, "--out", tmp_path / "c")
        assert result.exit_code == 2
        assert message in result.output
        assert not (tmp_path / "c").exists()
    result = invoke(*command, "medusa", "--out", tmp_path / "b")
    assert result.exit_code == 2
    assert "exists and is not empty" in result.output


def test_convert_needs_an_output_folder(tmp_path):
    export_case(tmp_path / "a", "legacy medusa", of=MINI)
    (tmp_path / "file").write_text("mine")
    for out, message in (("file", "is a file; name a folder"), ("file/b", "which is a file; name a folder")):
        result = invoke("convert", tmp_path / "a", "--to", "outrider", "--out", tmp_path / out)
        assert result.exit_code == 2
        assert message in result.output
    assert (tmp_path / "file").read_text() == "mine"
