"""`section`: the decorator of config sections, frozen pydantic dataclasses whose errors are one line each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from thermocline.config.fields import native
from thermocline.config.messages import first_problem
from thermocline.errors import ConfigError

T = TypeVar("T")

SETTINGS = ConfigDict(extra="forbid", strict=True)
"""Unknown keys are errors, and values are not converted between types: the text "3" is no number."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
def section(name: str) -> Callable[[type[T]], type[T]]:
    """Make a class a config section; `name` is its dotted name, which errors of its constructor have."""

    def decorate(cls: type[T]) -> type[T]:
        made: Any = dataclass(frozen=True, slots=True, kw_only=True, config=SETTINGS)(cls)
        validate = made.__init__

        @functools.wraps(validate)
        def __init__(self: T, **values: Any) -> None:
            try:
                validate(self, **{key: native(value) for key, value in values.items()})
            except ValidationError as error:
                raise ConfigError(first_problem(error, type(self), name, repr).text) from None

        made.__init__ = __init__
        return made  # type: ignore[no-any-return]

    return decorate
