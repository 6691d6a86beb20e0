"""Docstrings of this package as Markdown: their examples in fences, and "`option`: what it does." as lists."""

import ast
import re
from typing import Any

import griffe

OPTIONS = r"`\w+`(?: `\[[^`]*\]`)?"
HEADING = re.compile(rf"(?:(?<=\. )|(?<=\A))({OPTIONS}(?:(?:, | and ){OPTIONS})*(?: and further keywords)?): ")


class Markdown(griffe.Extension):
    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        for parameter in cls.parameters:
            if _is_option(parameter.default):
                parameter.default = parameter.default.arguments[0]

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """An option of a mechanism, `option(default, help)`, is shown with its default and described by its help."""
        if _is_option(attr.value):
            default, text = attr.value.arguments
            attr.value = default
            attr.docstring = griffe.Docstring(ast.literal_eval(str(text)), parent=attr)

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def _is_option(value: Any) -> bool:
    return isinstance(value, griffe.ExprCall) and str(value.function) == "option"


def to_markdown(docstring: str) -> str:
    return "\n\n".join(_paragraph(paragraph) for paragraph in docstring.split("\n\n"))


def _paragraph(text: str) -> str:
    if text.startswith(">>>"):
        return f"```pycon\n{text}\n```"
    if text.startswith((" ", "- ")):
        return text
    flat = " ".join(text.split())
    headings = list(HEADING.finditer(flat))
    if not headings:
        return text
    ends = [*(heading.start() for heading in headings[1:]), len(flat)]
    items = [
        f"- {heading[1]}: {flat[heading.end() : end].strip()}" for heading, end in zip(headings, ends, strict=True)
    ]
    return "\n".join([flat[: headings[0].start()].strip(), "", *items]).strip()
