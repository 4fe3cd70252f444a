"""JSON Schema of a config file, which editors use to complete and check TOML."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from thermocline.config.fields import FrozenTable
from thermocline.config.messages import section_class
from thermocline.config.schema import Config


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of `Config`, with the docstring of each field as its description."""
    schema: dict[str, Any] = TypeAdapter(Config).json_schema(schema_generator=_TomlSchema)
    classes = {cls.__name__: cls for cls in _sections(Config)}
    for name, section in {"Config": schema, **schema["$defs"]}.items():
        for key, text in _field_docs(classes[name]).items():
            section["properties"][key]["description"] = text
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema, "title": "Thermocline config"}


class _TomlSchema(GenerateJsonSchema):
    """TOML has no null: "none" is its text. One value is accepted as a list of one."""

    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        return {"anyOf": [self.generate_inner(schema["schema"]), {"const": "none"}]}

    def tuple_schema(self, schema: Any) -> JsonSchemaValue:
        array = super().tuple_schema(schema)
        return {"anyOf": [array, array["items"]]}

    def encode_default(self, dft: Any) -> Any:
        return dict(dft) if isinstance(dft, FrozenTable) else super().encode_default(dft)

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        made = super().default_schema(schema)
        if made.get("default") is None or (isinstance(made["default"], dict) and made["default"]):  # not of a section
            made.pop("default", None)
        return made

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _sections(cls: Any) -> Iterator[Any]:
    """Yield a section class and those of its fields."""
    yield cls
    for kind in typing.get_type_hints(cls, include_extras=True).values():
        if (inner := section_class(kind)) is not None:
            yield from _sections(inner)


def _field_docs(cls: Any) -> dict[str, str]:
    """Return the docstrings under the fields of a class and its bases.

    pydantic's `use_attribute_docstrings` does this at import, which takes a third of the time to load a config, and
    leaves out inherited fields.
    """
    docs = {}
    for base in reversed(cls.__mro__):
        if base is not object:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(tree, ast.ClassDef)
            for field, text in itertools.pairwise(tree.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(doc))):
                        docs[name] = " ".join(doc.split())
    return docs
