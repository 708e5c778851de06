"""Files that attack whoever reads them, and a program that reads a folder of them.

``python hostile_pickles.py FOLDER`` prints what became of each, as JSON. It is a process of its
own, since what is wrong with a reader may end it.
"""

from __future__ import annotations

import collections
import copy
import io
import json
import pickle
import random
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

PROTO, STOP, MARK, REDUCE, BUILD = b"\x80\x04", b".", b"(", b"R", b"b"


class Made(int):
    """Pickles as a call with arguments, and a state that is given to what comes of it."""

    def __new__(cls, *call):
        return super().__new__(cls)

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


class Attack(torch.nn.Module):
    """A program of TorchScript that writes a file when it is loaded."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @torch.jit.export
    def __getstate__(self):
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path = state[0]
        self.training = state[1]
        self.training = torch.from_file(state[0], True, 4096).numel() > 0  # else it is left out

    def forward(self, x):
        return x


def scripted(made: Path) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Attack(str(made))), out)
    return out.getvalue()


def number(value: int) -> bytes:
    return b"\x8a\x0a" + value.to_bytes(10, "little", signed=True)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def name(module: str, what: str) -> bytes:
    return b"c" + module.encode() + b"\n" + what.encode() + b"\n"


def tuple_of(*items: bytes) -> bytes:
    return MARK + b"".join(items) + b"t"


STORAGE = tuple_of(
    text("storage"), name("torch", "FloatStorage"), text("0"), text("cpu"), number(4)
)


def tensor(size=(2,), stride=(1,), offset=0, storage=STORAGE) -> bytes:
    return (
        name("torch._utils", "_rebuild_tensor_v2")
        + tuple_of(
            storage + b"Q",
            number(offset),
            tuple_of(*map(number, size)),
            tuple_of(*map(number, stride)),
            b"\x89",
            name("collections", "OrderedDict") + b")R",
        )
        + REDUCE
    )


def numbers(code: str, state: bytes | None = None) -> bytes:
    made = name("numpy", "dtype") + tuple_of(text(code), b"\x89", b"\x88") + REDUCE
    return made if state is None else made + state + BUILD


def array(code: bytes, shape: tuple[int, ...], content: bytes) -> bytes:
    return (
        name("numpy._core.multiarray", "_reconstruct")
        + tuple_of(name("numpy", "ndarray"), tuple_of(number(0)), b"C\x01b")
        + REDUCE
        + tuple_of(number(1), tuple_of(*map(number, shape)), code, b"\x89", content)
        + BUILD
    )


def blob(content: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(content)) + content


def programs(made: Path) -> Iterator[tuple[str, bytes]]:
    """Pickles without their beginning and end; whatever they do is in the name."""
    path = text(str(made))
    mkdir = name("os", "mkdir")
    yield "names-a-function", mkdir + tuple_of(path) + REDUCE
    yield "inst", MARK + path + b"ios\nmkdir\n"
    yield "obj", MARK + mkdir + path + b"o"
    yield "newobj", mkdir + tuple_of(path) + b"\x81"
    yield "newobj-ex", mkdir + tuple_of(path) + b"}\x92"
    yield "stack-global", text("os") + text("mkdir") + b"\x93" + tuple_of(path) + REDUCE
    yield "names-by-dots", name("torch", "os.mkdir") + tuple_of(path) + REDUCE
    yield "names-a-number", number(1) + number(2) + b"\x93"
    yield "torch-module", name("torch", "from_file") + tuple_of(path, b"\x88", number(9)) + REDUCE
    yield "torch-jit", name("torch.jit", "load") + tuple_of(path) + REDUCE
    yield "extension", b"\x82\x01"
    yield "persistent", text("elsewhere") + b"Q"
    yield "persistent-text", b"Pelsewhere\n"
    yield "out-of-band", b"\x97"
    yield "call-a-number", number(3) + b")R"
    yield "call-a-dtype", name("torch", "float32") + b")R"
    yield "call-a-class", name("numpy", "ndarray") + tuple_of(number(1 << 40)) + REDUCE
    yield "new-of-tensor", name("torch", "Tensor") + b")\x81"
    yield "arguments-no-tuple", name("collections", "OrderedDict") + b"]R"
    yield "build-function", name("torch", "Size") + b"}" + text("x") + number(1) + b"sb"
    yield (
        "build-slots",
        (name("torch", "Size") + tuple_of(b"N", b"}" + text("x") + b"Ns") + BUILD),
    )
    yield "build-list", b"]}" + BUILD
    yield "build-tensor", tensor() + tuple_of(number(1), b"}") + BUILD
    for code in ("O", "V8", "O8", "M8[ns]", "U1000000000", "S4", "i4,O", "(9,)i4", "f16", "p", ""):
        yield f"dtype-{code!r}", array(numbers(code), (2,), blob(bytes(16)))
    fields = b"}" + text("a") + tuple_of(numbers("i8"), number(0)) + b"s"
    for which, state in (
        ("objects", (3, "|", None, ("a",), None, 8, 1, 0)),
        ("flags", (3, "<", None, None, None, -1, -1, 63)),
        ("size", (3, "<", None, None, None, 1 << 40, 1, 0)),
        ("version", (9, "<", None, None, None, -1, -1, 0)),
        ("short", (3, "<")),
        ("order", (3, "?", None, None, None, -1, -1, 0)),
    ):
        written = pickle.dumps(state, 2)[2:-1]
        if which == "objects":  # fields, of which the flag says that they are no objects
            written = tuple_of(
                number(3),
                text("|"),
                b"N",
                tuple_of(text("a")),
                fields,
                number(8),
                number(1),
                number(0),
            )
        yield f"dtype-state-{which}", array(numbers("i8", written), (1,), blob(bytes(8)))
    eight = numbers("i8")
    yield "array-short", array(eight, (3,), blob(bytes(8)))
    yield "array-huge", array(eight, (1 << 60,), blob(bytes(8)))
    yield "array-overflow", array(eight, (1 << 40, 1 << 40), blob(bytes(8)))
    yield "array-negative", array(eight, (-1,), blob(bytes(8)))
    yield "array-deep", array(eight, (1,) * 40, blob(bytes(8)))
    yield "array-of-list", array(eight, (1,), b"](N" + b"e")
    yield "array-of-bool-2", array(numbers("b1"), (2,), blob(b"\x01\x02"))
    yield "array-unfinished", array(eight, (1,), blob(bytes(8))).rpartition(MARK)[0][:110]
    begun = (
        name("numpy._core.multiarray", "_reconstruct")
        + tuple_of(name("numpy", "ndarray"), tuple_of(number(0)), b"C\x01b")
        + REDUCE
    )
    yield "array-begun", b"](" + begun + b"e"
    yield "array-begun-long", begun.replace(number(0), number(1 << 50))
    yield "dtype-alone", eight
    whole = array(eight, (1,), blob(bytes(8)))
    ordered = name("collections", "OrderedDict")
    yield "ordered-of-array", ordered + tuple_of(whole) + REDUCE
    yield "ordered-of-arrays", ordered + tuple_of(b"](" + whole + whole + b"e") + REDUCE
    yield "ordered-of-text", ordered + tuple_of(text("ab")) + REDUCE
    yield "ordered-of-triples", ordered + tuple_of(b"](" + tuple_of(b"N", b"N", b"N") + b"e") + b"R"
    yield "set-of-array", name("builtins", "set") + tuple_of(whole) + REDUCE
    yield "bytearray-of-number", name("builtins", "bytearray") + tuple_of(number(1 << 45)) + REDUCE
    yield "complex-of-text", name("builtins", "complex") + tuple_of(text("1"), text("1")) + REDUCE
    yield "encode-punycode", name("_codecs", "encode") + tuple_of(text("a"), text("idna")) + REDUCE
    yield "size-of-text", name("torch", "Size") + tuple_of(text("a")) + REDUCE
    yield "size-negative", name("torch", "Size") + tuple_of(tuple_of(number(-1))) + REDUCE
    yield "key-array", b"}" + whole + b"Ns"
    yield "key-deep", b"})" + b"\x85" * 100_000 + b"Ns"
    yield "in-set-deep", b"\x8f()" + b"\x85" * 100_000 + b"\x90"
    yield "deep-list", b"]" * 100_000 + b"a" * 99_999
    yield "deep-tuple", b")" + b"\x85" * 100_000
    yield "holds-itself", b"]q\x00h\x00a"
    levels = (b"](" + (b"h" + bytes([i])) * 10 + b"eq" + bytes([i + 1]) for i in range(30))
    yield "laughs", b"](NNeq\x00" + b"".join(levels) + b"0" * 31 + b"h\x1e"
    yield (
        "laughs-of-tuples",
        b")"
        b"\x94h\x00h\x00\x86"
        + b"".join(
            b"\x94h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" + b"" for i in range(1, 60)
        ),
    )
    yield "laughs-in-lists", b"](NNe" + b"2\x86" * 60
    yield "memo-huge", b"Nr\xff\xff\xff\xffh\x00"
    yield "memo-missing", b"h\x07"
    yield "underflow", b"0"
    yield "mark-missing", b"Nt"
    yield "marks-left", b"((N"
    yield "two-values", b"NN"
    yield "no-value", b""
    yield "odd-items", b"}(NNNu"
    yield "append-to-tensor", tensor() + b"Na"
    for code, width in ((b"X", 4), (b"B", 4), (b"\x8d", 8), (b"\x8e", 8), (b"\x96", 8), (b"T", 4)):
        yield f"long-{code!r}", code + b"\xff" * (width - 1) + b"\x7f"
    yield "long-integer", b"\x8b\xff\xff\xff\x7f"
    yield "negative-integer", b"\x8b\xff\xff\xff\xff"
    yield "long-frame-protocol-9", b"\x80\x09N"
    yield "no-opcode", b"\xff"
    for which, made_tensor in (
        ("size", tensor((5,))),
        ("size-huge", tensor((1 << 40,))),
        ("size-overflow", tensor((1 << 33, 1 << 33), (0, 0))),
        ("size-too-large", tensor((1 << 70,))),
        ("offset", tensor((2,), (1,), 3)),
        ("offset-huge", tensor((1,), (1,), 1 << 61)),
        ("offset-negative", tensor((1,), (1,), -1)),
        ("stride-negative", tensor((2,), (-1,), 1)),
        ("stride", tensor((2,), (4,))),
        ("stride-huge", tensor((2,), (1 << 61,))),
        ("stride-overflow", tensor((4, 4), (1 << 62, 1 << 62))),
        ("size-negative", tensor((-2,))),
        ("expanded", tensor((1 << 40,), (0,))),
        ("sizes-and-strides", tensor((2, 2), (1,))),
        ("storage-none", tensor(storage=b"N0" + STORAGE).replace(b"Q", b"", 1)),
        ("storage-key", tensor(storage=STORAGE.replace(text("0"), text("7")))),
        ("storage-path", tensor(storage=STORAGE.replace(text("0"), text("../version")))),
        ("storage-size", tensor(storage=STORAGE.replace(number(4), number(5)))),
        ("storage-size-huge", tensor(storage=STORAGE.replace(number(4), number(1 << 60)))),
        ("storage-type", tensor(storage=STORAGE.replace(b"FloatStorage", b"QInt8Storage"))),
        ("storage-alone", STORAGE + b"Q"),
        ("not-a-storage", tensor(storage=STORAGE + b"0N").replace(b"Q", b"", 1)),
    ):
        yield f"tensor-{which}", made_tensor
    nested = name("torch.storage", "_load_from_bytes")
    yield "nested-script", nested + tuple_of(blob(scripted(made))) + REDUCE
    inner = PROTO + nested + tuple_of(blob(b"x")) + REDUCE + STOP
    yield "nested-nested", nested + tuple_of(blob(old(inner[2:-1], []))) + REDUCE
    yield "nested-code", nested + tuple_of(blob(old(mkdir + tuple_of(path) + REDUCE, []))) + REDUCE
    yield "nested-no-storage", nested + tuple_of(blob(old(b"N", []))) + REDUCE
    yield "nested-number", nested + tuple_of(number(1)) + REDUCE
    copied = blob(bytes(10_000))
    again = name("builtins", "bytearray") + b"q\x01" + copied + b"q\x020"
    call = b"h\x01h\x02\x85R"
    yield "copies", b"0](" + again.replace(b"q\x010", b"q\x01") + b"" + call * 5000 + b"e"


def old(program: bytes, storages: list[tuple[str, bytes]], size: int | None = None) -> bytes:
    """A file of torch before its version 1.6 around a pickle."""
    keys = [key for key, _ in storages]
    parts = [pickle.dumps(0x1950A86A20F9469CFC6C, 2), pickle.dumps(1001, 2)]
    parts += [pickle.dumps({"protocol_version": 1001, "little_endian": True}, 2)]
    parts += [PROTO + program + STOP, pickle.dumps(keys, 2)]
    for _, content in storages:
        parts += [struct.pack("<q", len(content) // 4 if size is None else size), content]
    return b"".join(parts)


def archive(program: bytes, storages: list[tuple[str, bytes]], **more: bytes) -> bytes:
    """A file of torch 1.6 or later around a pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        made.writestr("a/data.pkl", PROTO + program + STOP)
        made.writestr("a/version", b"3\n")
        for key, content in storages:
            made.writestr(f"a/data/{key}", content)
        for inside, content in more.items():
            made.writestr(inside, content)
    return out.getvalue()


