"""The command line of Outrider, in which rank 1 fails at some moment.

    torchrun --nproc-per-node 2 tests/runtime/failing_rank.py MOMENT HOW serve --tp 2 ...

MOMENT is `joining` (before the process group exists), `load` (while the model is read), `prefill` or `decoding` (in the
middle of the target's pass of a request). HOW is `killed` or `error`.
"""

import os
import signal
import sys

from torch.nn.modules.module import register_module_forward_pre_hook

from outrider.cli.app import main
from outrider.engine.engine import Engine
from outrider.models.loader import transformers_checkpoint
from outrider.runtime import ranks
from outrider.runtime.processes import rank

_ROUNDS = {"prefill": 1, "decoding": 4}  # the round that fails
_LAYER = 2  # the layer of it, from 1


def _fail(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("no memory in this rank")


def _fail_in(module: object, name: str, how: str) -> None:
    """Fail in place of a call of a function."""
    setattr(module, name, lambda *_, **__: _fail(how))


def _fail_in_round(number: int, how: str) -> None:
    """Fail before the MLP of a layer, in a round of the engine."""
    step = Engine.step
    rounds = 0
    layers = 0

    def count_rounds(engine: Engine) -> object:
        nonlocal rounds
        rounds += 1
        return step(engine)

    def count_layers(module: object, _: object) -> None:
        nonlocal layers
        layers += rounds == number and type(module).__name__ == "LlamaMLP"
        if layers == _LAYER:
            _fail(how)

    Engine.step = count_rounds
    register_module_forward_pre_hook(count_layers)


if __name__ == "__main__":
    moment, how, *words = sys.argv[1:]
    sys.argv[1:] = words
    if rank() == 1:
        if moment == "joining":
            _fail_in(ranks.distributed, "init_process_group", how)
        elif moment == "load":
            _fail_in(transformers_checkpoint, "_read_model", how)
        else:
            _fail_in_round(_ROUNDS[moment], how)
    main()
