"""Reads a lock's JSON into `Lockfile`, believing nothing.

A lock can come from anywhere (a mail, a mirror, a damaged disk), and its paths decide which files are written and
read. So every field's type is checked, every path must be one `names` allows, lie in its asset's folder, and not
collide with another; each failure names the place in the document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any

from stage import names
from stage.asset import (
    FOLDERS,
    Base,
    Code,
    Column,
    Ingredient,
    LeftOut,
    LockedAsset,
    LockedEnvironment,
    LockedFile,
    LockedSplit,
    PackageEntry,
    Part,
    Source,
)
from stage.digest import Digest
from stage.disk import MAX_NUMBER
from stage.errors import PolicyError, UsageError
from stage.lockfields import REMEDY, Fields, shown
from stage.lockfile import FORMAT, Lockfile, newer_format
from stage.lockskim import Skimmed, skim
from stage.strictjson import Ambiguous, loads


def parse_lock(data: bytes, where: str) -> dict[str, Any]:
    """The JSON of a lock of this format; nothing in it is checked yet.

    Raises:
        UsageError: not JSON, or of a newer format.
    """
    try:
        document = loads(data)
    except Ambiguous as error:
        raise UsageError(f"{where}: not a lock: {error}.", REMEDY) from None
    except (ValueError, RecursionError):
        raise UsageError(f"{where}: not a lock: it is not JSON.", REMEDY) from None
    if not isinstance(document, dict) or "format" not in document:
        raise UsageError(f"{where}: not a lock: it has no `format`.", REMEDY)
    if type(document["format"]) is not int or document["format"] != FORMAT:
        raise newer_format(where, document["format"])
    return document


def read_lock(data: bytes, where: str, known: Skimmed | None = None) -> Lockfile:
    """Reads a lock.

    Args:
        data: the JSON text, UTF-8.
        where: the file's name, for messages.
        known: what `skim` made of it, for who has that already.

    Raises:
        UsageError: not JSON, a newer format, or a field that is missing or not what it should be.
        PolicyError: a path that may not be in a bundle, or two that collide.
    """
    reader = _Reader(where)
    skimmed = known or skim(data)
    lock = _from_skimmed(data, skimmed, reader) if skimmed else None
    if lock is None:
        document = parse_lock(data, where)
        if b"\\u" in data:  # half a character can only be written as an escape; looking for it takes long
            reader.check_text(document, "", 0)
        assets = reader.take(document, "assets", dict, "")
        lock = Lockfile(
            name=reader.take(document, "name", str, ""),
            assets={name: reader.asset(name, assets[name]) for name in sorted(assets)},
        )
    paths = [file.path for file in lock.files]
    names.check_collisions(paths, where, REMEDY)
    reader.check_named_files(lock, set(paths))
    return lock


def _from_skimmed(data: bytes, skimmed: Skimmed, reader: _Reader) -> Lockfile | None:
    """The lock, if `data` is its one true text and nothing is wrong with it; else the ordinary way finds out what.

    The n-th list is the n-th asset's if the rest is, to the byte, what is written for a lock of these assets.
    """
    try:
        document = parse_lock(skimmed.rest, reader.where)
        bare = {name: reader.asset(name, {**value, "files": []}) for name, value in sorted(document["assets"].items())}
        lock = Lockfile(reader.take(document, "name", str, ""), bare)
        if len(bare) != len(skimmed.lists) or lock.without_files().encode() != skimmed.rest:
            return None
        assets = {}
        for asset, files in zip(bare.values(), skimmed.lists, strict=True):
            names.check_paths(files.paths, reader.where, REMEDY)
            folder = f"{asset.folder}/"
            if not all(path.startswith(folder) for path in files.paths):
                return None
            assets[asset.name] = replace(asset, files=tuple(map(_file, *files)))
    except (UsageError, PolicyError, KeyError, TypeError, AttributeError, ValueError):
        return None
    return Lockfile(lock.name, assets).written_as(data)


def _file(
    made_by: str | None,
    origin: str,
    path: str,
    sha256: str,
    size: int,
    algorithm: str | None,
    digest: str | None,
) -> LockedFile:
    upstream = Digest(algorithm, digest) if algorithm and digest else None
    return LockedFile(path, size, sha256, upstream, origin, made_by)


class _Reader(Fields):
    """Takes each part of a lock out of its JSON."""

    def asset(self, name: str, value: Any) -> LockedAsset:
        place = f"assets.{name}"
        if problem := names.problem_with_asset_name(name):
            raise PolicyError(
                f"{self.where}: the asset name {names.printable(name)} cannot be used: {problem}.", REMEDY
            )
        value = self.mapping(value, place)
        kind = self.take(value, "kind", str, place)
        if kind not in FOLDERS:
            self.fail(f"{place}.kind", f"should be one of {', '.join(FOLDERS)}, found {shown(kind)}")
        folder = f"data/{FOLDERS[kind]}/{name}/"
        files = self.take(value, "files", list, place)
        left_out = self.take(value, "left_out", list, place)
        made_from = self.maybe(value, "made_from", list, place) or []
        request = self.take(value, "request", dict, place)
        self.check_text(request, f"{place}.request", 2)
        return LockedAsset(
            name=name,
            kind=kind,
            request=request,
            source=self.source(self.take(value, "source", dict, place), f"{place}.source"),
            files=self.files(files, f"{place}.files", folder),
            left_out=tuple(self.left_out(o, f"{place}.left_out[{i}]") for i, o in enumerate(left_out)),
            aliases=self.texts(value, "aliases", place),
            licence=self.maybe(value, "licence", str, place),
            configs=self.configs(value, place) if kind == "dataset" else {},
            made_from=tuple(self.ingredient(m, f"{place}.made_from[{i}]") for i, m in enumerate(made_from)),
            environment=self.environment(value, place) if kind == "environment" else None,
            base=self.base(value, f"{place}.base"),
            base_of=self.texts(value, "base_of", place),
            code=tuple(
                self.code(c, f"{place}.code[{i}]") for i, c in enumerate(self.maybe(value, "code", list, place) or [])
            ),
        )

    def base(self, value: Mapping[str, Any], place: str) -> Base | None:
        base = self.maybe(value, "base", dict, place.rpartition(".")[0])
        if base is None:
            return None
        return Base(self.take(base, "repository", str, place), self.take(base, "revision", str, place))

    def code(self, value: Any, place: str) -> Code:
        value = self.mapping(value, place)
        self.take(value, "files", list, place)
        return Code(
            repository=self.take(value, "repository", str, place),
            commit=self.commit(value, "commit", place) or self.fail(f"{place}.commit", "is missing"),
            licence=self.maybe(value, "licence", str, place),
            files=self.texts(value, "files", place),
        )

    def source(self, value: Mapping[str, Any], place: str) -> Source:
        type_ = self.take(value, "type", str, place)
        if type_ not in _LOCATION_KEYS:
            self.fail(f"{place}.type", f"should be one of {', '.join(_LOCATION_KEYS)}, found {shown(type_)}")
        commits = {key: self.commit(value, key, place) for key in ("commit", "parquet_commit")}
        if type_ == "hub" and commits["commit"] is None:
            self.fail(f"{place}.commit", "is missing")
        return Source(
            type=type_,
            location=self.take(value, _LOCATION_KEYS[type_], str, place),
            requested_revision=self.maybe(value, "requested_revision", str, place),
            **commits,
        )

    def files(self, values: list[Any], place: str, folder: str) -> tuple[LockedFile, ...]:
        files = tuple(_ordinary_file(v) or self.file(v, f"{place}[{i}]") for i, v in enumerate(values))
        names.check_paths([file.path for file in files], self.where, REMEDY)
        for index, file in enumerate(files):
            if not file.path.startswith(folder):
                where = f"{self.where}: `{place}[{index}].path` {names.printable(file.path)}"
                raise PolicyError(f"{where} is outside its asset, {folder}.", REMEDY)
        return files

    def file(self, value: Any, place: str) -> LockedFile:
        value = self.mapping(value, place)
        return LockedFile(
            path=self.take(value, "path", str, place),
            size=self.take(value, "size", int, place),
            sha256=self.sha256(value, place),
            upstream=self.upstream(value, place),
            origin=self.take(value, "origin", str, place),
            made_by=self.maybe(value, "made_by", str, place),
        )

    def environment(self, value: Mapping[str, Any], place: str) -> LockedEnvironment:
        value, place = self.take(value, "environment", dict, place), f"{place}.environment"
        virtual = self.take(value, "virtual_packages", dict, place)
        packages = self.take(value, "packages", list, place)
        return LockedEnvironment(
            platform=self.take(value, "platform", str, place),
            virtual_packages={n: self.take(virtual, n, str, f"{place}.virtual_packages") for n in virtual},
            packages=tuple(self.package(p, f"{place}.packages[{i}]") for i, p in enumerate(packages)),
            tree=self.sha256({"sha256": value.get("tree")}, f"{place}.tree"),
        )

    def package(self, value: Any, place: str) -> PackageEntry:
        value = self.mapping(value, place)
        return PackageEntry(*(self.take(value, key, str, place) for key in ("name", "version", "manager", "path")))

    def ingredient(self, value: Any, place: str) -> Ingredient:
        value = self.mapping(value, place)
        return Ingredient(
            origin=self.take(value, "origin", str, place),
            size=self.maybe(value, "size", int, place),
            sha256=self.sha256(value, place),
            upstream=self.upstream(value, place),
            part=self.part(value, place),
        )

    def part(self, value: Mapping[str, Any], place: str) -> Part | None:
        if not value.keys() & {"split", "convert", "separator"}:
            return None
        split, convert = (self.take(value, key, str, place) for key in ("split", "convert"))
        if not names.is_split_name(split):
            self.fail(f"{place}.split", f"cannot name a split, found {shown(split)}")
        return Part(split, convert, self.maybe(value, "separator", str, place))

    def left_out(self, value: Any, place: str) -> LeftOut:
        value = self.mapping(value, place)
        return LeftOut(
            self.take(value, "path", str, place),
            self.take(value, "size", int, place),
            self.take(value, "reason", str, place),
        )

    def configs(self, value: Mapping[str, Any], place: str) -> dict[str, dict[str, LockedSplit]]:
        result: dict[str, dict[str, LockedSplit]] = {}
        configs = self.take(value, "configs", dict, place)
        for config in configs:
            splits = self.take(configs, config, dict, f"{place}.configs")
            result[config] = {
                name: self.split(
                    self.take(splits, name, dict, f"{place}.configs.{config}"), f"{place}.configs.{config}.{name}"
                )
                for name in splits
            }
        return result

    def split(self, value: Mapping[str, Any], place: str) -> LockedSplit:
        schema = self.maybe(value, "schema", list, place)
        return LockedSplit(
            shards=tuple(self.text(s, f"{place}.shards") for s in self.take(value, "shards", list, place)),
            rows=self.maybe(value, "rows", int, place),
            declared_rows=self.maybe(value, "declared_rows", int, place),
            schema=None if schema is None else tuple(self.column(c, f"{place}.schema") for c in schema),
        )

    def column(self, value: Any, place: str) -> Column:
        value = self.mapping(value, place, "a list of {name, type}")
        return Column(self.take(value, "name", str, place), self.take(value, "type", str, place))

    def check_named_files(self, lock: Lockfile, paths: set[str]) -> None:
        """Every shard a split names must be a file of the lock, and every package of an environment."""
        for asset in lock.assets.values():
            for package in asset.environment.packages if asset.environment else ():
                if f"{asset.folder}/{package.path}" not in paths:
                    self.fail(f"assets.{asset.name}.environment.packages", f"names {package.path}, not a file here")
            for config, splits in asset.configs.items():
                for split, locked in splits.items():
                    for shard in locked.shards:
                        if shard not in paths:
                            self.fail(
                                f"assets.{asset.name}.configs.{config}.{split}.shards",
                                f"names {shard}, not a file here",
                            )


def _ordinary_file(value: Any) -> LockedFile | None:
    """A complete entry without anything special in it, read at one glance (there may be 100,000); else None."""
    try:
        path, size, sha256, origin = _FOUR_FIELDS(value)
        made_by, evidence = value.get("made_by"), value.get("upstream")
        if len(value) != 4 + (made_by is not None) + (evidence is not None):
            return None
        if not (
            type(path) is type(origin) is str and type(size) is int and 0 <= size <= MAX_NUMBER and _SHA256(sha256)
        ):
            return None
        if not (made_by is None or type(made_by) is str):
            return None
        if evidence is None:
            return LockedFile(path, size, sha256, None, origin, made_by)
        ((algorithm, digest),) = evidence.items()
        return LockedFile(path, size, sha256, Digest(algorithm, digest), origin, made_by)
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


_SHA256 = re.compile(r"[0-9a-f]{64}").fullmatch
_FOUR_FIELDS = itemgetter("path", "size", "sha256", "origin")
_LOCATION_KEYS = {"hub": "repository", "path": "path", "url": "url", "environment": "environment"}
