"""A node as a standby, or as one that may become primary: read in one statement.

Source: PostgreSQL documentation 9.28.4 Recovery Control Functions, 27.2.3 pg_stat_wal_receiver,
53.20 pg_replication_slots; slot.c, StandbySlotsHaveCaughtup.
"""

from typing import Any

from services.failover.model.replication import Replication
from services.postgres.rows import one_row
from services.postgres.server import Connection


def read_replication(connection: Connection) -> Replication:
    """Read the standby side of a server (PostgreSQL 17 or newer).

    Source: PostgreSQL documentation 9.28.4 Recovery Control Functions, 27.2.3 pg_stat_wal_receiver.
    """
    row = one_row(
        connection.execute(
            """
        SELECT CASE WHEN pg_is_in_recovery() THEN
                    greatest(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()) - '0/0' END
               ::bigint,
               CASE WHEN NOT pg_is_in_recovery() THEN pg_current_wal_flush_lsn() - '0/0' END
               ::bigint,
               EXISTS (SELECT FROM pg_stat_wal_receiver WHERE status = 'streaming'),
               coalesce(pg_last_wal_replay_lsn() >= pg_last_wal_receive_lsn(), true)
               OR EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'startup' AND
                          wait_event IN ('RecoveryWalStream', 'RecoveryRetrieveRetryInterval')),
               EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'slotsync worker'),
               ARRAY(SELECT application_name FROM pg_stat_replication r
                      WHERE state IN ('streaming', 'catchup') AND NOT EXISTS (
                            SELECT FROM pg_replication_slots s
                             WHERE s.active_pid = r.pid AND s.slot_type = 'logical')),
               has_function_privilege('pg_promote(boolean, integer)', 'EXECUTE'),
               has_function_privilege('pg_reload_conf()', 'EXECUTE')
               AND has_parameter_privilege('synchronized_standby_slots', 'ALTER SYSTEM')
               AND has_parameter_privilege('synchronous_standby_names', 'ALTER SYSTEM'),
               (SELECT rolsuper FROM pg_roles WHERE rolname = current_user),
               (SELECT rolsuper OR rolreplication FROM pg_roles WHERE rolname = current_user),
               has_function_privilege('pg_ls_dir(text, boolean, boolean)', 'EXECUTE')
               AND has_function_privilege('pg_stat_file(text, boolean)', 'EXECUTE')
               AND has_function_privilege('pg_read_binary_file(text)', 'EXECUTE')
               AND has_function_privilege('pg_read_binary_file(text, bigint, bigint, boolean)',
                                          'EXECUTE'),
               ARRAY(SELECT listed.name
                       FROM unnest(string_to_array(
                              current_setting('synchronized_standby_slots'), ',')) entry,
                            trim(entry, ' "') listed (name)
                       LEFT JOIN pg_replication_slots s ON s.slot_name = listed.name
                      WHERE (s.slot_name IS NULL OR s.slot_type <> 'physical'
                             OR s.invalidation_reason IS NOT NULL OR NOT s.active)
                        AND EXISTS (SELECT FROM pg_stat_activity
                                     WHERE wait_event = 'WaitForStandbyConfirmation')),
               (pg_last_wal_replay_lsn() - '0/0')::bigint,
               extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp())::float8,
               (SELECT extract(epoch FROM clock_timestamp() - last_msg_receipt_time)::float8
                  FROM pg_stat_wal_receiver),
               (SELECT (latest_end_lsn - '0/0')::bigint FROM pg_stat_wal_receiver),
               has_function_privilege('pg_reload_conf()', 'EXECUTE')
               AND has_parameter_privilege('primary_conninfo', 'ALTER SYSTEM'),
               NOT pg_is_in_recovery() OR pg_last_wal_receive_lsn() IS NOT NULL
               OR EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'startup' AND
                          wait_event IN ('RecoveryWalStream', 'RecoveryRetrieveRetryInterval')),
               CASE WHEN pg_is_in_recovery() THEN pg_get_wal_replay_pause_state() ELSE '' END
        """
        )
    )
    values: list[Any] = [*row[:5], tuple(row[5]), *row[6:11], tuple(row[11]), *row[12:]]
    return Replication(*values)
