"""Checkpoints on the Hugging Face Hub: a repository as a source of configs, headers and small tensors, no weights.

Files come by HTTP ranges and are kept below huggingface_hub's assets folder by repository, commit and file, so a
second plan of a commit asks for nothing but the commit. Files that huggingface_hub has downloaded are read from there.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import quote

import msgspec

from omniplat.checkpoint.folder import MAX_SMOOTHING_BYTES, Checkpoint, open_checkpoint, open_source
from omniplat.checkpoint.header import MAX_HEADER_BYTES
from omniplat.checkpoint.hub_http import HubClient, Limits, Refused, in_parallel
from omniplat.checkpoint.source import LocalFolder
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.errors import BackendNotInstalledError, InvalidCheckpointError, UsageError

#: The line that brings huggingface_hub.
INSTALL = 'pip install "omniplat[hub]"'

#: What is read of every shard at once: the headers of most shards are shorter.
FIRST_BYTES = 1 << 16
#: Tensors with at most so many bytes between them are read at once.
MAX_GAP = 1 << 14
#: Reads of small tensors for one plan. Each is a request of its own where weights lie between.
MAX_TENSOR_READS = 2000
#: Longest config or index, and longest list of a repository's files.
MAX_FILE_BYTES = 100_000_000
_MAX_LISTING_BYTES = 32 << 20
#: Answers of these lengths are given their time; longer ones have to come faster.
_LONG_LISTING, _LONG_HEADER = 1 << 20, 8 << 20

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_FILES = (".safetensors", ".gguf", ".json")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_INDICES = re.compile(r"\d+")


def is_hub_id(text: str | os.PathLike[str]) -> bool:
    """True for a string of the form `org/name` that is no path here and does not end as a file's name does."""
    if not isinstance(text, str) or _ID.fullmatch(text) is None or text.endswith(_FILES):
        return False
    return ".." not in text and "--" not in text and not os.path.lexists(text)


def _file_of(text: str | os.PathLike[str]) -> tuple[str, str]:
    """(id, file) of a string of the form `org/name/FILE.gguf` that is no path here; ("", "") for any other."""
    if not isinstance(text, str) or not text.endswith(".gguf") or text.count("/") < 2 or os.path.lexists(text):
        return "", ""
    organisation, name, file = text.split("/", 2)
    repo = f"{organisation}/{name}"
    return (repo, file) if is_hub_id(repo) and ".." not in file.split("/") else ("", "")


def require_local(checkpoint: str | os.PathLike[str]) -> None:
    """Raise InvalidCheckpointError for an id of the Hub: what needs weights needs a folder."""
    repo, file = (str(checkpoint), "") if is_hub_id(checkpoint) else _file_of(checkpoint)
    if repo:
        what = "file" if file else "folder"
        raise InvalidCheckpointError(
            f"no such {what}; weights are read from disk only. Download the repository and name its {what}: "
            f"hf download {f'{repo} {file}'.strip()} --local-dir DIR (older: huggingface-cli download; in Python: "
            "huggingface_hub.snapshot_download)",
            file=str(checkpoint),
        )


def open_named(name: str | os.PathLike[str], revision: str | None = None, limits: Limits | None = None) -> Checkpoint:
    """Open a path where one exists, else the repository of the Hub with this id, or one GGUF file of it
    (`org/name/FILE.gguf`).

    Raises what `open_checkpoint` and `open_repository` raise, and UsageError for a revision of a path.
    """
    repo, file = (str(name), "") if is_hub_id(name) else _file_of(name)
    if not repo:
        if revision is not None:
            raise UsageError(f"{str(name)!r} is a path, and only repositories of the Hub have revisions")
        return open_checkpoint(name)
    return open_repository(repo, revision, limits or Limits(), file)


