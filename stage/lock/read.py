"""Reads a lock's JSON into `Lockfile`, and believes nothing.

A lock can come from anywhere (a mail, a mirror, a damaged disk), and its paths decide which files
are written and read. So the type of each field is checked. Each path must be one that
`stage.paths` allows, must be in its asset's folder, and must not collide with another.
"""

from __future__ import annotations

from stage import paths as util_paths
from stage.digests import Digest
from stage.errors import PolicyError
from stage.lock.fields import Fields, read_document
from stage.lock.model import (
    FOLDERS,
    LOCATION_KEYS,
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
from stage.lock.write import FORMAT, Lockfile

REMEDY = (
    "Take it from version control or from the bundle's origin; or move it away, and make it again "
    "with `stage lock`."
)


def read_lock(data: bytes, where: str) -> Lockfile:
    """Reads a lock.

    Args:
        data: the JSON text, UTF-8.
        where: the file's name, for messages.

    Raises:
        UsageError: not JSON, a newer format, or a field that is missing or of another type.
        PolicyError: a path that may not be in a bundle, or two that collide.
    """
    document = read_document(data, where, "a lock", (FORMAT,), REMEDY)
    assets = document.inside("assets")
    lock = Lockfile(
        name=document.take("name", str),
        assets={name: _asset(assets.inside(name), name) for name in sorted(assets.data)},
    )
    paths = [file.path for file in lock.files]
    util_paths.check_collisions(paths, where, REMEDY)
    _check_named_files(document, lock, set(paths))
    return lock


def _asset(fields: Fields, name: str) -> LockedAsset:
    if problem := util_paths.problem_with_asset_name(name):
        named = f"{fields.file}: the asset name {util_paths.printable(name)}"
        raise PolicyError(f"{named} cannot be used: {problem}.", REMEDY)
    kind = fields.choice("kind", FOLDERS) or fields.missing("kind")
    for key in ("files", "left_out"):
        fields.take(key, list)
    request = fields.inside("request")
    for key, value in request.data.items():
        if isinstance(value, list):
            request.texts(key)
        elif isinstance(value, dict):
            request.wrong(key, "should be a text, a number, true or false, or a list of texts")
    made_with = fields.maybe_inside("made_with")
    return LockedAsset(
        name=name,
        kind=kind,
        request=request.data,
        source=_source(fields.inside("source")),
        files=_files(fields, f"data/{FOLDERS[kind]}/{name}/"),
        left_out=tuple(
            LeftOut(file.take("path", str), file.take("size", int), file.take("reason", str))
            for file in fields.each("left_out")
        ),
        aliases=fields.texts("aliases"),
        licence=fields.maybe("licence", str),
        configs=_configs(fields.inside("configs")) if kind == "dataset" else {},
        made_from=tuple(map(_ingredient, fields.each("made_from"))),
        made_with={key: made_with.take(key, str) for key in made_with.data} if made_with else {},
        environment=_environment(fields.inside("environment")) if kind == "environment" else None,
        base=_base(base) if (base := fields.maybe_inside("base")) else None,
        code=tuple(map(_code, fields.each("code"))),
    )


def _base(fields: Fields) -> Base:
    return Base(fields.take("repository", str), fields.take("revision", str))


def _code(fields: Fields) -> Code:
    fields.take("files", list)
    return Code(
        repository=fields.take("repository", str),
        commit=fields.hex("commit", 40),
        licence=fields.maybe("licence", str),
        files=fields.texts("files"),
    )


def _source(fields: Fields) -> Source:
    type_ = fields.choice("type", LOCATION_KEYS) or fields.missing("type")
    return Source(
        type=type_,
        location=fields.take(LOCATION_KEYS[type_], str),
        requested_revision=fields.maybe("requested_revision", str),
        commit=(fields.hex if type_ == "hub" else fields.maybe_hex)("commit", 40),
        parquet_commit=fields.maybe_hex("parquet_commit", 40),
    )


def _files(asset: Fields, folder: str) -> tuple[LockedFile, ...]:
    files = tuple([_file(fields) for fields in asset.each("files")])
    util_paths.check_paths([file.path for file in files], asset.file, REMEDY)
    for number, file in enumerate(files):
        if not file.path.startswith(folder):
            place = asset.place("files", number, "path")
            path = util_paths.printable(file.path)
            raise PolicyError(f"{place} {path} is outside its asset, {folder}.", REMEDY)
    return files


def _file(fields: Fields) -> LockedFile:
    return LockedFile(
        path=fields.take("path", str),
        size=fields.take("size", int),
        sha256=fields.maybe_hex("sha256"),
        upstream=_upstream(fields),
        origin=fields.take("origin", str),
        made_by=fields.maybe("made_by", str),
    )


def _upstream(fields: Fields) -> Digest | None:
    """The field `upstream`: at most one digest, by its algorithm."""
    evidence = fields.maybe("upstream", dict)
    if not evidence:
        return None
    algorithm, digest = next(iter(evidence.items()))
    if len(evidence) != 1 or not isinstance(digest, str):
        fields.fail("should be one digest", "upstream")
    try:
        return Digest(algorithm, digest)
    except ValueError as error:
        fields.fail(f"is no digest: {error}", "upstream")


def _environment(fields: Fields) -> LockedEnvironment:
    virtual = fields.inside("virtual_packages")
    fields.take("packages", list)
    return LockedEnvironment(
        platform=fields.take("platform", str),
        virtual_packages={name: virtual.take(name, str) for name in virtual.data},
        packages=tuple(
            PackageEntry(*(entry.take(key, str) for key in ("name", "version", "manager", "url")))
            for entry in fields.each("packages")
        ),
        tree=fields.maybe_hex("tree"),
    )


def _ingredient(fields: Fields) -> Ingredient:
    return Ingredient(
        origin=fields.take("origin", str),
        size=fields.maybe("size", int),
        sha256=fields.maybe_hex("sha256"),
        upstream=_upstream(fields),
        part=_part(fields) if fields.data.keys() & {"split", "convert", "separator"} else None,
    )


def _part(fields: Fields) -> Part:
    split = fields.take("split", str)
    if not util_paths.is_split_name(split):
        fields.wrong("split", "cannot name a split")
    return Part(split, fields.take("convert", str), fields.maybe("separator", str))


def _configs(fields: Fields) -> dict[str, dict[str, LockedSplit]]:
    configs = {name: fields.inside(name) for name in fields.data}
    return {
        name: {split: _split(config.inside(split)) for split in config.data}
        for name, config in configs.items()
    }


def _split(fields: Fields) -> LockedSplit:
    columns = [
        Column(column.take("name", str), column.take("type", str))
        for column in fields.each("schema")
    ]
    fields.take("shards", list)
    return LockedSplit(
        shards=fields.texts("shards"),
        rows=fields.maybe("rows", int),
        declared_rows=fields.maybe("declared_rows", int),
        schema=None if fields.data.get("schema") is None else tuple(columns),
    )


def _check_named_files(document: Fields, lock: Lockfile, paths: set[str]) -> None:
    """Each shard that a split names, and each package of an environment, must be in the lock."""
    for asset in lock.assets.values():
        sources = {ingredient.origin for ingredient in asset.made_from}
        for package in asset.environment.packages if asset.environment else ():
            if package.url not in sources:
                keys = ("assets", asset.name, "environment", "packages")
                document.fail(f"names {package.url}, which is not in `made_from`", *keys)
        for config, splits in asset.configs.items():
            for split, locked in splits.items():
                for shard in locked.shards:
                    if shard not in paths:
                        place = ("assets", asset.name, "configs", config, split, "shards")
                        document.fail(f"names {shard}, not a file here", *place)
