"""What is said of a record that is not an event: pure."""

import base64

import pytest

from schemas.errors import BadInput
from spark_consumers.epochs.topic_summary import TopicSummary, registry_id


def head(data: bytes) -> str:
    """How the text begins that is made of a record that is no text."""
    return base64.b64encode(data).decode()[:8]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (head(b"\0\0\0\0\4\2x"), 4),
        (head(b"\0\x7f\xff\xff\xff\2x"), 2**31 - 1),
        (head(b"\1\0\0\0\4\2x"), None),
        (head(b"\0\0"), None),
        ('{"op":"c', None),
        ("no JSON", None),
        ("", None),
    ],
)
def test_a_record_of_a_schema_registry_is_told_by_its_beginning(
    text: str, number: int | None
) -> None:
    assert registry_id(text) == number
    summary = TopicSummary("p.public.t", refused=(1, 7), refused_head=text)
    with pytest.raises(BadInput, match="partition 1, offset 7") as raised:
        summary.require_events()
    named = "registry.url" in raised.value.hint and "kafka.value_format" in raised.value.hint
    assert named == (number is not None)


def test_events_alone_are_no_error() -> None:
    TopicSummary("p.public.t").require_events()
