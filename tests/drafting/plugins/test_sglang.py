"""Tests of the drafts in SGLang: fakes of the classes that it extends, and the released package where installed."""

import ast
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from outrider.drafting.plugins import sglang as plugin
from outrider.errors import OutriderError

REPEATED = [1, 2, 3, 4, 5, 6, 7, 8]
NODES = 5


class FakeNgramWorker:
    """What `NGRAMWorker` of SGLang 0.5.23 sets before the drafts need it."""

    def __init__(self, *, overlap=False):
        self.enable_overlap = overlap
        self.draft_token_num = NODES
        self.device = "cpu"
        self.model_runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=1000, context_len=200))

    def alloc_memory_pool(self, **pools):
        self.pools = pools
        self.max_batch_size = 4


@pytest.fixture
def registered(monkeypatch):
    """Register with fakes of SGLang's modules. Return what was registered."""
    seen = {}

    class SpeculativeAlgorithm:
        @classmethod
        def register(cls, name, **options):
            def keep(factory):
                seen.update(name=name, factory=factory, **options)

            return keep

    class CustomSpecAlgo:
        def is_ngram(self):
            return False

        def is_eagle(self):
            return False

    modules = {
        "spec_info": {"SpeculativeAlgorithm": SpeculativeAlgorithm},
        "spec_registry": {"CustomSpecAlgo": CustomSpecAlgo},
        "ngram_worker": {"NGRAMWorker": FakeNgramWorker},
    }
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, f"sglang.srt.speculative.{name}", module)
    plugin.register()
    return SimpleNamespace(**seen)


def request(rid, prompt, output):
    return SimpleNamespace(rid=rid, origin_input_ids_unpadded=prompt, output_ids=output)


def batch(*reqs, late=None):
    info = None
    if late is not None:
        padded = [[*tokens, *[0] * (NODES - len(tokens))] for tokens in late]
        info = SimpleNamespace(
            accept_tokens=torch.tensor(padded).flatten(), accept_lens=torch.tensor(list(map(len, late)))
        )
    return SimpleNamespace(reqs=reqs, spec_info=info, grammar_needs_sync=lambda: False)


def worker(registered, **options):
    made = registered.factory(None)(**options)
    made.alloc_memory_pool(memory_pool_config=None)
    return made


def prepare(made, *reqs, late=None):
    nodes, seen = made._prepare_draft_tokens(batch(*reqs, late=late))
    return nodes.reshape(len(reqs), NODES).tolist(), seen.reshape(len(reqs), NODES, NODES)


def test_the_entry_point_registers_the_algorithm(registered):
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))["project"]
    module, _, name = project["entry-points"]["sglang.srt.plugins"]["outrider"].partition(":")
    assert getattr(sys.modules[module], name) is plugin.register
    assert (registered.name, registered.supports_overlap) == ("OUTRIDER", True)
    algorithm = registered.spec_class()
    assert algorithm.is_ngram()
    assert not algorithm.has_draft_kv()
    assert not algorithm.is_eagle()


def test_a_chain_follows_the_last_token_and_fillers_see_only_it(registered):
    made = worker(registered)
    assert made.pools == {"memory_pool_config": None}
    nodes, seen = prepare(made, request("a", [*REPEATED, 1], [2]), request("b", [9], [10]))
    assert nodes == [[2, 3, 4, 5, 6], [10, 0, 0, 0, 0]]
    assert np.array_equal(seen[0], np.tri(NODES, dtype=bool))
    alone = np.eye(NODES, dtype=bool)
    alone[:, 0] = True
    assert np.array_equal(seen[1], alone)


def test_the_text_grows_between_steps_and_ends_with_the_request(registered):
    made = worker(registered)
    prepare(made, request("a", [*REPEATED, 1], [2]), request("b", [30], [31]))
    nodes, _ = prepare(made, request("b", [30], [31, 30]), request("a", [*REPEATED, 1], [2, 3, 4]))
    assert nodes[1] == [4, 5, 6, 7, 8]
    assert made.drafter.num_running == 2
    prepare(made, request("c", [1], [2]))
    assert made.drafter.num_running == 1
    assert list(made.known_tokens) == ["c"]
    # SGLang has retracted a request, and runs it again with its output.
    nodes, _ = prepare(made, request("a", [*REPEATED, 1], [2, 3, 4]))
    assert nodes == [[4, 5, 6, 7, 8]]


