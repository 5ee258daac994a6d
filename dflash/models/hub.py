"""The one place that talks to the model hub: listings, single files, whole snapshots, and what went wrong.

Downloads go file by file, small files first: a snapshot whose weights are there is complete, an interrupted
one goes on with the first file that is missing, and Ctrl-C works at any time (huggingface_hub spreads the
transfer of a large file over connections by itself). Only what a model needs is fetched: never code, pickles
or other formats' copies of the weights. Endpoint, token and offline mode are huggingface_hub's own settings.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub import constants as hub_settings
from huggingface_hub import errors as hub_errors
from huggingface_hub import utils as hub_utils

from ..errors import (
    BadCheckpoint,
    DFlashError,
    DiskFull,
    GatedModel,
    HubFailed,
    HubUnreachable,
    ModelNotFound,
    UnsupportedModel,
)
from . import headers, store

ANSWER_SECONDS = 5.0  # for the first answer of the hub; a working one takes well under one
_BESIDE_WEIGHTS = (
    "config.json",
    "generation_config.json",
    headers.INDEX,
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.*",
    "*.tiktoken",
    "tiktoken.model",
)
_PLAIN_SUFFIXES = {".json", ".jinja", ".model", ".tiktoken", ".txt"}
_SHARD = re.compile(r"-\d+-of-\d+\.safetensors$")
_TRANSPORTS = {"httpcore", "httpx", "httpx2", "requests", "ssl", "urllib3"}


@dataclass(frozen=True)
class _Listing:
    """The needed files of one commit: name -> bytes, in the order in which they are fetched."""

    commit: str
    files: dict[str, int]


def snapshot(
    repo: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    offline: bool = False,
    progress: bool = True,
    endpoint: str | None = None,
    timeout_s: float = ANSWER_SECONDS,
) -> Path:
    """The folder with the needed files of `repo`, fetched as far as they are not in the cache.

    Without a network, or with `offline`, a complete copy in the cache is used.

    Raises:
        ModelNotFound, GatedModel: no such repository or revision; no access to it.
        UnsupportedModel: it holds no safetensors weights.
        HubUnreachable, HubFailed: nobody answers; an answer that is an error.
        DiskFull: it does not fit, known before the first byte is fetched.
    """
    if offline:
        return _from_cache(repo, revision, cache_dir)
    try:
        listing = _list(repo, revision, endpoint, timeout_s)
    except HubFailed as failure:
        if (folder := cached(repo, revision=revision, cache_dir=cache_dir)) is None:
            raise
        store.say(progress, f"using the copy of {repo} on this disk ({failure.message})")
        return folder
    _require_weights(repo, listing)
    missing = {name: size for name, size in listing.files.items() if not _has(repo, name, listing, cache_dir)}
    store.check_room(_place(cache_dir), sum(missing.values()), f"downloading {repo}")
    if missing:
        store.say(progress, f"fetching {repo}: {len(missing)} files, {sum(missing.values()):,} bytes")
    fetch = _Fetch(repo, cache_dir, endpoint, timeout_s)
    with _errors_as_ours(repo, revision), _progress_bars(progress):
        fetch("config.json", revision)  # by its name, so that the cache remembers which commit that means
        paths = {name: fetch(name, listing.commit) for name in listing.files}
    return paths["config.json"].parent


def cached(repo: str, *, revision: str | None = None, cache_dir: Path | None = None) -> Path | None:
    """The folder of a complete snapshot on this disk (config and all weights), or None. Asks no network."""
    try:
        config = try_to_load_from_cache(repo, "config.json", cache_dir=cache_dir, revision=revision)
    except hub_errors.HFValidationError:
        return None
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if _is_complete(folder) else None


def file_sizes(
    repo: str, *, revision: str | None = None, endpoint: str | None = None, timeout_s: float = ANSWER_SECONDS
) -> dict[str, int]:
    """Bytes of each file that `snapshot` would fetch, by name. Raises as `snapshot` does, save `DiskFull`."""
    listing = _list(repo, revision, endpoint, timeout_s)
    _require_weights(repo, listing)
    return listing.files


def read_file(
    repo: str,
    filename: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    offline: bool = False,
    endpoint: str | None = None,
    timeout_s: float = ANSWER_SECONDS,
) -> Path:
    """One small file of `repo`, such as its `config.json`, from the hub or, failing that, from the cache.

    Raises:
        ModelNotFound: no such repository, revision or file.
        GatedModel, HubUnreachable, HubFailed: as for `snapshot`.
    """
    with _errors_as_ours(repo, revision):
        known = try_to_load_from_cache(repo, filename, cache_dir=cache_dir, revision=revision)
    if offline and isinstance(known, str):
        return Path(known)
    if offline:
        raise HubUnreachable(
            f"{filename} of {repo} is not in the cache, and offline mode forbids to fetch it"
        )
    try:
        # The listing comes first because it has a time limit; a download by itself retries for minutes.
        commit = _list(repo, revision, endpoint, timeout_s).commit
        with _errors_as_ours(repo, revision), _progress_bars(False):
            return _Fetch(repo, cache_dir, endpoint, timeout_s)(filename, commit)
    except HubFailed:
        if isinstance(known, str):
            return Path(known)
        raise


@dataclass(frozen=True)
class _Fetch:
    """Download one file at a revision and return its path; a file already there costs no request."""

    repo: str
    cache_dir: Path | None
    endpoint: str | None
    timeout_s: float

    def __call__(self, name: str, revision: str | None) -> Path:
        path = hf_hub_download(
            self.repo,
            name,
            revision=revision,
            cache_dir=self.cache_dir,
            endpoint=self.endpoint,
            etag_timeout=self.timeout_s,
        )
        return Path(path)


def _list(repo: str, revision: str | None, endpoint: str | None, timeout_s: float) -> _Listing:
    with _errors_as_ours(repo, revision):
        info = HfApi(endpoint=endpoint).model_info(
            repo, revision=revision, files_metadata=True, timeout=timeout_s
        )
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return _Listing(str(info.sha), {name: sizes[name] for name in needed(sizes)})


def needed(names: Iterable[str]) -> list[str]:
    """Of a repository's file names those that a model needs, small ones first, weights last."""
    top = sorted(name for name in names if "/" not in name)
    beside = [name for name in top if PurePosixPath(name).suffix in _PLAIN_SUFFIXES]
    beside = [name for name in beside if any(fnmatch(name, pattern) for pattern in _BESIDE_WEIGHTS)]
    weights = [name for name in top if fnmatch(name, "model*.safetensors")]
    # "consolidated" holds the same weights once more, in the layout of another program.
    others = [n for n in top if n.endswith(".safetensors") and not n.startswith(("consolidated", "adapter_"))]
    return beside + (weights or others)


