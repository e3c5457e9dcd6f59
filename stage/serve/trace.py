"""Runs a script against a server that passes on and records what it asks from a Hub.

What it asked for becomes entries of a manifest: one per repository and revision, which names the
revision as the script did, and the files that were read.
"""

from __future__ import annotations

import glob
import os
import select
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import urllib3
import yaml

from stage.download.http import Connections, origin_of, proxy_for, tls_context
from stage.errors import IncompleteError, StageError, UsageError, as_shown
from stage.files import human_count, human_size, is_hex
from stage.hub.client import Hub
from stage.hub.model_files import PICKLE_SUFFIXES, RemoteFile, is_document
from stage.hub.models import OWNERS
from stage.lock.manifest import FORMAT
from stage.lock.yaml_lines import scalar
from stage.paths import problem_with_path
from stage.processes import Ended
from stage.serve import children
from stage.serve.catalogue import CARD, ENTRY_KEYS, MAIN
from stage.serve.hub_api import Address, Answer
from stage.serve.server import HubHandler, HubServer
from stage.staging.new_manifest import asset_names
from stage.staging.resolve import needed_for_weights

CACHES = (
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "TRANSFORMERS_CACHE",
    "HF_DATASETS_CACHE",
    "HF_EVALUATE_CACHE",
    "HF_MODULES_CACHE",
)
"""Caches that are empty for the script: what is in a cache already is not always asked for."""
# RFC 9110, 7.6.1; `Host` is that of the other connection.
_HOP_BY_HOP = frozenset(
    (
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host"),
        *("proxy-connection", "proxy-authorization", "proxy-authenticate"),
    )
)
_PIECE = 64 * 1024  # bytes that are passed on at once
_UNRECORDED = "unrecorded"
_ASKED = "# What this asked for: "
_TIMEOUT_S = 60.0  # without a byte of the Hub; then the script gets 502, and may ask again
_TIME_TO_END_S = 10.0
"""After an interruption, for the script to end by itself, and again after SIGTERM."""


@dataclass(frozen=True)
class Traced:
    """The result of a run.

    Attributes:
        status: of the script.
        interrupted: Ctrl-C or a signal that ended the script; None: it ended by itself.
        addresses: plain http addresses that the script read.
        hosts: hosts that it asked over https, which hides the rest of the address.
        unrecorded: commands that it started with variables of their own, so they were not seen.
    """

    status: int
    interrupted: BaseException | None
    entries: list[ManifestEntry]
    addresses: list[str]
    hosts: list[str]
    unrecorded: list[str]


def trace(
    command: Sequence[str], hub: Hub, environ: Mapping[str, str], *, allow_code: bool
) -> Traced:
    """Runs the command once. Its streams are this process's own.

    Args:
        hub: the real one.

    Raises:
        UsageError: no such program.
        IncompleteError: the Hub cannot be reached.
    """
    program = shutil.which(command[0], path=environ.get("PATH"))
    if program is None:
        if Path(command[0]).is_file():
            raise UsageError(
                f"{command[0]}: a file without the right to execute it.",
                f"stage trace -- python {shlex.join(command)}; a program: chmod +x",
            )
        raise UsageError(
            f"{command[0]}: no such program on PATH.", "stage trace -- python their_script.py ..."
        )
    # Workers of a script ask at the same time: 32 of them do not wait for each other.
    connections = Connections(read_timeout_s=_TIMEOUT_S, at_once=32, trust=tls_context())
    try:
        connections.request("HEAD", f"{hub.endpoint}/api/models?limit=1", {}).close()
    except urllib3.exceptions.HTTPError as error:
        raise IncompleteError(
            f"{hub.name}: cannot be reached: {error}.",
            "Set HF_ENDPOINT, or --endpoint, to the Hub or a mirror that this machine reaches.",
        ) from None
    with (
        Recorder(hub.endpoint, connections) as recorder,
        tempfile.TemporaryDirectory(prefix="airlift-trace-", ignore_cleanup_errors=True) as folder,
    ):
        variables = environment(environ, recorder.address, Path(folder))
        shutil.copyfile(children.__file__, Path(folder, "sitecustomize.py"))
        status, interrupted = _run([program, *command[1:]], variables)
        recorded = Path(folder, _UNRECORDED)
        unrecorded = recorded.read_text("utf-8").splitlines() if recorded.exists() else []
    entries = entries_of(gather(recorder.exchanges), hub, allow_code=allow_code)
    return Traced(
        status, interrupted, entries, list(recorder.addresses), recorder.other_hosts, unrecorded
    )


