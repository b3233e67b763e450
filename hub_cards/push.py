"""Uploading a checkpoint: what goes, what stays here and why, and the upload itself. `looped push`."""

import fnmatch
import json
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, ModelCard, constants, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id

from modeling_looped.eval.report import MODELS

from .card import FIGURE, build_card, has_figure, is_foreign, write_card


# Where several fit, the first counts. Patterns without a slash are of files in the folder itself.
LEFT_OUT = {
    "optimizers.pt": "state of the optimizers, for going on with the run",
    "optimizer.*": "state of the optimizers, for going on with the run",
    "scheduler.pt": "state of the run",
    "rng_state*.pth": "state of the run",
    "training_args.bin": "a pickle, which loading would execute",
    "*.bin": "a pickle, which loading could execute: safetensors hold the weights",
    "*.pt": "a pickle, which loading could execute: safetensors hold the weights",
    "*.pth": "a pickle, which loading could execute: safetensors hold the weights",
    "*.pkl": "a pickle, which loading could execute",
    "evaluation/*samples_*": "items of evaluation sets, which are others' work",
}
RESULTS = "evaluation/*results_*.json"
GOES = {
    "README.md": "card",
    "*.png": "plot",
    "*.safetensors": "weights",
    "*.safetensors.index.json": "weights",
    "config.json": "configuration",
    "generation_config.json": "configuration",
    "*.py": "code",
    "tokenizer*": "tokenizer",
    "special_tokens_map.json": "tokenizer",
    "added_tokens.json": "tokenizer",
    "vocab.json": "tokenizer",
    "merges.txt": "tokenizer",
    "chat_template.jinja": "tokenizer",
    "LICENSE*": "licence",
    "recipe.yaml": "how it was trained",
    "progress.json": "how it was trained",
    "metrics.json": "how it was trained",
    "sft.json": "how it was trained",
    "trainer_state.json": "how it was trained",
    "held_out.json": "what was measured",
    RESULTS: "what was measured",
    "*.gguf": "weights for llama.cpp",
}
OTHER = "not a file that this package knows: name it with --include"


@dataclass(frozen=True)
class Upload:
    """
    What `push` sends.

    Attributes:
        files: (path in the repository, bytes, what it is).
        rewritten: Contents of the files that are not sent as they lie here: the card, and lm-eval's results, which name
            folders and the machine.
        left_out: (path, bytes, why it stays).
    """

    folder: Path
    repo_id: str
    rewritten: dict[str, bytes]
    files: tuple[tuple[str, int, str], ...]
    left_out: tuple[tuple[str, int, str], ...]

    @property
    def card(self) -> str:
        return self.rewritten["README.md"].decode()

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size, _ in self.files)

    def operations(self) -> list[CommitOperationAdd]:
        """As `HfApi.create_commit` takes them."""
        return [
            CommitOperationAdd(name, self.rewritten.get(name, str(self.folder / name))) for name, _, _ in self.files
        ]

    def to_dict(self) -> dict:
        return {
            "repository": self.repo_id,
            "bytes": self.total_bytes,
            "files": [{"path": name, "bytes": size, "what": what} for name, size, what in self.files],
            "left_out": [{"path": name, "bytes": size, "why": why} for name, size, why in self.left_out],
        }

    def __str__(self) -> str:
        width = max(len(name) for name, _, _ in self.files)
        lines = [f"{self.repo_id}: {len(self.files)} files, {self.total_bytes:,} bytes"]
        lines += [f"  {name:<{width}}  {size:>14,}  {what}" for name, size, what in self.files]
        together: dict[tuple[str, str], list[str]] = {}
        for name, _, why in self.left_out:
            folder, _, below = name.partition("/")
            together.setdefault((f"{folder}/" if below else name, why), []).append(name)
        if together:
            lines.append("stays here:")
        for (name, why), names in together.items():
            more = f" ({len(names)} files)" if len(names) > 1 else ""
            lines.append(f"  {(names[0] if not more else name + more):<{width}}  {why}")
        return "\n".join(lines)


