"""hypothesis strategies of pgoutput messages."""

from hypothesis import strategies as st

from services.bridge.pgoutput.messages import (
    UNCHANGED,
    AnyMessage,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    Message,
    Origin,
    Prepare,
    Relation,
    RelationColumn,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)

oids = st.integers(1, 2**32 - 1)
lsns = st.integers(1, 2**63)
times = st.integers(0, 2**55)
names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
values = st.one_of(st.none(), st.just(UNCHANGED), st.binary(max_size=40))
columns = st.builds(RelationColumn, names, oids, st.integers(-1, 2**31 - 1), st.booleans())
relations = st.builds(
    Relation,
    oids,
    names,
    names,
    st.sampled_from("dnfi"),
    st.lists(columns, max_size=6).map(tuple),
)


@st.composite
def changes(draw: st.DrawFn) -> tuple[list[Relation], AnyMessage]:
    """A message and the relations that it needs described first."""
    relation = draw(relations)
    rows = st.lists(values, min_size=len(relation.columns), max_size=len(relation.columns))
    kind = draw(st.sampled_from("KO"))
    others = draw(st.lists(relations, max_size=3, unique_by=lambda r: r.oid))
    described = list({r.oid: r for r in [*others, relation]}.values())
    message: AnyMessage = draw(
        st.one_of(
            st.builds(Begin, lsns, times, oids),
            lsns.flatmap(lambda lsn: st.builds(Commit, st.just(lsn), st.just(lsn + 48), times)),
            st.builds(Origin, lsns, names),
            st.builds(Type, oids, names, names),
            st.just(relation),
            st.builds(Insert, st.just(relation), rows),
            st.builds(Update, st.just(relation), st.none(), st.none(), rows),
            st.builds(Update, st.just(relation), st.just(kind), rows, rows),
            st.builds(Delete, st.just(relation), st.just(kind), rows),
            st.builds(
                Truncate,
                st.just(tuple(described)),
                st.booleans(),
                st.booleans(),
            ),
            st.builds(Message, st.booleans(), lsns, names, st.binary(max_size=50)),
            st.builds(StreamStart, oids, st.booleans()),
            st.builds(StreamStop),
            st.builds(StreamAbort, oids, oids),
            lsns.flatmap(
                lambda lsn: st.one_of(
                    st.builds(StreamCommit, oids, st.just(lsn), st.just(lsn + 48), times),
                    st.builds(
                        RollbackPrepared, st.just(lsn), st.just(lsn + 9), times, times, oids, names
                    ),
                    *(
                        st.builds(kind, st.just(lsn), st.just(lsn + 48), times, oids, names)
                        for kind in (BeginPrepare, Prepare, StreamPrepare, CommitPrepared)
                    ),
                )
            ),
        )
    )
    return described, message
