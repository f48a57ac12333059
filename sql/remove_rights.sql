-- Included by remove_roles.sql: takes the roles' rights in the connected database, and drops the schemas of the
-- services unless another role still uses them. DROP OWNED comes after REASSIGN OWNED, so that it drops rights alone.
SELECT pg_catalog.set_config('search_path', '', false) AS search_path \gset
SELECT format(statement, rolname)
  FROM pg_roles, (VALUES (1, 'REASSIGN OWNED BY %I TO CURRENT_USER'), (2, 'DROP OWNED BY %I')) AS step (number, statement)
 WHERE rolname IN (:'bridge', :'failover', :'tables', :'snapshot') ORDER BY rolname, number \gexec
SELECT 'DROP SCHEMA slotfailover CASCADE' FROM pg_namespace
 WHERE nspname = 'slotfailover' AND NOT EXISTS (SELECT FROM aclexplode(nspacl) WHERE grantee <> nspowner) \gexec
SELECT 'DROP SCHEMA slotbridge' FROM pg_namespace n
 WHERE nspname = 'slotbridge' AND NOT EXISTS (SELECT FROM pg_class WHERE relnamespace = n.oid) \gexec
