-- The services' roles on the pair, each with what it needs and no more. On the primary, as a superuser:
--
--   psql -d DATABASE -v bridge=slotbridge -v failover=slotfailover -v tables=slottables \
--        -v publication=slotbridge -f sql/roles.sql
--
-- bridge       slotbridge run, slotbridge status
-- failover     slotfailover check, failover (switchover and rejoin need a superuser)
-- tables       slottables verify; for slottables audit give -v audit=on: REPLICATION, for a temporary slot
-- snapshot     the role of snapshot.conninfo, which reads rows from a standby; without that setting, none
-- publication  made for all tables where it is missing; only a superuser can
-- sequence     the name of a slot: its sequence, for source.witness: sequence; without that setting, none
--
-- Roles that exist are kept, and it can be run again: when tables join the publication. Passwords are
-- set with \password. failover.journal_database is :journal_database, by default postgres.
--
-- In a database whose owner is nobody to trust, too: names mean pg_catalog's objects alone.
\set ON_ERROR_STOP on
\if :{?journal_database}
\else
\set journal_database postgres
\endif
SELECT pg_catalog.set_config('search_path', '', false) AS search_path \gset
SELECT current_database() AS source_database \gset

SELECT format('CREATE ROLE %I LOGIN', name)
  FROM (VALUES (:'bridge'), (:'failover'), (:'tables')) AS wanted (name)
 WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name) \gexec
SELECT format('CREATE PUBLICATION %I FOR ALL TABLES', :'publication')
 WHERE NOT EXISTS (SELECT FROM pg_publication WHERE pubname = :'publication') \gexec
SELECT string_agg(format('%I.%I', p.schemaname, p.tablename), ', ') AS without_identity,
       count(*) > 0 AS any_without_identity
  FROM pg_publication_tables p JOIN pg_publication b USING (pubname)
  JOIN pg_class c ON c.oid = format('%I.%I', p.schemaname, p.tablename)::regclass
 WHERE pubname = :'publication' AND (b.pubupdate OR b.pubdelete) AND c.relkind = 'r'
   AND (c.relreplident = 'n' OR c.relreplident = 'd'
        AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)) \gset
\if :any_without_identity
\warn WARNING: UPDATE and DELETE fail in these published tables, which have no replica identity: :without_identity
\warn HINT: give each a primary key, or ALTER TABLE ... REPLICA IDENTITY FULL, or publish fewer tables
\endif
SELECT format('GRANT CONNECT ON DATABASE %I TO %I', :'source_database', name)
  FROM (VALUES (:'bridge'), (:'failover'), (:'tables')) AS wanted (name) \gexec

-- The bridge: its slot, the rows from before it, and the origin that it owns. pg_read_all_data lets it
-- read no more than REPLICATION does, by which it could copy all files; tables made later need no grant.
ALTER ROLE :"bridge" REPLICATION;
GRANT pg_read_all_data TO :"bridge";
-- By name: pg_replication_origin_session_setup has one more parameter in PostgreSQL 19.
SELECT format('GRANT EXECUTE ON FUNCTION %s TO %I', oid::regprocedure, :'bridge')
  FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND proname IN (
       'pg_replication_origin_create', 'pg_replication_origin_session_setup',
       'pg_replication_origin_xact_setup', 'pg_replication_origin_progress') \gexec

-- The sequence that stands for the origin: the bridge moves it, slotfailover reads it.
\if :{?sequence}
CREATE SCHEMA IF NOT EXISTS slotbridge;
SELECT format('CREATE SEQUENCE IF NOT EXISTS slotbridge.%I', 'witness_' || :'sequence') \gexec
SELECT format('GRANT SELECT, UPDATE ON SEQUENCE slotbridge.%I TO %I', 'witness_' || :'sequence', :'bridge') \gexec
SELECT format('GRANT SELECT ON SEQUENCE slotbridge.%I TO %I', 'witness_' || :'sequence', :'failover') \gexec
\endif

-- slottables verify: the rows that are published.
SELECT DISTINCT format('GRANT USAGE ON SCHEMA %I TO %I', schemaname, :'tables')
  FROM pg_publication_tables WHERE pubname = :'publication' \gexec
SELECT format('GRANT SELECT ON TABLE %I.%I TO %I', schemaname, tablename, :'tables')
  FROM pg_publication_tables WHERE pubname = :'publication' \gexec

-- slottables audit: a temporary slot tells the LSN of its snapshot.
\if :{?audit}
ALTER ROLE :"tables" REPLICATION;
\endif

-- Snapshots by a standby, which replays these grants: the rows that are published, and which timeline
-- it replays.
\if :{?snapshot}
SELECT format('CREATE ROLE %I LOGIN', :'snapshot')
 WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = :'snapshot') \gexec
SELECT format('GRANT CONNECT ON DATABASE %I TO %I', :'source_database', :'snapshot') \gexec
SELECT DISTINCT format('GRANT USAGE ON SCHEMA %I TO %I', schemaname, :'snapshot')
  FROM pg_publication_tables WHERE pubname = :'publication' \gexec
SELECT format('GRANT SELECT ON TABLE %I.%I TO %I', schemaname, tablename, :'snapshot')
  FROM pg_publication_tables WHERE pubname = :'publication' \gexec
GRANT pg_read_all_stats TO :"snapshot";
\endif

-- slotfailover, in every database that it connects to: grants on functions are one database's.
GRANT pg_monitor TO :"failover";
GRANT ALTER SYSTEM ON PARAMETER synchronized_standby_slots, synchronous_standby_names,
   primary_conninfo TO :"failover";
\connect :"journal_database"
SELECT pg_catalog.set_config('search_path', '', false) AS search_path \gset
GRANT CONNECT ON DATABASE :"journal_database" TO :"failover";
REVOKE CREATE ON DATABASE :"journal_database" FROM :"failover";
\ir failover_functions.sql
\ir failover_tables.sql
\connect :"source_database"
SELECT pg_catalog.set_config('search_path', '', false) AS search_path \gset
\ir failover_functions.sql

-- slottables verify and audit: the history of the timeline tells the server from another one that was
-- promoted to the same number.
GRANT USAGE ON SCHEMA slotfailover TO :"tables";
GRANT EXECUTE ON FUNCTION slotfailover.timeline_history(int) TO :"tables";
