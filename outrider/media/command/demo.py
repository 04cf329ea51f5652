"""The command `outrider media demo`: one video or sound made by the target, by the drafter, and by both."""

from typing import Any

from rich.console import Console

from outrider.errors import OutriderError
from outrider.media.calibration.document import Calibration
from outrider.media.command.settings import DemoSettings
from outrider.media.contract import Router
from outrider.media.models.store import EMBEDDED, AudioModels, MediaModels, load_models
from outrider.media.output.compare import draw_comparison
from outrider.media.output.wav import check_sound_file, write_wav
from outrider.media.output.writer import check_video_file, write_video
from outrider.media.results import Maker, MediaResult
from outrider.media.routers import DrafterOnly, QualityGate, TargetOnly
from outrider.runtime.machine import use_threads
from outrider.runtime.report.console import Document, new_table, print_document, print_plain

_FPS = 12.0
EXAMPLE = "a red circle moving right from the top left on a black background"  # for the embedded models


def demo(settings: DemoSettings, *, as_json: bool) -> None:
    """Write the video or the sounds and print who made each block."""
    models = load_models(settings.models, eager_commits=settings.eager_commits)
    writer: _Sounds | _Video = _Sounds(settings, models) if isinstance(models, AudioModels) else _Video(settings)
    use_threads(settings.threads)
    prompt = settings.prompt or _default_prompt(settings, models)
    models.language.tokens(prompt)
    routers: dict[str, Router] = {"target-only": TargetOnly(), "drafter-only": DrafterOnly(), "routed": _gate(settings)}
    for router in routers.values():
        models.engine.generate(prompt, router, seed=settings.seed, blocks=2)  # to warm up
    results = {name: models.engine.generate(prompt, router, seed=settings.seed) for name, router in routers.items()}
    scores = {
        name: float(models.engine.scorer.score(prompt, result.content).mean()) for name, result in results.items()
    }
    document = {
        "exact": False,
        "prompt": prompt,
        **writer.write(results, scores),
        "scores": scores,
        "outputs": {name: result.to_json() for name, result in results.items()},
    }
    print_document(document, _show, as_json=as_json)


class _Video:
    """Writes one video with all outputs side by side."""

    def __init__(self, settings: DemoSettings) -> None:
        self._file = check_video_file(settings.out or "media.mp4")  # before the work rather than after it
        self._fps = settings.fps or _FPS

    def write(self, results: dict[str, MediaResult], scores: dict[str, float]) -> Document:
        """Write the file, and return what the document says about it."""
        panels = [
            (name, f"{1e3 * result.seconds.total:.0f} ms, score {scores[name]:.2f}", result)
            for name, result in results.items()
        ]
        written = write_video(draw_comparison(panels), self._file, fps=self._fps)
        return {"kind": "video", "files": [str(written.file)], "note": written.note}


class _Sounds:
    """Writes a WAV file for each output."""

    def __init__(self, settings: DemoSettings, models: AudioModels) -> None:
        if settings.fps is not None:
            raise OutriderError("--fps belongs to video, and these models make audio; leave it out")
        self._file = check_sound_file(settings.out or "media.wav")
        self._sample_rate = models.audio.sample_rate

    def write(self, results: dict[str, MediaResult], scores: dict[str, float]) -> Document:
        """Write the files, and return what the document says about them."""
        files = []
        for name, result in results.items():
            file = self._file.with_name(f"{self._file.stem}.{name}.wav")
            write_wav(result.content, file, sample_rate=self._sample_rate)
            files.append(str(file))
        return {"kind": "audio", "files": files, "note": None}


def _default_prompt(settings: DemoSettings, models: MediaModels) -> str:
    """Return the example for the embedded models, and a random caption for others."""
    return EXAMPLE if settings.models is None else models.language.random_captions(1, settings.seed)[0]


def _gate(settings: DemoSettings) -> QualityGate:
    if settings.threshold is not None:
        return QualityGate(settings.threshold, aggregate=settings.aggregate or "min", budget=settings.budget)
    folder = EMBEDDED if settings.models is None else settings.models
    file = settings.calibration or f"{folder}/calibration.json"
    try:
        return Calibration.load(file).router(budget=settings.budget)
    except OutriderError:
        if settings.calibration is None:
            raise OutriderError(f"{folder} has no calibration; give --threshold or --calibration") from None
        raise


def _show(document: Document, console: Console) -> None:
    console.print(document["prompt"], markup=False, highlight=False)
    table = new_table("Who made each block: T the target, d the drafter")
    for heading in ("output", "blocks", "score", "ms", "speedup", "accepted, %"):
        table.add_column(heading, justify="left" if heading in ("output", "blocks") else "right", no_wrap=True)
    base = _milliseconds(document["outputs"]["target-only"])
    for name, output in document["outputs"].items():
        took = _milliseconds(output)
        makers = " ".join("T" if block["maker"] == Maker.TARGET else "d" for block in output["blocks"])
        share = output["accepted_share"]
        accepted = "–" if share is None else f"{100 * share:.0f}"
        score = f"{document['scores'][name]:.3f}"
        table.add_row(name, makers, score, f"{took:.0f}", f"{base / took:.2f}", accepted)
    console.print(table)
    routed = document["outputs"]["routed"]
    quality = "" if routed["quality"] is None else f", measured quality {100 * routed['quality']:.1f} % of target-only"
    console.print(f"[red]not exact[/red]: {routed['router']}{quality}", highlight=False)
    if document["note"]:
        print_plain(console, document["note"])
    files = ", ".join(document["files"])
    print_plain(console, f"the {document['kind']} is in {files}")


def _milliseconds(output: dict[str, Any]) -> float:
    return 1e3 * float(sum(output["seconds"].values()))
