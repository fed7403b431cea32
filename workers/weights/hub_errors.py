"""What is wrong when the hub does not give a model, in words, with the remedy.

The hub's client raises many unrelated types, often one as the cause of another. Its messages are
not repeated: they may contain signed addresses.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.hub_name import HubName

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN, on each machine that loads it"
_ELSEWHERE = "or download the model elsewhere and give its folder"
_TRANSPORT = {"TransportError", "ConnectionError", "TimeoutError"}  # by name: of httpx or its heirs


class HubUnreachable(LoadError):
    """The hub does not answer, or must not be asked; what is on this machine does not suffice."""


@contextmanager
def explained(name: HubName, folder: str) -> Iterator[None]:
    """Turn what the hub's client raises into LoadError. `folder`: where it stores files."""
    try:
        yield
    except (LoadError, ConfigError):
        raise
    except Exception as error:  # a dozen unrelated types
        raise explanation(error, name, folder) from error


def explanation(error: BaseException, name: HubName, folder: str) -> LoadError:
    """The error for the user. The first known type in the chain of causes decides."""
    chain = list(_chain(error))
    for each in chain:
        if (found := _of_hub(each, name)) is not None or (
            found := _of_disk(each, name, folder)
        ) is not None:
            return found
    for each in chain:
        if (found := _of_network(each, name)) is not None:
            return found
    return LoadError(
        f"model {name} could not be fetched from the hub ({type(error).__name__}): check the "
        f"spelling and the network, {_LOG_IN} if access to it is restricted, {_ELSEWHERE}"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _of_hub(error: BaseException, name: HubName) -> LoadError | None:
    """What the hub answered."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return LoadError(
            f"model {name}: access to it is restricted; accept its conditions at "
            f"{constants.ENDPOINT}/{name.repo}, then {_LOG_IN}"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return LoadError(
            f"the hub has no model {name.repo}, or it is private: check the spelling; if it is "
            f"private, {_LOG_IN}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return LoadError(
            f"revision: the hub has no revision {name.revision or 'main'!r} of {name.repo}; give a "
            "branch, tag or commit"
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return LoadError(f"model {name}: the hub has no such file in {name.repo}")
    if isinstance(error, errors.HFValidationError):
        return LoadError(f"model {name} is no id of the hub; write org/name")
    if not isinstance(error, errors.HfHubHTTPError):
        return None
    status = error.response.status_code
    if status in (401, 403):
        return LoadError(
            f"model {name}: the hub refuses the token (status {status}): {_LOG_IN}, with a token "
            "that may read this repository"
        )
    if status == 429:
        return HubUnreachable(
            f"model {name}: the hub limits requests without a token (status 429); {_LOG_IN}, or "
            "try again in a few minutes"
        )
    return HubUnreachable(
        f"model {name}: the hub answers with status {status}; try again later, {_ELSEWHERE}"
    )


def _of_disk(error: BaseException, name: HubName, folder: str) -> LoadError | None:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return LoadError(
            f"model {name}: the disk of {folder} became full during the download; free some space "
            "and start again, which continues with the files that are complete, or name another "
            "folder with --download-dir (download_dir)"
        )
    if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return LoadError(
            f"model {name}: {folder} cannot be written; name another folder with --download-dir "
            "(download_dir), or set HF_HOME"
        )
    return None


def _of_network(error: BaseException, name: HubName) -> HubUnreachable | None:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return HubUnreachable(
            f"model {name}: HF_HUB_OFFLINE is set, and its files are not all on this machine; "
            f"unset it for one start, {_ELSEWHERE}"
        )
    names = {each.__name__ for each in type(error).__mro__}
    if names & _TRANSPORT:
        return HubUnreachable(
            f"model {name}: the hub at {constants.ENDPOINT} cannot be reached "
            f"({type(error).__name__}), and the files are not all on this machine: check the "
            f"network, and HTTPS_PROXY if there is a proxy, {_ELSEWHERE}"
        )
    return None
