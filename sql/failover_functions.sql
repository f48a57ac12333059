-- Included by roles.sql: what slotfailover calls on a node, in the connected database.
SELECT pg_catalog.set_config('search_path', '', false) AS search_path \gset
GRANT EXECUTE ON FUNCTION pg_promote(boolean, integer), pg_reload_conf(), pg_hba_file_rules(),
    pg_show_replication_origin_status() TO :"failover";
GRANT SELECT ON pg_hba_file_rules, pg_replication_origin_status TO :"failover";

-- The schema and all that is in it belong to a superuser, so that no other role can prepare what a superuser
-- then runs. The history of a timeline tells which consumers are past the start of a new primary; the
-- function reads that one file, and no other.
CREATE SCHEMA IF NOT EXISTS slotfailover;
ALTER SCHEMA slotfailover OWNER TO CURRENT_USER;
REVOKE CREATE ON SCHEMA slotfailover FROM :"failover";
GRANT USAGE ON SCHEMA slotfailover TO :"failover";
SELECT 'DROP FUNCTION slotfailover.timeline_history(int)' FROM pg_proc p JOIN pg_roles r ON r.oid = proowner
 WHERE p.oid = to_regprocedure('slotfailover.timeline_history(int)') AND NOT rolsuper \gexec
CREATE OR REPLACE FUNCTION slotfailover.timeline_history(timeline int) RETURNS text
    LANGUAGE sql STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$ SELECT pg_catalog.pg_read_file('pg_wal/' || upper(lpad(to_hex($1), 8, '0')) || '.history', true) $$;
ALTER FUNCTION slotfailover.timeline_history(int) OWNER TO CURRENT_USER;
REVOKE ALL ON FUNCTION slotfailover.timeline_history(int) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION slotfailover.timeline_history(int) TO :"failover";
