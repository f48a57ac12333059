"""The command `slotbridge preflight`: what a start would do or refuse, and what to change."""

import json as json_module
from collections import Counter
from typing import Annotated

import typer

from schemas.config_option import ConfigFile
from schemas.errors import ExitCode
from schemas.findings import Finding, Severity
from schemas.settings import load_settings, require
from services.bridge.preflight.finding import ANSWERS, START
from services.runtime.process import configure_logging, exit_codes


def preflight(
    config: ConfigFile,
    json: Annotated[
        bool, typer.Option("--json", help="Answer with one JSON document on stdout.")
    ] = False,
    sample: Annotated[
        float,
        typer.Option(min=0, help="Count empty transactions for this many seconds; 0: do not."),
    ] = 0.0,
) -> None:
    """Connect to everything that the settings name; say what a start does, and what to change.

    It changes nothing, leaves nothing behind, and may run beside the bridge. Exit codes: 0 nothing
    to change, at most notes; 1 something to change, or does not answer; 2 the settings are wrong.
    """
    from services.bridge.preflight.preflight import look

    configure_logging(json_lines=False)
    with exit_codes():
        settings = load_settings(config)
        source, kafka = require(settings.source, "source"), require(settings.kafka, "kafka")
        findings = look(settings, source, kafka, sample).findings
        if json:
            typer.echo(json_module.dumps(_document(source.slot, findings)))
        else:
            _print(findings)
        if any(one.wrong for one in findings):
            raise SystemExit(int(ExitCode.CHECK_FAILED))


def _refusals(findings: list[Finding]) -> list[Finding]:
    return [one for one in findings if one.group == START and one.wrong]


def _document(slot: str, findings: list[Finding]) -> dict[str, object]:
    """Return the findings as JSON: those to act on, what was not judged, and the start."""
    advised = (Severity.OK, Severity.NOT_JUDGED)
    fine = [one for one in findings if one.ok]
    return {
        "slot": slot,
        "findings": [one.as_json() for one in findings if one.severity not in advised],
        "not_judged": [
            {"subject": one.subject, "why": one.evidence}
            for one in findings
            if one.severity is Severity.NOT_JUDGED
        ],
        "start": {
            "refused_by": [one.check for one in _refusals(findings)],
            "would": [
                {"subject": one.subject, "what": one.evidence} for one in fine if one.group == START
            ],
        },
        "answers": [one.subject for one in fine if one.group == ANSWERS],
    }


def _print(findings: list[Finding]) -> None:
    """Print each finding, whether a start is refused, and counts by severity."""
    for one in findings:
        if one.severity is Severity.NOT_JUDGED:
            typer.echo(f"NOT JUDGED {one.subject}: {one.evidence}")
        elif one.ok:
            word = "START     " if one.group == START else "ANSWERS   "
            typer.echo(f"{word}{one.subject}{': ' if one.evidence else ''}{one.evidence}")
        else:
            typer.echo(f"{one.severity.upper():<10}{one.check}: {one.subject}")
            typer.echo(f"          seen     {one.evidence}")
            typer.echo(f"          so       {one.consequence}")
            typer.echo(f"          change   {one.remedy}")
    count = Counter(one.severity for one in findings)
    refusals = len(_refusals(findings))
    verdict = (
        f"is refused: {refusals} of these" if refusals else "is not refused by what was judged"
    )
    typer.echo(
        f"a start {verdict}; {count[Severity.CRITICAL]} critical, "
        f"{count[Severity.WARNING]} warnings, {count[Severity.NOTE]} notes, "
        f"{count[Severity.NOT_JUDGED]} not judged"
    )