def _run(command: list[str], variables: dict[str, str]) -> tuple[int, BaseException | None]:
    """Runs the script; its exit status, and what interrupted it.

    Ctrl-C reaches the script too, which may save its work. A signal to this process alone does not.
    """
    interrupted: BaseException | None = None
    with subprocess.Popen(command, env=variables) as process:
        try:
            process.wait()
        except (KeyboardInterrupt, Ended) as error:
            interrupted = error
            for end in (process.terminate, process.kill):
                with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                    process.wait(_TIME_TO_END_S)
                    break
                end()
    return process.returncode, interrupted


def traced_manifest(command: Sequence[str], manifest: Path, traced: Traced) -> str:
    """The text for a manifest of what a run asked for."""
    # A folder per project: push knows another project's bundle by its name.
    name = manifest.resolve().parent.name if manifest.stem == "manifest" else manifest.stem
    lines = [f"{_ASKED}{as_shown(' '.join(shlex.join(command).split()))}"]
    if traced.interrupted is not None:
        lines.append("# It was interrupted: what it would have asked for later is not here.")
    elif traced.status:
        lines.append(
            f"# It ended with {traced.status}: what it would have asked for later is not here."
        )
    lines += [
        f"# Next: {shlex.join(['stage', 'fetch', manifest.name, '-o', 'bundle'])}",
        f"format: {FORMAT}",
        f"name: {scalar(name or manifest.stem)}",
        "assets:",
        *asset_lines(traced.entries),
    ]
    lines += [f"  # {line}" for line in url_lines(traced)]
    lines += [f"  # asked over https, which hides the rest: {as_shown(h)}" for h in traced.hosts]
    return "\n".join(lines) + "\n"


def traced_command(manifest: Path) -> str:
    """The command for which `traced_manifest` made this manifest; empty: it is another one."""
    first = manifest.read_text("utf-8").partition("\n")[0]
    return first.removeprefix(_ASKED) if first.startswith(_ASKED) else ""


def url_lines(traced: Traced) -> list[str]:
    """Lines of a manifest that bring the plain addresses, once the script reads a file instead."""
    names = asset_names(
        (address.rstrip("/").rpartition("/")[2] or "file" for address in traced.addresses),
        names_of_assets(traced.entries),
    )
    return [
        f"{scalar(name)}: {{url: {scalar(address)}}}"
        for name, address in zip(names, traced.addresses, strict=True)
    ]


def environment(environ: Mapping[str, str], address: str, folder: Path) -> dict[str, str]:
    """The script's variables: the recorder is its Hub and its proxy; caches are in the folder."""
    of_hub = {"HF_ENDPOINT": address, **{name: str(folder / name.lower()) for name in CACHES}}
    proxies = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    return {
        **children.with_hub(environ, of_hub),
        **dict.fromkeys(proxies, address),
        **dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost"),
        children.UNRECORDED: str(folder / _UNRECORDED),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), environ.get("PYTHONPATH")))),
        "HF_HUB_DISABLE_XET": "1",  # so that files come over HTTP, and are seen
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    }


class Recorder(HubServer):
    """The script's Hub and proxy on loopback; a context manager that serves from a thread.

    Its Hub (`HF_ENDPOINT`) asks the real one. Redirects to another host (the CDN) are passed on, so
    large files do not come through here. As the HTTP proxy it sees the addresses of plain http, and
    of https only the hosts, because https is encrypted end to end.

    Args:
        endpoint: the real Hub.

    Attributes:
        exchanges: requests to the Hub, in order.
        addresses: plain http addresses that answered, in order.
        hosts: `host:port` asked for over https, in order.
        passed_on: hosts that the Hub redirected to.
    """

    def __init__(self, endpoint: str, connections: Connections) -> None:
        super().__init__(("127.0.0.1", 0), _RecordingHandler)
        self.endpoint, self.connections = endpoint.rstrip("/"), connections
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.exchanges: list[Exchange] = []
        self.addresses: dict[str, None] = {}
        self.hosts: dict[str, None] = {}
        self.passed_on: set[str] = set()

    def __enter__(self) -> Recorder:
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def other_hosts(self) -> list[str]:
        """Hosts that the script itself asked for over https."""
        own = {urlsplit(self.endpoint).hostname, *self.passed_on}
        return [host for host in self.hosts if host.rpartition(":")[0] not in own]