def _require_weights(repo: str, listing: _Listing) -> None:
    weights = [name for name in listing.files if name.endswith(".safetensors")]
    if "config.json" not in listing.files or not weights:
        raise UnsupportedModel(
            f"{repo} is on the hub, but without a config.json and .safetensors weights to run",
            "name a repository in safetensors format, or download one .gguf file and pass its path",
        )


def _from_cache(repo: str, revision: str | None, cache_dir: Path | None) -> Path:
    folder = cached(repo, revision=revision, cache_dir=cache_dir)
    if folder is None:
        raise HubUnreachable(
            f"no complete copy of {repo} is in {_place(cache_dir)}, and offline mode forbids to fetch one",
            f"run once with a network: hf download {repo}",
        )
    return folder


def _is_complete(folder: Path) -> bool:
    try:
        files = headers.weight_files(folder)
    except BadCheckpoint:
        return False
    by_index = (folder / headers.INDEX).exists()
    return bool(files) and (by_index or not any(_SHARD.search(file.name) for file in files))


def _has(repo: str, name: str, listing: _Listing, cache_dir: Path | None) -> bool:
    return isinstance(try_to_load_from_cache(repo, name, cache_dir=cache_dir, revision=listing.commit), str)


def _place(cache_dir: Path | None) -> Path:
    return Path(hub_settings.HF_HUB_CACHE if cache_dir is None else cache_dir)


