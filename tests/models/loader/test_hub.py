"""Models by name from the Hub: names, the files that are fetched, the cache, and what can go wrong."""

import errno
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.drafting.propose.expression import absolute, fetch_models, model_names
from outrider.drafting.propose.registry import check_proposer
from outrider.errors import OutriderError
from outrider.lab.tune.config import settings_dict
from outrider.llm import LLM
from outrider.models.loader.embedded import absolute_name, embedded, model_folder, model_name
from outrider.models.loader.fingerprint import model_fingerprint
from outrider.models.loader.hub import fetch
from outrider.models.loader.hub.names import HubName, hub_name, shown
from outrider.runtime import bar
from outrider.scale.estimate.models import Bits, find_model
from outrider.tools.export.engines import engine_of
from outrider.tools.export.target import find_target
from tests.helpers.configured import configured
from tests.helpers.hub import Repository, files_of, serve_hub

CONFIG = b'{"model_type": "llama", "num_hidden_layers": 2}'
WEIGHTS = b"weights" * 100
UNREAD = dict.fromkeys(
    ("pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx", "onnx/config.json", "a.py"), b"unread" * 20
)
MODEL = {"config.json": CONFIG, "tokenizer.json": b"{}" * 50, "model.safetensors": WEIGHTS, **UNREAD}
GGUF = {
    "m-Q4_K_M.gguf": b"a" * 100,
    "m-UD-Q4_K_M.gguf": b"b" * 100,
    "m-IQ4_XS.gguf": b"c" * 100,
    "big/m-q8_0-00001-of-00002.gguf": b"d" * 100,
    "big/m-q8_0-00002-of-00002.gguf": b"e" * 100,
    "mmproj-F16.gguf": b"f" * 100,
    "m.f16.gguf": b"g" * 100,
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The cache of the Hub in an empty folder, and no login."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)  # between attempts
    fetch.hub_folder.cache_clear()
    yield folder
    fetch.hub_folder.cache_clear()


@pytest.fixture
def hub(monkeypatch):
    """A hub on localhost with the repository org/model."""
    with serve_hub() as server:
        use(monkeypatch, server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        server.repositories["org/model"] = Repository(dict(MODEL))
        yield server
        close_session()


def use(monkeypatch, url):
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def again(monkeypatch, *, offline=False):
    """Do as a new process does."""
    fetch.hub_folder.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)


def whole(cache):
    """Whether nothing is half-written."""
    return not list(cache.rglob("*.incomplete"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName(repo="org/name")),
        ("Qwen/Qwen2.5-0.5B-Instruct@main", HubName(repo="Qwen/Qwen2.5-0.5B-Instruct", revision="main")),
        ("org/name@refs/pr/1", HubName(repo="org/name", revision="refs/pr/1")),
        ("org/name-GGUF:q4_k_m", HubName(repo="org/name-GGUF", gguf="q4_k_m")),
        ("org/name@v1:Q8_0", HubName(repo="org/name", revision="v1", gguf="Q8_0")),
    ],
)
def test_names(text, name):
    assert hub_name(text) == name
    assert str(name) == text == model_name(text) == absolute_name(text)


@pytest.mark.parametrize(
    "text", ["name", "a/b/c", "/a/b", "./b", "../b", "~/b", "a/b.gguf", "a/b/", "@mini", "a/", "", None]
)
def test_paths_are_no_names(text):
    assert hub_name(text) is None


def test_an_existing_folder_or_file_is_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org/folder").mkdir()
    (tmp_path / "org/file").touch()
    assert model_folder("org/folder") == Path("org/folder")
    assert model_folder("org/file") == Path("org/file")


def test_only_the_needed_files_are_fetched_once(hub, cache, monkeypatch, caplog):
    caplog.set_level("INFO")  # as a server has it
    folder = model_folder("org/model")
    assert not caplog.records
    assert files_of(folder) == {name: data for name, data in MODEL.items() if name not in UNREAD}
    assert folder.parent.name == "snapshots"
    assert hub.downloads() == ["config.json", "model.safetensors", "tokenizer.json"]
    assert model_folder("org/model") == folder
    requests = len(hub.requests)
    again(monkeypatch)
    assert model_folder("org/model") == folder
    assert len([line for line in hub.requests[requests:] if "/org/model/" in line]) == 1  # is there a new commit?
    again(monkeypatch, offline=True)
    assert model_folder("org/model") == folder
    use(monkeypatch, "http://127.0.0.1:9")
    again(monkeypatch)
    assert model_folder("org/model") == model_folder(f"org/model@{folder.name}") == folder
    assert whole(cache)


