"""The packages of a bundle's environments, as pip and conda ask for them. Pure.

`/simple/` is a PEP 503 index (as JSON, PEP 691, for who asks so) over every wheel and sdist; `/conda/<asset>/` is that
environment's local channel, file by file.
"""

from __future__ import annotations

import html
import re
import urllib.parse
from collections.abc import Iterator

from stage.asset import LockedFile
from stage.serve.answers import Answer, FileBody, Question, json_answer, refusal
from stage.serve.catalogue import Catalogue

_WHEEL = re.compile(r"([^-]+)-[^-]+(?:-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl")  # PEP 427
_SDIST = re.compile(r"(.+)-[^-]+\.(?:tar\.gz|zip)")  # PEP 625
_JSON = "application/vnd.pypi.simple.v1+json"


def answer(question: Question, catalogue: Catalogue) -> Answer | None:
    """What an index or a channel would say; None where the address is neither's."""
    path = question.path
    if path == "/simple" or path.startswith("/simple/"):
        return _index(question, path.removeprefix("/simple").strip("/"), catalogue)
    if path.startswith("/packages/"):
        return _file(f"data/envs/{path.removeprefix('/packages/')}", catalogue)
    if path.startswith("/conda/"):
        asset, _, rest = path.removeprefix("/conda/").partition("/")
        return _file(f"data/envs/{asset}/channel/{rest}", catalogue)
    return None


def channels(catalogue: Catalogue) -> list[str]:
    """Addresses of all conda channels, below the server's own."""
    found = {re.match(r"data/envs/([^/]+)/channel/(.+)/[^/]+/repodata\.json", path) for path in catalogue.packages}
    return sorted(f"/conda/{match[1]}/{match[2]}" for match in found if match)


def has_index(catalogue: Catalogue) -> bool:
    """Whether there is any wheel or sdist."""
    return any(True for _ in _distributions(catalogue))


def _distributions(catalogue: Catalogue) -> Iterator[tuple[str, str, LockedFile]]:
    """Normalised project, file name, file."""
    for path, file in catalogue.packages.items():
        folder, _, name = path.rpartition("/")
        match = _WHEEL.fullmatch(name) or (_SDIST.fullmatch(name) if folder.endswith("/sdists") else None)
        if match:
            yield re.sub(r"[-_.]+", "-", match[1]).lower(), name, file  # PEP 503


def _index(question: Question, project: str, catalogue: Catalogue) -> Answer:
    as_json = _JSON in question.headers.get("accept", "")
    if not project:
        names = sorted({name for name, _, _ in _distributions(catalogue)})
        if as_json:
            listed = {"meta": {"api-version": "1.0"}, "projects": [{"name": name} for name in names]}
            return json_answer(listed, {"Content-Type": _JSON})
        return _page((f"/simple/{name}/", name) for name in names)
    files = {name: file for found, name, file in _distributions(catalogue) if found == project}
    if not files:
        return refusal(404, f"{project}: not in this bundle.", missing=f"package {project}: in no environment here")
    addresses = {name: f"/packages/{_quoted(file.path.removeprefix('data/envs/'))}" for name, file in files.items()}
    if as_json:
        described = [
            {"filename": name, "url": addresses[name], "hashes": {"sha256": file.sha256}, "size": file.size}
            for name, file in sorted(files.items())
        ]
        listed = {"meta": {"api-version": "1.0"}, "name": project, "files": described}
        return json_answer(listed, {"Content-Type": _JSON})
    return _page((f"{addresses[name]}#sha256={file.sha256}", name) for name, file in sorted(files.items()))


def _page(links: Iterator[tuple[str, str]]) -> Answer:
    lines = [f'<a href="{html.escape(target)}">{html.escape(text)}</a><br>' for target, text in links]
    text = '<!DOCTYPE html>\n<meta name="pypi:repository-version" content="1.0">\n' + "\n".join(lines) + "\n"
    return Answer(200, text.encode(), {"Content-Type": "text/html; charset=utf-8"})


def _file(path: str, catalogue: Catalogue) -> Answer:
    file = catalogue.packages.get(path)
    if file is None:
        return refusal(404, f"{path}: not in this bundle.")
    headers = {"Content-Type": "application/octet-stream", "ETag": f'"{file.sha256}"'}
    return Answer(200, FileBody(catalogue.root / file.path, file.size), headers)


def _quoted(path: str) -> str:
    return urllib.parse.quote(path)
