"""What a person reads when the settings file is wrong."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from schemas.errors import SettingsError
from schemas.problems import _WORDS_FOR_PATTERN, models_in
from schemas.settings import Settings, load_settings

SOURCE = "source: {conninfo: host=a"
WITHOUT_ITS_REGISTRY = "kafka: {bootstrap_servers: b, topic_prefix: p, value_format: avro}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "kafka: {bootstrap_servers: b, topic_prefx: p}",
            "unknown key `kafka.topic_prefx`; `kafka.topic_prefix` is missing."
            " Hint: did you mean `topic_prefix`?",
        ),
        (f"{SOURCE}, slot: SlotBridge}}", "`source.slot` must be 1 to 40 lower-case letters"),
        ("kafka: {bootstrap_servers: b, topic_prefix: a/b}", "letters, digits, dots"),
        (
            "bridge: {commit_interval_ms: 1s}",
            "`bridge.commit_interval_ms` must be a whole number of milliseconds, without a unit",
        ),
        ("bridge: {http_port: web}", "`bridge.http_port` must be a whole number, such as"),
        ("bridge: {http_port: 70000}", "`bridge.http_port` must be at most 65535"),
        ("bridge: {tombstones: perhaps}", "`bridge.tombstones` must be true or false"),
        ("bridge: {on_refused: ignore}", "`bridge.on_refused` must be 'stop' or 'dead_letter'"),
        ("bridge: [1]", "`bridge` must be a mapping"),
        ("bridge: {control_url: bridge}", "must be http://HOST:PORT or https://HOST:PORT"),
        (f"{SOURCE}, tables: public.t}}", "`source.tables` must be a list"),
        (f"{SOURCE}, slot: 7}}", "`source.slot` must be text; put it in quotes"),
        (f"{SOURCE}, tables: [t]}}", "is wrong: 't' is not of the form schema.table"),
        ("source: {conninfo: ' '}", "`source.conninfo` is wrong: it is empty"),
        ("failover: {nodes: {}}", "`failover.nodes` must have at least one entry"),
        ("failover: {nodes: {a: x}, machines: {a: {stopp: x}}}", "did you mean `stop`?"),
        ("tables: {warehouse: /w, driver_memory: much}", "with m or g behind it"),
        ("wharehouse: 1", "unknown key `wharehouse`"),
        (WITHOUT_ITS_REGISTRY, "read settings: the file is wrong: "),
        (
            f"{SOURCE}, slott: a}}\nkafka: {{topic_prefx: p}}",
            "Hint: did you mean `slot`? did you mean `topic_prefix`?",
        ),
        ("source:\n\tslot: a", "a missing colon"),
        ('source: {conninfo: "host=a\\ud800"}', "`source` has a text with a NUL, or with half"),
        ('bridge: {token_file: "/a\\0"}', "`bridge` has a text with a NUL, or with half"),
        (f"source: {'[' * 5000}", "is not YAML"),
    ],
)
def test_a_wrong_file_is_told_in_plain_words(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as refused:
        load_settings(path)
    told = str(refused.value)
    assert expected in told
    assert "Input should" not in told
    assert "{1," not in told, "a regular expression is not for people"


def test_a_value_is_never_repeated(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for text in (
        "source: {conninfo: [s3cret]}\nbridge: {token: [s3cret]}",
        "tables: {warehouse: 'https://u:s3cret@host/w'}",
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(SettingsError) as refused:
            load_settings(path)
        assert "s3cret" not in str(refused.value)


def test_every_pattern_of_the_settings_has_words() -> None:
    patterns = set()
    waiting: list[type[BaseModel]] = [Settings]
    while waiting:
        for field in waiting.pop().model_fields.values():
            waiting.extend(models_in(field.annotation))
            patterns |= {m.pattern for m in field.metadata if getattr(m, "pattern", None)}
    assert patterns <= set(_WORDS_FOR_PATTERN)
    for pattern in _WORDS_FOR_PATTERN:
        re.compile(pattern)
