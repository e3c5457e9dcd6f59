"""The golden of a served bundle: what clients ask of `stage serve`, and what it answers.

The requests were recorded once, with huggingface_hub 0.16, 0.36, 1 and 2 and the `datasets` and
`transformers` of their days, through a proxy that wrote down each exchange. They are sent again, so
no client is needed. A client's own time, name and cookies are left out.
"""

from __future__ import annotations

import hashlib
import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.golden.everything import CARD, SHARDS, material
from tests.golden.record import path_of
from tests.support.servers.hubs import TestHub
from tests.support.serving import fetched, serving_here
from tests.support.staging import model_files

MODEL, OLD, LINES, SCRIPTED = "acme/tiny-bert", "old/tiny-bert", "acme/lines", "acme/scripted"
ASSETS = f"""\
  bert: {{model: {OLD}, include: ["*"], exclude: ["*.bin"]}}
  lines: {{dataset: {LINES}}}
  scripted: {{dataset: {SCRIPTED}}}
"""
VOLATILE = ("date", "server", "connection", "keep-alive")  # of an answer
WHOLE = 3000  # longest text of a body that is recorded as it is
Exchange = dict[str, Any]


def record(folder: Path) -> str:
    """What `stage serve` answers now to the requests of the file."""
    recorded = path_of("served").read_text(encoding="utf-8")
    exchanges = [json.loads(line) for line in recorded.splitlines()]
    with _served(folder) as address:
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
        return "".join(
            json.dumps({**exchange, **_ask(connection, exchange)}, ensure_ascii=False) + "\n"
            for exchange in exchanges
        )


def _ask(connection: http.client.HTTPConnection, exchange: Exchange) -> Exchange:
    """The answer to a request: status, headers and body."""
    request, body = exchange["request"], exchange.get("body", "").encode()
    headers = {**request.get("headers", {}), "Content-Length": str(len(body))}
    connection.request(request["method"], request["path"], body, headers)
    answer = connection.getresponse()
    data = answer.read()
    kept = {name: value for name, value in answer.getheaders() if name.lower() not in VOLATILE}
    is_text = kept.get("Content-Type", "").startswith(("application/json", "text/"))
    text = data.decode() if is_text and len(data) <= WHOLE else ""
    digest = hashlib.sha256(data).hexdigest()
    return {
        "status": answer.status,
        "answer headers": kept,
        "answer": text or (data and digest) or "",
    }


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """The address of a served bundle."""
    with ExitStack() as stack:
        hub = TestHub(folder / "hub", stack)
        hub.commit("models", MODEL, {**model_files(20_000), "a/b/c.txt": b"deep\n"})
        hub.configure("models", OLD, moved_to=MODEL)
        shards = {f"plain/{name}.parquet": material(f"{name}.parquet") for name in SHARDS}
        hub.commit("datasets", LINES, {**shards, "README.md": CARD})
        hub.commit("datasets", SCRIPTED, {"scripted.py": b"raise SystemExit\n"})
        made = {"default/train/0000.parquet": material(f"{SHARDS[0]}.parquet")}
        hub.commit("datasets", SCRIPTED, made, ref="refs/convert/parquet")
        bundle = fetched(folder / "laptop", hub, ASSETS)
    with serving_here(bundle) as served:
        yield served.address
