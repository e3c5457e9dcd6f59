"""Turns a Hub's refusals into errors that name the asset, the reason and the next step.

huggingface_hub classifies the answer. Where two causes give the same class, one more request to
the Hub decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import httpx2
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from stage.download.http import origin_of, proxy_for, without_credentials
from stage.errors import IncompleteError, StageError, UsageError, suggest
from stage.paths import names_a_local_path

# What huggingface_hub and httpx2 raise on a malformed answer.
MALFORMED = (
    httpx2.DecodingError,
    httpx2.TooManyRedirects,
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
        endpoint: the Hub's address.
        has_token: whether requests carry a token.
        info: requests what the API says about a repository: kind, id, part (empty, or `/refs`).
    """

    def __init__(
        self, endpoint: str, has_token: bool, info: Callable[[str, str, str], dict[str, Any]]
    ) -> None:
        self._endpoint, self._has_token, self._info = endpoint, has_token, info
        self._name = without_credentials(endpoint)

    def api_error(
        self, what: str, kind: str, id: str, revision: str, error: Exception
    ) -> StageError:
        """The error of a failed API request that a retry does not fix.

        Args:
            what: the asset's name in messages.
        """
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
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
            case RepositoryNotFoundError():
                return self._not_found(what, kind, id)
            case OfflineModeIsEnabled():
                return UsageError(
                    f"{what}: HF_HUB_OFFLINE is set, so no request to the Hub is allowed.",
                    "unset HF_HUB_OFFLINE",
                )
            case HFValidationError():
                return UsageError(
                    f"{what}: `{id}` is not the name of a repository: {error}",
                    f"For a folder on this machine, write `path: {id}`."
                    if names_a_local_path(id)
                    else "",
                )
            case HfHubHTTPError() if status in (401, 403):
                return self._not_found(what, kind, id)
            case HfHubHTTPError() if _is_web_page(error.response):
                return IncompleteError(
                    f"{what}: {self._name} does not answer as a Hub: HTTP {status}, a web page.",
                    "Give the address of a Hub or of a mirror: --endpoint https://huggingface.co",
                )
        return IncompleteError(
            f"{what}: {self._name} answered: {_first_line(error)}",
            "Try again, or another --endpoint.",
        )

    def malformed(self, what: str, error: Exception) -> IncompleteError:
        """The error of a malformed answer: the server is not a Hub, or a proxy is in between."""
        problem = f"{type(error).__name__}: {_first_line(error)[:200]}"
        return IncompleteError(
            f"{what}: the answer of {self._name} makes no sense ({problem}).",
            "Is it a Hub? Open the address in a browser; "
            "behind a proxy or a login page, name another --endpoint.",
        )

    def transport_problem(self, error: httpx2.TransportError) -> str:
        """Describes why there was no answer; names the host of a connection that was not made."""
        if isinstance(error, httpx2.TimeoutException):
            return "no answer in time"
        if not isinstance(error, httpx2.ConnectError):
            return "the connection broke"
        proxy = proxy_for(self._endpoint)
        _, host, port = origin_of(proxy or self._endpoint)
        where = f"the proxy {host}:{port} that the environment names" if proxy else f"{host}:{port}"
        return f"cannot connect to {where}"

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
                "run again with --update to take the repository's current commit.",
            )
        return IncompleteError(
            f"{what}: HTTP {status} from {self._name}.", "Try again, or another --endpoint."
        )

    def _page(self, kind: str, id: str) -> str:
        return f"{DEFAULT_ENDPOINT}/{'' if kind == 'model' else f'{kind}s/'}{id}"

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
                f"Accept its terms at {self._page(kind, id)} with that account; then run again.",
            )
        return UsageError(
            f"{what}: the {kind} {id} is gated: it needs an account that accepted its terms.",
            f"Accept them at {self._page(kind, id)}, then give a token: {LOG_IN}",
        )

    def _not_found(self, what: str, kind: str, id: str) -> StageError:
        seen = "with your token" if self._has_token else "without a token"
        other = "dataset" if kind == "model" else "model"
        if self._exists(other, id):
            return UsageError(
                f"{what}: `{id}` is a {other}, not a {kind}.", f"Write `{other}: {id}`."
            )
        return UsageError(
            f"{what}: {self._name} shows no {kind} `{id}` {seen}: it does not exist or is private.",
            CHECK_NAME,
        )

    def _exists(self, kind: str, id: str) -> bool:
        try:
            return "id" in self._info(kind, id, "")
        except (HfHubHTTPError, HFValidationError, httpx2.TransportError, *MALFORMED):
            return False

    def _no_revision(self, what: str, kind: str, id: str, revision: str) -> StageError:
        try:
            refs = self._info(kind, id, "/refs")
            names = [str(ref["name"]) for ref in [*refs["branches"], *refs["tags"]]]
        except (HfHubHTTPError, httpx2.TransportError, *MALFORMED):
            names = []
        hint = f"It has: {', '.join(names[:12])}." if names else f"See {self._page(kind, id)}/refs."
        return UsageError(
            f"{what}: the {kind} {id} has no revision `{revision}`.",
            suggest(revision, names, hint),
        )


def _is_web_page(response: httpx2.Response) -> bool:
    """Whether an answer is a web page: a Hub answers in JSON, or names its error in a header."""
    return (
        "html" in response.headers.get("Content-Type", "").lower()
        and "X-Error-Code" not in response.headers
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