class _RecordingHandler(HubHandler):
    server: Recorder

    def do_GET(self) -> None:
        is_proxied = self.path.startswith("http://")
        url = self.path if is_proxied else self.server.endpoint + self.path
        size = self.headers.get("Content-Length", "0")
        body = self.rfile.read(int(size)) if size.isdecimal() else b""
        kept = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
        try:
            response = self.server.connections.request(self.command, url, kept, body)
        except urllib3.exceptions.HTTPError as error:
            return self._refuse(502, f"stage trace: {url}: {error}")
        with response:
            if is_proxied:
                if response.status < 400:
                    self.server.addresses[url] = None
            else:
                self._record(response)
            return self._pass_on(response)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_GET

    def _record(self, response: urllib3.BaseHTTPResponse) -> None:
        location = response.headers.get("Location")
        if location and urlsplit(location).hostname:
            if origin_of(location) == origin_of(self.server.endpoint):
                location = location.replace(self.server.endpoint, "", 1)
            else:
                self.server.passed_on.add(urlsplit(location).hostname or "")
                location = None
        commit = response.headers.get("X-Repo-Commit")
        self.server.exchanges.append(Exchange(self.path, response.status, commit, location))

    def _pass_on(self, response: urllib3.BaseHTTPResponse) -> None:
        self.send_response_only(response.status)
        for name, value in response.headers.items():
            if name.lower() in ("location", "link"):
                value = value.replace(self.server.endpoint, self.server.address)
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        is_unknown = (
            response.status == 401
            and "X-Error-Code" not in response.headers
            and "Invalid credentials" not in response.headers.get("X-Error-Message", "")
        )
        # The Hub's answer for a repository that does not exist, to a client without a token.
        # huggingface_hub recognises it on https only.
        if is_unknown and Address.parse(self.path) is not None:
            self.send_header("X-Error-Code", "RepoNotFound")
        has_body = self.command != "HEAD" and response.status not in (204, 304)
        if has_body and "Content-Length" not in response.headers:
            self.send_header("Connection", "close")  # its end is the end of the body
            self.close_connection = True
        self.end_headers()
        if has_body:
            try:
                for piece in response.stream(_PIECE, decode_content=False):
                    self.wfile.write(piece)
            except (urllib3.exceptions.HTTPError, ConnectionError):
                self.close_connection = True  # the client sees that the body is too short

    def _refuse(self, status: int, message: str) -> None:
        self.send(Answer(status, f"{message}\n".encode(), {"Content-Type": "text/plain"}))

    def do_CONNECT(self) -> None:
        host, _, port = self.path.rpartition(":")
        self.server.hosts[self.path] = None
        self.close_connection = True
        try:
            other = _connected(host, int(port))
        except (OSError, ValueError, UsageError) as error:
            return self._refuse(502, f"stage trace: {self.path}: {error}")
        with other:
            self.send_response_only(200)
            self.end_headers()
            _join(self.connection, other)
        return None


def _connected(host: str, port: int) -> socket.socket:
    """A connection to a host, through the proxy that the environment names.

    Raises:
        OSError: no connection.
    """
    proxy = proxy_for(f"https://{host}:{port}")
    if proxy is None:
        return socket.create_connection((host.strip("[]"), port), timeout=30)
    parts = urlsplit(proxy)
    login = parts.netloc.rpartition("@")[0] or None
    through = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=30)
    through.set_tunnel(host, port, urllib3.make_headers(proxy_basic_auth=login))
    through.connect()
    return through.sock


def _join(one: socket.socket, other: socket.socket) -> None:
    """Copies bytes both ways until one side ends."""
    while True:
        # Minutes without a byte either way: both ends are gone, or have forgotten it.
        ready, _, _ = select.select([one, other], [], [], 300)
        if not ready:
            return
        for source in ready:
            try:
                piece = source.recv(_PIECE)
                (other if source is one else one).sendall(piece)
            except OSError:
                return
            if not piece:
                return


_HUB_KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
_WITH_ACCESS = (
    "If its name is right: accept its terms on its page, give a token: HF_TOKEN, and trace again"
)


@dataclass(frozen=True)
class Exchange:
    """A request to the Hub, and what its answer says.

    Attributes:
        status: of the answer.
        commit: the commit that a file's answer names.
        location: of a redirect.
    """

    target: str
    status: int
    commit: str | None = None
    location: str | None = None