def test_a_new_commit_is_fetched(hub, monkeypatch):
    old = model_folder("org/model")
    hub.repositories["org/model"].files["config.json"] = CONFIG + b" "
    assert model_folder("org/model") == old  # one process works with one commit
    again(monkeypatch)
    assert (model_folder("org/model") / "config.json").read_bytes() == CONFIG + b" "
    assert hub.downloads().count("model.safetensors") == 1  # the new commit has the same weights


def test_the_configuration_alone(hub):
    folder = model_folder("org/model@refs/pr/1", weights=False)
    assert sorted(files_of(folder)) == ["config.json", "tokenizer.json"]
    assert (model_folder("org/model") / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("files", "fetched"),
    [
        ({"model-1.safetensors": b"1", "model-2.safetensors": b"2", "other.safetensors": b"3"}, ["model-1", "model-2"]),
        ({"model.safetensors": b"1", "mtp.safetensors": b"2"}, ["model"]),
        ({"decoder.safetensors": b"1", "adapter_model.safetensors": b"2"}, ["decoder"]),
        ({"model.safetensors": b"1", "draft_vocab.safetensors": b"2"}, ["draft_vocab", "model"]),
    ],
)
def test_weights(hub, files, fetched):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}
    indexed = {"model.safetensors.index.json": json.dumps(index).encode()} if "model-1.safetensors" in files else {}
    hub.repositories["org/parts"] = Repository({"config.json": CONFIG, **indexed, **files, **UNREAD})
    folder = model_folder("org/parts")
    assert sorted(files_of(folder)) == sorted(["config.json", *indexed, *(f"{name}.safetensors" for name in fetched)])


@pytest.mark.parametrize(("file", "layers"), [("medusa_lm_head.pt", 32), ("pytorch_model.bin", 1)])
def test_pickled_files_of_draft_heads(hub, file, layers):
    config = json.dumps({"num_hidden_layers": layers}).encode()
    hub.repositories["org/head"] = Repository({"config.json": config, file: b"head"})
    assert (model_folder("org/head") / file).read_bytes() == b"head"


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        ("iq4_xs", "m-IQ4_XS.gguf"),
        ("F16", "m.f16.gguf"),
        ("UD-Q4_K_M", "m-UD-Q4_K_M.gguf"),
        ("m-q4_k_m", "m-Q4_K_M.gguf"),
        ("Q8_0", "big/m-q8_0-00001-of-00002.gguf"),
    ],
)
def test_gguf_files(hub, wanted, file):
    hub.repositories["org/gguf"] = Repository({**GGUF, "config.json": CONFIG})
    path = model_folder(f"org/gguf:{wanted}")
    assert str(path).endswith(f"/{file}")
    parts = (
        {name: data for name, data in GGUF.items() if name.startswith("big/")} if "-of-" in file else {file: GGUF[file]}
    )
    found = files_of(path.parents[file.count("/")])
    assert {name: data for name, data in found.items() if name != "config.json"} == parts
    assert absolute_name(path) == str(path)
    assert model_name(path) == path.stem  # not that of the file to which the cache links


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/modle", "org/modle is no folder or file here, and no model on http://.*; correct the name"),
        ("org/a--b", "org/a--b is no folder or file here, and no name of a model on http://"),
        ("org/model@v2", "org/model has no revision v2; use a branch, a tag or a commit of it"),
        (
            "org/gated",
            "org/gated is gated: accept its conditions at http://.*/org/gated, then log in with hf auth login",
        ),
        ("org/private", "for a private model log in with hf auth login, or set HF_TOKEN"),
        ("org/bin", "org/bin has no safetensors, .* use a repository with safetensors, or make a folder with"),
        ("org/empty", "org/empty has no config.json, so it is no model"),
        ("org/broken", "config.json is no JSON object, so it is damaged on the Hub; use another revision or model"),
        (
            "org/gguf",
            "org/gguf has GGUF files only; add the type of one, such as org/gguf:Q4_K_M. It has big/m-q8_0-00001",
        ),
        ("org/gguf:Q2_K", "org/gguf has no GGUF file of Q2_K; it has big/.*, m-IQ4_XS.gguf, m-Q4_K_M.gguf, m-UD-Q4"),
        ("org/gguf:Q4_K_M", "several GGUF files of Q4_K_M: m-Q4_K_M.gguf, m-UD-Q4_K_M.gguf; name .* org/gguf:m-Q4_K_M"),
        ("org/model:Q4_0", "org/model has no GGUF file of Q4_0; it has none at all"),
    ],
)
def test_mistakes(hub, cache, name, message):
    hub.repositories |= {
        "org/gated": Repository(MODEL, gated=True),
        "org/private": Repository(MODEL, private=True),
        "org/bin": Repository({"config.json": CONFIG, **{n: d for n, d in UNREAD.items() if n != "a.safetensors"}}),
        "org/empty": Repository({"a.txt": b"a"}),
        "org/broken": Repository({"config.json": b"[", "pytorch_model.bin": b"a"}),
        "org/gguf": Repository(GGUF),
    }
    with pytest.raises(OutriderError, match=message) as raised:
        model_folder(name)
    assert "\n" not in str(raised.value)
    assert whole(cache)


