\set key random(0, 39)
BEGIN;
INSERT INTO counters VALUES (:key, nextval('versions'), 'gone') ON CONFLICT (id) DO UPDATE SET version = nextval('versions');
INSERT INTO log VALUES (nextval('versions'), 'gone');
ROLLBACK;
