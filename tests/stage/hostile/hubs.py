"""A Hub, or a host between, with false listings, false redirects or false sizes."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from typing import Any

from tests.stage.hostile.manifests import asset
from tests.stage.hostile.runner import Case, Place
from tests.support.servers.liar import Answer
from tests.support.staging import safetensors

Prepare = Callable[[Place], list[str]]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b'{"model_type": "bert"}\n', "model.safetensors": safetensors(2000)}
TOKEN = "hf_secret_of_the_user"
API = {"models": "/api/models/acme/bert", "datasets": "/api/datasets/acme/lines"}


def entry(path: str, data: bytes) -> dict[str, Any]:
    """A file as a Hub lists it; weights and parquet as LFS files."""
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    listed: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": oid}
    if path.endswith((".safetensors", ".parquet", ".bin")):
        listed["lfs"] = {
            "oid": hashlib.sha256(data).hexdigest(),
            "size": len(data),
            "pointerSize": 130,
        }
    return listed


def as_json(value: object, **headers: str) -> Answer:
    return Answer(
        json.dumps(value).encode(), headers={"Content-Type": "application/json", **headers}
    )


def serve(
    place: Place, files: dict[str, bytes], kind: str = "models", card: dict[str, Any] | None = None
) -> list[str]:
    """A Hub with one repository, still honest; returns the command that fetches it."""
    api, answers = API[kind], place.liar.answers
    id = api.partition(f"/api/{kind}/")[2]
    answers[f"{api}/revision/main"] = as_json(
        {"id": id, "sha": COMMIT, "tags": [], "siblings": [], "cardData": card or {}}
    )
    answers[f"{api}/tree/{COMMIT}"] = as_json([entry(path, data) for path, data in files.items()])
    answers[f"{api}/revision/refs/convert/parquet"] = Answer(
        b"", 404, {"X-Error-Code": "RevisionNotFound"}
    )
    answers[f"{api}/refs"] = as_json({"branches": [], "tags": [], "converts": []})
    prefix = "/datasets" if kind == "datasets" else ""
    for path, data in files.items():
        answers[f"{prefix}/{id}/resolve/{COMMIT}/{path}"] = Answer(data)
    place.write("m.yaml", asset(**{kind[:-1]: id}))
    place.environment["HF_TOKEN"] = TOKEN
    return ["fetch", "m.yaml", "-o", "bundle", "--endpoint", place.liar.url(), "--no-offline-check"]


def hub(change: Callable[[Place], object]) -> Prepare:
    """`stage fetch` of a model from a Hub that was honest before `change`."""

    def prepare(place: Place) -> list[str]:
        arguments = serve(place, FILES)
        change(place)
        return arguments

    return prepare


def answering(path: str, answer: Answer | Callable[[Place], Answer]) -> Prepare:
    """The Hub sends this answer for that path."""
    return hub(
        lambda place: place.liar.answers.update(
            {path: answer if isinstance(answer, Answer) else answer(place)}
        )
    )


INFO, TREE = f"{API['models']}/revision/main", f"{API['models']}/tree/{COMMIT}"
WEIGHTS, CONFIG = (
    f"/acme/bert/resolve/{COMMIT}/{name}" for name in ("model.safetensors", "config.json")
)
DATA = FILES["model.safetensors"]


def listing(*entries: dict[str, Any] | object) -> Prepare:
    """The Hub lists these files besides the sound ones."""
    return answering(
        TREE, as_json([*(entry(path, data) for path, data in FILES.items()), *entries])
    )


def named(*paths: str) -> Prepare:
    """A model needs files with these names."""
    everything = listing(*(entry(path, b"{}") for path in paths))

    def prepare(place: Place) -> list[str]:
        arguments = everything(place)
        place.write("m.yaml", asset(model="acme/bert", include=["*"]))
        return arguments

    return prepare


def info(**changes: object) -> Prepare:
    """The Hub states this about the repository."""
    return answering(
        INFO, as_json({"id": "acme/bert", "sha": COMMIT, "tags": [], "siblings": [], **changes})
    )


def weights(**changes: object) -> Prepare:
    """The listing states this about the weights."""
    files = {path: entry(path, data) for path, data in FILES.items()}
    files["model.safetensors"].update(changes)
    return answering(TREE, as_json(list(files.values())))


def elsewhere(location: Callable[[Place], str], path: str = WEIGHTS, status: int = 302) -> Prepare:
    """A redirect."""
    return answering(path, lambda place: Answer(b"", status, {"Location": location(place)}))


def endless(out: Any) -> None:
    while True:
        out.write(b"[" * 2**20)


def next_page(url: Callable[[Place], str]) -> Prepare:
    return answering(
        TREE,
        lambda place: as_json([entry("config.json", b"{}")], Link=f'<{url(place)}>; rel="next"'),
    )


def only_the_hub_was_asked(place: Place) -> None:
    assert not [path for path, _ in place.liar.requests if path.startswith("/stolen")]


def token_went_nowhere(place: Place) -> None:
    """The token goes only to its own origin: `127.0.0.1`, not `localhost`."""
    leaked = [path for path, token in place.liar.requests if token and path.startswith("/stolen")]
    assert [path for path, _ in place.liar.requests if path.startswith("/stolen")], (
        "nobody followed"
    )
    assert not leaked, leaked


def stealing(path: str) -> Prepare:
    """A redirect to another host, which must not get the token."""

    def change(place: Place) -> None:
        place.liar.answers["/stolen"] = place.liar.answers[path]
        place.liar.answers[path] = Answer(
            b"", 302, {"Location": place.liar.url("/stolen", "localhost")}
        )

    return hub(change)


def ranged(span: str) -> Prepare:
    """The first answer stops early; the next has this Content-Range."""

    def change(place: Place) -> None:
        def cut(out: Any) -> None:
            out.write(DATA[:1000])
            place.liar.answers[WEIGHTS] = Answer(DATA[1000:], 206, {"Content-Range": span})

        place.liar.answers[WEIGHTS] = Answer(cut, headers={"Content-Length": str(len(DATA))})

    return hub(change)


NO_SENSE = ("http://127.0.0.1", "makes no sense")


def at_an_address(answer: Answer, **pinned: str) -> Prepare:
    """`url:` of a server with this answer."""

    def prepare(place: Place) -> list[str]:
        place.liar.answers["/x.bin"] = answer
        place.write("m.yaml", asset(url=place.liar.url("/x.bin"), **pinned))
        return ["fetch", "m.yaml", "-o", "bundle"]

    return prepare


BOMB = Answer(
    gzip.compress(gzip.compress(bytes(2**26)) * 64), headers={"Content-Encoding": "gzip, gzip"}
)
CASES = [
    Case(
        "gzip bomb at an address",
        3,
        ("a decompression bomb",),
        at_an_address(BOMB, sha256="a" * 64),
    ),
    Case(
        "Content-Length superscript",
        5,
        ("neither how long",),
        at_an_address(Answer(b"xx", headers={"Content-Length": "\u00b2", "Connection": "close"})),
    ),
    Case(
        "gated",
        2,
        ("the model acme/bert is gated, and the account of your token has no access",),
        answering(INFO, Answer(b"", 403, {"X-Error-Code": "GatedRepo"})),
    ),
    Case(
        "disabled",
        2,
        ("the model acme/bert was disabled by the Hub",),
        answering(
            INFO, Answer(b"", 403, {"X-Error-Message": "Access to this resource is disabled."})
        ),
    ),
    Case(
        "a web page",
        5,
        ("does not answer as a Hub: HTTP 404, a web page",),
        answering(INFO, Answer(b"<html>", 404, {"Content-Type": "Text/HTML"})),
    ),
    Case(
        "no Hub's words",
        5,
        ("http://127.0.0.1", "answered: ", "another --endpoint"),
        answering(INFO, Answer(b"{}", 418)),
    ),
    Case(
        "a file that is gone",
        2,
        ("config.json of acme/bert is not there any more (HTTP 404)",),
        answering(CONFIG, Answer(b"", 404)),
    ),
    Case(
        "a file for which the token is refused",
        2,
        ("refuses your token (HTTP 401)",),
        answering(CONFIG, Answer(b"", 401)),
    ),
    Case(
        "a file that is a teapot",
        5,
        ("HTTP 418 from http://127.0.0.1",),
        answering(CONFIG, Answer(b"", 418)),
    ),
    Case("an address that is a teapot", 5, ("HTTP 418 from",), at_an_address(Answer(b"", 418))),
    Case("path ..", 3, ("`..`",), named("../../precious.json")),
    Case("path absolute", 3, ("empty component",), named("/etc/cron.d/evil.json")),
    Case("path with a backslash", 3, ("backslash",), named("..\\..\\evil.json")),
    Case("path with an escape sequence", 3, ("control character",), named("\x1b[2Jevil.json")),
    Case("path with a newline", 3, ("control character",), named("a\nb.json")),
    Case("path with %", 3, ("`%`",), named("a%2e%2e.json")),
    Case("path half a character", 3, ("control character",), named("\ud800.json")),
    Case("path empty", 5, NO_SENSE, named("")),
    Case("path of a million bytes", 5, NO_SENSE, named("a" * 10**6 + ".json")),
    Case("path twice", 5, ("listed twice",), named("vocab.json", "vocab.json")),
    Case("paths equal but for case", 3, ("same file",), named("Vocab.json", "vocab.json")),
    Case(
        "paths equal but for normal form", 3, ("same file",), named("\u00e9.json", "e\u0301.json")
    ),
    Case("path a number", 5, NO_SENSE, listing({**entry("x.json", b""), "path": 5})),
    Case("path missing", 5, NO_SENSE, listing({"type": "file", "size": 1, "oid": "a" * 40})),
    Case("entry a number", 5, NO_SENSE, listing(5)),
    Case("listing a mapping", 5, NO_SENSE, answering(TREE, as_json({"a": 1}))),
    Case("listing no JSON", 5, NO_SENSE, answering(TREE, Answer(b"<html>quota exceeded</html>"))),
    Case("listing nested", 5, NO_SENSE, answering(TREE, Answer(b"[" * 10**6))),
    Case(
        "lfs sha256 too short",
        5,
        ("makes no sense",),
        weights(lfs={"oid": "a" * 63, "size": 1, "pointerSize": 1}),
    ),
    Case(
        "lfs sha256 a number",
        5,
        ("makes no sense",),
        weights(lfs={"oid": 5, "size": 1, "pointerSize": 1}),
    ),
    Case("lfs a number", 5, ("makes no sense",), weights(lfs=5)),
    Case("oid upper case", 5, ("makes no sense",), weights(lfs=None, oid="A" * 40)),
    Case("size negative", 5, ("no size",), weights(size=-1)),
    Case("size text", 5, ("no size",), weights(size="10")),
    Case("size of 2^70", 5, ("no size",), weights(size=2**70)),
    Case("size larger than any disk", 2, ("does not serve over plain HTTP",), weights(size=2**62)),
    Case("size smaller than the file", 5, ("the listing says 10",), weights(size=10)),
    Case(
        "bytes of another file",
        1,
        ("refused", "lfs-sha256"),
        answering(WEIGHTS, Answer(bytes(len(DATA)))),
    ),
    Case(
        "more bytes than announced",
        5,
        ("more than the",),
        answering(WEIGHTS, Answer(lambda out: out.write(DATA + b"x"), headers={"X": "y"})),
    ),
    Case("endless body", 5, ("more than the",), answering(WEIGHTS, Answer(endless))),
    Case("gzip bomb for a file", 5, ("more than the",), answering(WEIGHTS, BOMB), how="process"),
    Case("gzip bomb for a listing", 5, NO_SENSE, answering(TREE, BOMB), how="process"),
    Case("endless listing", 5, NO_SENSE, answering(TREE, Answer(endless)), how="process"),
    Case("next page is this page", 5, NO_SENSE, next_page(lambda place: place.liar.url(TREE))),
    Case("next page of a file", 5, NO_SENSE, next_page(lambda _: "file:///etc/passwd")),
    Case(
        "next page elsewhere",
        5,
        NO_SENSE,
        next_page(lambda place: place.liar.url("/stolen", "localhost")),
        after=only_the_hub_was_asked,
    ),
    Case(
        "listing redirects elsewhere",
        5,
        ("404",),
        elsewhere(lambda place: place.liar.url("/stolen", "localhost"), TREE),
        after=token_went_nowhere,
    ),
    Case("commit a branch", 5, ("which commit",), info(sha="main")),
    Case("commit missing", 5, ("which commit",), info(sha=None)),
    Case("info a list", 5, NO_SENSE, answering(INFO, as_json([]))),
    Case("info no JSON", 5, NO_SENSE, answering(INFO, Answer(b"<html>"))),
    Case("id a number", 5, NO_SENSE, info(id=5)),
    Case("id that leads out", 5, NO_SENSE, info(id="../../etc")),
    Case("tags of numbers", 5, NO_SENSE, info(tags=[5])),
    Case("tags a number", 5, NO_SENSE, info(tags=5)),
    Case("card a list", 5, NO_SENSE, info(cardData=[1])),
    Case(
        "redirects in a circle", 5, ("circles",), elsewhere(lambda place: place.liar.url(WEIGHTS))
    ),
    Case(
        "listing redirects in a circle",
        5,
        NO_SENSE,
        elsewhere(lambda place: place.liar.url(TREE), TREE),
    ),
    Case(
        "redirect to a file", 3, ("file:///etc/passwd",), elsewhere(lambda _: "file:///etc/passwd")
    ),
    Case("redirect to half an address", 3, ("http://[::1",), elsewhere(lambda _: "http://[::1")),
    Case(
        "redirect to a port of six digits",
        3,
        ("999999",),
        elsewhere(lambda _: "http://127.0.0.1:999999/x"),
    ),
    Case("redirect to gopher", 3, ("gopher:",), elsewhere(lambda _: "gopher://127.0.0.1:9/x")),
    Case(
        "a token is not for others", 0, ("bundle id",), stealing(WEIGHTS), after=token_went_nowhere
    ),
    Case("nor for other listings", 0, ("bundle id",), stealing(TREE), after=token_went_nowhere),
    Case(
        "Content-Range of another place",
        5,
        ("another part of the file",),
        ranged("bytes 0-999/2066"),
    ),
    Case(
        "Content-Range of another size",
        5,
        ("the listing says",),
        ranged(f"bytes 1000-2065/{10**6}"),
    ),
    Case(
        "Content-Length negative is none",
        0,
        ("bundle id",),
        answering(WEIGHTS, Answer(DATA, headers={"Content-Length": "-5", "Connection": "close"})),
    ),
    Case(
        "error page of escape sequences",
        2,
        ("not there",),
        answering(WEIGHTS, Answer(b"\x1b[2J", 404, {"X-Error-Code": "EntryNotFound\x1b[2J"})),
    ),
]