@contextlib.contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """huggingface_hub's bars on stderr, or none. Its switch is global, so it is put back."""
    if shown or hub_utils.are_progress_bars_disabled():
        yield
        return
    hub_utils.disable_progress_bars()
    try:
        yield
    finally:
        hub_utils.enable_progress_bars()


@contextlib.contextmanager
def _errors_as_ours(repo: str, revision: str | None) -> Iterator[None]:
    try:
        yield
    except DFlashError:
        raise
    except Exception as error:
        if (ours := translate(error, repo, revision)) is None:
            raise
        raise ours from error


def translate(error: Exception, repo: str, revision: str | None = None) -> DFlashError | None:
    """The project's error for one of huggingface_hub's or of its transport; None for what neither raises.

    huggingface_hub reports most failures of a download as a missing local file; the reason is then the cause.
    """
    if store.is_disk_full(error):
        return DiskFull(f"the disk filled up while downloading {repo}")
    if store.is_unwritable(error):
        return store.cannot_write(Path(getattr(error, "filename", None) or _place(None)))
    if isinstance(error, hub_errors.LocalEntryNotFoundError):
        cause = error.__cause__ or error.__context__
        ours = translate(cause, repo, revision) if isinstance(cause, Exception) else None
        return ours or _unreachable(repo, error)
    if isinstance(error, hub_errors.GatedRepoError):
        return GatedModel(
            f"{repo} exists on the hub, but its owner asks for accepted terms and a token",
            f"accept the terms on the page of {repo}, then run: hf auth login",
        )
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return ModelNotFound(
            f"{repo} has no revision {revision}", "name an existing branch, tag or commit, or leave it out"
        )
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        return ModelNotFound(
            f"the hub shows no model {repo}: it does not exist, or it is private "
            "(both give the same answer, 401, to a caller without a token)",
            "check the spelling owner/name; for a private model run: hf auth login",
        )
    if isinstance(error, hub_errors.EntryNotFoundError):
        return ModelNotFound(f"{repo} has no such file: {error}")
    if isinstance(error, hub_errors.HFValidationError):
        return ModelNotFound(f"{repo!r} cannot be a hub name: {error}")
    if isinstance(error, hub_errors.HfHubHTTPError):
        return _refused(repo, error)
    return _from_transport(repo, error)


def _refused(repo: str, error: hub_errors.HfHubHTTPError) -> DFlashError:
    status = error.response.status_code
    said = error.server_message or f"HTTP {status}"
    if status in (401, 403):
        return GatedModel(f"the hub refuses access to {repo} ({status}): {said}", "run: hf auth login")
    hint = "wait a minute: the hub limits the rate of requests; hf auth login raises the limit"
    return HubFailed(
        f"the hub answered {status} for {repo}: {said}", hint if status == 429 else None, status=status
    )


def _from_transport(repo: str, error: Exception) -> DFlashError | None:
    package = type(error).__module__.partition(".")[0]
    if package in _TRANSPORTS or isinstance(error, (ConnectionError, TimeoutError)):
        return _unreachable(repo, error)
    if isinstance(error, (OSError, RuntimeError, hub_errors.FileMetadataError)):
        return HubFailed(f"downloading {repo} failed: {error}")
    return None


def _unreachable(repo: str, error: Exception) -> HubUnreachable:
    why = "offline mode is on" if isinstance(error, hub_errors.OfflineModeIsEnabled) else type(error).__name__
    return HubUnreachable(f"{repo} cannot be fetched: the hub cannot be reached ({why})")
