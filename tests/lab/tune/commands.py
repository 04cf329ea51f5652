"""Commands and costs that the tests of `outrider tune` share."""

import json

from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.drafting.plan.pass_cost import PassCost

PROMPTS = [
    {"category": "code", "prompt": "<|endoftext|>import os\nimport sys\n"},
    {"category": "code", "prompt": "<|endoftext|>def add(a, b):\n    return"},
    {"category": "prose", "prompt": "<|endoftext|>Once upon a time there was"},
]
CONSTANT = PassCost(tokens=(1, 64), seconds=(1.0, 1.0), entry=0.0, pair=0.0)
FIFTH = PassCost(tokens=(1, 2), seconds=(0.2, 0.2), entry=0.0, pair=0.0)


def invoke(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments), "--threads", "1", "--dtype", "float32"])


def document(result):
    return json.loads(result.stdout.splitlines()[-1])
