"""An interpreter of pickles that runs no code of theirs.

A pickle is a program. This interpreter of its opcodes knows containers, numbers and text. Of all
functions and classes that a pickle may name, it knows only those that rebuild dense tensors and
arrays of numbers. It does their work itself after checking the arguments: no function, class or
state of a file ever reaches the pickle readers of Python, NumPy or torch.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.files.pickle_values import (
    FILE,
    NDARRAY,
    SCALARS,
    TENSOR,
    Array,
    Call,
    Class,
    Numbers,
    Storage,
    StorageType,
    allowed,
    array_of_state,
    checked_bytes,
    checked_keys,
    checked_sizes,
    set_order,
)

StandIn = Callable[[str, str], Any]
"""Maps the module and name of a class to its replacement: ``torch.Tensor`` for one of its
subclasses, or a class without arguments, whose instance gets the attributes. ``None`` refuses.
"""

_DEEP = 100


_EMPTY: dict[int, Callable[[], Any]] = {0x5D: list, 0x7D: dict, 0x8F: set, 0x29: tuple}
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_INTEGERS = {0x4A: "<i", 0x4B: "<B", 0x4D: "<H"}
_TEXTS = {0x58: "<I", 0x8C: "<B", 0x8D: "<Q"}
_BYTES = {0x42: "<I", 0x43: "<B", 0x8E: "<Q"}
_ASCII = {0x54: "<i", 0x55: "<B"}
_LONGS = {0x8A: "<B", 0x8B: "<i"}
_GETS = {0x68: "<B", 0x6A: "<I"}
_PUTS = {0x71: "<B", 0x72: "<I"}


class Program:
    """One pickle, interpreted from a position; afterwards ``at`` is its end.

    Args:
        data: The bytes that contain it.
        at: Position of its beginning.
        stand_in: See :data:`StandIn`.
        storage: Returns the storage for a dtype, key and size; without it, no storage may be named.
        plain: Allow no names at all.
        file_within: Reads a file of torch that is in the pickle as bytes, such as a storage;
            without it, none is allowed.
    """

    def __init__(
        self,
        data: Any,
        at: int = 0,
        *,
        stand_in: StandIn | None = None,
        storage: Callable[[torch.dtype | None, Any, int], Storage] | None = None,
        plain: bool = False,
        file_within: Callable[[bytes], Any] | None = None,
    ) -> None:
        self.at, self._begin, self._data, self._end = at, at, data, len(data)
        self._stand_in, self._storage = stand_in, storage
        self._plain, self._file_within = plain, file_within
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._copied = 0
        self._memo: dict[int, Any] = {}
        self._instances: set[type] = set()
        self._steps = self._table()

    def load(self) -> Any:
        """Its value, which has only types that :func:`load_plain` lists."""
        value = self.run()
        self._sizes: dict[int, int] = {}
        self._within: set[int] = set()
        self._most = 1000 + 8 * (self.at - self._begin)
        self._measure(value, 0)
        return value

    def run(self) -> Any:
        data, end, steps = self._data, self._end, self._steps
        while True:
            if self.at >= end:
                raise EOFError("it ends early")
            code = data[self.at]
            self.at += 1
            if code == 0x2E:
                if len(self._stack) != 1 or self._marks:
                    raise UnpicklingError("it does not end with one value")
                return self._stack.pop()
            step = steps.get(code)
            if step is None:
                raise UnpicklingError(f"it has the opcode {bytes([code])!r}, which is not allowed")
            step(code)

    def _table(self) -> dict[int, Callable[[int], None]]:
        one_each: dict[int, Callable[[int], None]] = {
            0x80: self._proto,
            0x95: self._frame,
            0x28: self._mark,
            0x30: self._pop,
            0x31: self._pop_mark,
            0x32: self._dup,
            0x47: self._float,
            0x96: self._bytearray,
            0x94: self._memoize,
            0x61: self._append,
            0x65: self._appends,
            0x73: self._set_item,
            0x75: self._set_items,
            0x90: self._add_items,
            0x91: self._frozenset,
            0x74: self._tuple_to_mark,
            0x6C: self._list_to_mark,
            0x64: self._dict_to_mark,
            0x63: self._global,
            0x93: self._stack_global,
            0x52: self._reduce,
            0x81: self._new,
            0x62: self._build,
            0x51: self._persistent,
        }
        for codes, step in (
            (_EMPTY, lambda code: self._stack.append(_EMPTY[code]())),
            (_CONSTANTS, lambda code: self._stack.append(_CONSTANTS[code])),
            (_TUPLES, self._tuple),
            (_INTEGERS, lambda code: self._stack.append(self._number(_INTEGERS[code]))),
            (_TEXTS, self._text),
            (_BYTES, lambda code: self._stack.append(self._counted(_BYTES[code]))),
            (_ASCII, lambda code: self._stack.append(self._counted(_ASCII[code]).decode("ascii"))),
            (_LONGS, self._long),
            (_GETS, lambda code: self._stack.append(self._memo[self._number(_GETS[code])])),
            (_PUTS, lambda code: self._put(self._number(_PUTS[code]))),
        ):
            one_each.update(dict.fromkeys(codes, step))
        return one_each

    # Bytes

    def _take(self, size: int) -> bytes:
        begin, self.at = self.at, self.at + size
        if size < 0 or self.at > self._end:
            raise EOFError("it ends early")
        return bytes(self._data[begin : self.at])

    def _number(self, code: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _counted(self, code: str) -> bytes:
        return self._take(self._number(code))

    def _line(self) -> str:
        end = self._data.find(b"\n", self.at, min(self._end, self.at + 1000))
        if end < 0:
            raise EOFError("it ends early")
        return self._take(end + 1 - self.at)[:-1].decode()

    def _proto(self, code: int) -> None:
        if self._number("<B") > 5:
            raise UnpicklingError("it is of an unknown pickle protocol")

    def _frame(self, code: int) -> None:
        self._number("<Q")

    # Values

    def _float(self, code: int) -> None:
        self._stack.append(self._number(">d"))

    def _long(self, code: int) -> None:
        content = self._counted(_LONGS[code])
        self._stack.append(int.from_bytes(content, "little", signed=True))

    def _text(self, code: int) -> None:
        self._stack.append(str(self._counted(_TEXTS[code]), "utf-8", "surrogatepass"))

    def _bytearray(self, code: int) -> None:
        self._stack.append(bytearray(self._counted("<Q")))

    # Stack and memo

    def _mark(self, code: int) -> None:
        self._marks.append(len(self._stack))

    def _to_mark(self) -> list[Any]:
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _pop(self, code: int) -> None:
        self._stack.pop()

    def _pop_mark(self, code: int) -> None:
        self._to_mark()

    def _dup(self, code: int) -> None:
        self._stack.append(self._stack[-1])

    def _put(self, index: int) -> None:
        value = self._memo[index] = self._stack[-1]
        if type(value) is Array:
            value.memo.append(index)

    def _memoize(self, code: int) -> None:
        self._put(len(self._memo))

    # Containers

    def _tuple(self, code: int) -> None:
        size = _TUPLES[code]
        if len(self._stack) < size:
            raise UnpicklingError("it takes more values than there are")
        self._stack[-size:] = [tuple(self._stack[-size:])]

    def _tuple_to_mark(self, code: int) -> None:
        self._stack.append(tuple(self._to_mark()))

    def _list_to_mark(self, code: int) -> None:
        self._stack.append(self._to_mark())

    def _dict_to_mark(self, code: int) -> None:
        items = self._to_mark()
        self._stack.append({})
        self._place(items)

    def _append(self, code: int) -> None:
        value = self._stack.pop()
        self._top(list).append(value)

    def _appends(self, code: int) -> None:
        items = self._to_mark()
        self._top(list).extend(items)

    def _set_item(self, code: int) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._place([key, value])

    def _set_items(self, code: int) -> None:
        self._place(self._to_mark())

    def _place(self, items: list[Any]) -> None:
        target = self._top(dict, collections.OrderedDict)
        target.update(zip(checked_keys(items[::2]), items[1::2], strict=True))

    def _add_items(self, code: int) -> None:
        items = self._to_mark()
        self._top(set).update(checked_keys(items))

    def _frozenset(self, code: int) -> None:
        self._stack.append(frozenset(checked_keys(self._to_mark())))

    def _top(self, *kinds: type) -> Any:
        top = self._stack[-1]
        if type(top) not in kinds:
            raise UnpicklingError(f"it adds to a {type(top).__name__}")
        return top

    # Names

    def _global(self, code: int) -> None:
        module = self._line()
        self._stack.append(self._find(module, self._line()))

    def _stack_global(self, code: int) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise UnpicklingError("it has a name that is not text")
        self._stack.append(self._find(module, name))

    def _find(self, module: str, name: str) -> Any:
        found = None if self._plain else allowed().get((module, name))
        if found is FILE and self._file_within is not None:
            read = self._file_within
            return Call(lambda content: read(checked_bytes(content)))
        if found is None and not self._plain and self._stand_in is not None:
            kind = self._stand_in(module, name)
            if kind is not None:
                found = Class(kind)
        if found is None or found is FILE:
            raise UnpicklingError(f"it names {module}.{name}, which is not allowed")
        return found

    def _reduce(self, code: int) -> None:
        arguments, call = self._stack.pop(), self._stack.pop()
        if type(call) is not Call or type(arguments) is not tuple:
            raise UnpicklingError(f"it calls a {type(call).__name__}")
        self._copy(arguments)
        self._stack.append(call.function(*arguments))

    def _copy(self, arguments: Any) -> None:
        """Refuse a pickle that copies the same bytes over and over."""
        kinds = (bytes, bytearray, str, list, tuple)
        self._copied += sum(len(each) for each in arguments if type(each) in kinds)
        if self._copied > 1000 + 16 * len(self._data):
            raise UnpicklingError("it copies the same content over and over")

    def _new(self, code: int) -> None:
        arguments, found = self._stack.pop(), self._stack.pop()
        if type(found) is not Class or found in (NDARRAY, TENSOR) or arguments != ():
            raise UnpicklingError("it makes an object with arguments, or of an unknown class")
        self._instances.add(found.kind)
        self._stack.append(found.kind())

    def _build(self, code: int) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        kind = type(target)
        if kind is Numbers:
            set_order(target, state)
        elif kind is Array:
            self._copy(state)
            self._stack[-1] = made = array_of_state(state)
            self._memo.update(dict.fromkeys(target.memo, made))
        elif kind is collections.OrderedDict and type(state) is dict:
            pass  # attributes, such as a state_dict's _metadata: not part of the content
        elif kind in self._instances and type(state) is dict:
            vars(target).update({k: v for k, v in state.items() if type(k) is str})
        else:
            raise UnpicklingError(f"it gives a state to a {kind.__name__}")

    def _persistent(self, code: int) -> None:
        what = self._stack.pop()
        if self._storage is None or type(what) is not tuple or len(what) not in (5, 6):
            raise UnpicklingError("it refers to something outside it")
        if what[0] != "storage" or type(what[1]) is not StorageType or type(what[2]) is not str:
            raise UnpicklingError("it refers to something other than a storage")
        checked_sizes((what[4],))
        found = self._storage(what[1].dtype, what[2], what[4])
        if len(what) == 6 and what[5] is not None:
            _, begin, size = what[5]
            found = found.part(begin, size)
        self._stack.append(found)

    # What came of it

    def _measure(self, value: Any, deep: int) -> int:
        """Number of values in a value, counting shared containers repeatedly.

        It raises if that number is out of proportion to the pickle: code that walks the value would
        never end.
        """
        kind = type(value)
        if kind in SCALARS or kind is bytearray:
            return 1
        if kind in (Tensor, torch.Size) or isinstance(value, np.generic | np.ndarray):
            return 1
        if id(value) in self._sizes:
            return self._sizes[id(value)]
        inside: Any
        if kind in (list, tuple):
            inside = value
        elif kind in (dict, collections.OrderedDict):
            inside = value.values()
        elif kind in (set, frozenset):
            inside = ()  # its members are scalars
        elif kind in self._instances:
            inside = vars(value).values()
        else:
            raise UnpicklingError(f"it holds a {kind.__name__.strip('_')}, which is not finished")
        if id(value) in self._within or deep == _DEEP:
            raise UnpicklingError(f"a container contains itself, or containers are {_DEEP} deep")
        self._within.add(id(value))
        size = 1
        for each in inside:
            size += 1 if type(each) in SCALARS else self._measure(each, deep + 1)
            if size > self._most:
                raise UnpicklingError("it holds the same containers over and over")
        self._within.discard(id(value))
        self._sizes[id(value)] = size
        return size
