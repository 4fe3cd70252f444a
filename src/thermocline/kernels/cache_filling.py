"""fill_cache: lets worker processes compile the kernels that Triton's cache lacks (utils/compile_workers.py).

Triton itself computes what a kernel is compiled for, and passes it to a hook before it compiles. The hook keeps it and
declines; the worker gets it, serialized by Triton. So the cache's key is the same in both processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import threading
from typing import Any

import triton

from thermocline.utils.compile_workers import workers

_thread = threading.local()
"""`wanted`: None, or a list for what Triton would compile on this thread, which it then does not."""

_lock = threading.Lock()


def hash_source(function: Any) -> None:
    """Compute the hash of a kernel's source, part of its key in Triton's cache, after the hashes of what it calls.

    Without, the hash differs from process to process: Triton includes the constants of a called function only if that
    one was hashed before, on behalf of another kernel.
    """
    with _lock:
        _hash_source(function)


def _hash_source(function: Any) -> None:
    if not isinstance(function, triton.JITFunction) or function.hash is not None:
        return
    for name in function.fn.__code__.co_names:
        _hash_source(function.fn.__globals__.get(name))
    _ = function.cache_key


def fill_cache(function: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Return when Triton's cache has the kernel of a launch with these arguments, or no worker can compile it."""
    if isinstance(function, triton.JITFunction):
        with contextlib.suppress(Exception):  # of functions that another version of Triton lacks: compiled in place
            _fill_cache(function, grid, args, constants)


def _fill_cache(function: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    with _lock:
        if "_call_hook" not in vars(function):
            function._call_hook = functools.partial(_call_hook, function._call_hook)
    wanted: list[dict[str, Any]] = []
    _thread.wanted = wanted
    try:
        function.warmup(*args, grid=grid, **constants)
    finally:
        _thread.wanted = None
    for options in wanted:
        kernel, task = options["fn"].jit_function, options["compile"]
        target = triton.runtime.driver.active.get_current_target()
        folder = cache_folder(kernel, target, task)
        where = {"module": kernel.module, "name": kernel.__name__, "target": [*dataclasses.astuple(target)]}
        if not is_cached(folder, kernel):
            workers.compile({**where, "data": task["specialization_data"]})
        workers.used_folder(folder.key)


def _call_hook(original: Any, hook: Any, *args: Any, **options: Any) -> Any:
    """Replace the hook of `triton.knobs` while this thread asks what a kernel would be compiled for."""
    wanted: list[dict[str, Any]] | None = getattr(_thread, "wanted", None)

    def keep(**task: Any) -> bool:
        assert wanted is not None
        wanted.append(task)
        return True  # do not compile

    return original(hook if wanted is None else keep, *args, **options)


def cache_folder(kernel: Any, target: Any, task: dict[str, Any]) -> Any:
    """Return the manager of the folder of Triton's cache for a kernel, as `triton.compile` does."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.cache import get_cache_key, get_cache_manager

    source = ASTSource(kernel, task["signature"], task["constants"], task["configs"][0])
    options = json.loads(task["specialization_data"])["options"]
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    backend = make_backend(target)
    key = get_cache_key(source, backend, backend.parse_options(options), get_cache_invalidating_env_vars())
    return get_cache_manager(hashlib.sha256(key.encode()).hexdigest())


def is_cached(folder: Any, kernel: Any) -> bool:
    """Whether a folder of Triton's cache has a kernel: Triton writes the list of its files last."""
    return folder.get_group(f"{kernel.__name__[:150]}.json") is not None
