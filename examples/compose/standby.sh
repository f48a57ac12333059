#!/bin/bash
# The standby: made from the primary at the first start, and synchronizing its slots.
set -e
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  mkdir -p -m 700 "$PGDATA"
  pg_basebackup -D "$PGDATA" --checkpoint=fast -R -S slotfailover_b \
    -d "host=pg-a user=postgres dbname=bank password=$PGPASSWORD application_name=slotfailover_b"
  # The primary waits for the standby, not the standby for itself.
  sed -i '/^synchronized_standby_slots/d' "$PGDATA/postgresql.auto.conf"
fi
exec postgres -c wal_level=logical -c hot_standby_feedback=on -c sync_replication_slots=on \
  -c listen_addresses='*'
