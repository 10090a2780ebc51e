"""Reads the pickles CIFAR is distributed as, without letting them run anything.

``pickle.load`` calls whatever a file names.  Here only the opcodes that build plain data are understood, no
name resolves to anything but the few stand-ins of this module (for NumPy's array and dtype, and for encoded
bytes), and arrays are rebuilt from their raw bytes.  The pure Python unpickler is used because the C one
allocates whatever size a file claims.
"""

import io
import pickle
import struct
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from ipucnn.aliases import PlainValue
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


MAX_OPCODES = 2_000_000
"""CIFAR-100's training file has 350,000; each can make an object of some hundred bytes."""
MAX_NODES = 1_000_000
"""Values of the result, each counted as often as it is reached: a list that holds another twice counts it twice."""
MAX_DIGITS = 100
MAX_KEYS = 1000


class _Budget:
    """How many bytes a pickle may still have copied: as many as it is long, a few times over."""

    def __init__(self, num_bytes: int) -> None:
        self.left = 4 * num_bytes

    def spend(self, num_bytes: int) -> None:
        self.left -= num_bytes
        if self.left < 0:
            raise ValueError("a text that is copied over and over")


class _Array:
    """Stands for numpy.ndarray while unpickling: holds the state, does nothing."""

    def __init__(self, budget: Optional[_Budget] = None) -> None:
        self.budget = budget
        self.array: Any = None

    def __setstate__(self, state: PlainValue) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError("an array with an unexpected state")
        if isinstance(raw, str) and self.budget is not None:  # a Python 2 string
            self.budget.spend(len(raw))
            raw = raw.encode("latin1")
        if not isinstance(raw, bytes):
            raise ValueError("an array without bytes")
        array: np.ndarray = np.frombuffer(raw, dtype.resolved())
        self.array = array.reshape(tuple(shape), order="F" if fortran else "C")


class _Dtype:
    """Stands for numpy.dtype: booleans and plain numbers only."""

    def __init__(self, code: object, *_: object) -> None:
        self.code, self.order = str(code)[:20] if isinstance(code, str) else "?", "|"

    def __setstate__(self, state: PlainValue) -> None:
        order = state[1]
        self.order = order if isinstance(order, str) and len(order) == 1 else "?"

    def resolved(self) -> np.dtype:
        if self.code not in ("b1", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"):
            raise ValueError(f"an array of dtype {self.code!r}")
        if self.order not in "|<>=":
            raise ValueError(f"an array of byte order {self.order!r}")
        return np.dtype(self.order.replace("|", "") + self.code)


class _Names:
    """What the names in a pickle stand for: bound methods and classes alone."""

    def __init__(self, budget: _Budget) -> None:
        self._budget = budget
        self.by_name: Dict[Tuple[str, str], Callable[..., Any]] = {
            ("numpy.core.multiarray", "_reconstruct"): self.reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): self.reconstruct,
            ("numpy", "ndarray"): _Array,
            ("numpy", "dtype"): _Dtype,
            ("numpy.core.numeric", "_frombuffer"): self.from_buffer,
            ("numpy._core.numeric", "_frombuffer"): self.from_buffer,
            ("_codecs", "encode"): self.encode,
            ("__builtin__", "bytes"): self.empty_bytes,
        }

    def reconstruct(self, kind: object, *_: object) -> _Array:
        if kind is not _Array:
            raise ValueError("an array of an unexpected type")
        return _Array(self._budget)

    def from_buffer(self, raw: object, dtype: object, shape: object, order: object) -> _Array:
        # How protocol 5 writes arrays.
        rebuilt = _Array(self._budget)
        if isinstance(raw, bytearray):
            self._budget.spend(len(raw))
            raw = bytes(raw)
        rebuilt.__setstate__((1, shape, dtype, order == "F", raw))
        return rebuilt

    def encode(self, text: object, encoding: object = "latin1") -> bytes:
        # How Python 3 writes bytes in protocol 2.
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
            raise ValueError("a string with an unexpected encoding")
        self._budget.spend(len(text))
        return text.encode("latin1")

    def empty_bytes(self) -> bytes:
        # How Python 3 writes b"" in protocol 2; with an argument it would be a way to ask for memory.
        return b""


# Typeshed does not describe it.
_PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


def _counted(method: Callable[["_Unpickler"], None]) -> Callable[["_Unpickler"], None]:
    """The method of an opcode, which counts against :data:`MAX_OPCODES` whenever it is called."""

    def load(unpickler: "_Unpickler") -> None:
        unpickler.num_opcodes += 1
        if unpickler.num_opcodes > MAX_OPCODES:
            raise ValueError("a structure of too many parts")
        method(unpickler)

    return load


