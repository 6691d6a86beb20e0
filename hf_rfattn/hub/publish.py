"""Publishes a patched checkpoint: checks the folder, then uploads model, tokenizer, card and results in one commit.

`HfApi.upload_folder` may split a folder into several commits (huggingface_hub 2.4), so a failure could leave it half
published. `create_commit` uploads first and commits once, and a second run skips files that are already uploaded.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, get_token
from huggingface_hub.utils import validate_repo_id

from ..integration.names import CODE
from ..integration.reading import named_model_class
from ..results.documents import CONFIG, INDEX, RESULTS, weight_files
from .cards import CARD, FINGERPRINT, RESULTS_FINGERPRINT, CheckpointFolder, make_card

# Files written by save_pretrained of models, tokenizers and processors, by `hf-rfattn card`, and licenses.
FILES = {
    CONFIG, INDEX, "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model",
    "tokenizer.model", "chat_template.jinja", CARD, CODE,
    *(name + suffix for name in ("LICENSE", "NOTICE") for suffix in ("", ".md", ".txt")),
}  # fmt: skip
FOLDERS = re.compile(rf"{RESULTS}/[^/]+\.json|additional_chat_templates/[^/]+\.jinja")
WEIGHTS = re.compile(  # names that from_pretrained looks for
    r"(model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin)(\.index\.json)?"
)
SECRET = re.compile(r"\bhf_(?:(?:oauth|jwt)_[\w.~+/=-]{8,}|[A-Za-z0-9]{30,}\b)|-----BEGIN [A-Z ]*PRIVATE KEY-----")
NO_TOKEN = (
    "There is no token for the Hub. Create one with write permission at https://huggingface.co/settings/tokens, then "
    "run `hf auth login` or set HF_TOKEN."
)
ADVICE = {  # by HTTP status
    401: "The token may be mistyped, expired or revoked: run `hf auth login`.",
    403: "Use a token with write permission, and a repository of your own or of an organization you may write to.",
}
AGAIN = (
    "The repository is unchanged unless the commit was made. Run again to continue: uploaded files are not sent twice."
)


class PublishError(OSError):
    """Publishing failed while communicating with the Hub."""


@dataclass(frozen=True)
class Plan:
    """Files to upload, with their sizes. `left_out`: files in the folder that do not belong to a model."""

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
    """Check the folder of a patched checkpoint, upload it to the Hub in one commit, and return its URL.

    The folder must contain a patched checkpoint in safetensors that can be loaded, and a card that `hf-rfattn card`
    generated for these weights. Otherwise, ValueError is raised before the Hub is contacted.
    `private`: make a new repository private. `revision`: branch, created if it does not exist. `dry_run`: only check.
    `token`: by default that of `hf auth login` or HF_TOKEN. `include`: further files to upload; other files that do not
    belong to a model are left out, and symbolic links raise ValueError. `tell`: called with progress messages.

    Raises `PublishError` if the upload fails.
    """
    plan = make_plan(folder, repo_id, revision, include)
    path = Path(folder)
    check_card(path, repo_id)
    check_reload(path)
    check_secrets(path, plan)
    if dry_run:
        return plan.address
    token = (token or get_token() or "").strip()
    if not token:
        raise PublishError(NO_TOKEN)
    try:
        _send(path, plan, private, revision or "main", token, tell)
    except Exception as error:
        raise PublishError(f"{explain(error)} {AGAIN}".replace(token, "***")) from None
    return plan.address


def make_plan(folder: str | Path, repo_id: str, revision: str | None = None, include: Sequence[str] = ()) -> Plan:
    """Return which files would be uploaded where, without contacting the Hub."""
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"{repo_id!r} has no owner; write OWNER/{repo_id}.")
    path = CheckpointFolder(Path(folder)).path
    found = {p.relative_to(path).as_posix(): p for p in sorted(path.rglob("*"))}
    found = {name: p for name, p in found.items() if not any(part.startswith(".") for part in name.split("/"))}
    if links := [name for name, p in found.items() if p.is_symlink()]:
        raise ValueError(
            f"{', '.join(links)}: symbolic links are not followed, since they may lead to other files of yours. "
            "Replace them with copies (cp -L) or remove them."
        )
    names = [name for name, p in found.items() if p.is_file()]
    if missing := [name for name in include if name not in names]:
        raise ValueError(f"{missing[0]!r} cannot be included: {path} has no such file. Its files: {', '.join(names)}.")
    known = FILES | {weights.name for weights in weight_files(path)} | set(include)
    sent = [name for name in names if name in known or FOLDERS.fullmatch(name)]
    address = f"{HfApi().endpoint}/{repo_id}" + (f"/tree/{revision}" if revision not in (None, "main") else "")
    return Plan(repo_id, address, {name: (path / name).stat().st_size for name in sent}, sorted(set(names) - set(sent)))


def check_card(folder: Path, repo_id: str) -> None:
    """Raise unless the card belongs to these weights, this config and these results, and names the repository."""
    again = f"Run `hf-rfattn card {folder} --repo {repo_id}`."
    if not (folder / CARD).is_file():
        raise ValueError(f"{folder} has no card ({CARD}). {again}")
    try:
        card = ModelCard.load(folder / CARD)
    except Exception as error:  # YAML errors have no common base that huggingface_hub exports
        raise ValueError(f"The metadata of {folder / CARD} cannot be read: {' '.join(str(error).split())}") from error
    now = make_card(folder)
    for name in (FINGERPRINT, RESULTS_FINGERPRINT, "eval_results"):
        if card.data.get(name) != now.data.get(name):
            raise ValueError(f"The card in {folder} does not match its weights and results ({name}). {again}")
    if f'("{repo_id}")' not in card.text:
        raise ValueError(f"The card in {folder} does not tell readers to load {repo_id!r}. {again}")


def check_reload(folder: Path) -> None:
    """Raise unless model and tokenizer load as they would for a user, without running code from the folder."""
    import torch
    import transformers

    from ..mechanisms import Mechanism

    name = CheckpointFolder(folder).architecture
    model_class: Any = transformers.AutoModel if name == "AutoModel" else named_model_class(name)
    if model_class is None:
        raise ValueError(f"{folder}: transformers {transformers.__version__} has no model {name} of config.json.")
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        model, info = model_class.from_pretrained(folder, output_loading_info=True, **options)
        if (folder / "tokenizer_config.json").exists():
            transformers.AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # any error means that the folder must not be published
        raise ValueError(f"{folder} cannot be loaded: {' '.join(str(error).split())}") from error
    wrong = {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys and kind != "error_msgs"}
    if wrong:
        raise ValueError(f"{folder} does not load as it was saved: {wrong}.")
    if not any(isinstance(module, Mechanism) for module in model.modules()):
        raise ValueError(f"{folder} loads with softmax attention: no layer is patched.")
    bad = [key for key, tensor in model.state_dict().items() if not torch.isfinite(tensor).all()]
    if bad:
        raise ValueError(f"{folder}: {', '.join(bad)} have values that are not finite.")


def check_secrets(folder: Path, plan: Plan) -> None:
    """Raise if a text file to be uploaded contains a token of the Hub or a private key."""
    for name in plan.files:
        binary = name.endswith((".safetensors", ".png"))
        if not binary and SECRET.search((folder / name).read_text(encoding="utf-8", errors="replace")):
            raise ValueError(f"{folder / name} contains a token of the Hub or a private key. Remove and revoke it.")


def _send(folder: Path, plan: Plan, private: bool, revision: str, token: str, tell: Callable[[str], Any]) -> None:
    """Create the repository and the branch if they do not exist, upload, and commit once."""
    api = HfApi(token=token, library_name="hf_rfattn")
    if not api.repo_exists(plan.repo_id):
        api.create_repo(plan.repo_id, private=private)
        tell(f"Created {plan.repo_id}{' (private)' if private else ''}.")
    elif private and not api.model_info(plan.repo_id).private:
        raise ValueError(f"{plan.repo_id} exists and is public. Make it private on its page first.")
    if revision != "main":
        api.create_branch(plan.repo_id, branch=revision, exist_ok=True)
    info = api.model_info(plan.repo_id, revision=revision)
    there = [file.rfilename for file in info.siblings or []]
    stale = sorted(name for name in there if name not in plan.files and WEIGHTS.fullmatch(name))
    if stale:  # from_pretrained might load the weights of an earlier model instead
        tell(f"Removing weights of an earlier version: {', '.join(stale)}.")
    operations: list[Any] = [CommitOperationAdd(path_in_repo=n, path_or_fileobj=folder / n) for n in plan.files]
    operations += [CommitOperationDelete(path_in_repo=name) for name in stale]
    message = "Publish a checkpoint patched by hf_rfattn"
    api.create_commit(plan.repo_id, operations, commit_message=message, revision=revision, parent_commit=info.sha)


def explain(error: BaseException) -> str:
    """Return the message of huggingface_hub on one line, with advice for some HTTP status codes."""
    if type(error) is ValueError:
        return str(error)
    cause: BaseException | None = error
    while cause is not None and getattr(cause, "response", None) is None:  # uploads wrap the HTTP error
        cause = cause.__cause__ or cause.__context__
    advice = ADVICE.get(cause.response.status_code, "") if cause is not None else ""  # type: ignore[attr-defined]
    said = " ".join(str(cause or error).split())[:500]
    return f"Publishing failed: {type(cause or error).__name__}: {said} {advice}".rstrip()
