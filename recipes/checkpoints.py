"""Checkpoints of a run: whole or absent, the newest and the best kept, each a `from_pretrained` directory."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path


STATE, PROGRESS = "optimizers.pt", "progress.json"  # what a checkpoint has beside what from_pretrained reads


def newest_checkpoint(output_dir: str | Path) -> Path | None:
    """The checkpoint directory of the latest step under `output_dir`, if any."""
    return max(all_checkpoints(Path(output_dir)), key=_step, default=None)


def read_progress(checkpoint: Path) -> dict:
    return json.loads((checkpoint / PROGRESS).read_text())


def write_checkpoint(output_dir: Path, step: int, write: Callable[[Path], None], keep_last: int, keep: set[int]) -> Path:
    """
    `write` fills a folder aside, which is synchronised with the disk and then renamed to `step-<step>`: a checkpoint
    under its own name is always whole. Then older ones are deleted, but for the `keep_last` newest and those in `keep`.

    Raises:
        `OSError`: where the disk does not take it. What was written is deleted; the checkpoints before it stay.
    """
    final, aside = output_dir / f"step-{step}", output_dir / f".writing-step-{step}"
    for pattern in (".writing-step-*", ".deleting-step-*"):
        for left in output_dir.glob(pattern):  # of a process that was killed
            shutil.rmtree(left)
    if not final.is_dir():
        try:
            write(aside)
            for path in (*aside.rglob("*"), aside):
                _synchronise(path)
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            reason = f"The checkpoint of step {step} could not be written ({_reason(error)})"
            raise OSError(f"{reason}; {intact(output_dir)}.") from error
        os.rename(aside, final)
        _synchronise(output_dir)
    by_age = sorted(all_checkpoints(output_dir), key=_step, reverse=True)
    for older in by_age[keep_last:]:
        if _step(older) not in keep:
            doomed = older.with_name(f".deleting-{older.name}")  # a half-deleted checkpoint must not look like one
            os.rename(older, doomed)
            shutil.rmtree(doomed)
    return final


def intact(output_dir: Path) -> str:
    """What an error can say for comfort."""
    last = newest_checkpoint(output_dir)
    return "there is no checkpoint yet" if last is None else f"{last} is intact, and --resume auto goes on from it"


def _reason(error: BaseException) -> BaseException:
    """The operating system's word, where there is one: torch.save says instead at which byte it noticed."""
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    return error


def all_checkpoints(output_dir: Path) -> list[Path]:
    """Whole ones, in any order."""
    return [path for path in output_dir.glob("step-*") if path.name[5:].isdigit() and (path / PROGRESS).is_file()]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name[5:])


def _synchronise(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
