-- Included by roles.sql: what slotfailover calls on a node, in the connected database.
GRANT EXECUTE ON FUNCTION pg_promote(boolean, integer), pg_reload_conf(), pg_hba_file_rules(),
    pg_show_replication_origin_status() TO :"failover";
GRANT SELECT ON pg_hba_file_rules, pg_replication_origin_status TO :"failover";
