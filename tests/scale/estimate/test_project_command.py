"""The command `outrider project`."""

import json
import subprocess
import sys

import pytest

from outrider import OutriderError
from outrider.models.loader.embedded import embedded
from outrider.scale.estimate.machines import NAMES, SHEETS, MachineOverrides, efficiencies, find_machine
from outrider.scale.estimate.models import SIZES, Bits, find_model
from tests.scale.estimate.projected import OPTIONS, project, projected


def test_document_and_tables():
    words = ("--proposer", "draft:1B", "--batch", "1,16,400", "--context", "512,4096")
    document, text = projected(*OPTIONS, *words)
    assert text.startswith("Estimate, not a measurement: Llama 3.1 8B on H100")
    assert text.count("Estimate, ") == 3
    assert "nothing was measured" in document["projection"]
    assert [result["batch"] for result in document["results"]] == [1, 16, 400] * 2
    batch_1, _, batch_400 = document["results"][:3]
    _, memory_4096 = document["memory"]
    assert tuple(batch_1["cases"]) == NAMES
    middle = batch_1["cases"]["middle"]
    assert middle["tokens_per_s"] == pytest.approx(middle["speedup"] * middle["plain_tokens_per_s"])
    assert middle["k"] > batch_400["cases"]["middle"]["k"]
    assert memory_4096["sequences"] < memory_4096["sequences_without_draft"] < 400
    rows = [line.split() for line in text.splitlines() if line.split()[:2] == ["400", "pessimistic"]]
    assert [row[-1] for row in rows] == ["yes", "no"]
    stops = document["stops_paying"]
    assert (stops[0]["context"], stops[1]["context"]) == (512, 4096)
    assert stops[0]["pessimistic"] > 400
    assert "pessimistic " + str(stops[0]["pessimistic"]) in " ".join(text.split())


def test_equal_figures_keep_their_places():
    document, _ = projected("--target", "8B", "--machine", "h100", "--alpha", "0.8,0.8,0.7", "--exposed", "0.5,0.2,0.2")
    assert document["acceptance"]["rates"] == [0.8, 0.8, 0.7]
    assert [case["exposed"] for case in document["efficiency"]] == [0.5, 0.2, 0.2]


def test_every_option_reaches_the_document():
    words = "--devices 2 --bandwidth 1000 --flops 100 --memory 20 --weight-bits 8 --cache-bits 8 --draft-bits 4"
    words += " --bandwidth-share 0.5 --arithmetic-share 0.1,0.2,0.3 --exposed 1 --round-ms 2 --layer-us 3"
    words += " --allreduce-us 4 --k 0..3 --nodes 2 --batch 4 --proposer draft:0.5B"
    document, text = projected(*OPTIONS, *words.split())
    assert document["machine"]["name"] == "2 x H100"
    assert document["machine"]["read_bytes_per_s"] == 2e12
    assert document["machine"]["int8_ops_per_s"] == 2e14
    assert document["machine"]["memory_bytes"] == 4e10
    assert (document["target"]["bits"], document["target"]["cache_bits"], document["target"]["int8"]) == (8, 8, True)
    assert document["draft"]["model"]["bits"] == 4
    assert document["acceptance"]["nodes"] == 2
    pessimistic, _, optimistic = document["efficiency"]
    assert (pessimistic["bandwidth"], pessimistic["exposed"]) == (0.5, 1)
    assert (pessimistic["arithmetic"], optimistic["arithmetic"]) == (0.1, 0.3)
    overheads = (pessimistic["round_seconds"], pessimistic["layer_seconds"], pessimistic["allreduce_seconds"])
    assert overheads == (2e-3, 3e-6, 4e-6)
    assert max(case["k"] for case in document["results"][0]["cases"].values()) <= 3
    assert "4 µs per layer for all-reduces" in " ".join(text.split())


def test_machine_without_a_name_and_other_proposers():
    options = ("--target", "30B-A3B", "--bandwidth", "500", "--flops", "50", "--alpha", "0.8,0.7")
    document, text = projected(*options, "--proposer", "block:0.1")
    assert document["machine"]["name"] == "a machine of your own"
    assert document["free_tokens"]["middle"] is None
    assert "give --memory" in text
    assert "active per token" in text
    assert document["draft"]["passes"] == "one per round"
    assert projected(*options)[0]["draft"]["model"] is None
    assert projected(*options, "--proposer", "head:0.1")[0]["draft"]["passes"] == "one per draft token"


@pytest.mark.parametrize("name", SHEETS)
def test_figures_of_every_machine(name):
    hardware, sheet = find_machine(name.lower().replace(" ", "-"), MachineOverrides())
    assert hardware.int8 >= hardware.bf16 > 100 * hardware.bandwidth / 1e3 / 1e3
    assert len(efficiencies(sheet.kind, {})) == 3


