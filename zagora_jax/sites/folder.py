"""The folder that sites share: any file system that fsspec knows, by its URL.

Two things are asked of it. A file appears under its name whole or not at all: it is written under a temporary name and
renamed, or, in stores of objects, put in one request. And of several sites that create the same file, exactly one
succeeds (`Folder.create`): that alone is how sites agree, without locks or clocks. What a store cannot do is found out
when the folder is opened.
"""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from zagora_jax.checkpoints.atomic import atomic_file, fsync_directory
from zagora_jax.errors import UserError

# The prefix of names that are not complete.
TEMPORARY = ".part-"


class Folder:
    """A folder by its URL; names in it have slashes. What cannot be reached raises OSError.

    Attributes:
        url: as it was given.
        sent: bytes written so far.
        received: bytes read so far, but for what listings take.
    """

    def __init__(self, url: str):
        """Open the folder, and make it where needed.

        Raises:
            UserError: the URL's protocol is unknown, or needs a package that is not installed.
        """
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise UserError(f"--sites.folder needs fsspec: pip install 'zagora-jax[sites]' ({error})") from error
        self.url, self.sent, self.received = url, 0, 0
        try:
            self._fs, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"--sites.folder {url}: {error}") from error
        self._local = "file" in _protocols(self._fs)
        with _reached(url):
            self._fs.makedirs(self._root, exist_ok=True)

    def require_exclusive_creation(self, name: str) -> None:
        """Try `create` out, with a file of that name.

        Raises:
            UserError: a file that is there already can be created again, so that sites could not agree.
        """
        self.remove(name)
        if not self.create(name, b"1") or self.create(name, b"2") or self.read(name) != b"1":
            raise UserError(
                f"--sites.folder {self.url}: this storage lets a file be created twice, so that sites cannot agree on "
                "one. Use a file system that all sites mount, or a store with conditional writes, such as S3"
            )
        self.remove(name)

    def write(self, name: str, content: bytes) -> None:
        """Write a file, in the place of one that is there."""
        path = self._path(name)
        with _reached(self.url, name):
            if self._local:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                with atomic_file(Path(path)) as file:
                    file.write(content)
            elif _puts_whole(self._fs):
                self._fs.pipe_file(path, content)
            else:
                self._make_parent(path)
                temporary = f"{self._parent(path)}/{TEMPORARY}{secrets.token_hex(6)}"
                self._fs.pipe_file(temporary, content)
                self._fs.mv(temporary, path)
        self.sent += len(content)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file that is not there yet; returns whether this call, of all sites' calls, has made it."""
        path = self._path(name)
        try:
            with _reached(self.url, name):
                if self._local:
                    _link_whole(Path(path), content)
                elif _puts_whole(self._fs):
                    self._fs.pipe_file(path, content, mode="create")
                else:
                    self._make_parent(path)
                    with self._fs.open(path, "xb") as file:
                        file.write(content)
        except FileExistsError:
            return False
        self.sent += len(content)
        return True

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, None where there is none."""
        with _reached(self.url, name):
            try:
                content = self._fs.cat_file(self._path(name))
            except FileNotFoundError:
                return None
        self.received += len(content)
        return content

    def fetch(self, name: str, to: Path) -> None:
        """Copy a file to a local one."""
        with _reached(self.url, name):
            self._fs.get_file(self._path(name), str(to))
        self.received += to.stat().st_size

    def list(self, folder: str) -> dict[str, int | None]:
        """Return the names in a folder, without its own, and their sizes; empty where there is no such folder."""
        with _reached(self.url, folder):
            self._fs.invalidate_cache()  # other sites write
            try:
                entries = self._fs.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return {}
        names = {entry["name"].rstrip("/").rpartition("/")[2]: entry.get("size") for entry in entries}
        return {name: size for name, size in names.items() if name and not name.startswith(".")}

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all in it, if it is there."""
        with _reached(self.url, name), suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @staticmethod
    def _parent(path: str) -> str:
        return path.rpartition("/")[0]

    def _make_parent(self, path: str) -> None:
        self._fs.makedirs(self._parent(path), exist_ok=True)


def _protocols(file_system: Any) -> tuple[str, ...]:
    return (file_system.protocol,) if isinstance(file_system.protocol, str) else tuple(file_system.protocol)


def _puts_whole(file_system: Any) -> bool:
    """Tell a store of objects, where a file is put by one request: fsspec's asynchronous file systems, and memory."""
    return bool(getattr(file_system, "async_impl", False)) or "memory" in _protocols(file_system)


def _link_whole(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, and give it its own name if that is free."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(6)}")
    try:
        with atomic_file(temporary) as file:
            file.write(content)
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            with path.open("xb") as file:  # no hard links here, as on exFAT
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


@contextmanager
def _reached(url: str, name: str = "") -> Iterator[None]:
    """Turn whatever a file system's own library raises into an OSError that names the file."""
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", f"{url.rstrip('/')}/{name}") from error
