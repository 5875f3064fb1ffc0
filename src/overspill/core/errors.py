"""What goes wrong for a user: one line that says what was asked, what is there and what to do."""


class OverspillError(Exception):
    """Base of every error whose message is meant for the user; the command line exits with 2."""


class ConfigError(OverspillError, ValueError):
    """A value, a flag or a file that cannot be right."""


class BudgetError(OverspillError, ValueError):
    """A memory budget that cannot hold what it must hold."""


class DiskError(OverspillError, OSError):
    """A disk folder that is full, not writable or gone."""


class CheckpointError(OverspillError, ValueError):
    """A checkpoint that is corrupt, foreign or of another shape."""


class NonFiniteError(OverspillError, ArithmeticError):
    """A loss or a gradient that is NaN or infinite; nothing was updated with it."""


class OrderError(OverspillError, RuntimeError):
    """Calls in an order that would silently train something else."""


class EngineError(OverspillError, RuntimeError):
    """A worker thread of the engine failed; the cause is chained."""
