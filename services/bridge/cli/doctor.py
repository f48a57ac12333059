"""The command `slotbridge doctor`: advice with evidence, consequence and the exact change."""

import json as json_module
from typing import Annotated

import typer

from schemas.config_option import ConfigFile
from schemas.errors import ExitCode
from schemas.findings import Finding, Severity
from schemas.settings import load_settings, require
from services.bridge.doctor.facts import Facts
from services.runtime.process import configure_logging, exit_codes


def doctor(
    config: ConfigFile,
    json: Annotated[
        bool, typer.Option("--json", help="Answer with one JSON document on stdout.")
    ] = False,
    sample: Annotated[
        float,
        typer.Option(min=0, help="Count empty transactions for this many seconds; 0: do not."),
    ] = 0.0,
) -> None:
    """Examine the primary, Kafka's topics and the bridge, and advise what to change.

    It changes nothing. Exit codes: 0 nothing to change, at most notes; 1 something to change, or
    Kafka does not answer; 2 the settings are wrong; 10-29 the primary can't be examined.
    """
    from services.bridge.doctor.examination import examine
    from services.bridge.doctor.gather import gather

    configure_logging(json_lines=False)
    with exit_codes():
        settings = load_settings(config)
        source, kafka = require(settings.source, "source"), require(settings.kafka, "kafka")
        facts = gather(source, kafka, settings, sample)
        found = examine(facts)
        if json:
            typer.echo(json_module.dumps(_document(facts, found)))
        else:
            _print(facts, found)
        if facts.kafka is None or any(one.severity is not Severity.NOTE for one in found):
            raise SystemExit(int(ExitCode.CHECK_FAILED))


def _document(facts: Facts, found: list[Finding]) -> dict[str, object]:
    return {
        "slot": facts.slot,
        "findings": [finding.as_json() for finding in found],
        "not_judged": [{"subject": subject, "why": why} for subject, why in facts.unread],
    }


def _print(facts: Facts, found: list[Finding]) -> None:
    for finding in found:
        typer.echo(f"{finding.severity.upper():<10}{finding.check}: {finding.subject}")
        typer.echo(f"          seen     {finding.evidence}")
        typer.echo(f"          so       {finding.consequence}")
        typer.echo(f"          change   {finding.remedy}")
    for subject, why in facts.unread:
        typer.echo(f"NOT JUDGED {subject}: {why}")
    tables, slots = len(facts.primary.tables), len(facts.primary.slots)
    topics = "no topics" if facts.kafka is None else f"{len(facts.kafka.topics)} topics"
    typer.echo(f"{len(found)} findings; {slots} slots, {tables} tables, {topics} examined")