@dataclass
class Asked:
    """A repository that a script used, by the first name that it used.

    Attributes:
        exists: whether the Hub has it.
        commits: each revision that the script asked for -> its commit; None: no answer named it.
        files: paths whose bytes were there, by revision.
        refused: whether the Hub refused something of it to this account.
    """

    kind: str
    name: str
    exists: bool = False
    commits: dict[str, str | None] = field(default_factory=dict)
    files: dict[str, set[str]] = field(default_factory=dict)
    refused: bool = False

    def note(self, address: Address, exchange: Exchange, *, names_file: bool) -> None:
        """Adds one request; `names_file`: an answer without an error shows that the file exists."""
        is_there = exchange.status < 400
        self.refused |= exchange.status in (401, 403)
        if not is_there and exchange.commit is None:  # with a commit, only the file is missing
            return
        self.exists = True
        revision, path = address.split()
        commit = revision if is_hex(revision, 40) else exchange.commit
        self.commits[revision] = commit or self.commits.get(revision)
        if names_file and is_there:
            self.files.setdefault(revision, set()).add(path)

    def revisions(self) -> Iterator[tuple[str, set[str]]]:
        """Each revision by the name that the script used, with the files that were read.

        Clients ask for a commit where the script named a branch or a tag: that is the same
        revision. If the script named none, it is `main`.
        """
        named = [r for r in self.commits if not is_hex(r, 40)]
        behind = {self.commits[r] for r in named}
        for revision in [*named, *(r for r in self.commits if r not in named and r not in behind)]:
            same = (revision, self.commits[revision] or "")
            yield revision, set().union(*(self.files.get(r, ()) for r in same))


def gather(exchanges: Iterable[Exchange]) -> list[Asked]:
    """The repositories that requests asked for; an old name and its new one are one repository."""
    found: dict[tuple[str, str], Asked] = {}
    for exchange in exchanges:
        address = Address.parse(exchange.target)
        if address is None:
            continue
        asked = found.setdefault((address.kind, address.name), Asked(address.kind, address.name))
        moved = Address.parse(exchange.location) if exchange.location else None
        has_moved = moved is not None and (moved.kind, moved.name) != (address.kind, address.name)
        if moved and has_moved:
            # If the new name was asked for before, its record goes on under the old one.
            other = found.setdefault((moved.kind, moved.name), asked)
            other.name = asked.name
            found[address.kind, address.name] = asked = other
        # The Hub redirects an old name without a look whether the file exists.
        asked.note(address, exchange, names_file=address.is_file and not has_moved)
    return list({id(asked): asked for asked in found.values()}.values())


@dataclass
class ManifestEntry:
    """An entry of the manifest.

    Attributes:
        name: of the repository, with the revision if that is not main, for the asset's name.
        lines: below the asset's name; empty: there is no entry.
        note: a comment in its place, or above it; what the command prints about it.
        cannot_travel: files that were read and that a bundle does not take, each with the reason.
    """

    name: str
    lines: list[str] = field(default_factory=list)
    note: str = ""
    cannot_travel: list[str] = field(default_factory=list)


def entries_of(found: Iterable[Asked], hub: Hub, *, allow_code: bool) -> list[ManifestEntry]:
    """The entries of all repositories.

    Args:
        allow_code: write `allow_code: true` where code was used; else a comment that says so.
    """
    entries: list[ManifestEntry] = []
    for asked in found:
        what = f"{ENTRY_KEYS[asked.kind]} {asked.name}"
        if not asked.exists:
            why = f" to this account. {_WITH_ACCESS}" if asked.refused else ""
            entries.append(ManifestEntry(asked.name, note=f"{what}: the Hub does not show it{why}"))
            continue
        # Clients may get a commit from an answer's body, and ask for files of this commit alone.
        for revision in [r for r, commit in asked.commits.items() if commit is None]:
            with suppress(StageError):  # it comes again below
                repository = hub.repository(_HUB_KINDS[asked.kind], asked.name, revision)
                asked.commits[revision] = repository.commit
        for revision, read in asked.revisions():
            try:
                entries.append(_entry(asked, revision, read, hub, what, allow_code=allow_code))
            except StageError as error:
                lost = f"{what} at {revision}: {error.message}"
                entries.append(ManifestEntry(asked.name, note=lost, cannot_travel=[lost]))
    return entries


