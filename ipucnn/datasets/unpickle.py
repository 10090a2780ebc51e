"""Reads the pickles CIFAR is distributed as, without letting them run anything.

``pickle.load`` calls whatever a file names.  Here only the opcodes that build plain data are understood, no
name resolves to anything but the few stand-ins of this module (for NumPy's array and dtype, and for encoded
bytes), and arrays are rebuilt from their raw bytes.  The pure Python unpickler is used because the C one
allocates whatever size a file claims.
"""

import io
import pickle
import struct
from typing import Any, Callable, Dict, Tuple

import numpy as np

from ipucnn.errors import DataError

_ALLOWED_OPCODES = (
    *(
        "PROTO",
        "FRAME",
        "STOP",
        "MARK",
        "POP",
        "POP_MARK",
        "DUP",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "INT",
        "BININT",
    ),
    *("BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING"),
    *("SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "UNICODE", "BINUNICODE"),
    *("SHORT_BINUNICODE", "BINUNICODE8", "TUPLE", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "LIST"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "DICT", "EMPTY_DICT", "SETITEM", "SETITEMS", "GET", "BINGET"),
    *("LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
)


class _Array:
    """Stands for numpy.ndarray while unpickling: holds the state, does nothing."""

    def __init__(self) -> None:
        self.array: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError("an array with an unexpected state")
        if isinstance(raw, str):  # a Python 2 string
            raw = raw.encode("latin1")
        array = np.frombuffer(raw, dtype.resolved())
        self.array = array.reshape(shape, order="F" if fortran else "C")


class _Dtype:
    """Stands for numpy.dtype: booleans and plain numbers only."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code, self.order = str(code), "|"

    def __setstate__(self, state: Any) -> None:
        self.order = str(state[1])

    def resolved(self) -> np.dtype:
        if self.code not in ("b1", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"):
            raise ValueError(f"an array of dtype {self.code!r}")
        if self.order not in "|<>=":
            raise ValueError(f"an array of byte order {self.order!r}")
        return np.dtype(self.order.replace("|", "") + self.code)


def _reconstruct(kind: Any, *_: Any) -> _Array:
    if kind is not _Array:
        raise ValueError("an array of an unexpected type")
    return _Array()


def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    # How protocol 5 writes arrays.
    rebuilt = _Array()
    rebuilt.__setstate__((1, shape, dtype, order == "F", raw))
    return rebuilt


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    # How Python 3 writes bytes in protocol 2.
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("a string with an unexpected encoding")
    return text.encode("latin1")


def _empty_bytes() -> bytes:
    # How Python 3 writes b"" in protocol 2; with an argument it would be a way to ask for memory.
    return b""


_NAMES: Dict[Tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): _empty_bytes,
}


# Typeshed does not describe it.
_PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


class _Unpickler(_PythonUnpickler):
    dispatch = {
        opcode[0]: _PythonUnpickler.dispatch[opcode[0]]
        for opcode in (getattr(pickle, name) for name in _ALLOWED_OPCODES)
    }

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="latin1")
        self.num_bytes = len(data)

    def load_bytearray8(self) -> None:
        # The library's allocates what the file claims before reading it.
        (size,) = struct.unpack("<Q", self.read(8))
        if size > self.num_bytes:
            raise EOFError
        self.append(self.read(size))

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMES[module, name]
        except KeyError:
            raise ValueError(f"a reference to {module}.{name}, which could run code") from None


def safe_unpickle(data: bytes, origin: str) -> Any:
    """The plain data (dicts, lists, tuples, strings, bytes, numbers, NumPy arrays) of a pickle.

    Python 2 strings become ``str`` through latin-1.

    Args:
        data: the pickle.
        origin: the file, for messages.

    Raises:
        DataError: it is damaged, or names anything beyond plain data.  Nothing it names is ever called.
    """
    try:
        return _plain(_Unpickler(data).load(), 0)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a hostile file can provoke any error, MemoryError included
        if isinstance(error, ValueError) and str(error).startswith("a "):
            reason = f"holds {error}"
        elif isinstance(error, EOFError):
            reason = "is truncated"
        else:
            reason = f"is damaged ({type(error).__name__}: {error})"
        raise DataError(
            f"{origin} {reason}", "nothing in it was run; get the file again from a source you trust"
        ) from None


def _plain(value: Any, depth: int) -> Any:
    """Replaces the stand-ins by arrays.  Raises ValueError for what is left of them."""
    if depth > 20:
        raise ValueError("a structure nested too deeply")
    if isinstance(value, _Array):
        if value.array is None:
            raise ValueError("an array without contents")
        return value.array
    if isinstance(value, dict):
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item, depth + 1) for item in value)
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    raise ValueError(f"a bare {type(value).__name__.lstrip('_')}")
