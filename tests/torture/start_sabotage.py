"""Deliberate mistakes in what a start believes, and in how it ends what hangs in Kafka."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from schemas.progress import ProgressRecord
from services.bridge import hanging
from services.bridge.hanging import decision, transactions
from services.bridge.hanging import notes as hanging_notes
from services.bridge.progress import consistency
from services.bridge.recovery import staged_transactions, start_check
from services.bridge.recovery.resume_record import Records
from services.bridge.recovery.visible_record import read_visible
from services.bridge.sink import partition_ends, producer_pair
from services.bridge.source.database import Primary
from services.bridge.source.heartbeat import Moved
from services.bridge.transactions.staging import read_frames
from tests.torture.mistakes import mistake, put


@mistake("how to end what hangs is inverted", "markers lost")
def _settled_wrongly() -> None:
    decide = decision.how_to_end

    def inverted(*arguments: Any, **options: Any) -> decision.Ending:
        ending = decide(*arguments, **options)
        return ending._replace(commit=not ending.commit)

    put(transactions, "how_to_end", inverted)


@mistake("what hangs is left as it is", "markers lost")
def _not_settled() -> None:
    def nothing(*_arguments: Any) -> None:
        return

    put(hanging, "settle", nothing)


@mistake("what is ended as committed is not noted before", "markers lost")
def _not_noted() -> None:
    def nothing(*_arguments: Any) -> list[bytes]:
        return []

    put(transactions, "write_note", nothing)


@mistake("the record behind what hangs is no witness", "markers lost", drill="record behind")
def _nothing_behind() -> None:
    decide = decision.was_committed

    def blind(*arguments: Any, **options: Any) -> bool:
        return decide(*arguments, **{**options, "behind": ()})

    put(transactions, "was_committed", blind)


@mistake("what was aborted meanwhile is not published again", "markers lost")
def _not_again() -> None:
    def forget(topics: Any, _producer: Any, _slot: str, notes: Any, _judge: Any) -> None:
        hanging_notes.clear(topics, notes)

    put(hanging, "publish_lost", forget)


@mistake("the turn is not passed on to the other producer", "markers lost")
def _no_turns() -> None:
    def stay(_self: Any) -> None:
        return

    put(producer_pair.ProducerPair, "pass_on", stay)


@mistake("a new timeline is not noted before its first change", "failover")
def _timeline_not_entered() -> None:
    def enter(self: Records, record: ProgressRecord, _producer: Any) -> ProgressRecord:
        if record.server.timeline == self.timeline:
            self._heartbeat.moved = Moved(record.witness.lsn, record.witness.wal_lsn)
        return record

    put(Records, "_enter", enter)


@mistake("another publication is not noticed", "stray bridge")
def _any_publication() -> None:
    def fine(*_arguments: Any) -> None:
        return

    put(consistency, "_check_selection", fine)
    put(Primary, "check_publication", fine)


@mistake("the last change of what is staged is not read at a start", "kill,crash loop,failover")
def _staging_short() -> None:
    def short(values: Any) -> Iterator[Any]:
        yield from list(read_frames(values))[:-1]

    put(staged_transactions, "read_frames", short)


@mistake("a server whose WAL is behind Kafka is not noticed", "volume restored")
def _behind() -> None:
    check = consistency._check_position

    def far(record: ProgressRecord, seen: consistency.Witnesses, slot: str) -> None:
        check(record, replace(seen, wal_lsn=2**63), slot)

    put(consistency, "_check_position", far)


@mistake("an origin that is lower than Kafka knows is not noticed", "volume restored")
def _origin_lower() -> None:
    def never(*_arguments: Any) -> bool:
        return False

    put(consistency, "_origin_is_binding", never)


@mistake(
    "another commit in the server's WAL is not noticed", "volume restored", drill="set back soon"
)
def _any_commit() -> None:
    def fine(*_arguments: Any) -> bool:
        return True

    put(consistency, "_has_commit", fine)


@mistake("a leader of another epoch is not asked", "records lost", drill="written on")
def _not_led_anew() -> None:
    def nothing(*_arguments: Any) -> dict[Any, Any]:
        return {}

    put(partition_ends, "led_anew", nothing)


@mistake("ends of partitions are not compared", "records lost")
def _tails_ignored() -> None:
    def fine(*_arguments: Any, **_options: Any) -> None:
        return

    put(partition_ends, "judge_lost", fine)


@mistake("a second slot under the prefix is not noticed", "stray bridge")
def _any_slot() -> None:
    def alone(*arguments: Any) -> Any:
        return read_visible(*arguments)._replace(others=())

    put(start_check, "read_visible", alone)


@mistake("a timeline is known by its number", "failover", drill="same number")
def _number_only() -> None:
    def same(record: ProgressRecord, seen: consistency.Witnesses) -> bool:
        timeline = record.server.timeline
        return timeline == seen.server.timeline or timeline in seen.switch_points

    put(consistency, "descends", same)


@mistake("another database is not noticed", "stray bridge", drill="foreign database")
def _any_database() -> None:
    check = consistency.check_timeline

    def blind(record: ProgressRecord, seen: consistency.Witnesses, slot: str) -> None:
        own = seen.server.system_identifier
        server = record.server.model_copy(update={"system_identifier": own})
        check(record.model_copy(update={"server": server}), seen, slot)

    put(consistency, "check_timeline", blind)
    put(start_check, "check_timeline", blind)
