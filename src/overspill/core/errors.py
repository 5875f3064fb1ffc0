"""Errors for users: one line with the request, the situation and what to do."""


class OverspillError(Exception):
    """Base of all errors for users; the command line exits with code 2."""


class ConfigError(OverspillError, ValueError):
    """An invalid value, flag or file."""


class BudgetError(OverspillError, ValueError):
    """A memory budget that is too small."""


class DiskError(OverspillError, OSError):
    """A disk folder that is full, not writable or missing."""


class CheckpointError(OverspillError, ValueError):
    """A checkpoint that is corrupt, unknown or of another shape."""


class NonFiniteError(OverspillError, ArithmeticError):
    """A loss or a gradient is NaN or infinite; nothing was updated."""


class OrderError(OverspillError, RuntimeError):
    """Calls in an order that would silently give wrong results."""


class RankError(OverspillError, RuntimeError):
    """A failure on another rank."""


class EngineError(OverspillError, RuntimeError):
    """A worker thread of the engine failed; the cause is chained."""
