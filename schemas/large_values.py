"""Large values: their settings, and the marks that stand in events instead of them. Pure.

    claim check   {"__slotbridge_claim_check":{"uri":"s3://…/<sha256>","size_bytes":N,"sha256":"…"}}
    truncated     <the first bytes>[__slotbridge_truncated:{"size_bytes":N,"sha256":"…"}]

The first is the whole value of the column, the second stands at its end; in a bytea both are bytes.
No other value of such a column looks like these: one that begins like a claim check is always made
one, and one that ends like a truncated one gets a mark of its own, whose size says that nothing was
cut. Whoever writes rows can put both into other columns.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

_CLAIM: Final = "__slotbridge_claim_check"
_TRUNCATED: Final = "__slotbridge_truncated"
_BEGINS_AS_CLAIM: Final = re.compile(rb'\s*\{\s*"' + _CLAIM.encode() + rb'"')
_MARK: Final = re.compile(
    rb"\[" + _TRUNCATED.encode() + rb':\{"size_bytes":(\d{1,10}),"sha256":"([0-9a-f]{64})"\}\]\Z'
)
_SHA256: Final = re.compile("[0-9a-f]{64}")
_MARK_BYTES_MAX: Final = 160
_TYPES: Final = frozenset({"text", "varchar", "bpchar", "bytea", "json", "jsonb", "xml"})


class LargeValueSettings(BaseModel):
    """The limit of a column: its larger values are stored elsewhere, or cut."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    claim_check_bytes: int | None = Field(None, ge=0, le=2**30)
    """A value with more bytes is stored under `claim_check.uri`; the event refers to it."""
    truncate_bytes: int | None = Field(None, ge=0, le=2**30)
    """A value with more bytes is cut after as many whole characters as fit, and marked as cut."""

    @model_validator(mode="after")
    def _one(self) -> "LargeValueSettings":
        if (self.claim_check_bytes is None) == (self.truncate_bytes is None):
            raise ValueError("needs exactly one of claim_check_bytes, truncate_bytes")
        return self


class LargeValueRule(NamedTuple):
    """How a column's large values are published. `named`: by its whole name, without `*`."""

    settings: LargeValueSettings
    named: bool


class ClaimCheckSettings(BaseModel):
    """The object storage for large values (docs/guides/large-values.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    uri: str = Field(pattern=r"^(s3://[a-z0-9][a-z0-9.-]{2,62}(/[^\s/]+)*|file:///\S+)/?$")
    """Where objects are stored: `s3://bucket/prefix` (needs the extra `s3`), or `file:///folder` on
    a disk that all readers share; the folder must exist."""
    endpoint_url: str | None = Field(None, pattern=r"^https?://[^\s@,]+$")
    """URL of an S3 service other than AWS; its buckets are addressed by path."""
    region: str = ""
    """Region of the bucket; empty: as AWS's own tools find it."""
    access_key_id: str = ""
    """Access key; empty: as AWS's own tools find it (environment, profile, role of pod or
    machine)."""
    secret_access_key: SecretStr = SecretStr("")
    """Secret of the access key; keep it in the environment
    (SLOTBRIDGE_CLAIM_CHECK__SECRET_ACCESS_KEY)."""
    ca_file: Path | None = None
    """CA certificates that verify the service's certificate (PEM); unset: those of botocore."""
    deadline_ms: int = Field(30_000, ge=1_000, le=60_000)
    """How long a session waits for the storage to take an object. After that the session ends, and
    the next one waits until the storage answers again."""
    memory_bytes_max: int = Field(64 * 2**20, ge=2**20, le=2**34)
    """Bytes of values that wait in memory for the storage; more are not encoded meanwhile. A single
    value may be larger."""
    connections: int = Field(8, ge=1, le=64)
    """How many objects are stored at a time."""

    @model_validator(mode="after")
    def _whole(self) -> "ClaimCheckSettings":
        if bool(self.access_key_id) != bool(self.secret_access_key.get_secret_value()):
            raise ValueError("access_key_id and secret_access_key go together")
        return self


class Reference(NamedTuple):
    """A stored object, which holds a value that an event does not."""

    uri: str
    size_bytes: int
    sha256: str


class Truncation(NamedTuple):
    """A value that was cut: the bytes that are left of it, and what the whole was."""

    kept: bytes
    size_bytes: int
    sha256: str


def may_be_large(type_name: str) -> bool:
    """Tell whether values of a type may be published otherwise; types with a schema may be any."""
    return type_name in _TYPES or "." in type_name


def sha256(data: bytes) -> str:
    """Return the SHA-256 of `data` in hexadecimal: the name of its object."""
    return hashlib.sha256(data).hexdigest()


def reference_text(reference: Reference) -> bytes:
    """Return what stands in an event for a stored value."""
    return json.dumps({_CLAIM: reference._asdict()}, separators=(",", ":")).encode()


def begins_as_claim(data: bytes) -> bool:
    """Tell whether a reader could take a value for a claim check."""
    return _BEGINS_AS_CLAIM.match(data) is not None


def ends_as_truncated(data: bytes) -> bool:
    """Tell whether a reader could take a value for one that was cut."""
    return _MARK.search(data[-_MARK_BYTES_MAX:]) is not None


def truncated(kept: bytes, whole: bytes) -> bytes:
    """Return what stands in an event for `whole`, of which it has `kept`."""
    details = json.dumps({"size_bytes": len(whole), "sha256": sha256(whole)}, separators=(",", ":"))
    return kept + f"[{_TRUNCATED}:{details}]".encode()


def reference_of(value: bytes, *, prefix: str) -> Reference | None:
    """Return the stored object that a column's value refers to, None for a value of its own.

    `prefix`: the setting `claim_check.uri`. What names an object elsewhere is a value of its own:
    whoever writes rows has put it there.
    """
    if not begins_as_claim(value):
        return None
    try:
        claim = json.loads(value)[_CLAIM]
        found = Reference(**claim)
    except (ValueError, TypeError, RecursionError):
        return None
    if type(found.size_bytes) is not int or found.size_bytes < 0:
        return None
    if not isinstance(found.sha256, str) or not _SHA256.fullmatch(found.sha256):
        return None
    return found if found.uri == f"{prefix.rstrip('/')}/{found.sha256}" else None


def truncation_of(value: bytes) -> Truncation | None:
    """Return what a column's value says about the value that was cut, None for a whole one.

    Where `size_bytes` is the length of `kept`, nothing was cut: the value itself ended as a mark.
    """
    found = _MARK.search(value)
    if found is None:
        return None
    return Truncation(value[: found.start()], int(found[1]), found[2].decode())
