"""Models of Hugging Face repositories, through the huggingface_hub package: which file of a repository, and where it is in the cache."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vkback.errors import VkbackError
from vkback.gguf.file import SPLIT_NAME, split_name

PREFERRED = "Q4_K_M"
"""The type that is taken where none is named."""

NO_MODELS = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""GGUF files of a repository that are no language models."""

NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<type>[\w.-]+))?")


class HubError(VkbackError):
    """A repository that cannot be reached, or has no such file."""


class HubUsage(HubError):  # noqa: N818  what it says is enough
    """A name that is none, or a package that is missing."""

    exit_code = 2


def fetched(named: str) -> Path:
    """The file of USER/REPO[:TYPE] in the cache, the first of a split model; it is fetched where it is missing, with its other parts.
    Raises HubError, naming what there is."""
    match = NAME.fullmatch(named)
    if match is None:
        raise HubUsage(f"[hub] {named}: expected USER/REPO or USER/REPO:TYPE, as ggml-org/gemma-3-1b-it-GGUF:Q8_0")
    try:
        import huggingface_hub
    except ImportError as e:
        raise HubUsage(f"[hub] {named}: models of Hugging Face need huggingface_hub: pip install 'vkback[hub]'") from e
    repo, type = match["repo"], match["type"] or ""
    files, revision = _listed(huggingface_hub, repo)
    chosen = parts_of(chosen_file(repo, files, type), files, repo)
    paths = [_file(huggingface_hub, repo, file, revision) for file in chosen]
    return paths[0]


def chosen_file(repo: str, files: Sequence[str], type: str = "") -> str:
    """The file of a type, in any case; without one that of PREFERRED, else the first. Raises HubError naming the files there are."""
    models = sorted(file for file in files if file.lower().endswith(".gguf") and not NO_MODELS.search(file))
    if not models:
        raise HubError(f"[hub] {repo}: has no GGUF file; its makers' own folder can be converted: vkback convert")
    for wanted in (type,) if type else (PREFERRED,):
        pattern = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}(?:[-./]|$)", re.IGNORECASE)
        found = [file for file in models if pattern.search(file)]
        if found:
            return found[0]
    if type:
        raise HubError(f"[hub] {repo}: no GGUF file of type {type}; there are {', '.join(models)}")
    return models[0]


def parts_of(file: str, files: Sequence[str], repo: str) -> list[str]:
    """All files of the model that one file belongs to, the first first. Raises HubError naming one that the repository lacks."""
    folder, slash, name = file.rpartition("/")
    split = SPLIT_NAME.fullmatch(name)
    if split is None:
        return [file]
    count = int(split["count"])
    parts = [f"{folder}{slash}{split_name(split['stem'], number, count)}" for number in range(1, count + 1)]
    lacking = next((part for part in parts if part not in files), None)
    if lacking:
        raise HubError(f"[hub] {repo}: lacks {lacking}, one of {count} files of a split model")
    return parts


def _listed(hub: Any, repo: str) -> tuple[list[str], str]:
    """Files of a repository and its commit; those of the cache where there is no network."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        info = hub.HfApi().model_info(repo)
    except GatedRepoError as e:
        raise HubError(f"[hub] {repo}: its makers ask for consent; give it on its page, and set HF_TOKEN") from e
    except RepositoryNotFoundError as e:
        raise HubError(f"[hub] {repo}: no such repository, or a private one; for that set HF_TOKEN") from e
    except HFValidationError as e:
        raise HubUsage(f"[hub] {repo}: no name of a repository; expected USER/REPO") from e
    except HfHubHTTPError as e:
        status = getattr(getattr(e, "response", None), "status_code", "")
        return _kept(hub, repo, f"the server answers {status}")
    except Exception as e:  # of whatever client the package has: no network, no server, HF_HUB_OFFLINE
        return _kept(hub, repo, f"cannot be reached ({type(e).__name__})")
    return [each.rfilename for each in info.siblings or []], str(info.sha)


def _kept(hub: Any, repo: str, why: str) -> tuple[list[str], str]:
    """Files of the newest commit in the cache. Raises HubError saying why nothing newer is known, where there is none."""
    root = Path(hub.constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    ref = root / "refs" / "main"
    revision = ref.read_text(encoding="utf-8").strip() if ref.is_file() else ""
    folder = root / "snapshots" / revision
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()] if revision else []
    if not files:
        raise HubError(f"[hub] {repo}: {hub.constants.ENDPOINT} {why}, and the cache has nothing of it; look at the network")
    return files, revision


def _file(hub: Any, repo: str, file: str, revision: str) -> Path:
    kept = hub.try_to_load_from_cache(repo, file, revision=revision)
    if isinstance(kept, str):
        return Path(kept)
    if not _links(Path(hub.constants.HF_HUB_CACHE)):
        hub.constants.HF_HUB_DISABLE_SYMLINKS = True  # its cache holds the file itself, then
    try:
        path = Path(hub.hf_hub_download(repo, file))
    except OSError as e:
        raise HubError(f"[hub] {repo}: {file} cannot be fetched: {e.strerror or ' '.join(str(e).split())[:200]}") from e
    except Exception as e:  # of whatever client the package has
        raise HubError(f"[hub] {repo}: {file} cannot be fetched: {' '.join(str(e).split())[:200]}. Begin again: what came is kept") from e
    if not path.is_file():
        raise HubError(
            f"[hub] {repo}: {file} was fetched, but {path} is no file: set HF_HUB_DISABLE_SYMLINKS=1, with the newest huggingface_hub"
        )
    return path


def _links(folder: Path) -> bool:
    """Whether a symbolic link in a folder leads to its file. Windows forbids them without its developer mode; Wine says that it made
    one, and made none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".vkback-", dir=folder) as name:
            link = Path(name, "link")
            Path(name, "file").touch()
            link.symlink_to("file")
            return link.is_file()
    except OSError:
        return False
