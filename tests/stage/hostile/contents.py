"""Hostile contents: parquet, safetensors, pickles, and files that are converted."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.stage.hostile import hubs
from tests.stage.hostile.manifests import asset
from tests.stage.hostile.runner import Case, Place

Prepare = Callable[[Place], list[str]]


def dataset(
    *files: bytes | Callable[[], bytes],
    card: dict[str, Any] | None = None,
    more: Mapping[str, bytes] = {},
) -> Prepare:
    """`stage fetch` of a dataset whose splits are these files."""

    def prepare(place: Place) -> list[str]:
        made = [file if isinstance(file, bytes) else file() for file in files]
        names = [f"plain/train-{i:05d}-of-{len(files):05d}.parquet" for i in range(len(files))]
        return hubs.serve(place, {**dict(zip(names, made, strict=True)), **more}, "datasets", card)

    return prepare


def parquet(**columns: list[Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns or {"text": ["a", "b"]}), sink)
    return sink.getvalue()


def footer(change: Callable[[bytes], bytes]) -> Callable[[], bytes]:
    """A parquet file with another footer.

    Its end is `<footer><4 bytes of length>PAR1` (parquet-format, README).
    """

    def make() -> bytes:
        data = parquet()
        (length,) = struct.unpack("<I", data[-8:-4])
        changed = change(data[-8 - length : -8])
        return data[: -8 - length] + changed + struct.pack("<I", len(changed)) + b"PAR1"

    return make


def weights(data: bytes | Callable[[], bytes]) -> Prepare:
    """`stage fetch`, with its load test, of a model with these weights."""

    def prepare(place: Place) -> list[str]:
        files = {
            "config.json": b"{}",
            "model.safetensors": data if isinstance(data, bytes) else data(),
        }
        return [a for a in hubs.serve(place, files) if a != "--no-offline-check"]

    return prepare


def header(entries: object, data: bytes = bytes(8)) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: object = "U8", shape: object = (8,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


class Runs:
    """When it is unpickled, it runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return __import__("os").system, ("touch ../pwned",)


def cifar(meta: bytes) -> Prepare:
    """`convert: cifar` of a folder whose `batches.meta` is this."""

    def prepare(place: Place) -> list[str]:
        for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
            place.write(f"notes/{name}", meta)
        place.write("notes/batches.meta", meta)
        place.write("m.yaml", asset(path="notes", convert="cifar"))
        return ["fetch", "m.yaml", "-o", "bundle"]

    return prepare


def converted(how: str, name: str, data: bytes | Callable[[], bytes]) -> Prepare:
    """`convert:` of a local file."""

    def prepare(place: Place) -> list[str]:
        place.write(f"notes/{name}", data if isinstance(data, bytes) else data())
        place.write("m.yaml", asset(path="notes", convert=how))
        return ["fetch", "m.yaml", "-o", "bundle"]

    return prepare


def card(path: str) -> dict[str, Any]:
    return {"configs": [{"config_name": "plain", "data_files": [{"split": "train", "path": path}]}]}


NO_PARQUET = ("not a parquet file",)
UNSOUND = ("model.safetensors", "not a sound safetensors file")
POP_GLOBAL = b"cos\nsystem\n(S'touch ../pwned'\ntR."
BIG_INT = b'{"a": {"dtype": "U8", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}'
TWICE = (
    b'{"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}, '
    b'"a": {"dtype": "I8", "shape": [8]}}'
)
FRAMES = b"\x80\x05\x96" + struct.pack("<Q", 2**33)  # BYTEARRAY8 of 8 GiB

