"""A subscription as it was seen, and what a run has written beside it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.failover.model.destination import destination_in
from services.failover.model.timelines import milestone_in

if TYPE_CHECKING:
    from services.failover.model.conninfo import Conninfo
    from services.failover.model.destination import Destination
    from services.failover.model.timelines import Milestone


@dataclass(frozen=True, slots=True)
class Subscription:
    """A subscription of a subscriber's database."""

    name: str
    enabled: bool
    conninfo: Conninfo
    slot_name: str | None
    failover: bool
    comment: str
    remote_lsn: int | None
    """The end of the last transaction it has applied."""
    sync_slots: tuple[str, ...]
    foreign_system: str
    """The system_identifier found where its conninfo leads, if that is none of ours."""
    worker: bool = True
    """Its apply worker runs."""
    copying: tuple[tuple[str, str], ...] = ()
    """(table, srsubstate) of every initial copy that is not finished."""
    fed: bool = False
    """Its worker is connected: it has had a message since it was started."""
    identified: bool = False
    """A server of this pair answered where it leads."""
    private: bool = False
    """Its address is a loopback or socket address of another machine than ours."""
    heard_age_s: float | None = None
    """Seconds since its worker's last message; None where it has none."""
    as_marked: bool = True
    """Nobody has changed it since the transaction that wrote its comment: else its mark is void."""
    worker_age_s: float | None = None
    """Seconds since its worker was started; None without one, or where that can't be seen."""
    changeable: bool = True
    """Our role may move it, as its owner may."""
    foreign_server: str = ""
    """The foreign server whose options are its conninfo; "" where it has a conninfo of its own."""
    failing: str | None = ""
    """How one sees that its worker was just started after others failed; "" where it was not, None
    where that can't be seen."""

    @property
    def milestone(self) -> Milestone | None:
        """The newest timeline from which it was fed, as its comment says."""
        return milestone_in(self.comment)

    @property
    def marked(self) -> bool:
        """Whether the subscription was disabled for a failover, to be enabled at its end."""
        return self.destination is not None

    @property
    def destination(self) -> Destination | None:
        """The node to which an unfinished run leads it; None without a mark of a run."""
        return self.disabled_for if self.as_marked else None

    @property
    def disabled_for(self) -> Destination | None:
        """Where a run led it when it disabled it, also if the mark is void by now."""
        return None if self.enabled else destination_in(self.comment)
