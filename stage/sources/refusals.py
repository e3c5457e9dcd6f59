"""What a Hub's refusals mean, in words: which asset, why, what to do.

huggingface_hub says which error it is; where two causes give the same one, the Hub is asked once more.
"""

from __future__ import annotations

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

from stage.errors import IncompleteError, StageError, UsageError
from stage.names import names_a_local_path
from stage.sources.answers import SENSELESS
from stage.sources.http import origin_of, proxy_for, without_credentials

DEFAULT_ENDPOINT = "https://huggingface.co"


class Refusals:
    """The words of one Hub, for one user.

    Args:
        endpoint: its address.
        has_token: whether it is asked with a token.
        info: asks it for what its API says of a repository: kind, id, part (empty, or `/refs`).
    """

    def __init__(self, endpoint: str, has_token: bool, info: Callable[[str, str, str], dict[str, Any]]) -> None:
        self._endpoint, self._has_token, self._info = endpoint, has_token, info
        self._name = without_credentials(endpoint)

    def in_words(self, what: str, kind: str, id: str, revision: str, error: Exception) -> StageError:
        """What to say of an error that no patience mends.

        Args:
            what: whose business it was, for the message.
        """
        match error:
            case StageError():
                return error
            case GatedRepoError():
                return self._gated(what, kind, id)
            case RevisionNotFoundError():
                return self._no_revision(what, kind, id, revision)
            case DisabledRepoError():
                return UsageError(f"{what}: the {kind} {id} was disabled by the Hub.", "Use another repository.")
            case RepositoryNotFoundError():
                return self._not_found(what, kind, id)
            case OfflineModeIsEnabled():
                return UsageError(
                    f"{what}: HF_HUB_OFFLINE is set, so the Hub may not be asked.", "unset HF_HUB_OFFLINE"
                )
            case HFValidationError():
                return UsageError(
                    f"{what}: `{id}` cannot be a repository: {error}",
                    f"What lies on this machine is `path: {id}`." if names_a_local_path(id) else "",
                )
            case HfHubHTTPError() if error.response is not None and error.response.status_code in (401, 403):
                return self._not_found(what, kind, id)
            case HfHubHTTPError() if error.response is not None and _is_a_page(error.response):
                status = error.response.status_code
                return IncompleteError(
                    f"{what}: {self._name} does not answer as a Hub: HTTP {status}, a page for people.",
                    "Give the address of a Hub or a mirror of it, as a script would: --endpoint https://huggingface.co",
                )
        return IncompleteError(
            f"{what}: {self._name} answered: {_first_line(error)}", "Try again, or another --endpoint."
        )

    def senseless(self, what: str, error: Exception) -> IncompleteError:
        """huggingface_hub believes what it is told; whoever answers so is no Hub, or something is in between."""
        problem = f"{type(error).__name__}: {_first_line(error)[:200]}"
        return IncompleteError(
            f"{what}: what {self._name} answers makes no sense ({problem}).",
            "Is it a Hub? Look at the address in a browser; behind a proxy or a login page, name another --endpoint.",
        )

    def transport_problem(self, error: httpx2.TransportError) -> str:
        """Why there was no answer; of a connection that was not made, where to."""
        if isinstance(error, httpx2.TimeoutException):
            return "no answer in time"
        if not isinstance(error, httpx2.ConnectError):
            return "the connection broke"
        proxy = proxy_for(self._endpoint)
        _, host, port = origin_of(proxy or self._endpoint)
        where = f"the proxy {host}:{port} that the environment names" if proxy else f"{host}:{port}"
        return f"cannot connect to {where}"

    def refused(self, what: str, kind: str, id: str, path: str, status: int, code: str | None) -> StageError:
        """A file was refused although its repository's listing was not."""
        if status in (401, 403) and code not in ("RepoNotFound", "RevisionNotFound"):
            return self._gated(what, kind, id)
        if status in (401, 403, 404):
            return UsageError(
                f"{what}: {path} of {id} is not there any more (HTTP {status}).",
                "Its commit may have been deleted: run again with --update to follow the repository as it is now.",
            )
        return IncompleteError(f"{what}: HTTP {status} from {self._name}.", "Try again, or another --endpoint.")

    def _page(self, kind: str, id: str) -> str:
        return f"{DEFAULT_ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{id}"

    def _gated(self, what: str, kind: str, id: str) -> StageError:
        if self._has_token:
            return UsageError(
                f"{what}: the {kind} {id} is gated, and the account of your token has no access.",
                f"Accept its terms at {self._page(kind, id)} with that account; then run again.",
            )
        return UsageError(
            f"{what}: the {kind} {id} is gated: it needs an account that accepted its terms.",
            f"Accept them at {self._page(kind, id)}, then give a token: run `hf auth login`, or set HF_TOKEN.",
        )

    def _not_found(self, what: str, kind: str, id: str) -> StageError:
        seen = "with your token" if self._has_token else "without a token"
        other = "dataset" if kind == "model" else "model"
        if self._exists(other, id):
            return UsageError(f"{what}: `{id}` is a {other}, not a {kind}.", f"Write `{other}: {id}`.")
        return UsageError(
            f"{what}: {self._name} shows no {kind} `{id}` {seen}: it does not exist or is private.",
            "Check the spelling (org/name). For a private one give a token: run `hf auth login`, or set HF_TOKEN.",
        )

    def _exists(self, kind: str, id: str) -> bool:
        try:
            return "id" in self._info(kind, id, "")
        except (HfHubHTTPError, HFValidationError, httpx2.TransportError, *SENSELESS):
            return False

    def _no_revision(self, what: str, kind: str, id: str, revision: str) -> StageError:
        try:
            refs = self._info(kind, id, "/refs")
            names = [str(ref["name"]) for ref in [*refs["branches"], *refs["tags"]]]
        except (HfHubHTTPError, httpx2.TransportError, *SENSELESS):
            names = []
        hint = f"It has: {', '.join(names[:12])}." if names else f"See {self._page(kind, id)}/refs."
        return UsageError(f"{what}: the {kind} {id} has no revision `{revision}`.", hint)


def _is_a_page(response: httpx2.Response) -> bool:
    """Whether a server's answer is one for people: a Hub's are JSON, or name their error in a header."""
    return "html" in response.headers.get("Content-Type", "").lower() and "X-Error-Code" not in response.headers


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