def open_repository(repo: str, revision: str | None, limits: Limits, file: str = "") -> Checkpoint:
    """Open a repository of the Hub at `revision`, its default branch where that is None; of several GGUF files `file`.

    Raises BackendNotInstalledError where huggingface_hub is missing, InvalidCheckpointError where the repository or
    the revision does not exist or may not be read, where the server cannot be reached, where HF_HUB_OFFLINE is set
    and nothing has been downloaded, and for broken files.
    """
    try:
        from huggingface_hub import constants
    except ImportError as exc:
        missing = "huggingface-hub (no folder of that name is here, so it is taken for an id of the Hub)"
        raise BackendNotInstalledError(repo, missing, INSTALL, kind="checkpoint") from exc
    if constants.HF_HUB_OFFLINE:
        folder = _downloaded(repo, revision)
        return open_source(LocalFolder(Path(folder)), file=file) if file else open_checkpoint(folder)
    source = HubRepository(repo, revision, limits)
    return open_source(source, source.commit, file)


def _downloaded(repo: str, revision: str | None) -> str:
    """The folder of a snapshot that huggingface_hub has; the only way offline."""
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(repo, revision=revision, local_files_only=True))
    except Exception as exc:
        # two majors of huggingface_hub have different classes for what is not there
        at = f" at revision {revision!r}" if revision else ""
        raise InvalidCheckpointError(
            f"no such folder, HF_HUB_OFFLINE is set, and huggingface_hub has no download of this repository{at}",
            file=repo,
        ) from exc


class _Sibling(msgspec.Struct, gc=False):
    rfilename: str
    size: int | None = None


class _Listing(msgspec.Struct):
    sha: str
    siblings: list[_Sibling] = []


