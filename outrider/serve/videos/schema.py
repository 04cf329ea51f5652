"""The body of `POST /v1/videos`: the fields of OpenAI's API and some extensions. Unknown fields are errors."""

import json
import math
import random
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.requests import Request

from outrider.core.params import InvalidParam
from outrider.errors import OutriderError
from outrider.media.contract import Router
from outrider.media.models.captions import parse_caption
from outrider.media.routers import DrafterOnly, FixedBlocks, QualityGate, Stride, TargetOnly
from outrider.media.routers.gate import parse_aggregate
from outrider.serve.openai.base import StrictModel
from outrider.serve.openai.errors import UnknownModel, attribute_errors
from outrider.serve.speech.schema import FORM_LIMITS
from outrider.serve.videos.models import ServedModels, format_size

_MAX_PROMPT = 1000  # characters
_ROUTERS = "gate, target-only, drafter-only, or first:N or stride:N with N of at least 1, such as first:3"
_GATE_FIELDS = ("threshold", "aggregate", "force_first", "budget")
_CALIBRATED_FIELDS = ("aggregate", "force_first")


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoTask:
    """A checked request."""

    prompt: str
    router: Router
    seed: int
    blocks: int
    scale: int  # rows and columns that a pixel of a frame becomes
    output_format: str
    calibrated: bool  # whether router and number of blocks are those of the calibration


class VideoRequest(StrictModel):
    """A request for a video."""

    prompt: Annotated[str, Field(max_length=_MAX_PROMPT, description="A caption that the models understand.")]
    model: str | None = None
    seconds: Annotated[
        float | str | None, Field(description="Duration, rounded up to whole blocks. Default: the longest.")
    ] = None
    size: Annotated[str | None, Field(description="Such as 256x256: a multiple of the size of the models' frames.")] = (
        None
    )
    blocks: Annotated[int | None, Field(description="Extension. Blocks of the video, in place of seconds.")] = None
    seed: Annotated[int | None, Field(ge=0, lt=2**63, description="Extension. Seed of the noise. Default: random.")] = (
        None
    )
    router: Annotated[str, Field(description=f"Extension. Who makes a block: {_ROUTERS}.")] = "gate"
    threshold: Annotated[
        float | None,
        Field(
            allow_inf_nan=False,
            description="Extension. Least score of an accepted draft. Default: that of the calibration.",
        ),
    ] = None
    aggregate: Annotated[
        str | None,
        Field(description="Extension. With a threshold: min, mean or window:N of the scores of a block's frames."),
    ] = None
    force_first: Annotated[
        bool | None,
        Field(description="Extension. With a threshold: the target makes block 0. Default: true."),
    ] = None
    budget: Annotated[int | None, Field(description="Extension. Most blocks that the target makes.")] = None
    output_format: Annotated[Literal["mp4", "gif"], Field(description="Extension.")] = "mp4"

    def task(self, served: ServedModels) -> VideoTask:
        """Return the request with all defaults filled in.

        Raises:
            UnknownModel: the request names another model.
            InvalidParam: a field has no meaning for these models.
        """
        if self.model not in (None, served.name):
            raise UnknownModel("model", f"model {self.model!r} makes no videos here; use {served.name!r}")
        with attribute_errors("prompt"):
            parse_caption(self.prompt)
        router = self._router(served)
        with attribute_errors("threshold"):
            served.models.engine.check(router)
        blocks = self._blocks(served)
        whole = blocks == served.max_blocks and self.budget is None
        return VideoTask(
            prompt=self.prompt,
            router=router,
            seed=random.getrandbits(32) if self.seed is None else self.seed,
            blocks=blocks,
            scale=self._scale(served),
            output_format=self.output_format,
            calibrated=self.router == "gate" and self.threshold is None and whole,
        )

    def _router(self, served: ServedModels) -> Router:
        if self.router == "gate":
            return self._gate(served)
        router = _placement(self.router)
        for field in _GATE_FIELDS:
            if getattr(self, field) is not None:
                raise InvalidParam(
                    field, f"{field} belongs to router gate, not to {self.router}; leave one of them out"
                )
        return router

    def _gate(self, served: ServedModels) -> QualityGate:
        if self.threshold is None:
            if served.calibration is None:
                raise InvalidParam("threshold", f"{served.name} has no calibration; give a threshold")
            for field in _CALIBRATED_FIELDS:
                if getattr(self, field) is not None:
                    raise InvalidParam(field, f"{field} belongs to a threshold; give one, or leave {field} out")
            with attribute_errors("budget"):
                return served.calibration.router(budget=self.budget)
        aggregate = self.aggregate or "min"
        with attribute_errors("aggregate"):
            parse_aggregate(aggregate)
        with attribute_errors("budget"):
            return QualityGate(
                self.threshold,
                aggregate=aggregate,
                force_first=self.force_first is not False,
                budget=self.budget,
            )

    def _blocks(self, served: ServedModels) -> int:
        most = served.max_blocks
        if self.seconds is None:
            blocks = most if self.blocks is None else self.blocks
            if not 1 <= blocks <= most:
                raise InvalidParam("blocks", f"blocks is {blocks}; these models make 1 to {most}")
            return blocks
        if self.blocks is not None:
            raise InvalidParam("blocks", "blocks and seconds both set the duration; leave one of them out")
        seconds = _number(self.seconds)
        longest = served.seconds(most)
        if not 0 < seconds <= longest + 1e-3:  # `to_json` rounds the longest duration
            raise InvalidParam(
                "seconds", f"seconds is {str(self.seconds)[:20]}; use a number above 0 and up to {longest:.4g}"
            )
        return min(most, max(1, served.blocks(seconds)))

    def _scale(self, served: ServedModels) -> int:
        if self.size is None:
            return served.default_scale
        frame = served.frame_size
        for scale in range(1, served.max_scale + 1):
            if self.size == format_size(scale * frame):
                return scale
        raise InvalidParam(
            "size",
            f"size is {self.size[:20]!r}; use a multiple of {format_size(frame)} up to"
            f" {format_size(served.max_scale * frame)}",
        )


