"""Models by name, such as meta-llama/Llama-3.1-8B-Instruct: from the Hub's cache on this machine, else downloaded into it.

Only configs, tokenizers and weights are fetched, never code. The cache, endpoint, tokens and offline mode are set as for
Hugging Face's own tools: HF_HOME, HF_ENDPOINT, `hf auth login`, HF_HUB_OFFLINE.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxspec.checkpoints.json_files import INDEXES, MAX_JSON_BYTES, TEMPLATES, weight_map

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}")
FILE_IN_REPOSITORY = re.compile(rf"({REPOSITORY.pattern})/([\w][\w.+-]{{0,200}}\.(?:pt|json|npy|safetensors|gguf))")
SMALL_FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template|"
    r"params|model\.safetensors\.index|pytorch_model\.bin\.index)\.json|chat_template\.jinja|merges\.txt|tokenizer\.model|"
    rf"{TEMPLATES}/[\w][\w.-]{{0,200}}\.jinja"
)
"""What is downloaded first. Weights follow, so that a folder with weights is whole."""
SAFETENSORS = re.compile(r"(?!consolidated)[\w][\w.-]{0,200}\.safetensors")
BIN = re.compile(r"pytorch_model[\w.-]{0,200}\.bin")
ASK_SECONDS = 10.0
"""For the Hub to say what it has."""
MAX_REASON = 300

logger = logging.getLogger(__name__)


class HubOptions(NamedTuple):
    """How models are found by name. The fields have the names of LLM's arguments."""

    revision: str | None = None
    """Branch, tag or commit of the target. None: the newest."""
    download_dir: str | None = None
    """Where downloads go. None: the Hub's cache (HF_HOME)."""
    speculative_draft_model_revision: str | None = None
    """Of the draft head or model."""

    @property
    def of_draft(self) -> "HubOptions":
        """The same options for the draft head or model."""
        return self._replace(revision=self.speculative_draft_model_revision)

    @property
    def newest(self) -> "HubOptions":
        """The same options for anything else, such as a token map, at the newest revision."""
        return self._replace(revision=None)


DEFAULTS = HubOptions()


def local_path(name: str | Path, options: HubOptions = DEFAULTS, *, weights: bool = True) -> Path:
    """Where a model, head or token map is on this machine: itself if it is a path that exists, else what the Hub has by that name.

    In:  "org/name"               or  "org/name/file.pt"
    Out: the snapshot's directory     the file

    Text that is neither a path nor a name on the Hub is returned as a path; opening it says what is wrong. Without `weights` the
    configs are enough.

    Raises ValueError, in one line with what to do, if the Hub has no such model, does not let us have it, or can't be reached, the
    disk is too small, or a path has a revision.
    """
    path, text = Path(name), str(name)
    if path.exists():
        if options.revision is not None:
            what = f"the revision {options.revision!r:.100}, which names on the Hub have"
            raise ValueError(f"{path} is on this machine: leave out {what}")
        return path
    if REPOSITORY.fullmatch(text):
        return _cached(text, options, weights) or _download(text, options, weights)
    if match := FILE_IN_REPOSITORY.fullmatch(text):
        return _file(match[1], match[2], options)
    return path


def is_hub_name(name: str | Path) -> bool:
    """Whether this is a name on the Hub and not a path that exists."""
    return not Path(name).exists() and bool(REPOSITORY.fullmatch(str(name)) or FILE_IN_REPOSITORY.fullmatch(str(name)))