def test_overlapped_steps_add_the_tokens_that_requests_do_not_hold_yet(registered):
    made = worker(registered, overlap=True)
    nodes, _ = prepare(made, request("a", [*REPEATED, 1], []), late=[[2]])
    assert nodes == [[2, 3, 4, 5, 6]]
    nodes, _ = prepare(made, request("a", [*REPEATED, 1], [2]), late=[[3, 4]])
    assert nodes == [[4, 5, 6, 7, 8]]


def test_the_environment_names_the_proposer(registered, monkeypatch):
    monkeypatch.setenv("OUTRIDER_PROPOSER", "none")
    assert prepare(worker(registered), request("a", [*REPEATED, 1], [2]))[0] == [[2, 0, 0, 0, 0]]
    monkeypatch.setenv("OUTRIDER_PROPOSER", "recycle")
    with pytest.raises(OutriderError, match="recycle needs a model or the logits"):
        worker(registered)


def test_the_settings_are_those_of_ngrams(registered):
    algorithm = registered.spec_class()
    fields = {"device": "cpu", "max_running_requests": None, "speculative_num_draft_tokens": None}
    settings = SimpleNamespace(**fields)
    algorithm.handle_server_args(settings)
    assert settings.disable_overlap_schedule
    assert not settings.enable_mixed_chunk
    assert (settings.max_running_requests, settings.speculative_num_draft_tokens) == (48, 12)
    assert (settings.speculative_eagle_topk, settings.speculative_num_steps) == (1, 12)
    with pytest.raises(OutriderError, match="leave OUTRIDER out"):
        algorithm.handle_server_args(SimpleNamespace(**(fields | {"device": "npu"})))


def released(module):
    """Return the parsed source of a module of the installed SGLang. Most modules cannot be imported without a GPU."""
    found = find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip("SGLang is not installed")
    return ast.parse((Path(found.submodule_search_locations[0]) / "srt" / f"{module}.py").read_text("utf-8"))


def test_the_released_worker_has_what_is_replaced():
    nodes = released("speculative/ngram_worker").body
    (worker_class,) = (node for node in nodes if isinstance(node, ast.ClassDef) and node.name == "NGRAMWorker")
    functions = [node for node in worker_class.body if isinstance(node, ast.FunctionDef)]
    methods = {node.name: ast.unparse(node) for node in functions}
    replaced = {name for name in vars(plugin.DraftsInWorker) if not name.startswith("__")} - {"_late_tokens"}
    assert replaced <= set(methods)
    assert "req_drafts, mask = self._prepare_draft_tokens(batch)" in methods["_prepare_for_speculative_decoding"]
    assert "self.max_batch_size = self.model_runner.max_running_requests" in methods["alloc_memory_pool"]
    assert "self.draft_token_num: int" in methods["__init__"]
    assert "self.enable_overlap = " in methods["__init__"]
    assert "target_worker.tokenizer" in methods["__init__"]
    for name in ("origin_input_ids_unpadded", "output_ids", "accept_tokens", "accept_lens", "grammar_needs_sync"):
        assert name in methods["_prepare_draft_tokens"]
    # Nothing else reads what the replaced methods leave out.
    others = "".join(text for name, text in methods.items() if name not in replaced)
    assert "prev_token_ids" not in others


def test_the_released_registry_takes_the_algorithm():
    pytest.importorskip("sglang")
    try:
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    except ImportError as error:
        pytest.skip(f"SGLang cannot be imported here: {error}")
    plugin.register()
    algorithm = SpeculativeAlgorithm.from_string("outrider")
    assert algorithm.is_ngram()
    assert algorithm.is_speculative()
    with pytest.raises(ValueError, match="already registered"):
        plugin.register()
