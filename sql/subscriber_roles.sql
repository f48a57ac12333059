-- The role of slotfailover on a subscriber. In each database with subscriptions, as a superuser:
--
--   psql -d DATABASE -v failover=slotfailover -f sql/subscriber_roles.sql
--
-- Only a subscription's owner may repoint it: the role inherits from each owner, without becoming it
-- (SET FALSE). Where that is a superuser, it inherits the rights on all that this superuser owns:
-- give subscriptions to a role of their own. Connection strings can be read, with their passwords.
\set ON_ERROR_STOP on
SELECT pg_catalog.set_config('search_path', '', false) AS search_path \gset
SELECT format('CREATE ROLE %I LOGIN', :'failover')
 WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = :'failover') \gexec
SELECT format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), :'failover') \gexec
GRANT pg_monitor TO :"failover";
-- xmin: whether anybody has changed a subscription since slotfailover wrote its comment.
GRANT SELECT (subconninfo, xmin) ON pg_subscription TO :"failover";
GRANT EXECUTE ON FUNCTION pg_show_replication_origin_status() TO :"failover";
GRANT SELECT ON pg_replication_origin_status TO :"failover";
-- While it writes a connection string with a password, it keeps its own statements out of the log.
GRANT SET ON PARAMETER log_statement, log_min_error_statement, log_min_duration_statement,
    log_min_duration_sample, log_transaction_sample_rate, log_duration, track_activities
   TO :"failover";
SELECT DISTINCT format('GRANT %I TO %I WITH INHERIT TRUE, SET FALSE', rolname, :'failover')
  FROM pg_subscription JOIN pg_roles r ON r.oid = subowner
 WHERE subdbid = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND rolname <> :'failover' \gexec
