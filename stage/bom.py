"""The bill of materials: lock -> `bom.cdx.json`, a CycloneDX 1.6 document (ML-BOM): what came from where.

One component an asset, with licence, revision and package URL; inside a model, one for each file of weights with its
sha256; inside an environment, one for each package of conda and pip with its package URL and the sha256 of the file
that was published; as its ancestors, what was converted or unpacked to make it. Every other byte is the lock's
business, which the document names by digest. It is made of the lock alone, and has no serial number or date, so that
the same lock gives the same text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any
from urllib.parse import quote

from stage.asset import Ingredient, LockedAsset, LockedFile, PackageEntry
from stage.licences import identifiers
from stage.lockfile import Lockfile

Component = dict[str, Any]  # a component, as CycloneDX's JSON has it

_SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"
_IN_ADDRESSES = ":/?#@!$&()*+,;=%"  # RFC 3986, 2.2 and 2.4; brackets belong to IPv6 hosts alone
_WEIGHTS = (".safetensors",)
_CONDA_ENDINGS = (".conda", ".tar.bz2")
_CARDS = ("README.md", "CARD.md")
_MANY = 100  # ingredients (a folder of images has thousands): more are counted, not named


def bom_text(lock: Lockfile) -> bytes:
    """The document's one true text (JSON, keys sorted, newline at the end) for a complete lock."""
    components = _ordered(_component(asset) for asset in lock.assets.values())
    whole = {
        "type": "data",
        "name": lock.name,
        "version": lock.id,
        "bom-ref": f"bundle:{lock.id}",
        "hashes": _sha256(lock.id),
        "description": "An Airlift bundle; the hash is that of its stage.lock, which lists every file.",
    }
    references = sorted(component["bom-ref"] for component in components)
    depends = {"dependsOn": references} if references else {}
    document = {
        "$schema": _SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": whole},
        "components": components,
        "dependencies": [*({"ref": reference} for reference in references), {"ref": whole["bom-ref"], **depends}],
    }
    return (json.dumps(_without_nothing(document), indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _component(asset: LockedAsset) -> Component:
    source = asset.source
    cards = {file.path for file in asset.files if file.path in {f"{asset.folder}/{card}" for card in _CARDS}}
    ancestors = {ingredient.origin: ingredient for ingredient in asset.made_from}.values()  # some are of two splits
    facts = {
        "airlift:kind": asset.kind,
        "airlift:path": asset.folder,
        "airlift:source": source.location,
        "airlift:revision": source.requested_revision,
        "airlift:parquet-commit": source.parquet_commit,
        "airlift:base": asset.base.repository if asset.base else None,
        "airlift:base-of": ", ".join(sorted(asset.base_of)) or None,
        "airlift:code": ", ".join(sorted(f"{code.repository}@{code.commit}" for code in asset.code)) or None,
        "airlift:files": str(len(asset.files)),
        "airlift:bytes": str(asset.size),
        "airlift:made-from": _made_from(ancestors),
    }
    namespace, _, name = source.location.rpartition("/")
    purl = None
    if source.type == "hub" and name.strip():
        qualifiers = {"repository_type": "dataset"} if asset.kind == "dataset" else None
        purl = _purl("huggingface", namespace, name, source.commit, qualifiers)
    return {
        "type": "machine-learning-model" if asset.kind in ("model", "tokenizer") else "data",
        "name": asset.name,
        "version": source.commit,
        "bom-ref": f"asset:{asset.name}",
        "licenses": _licences(asset.licence) if asset.licence else None,
        "purl": purl,
        "components": _ordered([*(_weights(f) for f in asset.files if f.path.endswith(_WEIGHTS)), *_packages(asset)]),
        "pedigree": {"ancestors": _ordered(_ancestor(i, asset.name) for i in ancestors)}
        if 0 < len(ancestors) <= _MANY
        else None,
        "externalReferences": [{"type": "model-card", "url": card} for card in sorted(cards)],
        "properties": [{"name": key, "value": value} for key, value in sorted(facts.items()) if value is not None],
    }


def _licences(licence: str) -> list[dict[str, Any]]:
    from cyclonedx.spdx import fixup_id, is_expression  # reads all of SPDX's licences on import

    words = identifiers(licence)
    known = {word: fixup_id(word) for word in words}
    if expression := next((word for word in words if known[word] is None and is_expression(word)), None):
        return [{"expression": expression}]  # the schema allows one, alone
    ids = sorted({id for id in known.values() if id is not None})
    others = sorted({word for word, id in known.items() if id is None})
    return [{"license": {"id": id}} for id in ids] + [{"license": {"name": word}} for word in others]


def _weights(file: LockedFile) -> Component:
    return {"type": "file", "name": file.path, "bom-ref": f"file:{file.path}", "hashes": _sha256(file.sha256)}


def _packages(asset: LockedAsset) -> list[Component]:
    """What an environment is made of: every package, by the sha256 of the file that was published."""
    if asset.environment is None:
        return []
    files = {file.path: file for file in asset.files}
    return [_package(entry, files[f"{asset.folder}/{entry.path}"]) for entry in asset.environment.packages]


def _package(entry: PackageEntry, file: LockedFile) -> Component:
    purl = None
    match [entry.manager, *entry.path.split("/")]:
        case ["conda", "channel", channel, subdir, name] if entry.name.strip():
            ending = next((ending for ending in _CONDA_ENDINGS if name.endswith(ending)), "")
            build = name.removesuffix(ending).rpartition("-")[2]
            facts = {"build": build, "channel": channel, "subdir": subdir, "type": ending.removeprefix(".")}
            purl = _purl("conda", "", entry.name, entry.version, facts)
        case ["pip", *_, name] if entry.name.strip():
            purl = _purl("pypi", "", entry.name, entry.version, {"file_name": name})
    return {
        "type": "library",
        "name": entry.name,
        "version": entry.version,
        "bom-ref": f"package:{entry.manager}:{entry.name}:{file.path}",
        "purl": purl,
        "hashes": _sha256(file.sha256),
    }


def _ancestor(ingredient: Ingredient, asset: str) -> Component:
    fetched = ingredient.origin.startswith(("http://", "https://", "ftp://"))
    address = quote(ingredient.origin, safe=_IN_ADDRESSES)
    return {
        "type": "file",
        "name": ingredient.origin,
        "bom-ref": f"made-from:{asset}:{ingredient.origin}",
        "hashes": _sha256(ingredient.sha256),
        "externalReferences": [{"type": "distribution", "url": address}] if fetched else None,
    }


def _purl(type: str, namespace: str, name: str, version: str | None, qualifiers: dict[str, str] | None) -> str:
    from packageurl import PackageURL

    return PackageURL(type, namespace or None, name, version, qualifiers).to_string()


def _made_from(ingredients: Collection[Ingredient]) -> str | None:
    size = sum(ingredient.size or 0 for ingredient in ingredients)
    return f"{len(ingredients)} files, {size} bytes" if ingredients else None


def _sha256(value: str | None) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": value}] if value else []


def _ordered(components: Iterable[Component]) -> list[Component]:
    return sorted(components, key=lambda c: (c["type"], c["name"], c.get("version") or "", c["bom-ref"]))


def _without_nothing(value: Any) -> Any:
    """The same without fields that say nothing: None, or a list of none."""
    if isinstance(value, dict):
        return {key: _without_nothing(item) for key, item in value.items() if item is not None and item != []}
    return [_without_nothing(item) for item in value] if isinstance(value, list) else value
