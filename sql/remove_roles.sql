-- Removes what roles.sql has made: roles, their rights, the schema slotfailover. On the primary, as a superuser,
-- once no service runs and `slotbridge teardown` has removed slot, origin and publication:
--
--   psql -d DATABASE -v bridge=slotbridge -v failover=slotfailover -v tables=slottables -f sql/remove_roles.sql
--
-- snapshot, journal_database  as they were given to roles.sql
--
-- What a role owns is kept, and becomes the superuser's. It can be run again. At its end it names what it leaves:
-- rights in other databases, the slots of standbys, synchronized_standby_slots.
\set ON_ERROR_STOP on
\if :{?journal_database}
\else
\set journal_database postgres
\endif
\if :{?snapshot}
\else
\set snapshot ''
\endif
SELECT pg_catalog.set_config('search_path', '', false) AS search_path \gset
SELECT current_database() AS source_database \gset
\ir remove_rights.sql
\connect :"journal_database"
SELECT pg_catalog.set_config('search_path', '', false) AS search_path \gset
\ir remove_rights.sql
\connect :"source_database"
SELECT pg_catalog.set_config('search_path', '', false) AS search_path \gset

SELECT coalesce(string_agg(DISTINCT format('%I', datname), ', '), '') AS elsewhere, count(*) > 0 AS any_elsewhere
  FROM pg_shdepend d JOIN pg_roles r ON refclassid = 'pg_authid'::regclass AND refobjid = r.oid
  JOIN pg_database b ON b.oid = d.dbid
 WHERE rolname IN (:'bridge', :'failover', :'tables', :'snapshot') \gset
\if :any_elsewhere
\warn 'the roles stay: they have rights in the databases' :elsewhere
\warn 'run this again in each of them (-d DATABASE)'
\else
SELECT format('DROP ROLE %I', rolname) FROM pg_roles
 WHERE rolname IN (:'bridge', :'failover', :'tables', :'snapshot') \gexec
\endif
SELECT format('left: slot %s (%s): SELECT pg_drop_replication_slot(%L); once no standby streams by it', slot_name,
              CASE WHEN active THEN 'a standby streams' ELSE 'nobody streams' END, slot_name)
  FROM pg_replication_slots WHERE slot_name LIKE 'slotfailover\_%'
UNION ALL
SELECT format('left: synchronized_standby_slots = %L: ALTER SYSTEM RESET synchronized_standby_slots; SELECT pg_reload_conf();',
              setting) FROM pg_settings WHERE name = 'synchronized_standby_slots' AND setting <> '' \g (format=unaligned tuples_only=on)
