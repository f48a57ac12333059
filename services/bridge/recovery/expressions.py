"""Whether filters and computed columns fit the tables as they are, asked at a start.

New expressions that do not fit are refused. Those of the last progress record have fitted: a table
may have changed since, behind changes that the stream has yet to bring and that they still fit. So
these are told, and judged at the first change with another shape.
"""

from collections.abc import Iterable, Iterator, Mapping

import structlog

from schemas.errors import SettingsError
from services.bridge.events.shaping.tables import Shaping
from services.bridge.pgoutput.messages import Relation
from services.bridge.recovery.placement import EXPRESSIONS

logger = structlog.get_logger(__name__)


def unfit(shaping: Shaping, relations: Iterable[Relation]) -> Iterator[SettingsError]:
    """Yield the error of each relation that an expression does not fit."""
    if not shaping.has_expressions:
        return
    for relation in relations:
        try:
            shaping.check_expressions(relation)
        except SettingsError as error:
            yield error


def require_fitting(
    shaping: Shaping,
    relations: Iterable[Relation],
    then: Mapping[str, str] | None,
    now: Mapping[str, str],
) -> None:
    """Raise SettingsError where a new expression does not fit; warn where a known one does not.

    `then`, `now`: the digests of the last progress record, None without one, and of the settings.
    """
    errors = [*unfit(shaping, relations)]
    if not errors:
        return
    if then is None or then.get(EXPRESSIONS, now[EXPRESSIONS]) != now[EXPRESSIONS]:
        raise errors[0]
    for error in errors:
        logger.warning(
            "an expression does not fit its table any more: the bridge stops at the first change "
            "of the table as it is now",
            expression=error.subject,
            reason=error.message,
            hint=error.hint,
        )
