"""Every exception: one root, the built-in that Reverb's users catch, and a documented cause."""

from __future__ import annotations

import inspect
import pickle

import pytest

from shmreplay import errors

BUILT_IN = {
    "ArenaFullError": (MemoryError,),
    "ArgumentTypeError": (TypeError,),
    "AuthenticationError": (RuntimeError,),
    "CheckpointError": (RuntimeError,),
    "DeadlineExceededError": (TimeoutError,),
    "ExpiredReferenceError": (ValueError, RuntimeError),
    "ExtensionError": (RuntimeError,),
    "ForkedHandleError": (RuntimeError,),
    "HistoryIndexError": (IndexError,),
    "InvalidArgumentError": (ValueError,),
    "OutOfMemoryError": (MemoryError,),
    "PriorityError": (ValueError,),
    "ProtocolError": (RuntimeError,),
    "ReverbError": (Exception,),
    "ServerClosedError": (RuntimeError,),
    "SignatureError": (ValueError,),
    "StoreExistsError": (ValueError,),
    "StoreLimitError": (RuntimeError,),
    "StoreNotFoundError": (RuntimeError,),
    "StorePermissionError": (PermissionError,),
    "TableCorruptedError": (RuntimeError,),
    "TableNotFoundError": (RuntimeError, ValueError),
    "VersionMismatchError": (RuntimeError,),
    "WriterClosedError": (RuntimeError,),
    "WriterStateError": (RuntimeError,),
}


def test_all_lists_every_exception() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException)
    }
    assert defined == set(errors.__all__) == set(BUILT_IN)


@pytest.mark.parametrize("name", errors.__all__)
def test_exception(name: str) -> None:
    cls = getattr(errors, name)
    assert issubclass(cls, errors.ReverbError)
    for base in BUILT_IN[name]:
        assert issubclass(cls, base)
    assert (cls.__doc__ or "").startswith("Raised when")
    error = cls("what was given; what was expected; what to do")
    assert str(error).startswith("what was given; what was expected; what to do")
    # Exceptions cross process boundaries in worker pools, whoever does the sending.
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)


def test_argument_errors_are_invalid_arguments() -> None:
    assert issubclass(errors.SignatureError, errors.InvalidArgumentError)
    assert issubclass(errors.PriorityError, errors.InvalidArgumentError)
    assert not issubclass(errors.ArgumentTypeError, ValueError)
