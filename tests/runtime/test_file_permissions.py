"""Tests that written files follow the umask, including files that are written atomically or by safetensors."""

import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from inflate.files import inflate_folder
from inflate.model import Dims
from transformers import LlamaForCausalLM

from outrider.drafting.propose.lookup.datastore import describe as header_of
from outrider.models.heads.files import write_folder
from outrider.models.heads.store import make_module, write_head
from outrider.runtime.atomic_files import write_whole
from outrider.tools.index import write as write_index
from outrider.train.data.feature_cache import FeatureCache
from outrider.train.model.presets import Sizes, describe
from outrider.train.model.trainee import make_trainee
from outrider.train.report.log import write as write_log
from outrider.train.settings import DRAFT
from outrider.train.trainer import Trainer
from recipes.family.train import save as save_family
from tests.helpers import tiny, train_setup


def head(folder):
    module = make_module(describe("mtp", Sizes(hidden=64, layers=2, vocab=40, epsilon=1e-5)))
    write_head(folder, module, dtype=torch.bfloat16)


def torch_file(folder):
    write_folder(folder, {}, {"x": torch.zeros(2)}, "medusa_lm_head.pt")


def feature_cache(folder):
    cache = FeatureCache(folder, gigabytes=1.0, origin="here", layers=(1,))
    cache.write(train_setup.make_request(), train_setup.make_sample([1, 2, 3, 4]))


def trained_draft(folder):
    loaded = train_setup.load_target()
    settings = train_setup.make_settings(init_from=train_setup.NANO)
    make_trainee(DRAFT, settings, train_setup.make_setup(loaded), loaded.tables).save(folder)


def trainer_state(folder):
    Trainer(train_setup.ConstantTrainee(1, 4), losses={"ce": 1.0}, steps=1, decay=1.0, lr=0.1).save(folder)


def inflated_model(folder):
    small = tiny.save(folder / "small", tiny.make_config("LlamaConfig"))
    inflate_folder(small, folder / "large", Dims(hidden=96, heads=12, kv_heads=6, head_dim=16))
    for file in (folder / "small").iterdir():
        file.unlink()


def model_family(folder):
    model = LlamaForCausalLM(tiny.make_config("LlamaConfig"))
    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda names: [0, 1], save_pretrained=lambda folder: None)
    save_family(model, tokenizer, folder)


def datastore(folder):
    tokens = np.array([1, 2, 3], np.uint32)
    header = header_of(tokens, documents=1, vocab=4, tokenizer="none")
    write_index(folder / "index", header, tokens, np.arange(3, dtype=np.uint32), force=False)


def training_log(folder):
    write_log(folder / "log.json", "{}")


def plan_file(folder):
    folder.mkdir()
    write_whole(folder / "plan.json", "{}")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no umask")
@pytest.mark.parametrize(
    "make",
    [
        head,
        torch_file,
        feature_cache,
        trained_draft,
        trainer_state,
        inflated_model,
        model_family,
        datastore,
        training_log,
        plan_file,
    ],
)
def test_files_follow_the_umask(make, tmp_path):
    before = os.umask(0o027)
    try:
        make(tmp_path / "out")
    finally:
        os.umask(before)
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert written
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in written} == {path.name: "0o640" for path in written}
    assert all(path.stat().st_mode & 0o777 == 0o750 for path in (tmp_path / "out").rglob("*") if path.is_dir())
