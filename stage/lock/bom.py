"""The bill of materials of `stage show --sbom`: lock -> a CycloneDX 1.6 document (ML-BOM).

It has one component per asset, with licence, revision and package URL. A model has one per file of
weights, with its sha256. An environment has one per package of conda and pip, with its package URL
and the sha256 of the published file. Files that were converted or unpacked are ancestors. All other
files are in the lock, which the document names by digest. The document has no serial number or
date: the same lock gives the same text.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from urllib.parse import unquote, urlsplit

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import (
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    Property,
    XsUri,
)
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType, Pedigree
from cyclonedx.model.license import License
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from stage.lock.licences import identifiers
from stage.lock.model import (
    Ingredient,
    LockedAsset,
    LockedFile,
    Lockfile,
    PackageEntry,
)

_WEIGHTS = (".safetensors",)
_CONDA_ENDINGS = (".conda", ".tar.bz2")
_CARDS = ("README.md", "CARD.md")
_MANY = 100  # more ingredients are counted, not named: a folder of images has thousands


def bom_text(lock: Lockfile) -> str:
    """The text (JSON, keys sorted) for a complete lock."""
    whole = Component(
        type=ComponentType.DATA,
        name=lock.name,
        version=lock.id,
        bom_ref=f"bundle:{lock.id}",
        hashes=[_sha256(lock.id)],
        description="An Airlift bundle; the hash is that of its stage.lock, "
        "which lists every file.",
    )
    bom = Bom(components=[_component(asset) for asset in lock.assets.values()])
    bom.metadata.component = whole
    bom.register_dependency(whole, bom.components)
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    del document["serialNumber"], document["metadata"]["timestamp"]
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False)


def _component(asset: LockedAsset) -> Component:
    cards = {f"{asset.folder}/{card}" for card in _CARDS}
    # A file may be in two splits.
    ancestors = {i.origin: i for i in asset.made_from if asset.environment is None}.values()
    return Component(
        type=ComponentType.MACHINE_LEARNING_MODEL
        if asset.kind in ("model", "tokenizer")
        else ComponentType.DATA,
        name=asset.name,
        version=asset.source.commit,
        bom_ref=f"asset:{asset.name}",
        licenses=_licences(asset.licence) if asset.licence else None,
        purl=_purl(asset),
        components=[
            *(_weights(file) for file in asset.files if file.path.endswith(_WEIGHTS)),
            *_packages(asset),
        ],
        pedigree=Pedigree(ancestors=[_ancestor(i, asset.name) for i in ancestors])
        if 0 < len(ancestors) <= _MANY
        else None,
        external_references=[
            ExternalReference(type=ExternalReferenceType.MODEL_CARD, url=XsUri(file.path))
            for file in asset.files
            if file.path in cards
        ],
        properties=_properties(asset, _made_from(ancestors)),
    )


def _purl(asset: LockedAsset) -> PackageURL | None:
    source = asset.source
    namespace, _, name = source.location.rpartition("/")
    if not source.is_repository or not name.strip():
        return None
    types = {"dataset": "dataset", "metric": "space"}
    qualifiers = {"repository_type": types[asset.kind]} if asset.kind in types else None
    return PackageURL("huggingface", namespace or None, name, source.commit, qualifiers)


def _properties(asset: LockedAsset, made_from: str | None) -> list[Property]:
    source = asset.source
    facts = {
        "airlift:kind": asset.kind,
        "airlift:path": asset.folder,
        "airlift:source": source.location,
        "airlift:revision": source.requested_revision,
        "airlift:parquet-commit": source.parquet_commit,
        "airlift:base": asset.base.repository if asset.base else None,
        "airlift:code": ", ".join(sorted(f"{code.repository}@{code.commit}" for code in asset.code))
        or None,
        "airlift:files": str(len(asset.files)),
        "airlift:bytes": str(asset.size),
        "airlift:made-from": made_from,
    }
    return [Property(name=key, value=value) for key, value in facts.items() if value is not None]


def _licences(licence: str) -> list[License]:
    return [LicenseFactory().make_from_string(word) for word in identifiers(licence)]


def _weights(file: LockedFile) -> Component:
    return Component(
        type=ComponentType.FILE,
        name=file.path,
        bom_ref=f"file:{file.path}",
        hashes=[_sha256(file.sha256 or "")],
    )


def _packages(asset: LockedAsset) -> list[Component]:
    """The packages of an environment, each with the sha256 of its published file."""
    if asset.environment is None:
        return []
    digests = {ingredient.origin: ingredient.sha256 for ingredient in asset.made_from}
    return [_package(entry, digests[entry.url]) for entry in asset.environment.packages]


def _package(entry: PackageEntry, sha256: str | None) -> Component:
    purl = None
    match [entry.manager, *unquote(urlsplit(entry.url).path).split("/")]:
        case ["conda", *_, channel, subdir, name] if entry.name.strip():
            ending = next((ending for ending in _CONDA_ENDINGS if name.endswith(ending)), "")
            build = name.removesuffix(ending).rpartition("-")[2]
            facts = {
                "build": build,
                "channel": channel,
                "subdir": subdir,
                "type": ending.removeprefix("."),
            }
            purl = PackageURL("conda", None, entry.name, entry.version, facts)
        case ["pip", *_, name] if entry.name.strip():
            purl = PackageURL("pypi", None, entry.name, entry.version, {"file_name": name})
    return Component(
        type=ComponentType.LIBRARY,
        name=entry.name,
        version=entry.version,
        bom_ref=f"package:{entry.manager}:{entry.name}:{entry.url}",
        purl=purl,
        hashes=[_sha256(sha256)] if sha256 else None,
    )


def _ancestor(ingredient: Ingredient, asset: str) -> Component:
    fetched = ingredient.origin.startswith(("http://", "https://"))
    return Component(
        type=ComponentType.FILE,
        name=ingredient.origin,
        bom_ref=f"made-from:{asset}:{ingredient.origin}",
        hashes=[_sha256(ingredient.sha256)] if ingredient.sha256 else None,
        external_references=[
            ExternalReference(type=ExternalReferenceType.DISTRIBUTION, url=XsUri(ingredient.origin))
        ]
        if fetched
        else None,
    )


def _made_from(ingredients: Collection[Ingredient]) -> str | None:
    size = sum(ingredient.size or 0 for ingredient in ingredients)
    return f"{len(ingredients)} files, {size} bytes" if ingredients else None


def _sha256(value: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=value)
