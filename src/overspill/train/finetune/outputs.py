"""The models that a run writes: the best and the final one, each complete or absent."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from overspill.core.errors import DiskError, OverspillError
from overspill.tiers.aside import folder_aside, write_failure

Write = Callable[[Path], None]
_OLD = ".old-"


class Outputs:
    """The folders `best` and `final` of a run. If the final model is the best, `best` links to
    `final`: a large model is not written twice."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.best, self.final = folder / "best", folder / "final"

    def reopen(self) -> None:
        """Prepare for more steps: a best model in `final` must survive the next `final`."""
        for leftover in self._folder.glob(f"{_OLD}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for target in (self.best, self.final):
            if _fresh(target).is_dir():  # killed before the rename
                self._put(target)
        if self.best.is_symlink():
            self.best.unlink()
            if self.final.is_dir():
                os.rename(self.final, self.best)

    def save_best(self, write: Write) -> None:
        self._replace(self.best, write)

    def save_final(self, write: Write, is_best: bool) -> None:
        self._replace(self.final, write)
        if is_best:
            self._clear(self.best)
            self.best.symlink_to(self.final.name, target_is_directory=True)

    def _replace(self, target: Path, write: Write) -> None:
        """Replace a model. The old one stays complete until the new one is."""
        try:
            shutil.rmtree(_fresh(target), ignore_errors=True)
            with folder_aside(_fresh(target)) as aside:
                write(aside)
            self._put(target)
        except Exception as error:
            reason = write_failure(error)
            if reason is None or isinstance(error, OverspillError):
                raise
            raise DiskError(
                f"{target} cannot be written ({reason}); free some space, then continue with "
                "--resume"
            ) from error

    def _put(self, target: Path) -> None:
        self._clear(target)
        os.rename(_fresh(target), target)

    def _clear(self, target: Path) -> None:
        if target.is_symlink():
            target.unlink()
        elif target.exists():
            # Renamed first: a kill must not leave an incomplete model with that name.
            doomed = self._folder / f"{_OLD}{target.name}"
            os.rename(target, doomed)
            shutil.rmtree(doomed)


def _fresh(target: Path) -> Path:
    return target.with_name(f".new-{target.name}")