def test_models_in_folders():
    document, _ = projected("--target", str(embedded("mini")), *OPTIONS[2:], "--proposer", f"draft:{embedded('nano')}")
    assert document["target"]["name"] == "mini"
    for name, model in (("mini", document["target"]), ("nano", document["draft"]["model"])):
        size = (embedded(name) / "model.safetensors").stat().st_size
        assert model["weight_bytes"] == pytest.approx(size, rel=0.01)


def test_command_does_not_import_torch():
    code = "import sys; from outrider.cli.app import main; sys.argv[1:] = sys.argv[1:]\n"
    code += "try: main()\nfinally: assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "project", *OPTIONS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--machine", "Z80"], "machine 'Z80' is unknown; use B200, H200"),
        (["--target", "nowhere"], "nowhere is neither a folder with a config.json nor a size"),
        (["--alpha", "1.2"], "an acceptance rate is 1.2"),
        (["--alpha", "0.5,x"], "--alpha is '0.5,x'"),
        (["--proposer", "oracle"], "proposer 'oracle' is not supported here"),
        (["--proposer", "draft"], "proposer 'draft' is not supported here"),
        (["--proposer", "draft:nowhere"], "nowhere is neither a folder"),
        (["--proposer", "head:much"], "has no share of the target as a number; write for example head:0.04"),
        (["--proposer", "block:2"], "a head's share of the target is 2.0"),
        (["--alpha", "0.8,0.7", "--k", "1..3"], "acceptance is known for 2 positions; use --k 0..2"),
        (["--batch", "0"], "batch is 0"),
        (["--context", "0,5"], "context is 0"),
        (["--devices", "0"], "devices is 0"),
        (["--bandwidth", "-1"], "bandwidth is -1.0"),
        (["--weight-bits", "0"], "weight bits are 0.0"),
        (["--nodes", "0"], "nodes is 0.0"),
        (["--bandwidth-share", "1.5"], "bandwidth shares are (1.5,)"),
        (["--arithmetic-share", "0"], "arithmetic shares are (0.0,)"),
        (["--exposed", "2"], "exposed shares are (2.0,)"),
        (["--round-ms", "1,2"], "2 figures are given for round in ms; give one, or three"),
        (["--layer-us", "-1"], "a time is -1.0"),
        (["--draft-us", "-1"], "draft-us is -1.0"),
        (["--draft-us", "inf"], "draft-us is inf"),
        (["--draft-us", "-1", "--proposer", "draft:1B"], "draft-us is -1.0"),
        (["--draft-pass-us", "-1"], "a time is -1.0"),
        (["--draft-bits", "4"], "--draft-bits is for a draft model, and the proposer is ngram"),
        (["--draft-bits", "4", "--proposer", "head:0.1"], "and the proposer is head"),
        (["--allreduce-us", "4"], "give --devices as well"),
        (["--nodes", "inf"], "nodes is inf"),
        (["--nodes", "nan"], "nodes is nan"),
        (["--bandwidth", "inf"], "bandwidth is inf"),
        (["--round-ms", "nan"], "a time is nan"),
        (["--k", "1000000"], "k is 1000000; use at most 1024"),
        (["--context", "9" * 400], "use at most 1000000000"),
        (["--target", "9" * 400 + "B"], "is not the size of a model"),
        (["--target", "0B"], "0B is not the size of a model"),
        (["--category", "code"], "--category is a category of a benchmark"),
        (["--from", "nowhere.json"], "give the acceptance once"),
        (["--prompt-tokens", "9"], "--prompt-tokens is for prefill on its own devices; give --rate as well"),
        (["--output-tokens", "0", "--rate", "1"], "--output-tokens is 0"),
    ],
)
def test_error_messages_are_one_line(words, message):
    result = project(*OPTIONS, *words)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--machine", "H100", "--alpha", "0.8"], "no target is named"),
        (["--target", "8B", "--alpha", "0.8"], "no machine is named; use --machine with one of"),
        (["--target", "8B", "--alpha", "0.8", "--flops", "10"], "or give --bandwidth in GB/s and --flops"),
        (["--target", "8B", "--machine", "H100"], "give the acceptance once"),
        (["--target", "8B", "--machine", "H100", "--from", "nowhere"], "nowhere cannot be read"),
    ],
)
def test_errors_of_missing_options(words, message):
    result = project(*words)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is not a JSON object"),
        ('{"model_type": "mamba2"}', "has the model type 'mamba2', which is not one of llama"),
        ('{"model_type": "llama", "hidden_size": 8}', "is invalid .KeyError..num_hidden_layers"),
        (json.dumps(dict(SIZES["8B"][1]) | {"layer_types": ["linear_attention"] * 32}), "layers of type linear"),
    ],
)
def test_errors_of_unsupported_configurations(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(OutriderError, match=message):
        find_model(str(tmp_path), Bits())