def _entry(
    asked: Asked, revision: str, read: set[str], hub: Hub, what: str, *, allow_code: bool
) -> ManifestEntry:
    """The entry of one revision.

    Raises:
        StageError: the Hub does not show it any more.
    """
    repository = hub.repository(_HUB_KINDS[asked.kind], asked.name, revision)
    if asked.refused and not read:
        raise UsageError(f"the Hub refused its files. {_WITH_ACCESS}")
    listing = hub.files(repository)
    files = [listing[path] for path in read if path in listing]
    size = human_size(sum(file.size for file in files))
    seen = f"{what} at {revision}: {human_count(len(files), 'file')} read, {size}"
    reasons = {path: reason for path in sorted(read) if (reason := _why_not(path))}
    entry = ManifestEntry(asked.name, note=seen)
    if asked.kind == "datasets" and "/" not in asked.name and repository.id != asked.name:
        entry.note += f"; write {repository.id} in the script: newer libraries take no shorter name"
    code = sorted(path for path in read if path.endswith(".py"))
    owner, _, metric = asked.name.rpartition("/")
    include: list[str] = []
    key, name = ENTRY_KEYS[asked.kind], asked.name
    if asked.kind == "spaces":
        if f"{metric}.py" not in read:
            entry.note += "; no metric of `evaluate`, so a bundle cannot have it"
            return entry
        name, code = metric if owner in OWNERS else asked.name, [f"{metric}.py"]
    elif asked.kind == "models" and code and len(code) == len(read):
        entry.note += "; only code of it was read; it comes with the model it is for"
        return entry
    else:
        entry.cannot_travel = [f"{what}: {path}: {why}" for path, why in reasons.items()]
        taken = read - reasons.keys()
        if asked.kind == "models":  # timm asks for the weights alone; a fetch wants their config
            taken |= set(needed_for_weights(taken, listing.keys() - taken))
        include = _include(taken, listing)
        if not include:
            entry.note += "; no file of it can travel"
            return entry
    comment = "" if revision == repository.commit else f"   # {repository.commit}"
    entry.lines = [f"{key}: {scalar(name)}", f"revision: {scalar(revision)}{comment}", *include]
    if revision != MAIN:
        entry.name += f"-{revision[:12] if is_hex(revision, 40) else revision}"
    if code:
        line = f"allow_code: true   # the script ran {', '.join(code)}"
        waits = f"# {line}: read it, then remove the first `#`"
        entry.lines.append(line if allow_code else waits)
    return entry


def _why_not(path: str) -> str:
    """Why a bundle does not take a file of a repository; empty if it does."""
    if path.lower().endswith(PICKLE_SUFFIXES):
        return (
            "a pickle, which can run code when loaded. For a model's weights, remove `include` "
            "from its entry and fetch with --allow-pickle: they travel as safetensors"
        )
    return problem_with_path(path) or ""


def _include(read: Collection[str], listing: Mapping[str, RemoteFile]) -> list[str]:
    """The key `include` for the files that were read; no lines: no file can travel."""
    taken = set(listing).intersection(read)
    # A revision that was only asked about must exist too: its card stands for it.
    if not taken:
        taken = {CARD} & set(listing) or {p for p in sorted(listing)[:1] if not _why_not(p)}
    if not taken:
        return []
    patterns = {"include": _patterns(taken, listing)}
    text = yaml.safe_dump(patterns, default_flow_style=None, width=90, allow_unicode=True)
    return str(text).splitlines()


def _patterns(taken: Collection[str], every: Iterable[str], inside: str = "") -> list[str]:
    """The shortest patterns that match these files in a folder, and no other file."""
    here = [path for path in every if path.startswith(inside)]
    # The card and licences come anyway; `.gitattributes` is part of no data.
    needed = {path for path in here if not is_document(path) and path != ".gitattributes"}
    wanted = {path for path in here if path in taken}
    if wanted and (needed or wanted) <= wanted:
        return [glob.escape(inside) or "*"]
    patterns = [
        glob.escape(path)
        for path in sorted(wanted & needed or wanted)
        if "/" not in path.removeprefix(inside)
    ]
    below = {path for path in wanted if "/" in path.removeprefix(inside)}
    for folder in sorted({path[: path.index("/", len(inside)) + 1] for path in below}):
        patterns += _patterns(taken, here, folder)
    return patterns


def names_of_assets(entries: Iterable[ManifestEntry]) -> list[str]:
    """The names of the assets, in the order of the entries that have lines."""
    own = (entry.name.split("/", 1) for entry in entries if entry.lines)
    return asset_names("/".join([*words[:-1], words[-1].replace("/", "-")]) for words in own)


def asset_lines(entries: Collection[ManifestEntry]) -> list[str]:
    """All entries as lines of a manifest below `assets:`."""
    names = iter(names_of_assets(entries))
    lines: list[str] = []
    for entry in entries:
        lines.append(f"  # {' '.join(entry.note.split())}")
        if entry.lines:
            lines += [f"  {scalar(next(names))}:", *(f"    {line}" for line in entry.lines)]
    return lines
