"""Routes that change the weights of a running server, with the names of vLLM. They are off by default."""

from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query
from pydantic import BaseModel, ConfigDict, Field

from outrider.core.params import InvalidParam
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.openai.errors import RESPONSES, attribute_errors


class WeightUpdate(BaseModel):
    """The body of `/update_weights`."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="Folder of the new weights, relative to the folder of --weight-updates.")
    version: int | None = Field(None, description="A number above the current version. Default: the next one.")
    selector: Literal["target", "draft"] = Field("target", description="Whose weights change.")


class VersionUpdate(BaseModel):
    """The body of `/update_weight_version`."""

    model_config = ConfigDict(extra="forbid")

    version: int


def add_weight_routes(app: FastAPI, async_llm: AsyncLLM, root: Path) -> None:
    """Add the routes. New weights are read from folders below `root` only."""
    _add_pause_routes(app, async_llm)
    _add_update_routes(app, async_llm, root)
    _add_memory_routes(app, async_llm)


def _add_pause_routes(app: FastAPI, async_llm: AsyncLLM) -> None:
    @app.post("/pause", responses=RESPONSES)
    async def pause(mode: Annotated[Literal["abort", "wait", "keep"], Query()] = "abort") -> dict[str, Any]:
        """Stop generating. abort: cancel all requests. wait: finish them first. keep: let them go on later."""
        await async_llm.pause(mode)
        return {"status": "paused", "mode": mode}

    @app.post("/resume", responses=RESPONSES)
    async def resume() -> dict[str, Any]:
        """Go on generating."""
        async_llm.resume()
        return {"status": "resumed"}

    @app.get("/is_paused", responses=RESPONSES)
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": async_llm.paused}


def _add_update_routes(app: FastAPI, async_llm: AsyncLLM, root: Path) -> None:
    @app.post("/update_weights", responses=RESPONSES)
    async def update_weights(body: WeightUpdate) -> dict[str, Any]:
        """Load new weights between two rounds. Unfinished requests go on with them."""
        folder = _inside(root, body.path)

        def update(llm: LLM) -> dict[str, Any]:
            change = llm.weights.update if body.selector == "target" else llm.weights.update_draft
            change(folder, body.version)
            return _versions(llm)

        with attribute_errors("path"):
            return await async_llm.call(update)

    @app.post("/update_weight_version", responses=RESPONSES)
    async def update_weight_version(body: VersionUpdate) -> dict[str, Any]:
        """Give the current weights another version."""

        def relabel(llm: LLM) -> dict[str, Any]:
            llm.weights.update({}, body.version)
            return _versions(llm)

        with attribute_errors("version"):
            return await async_llm.call(relabel)

    @app.get("/weight_version", responses=RESPONSES)
    async def weight_version() -> dict[str, Any]:
        return await async_llm.call(_versions)

    @app.post("/weight_checker", responses=RESPONSES)
    async def weight_checker() -> dict[str, Any]:
        """Return a SHA-256 of the target's weights as they are stored."""
        return await async_llm.call(lambda llm: {"checksum": llm.weights.checksum(), **_versions(llm)})


def _add_memory_routes(app: FastAPI, async_llm: AsyncLLM) -> None:
    @app.post("/reset_prefix_cache", responses=RESPONSES)
    async def reset_prefix_cache() -> dict[str, Any]:
        """Forget all cached prefixes. Unfinished requests prefill again."""
        await async_llm.call(lambda llm: llm.weights.reset_prefix_cache())
        return {"status": "ok"}

    @app.post("/sleep", responses=RESPONSES)
    async def sleep(level: Annotated[int, Query(ge=1, le=2)] = 1) -> dict[str, Any]:
        """Free the KV caches, and at level 2 also the weights of the target. Requests wait until `/wake_up`."""
        with attribute_errors("level"):
            await async_llm.call(lambda llm: llm.weights.sleep(level))
        return {"status": "sleeping", "level": level}

    @app.post("/wake_up", responses=RESPONSES)
    async def wake_up() -> dict[str, Any]:
        """Load what `/sleep` has freed. Requests go on."""
        await async_llm.call(lambda llm: llm.weights.wake())
        return {"status": "awake"}

    @app.get("/is_sleeping", responses=RESPONSES)
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": await async_llm.call(lambda llm: llm.weights.asleep)}


def weight_root(option: str) -> Path:
    """Return the folder of `--weight-updates`.

    Raises:
        OutriderError: it does not exist.
    """
    root = Path(option).expanduser().resolve()
    if not root.is_dir():
        raise OutriderError(f"--weight-updates {option} is no folder; give the folder below which new weights appear")
    return root


def _inside(root: Path, path: str) -> Path:
    """Return a folder below `root`.

    Raises:
        InvalidParam: the path leads out of `root`, also through links.
    """
    folder = (root / path).resolve()
    if not folder.is_relative_to(root):
        raise InvalidParam("path", "path leads out of the folder of --weight-updates; give a folder inside of it")
    return folder


def _versions(llm: LLM) -> dict[str, Any]:
    return {"weight_version": llm.weights.version, "draft_version": llm.weights.draft_version}