class HubRepository:
    """One commit of a repository, as a `Source`."""

    def __init__(self, repo: str, revision: str | None, limits: Limits) -> None:
        from huggingface_hub import constants

        self.root = Path(repo)
        self.is_local = False
        self.client = HubClient(limits)
        self._repo = repo
        self._revision = revision
        self._endpoint = constants.ENDPOINT.rstrip("/")
        self._heads: dict[str, bytes] = {}
        self._small: dict[str, bytes] = {}
        self._kinds: dict[str, dict[str, list[TensorInfo]]] = {}
        self._reads = 0
        self._store: Path | None = None
        if revision is not None and _COMMIT.fullmatch(revision):
            self._store = _store_of(repo, revision)
        listing = self._list()
        self.commit = listing.sha
        self._store = _store_of(repo, listing.sha)
        self._sizes = {item.rfilename: item.size for item in listing.siblings}
        self._folders: dict[str, set[str]] = defaultdict(set)
        for file in self._sizes:
            parts = PurePosixPath(file).parts
            for depth, part in enumerate(parts):
                self._folders["/".join(parts[:depth])].add(part)

    # -- a Source ---------------------------------------------------------------------------------

    def names(self, folder: str = "") -> list[str]:
        return sorted(self._folders.get(folder, ()))

    def is_file(self, file: str) -> bool:
        return file in self._sizes

    def is_folder(self, folder: str) -> bool:
        return folder in self._folders

    def size(self, file: str) -> int:
        size = self._sizes.get(file)
        if size is None or size < 0:
            raise InvalidCheckpointError("the Hub does not say how large it is", file=file)
        return size

    def read_file(self, file: str) -> bytes:
        size = self.size(file)
        if size > MAX_FILE_BYTES:
            raise InvalidCheckpointError(f"has {size} bytes, more than any config or index", file=file)
        return self._kept(f"{file}.whole", lambda: self._one(partial(self._fetch, file, 0, size), size))

    def read_range(self, file: str, start: int, length: int) -> bytes:
        length = max(min(length, self.size(file) - start), 0)
        head = self._heads.get(file, b"")
        if start + length <= len(head):
            return head[start : start + length]
        return self._kept(
            f"{file}.{start}-{length}", lambda: self._one(partial(self._fetch, file, start, length), length)
        )

    def prepare(self, shards: Sequence[str]) -> None:
        """Read the headers of `shards`, several at once."""
        wanted = [shard for shard in shards if shard not in self._heads and not shard.endswith(".gguf")]
        heads = in_parallel([partial(self._head, shard) for shard in wanted], self.client.limits, _LONG_HEADER)
        self._heads.update(zip(wanted, heads, strict=True))

    def read_tensor(self, info: TensorInfo, among: Mapping[str, TensorInfo]) -> bytes:
        """The tensor's bytes. Who asks for one asks for those of the same name in the other blocks: they are read too.

        Raises InvalidCheckpointError where that would take more requests than a plan may make.
        """
        if info.nbytes == 0:
            return b""
        if info.name not in self._small:
            alike = self._alike(info, among)
            self._small.update(self._read_tensors(alike))
        return self._small[info.name]

    # -- small tensors ----------------------------------------------------------------------------

    def _alike(self, info: TensorInfo, among: Mapping[str, TensorInfo]) -> list[TensorInfo]:
        """Tensors of this one's name but for indices, and of its size at most."""
        component = info.shard.rpartition("/")[0]
        if component not in self._kinds:
            kinds: dict[str, list[TensorInfo]] = defaultdict(list)
            for other in among.values():
                kinds[_INDICES.sub("#", other.name)].append(other)
            self._kinds[component] = kinds
        kind = self._kinds[component].get(_INDICES.sub("#", info.name), [])
        return [other for other in kind if 0 < other.nbytes <= info.nbytes] if info in kind else [info]

    def _read_tensors(self, tensors: Sequence[TensorInfo]) -> dict[str, bytes]:
        by_shard: dict[str, list[TensorInfo]] = defaultdict(list)
        for info in tensors:
            by_shard[info.shard].append(info)
        runs = [run for infos in by_shard.values() for run in _runs(infos)]
        self._reads += len(runs)
        if self._reads > MAX_TENSOR_READS:
            raise InvalidCheckpointError(
                f"planning needs more than {MAX_TENSOR_READS} small tensors that lie apart, such as this one: "
                f"download the repository (hf download {self._repo}) and plan its folder",
                file=tensors[0].shard,
                key=tensors[0].name,
            )
        blobs = in_parallel([partial(self._read_run, run) for run in runs], self.client.limits, MAX_SMOOTHING_BYTES)
        return {
            info.name: blob[info.start - run[0].start : info.end - run[0].start]
            for run, blob in zip(runs, blobs, strict=True)
            for info in run
        }

    def _read_run(self, run: Sequence[TensorInfo]) -> bytes:
        file, start, length = run[0].shard, run[0].start, run[-1].end - run[0].start
        return self._kept(f"{file}.{start}-{length}", partial(self._fetch, file, start, length))

    # -- the network ------------------------------------------------------------------------------

    def _list(self) -> _Listing:
        revision = f"/revision/{quote(self._revision, safe='')}" if self._revision else ""
        url = f"{self._endpoint}/api/models/{self._repo}{revision}?blobs=true"

        def fetch() -> bytes:
            try:
                return self.client.get(url, self._repo, _MAX_LISTING_BYTES)
            except Refused as exc:
                raise self._refused(exc, self._repo, "") from exc

        # a commit's list never changes; a branch has to be asked for
        def bounded() -> bytes:
            return self._one(fetch, _LONG_LISTING)

        blob = self._kept("listing", bounded) if self._store is not None else bounded()
        try:
            listing = msgspec.json.decode(blob, type=_Listing)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise InvalidCheckpointError(
                f"{self._endpoint} does not answer as the Hub does: {exc}", file=self._repo
            ) from exc
        if not _COMMIT.fullmatch(listing.sha):
            raise InvalidCheckpointError(f"{self._endpoint} names no commit: {listing.sha[:60]!r}", file=self._repo)
        for item in listing.siblings:
            parts = item.rfilename.split("/")
            if any(part in ("", ".", "..") for part in parts):
                raise InvalidCheckpointError(f"lists a file {item.rfilename!r}", file=self._repo)
        return listing

    def _head(self, shard: str) -> bytes:
        """The header of a shard with the bytes before it: a first piece, and the rest where it is longer."""
        size = self.size(shard)

        def fetch() -> bytes:
            head = self._fetch(shard, 0, min(FIRST_BYTES, size))
            needed = 8 + int.from_bytes(head[:8], "little")
            if needed <= len(head) or needed > min(size, 8 + MAX_HEADER_BYTES):
                return head[: max(needed, 8)]  # whole, or wrong: whoever reads it says so
            return head + self._fetch(shard, len(head), needed - len(head))

        def whole(head: bytes) -> bool:
            return len(head) == 8 + int.from_bytes(head[:8], "little")

        return self._kept(f"{shard}.header", fetch, whole)

    def _one(self, fetch: Callable[[], bytes], most: int) -> bytes:
        """`fetch` off this thread, so that its time is bounded by more than the server's manners."""
        return in_parallel([fetch], self.client.limits, most)[0]

    def _fetch(self, file: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        downloaded = self._downloaded(file, start, length)
        if downloaded is not None:
            return downloaded
        url = f"{self._endpoint}/{self._repo}/resolve/{self.commit}/{quote(file)}"
        try:
            return self.client.get_range(url, file, start, length, self.size(file))
        except Refused as exc:
            raise self._refused(exc, self._repo, file) from exc

    def _refused(self, exc: Refused, repo: str, file: str) -> InvalidCheckpointError:
        """The error for a status that no second attempt changes, in words that say what to do."""
        where = f"{self._endpoint}/{repo}"
        about = file or repo
        login = "log in (hf auth login, or HF_TOKEN) with an account that may read it"
        if exc.code == "GatedRepo" or (file and exc.status in (401, 403)):
            return InvalidCheckpointError(
                f"access to {repo} is gated: accept its terms at {where}, then {login}", file=about
            )
        if exc.code == "RevisionNotFound" or (exc.status == 404 and self._revision and not file and not exc.code):
            return InvalidCheckpointError(f"{where} has no revision {self._revision or 'main'!r}", file=about)
        if exc.status in (401, 404) and not file:
            return InvalidCheckpointError(
                f"there is no such folder here and no such repository at {where}; if it is private, {login}",
                file=about,
            )
        if exc.status == 403:
            return InvalidCheckpointError(f"{where} may not be read: {login}", file=about)
        return InvalidCheckpointError(f"{where} answers with status {exc.status}", file=about)

    # -- what is on disk --------------------------------------------------------------------------

    def _downloaded(self, file: str, start: int, length: int) -> bytes | None:
        """Bytes of a file that huggingface_hub has downloaded; None where it has not."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self._repo, file, revision=self.commit)
        if not isinstance(found, str):
            return None
        try:
            with open(found, "rb", buffering=0) as opened:
                blob = os.pread(opened.fileno(), length, start)
        except OSError:
            return None
        return blob if len(blob) == length else None

    def _kept(self, name: str, fetch: Callable[[], bytes], valid: Callable[[bytes], bool] = bool) -> bytes:
        """What `name` of this commit is in the store; fetched where it is not, and kept where it is `valid`."""
        assert self._store is not None
        path = self._store / quote(name, safe="")
        try:
            return path.read_bytes()
        except OSError:
            pass
        blob = fetch()
        if valid(blob):
            _keep(path, blob)
        return blob


def _store_of(repo: str, commit: str) -> Path:
    """Where huggingface_hub lets other libraries keep what belongs to a commit."""
    from huggingface_hub import constants

    return Path(constants.HF_ASSETS_CACHE) / "omniplat" / repo.replace("/", "--") / commit


def _keep(path: Path, blob: bytes) -> None:
    """Write `path` whole or not at all; a folder that cannot be written to costs the next plan its time, no more."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".part-")
        with os.fdopen(handle, "wb") as file:
            file.write(blob)
        os.replace(temporary, path)
    except OSError:
        return


def _runs(tensors: Sequence[TensorInfo]) -> list[list[TensorInfo]]:
    """Tensors of one shard in the groups that are read at once."""
    runs: list[list[TensorInfo]] = []
    for info in sorted(tensors, key=lambda item: item.start):
        if runs and info.start - runs[-1][-1].end <= MAX_GAP:
            runs[-1].append(info)
        else:
            runs.append([info])
    return runs
