"""What came with PostgreSQL 19 (`make postgres-19`): tables that a publication leaves out."""

import pytest

from schemas.settings import SourceSettings
from schemas.shaping import ShapingSettings
from services.bridge.source.publication_drift import publication_differences
from services.bridge.source.publication_reader import read_publication
from tests.conftest import NewPair
from tests.providers.databases import connect

pytestmark = [pytest.mark.since_19, pytest.mark.usefixtures("servers")]


def test_a_wanted_table_that_the_publication_leaves_out_is_a_difference(new_pair: NewPair) -> None:
    trio = new_pair()
    source = SourceSettings(
        conninfo=trio.primary.conninfo(trio.dbname),
        publication="p",
        tables=["public.t", "public.u"],
    )
    with connect(trio.primary, trio.dbname) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        connection.execute("CREATE TABLE u (id int) PARTITION BY RANGE (id)")
        connection.execute("CREATE TABLE u1 PARTITION OF u FOR VALUES FROM (0) TO (9)")
        connection.execute("CREATE PUBLICATION p FOR ALL TABLES EXCEPT (TABLE u)")
        seen = read_publication(connection, source)
        assert seen is not None
        assert seen.members.excepted == {("public", "u"), ("public", "u1")}
        lacks, _more = publication_differences(source, ShapingSettings(), "bank", seen)
        assert lacks.name == "publication-lacks-tables"
        assert "lists public.u, which it does not have" in lacks.evidence
        connection.execute("ALTER PUBLICATION p SET ALL TABLES")
        seen = read_publication(connection, source)
        assert seen is not None
        (only,) = publication_differences(source, ShapingSettings(), "bank", seen)
        assert only.name == "publication-has-more-tables"
