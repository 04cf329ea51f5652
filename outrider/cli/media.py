"""The commands of `outrider media`."""

import typer

from outrider.cli.derive import spread
from outrider.cli.options import Printing
from outrider.media.command.settings import BenchSettings, DemoSettings, TuneSettings

media = typer.Typer(
    no_args_is_help=True,
    help="Speculation over blocks of video, with a quality gate. The outputs are not exact.",
    pretty_exceptions_enable=False,
)


@media.command()
@spread
def demo(*, settings: DemoSettings, printing: Printing) -> None:
    """Write a video of one caption, made by the target, by the drafter, and by both.

    The border of a frame has the color of who made its block. Prints a table, then one JSON
    document as the last line if the output is not a terminal or with --json.
    """
    from outrider.media.command import demo as command

    command.demo(settings, as_json=printing.json)


@media.command()
@spread
def bench(*, settings: BenchSettings, printing: Printing) -> None:
    """Measure speed against quality of gates, random routing, strides and fixed places, interleaved.

    Prints tables, then one JSON document as the last line if the output is not a terminal or with --json.
    """
    from outrider.media.command import bench as command

    command.bench(settings, as_json=printing.json)


@media.command()
@spread
def tune(*, settings: TuneSettings, printing: Printing) -> None:
    """Choose the threshold of the gate for a wanted quality, with confidence intervals.

    Prints a table and the choice, then one JSON document as the last line if the output is not a terminal or with
    --json.
    """
    from outrider.media.command import tune as command

    command.run_tune(settings, as_json=printing.json)