def overlapping(count: int) -> bytes:
    """A file of torch 1.6 or later in which storages lie over each other."""
    out, size = io.BytesIO(), 1 << 10
    stored = STORAGE.replace(number(4), number(size))
    each = [stored.replace(text("0"), text(str(key))) for key in range(count)]
    with zipfile.ZipFile(out, "w") as made:
        tensors = b"".join(tensor((size,), storage=one) for one in each)
        made.writestr("a/data.pkl", PROTO + b"](" + tensors + b"e" + STOP)
        made.writestr("a/data/0", bytes(4 * size))
        for key in range(1, count):
            entry = copy.copy(made.getinfo("a/data/0"))
            entry.filename = entry.orig_filename = f"a/data/{key}"
            made.filelist.append(entry)
    return out.getvalue()


def archives(made: Path) -> Iterator[tuple[str, bytes]]:
    """Files that are wrong around their pickles."""
    storages = [("0", struct.pack("<4f", 1, 2, 3, 4))]
    good = archive(tensor((4,)), storages)
    yield "script", scripted(made)
    yield "constants", archive(tensor(), storages, **{"a/constants.pkl": b"\x80\x02).", "a/x": b""})
    yield "code", archive(tensor(), storages, **{"a/code/__torch__.py": b"x"})
    yield "two-folders", archive(tensor(), storages, **{"b/data.pkl": b"N."})
    yield "big-endian", archive(tensor(), storages, **{"a/byteorder": b"big"})
    yield "no-storage", archive(tensor(), [])
    yield "short-storage", archive(tensor(), [("0", b"123")])
    yield (
        "bool-2",
        archive(
            tensor(storage=STORAGE.replace(b"FloatStorage", b"BoolStorage")), [("0", b"\1\2\1\1")]
        ),
    )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("a/data.pkl", PROTO + tensor((1 << 26,)) + STOP)
        packed.writestr("a/data/0", bytes(1 << 26))
    yield "compressed", out.getvalue()
    out = io.BytesIO(good)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(out, "a") as twice:
            twice.writestr("a/data.pkl", PROTO + b"N" + STOP)
    yield "twice", out.getvalue()
    yield "zip-without-pickle", archive(b"", []).replace(b"data.pkl", b"data.abc")
    yield "zip-directory-gone", good[:-22]
    yield "zip-offsets", good.replace(struct.pack("<I", good.index(b"PK\1\2")), b"\xff\xff\xff\x7f")
    begin = good.index(b"PK\1\2")
    yield "zip-head", good[: begin + 42] + b"\xff\xff\xff\x0f" + good[begin + 46 :]
    yield "zip-size", good[: begin + 20] + b"\xff\xff\xff\x0f" * 2 + good[begin + 28 :]
    yield "zip-overlap", overlapping(9)
    fine = old(tensor((4,)), storages)
    yield "old-size", old(tensor((4,)), storages, size=1 << 60)
    yield "old-size-negative", old(tensor((4,)), storages, size=-4)
    yield "old-storage-missing", old(tensor((4,)), [])
    yield "old-storage-more", old(tensor((4,)), [*storages, ("1", b"1234")])
    yield "old-storage-twice", old(tensor((4,)), storages * 2)
    yield (
        "old-keys-deep",
        fine.replace(pickle.dumps(["0"], 2), b"\x80\x02](" + b")" + b"\x85" * 100_000 + b"e."),
    )
    yield "old-big-endian", fine.replace(b"\x88", b"\x89", 1)
    yield (
        "old-bool-2",
        old(
            tensor((4,), storage=STORAGE.replace(b"FloatStorage", b"BoolStorage")),
            [("0", b"\1\2\1\1")],
            size=4,
        ),
    )
    huge = STORAGE.replace(number(4), number(1 << 40))
    yield "old-allocates", old(tensor((4,), storage=huge), storages, size=1 << 40)
    yield "tar", b"storages" + bytes(92) + bytes(1024)
    for share in range(1, 16):
        yield f"cut-{share}", good[: len(good) * share // 16]
        yield f"old-cut-{share}", fine[: len(fine) * share // 16]


def write(folder: Path, made: Path) -> None:
    """Write every file; ``made`` is what those that run would make."""
    folder.mkdir()
    storages = [("0", struct.pack("<4f", 1, 2, 3, 4))]
    for which, program in programs(made):
        safe = "".join(c if c.isalnum() or c == "-" else "_" for c in which)
        (folder / f"{safe}.pkl").write_bytes(PROTO + program + STOP)
        if len(program) > 50_000:  # one way of reading is enough
            continue
        (folder / f"{safe}.zip.pt").write_bytes(archive(program, storages))
        (folder / f"{safe}.old.pt").write_bytes(old(program, storages))
    for which, content in archives(made):
        (folder / f"{which}.file.pt").write_bytes(content)


GOOD: dict[str, Any] = {
    "edge": np.arange(6).reshape(3, 2),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "view": torch.arange(10)[2:8:2],
    "bits": torch.tensor([True, False]),
    "plain": [1, "two", (3.0, None), {"set": {4}}, collections.OrderedDict(a=np.float32(1))],
}


def write_mutants(folder: Path, count: int) -> None:
    """Write good files of which a few bytes are others, or are gone, or are there twice."""
    folder.mkdir()
    rng = random.Random(0)
    save: list[tuple[str, Callable[[Any], bytes]]] = []
    for suffix, options in (
        ("zip.pt", {}),
        ("old.pt", {"_use_new_zipfile_serialization": False}),
    ):
        out = io.BytesIO()
        torch.save(GOOD, out, **options)
        save.append((suffix, out.getvalue()))
    save += [("pkl", pickle.dumps(GOOD, protocol)) for protocol in (2, 5)]
    for index in range(count):
        suffix, content = save[index % len(save)]
        mutant = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(mutant))
            kind = rng.randrange(4)
            if kind == 0:
                mutant[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                mutant[at] = rng.choice(b"(.0RbQce\x00\xff\x85\x93\x94hqu")
            elif kind == 2:
                del mutant[at : at + rng.randint(1, 9)]
            else:
                mutant[at:at] = mutant[at : at + rng.randint(1, 30)]
        (folder / f"{index}.{suffix}").write_bytes(mutant)


def read(folder: Path) -> dict[str, str]:
    """What became of each file: ``"refused"``, ``"read"``, or an error that is none of ours."""
    from pyg_scale.files.plain_pickle import iterate_pickles, load_pickle, load_plain

    class Foreign:
        """What is made of other programs' classes."""

    def stand_in(module: str, name: str) -> Any:
        return torch.Tensor if name.endswith("Book") else Foreign

    found = {}
    for file in sorted(folder.iterdir()):
        ways: list[Callable[[Path], Any]] = [load_pickle, lambda file: list(iterate_pickles(file))]
        if file.suffix == ".pt":
            ways = [load_plain, lambda file: load_plain(file, mmap=True)]
            ways.append(lambda file: load_plain(file, stand_in=stand_in))
        for number, way in enumerate(ways):
            try:
                touch(way(file))
                outcome = "read"
            except ValueError as error:
                outcome = "refused" if str(file) in str(error) else f"names no file: {error}"
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            found[f"{file.name} {number}"] = outcome
    return found


def touch(value: Any) -> None:
    """Reads every byte of a value, so that a sanitizer sees where it lies."""
    if isinstance(value, torch.Tensor):
        value.clone()
    elif isinstance(value, np.ndarray):
        value.copy()
    elif isinstance(value, dict):
        for each in value.values():
            touch(each)
    elif isinstance(value, list | tuple):
        for each in value:
            touch(each)


if __name__ == "__main__":
    print(json.dumps(read(Path(sys.argv[1]))))
