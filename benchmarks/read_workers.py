"""Process of one reader of benchmarks/read.py: `python read_workers.py NAME FILE THREADS`.

Prints the reader's version, or "missing: ..." if it is not installed. Then, for every line on standard input, reads the
whole file once and prints seconds, processor seconds and the number of rows. Runs in any Python that has the reader.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

NUMBERS = [f"I{i}" for i in range(1, 14)]
CATEGORIES = [f"C{i}" for i in range(1, 27)]
BLOCK = 4 << 20


def ours(path: str, threads: int) -> Callable[[], int]:
    """Parse to labels, offsets and 39 keys per line, 13 of them bucketed numbers; maps the file and keeps no result."""
    from thermocline.core import _core

    identity = (False, 0.0, 1.0)  # log, mean, inverse standard deviation
    columns = [("label", "label", *identity, "none")]
    columns += [("number_key", name, *identity, "log_square") for name in NUMBERS]
    columns += [("key", name, *identity, "none") for name in CATEGORIES]
    parser = _core.TextParser("table", columns=columns)

    def parse(block: memoryview) -> int:
        *_, labels, _, errors, _ = parser.parse(block, False)
        if errors:
            raise ValueError(errors[0])
        return len(labels)

    def blocks() -> Iterator[memoryview]:
        start = 0
        while start < len(text):
            end = len(text) if start + BLOCK >= len(text) else text.rfind(b"\n", start, start + BLOCK) + 1
            yield view[start:end]
            start = end

    def read() -> int:
        if threads == 1:
            return sum(map(parse, blocks()))
        rows, pending = 0, []
        for block in blocks():
            pending.append(pool.submit(parse, block))
            if len(pending) > 2 * threads:
                rows += pending.pop(0).result()
        return rows + sum(future.result() for future in pending)

    with open(path, "rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view, pool = memoryview(text), ThreadPoolExecutor(threads)
    return read


def pandas(path: str, threads: int, engine: str = "c") -> Callable[[], int]:
    """Parse to a DataFrame of an integer, 13 floats (integers with missing values) and 26 strings."""
    import pandas

    types = {"label": "int8", **dict.fromkeys(NUMBERS, "float64"), **dict.fromkeys(CATEGORIES, "str")}
    options: dict[str, Any] = {"sep": "\t", "header": None, "names": list(types), "dtype": types, "engine": engine}
    if engine == "pyarrow":
        import pyarrow

        pyarrow.set_cpu_count(threads)
    return lambda: len(pandas.read_csv(path, **options))


def polars(path: str, threads: int) -> Callable[[], int]:
    """Parse to a DataFrame of 14 integer and 26 string columns; the caller sets POLARS_MAX_THREADS."""
    import polars

    if polars.thread_pool_size() != threads:
        raise ValueError(f"polars has {polars.thread_pool_size()} threads, not {threads}")
    schema: dict[str, Any] = {
        **dict.fromkeys(["label", *NUMBERS], polars.Int64),
        **dict.fromkeys(CATEGORIES, polars.String),
    }
    return lambda: polars.read_csv(path, separator="\t", has_header=False, schema=schema).height


def version(name: str) -> str:
    import importlib.metadata

    if name == "ours":
        import thermocline

        return thermocline.__version__
    return importlib.metadata.version(name.split("-")[0])


def main() -> None:
    name, path, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
    makers: dict[str, Callable[[], Callable[[], int]]] = {
        "ours": lambda: ours(path, threads),
        "pandas": lambda: pandas(path, threads),
        "pandas-pyarrow": lambda: pandas(path, threads, "pyarrow"),
        "polars": lambda: polars(path, threads),
    }
    try:
        read = makers[name]()
    except ImportError as error:
        print(f"missing: {error}", flush=True)
        return
    print(version(name), flush=True)
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        rows = read()
        print(time.perf_counter() - start, time.process_time() - cpu, rows, flush=True)


if __name__ == "__main__":
    main()
