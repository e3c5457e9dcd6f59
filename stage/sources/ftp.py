"""A file on an FTP server, as a stream of bytes: anonymous, binary, passive, going on with REST (RFC 959, RFC 3659)."""

from __future__ import annotations

import ftplib
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socket import socket
from urllib.parse import unquote, urlsplit

from stage.errors import IncompleteError, StageError, UsageError
from stage.sources.http import without_credentials
from stage.sources.streams import Broken, Stream

PIECE = 1 << 20
_NOT_KNOWN = ("500", "501", "502", "504")  # commands and parameters that a server does not have
_NOT_FOR_ALL = ("530", "532")


class FtpFile:
    """One file at an `ftp://` address.

    Args:
        what: how to call it in messages.
        timeout_s: how long the server may say nothing.

    Raises:
        UsageError: an address that FTP cannot ask for.
    """

    def __init__(self, url: str, what: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or ftplib.FTP_PORT
        self._path = unquote(parts.path)[1:]  # below the folder the server shows first; `%2F` leads to its root
        self._what, self._shown, self._timeout_s = what, without_credentials(url), timeout_s
        if not self._host or any(unicodedata.category(character) == "Cc" for character in self._path):
            raise UsageError(f"{what}: {self._shown} is no address that an ftp server understands.", "Check it.")

    def probe(self) -> tuple[int | None, str | None]:
        """Its size, and when it was last changed, as far as the server says.

        Raises:
            Broken, StageError: as for `ByteSource.probe`.
        """
        with self._connected() as ftp:
            return self._size(ftp), self._modified(ftp)

    @contextmanager
    def open(self, offset: int, version: str | None) -> Iterator[Stream]:
        """Its bytes.

        Raises:
            Broken, StageError: as for `ByteSource.open`.
        """
        with self._connected() as ftp:
            if offset and version is not None and self._modified(ftp) != version:
                offset = 0
            try:
                connection, _ = ftp.ntransfercmd(f"RETR {self._path}", rest=offset or None)
            except ftplib.error_perm as error:
                if not offset or _code(error) not in _NOT_KNOWN:
                    raise
                offset = 0
                connection, _ = ftp.ntransfercmd(f"RETR {self._path}")
            with connection:
                yield Stream(offset, self._pieces(ftp, connection))

    @staticmethod
    def _pieces(ftp: ftplib.FTP, connection: socket) -> Iterator[bytes]:
        while piece := connection.recv(PIECE):
            yield piece
        connection.close()
        ftp.voidresp()  # only this tells an end from a break

    @contextmanager
    def _connected(self) -> Iterator[ftplib.FTP]:
        ftp = ftplib.FTP(timeout=self._timeout_s)
        try:
            ftp.connect(self._host, self._port)
            ftp.login()
            ftp.voidcmd("TYPE I")
            yield ftp
            with suppress(ftplib.Error, EOFError, OSError):
                ftp.quit()
        except ftplib.error_perm as error:
            raise self._refused(error) from None
        except ftplib.Error as error:
            raise Broken(f"ftp: {_first_line(error)}") from None
        except EOFError:
            raise Broken("the connection broke") from None
        except TimeoutError:
            raise Broken("no bytes for a while") from None
        except UnicodeError:
            raise Broken("the server answers in no known encoding") from None
        except OSError as error:
            if error.filename is not None:  # ours, not the network's
                raise
            raise Broken(f"the connection failed: {error.strerror or error}") from None
        finally:
            ftp.close()

    def _size(self, ftp: ftplib.FTP) -> int | None:
        try:
            return ftp.size(self._path)
        except ftplib.error_perm as error:
            if _code(error) in _NOT_KNOWN:
                return None
            raise
        except ValueError:
            return None

    def _modified(self, ftp: ftplib.FTP) -> str | None:
        try:
            answer = ftp.sendcmd(f"MDTM {self._path}")
        except ftplib.error_perm:
            return None
        return answer[4:].strip() if answer.startswith("213 ") else None

    def _refused(self, error: ftplib.error_perm) -> StageError:
        said = _first_line(error)
        if _code(error) in _NOT_FOR_ALL:
            return UsageError(
                f"{self._what}: {self._shown} is not given to everybody (ftp: {said}).",
                "Fetch the file yourself and name it with `path:`.",
            )
        if _code(error) in ("550", "553"):
            return UsageError(f"{self._what}: {self._shown} is not there (ftp: {said}).", "Check the address.")
        return IncompleteError(f"{self._what}: {self._shown}: ftp: {said}.", "Try again later.")


def _code(error: ftplib.Error) -> str:
    return str(error)[:3]


def _first_line(error: ftplib.Error) -> str:
    return (str(error).splitlines() or ["no answer"])[0][:200]
