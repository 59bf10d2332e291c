"""A prefix in object storage: put, get, list and remove objects under it; every fault raises `StorageError`.

Credentials, endpoints and regions are left to fsspec (its config files, FSSPEC_* and the variables of the provider's
library): none of them is read, passed on or written down here.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from frameworm.errors import MissingPackageError, StorageError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://.+")
# Each component of a name. Run folders may have any name, except one that leads elsewhere.
_COMPONENT = re.compile(r"\w[\w .,=@+()%~-]*")
_MOST_COMPONENT_BYTES = 200
_EXTRAS = {"s3": "s3", "s3a": "s3"}
_UNREACHABLE = {
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.ETIMEDOUT,
    errno.EPIPE,
}
_NETWORK_ERROR = re.compile("Connect|Timeout")
_Result = TypeVar("_Result")


def is_url(text: object) -> bool:
    """True if `text` is a URL and not a path."""
    return isinstance(text, str) and _URL.fullmatch(text) is not None


def safe_name(name: str) -> bool:
    """True if an object's name, relative to a run, is also a harmless relative path."""
    parts = name.split("/")
    return all(_COMPONENT.fullmatch(part) and len(part.encode()) <= _MOST_COMPONENT_BYTES for part in parts)


def check_url(text: str) -> str:
    """Return the URL without a trailing slash.

    Raises:
        StorageError: The URL contains a password or options, or has no name to store a run under.
    """
    url = text.rstrip("/")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StorageError(f"{text} is not a URL ({error}); give one such as s3://bucket/runs/x") from None
    if parts.password is not None or parts.query:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise StorageError(f"{shown}: leave secrets and options out of the URL; {_CREDENTIALS}")
    if last_part(url) in ("", ".", ".."):
        raise StorageError(f"{text} names no folder in its storage; give one, such as {parts.scheme}://bucket/runs/x")
    return url


def last_part(url: str) -> str:
    """Return the last component of a URL; empty if there is nothing after the scheme."""
    return url.rstrip("/").partition("://")[2].rpartition("/")[2]


_CREDENTIALS = (
    "fsspec takes credentials from its own config and environment (AWS_PROFILE, AWS_ENDPOINT_URL, FSSPEC_S3_..., "
    "~/.config/fsspec)"
)


class Facts(NamedTuple):
    """An object in a listing: its size, its modification time, and a stamp that changes with its content."""

    size_bytes: int | None
    written_at: float | None
    stamp: str

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Facts:
        """Parse what the storage returned, in any of the spellings of fsspec's implementations."""
        at = next((facts[key] for key in ("LastModified", "mtime", "updated", "created") if facts.get(key)), None)
        stamp = f"{facts.get('size')} {at} {facts.get('ETag') or facts.get('etag') or ''}"
        if isinstance(at, datetime):
            at = at.timestamp()
        return cls(facts.get("size"), float(at) if isinstance(at, (int, float)) else None, stamp)


