"""Connection strings: only host, hostaddr and port change, whatever quoting they came with."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from schemas.errors import SettingsError
from services.failover.model import statements
from services.failover.model.conninfo import MASK, SECRETS, Address, Conninfo, is_private
from services.failover.model.destination import Destination, without_mark
from services.failover.observe.server_link import parse_conninfo, with_service
from tests.promises.failover.views import subscription

KEYWORDS = ("user", "password", "dbname", "application_name", "sslmode", "options", "passfile")
values = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12
) | st.sampled_from(["it's", "a b", "back\\slash", "'", "\\'", "=", " ", "host=evil", "\n"])
conninfos = st.dictionaries(st.sampled_from(KEYWORDS), values, max_size=5)
places = st.fixed_dictionaries(
    {},
    optional={
        "host": st.sampled_from(["old", "old,older", "/run/pg sock", "::1"]),
        "hostaddr": st.sampled_from(["10.0.0.1"]),
        "port": st.sampled_from(["5432", "1,2"]),
    },
)
NEW = Address("new.example", "", "6000")


@given(conninfos, places)
def test_only_the_address_changes_and_libpq_reads_the_same(
    rest: dict[str, str], place: dict[str, str]
) -> None:
    original = parse_conninfo(make_conninfo(**rest, **place), subject="test")
    moved = conninfo_to_dict(original.at(NEW).text)
    assert moved == {**rest, "host": "new.example", "port": "6000"}
    assert conninfo_to_dict(original.text) == {**rest, **place}
    assert original.at(NEW).leads_to({("new.example", "6000")})


@given(conninfos)
def test_secrets_are_shown_nowhere_but_in_the_text_itself(rest: dict[str, str]) -> None:
    secret = "Zq9#secret"
    conninfo = Conninfo.of({**rest, "password": secret, "sslpassword": secret})
    shown = " ".join(
        statements.connection(subscription("s", conninfo=conninfo), conninfo, "", masked=True)
    )
    assert secret in conninfo.text
    assert secret not in conninfo.masked + repr(conninfo) + shown
    assert conninfo.masked.count(MASK) >= 2


def test_every_keyword_that_libpq_hides_is_a_secret() -> None:
    from psycopg.pq import Conninfo as Libpq

    hidden = {o.keyword.decode() for o in Libpq.get_defaults() if o.dispchar == b"*"}
    assert hidden <= SECRETS


def test_a_uri_with_escapes_keeps_its_password_and_options() -> None:
    original = parse_conninfo(
        "postgresql://u:p%40s%27s@[::1]:5433/my%20db?sslmode=require&options=-c%20x%3Dy",
        subject="test",
    )
    assert conninfo_to_dict(original.at(NEW).text) == {
        "user": "u",
        "password": "p@s's",
        "host": "new.example",
        "port": "6000",
        "dbname": "my db",
        "sslmode": "require",
        "options": "-c x=y",
    }


@pytest.mark.parametrize(
    ("text", "leads", "names"),
    [
        ("host=new.example port=6000", True, True),
        ("host=new.example", False, False),
        ("hostaddr=10.0.0.2 host=cert.name port=6000", True, True),
        ("host=old,new.example port=5432,6000", False, True),
        ("host=old,new.example port=5432,6000 target_session_attrs=read-write", True, True),
        ("host=old,new.example port=6000 target_session_attrs=primary", True, True),
        ("host=old,new.example port=6000 target_session_attrs=any", False, True),
    ],
)
def test_where_a_conninfo_leads(text: str, leads: bool, names: bool) -> None:
    endpoints = {("new.example", "6000"), ("10.0.0.2", "6000")}
    conninfo = parse_conninfo(text, subject="test")
    assert conninfo.leads_to(endpoints) is leads
    assert conninfo.names(endpoints) is names


def test_a_service_that_only_its_own_machine_can_read_leads_nowhere_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without host and port it would look like the server at the default address."""
    here = parse_conninfo("user=postgres", subject="a").endpoints[0]
    for text in ("service=shard2", "service=shard2 port=5432", "service=shard2 host=new.example"):
        foreign = parse_conninfo(text, subject="sub/s1")
        assert not foreign.names(here)
        assert not foreign.names({("new.example", "5432")})
        assert str(foreign.address) == "service=shard2:5432"
        assert not is_private(foreign.address)
    assert parse_conninfo("service=x host=h port=1", subject="a").names({("h", "1")})
    services = tmp_path / "services.conf"
    services.write_text("[a]\nuser=postgres\n[b]\nhost=new.example\n")
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    ours = {n: parse_conninfo(with_service(f"service={n}", subject=n), subject=n) for n in "ab"}
    assert ours["b"].names({("new.example", "5432")})
    assert ours["a"].value("host").startswith("/")
    moved = parse_conninfo("service=x host=old hostaddr=10.0.0.1", subject="b").at(NEW)
    assert dict(moved.pairs)["hostaddr"] == "", "else the service file's would be used"


def test_invalid_conninfo_is_refused_without_repeating_it() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_conninfo("password=hush nonsense", subject="node b")
    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is None


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_comments_are_marked_and_unmarked_without_loss(comment: str) -> None:
    marked = statements.marked(comment, Destination("7000", "b", None, 1))
    assert statements.marked(marked, Destination()) == statements.marked(comment, Destination())
    assert without_mark(marked).strip() == comment.strip() or comment.endswith("]")


@given(conninfos)
def test_a_foreign_server_gets_only_the_options_that_differ(rest: dict[str, str]) -> None:
    before = Conninfo.of({**rest, "host": "old.example", "hostaddr": "10.0.0.1"})
    moved = subscription("s", conninfo=before, foreign_server="my server")
    sql = statements.connection(moved, before.at(NEW), "", masked=False)
    assert sql[:2] == (
        'ALTER SERVER "my server" OPTIONS '
        '(SET "host" \'new.example\', ADD "port" \'6000\', DROP "hostaddr")',
        'ALTER SUBSCRIPTION "s" SERVER "my server"',
    )
