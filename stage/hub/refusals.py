"""Turns a Hub's refusals into errors that name the asset, the reason and the next step.

huggingface_hub classifies the answer. Where two causes give the same class, one more request to
the Hub decides.
"""

from __future__ import annotations

import os

import httpx2
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from stage.download.retry import AttemptFailed
from stage.errors import IncompleteError, StageError, UsageError, suggest
from stage.hub.api import HubApi

# What huggingface_hub raises on a malformed answer.
MALFORMED = (
    httpx2.HTTPError,
    httpx2.InvalidURL,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

DEFAULT_ENDPOINT = "https://huggingface.co"
LOG_IN = "run `hf auth login`, or set HF_TOKEN."
CHECK_NAME = f"Check the spelling (org/name). For a private one give a token: {LOG_IN}"


class RefusedToken(UsageError):
    """The Hub does not know the token, so it answers nothing: of public repositories neither."""


class HubErrors:
    """Makes the errors of one Hub, for one user.

    Args:
        name: the Hub's address, for messages.
        has_token: whether requests carry a token.
        api: asks the Hub once more.
    """

    def __init__(self, name: str, has_token: bool, api: HubApi) -> None:
        self._name, self._has_token, self._api = name, has_token, api

    def api_error(
        self,
        what: str,
        kind: str,
        id: str,
        revision: str,
        error: HFValidationError | HfHubHTTPError,
    ) -> StageError:
        """The error of a failed API request that a retry does not fix.

        Args:
            what: the asset's name in messages.
        """
        if isinstance(error, HFValidationError):
            return UsageError(
                f"{what}: `{id}` is not the name of a repository: {error}",
                "Check the spelling (org/name).",
            )
        status, headers = error.response.status_code, error.response.headers
        if status == 401 and self._has_token:
            return self._refused_token(what)
        match error:
            case GatedRepoError():
                return self._gated(what, kind, id)
            case RevisionNotFoundError():
                return self._no_revision(what, kind, id, revision)
            case DisabledRepoError():
                return UsageError(
                    f"{what}: the {kind} {id} was disabled by the Hub.", "Use another repository."
                )
        if isinstance(error, RepositoryNotFoundError) or status in (401, 403):
            return self._not_found(what, kind, id)
        # A Hub answers in JSON, or names its error in a header.
        if "html" in headers.get("Content-Type", "").lower() and "X-Error-Code" not in headers:
            return IncompleteError(
                f"{what}: {self._name} does not answer as a Hub: HTTP {status}, a web page.",
                f"Give the address of a Hub or of a mirror: --endpoint {DEFAULT_ENDPOINT}",
            )
        return IncompleteError(
            f"{what}: {self._name} answered: {str(error).strip().splitlines()[0]}",
            "Try again, or another --endpoint.",
        )

    def file_error(
        self, what: str, kind: str, id: str, path: str, status: int, code: str | None
    ) -> StageError:
        """The error of a refused file whose repository could be listed."""
        if status == 401 and self._has_token:
            return self._refused_token(what)
        if status in (401, 403) and code not in ("RepoNotFound", "RevisionNotFound"):
            return self._gated(what, kind, id)
        if status in (401, 403, 404):
            return UsageError(
                f"{what}: {path} of {id} is not there any more (HTTP {status}).",
                "Its commit may have been deleted: "
                "run again with --update ASSET to take the repository's current commit.",
            )
        return IncompleteError(
            f"{what}: HTTP {status} from {self._name}.", "Try again, or another --endpoint."
        )

    def _refused_token(self, what: str) -> RefusedToken:
        names = [name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(name)]
        drop = f"unset {' '.join(names)}" if names else "hf auth logout"
        return RefusedToken(
            f"{what}: {self._name} refuses your token (HTTP 401): it is mistyped, or has expired.",
            f"Public repositories need none: {drop}. For others, a new one: {LOG_IN}",
        )

    def _gated(self, what: str, kind: str, id: str) -> StageError:
        if self._has_token:
            return UsageError(
                f"{what}: the {kind} {id} is gated, and the account of your token has no access.",
                f"Accept its terms at {_page(kind, id)} with that account; then run again.",
            )
        return UsageError(
            f"{what}: the {kind} {id} is gated: it needs an account that accepted its terms.",
            f"Accept them at {_page(kind, id)}, then give a token: {LOG_IN}",
        )

    def _not_found(self, what: str, kind: str, id: str) -> StageError:
        seen = "with your token" if self._has_token else "without a token"
        other = "dataset" if kind == "model" else "model"
        try:
            exists = self._api.exists(other, id)
        except (AttemptFailed, IncompleteError, *MALFORMED):
            exists = False
        if exists:
            return UsageError(
                f"{what}: `{id}` is a {other}, not a {kind}.", f"Write `{other}: {id}`."
            )
        return UsageError(
            f"{what}: {self._name} shows no {kind} `{id}` {seen}: it does not exist or is private.",
            CHECK_NAME,
        )

    def _no_revision(self, what: str, kind: str, id: str, revision: str) -> StageError:
        try:
            names = self._api.revisions(kind, id)
        except (AttemptFailed, IncompleteError, *MALFORMED):
            names = []
        hint = f"It has: {', '.join(names[:12])}." if names else f"See {_page(kind, id)}/refs."
        return UsageError(
            f"{what}: the {kind} {id} has no revision `{revision}`.",
            suggest(revision, names, hint),
        )


def _page(kind: str, id: str) -> str:
    return f"{DEFAULT_ENDPOINT}/{'' if kind == 'model' else f'{kind}s/'}{id}"
