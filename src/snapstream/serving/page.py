"""The web page: static files, which load nothing from other hosts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, JSONResponse, Response

from snapstream.serving.errors import ApiError
from snapstream.serving.settings import Example

DIRECTORY = Path(__file__).parent / "static"
FILES = frozenset(path.name for path in DIRECTORY.iterdir())


def router(example: Example | None) -> APIRouter:
    """Create the routes of the page.

    Args:
        example: An example prompt that the page offers.
    """
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def index() -> Response:
        return FileResponse(DIRECTORY / "index.html")

    @routes.get("/page/example.json")
    async def prompt() -> Response:
        return Response(status_code=204) if example is None else JSONResponse(asdict(example))

    @routes.get("/page/{name}")
    async def file(name: str) -> Response:
        if name not in FILES:
            raise ApiError(404, f"there is no page file {name!r}")
        return FileResponse(DIRECTORY / name)

    return routes