def plan_upload(folder: str | Path, repo_id: str, include: tuple[str, ...] = (), **given) -> Upload:
    """
    What an upload of the checkpoint in `folder` would send, without a network: weights, code, tokenizer, card (written
    anew for `repo_id`, unless it was changed by hand), plots, and the JSON files that the card quotes.

    Args:
        repo_id: `owner/name` on the Hub.
        include: Patterns of further files, such as `"notes/*"`.
        **given: Metadata of the card, as in `build_card`.

    Raises:
        `ValueError`: for a name that the Hub does not take, a folder that is no checkpoint, or a pattern of no file.
    """
    folder = Path(folder)
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"{repo_id!r} names no owner, which whoever loads the model has to: write OWNER/{repo_id}.")
    foreign = is_foreign(folder)
    card = (folder / "README.md").read_text(encoding="utf-8") if foreign else str(build_card(folder, repo_id, **given))
    rewritten, goes, stays, unused = {"README.md": card.encode()}, [], [], set(include)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, size = path.relative_to(folder).as_posix(), path.stat().st_size
        if any(part.startswith(".") or part == "__pycache__" for part in Path(name).parts):
            continue
        asked = [pattern for pattern in include if fnmatch.fnmatch(name, pattern)]
        unused -= set(asked)
        if asked:
            goes.append((name, size, "asked for"))
        elif why := _first(LEFT_OUT, name):
            stays.append((name, size, why))
        elif name != "README.md" and (what := _first(GOES, name)):
            if fnmatch.fnmatch(name, RESULTS):
                rewritten[name] = _without_the_machine(path, repo_id)
            goes.append((name, len(rewritten.get(name, b"")) or size, what))
        elif name != "README.md":
            stays.append((name, size, OTHER))
    if unused:
        raise ValueError(f"--include {sorted(unused)[0]!r} fits no file of {folder}: leave it out, or correct it.")
    what = "card, as it was changed by hand" if foreign else "card"
    if not foreign and has_figure(folder) and not (folder / FIGURE).is_file():
        goes.append((FIGURE, 0, "plot, drawn when it is sent"))
    goes = [("README.md", len(card.encode()), what), *(one for one in goes if one[0] != "README.md")]
    return Upload(folder, repo_id, rewritten, tuple(goes), tuple(stays))


def push(
    folder: str | Path,
    repo_id: str,
    private: bool | None = None,
    include: tuple[str, ...] = (),
    message: str | None = None,
    token: str | None = None,
    **given,
) -> CommitInfo:
    """
    Uploads the checkpoint in `folder` in one commit, and makes the repository where there is none. Files that are there
    already and not here stay. The Hub looks at the card's metadata before anything else is sent.

    Args:
        repo_id, include: As in `plan_upload`.
        message: Of the commit, "Upload" and the folder's name by default.
        private: Of a new repository; the account's setting by default.
        token: As in `huggingface_hub`, which asks the environment and `hf auth login` by default.

    Raises:
        `ValueError`: as `plan_upload`, without a token, and for metadata that the Hub refuses.
        `ConnectionError`: where the Hub cannot be reached.
        `huggingface_hub.errors.HfHubHTTPError`: for what else it refuses.
    """
    plan_upload(folder, repo_id, include, **given)  # what can be wrong with the call, before anything else
    if (token := token or get_token()) is None:
        raise ValueError("You are not logged in to the Hub: run `hf auth login`, or set HF_TOKEN.")
    if not is_foreign(folder):
        write_card(folder, **given)  # with its figure
    upload = plan_upload(folder, repo_id, include, **given)
    api = HfApi(token=token)
    try:
        ModelCard(upload.card).validate()
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        message = message or f"Upload {Path(folder).resolve().name}"
        return api.create_commit(repo_id, upload.operations(), commit_message=message)
    except (ValueError, HfHubHTTPError):
        raise
    except Exception as error:  # of the HTTP library that huggingface_hub happens to use
        raise ConnectionError(f"The upload to {constants.ENDPOINT} did not get through: {error}") from error


def _without_the_machine(path: Path, repo_id: str) -> bytes:
    """lm-eval's results without the folder that the model lay in and the machine that it ran on."""
    results = json.loads(path.read_text(encoding="utf-8"))
    arguments = results["config"].get("model_args")
    if isinstance(arguments, dict):
        results["config"]["model_args"] = {**arguments, **{one: repo_id for one in MODELS if one in arguments}}
    elif arguments:
        results["config"]["model_args"] = re.sub(r"(^|,)(pretrained|model)=[^,]*", rf"\1\2={repo_id}", arguments)
    for name in ("pretty_env_info", "upper_git_hash"):
        results.pop(name, None)
    for name in ("model_name", "model_name_sanitized"):
        if name in results:
            results[name] = repo_id
    return (json.dumps(results, indent=2, ensure_ascii=False) + "\n").encode()


def _first(patterns: dict[str, str], name: str) -> str | None:
    """What the first pattern says that fits; those without a slash are of the folder itself."""
    fitting = (
        what
        for pattern, what in patterns.items()
        if ("/" in pattern or "/" not in name) and fnmatch.fnmatch(name, pattern)
    )
    return next(fitting, None)