CASES = [
    Case("parquet empty", 1, NO_PARQUET, dataset(b"")),
    Case("parquet of magic alone", 1, NO_PARQUET, dataset(b"PAR1PAR1")),
    Case("parquet cut", 1, NO_PARQUET, dataset(lambda: parquet()[:-30])),
    Case(
        "parquet footer longer than the file",
        1,
        NO_PARQUET,
        dataset(lambda: parquet()[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1"),
    ),
    Case(
        "parquet footer of noise",
        1,
        NO_PARQUET,
        dataset(footer(lambda text: bytes(range(256)) * 4)),
    ),
    Case("parquet footer nested", 1, NO_PARQUET, dataset(footer(lambda text: b"\x1c" * 100_000))),
    Case(
        "parquet footer of long lists",
        1,
        NO_PARQUET,
        dataset(footer(lambda text: b"\x15\x02\x19\xfc\xff\xff\xff\xff\x07")),
    ),
    Case("parquet encrypted", 1, NO_PARQUET, dataset(lambda: parquet()[:-4] + b"PARE")),
    Case(
        "parquet column not UTF-8",
        1,
        ("train",),
        dataset(footer(lambda text: text.replace(b"\x04text", b"\x04\xff\xfe\xfd\xfc"))),
    ),
    Case(
        "parquet columns differ",
        1,
        ("other columns",),
        dataset(lambda: parquet(a=[1]), lambda: parquet(b=[1])),
    ),
    Case(
        "parquet rows not as declared",
        1,
        ("the card says 99",),
        dataset(
            parquet,
            card={
                "dataset_info": {
                    "config_name": "default",
                    "splits": [{"name": "train", "num_examples": 99}],
                }
            },
        ),
    ),
    Case("parquet of no rows is fine", 0, ("bundle id",), dataset(lambda: parquet(text=[]))),
    Case(
        "card with a pattern that backtracks",
        2,
        ("no parquet",),
        dataset(parquet, card=card("**a" * 40 + "**b"), more={"a" * 1000 + ".parquet": b""}),
    ),
    Case(
        "card with a pattern that is no range",
        2,
        ("no parquet",),
        dataset(parquet, card=card("[z-a]*")),
    ),
    Case(
        "card of numbers",
        0,
        ("bundle id",),
        dataset(parquet, card={"configs": 5, "dataset_info": [5]}),
    ),
    Case(
        "card with rows that lie",
        0,
        ("bundle id",),
        dataset(
            parquet,
            card={
                "dataset_info": {
                    "config_name": "default",
                    "splits": [{"name": "train", "num_examples": True}, {"name": 5}, 6],
                }
            },
        ),
    ),
    Case(
        "card with splits a number",
        0,
        ("bundle id",),
        dataset(parquet, card={"dataset_info": {"splits": 5}}),
    ),
    Case(
        "shards of a trillion",
        1,
        NO_PARQUET,
        dataset(more={"plain/train-99999-of-999999999999.parquet": b"PAR1"}),
    ),
    Case(
        "a shard's number of 4,000 digits",
        1,
        NO_PARQUET,
        dataset(more={f"plain/train-{'9' * 4000}.parquet": b"PAR1"}),
    ),
    Case("safetensors empty", 1, UNSOUND, weights(b"")),
    Case("safetensors header of 1 GB", 1, UNSOUND, weights(struct.pack("<Q", 10**9) + b"{}")),
    Case("safetensors header of 2^64", 1, UNSOUND, weights(b"\xff" * 8 + b"{}")),
    Case("safetensors no JSON", 1, UNSOUND, weights(header(b"\x80\x02]q\x00."))),
    Case(
        "safetensors UTF-16",
        1,
        UNSOUND,
        weights(header(json.dumps({"a": tensor()}).encode("utf-16"))),
    ),
    Case("safetensors a list", 1, UNSOUND, weights(header([]))),
    Case("safetensors nested", 1, UNSOUND, weights(header(b"[" * 100_000))),
    Case("safetensors key twice", 1, UNSOUND, weights(header(TWICE))),
    Case(
        "safetensors metadata a number",
        1,
        UNSOUND,
        weights(header({"__metadata__": {"a": 1}, "a": tensor()})),
    ),
    Case(
        "safetensors offsets negative", 1, UNSOUND, weights(header({"a": tensor(offsets=[-8, 0])}))
    ),
    Case(
        "safetensors offsets backwards", 1, UNSOUND, weights(header({"a": tensor(offsets=[8, 0])}))
    ),
    Case(
        "safetensors offsets true",
        1,
        UNSOUND,
        weights(header({"a": tensor(shape=[1], offsets=[False, True])}, b"x")),
    ),
    Case(
        "safetensors offsets of which one is true",
        1,
        UNSOUND,
        weights(header({"a": tensor(shape=[1], offsets=[0, True])}, b"x")),
    ),
    Case(
        "safetensors offsets of which one is false",
        1,
        UNSOUND,
        weights(header({"a": tensor(shape=[1], offsets=[False, 1])}, b"x")),
    ),
    Case(
        "safetensors shape of two negatives",
        1,
        UNSOUND,
        weights(header({"a": tensor(shape=[-2, -4])})),
    ),
    Case(
        "safetensors shape of 65 numbers",
        1,
        UNSOUND,
        weights(header({"a": tensor(shape=[8] + [1] * 64)})),
    ),
    Case("safetensors gap", 1, UNSOUND, weights(header({"a": tensor(shape=[4], offsets=[4, 8])}))),
    Case(
        "safetensors overlap",
        1,
        UNSOUND,
        weights(header({"a": tensor(), "b": tensor(shape=[4], offsets=[4, 8])})),
    ),
    Case(
        "safetensors behind its end",
        1,
        UNSOUND,
        weights(header({"a": tensor(shape=[9], offsets=[0, 9])})),
    ),
    Case("safetensors bytes left over", 1, UNSOUND, weights(header({"a": tensor()}, bytes(9)))),
    Case("safetensors dtype unknown", 1, UNSOUND, weights(header({"a": tensor("X17")}))),
    Case("safetensors dtype a number", 1, UNSOUND, weights(header({"a": tensor(5)}))),
    Case("safetensors shape of other size", 1, UNSOUND, weights(header({"a": tensor("F32", [3])}))),
    Case(
        "safetensors shape overflows to its size",
        1,
        UNSOUND,
        weights(header({"a": tensor(shape=[2**32, 2**32, 8])})),
    ),
    Case("safetensors shape of fractions", 1, UNSOUND, weights(header({"a": tensor(shape=[8.0])}))),
    Case("safetensors number of 5,000 digits", 1, UNSOUND, weights(header(BIG_INT))),
    Case(
        "safetensors shape of many large numbers",
        1,
        UNSOUND,
        weights(lambda: header({"a": tensor(shape=[10**4000] * 2000)})),
    ),
    Case(
        "safetensors name of escape sequences",
        1,
        UNSOUND,
        weights(header({"\x1b[2J": tensor(offsets=[1, 9])})),
    ),
    Case("CIFAR pickle with code", 3, ("wants to build", "system"), cifar(pickle.dumps(Runs()))),
    Case("CIFAR pickle with a global", 3, ("wants to build os.system",), cifar(POP_GLOBAL)),
    Case(
        "CIFAR pickle of builtins", 3, ("wants to build",), cifar(b"c__builtin__\neval\n(S'1'\ntR.")
    ),
    Case("CIFAR array of text", 1, ("not of bytes",), cifar(pickle.dumps(np.array(["x"])))),
    Case("CIFAR pickle of a persistent id", 3, ("wants to build",), cifar(b"Px\n.")),
    Case(
        "CIFAR pickle of a function's state",
        3,
        ("the state of a",),
        cifar(b"\x80\x02c_codecs\nencode\n}U\x08__code__K\x01sb."),
    ),
    Case("CIFAR pickle of an extension", 3, ("wants to build",), cifar(b"\x80\x02\x82\x01.")),
    Case("CIFAR pickle of 8 GiB", 3, ("a bytearray",), cifar(FRAMES + b"."), how="process"),
    Case(
        "CIFAR pickle cut",
        1,
        ("not a pickle",),
        cifar(pickle.dumps({b"label_names": [b"a"] * 9})[:-9]),
    ),
    Case(
        "CIFAR array of another size",
        1,
        ("an array of 2 x 4 with 6 bytes",),
        cifar(pickle.dumps(np.zeros((2, 3), np.uint8), 2).replace(b"K\x02K\x03", b"K\x02K\x04")),
    ),
    Case(
        "CIFAR array of negative size",
        1,
        ("an array of -2 x -3 with 6 bytes",),
        cifar(
            pickle.dumps(np.zeros((2, 3), np.uint8), 2).replace(
                b"K\x02K\x03", b"J\xfe\xff\xff\xffJ\xfd\xff\xff\xff"
            )
        ),
    ),
    Case(
        "CIFAR array of no rows",
        1,
        ("an array that is not of rows of bytes",),
        cifar(pickle.dumps(np.zeros(3, np.uint8))),
    ),
    Case(
        "CIFAR pickle of bytes in another encoding",
        1,
        ("other than latin1",),
        cifar(b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00utf-8tR."),
    ),
    Case("CIFAR pickle nested", 1, ("batches.meta",), cifar(b"(" * 10**6 + b".")),
    Case(
        "CIFAR pickle that doubles",
        3,
        ("more bytes than it has",),
        cifar(
            b"c_codecs\nencode\np0\n0"
            + b"X"
            + struct.pack("<I", 10**6)
            + b"a" * 10**6
            + b"p1\n0"
            + b"g0\n(g1\nX\x06\x00\x00\x00latin1tR" * 600
            + b"."
        ),
    ),
    Case("CIFAR no pickle", 1, ("batches.meta",), cifar(b"<html>")),
    Case(
        "CSV of one endless line",
        2,
        ("a.csv",),
        converted("csv", "a.csv", lambda: b"a," * 20_000_000),
    ),
    Case("CSV with columns twice", 2, ("two columns",), converted("csv", "a.csv", b"a,a\n1,2\n")),
    Case("CSV not UTF-8", 2, ("a.csv",), converted("csv", "a.csv", b"a\n\xff\n")),
    Case(
        "CSV gzip bomb",
        2,
        ("a.csv.gz",),
        converted("csv", "a.csv.gz", lambda: gzip.compress(b"a\n" + b"x" * 2**26) * 1),
        how="process",
    ),
    Case("JSON nested", 2, ("nested",), converted("json", "a.json", b"[" * 10**6)),
    Case("JSON lines with NaN alone", 2, ("a.jsonl",), converted("jsonl", "a.jsonl", b"NaN\n")),
    Case(
        "JSON number of 5,000 digits",
        2,
        ("a.jsonl",),
        converted("jsonl", "a.jsonl", b'{"a": ' + b"9" * 5000 + b"}\n"),
    ),
    Case(
        "JSON half a character",
        2,
        ("a.jsonl",),
        converted("jsonl", "a.jsonl", b'{"a": "\\ud800"}\n'),
    ),
    Case(
        "JSON key half a character",
        2,
        ("a.jsonl",),
        converted("jsonl", "a.jsonl", b'{"\\ud800": 1}\n'),
    ),
    Case("Arrow noise", 2, ("a.arrow",), converted("arrow", "a.arrow", bytes(range(256)) * 20)),
    Case(
        "Arrow of magic alone", 2, ("a.arrow",), converted("arrow", "a.arrow", b"ARROW1\0\0ARROW1")
    ),
    Case(
        "Arrow of 2^31 bytes of metadata",
        2,
        ("a.arrow",),
        converted("arrow", "a.arrow", b"\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(64)),
        how="process",
    ),
]
