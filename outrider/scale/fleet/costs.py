"""The cost model of a simulated replica: from a file, or that of `outrider project`."""

import json
from dataclasses import dataclass
from pathlib import Path

from outrider.drafting.plan.pass_cost import CostModel, PassCost
from outrider.errors import OutriderError
from outrider.scale.estimate.equations import Efficiency, Machine, Model, one_pass
from outrider.scale.estimate.machines import MIDDLE, MachineOverrides, efficiencies, find_machine
from outrider.scale.estimate.models import Bits, find_model

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # of the passes that are computed
# Work of the server outside of passes.
_SERVER = ("draft_round_seconds", "sequence_seconds", "draft_sequence_seconds", "chunk_seconds", "request_seconds")
_DEEP = 4096  # cached tokens of the pass that gives the cost of a cached token


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCosts:
    """The costs of a server: of its rounds, and of its work outside of the engine."""

    costs: CostModel
    draft_round_seconds: float = 0.0  # per round with draft tokens, besides `costs.host`
    sequence_seconds: float = 0.0  # per decoding sequence of a round
    draft_sequence_seconds: float = 0.0  # per sequence with draft tokens, in addition
    chunk_seconds: float = 0.0  # per chunk of a stream
    request_seconds: float = 0.0  # per request

    def dumps(self) -> str:
        """Return the costs as JSON text."""
        server = {name: getattr(self, name) for name in _SERVER}
        return json.dumps({**json.loads(self.costs.dumps()), "server": server})


def read_costs(file: str) -> ServerCosts:
    """Return the costs of a file with the JSON of `ServerCosts.dumps` or `CostModel.dumps`.

    Raises:
        OutriderError: the file cannot be read, or has no cost model.
    """
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
        server = json.loads(text).get("server", {})
        return ServerCosts(costs=CostModel.loads(text), **{name: float(server.get(name, 0.0)) for name in _SERVER})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else repr(error)
        raise OutriderError(
            f"{file} has no cost model ({reason}); give a file that benchmarks/server/fleet.py"
            " --out wrote, or --target and --machine"
        ) from None


def projected_costs(target: str, draft: str | None, machine: str | None, overrides: MachineOverrides) -> ServerCosts:
    """Return the costs that `outrider project` computes for a target and a draft model, in its middle case.

    Raises:
        OutriderError: a model or the machine is unknown.
    """
    hardware, sheet = find_machine(machine, overrides)
    case = next(each for each in efficiencies(sheet.kind, {}) if each.name == MIDDLE)
    costs = CostModel(
        target=_pass_cost(find_model(target, Bits()), hardware, case),
        draft=None if draft is None else _pass_cost(find_model(draft, Bits()), hardware, case),
        host=case.round_seconds,
    )
    return ServerCosts(costs=costs)


def _pass_cost(model: Model, machine: Machine, efficiency: Efficiency) -> PassCost:
    """Return passes over several numbers of tokens, and the costs of a cached token."""

    def seconds(tokens: int, seqs: int, context: float) -> float:
        return one_pass(model, machine, efficiency, tokens=tokens, seqs=seqs, context=context).seconds

    bandwidth = machine.bandwidth * efficiency.bandwidth
    entry = model.cache_bytes(_DEEP) / bandwidth / _DEEP
    rate = (machine.int8 if model.int8 else machine.bf16) * efficiency.arithmetic
    pair = efficiency.exposed * (model.operations(_DEEP) - model.operations(0)) / rate / _DEEP
    return PassCost(
        tokens=_TOKENS, seconds=tuple(seconds(tokens, tokens, 0) for tokens in _TOKENS), entry=entry, pair=pair
    )
