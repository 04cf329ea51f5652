"""Settings of all tests: the CPU, one thread per process, seeds, and given costs of passes. Shared speech models."""

import gc
import os
from pathlib import Path

import pytest
import torch

GPU_TESTS = Path(__file__).parent / "gpu"

torch.set_num_threads(1)  # the models are small


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="Show the GPUs to the tests; see `make test-gpu`.")


def pytest_configure(config):
    """Hide the GPUs and the Hub, so that the tests and the programs that they start run everywhere alike."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_ignore_collect(collection_path, config):
    """Leave out the tests that need a GPU without `--gpu`: loading and skipping them takes seconds."""
    return True if collection_path == GPU_TESTS and not config.getoption("--gpu") else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import the tests without the garbage collector. It takes a third of that time, and frees nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # the modules and the tests live to the end: no search for cycles needs them
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest selects the tests by their markers
def pytest_collection_modifyitems(config, items):
    """Mark the cases of a test as slow that its marker `fast_cases` does not name. Refuse names of no case."""
    unknown = {}  # by test: the names in its marker that no collected case has
    for item in items:
        marker = item.get_closest_marker("fast_cases")
        if marker is None:
            continue
        if item.callspec.id not in marker.args:
            item.add_marker(pytest.mark.slow)
        unknown.setdefault(item.nodeid.partition("[")[0], set(marker.args)).discard(item.callspec.id)
    collects_all = not (config.getoption("last_failed", False) or any("[" in argument for argument in config.args))
    if collects_all and any(unknown.values()):
        lines = [f"{test}: {', '.join(sorted(names))}" for test, names in unknown.items() if names]
        raise pytest.UsageError("fast_cases names cases that do not exist: " + "; ".join(lines))


def pytest_make_parametrize_id(val):
    """Name a data type like the options do: "float32"."""
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Seed torch, so that random models do not depend on the tests that ran before in the same process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def given_costs():
    """Give planners fixed costs: measuring takes seconds for each model, width and context."""
    from outrider.drafting.plan.pass_cost import (  # here, so that collecting tests does not import it
        CostModel,
        PassCost,
    )

    # As of the embedded models on one core: a pass over a few tokens costs little more than a pass over one.
    columns = (1, 8, 16, 64, 512)
    target = PassCost(tokens=columns, seconds=(5e-3, 7e-3, 1e-2, 3e-2, 2e-1), entry=0.0, pair=0.0)
    draft = PassCost(tokens=columns, seconds=(5e-4, 7e-4, 1e-3, 3e-3, 2e-2), entry=0.0, pair=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "outrider.engine.build.known_costs",
            lambda _, drafts: [CostModel(target=target, draft=other and draft) for other in drafts],
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def no_kept_checks():
    """Check each model that a test loads: tests change the code that is checked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.models.loader.check.once", lambda checkpoint, target, bits, check: check())
        yield


@pytest.fixture(scope="session", autouse=True)
def known_references():
    """Let transformers compute the reference of an embedded model once: it takes half of the time to load the model."""
    from outrider.models.loader import check
    from outrider.models.loader.embedded import embedded

    compute = check.compute_reference
    folders = {str(embedded(name)) for name in ("mini", "nano")}
    known = {}

    def samples(checkpoint):
        """Some of the weights. Those that the native kernels read are as in the file, unless they are quantized."""
        if checkpoint.weights is not None and not checkpoint.lazy_model.may_differ:
            return ()  # making the model takes longer than everything else
        weights = checkpoint.model.state_dict().items()
        return tuple((name, value.dtype, value.shape, *value.flatten()[::997].tolist()) for name, value in weights)

    def reference(checkpoint, scored, source):
        if checkpoint.folder not in folders:
            return compute(checkpoint, scored, source)
        key = (checkpoint.folder, str(checkpoint.device), checkpoint.dtype, *scored.tokens, samples(checkpoint))
        if key not in known:
            known[key] = compute(checkpoint, scored, source)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "compute_reference", reference)
        yield


@pytest.fixture(scope="session", autouse=True)
def given_rates():
    """Give the rates of the machine: measuring takes seconds, and no test checks their values."""
    from outrider.lab.bench.rates import Rates

    rates = Rates(read={"normal_pages": 1e10, "huge_pages": 1e10}, gemm=1e11)
    with pytest.MonkeyPatch.context() as patch:
        for user in ("calibration", "run", "scaling"):
            patch.setattr(f"outrider.lab.bench.{user}.measure_rates", lambda device, dtype: rates)
        yield


@pytest.fixture(scope="session", autouse=True)
def short_evaluations():
    """Let the evaluations of trainings generate few tokens. They take longer than the small trainings of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.train.run.EVAL_TOKENS", 16)
        yield


@pytest.fixture
def measured_costs(monkeypatch):
    """Measure the costs of passes, as outside the tests."""
    from outrider.drafting.plan.known_costs import known_costs

    monkeypatch.setattr("outrider.engine.build.known_costs", known_costs)


@pytest.fixture(scope="session")
def timed_whisper(tmp_path_factory):
    """The folder of a small random Whisper whose vocabulary has timestamps."""
    from tests.helpers.speech import save_with_timestamps

    return save_with_timestamps(tmp_path_factory.mktemp("speech") / "target")


@pytest.fixture(scope="session")
def whisper_draft(tmp_path_factory):
    """The folder of a smaller Whisper with the vocabulary of `timed_whisper`."""
    from tests.helpers.speech import save_with_timestamps

    return save_with_timestamps(tmp_path_factory.mktemp("speech") / "draft", seed=1, layers=1)


@pytest.fixture(scope="module")
def whisper_model(timed_whisper):
    """The model of `timed_whisper` in transformers."""
    from tests.helpers.speech import load_reference

    return load_reference(timed_whisper)
