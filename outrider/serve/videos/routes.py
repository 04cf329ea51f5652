"""The routes of OpenAI's videos API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from fastapi import FastAPI, Query, Request
from starlette.responses import Response

from outrider.serve.openai.errors import RESPONSES, UnknownName
from outrider.serve.videos.schema import VideoRequest, parse_request

if TYPE_CHECKING:
    from outrider.serve.videos.service import VideoService

_SCHEMA = VideoRequest.model_json_schema()
_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": _SCHEMA}, "multipart/form-data": {"schema": _SCHEMA}},
    }
}
_FILE_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The video.", "content": {"video/mp4": {}, "image/gif": {}}},
    **RESPONSES,
}


def add_video_routes(app: FastAPI, service: VideoService) -> None:
    """Add the routes."""
    served = service.served

    @app.post("/v1/videos", responses=RESPONSES, openapi_extra=_BODY)
    async def create_video(request: Request) -> dict[str, Any]:
        """Queue a video."""
        body = await parse_request(request)
        return service.create(body.task(served)).to_json(served)

    @app.get("/v1/videos", responses=RESPONSES)
    async def list_videos(
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        """List the videos, by default the newest first."""
        jobs = service.jobs()
        if order == "desc":
            jobs.reverse()
        if after is not None:
            ids = [job.id for job in jobs]
            if after not in ids:
                raise UnknownName("after", f"after is {after[:100]!r}, which is no video here; use an id of this list")
            jobs = jobs[ids.index(after) + 1 :]
        page = [job.to_json(served) for job in jobs[:limit]]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(jobs) > limit,
        }

    @app.get("/v1/videos/{video_id}", responses=RESPONSES)
    async def get_video(video_id: str) -> dict[str, Any]:
        """Return a video, with its finished blocks."""
        return service.job(video_id).to_json(served)

    @app.get("/v1/videos/{video_id}/content", response_class=Response, responses=_FILE_RESPONSES)
    async def get_content(video_id: str, variant: Literal["video"] = "video") -> Response:
        """Download a finished video."""
        file = service.file(video_id)
        name = f'inline; filename="video.{file.format}"'
        return Response(file.data, media_type=file.media_type, headers={"Content-Disposition": name})

    @app.delete("/v1/videos/{video_id}", responses=RESPONSES)
    async def delete_video(video_id: str) -> dict[str, Any]:
        """Forget a video. One that is not finished is canceled."""
        job = service.delete(video_id)
        return {"id": job.id, "object": "video.deleted", "deleted": True}


def add_missing_video_routes(app: FastAPI) -> None:
    """Add routes that say that the server makes no videos."""

    async def refuse() -> NoReturn:
        raise UnknownName("model", "this server makes no videos; start it with --media DIR")

    for path in ("/v1/videos", "/v1/videos/{rest:path}"):
        app.add_api_route(path, refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False, response_model=None)
