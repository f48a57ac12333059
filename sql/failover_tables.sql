-- Included by roles.sql: the tables that slotfailover keeps in its journal database, as services/failover/
-- own_tables.py defines them. Its role may add rows, and can't change what they are.
-- A database that publishes all its tables gets none: its subscribers would fail on them.
SELECT pg_catalog.set_config('search_path', '', false) AS search_path \gset
SELECT EXISTS (SELECT FROM pg_publication WHERE puballtables) AS publishes_all \gset
\if :publishes_all
\warn 'journal_database publishes all its tables, so slotfailover keeps no table in it: choose another'
\else
CREATE TABLE IF NOT EXISTS slotfailover.journal (
    run text, number int, at timestamptz, by text, command text, step text, server text,
    sql jsonb, outcome text, seen jsonb, seconds float8, intent jsonb,
    PRIMARY KEY (run, number));
ALTER TABLE slotfailover.journal OWNER TO CURRENT_USER;
GRANT SELECT, INSERT ON slotfailover.journal TO :"failover";

CREATE TABLE IF NOT EXISTS slotfailover.watch (
    one bool PRIMARY KEY DEFAULT true,
    paused bool NOT NULL, at text NOT NULL, by text NOT NULL, reason text NOT NULL,
    version bigint NOT NULL DEFAULT 0);
ALTER TABLE slotfailover.watch OWNER TO CURRENT_USER;
ALTER TABLE slotfailover.watch DROP CONSTRAINT IF EXISTS watch_one_check;
ALTER TABLE slotfailover.watch ADD COLUMN IF NOT EXISTS version bigint NOT NULL DEFAULT 0;
GRANT SELECT, INSERT, UPDATE ON slotfailover.watch TO :"failover";
\endif
