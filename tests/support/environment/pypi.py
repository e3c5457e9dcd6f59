"""A Python index on loopback: small wheels and sdists, PEP 503 pages with digests, a password."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version as installed_version
from urllib.parse import unquote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stage.environment.image.image import write_wheel

ANY = "py3-none-any"


def wheel(
    name: str,
    version: str,
    *,
    requires: Sequence[str] = (),
    tag: str = ANY,
    extras: Sequence[str] = (),
) -> tuple[str, bytes]:
    """(file name, bytes) of a wheel with one module that knows its version; always equal bytes."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    headers = [("Metadata-Version", "2.1"), ("Name", name), ("Version", version)]
    headers += [("Provides-Extra", extra) for extra in extras] + [
        ("Requires-Dist", r) for r in requires
    ]
    files = {
        f"{module}.py": f'__version__ = "{version}"\n',
        f"{info}/METADATA": "".join(f"{key}: {value}\n" for key, value in headers),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        f"Tag: {tag}\n",
    }
    sink = io.BytesIO()
    write_wheel(sink, {path: text.encode() for path, text in files.items()}, f"{info}/RECORD")
    return f"{module}-{version}-{tag}.whl", sink.getvalue()


def sdist(name: str, version: str, *, requires: Sequence[str] = ()) -> tuple[str, bytes]:
    """(file name, bytes) of an sdist with static metadata, which can be read without a build."""
    module = name.replace("-", "_")
    headers = f"Metadata-Version: 2.2\nName: {name}\nVersion: {version}\n"
    headers += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    project = (
        f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = {list(requires)!r}\n'
    )
    files = {
        "PKG-INFO": headers,
        "pyproject.toml": project,
        f"{module}.py": f'__version__ = "{version}"\n',
    }
    return f"{module}-{version}.tar.gz", tar_of(f"{module}-{version}", files)


_BACKEND = """
import os, zipfile

def build_wheel(folder, settings=None, metadata=None):
    if {fails!r}:
        raise SystemExit({fails!r})
    name = "{module}-{version}-py2.py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr("{module}.py", "")
        wheel.writestr("{module}-{version}.dist-info/METADATA", {headers!r})
        wheel.writestr(
            "{module}-{version}.dist-info/WHEEL",
            "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py2.py3-none-any\\n",
        )
        wheel.writestr("{module}-{version}.dist-info/RECORD", "")
    return name
"""


def dynamic_sdist(
    name: str, version: str, *, requires: Sequence[str] = (), fails: str = ""
) -> tuple[str, bytes]:
    """(file name, bytes) of an sdist whose requirements are known only after a build (setup.py).

    Its build needs no package of an index.

    Args:
        fails: the message with which its build fails; empty if it succeeds.
    """
    module = name.replace("-", "_")
    headers = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    headers += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    files = {
        "PKG-INFO": f"Metadata-Version: 1.1\nName: {name}\nVersion: {version}\n",
        "pyproject.toml": "[build-system]\nrequires = []\n"
        'build-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": _BACKEND.format(module=module, version=version, headers=headers, fails=fails),
    }
    return f"{module}-{version}.tar.gz", tar_of(f"{module}-{version}", files)


def tar_of(top: str, files: Mapping[str, str]) -> bytes:
    """A `.tar.gz` of these files in one folder."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w:gz") as archive:
        for path, text in files.items():
            member = tarfile.TarInfo(f"{top}/{path}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return sink.getvalue()


@dataclass
class Index:
    """A running index.

    Attributes:
        files: file name -> bytes; tests may add files at any time.
        password: `user:password` that every request must have; None if it needs none.
        requests: the requested paths.
    """

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    password: str | None = None
    requests: list[str] = field(default_factory=list)

    def add(self, *files: tuple[str, bytes]) -> None:
        self.files.update(files)

    def add_stand_ins(self, requirements: Sequence[str]) -> None:
        """Adds an empty wheel for each requirement, of the version that is installed here."""
        for text in requirements:
            requirement = Requirement(text)
            self.add(
                wheel(
                    requirement.name,
                    installed_version(requirement.name),
                    extras=sorted(requirement.extras),
                )
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/simple"

    @property
    def secret_url(self) -> str:
        return f"http://{self.password}@127.0.0.1:{self.port}/simple"

    def sha256(self, file_name: str) -> str:
        return hashlib.sha256(self.files[file_name]).hexdigest()

    def page(self, project: str) -> str | None:
        """The PEP 503 page of a project; None if it has no files."""
        names = [n for n in sorted(self.files) if canonicalize_name(n.partition("-")[0]) == project]
        links = [
            f'<a href="/files/{name}#sha256={self.sha256(name)}">{name}</a><br>' for name in names
        ]
        return f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>" if links else None


@contextmanager
def serve_index() -> Iterator[Index]:
    """Starts an index on loopback."""
    index = Index()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.requests.append(self.path)
            wanted = (
                index.password and "Basic " + base64.b64encode(index.password.encode()).decode()
            )
            kind, _, name = unquote(self.path).strip("/").partition("/")
            body = index.files.get(name) if kind == "files" else (index.page(name) or "").encode()
            if wanted and self.headers.get("Authorization") != wanted:
                self._send(401, b"")
            else:
                self._send(200 if body else 404, body or b"")

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            if status == 401:
                self.send_header("WWW-Authenticate", "Basic")
            self.send_header(
                "Content-Type",
                "text/html" if self.path.startswith("/simple") else "application/zip",
            )
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                with suppress(ConnectionError):  # a client that only asks for the size
                    self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    index.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
