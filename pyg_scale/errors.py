"""Errors of pyg_scale. Most are also of a standard type."""

from types import FrameType


class PluginError(Exception):
    """A plugin is invalid: a hook that does not exist, a name that is not allowed, ..."""


class UnknownPluginError(PluginError, LookupError):
    """No plugin provides the requested name."""


class AmbiguousPluginError(PluginError, LookupError):
    """Several plugins provide the requested name; ``provider:name`` selects one."""


class PluginLoadError(PluginError, ImportError):
    """A name is known, but its target cannot be imported."""


def install_hint(distribution: str) -> str:
    """A sentence with the name of the missing plugin of ours, and the command to install it."""
    return (
        f"it is part of {distribution}: pip install {distribution} "
        f"(in a checkout: pip install ./plugins/{distribution})"
    )


class KernelsError(RuntimeError):
    """Compiled kernels are required, but cannot be used."""


class GraphDirectoryError(ValueError):
    """A graph directory is damaged, incomplete, or of another version; names the file."""


def is_failure(error: BaseException | None) -> bool:
    """Return True if the exception that ends a script is a failure, unlike ``sys.exit(0)``."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none can be read; names the file or rank."""


class RecordingError(ValueError):
    """A run cannot be recorded, or its recording is damaged or of another version."""


class CommError(RuntimeError):
    """Ranks cannot continue together: one has ended, or they made different calls."""


class CommTimeoutError(CommError, TimeoutError):
    """A rank did not answer in time; names the rank."""


class AccessError(CommError, PermissionError):
    """A rank has a different secret, or one of the two has none; names the rank."""


class RequestError(CommError):
    """A server could not answer a request; has the reason.

    Attributes:
        kind: The type of the error on the server, such as ``"ValueError"``.
        reason: Its message.
    """

    def __init__(self, where: str, kind: str, reason: str) -> None:
        super().__init__(f"{where} could not answer: {kind}: {reason}")
        self.where, self.kind, self.reason = where, kind, reason

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.where, self.kind, self.reason)


class OverloadError(RuntimeError):
    """More requests wait than a server takes; the caller may try again later."""


class PredictionTimeoutError(TimeoutError):
    """There was no prediction within the time limit."""


class DeviceError(ValueError):
    """A requested device does not exist or lacks something; the message names it."""


class BudgetError(ValueError):
    """The neighbourhood of one seed exceeds the budget of a batch; names the seed."""


def was_interrupted(error: BaseException) -> bool:
    """Return True if an exception is an interruption, not caused by the batch in progress.

    These are exceptions that are not an ``Exception``, such as ``KeyboardInterrupt``, and those
    raised by the handler of a signal, which is recognised by its ``frame`` argument.
    """
    cause: BaseException | None = error
    while cause is not None:
        if not isinstance(cause, Exception):
            return True
        trace = cause.__traceback__
        while trace is not None:
            if any(isinstance(value, FrameType) for value in trace.tb_frame.f_locals.values()):
                return True
            trace = trace.tb_next
        cause = cause.__cause__
    return False