async def parse_request(request: Request) -> VideoRequest:
    """Return the request in the body: JSON, or the form that OpenAI's clients send.

    Raises:
        RequestValidationError: a field is missing, unknown or of the wrong type.
        OutriderError: the body has another form.
    """
    is_form = request.headers.get("content-type", "").lower().startswith("multipart/form-data")
    fields = await _form_fields(request) if is_form else _json_fields(await request.body())
    try:
        return VideoRequest.model_validate(fields, strict=not is_form)  # all values of a form are texts
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


def _placement(name: str) -> Router:
    """Return a router that needs no scores."""
    if name == "target-only":
        return TargetOnly()
    if name == "drafter-only":
        return DrafterOnly()
    if stride := re.fullmatch(r"stride:([1-9]\d{0,3})", name, re.ASCII):
        return Stride(int(stride[1]))
    if first := re.fullmatch(r"first:([1-9]\d{0,3})", name, re.ASCII):
        return FixedBlocks(range(int(first[1])), name=name)
    raise InvalidParam("router", f"router is {name[:100]!r}; use {_ROUTERS}")


def _json_fields(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
        raise OutriderError(f"the request is not valid JSON: {reason}; send a JSON object") from None


async def _form_fields(request: Request) -> dict[str, str]:
    fields: dict[str, str] = {}
    async with request.form(**FORM_LIMITS) as form:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                raise InvalidParam(name, f"{name} is a file, which these models cannot use; leave it out")
            fields[name] = value
    return fields


def _number(value: float | str) -> float:
    """Return a number, or NaN for a text that is none."""
    try:
        return float(value)
    except ValueError:
        return math.nan
