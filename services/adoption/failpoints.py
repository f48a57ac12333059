"""The failpoints of `adopt` and `release`, beside those of the bridge (its `failpoints`)."""

from typing import Final

OF_AN_ADOPTION: Final = (
    "adopt looked",  # slot, offset and prefix are looked at, nothing is read
    "adopt fenced",  # no other producer can write any more, nothing else has happened
    "adopt planned",  # the topics are read, and what Kafka lacks is known
    "adopt failover",  # the slot is a failover slot, Kafka has nothing of ours
    "adopt sent",  # the events are in the open Kafka transaction
    "adopt committed",  # Kafka has the first progress record, the origin knows nothing of it
)
OF_A_RELEASE: Final = (
    "release offset",  # Kafka Connect has the offset, the bridge could still go on
    "release forgotten",  # the progress record is removed, the origin is not dropped
)
