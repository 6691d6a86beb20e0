"""Publish a patched checkpoint: check the folder, then send model, tokenizer, card, plot and results in one commit.

`HfApi.upload_folder` is not used: in huggingface_hub 2.4 it may commit a folder in several steps, which a failure could
leave half done. `create_commit` uploads first and commits once, so that a failure before the end changes nothing that
readers see, and a second run sends only what the Hub does not have yet.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, ModelInfo, get_token
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from ..integration import names as names_module
from ..integration.names import CODE
from ..integration.reading import named_model_class
from ..results import RESULTS
from ..results.fingerprint import CONFIG, INDEX
from .cards import FINGERPRINT, RESULTS_FINGERPRINT, make_card, unclean_results
from .faults import NO_TOKEN, TOKEN, PublishError, explain, scrub
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
MAIN = "main"


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
    `revision`: a branch, made if need be. `dry_run`: only check. `token`: by default the one of `hf auth login` or
    HF_TOKEN. `include`: files to send beside those that belong to a model; others stay here, and links are refused.
    `tell`: is given a line now and then.

    Faults on the way are a `PublishError`.
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
    return _send(path, plan, private, revision or MAIN, token, tell)


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
    address = f"{HfApi().endpoint}/{repo_id}" + (f"/tree/{revision}" if revision not in (None, MAIN) else "")
    return Plan(repo_id, address, {name: (path / name).stat().st_size for name in sent}, sorted(set(names) - set(sent)))


def _in_known_folder(name: str) -> bool:
    folder, _, file = name.partition("/")
    return folder in FOLDERS and "/" not in file and file.endswith(FOLDERS[folder])


def check_card(folder: Path, repo_id: str) -> None:
    """The card must be of these weights, this config and these results, and name the place it will stand at."""
    again = f"Run `hf-rfattn card {folder} --repo {repo_id}`."
    if not (folder / CARD).is_file():
        raise ValueError(f"{folder} has no card ({CARD}). {again}")
    try:
        card = ModelCard.load(folder / CARD)
    except Exception as error:  # YAML errors have no common base that huggingface_hub exports
        raise ValueError(
            f"The metadata of {folder / CARD} cannot be read: {' '.join(str(error).split())} {again}"
        ) from error
    checkpoint = CheckpointFolder(folder)
    if card.data.get(FINGERPRINT) != checkpoint.fingerprint:
        raise ValueError(f"The card in {folder} was not made for these weights and this config. {again}")
    if card.data.get(RESULTS_FINGERPRINT) != checkpoint.results_fingerprint:
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
        raise ValueError(
            f"{folder}: transformers {transformers.__version__} has no model {name}; config.json names it."
        )
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
                raise ValueError(
                    f"{folder / name} holds a token of the Hub. Remove it, and revoke it if others saw it."
                )
            if PRIVATE_KEY.search(text):
                raise ValueError(f"{folder / name} holds a private key. Remove it.")


def _send(folder: Path, plan: Plan, private: bool, revision: str, token: str, tell: Callable[[str], Any]) -> str:
    api = HfApi(token=token, library_name="hf_rfattn")
    state = _State(api, plan.repo_id, revision)
    try:
        _open_repository(api, plan.repo_id, private, revision, state, tell)
        info = api.model_info(plan.repo_id, revision=revision)
        state.before = info.sha
        stale = sorted(
            s.rfilename for s in info.siblings or [] if s.rfilename not in plan.files and WEIGHTS.fullmatch(s.rfilename)
        )
        if stale:  # weights of an earlier model would be loaded in place of these, or beside them
            tell(f"Removing weights of an earlier version: {', '.join(stale)}.")
        commit = api.create_commit(
            plan.repo_id,
            [
                *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in plan.files),
                *(CommitOperationDelete(path_in_repo=name) for name in stale),
            ],
            commit_message="Publish a checkpoint patched by hf_rfattn",
            revision=revision,
            parent_commit=info.sha,
        )
        arrived = {s.rfilename for s in api.model_info(plan.repo_id, revision=commit.oid).siblings or []}
        if missing := sorted(set(plan.files) - arrived):
            raise ValueError(f"The Hub left out {', '.join(missing)}: look at .gitignore there, then run again.")
    except Exception as error:
        message = str(error) if type(error) is ValueError else explain(error, plan.repo_id, token)
        raise PublishError(f"{scrub(message, token)} {state.now()}") from None
    return plan.address


def _open_repository(
    api: HfApi, repo_id: str, private: bool, revision: str, state: "_State", tell: Callable[[str], Any]
) -> None:
    """Make the repository and the branch where they are missing."""
    info = _look(api, repo_id)
    if info is None:
        state.creating = True
        api.create_repo(repo_id, private=private)
        state.creating = False
        state.made.append(f"the empty repository {repo_id}")
        tell(f"Created {repo_id}{' (private)' if private else ''}.")
    elif private and info.private is False:
        raise ValueError(f"{repo_id} exists and is public. Make it private on its page first.")
    if revision != MAIN and revision not in {branch.name for branch in api.list_repo_refs(repo_id).branches}:
        api.create_branch(repo_id, branch=revision)
        state.made.append(f"the branch {revision}")


def _look(api: HfApi, repo_id: str) -> ModelInfo | None:
    try:
        return api.model_info(repo_id)
    except RepositoryNotFoundError as error:
        if error.response.status_code == 404:
            return None
        raise


@dataclass
class _State:
    """What this run has done to the remote, for the message when it fails. `before`: its last commit, if known."""

    api: HfApi
    repo_id: str
    revision: str
    creating: bool = False
    made: list[str] = field(default_factory=list)
    before: str | None = None

    def now(self) -> str:
        """Asks the Hub, since an answer may have been lost when what it told of was done."""
        made = f"Only {' and '.join(self.made)} was made there." if self.made else "Nothing was changed there."
        if self.before is None and not self.creating:
            return made
        try:
            sha = self.api.model_info(self.repo_id, revision=None if self.creating else self.revision, timeout=10).sha
        except RepositoryNotFoundError:
            return made
        except Exception:
            return "What has arrived there is not known; run again: nothing is sent twice."
        if self.creating:
            return f"Only the empty repository {self.repo_id} was made there."
        if sha == self.before:
            return f"{made} What is already uploaded is not sent twice."
        return "There is a new commit, maybe this one; run again to be sure: nothing is sent twice."
