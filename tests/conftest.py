"""One torch thread a process, as the suite runs as many as there are cores; and what passes cost, without measuring."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # the models are small


@pytest.fixture(scope="session", autouse=True)
def given_costs():
    """Planners go by costs that are given: measuring takes seconds for every model, width and context."""
    from outrider.plan.pass_cost import CostModel, PassCost  # not above: who only hands tests out loads this file too

    # Of models like the embedded ones on one core: a pass over few columns costs little more than one over one.
    columns = (1, 8, 16, 64, 512)
    target = PassCost(tokens=columns, seconds=(5e-3, 7e-3, 1e-2, 3e-2, 2e-1), entry=0.0, pair=0.0)
    draft = PassCost(tokens=columns, seconds=(5e-4, 7e-4, 1e-3, 3e-3, 2e-2), entry=0.0, pair=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "outrider.engine.build.known_costs", lambda _, other: CostModel(target=target, draft=other and draft)
        )
        yield


@pytest.fixture
def measured_costs(monkeypatch):
    """What passes cost here, as anywhere else, for tests in which planners are to go by it."""
    from outrider.plan.calibrate import known_costs

    monkeypatch.setattr("outrider.engine.build.known_costs", known_costs)
