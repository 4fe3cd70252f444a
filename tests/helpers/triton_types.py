"""Speeds up Triton's interpreter by keeping what it computes again for every operation: types, shapes and patches.

The interpreter spends most of a kernel test's time on them, not on values. Every cached object is constant; no
operation on values changes, and no check whose result is used: tests/kernels/test_triton_types.py.
"""

from __future__ import annotations

import builtins
import inspect
from typing import Any

_MAX_TYPES = 100_000  # far above what tests use: shapes are powers of two


def cache_types() -> None:
    """Install the caches in Triton's interpreter, once per process."""
    from triton.language import core
    from triton.runtime import interpreter

    if getattr(core.block_type, "cached", False):
        return
    _cache_block_types(core)
    _cache_shapes(core)
    _cache_numpy_types(interpreter)
    _skip_equal_broadcasts(interpreter)
    _skip_unused_overflow_checks(interpreter)
    _cache_patches(interpreter)


def _cache_block_types(core: Any) -> None:
    """Create one block_type per element type and shape. Pointers, which have no hash, get a new one each time."""
    create, types = core.block_type.__init__, {}
    unwrap = core._unwrap_if_constexpr

    def plain(shape: Any) -> builtins.tuple[Any, ...]:
        values = shape.values if type(shape) is core.tuple else unwrap(shape)
        return tuple([size.value if type(size) is core.constexpr else size for size in values])

    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        if type(element_ty) is not core.dtype:
            return object.__new__(cls)
        key = (element_ty.name, *plain(shape))
        found = types.get(key)
        if found is None:
            found = object.__new__(cls)
            create(found, element_ty, shape)  # before it is kept: the shape may be refused
            if len(types) < _MAX_TYPES:
                types[key] = found
        return found

    def initialize(self: Any, element_ty: Any, shape: Any) -> None:
        if "shape" not in self.__dict__:
            create(self, element_ty, shape)

    core.block_type.__new__ = new
    core.block_type.__init__ = initialize
    core.block_type.cached = True


def _cache_shapes(core: Any) -> None:
    """Share the shape and number of elements, as constants, of the tensors of one type."""
    create = core.tensor.__init__
    scalar_shape, scalar_numel = core.tuple([]), core.constexpr(1)

    def initialize(self: Any, handle: Any, type: Any) -> None:
        if not type.is_block():
            self.shape, self.numel, self.dtype = scalar_shape, scalar_numel, type.scalar
        elif (constants := type.__dict__.get("constants")) is None:
            create(self, handle, type)
            type.constants = self.shape, self.numel
            return
        else:
            self.shape, self.numel = constants
            self.dtype = type.element_ty
        self.handle = handle
        self.type = type

    core.tensor.__init__ = initialize


def _cache_numpy_types(interpreter: Any) -> None:
    """Look NumPy's type up by name, in a table that is not built anew for each call."""
    compute, by_name = interpreter._get_np_dtype, {}
    block_type = interpreter.tl.block_type

    def get(tt_dtype: Any) -> Any:
        name = tt_dtype.element_ty.name if type(tt_dtype) is block_type else tt_dtype.name
        found = by_name.get(name)
        if found is None:
            found = by_name[name] = compute(tt_dtype)
        return found

    interpreter._get_np_dtype = get


def _skip_equal_broadcasts(interpreter: Any) -> None:
    """Return two blocks of one shape unchanged without comparing their shapes element by element."""
    semantic = interpreter.TritonSemantic
    broadcast = semantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type is rhs.type or (
            lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values
        ):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_impl_value


def _skip_unused_overflow_checks(interpreter: Any) -> None:
    """Do not compute whether an operation overflows where the assertion that uses it is off, as it is by default."""
    semantic = interpreter.TritonSemantic
    check = semantic.binary_op_sanitize_overflow_impl

    def binary_op_sanitize_overflow_impl(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            check(self, lhs, rhs, binary_op)

    semantic.binary_op_sanitize_overflow_impl = binary_op_sanitize_overflow_impl


def _cache_patches(interpreter: Any) -> None:
    """Create the interpreted form of the functions of `triton.language` once, not with every launch."""
    members: dict[Any, list[tuple[str, Any]]] = {}
    is_builtin, semantic = interpreter.tl.core.is_builtin, interpreter.interpreter_semantic

    def interpreted(member: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        return call

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in members:  # first launch: nothing is patched yet
            found = [(name, member) for name, member in inspect.getmembers(package) if is_builtin(member)]
            members[package] = [(name, interpreted(member)) for name, member in found]
        for name, member in members[package]:
            if getattr(package, name) is not member:
                scope.set_attr(package, name, member)

    interpreter._patch_builtin = patch