def _cached(repository: str, options: HubOptions, weights: bool) -> Path | None:
    """The cached snapshot, if it is whole."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repository, "config.json", cache_dir=options.download_dir, revision=options.revision)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if not weights or is_whole(folder) else None


def is_whole(folder: Path) -> bool:
    """Whether all weights are there. They are downloaded last."""
    there = {file.name for file in folder.iterdir() if file.is_file()}
    for name in INDEXES:
        if name in there:
            return there.issuperset(weight_map(folder / name).values())
    return any(SAFETENSORS.fullmatch(name) or BIN.fullmatch(name) for name in there)


def _download(repository: str, options: HubOptions, with_weights: bool) -> Path:
    """A snapshot of the files that we need."""
    from huggingface_hub import HfApi, snapshot_download

    with _explained(repository, options):
        info = HfApi(endpoint=_endpoint()).model_info(
            repository, revision=options.revision, timeout=ASK_SECONDS, files_metadata=True
        )
        siblings = info.siblings or []
        small = [file.rfilename for file in siblings if SMALL_FILES.fullmatch(file.rfilename)]
        large = [file.rfilename for file in siblings if file.rfilename in small and (file.size or 0) > MAX_JSON_BYTES]
        if large:
            raise ValueError(f"{repository}: {large[0]} is larger than {MAX_JSON_BYTES >> 20} MiB, more than any that can be used")
        if "config.json" not in small:
            gguf = [file.rfilename for file in siblings if file.rfilename.endswith(".gguf")]
            hint = f": choose one of its GGUF files, as in {repository}/{gguf[0]}" if gguf else ""
            raise ValueError(f"{repository} on the Hub has no config.json{hint}")
        where: dict[str, Any] = {"revision": options.revision, "cache_dir": options.download_dir, "endpoint": _endpoint()}
        folder = Path(snapshot_download(repository, allow_patterns=small, **where))
        if not with_weights:
            return folder
        weights = _weights(siblings, folder)
        if not weights:
            raise ValueError(f"{repository} on the Hub has no weights as safetensors or pytorch_model.bin")
        there = {name for name in weights if (folder / name).is_file()}
        size = sum(file.size or 0 for file in siblings if file.rfilename in weights and file.rfilename not in there)
        size -= sum(file.stat().st_size for file in (folder.parents[1] / "blobs").glob("*.incomplete"))
        free = shutil.disk_usage(folder).free
        if size > free:
            raise ValueError(
                f"{repository} has {size / 2**30:.1f} GiB of weights to download, and {free / 2**30:.1f} GiB are free: "
                "free some space, or give a larger disk with --download-dir or HF_HOME"
            )
        logger.info("downloading %s: %.1f GiB", repository, size / 2**30)
        return Path(snapshot_download(repository, allow_patterns=weights, **where))


def _weights(siblings: "list[RepoSibling]", folder: Path) -> list[str]:
    """The files with weights: those that an index names, else safetensors, else .bin."""
    names = [file.rfilename for file in siblings]
    for index in INDEXES:
        if (folder / index).is_file():
            listed = set(weight_map(folder / index).values())
            return [name for name in names if name in listed and (SAFETENSORS.fullmatch(name) or BIN.fullmatch(name))]
    return [name for name in names if SAFETENSORS.fullmatch(name)] or [name for name in names if BIN.fullmatch(name)]


def _file(repository: str, name: str, options: HubOptions) -> Path:
    """One file of a repository."""
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    found = try_to_load_from_cache(repository, name, cache_dir=options.download_dir, revision=options.revision)
    if isinstance(found, str):
        return Path(found)
    with _explained(repository, options, name):
        # hf_hub_download alone would try a Hub that it can't reach for 17 seconds
        HfApi(endpoint=_endpoint()).model_info(repository, revision=options.revision, timeout=ASK_SECONDS)
        return Path(
            hf_hub_download(repository, name, revision=options.revision, cache_dir=options.download_dir, endpoint=_endpoint())
        )


def _endpoint() -> str | None:
    """None: the Hub's own."""
    return os.environ.get("HF_ENDPOINT")


@contextmanager
def _explained(repository: str, options: HubOptions, file: str | None = None) -> Iterator[None]:
    """Turns what the Hub's library raises into a ValueError of one line that says what to do."""
    from huggingface_hub import errors

    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # the library lets its HTTP client's errors through, whichever client that is
        cause: BaseException | None = error
        seen = []
        while cause is not None:
            seen.append(cause)
            cause = cause.__cause__
        page = f"{_endpoint() or 'https://huggingface.co'}/{repository}"

        def raised(*kinds: type[BaseException]) -> bool:
            return any(isinstance(each, kinds) for each in seen)

        responses = [each.response for each in seen if isinstance(each, errors.HfHubHTTPError)]
        status = next((response.status_code for response in responses if response is not None), None)
        if raised(errors.OfflineModeIsEnabled):
            message = "is not in the cache, and HF_HUB_OFFLINE is set: download it once with HF_HUB_OFFLINE=0"
        elif raised(errors.GatedRepoError):
            message = f"is gated: accept its conditions at {page}, then log in with `hf auth login` or set HF_TOKEN"
        elif raised(errors.RevisionNotFoundError):
            message = f"has no revision {options.revision!r:.100}: see {page}"
        elif raised(errors.RepositoryNotFoundError) or status in (401, 403):
            message = f"is not on the Hub, or is private: check the name at {page}; for private ones `hf auth login` or HF_TOKEN"
        elif raised(errors.EntryNotFoundError) and not raised(errors.LocalEntryNotFoundError):
            message = f"has no file {file}: see {page}"
        elif any(isinstance(each, OSError) and each.errno == 28 for each in seen):
            message = "does not fit on the disk: free some space, or give another one with --download-dir or HF_HOME"
        else:
            reason = " ".join(str(seen[-1]).split())[:MAX_REASON] or type(seen[-1]).__name__
            message = f"is no path here, and {page} can't be reached ({reason}): check the network, or give a local directory"
        raise ValueError(f"{repository} {message}") from None
