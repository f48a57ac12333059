"""Object storage with the API of S3: moto's server, in a process of its own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import boto3

from services.testbed.ports import free_port, is_free
from tests.providers.waiting import eventually, patient

REGION = "us-east-1"
KEY, SECRET = "throw-away", "planted-secret"


class ObjectStorage(NamedTuple):
    """A bucket on a server of this machine."""

    endpoint: str
    bucket: str

    @property
    def options(self) -> dict[str, str]:
        """Properties of an Iceberg catalog whose FileIO is S3FileIO."""
        return {
            "s3.endpoint": self.endpoint,
            "s3.path-style-access": "true",
            "s3.access-key-id": KEY,
            "s3.secret-access-key": SECRET,
            "client.region": REGION,
        }

    def names(self) -> list[str]:
        """The names of all objects."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        return [item["Key"] for page in pages for item in page.get("Contents", [])]

    def put(self, key: str, content: bytes) -> None:
        """Store an object."""
        self.client().put_object(Bucket=self.bucket, Key=key, Body=content)

    def client(self) -> Any:
        """A client of the server."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name=REGION,
        )


@contextlib.contextmanager
def object_storage(log: Path, **environment: str) -> Iterator[ObjectStorage]:
    """Start a server with one bucket; it ends with the block. `environment`: more of its own."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as file:
        whole = {**os.environ, **environment}
        process = subprocess.Popen(command, stdout=file, stderr=file, env=whole)
    try:
        eventually(
            lambda: process.poll() is not None or not is_free(port),
            what="object storage",
            timeout_s=60,
        )
        assert process.poll() is None, log.read_text()
        found = ObjectStorage(f"http://127.0.0.1:{port}", "bucket")
        found.client().create_bucket(Bucket=found.bucket)
        yield found
    finally:
        process.kill()
        process.wait(timeout=patient(30))
