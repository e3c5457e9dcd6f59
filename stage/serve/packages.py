"""The packages of a bundle's environments for pip and conda: pure functions.

`/simple/` is a PEP 503 index (or PEP 691 JSON, if the client accepts it) of all wheels and sdists;
`/conda/<asset>/` is that environment's local channel.
"""

from __future__ import annotations

import html
import re
import urllib.parse
from collections.abc import Iterator

from stage.lock.model import LockedFile
from stage.serve.answers import Answer, FileBody, Request, error_answer, json_answer
from stage.serve.catalogue import Catalogue

_WHEEL = re.compile(r"([^-]+)-[^-]+(?:-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl")  # PEP 427
_SDIST = re.compile(r"(.+)-[^-]+\.(?:tar\.gz|zip)")  # PEP 625
_JSON = "application/vnd.pypi.simple.v1+json"


def answer(request: Request, catalogue: Catalogue) -> Answer | None:
    """The answer of the index or of a channel; None where the address belongs to neither."""
    path = request.path
    if path == "/simple" or path.startswith("/simple/"):
        return _index(request, path.removeprefix("/simple").strip("/"), catalogue)
    if path.startswith("/packages/"):
        return _file(f"data/envs/{path.removeprefix('/packages/')}", catalogue)
    if path.startswith("/conda/"):
        asset, _, rest = path.removeprefix("/conda/").partition("/")
        return _file(f"data/envs/{asset}/channel/{rest}", catalogue)
    return None


def channels(catalogue: Catalogue) -> list[str]:
    """Paths of all conda channels on this server."""
    found = {
        re.match(r"data/envs/([^/]+)/channel/(.+)/[^/]+/repodata\.json", path)
        for path in catalogue.packages
    }
    return sorted(f"/conda/{match[1]}/{match[2]}" for match in found if match)


def has_index(catalogue: Catalogue) -> bool:
    """Whether the bundle has a wheel or an sdist."""
    return any(_distributions(catalogue))


def _distributions(catalogue: Catalogue) -> Iterator[tuple[str, str, LockedFile]]:
    """Yields normalised project name, file name and file."""
    for path, file in catalogue.packages.items():
        folder, _, name = path.rpartition("/")
        match = _WHEEL.fullmatch(name) or (
            _SDIST.fullmatch(name) if folder.endswith("/sdists") else None
        )
        if match:
            yield re.sub(r"[-_.]+", "-", match[1]).lower(), name, file  # PEP 503


def _index(request: Request, project: str, catalogue: Catalogue) -> Answer:
    as_json = _JSON in request.headers.get("accept", "")
    if not project:
        names = sorted({name for name, _, _ in _distributions(catalogue)})
        if as_json:
            listed = {
                "meta": {"api-version": "1.0"},
                "projects": [{"name": name} for name in names],
            }
            return json_answer(listed, {"Content-Type": _JSON})
        return _page((f"/simple/{name}/", name) for name in names)
    files = {name: file for found, name, file in _distributions(catalogue) if found == project}
    if not files:
        return error_answer(
            404,
            f"{project}: not in this bundle.",
            missing=f"package {project}: in no environment here",
        )
    addresses = {
        name: f"/packages/{urllib.parse.quote(file.path.removeprefix('data/envs/'))}"
        for name, file in files.items()
    }
    if as_json:
        described = [
            {
                "filename": name,
                "url": addresses[name],
                "hashes": {"sha256": file.sha256},
                "size": file.size,
            }
            for name, file in sorted(files.items())
        ]
        listed = {"meta": {"api-version": "1.0"}, "name": project, "files": described}
        return json_answer(listed, {"Content-Type": _JSON})
    return _page(
        (f"{addresses[name]}#sha256={file.sha256}", name) for name, file in sorted(files.items())
    )


def _page(links: Iterator[tuple[str, str]]) -> Answer:
    lines = [
        f'<a href="{html.escape(target)}">{html.escape(text)}</a><br>' for target, text in links
    ]
    text = (
        '<!DOCTYPE html>\n<meta name="pypi:repository-version" content="1.0">\n'
        + "\n".join(lines)
        + "\n"
    )
    return Answer(200, text.encode(), {"Content-Type": "text/html; charset=utf-8"})


def _file(path: str, catalogue: Catalogue) -> Answer:
    file = catalogue.packages.get(path)
    if file is None:
        return error_answer(404, f"{path}: not in this bundle.")
    headers = {"Content-Type": "application/octet-stream", "ETag": f'"{file.sha256}"'}
    return Answer(200, FileBody(catalogue.root / file.path, file.size), headers)
