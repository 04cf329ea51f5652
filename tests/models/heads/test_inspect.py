"""The command `outrider inspect`."""

import json

from safetensors.torch import load_file

from outrider.core.stats import Stats
from outrider.models.heads.description import Kind
from outrider.models.heads.files import read_target_info
from outrider.models.loader.embedded import embedded
from outrider.tools import inspect_draft
from tests.models.heads.checkpoints import MINI, export_case, export_changed, invoke


def test_inspect_describes_every_kind():
    assert set(inspect_draft.KIND_TEXTS) == set(Kind)


def test_inspect_describes_a_draft_head(tmp_path):
    export_case(tmp_path / "a", "mimo")
    result = invoke("inspect", tmp_path / "a")
    assert result.exit_code == 0, result.output
    for words in ("MTP (MiMo's names)", "output of layer 7", "state, then embedding", "first embedding as zeros"):
        assert words in result.output
    export_case(tmp_path / "c", "dspark with tables")
    result = invoke("inspect", tmp_path / "c")
    assert result.exit_code == 0, result.output
    assert (
        "4 draft tokens in 4 columns, the last committed token predicts one as well, corrected by the previous"
        in result.output
    )
    folder = export_changed(tmp_path / "b", "eagle", lambda config, _: config.pop("num_target_layers"))
    result = invoke("inspect", folder, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    tensors = load_file(folder / "model.safetensors")
    assert document["parameters"] == sum(weight.numel() for weight in tensors.values())
    assert "--target DIR" in document["unknown"]


def test_probe_detects_a_head_with_low_acceptance(tmp_path):
    export_case(tmp_path, "eagle3", read_target_info(embedded("mini")), of=MINI)
    result = invoke("inspect", tmp_path, "--target", embedded("mini"), "--json")
    assert result.exit_code == 0, result.output
    probe = json.loads(result.stdout)["probe"]
    assert probe["draft_tokens"] >= 50
    assert probe["agreement"] < inspect_draft.ENOUGH
    assert [line.split(":")[0] for line in probe["checklist"]][:4] == ["layer index", "norm", "rotary", "concat order"]


def test_probe_accepts_a_head_with_high_acceptance(tmp_path, monkeypatch):
    class AcceptingLLM:
        stats = Stats(reached=(60,), accepted=(45,))

        def __init__(self, *_, **__):
            pass

        def generate(self, *_):
            pass

    export_case(tmp_path, "eagle3")
    monkeypatch.setattr(inspect_draft, "LLM", AcceptingLLM)
    probe = inspect_draft.probe(str(tmp_path), str(embedded("mini")))
    assert (probe.agreement, probe.draft_tokens, probe.checklist) == (0.75, 60, ())