class Place:
    """The objects under a URL.

    Args:
        url: Any URL that fsspec knows.

    Raises:
        MissingPackageError: The package for this kind of URL is not installed.
        StorageError: The URL is not valid.
    """

    def __init__(self, url: str) -> None:
        self.url = check_url(url)
        scheme = url.partition("://")[0]
        try:
            import fsspec

            # An own instance without a listings cache, because other processes change what is there.
            self._system, self._root = fsspec.core.url_to_fs(
                self.url, use_listings_cache=False, skip_instance_cache=True
            )
        except ImportError as error:
            extra = _EXTRAS.get(scheme)
            package = None if extra is None else f"pip install 'frameworm[{extra}]'"
            hint = package or f"{error}; install that package beside fsspec"
            raise MissingPackageError(f"{self.url} needs a package that is not installed: {hint}") from None
        except ValueError as error:
            raise StorageError(
                f"{self.url}: {error}; give a URL that fsspec knows, such as s3://bucket/runs/x"
            ) from None
        self._root = self._root.rstrip("/")
        # On a real file system, an object written in place would be half there for a while.
        self._has_folders = hasattr(self._system, "auto_mkdir")
        if self._has_folders:
            self._system.auto_mkdir = True

    def __repr__(self) -> str:
        return f"Place({self.url!r})"

    @property
    def in_this_process(self) -> bool:
        """True if no other process sees the objects (memory://)."""
        protocol = self._system.protocol
        return "memory" in ((protocol,) if isinstance(protocol, str) else protocol)

    def is_folder(self, path: Path) -> bool:
        """True if the objects are the files of exactly this folder (file://)."""
        return self._has_folders and Path(self._root).resolve() == path.resolve()

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return the content of a small object.

        Raises:
            StorageError: The object does not exist, is too large, or cannot be read.
        """
        with self._in_words(f"read {name}"):
            content: bytes = self._system.cat_file(self._path(name), start=0, end=most_bytes + 1)
        if len(content) > most_bytes:
            raise StorageError(f"{self.url}/{name} is larger than {most_bytes / 2**20:.0f} MiB")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Store a small object, entirely or not at all.

        Raises:
            StorageError: The object cannot be written.
        """
        with self._in_words(f"write {name}"), self._final(name) as path:
            self._system.pipe_file(path, content)

    def put(self, source: Path, name: str, progress: Callable[[], None] = lambda: None) -> None:
        """Store a file, entirely or not at all; `progress` is called whenever a part of it has arrived.

        Raises:
            StorageError: The object cannot be written.
            FileNotFoundError: The local file does not exist.
        """
        source.stat()
        from fsspec.callbacks import Callback

        class Progress(Callback):  # type: ignore[misc]
            def relative_update(self, inc: int = 1) -> None:
                progress()

        with self._in_words(f"write {name}"), self._final(name) as path:
            self._system.put_file(str(source), path, callback=Progress())

    def get(self, name: str, target: Path) -> None:
        """Copy an object to a file.

        Raises:
            StorageError: The object does not exist, or cannot be read.
        """
        with self._in_words(f"read {name}"):
            self._system.get_file(self._path(name), str(target))

    def remove(self, name: str) -> None:
        """Remove an object, if it exists.

        Raises:
            StorageError: The object cannot be removed.
        """
        with self._in_words(f"remove {name}"), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder that has no objects left; most object storage has no folders."""
        if self._has_folders:
            with contextlib.suppress(Exception):
                self._system.rmdir(self._path(name))

    def find(self, under: str = "") -> dict[str, Facts]:
        """Return the objects under a name, except those with unsafe names.

        Raises:
            StorageError: The objects cannot be listed.
        """
        path = self._path(under) if under else self._root
        with self._in_words("list what is there"):
            try:
                found = self._system.find(path, detail=True)
            except FileNotFoundError:
                if not self._has_folders:
                    raise  # a bucket that does not exist
                found = {}
        names = {self._name(full): Facts.of(facts) for full, facts in found.items() if facts.get("type") == "file"}
        return {name: facts for name, facts in names.items() if name and safe_name(name)}

    def within(self, limit_s: float, act: Callable[[], _Result]) -> _Result:
        """Return the result of `act` if it finishes in time.

        Raises:
            StorageError: There was no answer within `limit_s`; storage libraries may retry for many minutes.
        """
        results: list[_Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(act())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="storage", daemon=True)
        thread.start()
        thread.join(limit_s)
        if errors:
            raise errors[0]
        if not results:
            raise StorageError(f"{self.url} has not answered for {limit_s:g} s", unreachable=True)
        return results[0]

    def _path(self, name: str) -> str:
        assert name, "the place itself is no object"
        return f"{self._root}/{name}"

    def _name(self, full: str) -> str:
        """An object's name relative to this place; empty for anything outside it."""
        begin = self._root.strip("/") + "/"
        full = full.lstrip("/")
        return full[len(begin) :] if full.startswith(begin) else ""

    @contextlib.contextmanager
    def _final(self, name: str) -> Iterator[str]:
        """Yield the path to write an object to; it gets its final name only once it is complete."""
        path = self._path(name)
        if not self._has_folders:
            yield path
            return
        folder, _, last = path.rpartition("/")
        passing = f"{folder}/.{last}.{secrets.token_hex(8)}.tmp"
        try:
            yield passing
            self._system.mv(passing, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._system.rm_file(passing)
            raise

    @contextlib.contextmanager
    def _in_words(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            unreachable = _is_unreachable(error)
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            missing = isinstance(error, FileNotFoundError)
            verb = "cannot be reached" if unreachable else f"refuses to {what}"
            refused = isinstance(error, PermissionError) or not isinstance(error, OSError)
            hint = f"; {_CREDENTIALS}" if refused and not unreachable else ""
            raise StorageError(
                f"{self.url} {verb}: {reason}{hint}", unreachable=unreachable, missing=missing
            ) from error


def _is_unreachable(error: BaseException | None) -> bool:
    """True if the network is at fault; storage libraries wrap network errors in their own."""
    seen = 0
    while error is not None and seen < 20:
        if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
            return True
        if isinstance(error, OSError) and error.errno in _UNREACHABLE:
            return True
        # Errors of HTTP libraries share no base class, but their names follow a pattern.
        if any(_NETWORK_ERROR.search(base.__name__) for base in type(error).__mro__):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False
