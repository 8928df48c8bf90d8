"""Data pickled by Python 2, as old data sets are published, read without executing anything."""

from __future__ import annotations

import io
import pickletools
from dataclasses import dataclass
from typing import Any

NAMES = ("numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype")


@dataclass
class Call:
    """What a pickle wants called, with which arguments, and the state that it wants set then."""

    name: str
    args: Any
    state: Any = None


def unpickle(content: bytes) -> Any:
    """Lists, tuples, dicts, ints and bytes as pickled, and a :class:`Call` in place of each numpy array or dtype.

    ``pickle`` calls what a file names with what it likes, and numpy's own reconstruction was not made to be safe from
    that either. So only opcodes and names that such files need are known here, and nothing is called. Raises ValueError
    for others; what a damaged file leads to may be any exception.
    """
    stream = io.BytesIO(content)
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    argument: Any

    def popped(start: int) -> list[Any]:
        items = stack[start:]
        del stack[start:]
        return items

    for opcode, argument, position in pickletools.genops(stream):
        match opcode.name:
            case "PROTO" | "STOP":
                pass
            case "SHORT_BINSTRING" | "BINSTRING":
                stack.append(argument.encode("latin-1"))
            case "BININT" | "BININT1" | "BININT2":
                stack.append(argument)
            case "NONE":
                stack.append(None)
            case "NEWFALSE":
                stack.append(False)
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(popped(marks.pop())))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(popped(-int(opcode.name[-1]))))
            case "EMPTY_LIST":
                stack.append([])
            case "APPENDS":
                items = popped(marks.pop())
                stack[-1].extend(items)
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEMS":
                items = popped(marks.pop())
                if not all(isinstance(key, bytes) for key in items[::2]):  # hashing others can exhaust the stack
                    raise ValueError("a key is no string")
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "GLOBAL" if argument in NAMES:
                stack.append(argument)
            case "GLOBAL":
                raise ValueError(f"it names {argument[:100].replace(' ', '.')!r}, which no published file does")
            case "REDUCE":
                name, args = popped(-2)
                stack.append(Call(name, args))
            case "BUILD":
                call, state = popped(-2)
                call.state = state
                stack.append(call)
            case other:
                raise ValueError(f"its opcode {other} at byte {position} is in no published file")
    if stream.read(1):
        raise ValueError("it has extra bytes at its end")
    return stack.pop()