@pytest.mark.parametrize("name", ["org/gated", "org/private"])
def test_a_token_opens_gated_and_private_models(hub, monkeypatch, name):
    hub.repositories[name] = Repository(MODEL, gated="gated" in name, private="private" in name)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert (model_folder(name) / "model.safetensors").read_bytes() == WEIGHTS


def test_without_network(hub, cache, monkeypatch):
    again(monkeypatch, offline=True)
    with pytest.raises(OutriderError, match=r"not complete in the cache .*; HF_HUB_OFFLINE is set: unset it"):
        model_folder("org/model")
    hub.status = 503
    again(monkeypatch)
    with pytest.raises(OutriderError, match=r"http://.* cannot be reached \(status 503\): check the connection"):
        model_folder("org/model")
    use(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(
        OutriderError, match=r"http://127.0.0.1:9 cannot be reached \(.*refused\): check the connection"
    ):
        model_folder("org/model")


def test_a_broken_connection_is_resumed(hub, monkeypatch, capsys):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50)  # bytes that are written at once
    monkeypatch.setattr(bar, "LINE_SECONDS", 0.0)
    model_folder("org/model", weights=False)
    hub.cut_after = [100, 50]
    assert (model_folder("org/model") / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [line.split()[-1] for line in hub.requests if line.endswith("-")]
    assert ranges == ["bytes=100-", "bytes=150-"]
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["downloading org/model: 1 file, 700 bytes", "downloading org/model: 7% of 700 bytes"]
    assert lines[-2] == "downloading org/model: 93% of 700 bytes"


def test_a_lost_connection(hub, cache, monkeypatch):
    folder = model_folder("org/model", weights=False)
    hub.cut_after = [0] * 6
    with pytest.raises(OutriderError, match=r"download of org/model broke off \(.*\); run the same command again"):
        model_folder("org/model")
    assert whole(cache)
    assert not (folder / "model.safetensors").exists()
    again(monkeypatch, offline=True)
    with pytest.raises(OutriderError, match="not complete in the cache"):
        model_folder("org/model")
    again(monkeypatch)
    assert (model_folder("org/model") / "model.safetensors").read_bytes() == WEIGHTS


def test_ctrl_c(hub, cache, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("outrider.runtime.progress.Stage.advance", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model_folder("org/model")
    assert "interrupted; the same command downloads what is missing" in capsys.readouterr().err
    assert whole(cache)
    model_folder("org/model")
    assert hub.downloads() == ["config.json", "model.safetensors", "model.safetensors", "tokenizer.json"]
    assert "downloading org/model: 1 file, 700 bytes\ndownloaded org/model in " in capsys.readouterr().err


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(hub, cache, monkeypatch, full):
    model_folder("org/model", weights=False)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1000, 900, 100))
        with pytest.raises(OutriderError, match=r"takes 700 bytes, and 100 bytes are free in .*set HF_HOME"):
            model_folder("org/model")

    def write(*_, **__):
        raise OSError(full, os.strerror(full))

    monkeypatch.setattr(fetch, "hf_hub_download", write)
    with pytest.raises(
        OutriderError, match=r"org/model does not fit on the disk of .*; free some space, or set HF_HOME"
    ):
        model_folder("org/model")


def test_ranks_fetch_a_model_once(hub):
    name = HubName(repo="org/model")
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: fetch.hub_folder.__wrapped__(name), range(4)))
    assert len(folders) == 1
    assert hub.downloads().count("model.safetensors") == 1


