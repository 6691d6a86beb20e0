"""Publish a patched checkpoint: check the folder, then send model, tokenizer, card, plot and results in one commit.

`HfApi.upload_folder` may commit a folder in several steps (huggingface_hub 2.4), which a failure could leave half done.
`create_commit` uploads first and commits once, and a second run sends only what the Hub does not have yet.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from ..integration import names as names_module
from ..integration.names import CODE
from ..integration.reading import named_model_class
from ..results import RESULTS, results_fingerprint
from ..results.fingerprint import CONFIG, INDEX
from .cards import FINGERPRINT, RESULTS_FINGERPRINT, make_card, unclean_results
from .folder import CARD, PLOT, CheckpointFolder

# what save_pretrained of models, tokenizers and processors writes, `hf-rfattn card`, and licences
FILES = {
    CONFIG, INDEX, "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model",
    "tokenizer.model", "chat_template.jinja", CARD, PLOT, CODE,
    *(name + suffix for name in ("LICENSE", "NOTICE") for suffix in ("", ".md", ".txt")),
}  # fmt: skip
FOLDERS = {RESULTS: ".json", "additional_chat_templates": ".jinja"}  # and their files that end so
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
WEIGHTS = re.compile(  # as from_pretrained looks for them
    r"(model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin)(\.index\.json)?"
)
PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
SIGNED = r"hf_(?:oauth|jwt)_[\w.~+/=-]{8,}"  # tokens of OAuth and of jobs
SECRET = re.compile(rf"{SIGNED}|hf_[A-Za-z0-9]{{8,}}|(?<=Bearer )\S+")  # removed from messages
TOKEN = re.compile(rf"\b(?:{SIGNED}|hf_[A-Za-z0-9]{{30,}}\b)")  # looked for in files
XET_STATUS = re.compile(r"HTTP status (?:client|server) error \((\d{3})")  # hf_xet says it in its message alone
NETWORK = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"}  # packages the client has been built on
NO_TOKEN = (
    "There is no token for the Hub. Make one with write permission at https://huggingface.co/settings/tokens, then run "
    "`hf auth login` or set HF_TOKEN."
)
STATUS = {
    401: "The Hub does not accept the token; it may be mistyped, expired or revoked. Run `hf auth login`.",
    403: "The token has no permission to write to {repo}. Use one with write permission, and a name under your own "
    "account or an organisation you may write to (this one is under {owner!r}).",
    404: "The Hub does not find {repo} or the revision. Check the name and what the token may see.",
    409: "The name {repo} is taken, and this token cannot see what is there. Choose another name.",
    412: "Somebody else changed {repo} in the meantime. Look at the change, then run again.",
    429: "The Hub asks to slow down. Wait a few minutes and run again.",
}
AGAIN = "If no commit was made, readers see no change. Run again to go on: what is already uploaded is not sent twice."


class PublishError(OSError):
    """Publishing failed on the way to the Hub."""


@dataclass(frozen=True)
class Plan:
    """What would be sent: sizes by name in the repository. `left_out`: files that do not belong to a model."""

    repo_id: str
    address: str
    files: dict[str, int]
    left_out: list[str]

    @property
    def size(self) -> int:
        return sum(self.files.values())


def publish(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
    token: str | None = None,
    include: Sequence[str] = (),
    tell: Callable[[str], Any] = lambda message: None,
) -> str:
    """Check a checkpoint's folder, send it to the Hub in one commit, and return its address there.

    The folder must hold a patched checkpoint in safetensors that loads again, and a card that `hf-rfattn card` made for
    just these weights; otherwise ValueError, before anything is contacted. `private`: if the repository is new.
    `revision`: a branch, created if it is missing. `dry_run`: only check. `token`: by default the one of
    `hf auth login` or HF_TOKEN. `include`: files to send beside those that belong to a model; others stay here, and
    links are refused. `tell`: is called with progress messages.

    Errors on the way raise `PublishError`.
    """
    plan = make_plan(folder, repo_id, revision, include)
    path = Path(folder)
    check_card(path, repo_id)
    check_reload(path)
    token = (token or "" if dry_run else token or get_token() or "").strip()
    check_secrets(path, plan, token)
    if dry_run:
        return plan.address
    if not token:
        raise PublishError(NO_TOKEN)
    if not re.fullmatch(r"[!-~]+", token):
        raise PublishError("The token has characters that no token has; copy it again.")
    try:
        _send(path, plan, private, revision or "main", token, tell)
    except Exception as error:
        raise PublishError(scrub(f"{explain(error, repo_id)} {AGAIN}", token)) from None
    return plan.address


def make_plan(folder: str | Path, repo_id: str, revision: str | None = None, include: Sequence[str] = ()) -> Plan:
    """Which files would be sent where. Contacts nothing."""
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"{repo_id!r} does not say whose it is; write me/{repo_id}.")
    checkpoint = CheckpointFolder(Path(folder))
    path = checkpoint.path
    found = {p.relative_to(path).as_posix(): p for p in sorted(path.rglob("*"))}
    found = {name: p for name, p in found.items() if not any(part.startswith(".") for part in name.split("/"))}
    if links := [name for name, p in found.items() if p.is_symlink()]:
        raise ValueError(
            f"{', '.join(links)}: links are not followed, since they may lead to other files of yours. Replace them by "
            "copies (cp -L), or remove them."
        )
    names = [name for name, p in found.items() if p.is_file()]
    pickles = [name for name in names if name.endswith(PICKLES) and (name.count("/") == 0 or name in include)]
    if pickles:
        raise ValueError(
            f"{', '.join(pickles)}: loading such a file can run code, so none is published. Weights are in "
            "safetensors; move the rest elsewhere."
        )
    for name in include:
        if name not in names:
            raise ValueError(f"{name!r} cannot be included: {path} has no such file. It has {', '.join(names)}.")
    own = Path(names_module.__file__).with_name(CODE)
    if CODE in names and (path / CODE).read_bytes() != own.read_bytes():
        raise ValueError(f"{path / CODE} is not the file that save_pretrained writes. Save the model again.")
    known = FILES | {weights.name for weights in checkpoint.weights} | set(include)
    sent = [name for name in names if name in known or _in_known_folder(name)]
    address = f"{HfApi().endpoint}/{repo_id}" + (f"/tree/{revision}" if revision not in (None, "main") else "")
    return Plan(repo_id, address, {name: (path / name).stat().st_size for name in sent}, sorted(set(names) - set(sent)))


def _in_known_folder(name: str) -> bool:
    folder, _, file = name.partition("/")
    return folder in FOLDERS and "/" not in file and file.endswith(FOLDERS[folder])


def check_card(folder: Path, repo_id: str) -> None:
    """The card must be of these weights, this config and these results, and name the repository."""
    again = f"Run `hf-rfattn card {folder} --repo {repo_id}`."
    if not (folder / CARD).is_file():
        raise ValueError(f"{folder} has no card ({CARD}). {again}")
    try:
        card = ModelCard.load(folder / CARD)
    except Exception as error:  # YAML errors have no common base that huggingface_hub exports
        problem = " ".join(str(error).split())
        raise ValueError(f"The metadata of {folder / CARD} cannot be read: {problem} {again}") from error
    if card.data.get(FINGERPRINT) != CheckpointFolder(folder).fingerprint:
        raise ValueError(f"The card in {folder} was not made for these weights and this config. {again}")
    if card.data.get(RESULTS_FINGERPRINT) != results_fingerprint(folder):
        raise ValueError(f"The result files in {folder / RESULTS} are not those the card was made from. {again}")
    if unclean := unclean_results(folder):
        raise ValueError(f"{unclean[0][0]} says where files lie on the machine it comes from. {again}")
    if (card.data.get("eval_results") or []) != make_card(folder).evaluations:
        raise ValueError(f"The card in {folder} claims results that its result files do not hold. {again}")
    if f'from_pretrained("{repo_id}")' not in card.text:
        raise ValueError(f"The card in {folder} does not tell readers to load {repo_id!r}. {again}")


def check_reload(folder: Path) -> None:
    """Load model and tokenizer as a user would, without running code from the folder."""
    import torch
    import transformers

    from ..mechanisms import Mechanism

    name = CheckpointFolder(folder).architecture
    model_class: Any = transformers.AutoModel if name is None else named_model_class(name)
    if model_class is None:
        raise ValueError(f"{folder}: transformers {transformers.__version__} has no model {name} of config.json.")
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        model, info = model_class.from_pretrained(folder, output_loading_info=True, **options)
        if (folder / "tokenizer_config.json").exists():
            transformers.AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # whatever it is, the folder is not fit to publish
        raise ValueError(f"{folder} does not load again: {' '.join(str(error).split())}") from error
    wrong = {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys and kind != "error_msgs"}
    if wrong:
        raise ValueError(f"{folder} does not load again as it was saved: {wrong}.")
    if not any(isinstance(module, Mechanism) for module in model.modules()):
        raise ValueError(f"{folder} loads as softmax: nothing in it is patched.")
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{folder}: {key} holds values that are not finite.")


def check_secrets(folder: Path, plan: Plan, token: str) -> None:
    """No file that is sent may hold a token or a private key."""
    for name in plan.files:
        if not name.endswith((".safetensors", ".png")):
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            if TOKEN.search(text) or (token and token in text):
                raise ValueError(f"{folder / name} holds a token of the Hub. Remove it, and revoke it if it was seen.")
            if PRIVATE_KEY.search(text):
                raise ValueError(f"{folder / name} holds a private key. Remove it.")


def _send(folder: Path, plan: Plan, private: bool, revision: str, token: str, tell: Callable[[str], Any]) -> None:
    """Create the repository and the branch where they are missing, upload, and commit once."""
    api = HfApi(token=token, library_name="hf_rfattn")
    try:
        known = api.model_info(plan.repo_id)
    except RepositoryNotFoundError as error:
        if error.response.status_code != 404:
            raise
        known = None
    if known is None:
        api.create_repo(plan.repo_id, private=private)
        tell(f"Created {plan.repo_id}{' (private)' if private else ''}.")
    elif private and known.private is False:
        raise ValueError(f"{plan.repo_id} exists and is public. Make it private on its page first.")
    if revision != "main":
        api.create_branch(plan.repo_id, branch=revision, exist_ok=True)
    info = api.model_info(plan.repo_id, revision=revision)
    there = [s.rfilename for s in info.siblings or []]
    stale = sorted(name for name in there if name not in plan.files and WEIGHTS.fullmatch(name))
    if stale:  # weights of an earlier model would be loaded in place of these, or beside them
        tell(f"Removing weights of an earlier version: {', '.join(stale)}.")
    operations: list[Any] = [
        *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in plan.files),
        *(CommitOperationDelete(path_in_repo=name) for name in stale),
    ]
    message = "Publish a checkpoint patched by hf_rfattn"
    api.create_commit(plan.repo_id, operations, commit_message=message, revision=revision, parent_commit=info.sha)


def scrub(text: str, token: str | None = None) -> str:
    """The text without the token and without anything that looks like one.

    >>> scrub("Bearer hf_abcdefghij is refused")
    'Bearer *** is refused'
    """
    return SECRET.sub("***", text.replace(token, "***") if token else text)


def explain(error: BaseException, repo_id: str) -> str:
    """What happened on the way to the Hub, and what to do about it."""
    if type(error) is ValueError:
        return str(error)
    chain = list(_chain(error))
    if any(isinstance(e, OfflineModeIsEnabled) for e in chain):
        return "HF_HUB_OFFLINE is set, so nothing may be sent. Unset it and run again."
    for e in chain:
        answered = isinstance(e, HfHubHTTPError) and getattr(e, "response", None) is not None
        xet = XET_STATUS.search(str(e))
        if answered or xet:
            status = e.response.status_code if answered else int(xet[1])  # type: ignore[attr-defined,index]
            said = " ".join((e.server_message or "").split())[:300] if answered else ""  # type: ignore[attr-defined]
            failed = "The Hub has a fault of its own. Run again later." if status >= 500 else "The Hub refused."
            text = STATUS.get(status, failed).format(repo=repo_id, owner=repo_id.partition("/")[0])
            return f"{text} (HTTP {status}{f': {said}' if said else ''})"
    packages = {cls.__module__.partition(".")[0] for e in chain for cls in type(e).__mro__}
    if packages & NETWORK or any(isinstance(e, (ConnectionError, TimeoutError)) for e in chain):
        return f"The Hub cannot be reached ({type(chain[-1]).__name__}). Check the network and run again."
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
