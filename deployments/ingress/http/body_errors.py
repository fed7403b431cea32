"""What is wrong with a body, of what pydantic says: one problem, in the words of the client."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from penstock.workers.request import RequestError


def problems_of(error: ValidationError) -> list[ErrorDetails]:
    """Without what the client sent, which may be long or secret."""
    return error.errors(include_url=False, include_context=False, include_input=False)


def as_request_error(error: ValidationError, root: type[BaseModel]) -> RequestError:
    """The first problem, by the field's name as the client wrote it. `root`: the class of which all
    parts of bodies are."""
    problems = problems_of(error)
    # Of a union, one problem per alternative: that of an object inside, if one was meant, and else
    # all of them.
    top = len(_path(problems[0]["loc"]))
    inside = [each for each in problems if "." in _path(each["loc"])[top:]]
    first = (inside or problems)[0]
    kinds = _names(root)
    if first["type"] == "extra_forbidden":  # the last step is what the client wrote
        kinds -= {str(first["loc"][-1])}
    where = _path(first["loc"], kinds)
    same = [each["msg"] for each in problems if _path(each["loc"], kinds) == where]
    message = " or: ".join(dict.fromkeys(msg.partition(" or instance of")[0] for msg in same))
    code = {"missing": "missing_parameter", "extra_forbidden": "unknown_parameter"}
    if first["type"] == "missing":
        message = "this parameter is required"
    elif first["type"] == "extra_forbidden":
        message = "unknown parameter"
    return RequestError(
        f"{where}: {message}", param=where, code=code.get(first["type"], "invalid_value")
    )


def _path(location: tuple[int | str, ...], kinds: Collection[str] = ()) -> str:
    """messages[0].content for ('messages', 0, 'content', 'list[TextPart]').

    `kinds`: names that are left out. pydantic calls an alternative of a union by its class.
    """
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "int", "bool", "float", *kinds):
            path += f".{step}" if path else step
    return ascii(path)[1:-1][:200]


def _names(root: type[BaseModel]) -> frozenset[str]:
    """Of `root` and of all classes that inherit from it."""
    found = frozenset({root.__name__})
    return found.union(*(_names(each) for each in root.__subclasses__()))