def test_a_cache_without_room_for_the_list_of_files(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub._snapshot_download.write_tree_cache", lambda *_: None)
    assert (model_folder("org/model") / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("lacking", ["nothing", "model-2", "model"])
def test_a_cache_of_another_program(cache, monkeypatch, lacking):
    """It has refs, snapshots with links, and blobs, but no list of the files of the repository."""
    root = cache / "models--org--old"
    folder = root / "snapshots" / ("0" * 40)
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    files = {"config.json": CONFIG, "model.safetensors.index.json": index, "model-1.safetensors": b"1"}
    for file, data in {**files, "model-2.safetensors": b"2"}.items():
        blob = root / "blobs" / file
        blob.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        if not file.startswith(lacking):
            (folder / file).symlink_to(blob)
    (root / "refs").mkdir()
    (root / "refs/main").write_text("0" * 40)
    again(monkeypatch, offline=True)
    if lacking != "nothing":
        with pytest.raises(OutriderError, match=r"org/old is .* not complete in the cache"):
            model_folder("org/old")
    else:
        assert model_folder("org/old") == folder
        assert shown(str(folder)) == "org/old"
        copy = shutil.copytree(folder, cache / "copy")
        assert model_fingerprint(copy) == model_fingerprint(folder)


def test_the_fingerprint_of_a_gguf_file_in_the_cache(hub, tmp_path):
    hub.repositories["org/gguf"] = Repository(GGUF)
    path = model_folder("org/gguf:q8_0")
    parts = [tmp_path / file.name for file in path.parent.glob("*.gguf")]
    for part in parts:
        shutil.copyfile(path.with_name(part.name), part)
    assert model_fingerprint(tmp_path / path.name) == model_fingerprint(path)
    parts[1].write_bytes(b"other")
    assert model_fingerprint(tmp_path / path.name) != model_fingerprint(path)


def test_models_run_and_reports_name_them(hub, tmp_path):
    hub.repositories |= {
        "org/target": Repository(files_of(embedded("nano"))),
        "org/draft": Repository(files_of(embedded("nano"))),
    }
    llm = LLM("org/target", proposer="tree:org/draft", k=2, max_num_seqs=1, max_model_len=64)
    given = LLM("@nano", proposer="none", max_num_seqs=1, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=8)
    assert llm.generate(["def add(a, b):"], params)[0].text == given.generate(["def add(a, b):"], params)[0].text
    assert llm.parts.proposer_spec == "tree:org/draft"


def test_advice_keeps_the_names(hub, tmp_path, monkeypatch):
    hub.repositories["org/draft"] = Repository(files_of(embedded("nano")))
    monkeypatch.chdir(tmp_path)
    found = settings_dict(
        EngineConfig(target="org/draft"), proposer="merge(ngram,draft:org/draft)", k=2, verifier="walk"
    )
    assert found["proposer"] == "merge(ngram,draft:org/draft)" == absolute("merge(ngram,draft:org/draft)")
    assert found["target"] == "org/draft"
    assert list(found["models"]) == ["org/draft"] == list(model_names(found["proposer"]))
    file = tmp_path / "advice.json"
    file.write_text(json.dumps({"benchmark": "outrider tune", "version": 1, "settings": found}))
    assert configured(file).target == "org/draft"
    hub.repositories["org/draft"].files["config.json"] += b" "
    again(monkeypatch)
    with pytest.raises(OutriderError, match=r"org/draft has changed since .* was written; tune again"):
        configured(file)


def test_expressions_are_fetched_and_exports_are_not(hub, tmp_path):
    recipe = engine_of("vllm").recipe("draft model")
    assert find_target("org/model@v1", recipe, tmp_path).name == "org/model@v1"
    assert not hub.requests
    fetch_models("@mini", "first(ngram,best(suffix,cascade:org/model))", None)
    assert "model.safetensors" in hub.downloads()


def test_the_missing_folder_of_a_datastore_is_no_name(hub):
    assert list(model_names("merge(retrieval:w/idx,retrieval:w/idx:3,draft:org/name)")) == ["org/name"]
    with pytest.raises(OutriderError, match="w/idx holds no datastore; make one with outrider index"):
        check_proposer("retrieval:w/idx")


def test_a_missing_path_in_an_existing_folder(hub, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w").mkdir()
    with pytest.raises(OutriderError, match=r"^the folder w here has no w/idx, and no model on http"):
        model_folder("w/idx")


def test_a_size_needs_no_weights(hub):
    config = (embedded("mini") / "config.json").read_bytes()
    hub.repositories["org/size"] = Repository({**MODEL, "config.json": config})
    assert find_model("org/size", Bits()).name == "org/size"
    assert "model.safetensors" not in hub.downloads()


def test_environment_variables(hub, tmp_path):
    code = "from outrider.models.loader.embedded import model_folder; print(model_folder('org/private'))"
    hub.repositories["org/private"] = Repository(MODEL, private=True)
    home = tmp_path / "home"
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_TOKEN": hub.token}
    for offline in ("0", "1"):
        variables["HF_HUB_OFFLINE"] = offline
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
        assert done.stdout.startswith(f"{home}/hub/models--org--private/snapshots/")


def test_paths_do_not_import_the_client_of_the_hub():
    module = "outrider.models.loader.embedded"
    code = f"import sys; from {module} import model_folder; model_folder('./a'); model_folder('a.gguf')"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'huggingface_hub' not in sys.modules"], check=True)