class _Unpickler(_PythonUnpickler):
    dispatch = {
        opcode[0]: _PythonUnpickler.dispatch[opcode[0]]
        for opcode in (getattr(pickle, name) for name in _ALLOWED_OPCODES)
    }

    def __init__(self, data: bytes) -> None:
        stream = io.BytesIO(data)
        super().__init__(stream, encoding="latin1")
        self.num_bytes = len(data)
        self.names = _Names(_Budget(len(data)))
        self.num_opcodes = 0

    def load_bytearray8(self) -> None:
        # The library's allocates what the file claims before reading it.
        (size,) = struct.unpack("<Q", self.read(8))
        if size > self.num_bytes:
            raise EOFError
        self.append(self.read(size))

    def load_decimal(self) -> None:
        # To turn digits into a number takes time that grows with the square of their count.
        line = self.readline()[:-1].rstrip(b"L")
        if len(line) > MAX_DIGITS:
            raise ValueError("a number of very many digits")
        self.append({b"00": False, b"01": True}.get(line) if line in (b"00", b"01") else int(line))

    def load_long_bytes(self, length: int) -> None:
        if not 0 <= length <= MAX_DIGITS:
            raise ValueError("a number of very many digits")
        self.append(pickle.decode_long(self.read(length)))  # type: ignore[attr-defined]

    def load_long1(self) -> None:
        self.load_long_bytes(self.read(1)[0])

    def load_long4(self) -> None:
        self.load_long_bytes(struct.unpack("<i", self.read(4))[0])

    def memo_index(self) -> int:
        # Larger numbers can be chosen so that looking one of them up takes as long as there are others.
        line = self.readline()[:-1]
        if len(line) > MAX_DIGITS or not 0 <= int(line) < 2**32:
            raise ValueError("a number of very many digits")
        return int(line)

    def load_put(self) -> None:
        self.memo[self.memo_index()] = self.stack[-1]

    def load_get(self) -> None:
        self.append(self.memo[self.memo_index()])

    def set_items(self, mapping: object, items: List[object]) -> None:
        # Other keys can be chosen so that a dictionary takes hours; hashes of texts cannot be foreseen.
        if not isinstance(mapping, dict) or len(items) % 2 or len(mapping) + len(items) // 2 > MAX_KEYS:
            raise ValueError("a dictionary of another shape than CIFAR's")
        for key, value in zip(items[::2], items[1::2]):
            if not isinstance(key, (str, bytes)):
                raise ValueError("a dictionary with keys that are no text")
            mapping[key] = value

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self.set_items(self.stack[-1], items)

    def load_dict(self) -> None:
        items = self.pop_mark()
        mapping: Dict[Any, Any] = {}
        self.set_items(mapping, items)
        self.append(mapping)

    def load_build(self) -> None:
        # The library's would set attributes of whatever has some, and the names of this module stand for functions.
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, (_Array, _Dtype)):
            raise ValueError("a state of something that has none")
        target.__setstate__(state)

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8
    dispatch[pickle.INT[0]] = load_decimal
    dispatch[pickle.LONG[0]] = load_decimal
    dispatch[pickle.LONG1[0]] = load_long1
    dispatch[pickle.LONG4[0]] = load_long4
    dispatch[pickle.PUT[0]] = load_put
    dispatch[pickle.GET[0]] = load_get
    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.BUILD[0]] = load_build
    # The library's loop asks for the method of each opcode: here each is counted first.
    dispatch = {opcode: _counted(method) for opcode, method in dispatch.items()}

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        try:
            return self.names.by_name[module, name]
        except KeyError:
            raise ValueError(f"a reference to {module[:80]}.{name[:80]}, which could run code") from None


def safe_unpickle(data: bytes, origin: str) -> PlainValue:
    """The plain data (dicts, lists, tuples, strings, bytes, numbers, NumPy arrays) of a pickle.

    Python 2 strings become ``str`` through latin-1.

    Args:
        data: the pickle.
        origin: the file, for messages.

    Raises:
        DataError: it is damaged, or names anything beyond plain data.  Nothing it names is ever called.
    """
    try:
        return _plain(_Unpickler(data).load(), 0, [MAX_NODES])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a hostile file can provoke any error, MemoryError included
        if isinstance(error, ValueError) and str(error).startswith("a "):
            reason = f"holds {error}"
        elif isinstance(error, EOFError):
            reason = "is truncated"
        else:
            reason = f"is damaged ({type(error).__name__}: {str(error)[:200]})"
        raise DataError(
            f"{origin} {reason}", "nothing in it was run; get the file again from a source you trust"
        ) from None


def _plain(value: object, depth: int, left: List[int]) -> PlainValue:
    """Replaces the stand-ins by arrays.  Raises ValueError for what is left of them.

    Args:
        value: what was unpickled, parts of which may be shared.
        depth: of it in the whole.
        left: one number, how many values may still be reached.
    """
    left[0] -= len(value) if isinstance(value, (dict, list, tuple)) else 1
    if depth > 20:
        raise ValueError("a structure nested too deeply")
    if left[0] < 0:
        raise ValueError("a structure of too many parts")
    if isinstance(value, _Array):
        if value.array is None:
            raise ValueError("an array without contents")
        return value.array
    if isinstance(value, dict):
        return {key: _plain(item, depth + 1, left) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item, depth + 1, left) for item in value)
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    raise ValueError(f"a bare {type(value).__name__.lstrip('_')}")
