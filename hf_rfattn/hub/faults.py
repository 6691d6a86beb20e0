"""What can go wrong on the way to the Hub, each as one message that says what to do, never with a token in it."""

import re
from collections.abc import Iterator

from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

SIGNED = r"hf_(?:oauth|jwt)_[\w.~+/=-]{8,}"  # tokens of OAuth and of jobs
SECRET = re.compile(rf"{SIGNED}|hf_[A-Za-z0-9]{{8,}}|(?<=Bearer )\S+")  # removed from messages
TOKEN = re.compile(rf"\b(?:{SIGNED}|hf_[A-Za-z0-9]{{30,}}\b)")  # looked for in files
NO_TOKEN = (
    "There is no token for the Hub. Make one with write permission at https://huggingface.co/settings/tokens, then run "
    "`hf auth login` or set HF_TOKEN."
)
XET_STATUS = re.compile(r"HTTP status (?:client|server) error \((\d{3})")  # hf_xet says it in its message alone
NETWORK = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")  # packages the client has stood on


class PublishError(OSError):
    """Publishing failed on the way to the Hub; the message says in what state the Hub was left."""


def scrub(text: str, token: str | None = None) -> str:
    """The text without the token and without anything that looks like one.

    >>> scrub("Bearer hf_abcdefghij is refused")
    'Bearer *** is refused'
    """
    if token:
        text = text.replace(token, "***")
    return SECRET.sub("***", text)


def explain(error: BaseException, repo_id: str, token: str | None) -> str:
    """One or two sentences: what happened, and what to do about it."""
    chain = list(_chain(error))
    owner = repo_id.partition("/")[0]
    if any(isinstance(e, OfflineModeIsEnabled) for e in chain):
        return "HF_HUB_OFFLINE is set, so nothing may be sent. Unset it and run again."
    if any(isinstance(e, LocalTokenNotFoundError) for e in chain):
        return NO_TOKEN
    answers = [e for e in chain if isinstance(e, HfHubHTTPError) and getattr(e, "response", None) is not None]
    if answers:
        status, said = answers[0].response.status_code, scrub(_said(answers[0]), token)
        return _of_status(status, said, repo_id, owner)
    for e in chain:
        if found := XET_STATUS.search(str(e)):
            return _of_status(int(found[1]), "", repo_id, owner)
    if any(_is_network(e) for e in chain):
        return f"The Hub cannot be reached ({type(chain[-1]).__name__}). Check the network and run again."
    return f"{type(error).__name__}: {scrub(' '.join(str(error).split()), token)}"


def _of_status(status: int, said: str, repo_id: str, owner: str) -> str:
    if status == 401:
        return (
            f"The Hub does not accept the token{said}. It may be mistyped, expired or revoked: make another at "
            "https://huggingface.co/settings/tokens and run `hf auth login`."
        )
    if status == 403:
        return (
            f"The token has no permission to write to {repo_id}{said}. Use a token with write permission, and a name "
            f"under your own account or an organisation you may write to (this one is under {owner!r})."
        )
    if status == 404:
        return f"The Hub does not find {repo_id} or the revision{said}. Check the name and what the token may see."
    if status == 409:
        return f"The name {repo_id} is taken, and this token cannot see what is there{said}. Choose another name."
    if status == 412:
        return f"Somebody else changed {repo_id} in the meantime{said}. Look at the change, then run again."
    if status == 429:
        return f"The Hub asks to slow down{said}. Wait a few minutes and run again."
    if status >= 500:
        return f"The Hub has a fault of its own (HTTP {status}){said}. Run again later."
    return f"The Hub refused (HTTP {status}){said}."


def _said(error: HfHubHTTPError) -> str:
    """The server's own words, in brackets."""
    message = " ".join((error.server_message or "").split())
    return f" (it says: {message[:300].rstrip('.')})" if message else ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_network(error: BaseException) -> bool:
    packages = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
    return isinstance(error, (ConnectionError, TimeoutError)) or bool(packages.intersection(NETWORK))
