#!/bin/bash
# Runs once, when the primary's database is made: the standby's slot, its way in, a table, and roles.
set -e
echo "host replication all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
psql -v ON_ERROR_STOP=1 -U postgres -d bank <<SQL
SELECT pg_create_physical_replication_slot('slotfailover_b', true);
ALTER SYSTEM SET synchronized_standby_slots = 'slotfailover_b';
CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL);
SQL
psql -X -U postgres -d bank -v bridge=slotbridge -v failover=slotfailover -v tables=slottables \
  -v publication=bank -f /sql/roles.sql
psql -X -U postgres -d bank -c "ALTER ROLE slotbridge PASSWORD 'example'"
