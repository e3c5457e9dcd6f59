"""What ssh says when it cannot, in words: what happened, why, and the command that helps. Pure."""

from __future__ import annotations

import re

from stage.errors import IncompleteError, as_shown, quoted

AGAIN = "Run the same command again: it goes on where it stopped."
_TRY = (
    "Try it: {by_hand}true   (port or key: in ~/.ssh/config; for a push also --ssh 'ssh -p 2222 "
    "-i KEY')"
)
_TOO_BUSY = (
    r"(kex|ssh)_exchange_identification|banner exchange|Exceeded MaxStartups|"
    r"Not allowed at this time"
)
# The first that fits. What the server said last stands first: a changed host key also "fails".
_REMEDIES: tuple[tuple[str, str, str], ...] = (
    (
        r"Could not resolve hostname|nodename nor servname",
        "no host has that name",
        "Check the spelling, the VPN, and `Host` in ~/.ssh/config: {ssh} -G {host} | head -n 3",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "it shows another host key than before: the site made it anew, or another machine answers "
        "in its place",
        "Compare the fingerprint above with the one that the site publishes. If it is the same: "
        "ssh-keygen {entry}",
    ),
    (
        r"host key is known for|authenticity of host|Host key verification failed",
        "its host key is not known here",
        "Log in once by hand, and compare the fingerprint with the one that the site publishes: "
        "{by_hand}true",
    ),
    (
        r"Too many authentication failures",
        "it ended the login after too many keys: the agent offers all that it has",
        "Offer one key: in ~/.ssh/config, under `Host {host}`: IdentitiesOnly yes, and "
        "IdentityFile with the key. " + AGAIN,
    ),
    (
        _TOO_BUSY,
        "it closed the connection before a login: too many at once (MaxStartups), a ban for many "
        "logins (fail2ban), or the node is full. The key was not looked at",
        "Wait some minutes, without trying again meanwhile, or take another login node. " + AGAIN,
    ),
    (
        r"Cannot execute command-line and remote command",
        "`RemoteCommand` in ~/.ssh/config stands in the way",
        "Put it under a `Host` of its own there.",
    ),
    (
        r"[Bb]ad configuration option|Bad owner or permissions|keyword .* extra arguments",
        "its configuration here cannot be read: see above",
        "Correct that file: {ssh} -G {host}",
    ),
    (
        r"Permission denied|No more authentication methods",
        "it refused the login: the key, the password or the second factor",
        "Try it: {by_hand}true   (which key it takes: {ssh} -v {host} true)",
    ),
    (
        r"Connection refused|timed out|No route to host|Network is unreachable|port \d+: Invalid",
        "no connection by `{ssh}`",
        _TRY,
    ),
    (
        r"Connection (closed|reset) by|Disconnected from|disconnect(ed)? from",
        "it closed the connection while the login was going on: the password or second factor came "
        "too late, or the account is locked",
        "Have the second factor at hand. " + AGAIN,
    ),
)


def fault(said: str, host: str, ssh: str, by_hand: str) -> IncompleteError:
    """The error for what ssh said when there was no connection, or it broke.

    Args:
        said: ssh's own lines, not those of a remote program.
        host: as ssh takes it: an alias, or `user@host`.
        ssh: the command of the user.
        by_hand: what a user writes before a command to run it there.
    """
    fits = ((what, remedy) for pattern, what, remedy in _REMEDIES if re.search(pattern, said))
    what, remedy = next(fits, ("no connection by `{ssh}`, or it broke", _TRY))
    # ssh knows an alias by its HostName and port, in the file that it names.
    known = re.search(r"Offending .* key in (.+):\d+\n(?:.*\n)*Host key for (\S+) has", said)
    entry = f"-f {quoted(known[1])} -R {quoted(known[2])}" if known else f"-R {quoted(host)}"
    words = {"host": host, "entry": entry, "ssh": ssh, "by_hand": by_hand}
    last = [line.strip() for line in said.splitlines() if line.strip()][-1:]
    shown = f" ({as_shown(last[0])[:200]})" if last else ""
    return IncompleteError(f"{host}: {what.format(**words)}{shown}.", remedy.format(**words))


def lost(said: str, host: str) -> IncompleteError:
    """The error for a command that found its connection gone, or no room in it.

    Args:
        said: the lines of an ssh that may only reuse a connection.
    """
    if re.search(r"Session open refused|administratively prohibited|session request failed", said):
        return IncompleteError(
            f"{host}: it refuses one more session over the connection that is open (MaxSessions).",
            f"End a command or a window that uses this connection. {AGAIN}",
        )
    return IncompleteError(f"{host}: the connection ended.", AGAIN)


def is_worth_a_second_try(said: str) -> bool:
    """Whether the server was only too busy: it closed the connection before it looked at a key."""
    return re.search(_TOO_BUSY, said) is not None


def is_full(text: str) -> bool:
    """Whether a program there could not write for lack of room."""
    return re.search(r"[Qq]uota exceeded|No space left on device", text) is not None
