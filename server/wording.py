"""What is wrong with a value, in the server's own words: of a message, a form or a setting."""

from __future__ import annotations

import json
from typing import Final

from pydantic_core import ErrorDetails

# By the kinds of pydantic's errors; what is missing here is said in general.
_NEEDED: Final = {
    "string_type": "a string",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "one of {expected}",
    "enum": "one of {expected}",
    "union_tag_invalid": "one of {expected_tags}",
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "more than {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "less than {lt:g}",
    "too_long": "at most {max_length} items",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "extra_forbidden": "no such setting",
}
_MAX_SHOWN_CHARACTERS: Final = 64


def problem_of(error: ErrorDetails, name: str) -> str:
    """Say which value is wrong and what it has to be, as in `port 70000: at most 65535`."""
    context = error.get("ctx", {})
    if error["type"] == "value_error":  # one of our own validators', in its words
        return f"{name}: {context['error']}"
    needed = _NEEDED.get(error["type"], "a value that is not possible here").format(**context)
    value = error["input"]
    if isinstance(value, str | int | float | bool | None):
        name += f" {shorten(json.dumps(value, ensure_ascii=False))}"
    return f"{name}: {needed}"


def shorten(text: str) -> str:
    """Cut a client's text to what an error message has room for."""
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[:_MAX_SHOWN_CHARACTERS] + "..."
