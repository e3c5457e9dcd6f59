"""The golden of a served bundle: what clients ask of `stage serve`, and what it answers.

Recorded once, with huggingface_hub 0.16, 0.36, 1 and 2 and the `datasets` and `transformers` of
their days, through a proxy that writes down each exchange. Tests send the same requests again, so
they need no client. A client's own time, name and cookies are left out.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.golden.everything import CARD, SHARDS, material
from tests.support.clients import run_client
from tests.support.servers.hubs import TestHub
from tests.support.serving import fetched, serving_here
from tests.support.staging import model_files

MODEL, OLD, LINES, SCRIPTED = "acme/tiny-bert", "old/tiny-bert", "acme/lines", "acme/scripted"
ASSETS = f"""\
  bert: {{model: {OLD}, include: ["*"], exclude: ["*.bin"]}}
  lines: {{dataset: {LINES}}}
  scripted: {{dataset: {SCRIPTED}}}
"""
_NUMPY_1 = ("numpy<2", "pyarrow<18")
CLIENTS = {  # pairs that their authors' bounds allow
    "0.16": ("huggingface_hub==0.16.4", "datasets==2.14.*", "transformers==4.33.*", *_NUMPY_1),
    "0.36": ("huggingface_hub==0.36.*", "datasets==3.*", "transformers==4.57.*"),
    "1": ("huggingface_hub>=1,<2", "datasets==4.*", "transformers>=5,<6"),
    "2": ("huggingface_hub>=2,<3", "datasets==5.*", "transformers>=5,<6"),
}
CALLS = Path(__file__).parents[1] / "stage/serve/calls.py"
LOADS = f"""
from datasets import load_dataset
from transformers import AutoConfig, AutoTokenizer
for load in (
    lambda: load_dataset("{LINES}", "plain"),
    lambda: load_dataset("{LINES}", split="validation", revision="main"),
    lambda: next(iter(load_dataset("{LINES}", split="train", streaming=True))),
    lambda: load_dataset("{SCRIPTED}"),
    lambda: load_dataset("parquet", data_files="hf://datasets/{LINES}/plain/train-*.parquet"),
    lambda: AutoConfig.from_pretrained("{OLD}"),
    lambda: AutoTokenizer.from_pretrained("{MODEL}"),
):
    try:
        print(load())
    except Exception as error:
        print(type(error), str(error)[:200])
"""
REQUEST_HEADERS = ("Accept", "Authorization", "Content-Type", "If-None-Match", "If-Range", "Range")
VOLATILE = ("date", "server", "connection", "keep-alive")  # of an answer
WHOLE = 3000  # longest text of a body that is recorded as it is
Exchange = dict[str, Any]


def record(folder: Path) -> str:
    """Records what the clients of `CLIENTS` ask; installs them from the package index."""
    exchanges: dict[str, Exchange] = {}
    with _served(folder) as (address, commit), _recording(address, exchanges) as proxy:
        for name, requirements in CLIENTS.items():
            proxy.client = name
            python = _install(folder / f"client-{name}", requirements)
            arguments = repr([MODEL, OLD, LINES, commit])
            calls = CALLS.read_text().replace("sys.argv[1:5]", arguments)
            for number, script in enumerate((calls, LOADS)):
                home = folder / f"home-{name}-{number}"
                done = run_client(python, script, proxy.address, home)
                assert done.returncode == 0, done.stderr
                print(f"{name}: {done.stdout[-2000:]}", file=sys.stderr)
    return _lines(exchanges[key] for key in sorted(exchanges))


def replay(folder: Path, recorded: str) -> str:
    """What `stage serve` answers now to the recorded requests."""
    exchanges = [json.loads(line) for line in recorded.splitlines()]
    with _served(folder) as (address, _):
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
        return _lines(
            {**exchange, **_ask(connection, exchange["request"], exchange.get("body", ""))}
            for exchange in exchanges
        )


def _ask(connection: http.client.HTTPConnection, request: Exchange, body: str) -> Exchange:
    """The answer to a request: status, headers and body."""
    headers = {**request.get("headers", {}), "Content-Length": str(len(body.encode()))}
    connection.request(request["method"], request["path"], body.encode(), headers)
    answer = connection.getresponse()
    return _answer(answer.status, answer.getheaders(), answer.read())


def _answer(status: int, headers: Iterable[tuple[str, str]], body: bytes) -> Exchange:
    kept = {name: value for name, value in headers if name.lower() not in VOLATILE}
    is_text = kept.get("Content-Type", "").startswith(("application/json", "text/"))
    text = body.decode() if is_text and len(body) <= WHOLE else ""
    digest = hashlib.sha256(body).hexdigest()
    return {"status": status, "answer headers": kept, "answer": text or (body and digest) or ""}


def _lines(exchanges: Iterable[Exchange]) -> str:
    return "".join(json.dumps(exchange, ensure_ascii=False) + "\n" for exchange in exchanges)


@contextmanager
def _served(folder: Path) -> Iterator[tuple[str, str]]:
    """A served bundle: its address, and the commit of its model."""
    with ExitStack() as stack:
        hub = TestHub(folder / "hub", stack)
        commit = hub.commit("models", MODEL, {**model_files(20_000), "a/b/c.txt": b"deep\n"})
        hub.configure("models", OLD, moved_to=MODEL)
        shards = {f"plain/{name}.parquet": material(f"{name}.parquet") for name in SHARDS}
        hub.commit("datasets", LINES, {**shards, "README.md": CARD})
        hub.commit("datasets", SCRIPTED, {"scripted.py": b"raise SystemExit\n"})
        made = {"default/train/0000.parquet": material(f"{SHARDS[0]}.parquet")}
        hub.commit("datasets", SCRIPTED, made, ref="refs/convert/parquet")
        bundle = fetched(folder / "laptop", hub, ASSETS)
    with serving_here(bundle) as served:
        yield served.address, commit


class _Proxy(ThreadingHTTPServer):
    """Passes requests on and writes them down. `client`: whose requests these are."""

    daemon_threads = True
    client = ""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def _recording(target: str, exchanges: dict[str, Exchange]) -> Iterator[_Proxy]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            headers = {n: self.headers[n] for n in REQUEST_HEADERS if n in self.headers}
            if headers.get("Accept") == "*/*":
                del headers["Accept"]
            request: Exchange = {"method": self.command, "path": self.path}
            request |= {"headers": headers} if headers else {}
            connection = http.client.HTTPConnection(urlsplit(target).netloc, timeout=30)
            sent = {**headers, "Content-Length": str(len(body.encode()))}
            connection.request(self.command, self.path, body.encode(), sent)
            answer = connection.getresponse()
            data = answer.read()
            said = _answer(answer.status, answer.getheaders(), data)
            key = f"{self.path} {self.command} {json.dumps(headers)} {body}"
            told = {"request": request} | ({"body": body} if body else {})
            known = exchanges.setdefault(key, {"clients": "", **told, **said})
            known["clients"] = " ".join(sorted({*known["clients"].split(), proxy.client}))
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in VOLATILE:
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_HEAD = do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with _Proxy(("127.0.0.1", 0), Handler) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield proxy
        finally:
            proxy.shutdown()


def _install(folder: Path, requirements: Iterable[str]) -> Path:
    """A virtual environment with these packages; returns its Python."""
    uv, python = Path(sys.executable).parent / "uv", folder / "bin/python"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, folder], check=True)
    subprocess.run([uv, "pip", "install", "-q", "--python", python, *requirements], check=True)
    return python
