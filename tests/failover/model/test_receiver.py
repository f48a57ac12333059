"""A primary_conninfo that leads nowhere, and back."""

from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict

from services.failover.model.conninfo import Conninfo
from services.failover.model.receiver import cut_off, is_cut, reconnected

values = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=20)
conninfos = st.dictionaries(
    st.sampled_from(["host", "hostaddr", "port", "user", "password", "service", "options"]), values
).map(lambda found: Conninfo(tuple(found.items())))


@given(conninfos)
def test_cut_off_conninfo_leads_nowhere_and_can_be_restored(conninfo: Conninfo) -> None:
    cut = cut_off(conninfo)
    assert is_cut(cut)
    assert cut_off(cut) == cut
    assert cut.value("host").startswith("/")
    assert cut.value("hostaddr") == ""
    assert dict(reconnected(cut).pairs) == dict(conninfo.pairs)
    written = Conninfo.of(conninfo_to_dict(cut.text))
    assert dict(reconnected(written).pairs) == dict(conninfo.pairs)


def test_another_connection_string_is_left_as_it_is() -> None:
    conninfo = Conninfo((("host", "/var/run"), ("port", "1")))
    assert not is_cut(conninfo)
    assert reconnected(conninfo) == conninfo
