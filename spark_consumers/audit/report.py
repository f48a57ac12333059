"""The result of an audit: of each table, and as a whole. Pure."""

import json
from dataclasses import asdict, dataclass, field

from schemas.errors import ExitCode
from schemas.lsn import format_lsn
from spark_consumers.epochs.audit_result import AuditResult


@dataclass(frozen=True, slots=True)
class Difference:
    """A row that differs: `kind` missing, extra or different; `key` as JSON; `columns` by name."""

    kind: str
    key: str
    columns: tuple[str, ...] = ()

    def line(self) -> str:
        """Return one line for people."""
        return f"{self.kind} {self.key}" + (f": {', '.join(self.columns)}" if self.columns else "")


@dataclass(frozen=True, slots=True)
class TableAudit:
    """The result of auditing one table at the source's `lsn`.

    `reason`: why the table was not judged, "" where it was; `by_design`: no audit can judge it.
    `buckets_unequal` are those whose hashes differ; `buckets_left` of them were not compared by
    value, because `missing`, `extra` and `different` say enough. `columns_left`: column -> why it
    was not compared. `unsent`: why Kafka may lack rows from before the slot, "" if it has all; then
    `missing_left` rows are missing, which is not judged. `incomplete`: since when and why the
    table lacks events, "" if it does not. `busy_s`: seconds that the source worked.
    """

    table: str
    iceberg: str
    lsn: int
    ts_ms: int
    reason: str = ""
    by_design: bool = False
    source_rows: int = 0
    table_rows: int = 0
    buckets: int = 0
    buckets_unequal: int = 0
    buckets_left: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    missing_left: int = 0
    unsent: str = ""
    incomplete: str = ""
    rows: tuple[Difference, ...] = ()
    columns_left: dict[str, str] = field(default_factory=dict)
    busy_s: float = 0.0

    @property
    def differences(self) -> int:
        """How many rows were found that differ."""
        return self.missing + self.extra + self.different

    @property
    def absence(self) -> str:
        """Which missing rows are not judged, and why."""
        return f"{self.missing_left} rows of the source are not in the table: {self.unsent}"

    @property
    def verdict(self) -> str:
        """The result in words: equal, different or not judged."""
        if self.reason:
            return "not judged"
        return "different" if self.differences else "equal"

    def finding(self) -> AuditResult:
        """Return the result as `run` and its metrics keep it."""
        return AuditResult(self.lsn, self.ts_ms, self.differences, self.reason)

    def document(self) -> dict[str, object]:
        """Return the result for JSON."""
        own = asdict(self) | {"lsn": format_lsn(self.lsn), "verdict": self.verdict}
        return own | {"busy_s": round(self.busy_s, 3)}

    def lines(self) -> list[str]:
        """Return the result for people: a line, and one more for each row and column."""
        if self.reason:
            return [f"{self.table}: not judged: {self.reason}"]
        kinds = ("missing", "extra", "different")
        found = [f"{getattr(self, k)} {k}" for k in kinds if getattr(self, k)]
        first = (
            f"{self.table}: {', '.join(found) or 'equal'} at {format_lsn(self.lsn)}"
            f" ({self.source_rows} rows at the source, {self.table_rows} in the table,"
            f" {self.busy_s:.2f} s of the source)"
        )
        rest = [f"  {row.line()}" for row in self.rows]
        if self.incomplete:
            rest.append(f"  {self.incomplete}")
        if self.missing_left:
            rest.append(f"  not judged: {self.absence}")
        if self.buckets_left:
            rest.append(f"  {self.buckets_left} more of {self.buckets} buckets differ")
        rest += [f"  column {n} not judged: {why}" for n, why in self.columns_left.items()]
        return [first, *rest]


def exit_code(tables: list[TableAudit], *, named: bool) -> ExitCode:
    """Return the exit code of an audit.

    Tables that no audit can judge count only where they were `named`; an audit that judged not even
    one table is not judged.
    """
    if any(table.verdict == "different" for table in tables):
        return ExitCode.CHECK_FAILED
    left = [table for table in tables if table.reason and (named or not table.by_design)]
    judged = any(not table.reason for table in tables)
    return ExitCode.OK if judged and not left else ExitCode.NOT_JUDGED


def audit_lines(tables: list[TableAudit], *, as_json: bool) -> list[str]:
    """Return the result of an audit as lines for people, or as one line of JSON."""
    if not as_json:
        return [line for table in tables for line in table.lines()]
    equal = exit_code(tables, named=False) == ExitCode.OK
    return [json.dumps({"equal": equal, "tables": [table.document() for table in tables]})]
