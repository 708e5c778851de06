"""The errors that no standard type says well enough. Each one is a standard type too."""

from types import FrameType


class PluginError(Exception):
    """A plugin is wrong: a hook that does not exist, a name that is not allowed, ..."""


class UnknownPluginError(PluginError, LookupError):
    """No plugin provides the name that was asked for."""


class AmbiguousPluginError(PluginError, LookupError):
    """Several plugins provide the name that was asked for; ``provider:name`` says which."""


class PluginLoadError(PluginError, ImportError):
    """A name is known, but what it stands for cannot be imported."""


def install_hint(distribution: str) -> str:
    """The sentence that says which plugin of ours is missing, and how to install it."""
    return (
        f"it is part of {distribution}: pip install {distribution} "
        f"(in a checkout: pip install ./plugins/{distribution})"
    )


class KernelsError(RuntimeError):
    """``PYG_SCALE_KERNELS=require`` asks for compiled kernels, and they cannot be used."""


class GraphDirectoryError(ValueError):
    """A graph directory is damaged, incomplete, or of another version; says which file."""


def is_failure(error: BaseException | None) -> bool:
    """Return True if what ends a script is a failure: ``sys.exit()`` with status 0 is none."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none can be read; says which file or rank."""


class CommError(RuntimeError):
    """Ranks cannot go on together: one is gone, or they called different things."""


class CommTimeoutError(CommError, TimeoutError):
    """A rank did not answer in time; says which."""


class AccessError(CommError, PermissionError):
    """A rank has another secret than this one, or one of them has none; says which rank."""


class RequestError(CommError):
    """A server says that it could not answer a request, and why.

    Attributes:
        kind: The name of the error that it met, such as ``"ValueError"``.
        reason: Its message.
    """

    def __init__(self, where: str, kind: str, reason: str) -> None:
        super().__init__(f"{where} could not answer: {kind}: {reason}")
        self.where, self.kind, self.reason = where, kind, reason

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.where, self.kind, self.reason)


class DeviceError(ValueError):
    """A device that was asked for is not there, or lacks what is needed; says what."""


def was_interrupted(error: BaseException) -> bool:
    """Return True if an exception is not due to the batch that was being made.

    So is what is no ``Exception``, such as ``KeyboardInterrupt``, and what the handler of a signal
    raised, which was called by nobody and is known by the frame that it is given.
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
