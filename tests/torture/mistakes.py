"""The list of deliberate mistakes, which the modules named `…sabotage` fill."""

from collections.abc import Callable
from typing import Any, Final

_STEPS: Final[dict[str, Callable[[], None]]] = {}
_TELLING: Final[dict[str, str]] = {}
_WAITING: Final[set[str]] = set()
_DRILLS: Final[dict[str, str]] = {}


def commit(name: str) -> None:
    """Make the mistake `name`; none where it is empty."""
    if name:
        _STEPS[name]()


def names() -> list[str]:
    """All of them."""
    return list(_STEPS)


def telling(name: str) -> str:
    """The faults, by commas, in which the mistake shows; "": all are drawn from."""
    return _TELLING.get(name, "")


def drill_of(name: str) -> str:
    """The drill in which the mistake shows; "": it shows among faults that are drawn."""
    return _DRILLS.get(name, "")


def commits_wait(name: str) -> bool:
    """Whether the mistake shows where commits wait for the bridge."""
    return name in _WAITING


def mistake(
    name: str, faults: str = "", *, commits_wait: bool = False, drill: str = ""
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def note(step: Callable[[], None]) -> Callable[[], None]:
        _STEPS[name] = step
        _TELLING[name] = faults
        if drill:
            _DRILLS[name] = drill
        if commits_wait:
            _WAITING.add(name)
        return step

    return note


def put(owner: Any, name: str, value: Any) -> None:
    """In place of what is there; what is not there any more would be no mistake at all."""
    assert hasattr(owner, name), f"{owner} has no {name}"
    setattr(owner, name, value)
