"""Fixtures of the tests of `outrider tune`."""

import json

import pytest

from tests.drafting.plan.test_plan import costs
from tests.lab.tune.commands import CONSTANT, FIFTH, PROMPTS


@pytest.fixture(scope="module")
def quick():
    """Replace measured costs, because these tests do not check speeds."""
    with pytest.MonkeyPatch.context() as patch:
        for user in ("engine.build", "lab.tune.measure"):
            patch.setattr(
                f"outrider.{user}.known_costs", lambda _, drafts: [costs(CONSTANT, each and FIFTH) for each in drafts]
            )
        yield


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("tune") / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, PROMPTS)))
    return str(file)
