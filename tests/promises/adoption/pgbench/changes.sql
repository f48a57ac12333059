\set key random(0, 39)
\set other random(0, 39)
\set what random(0, 99)
\set more random(0, 3)
BEGIN;
\if :what < 50
INSERT INTO counters VALUES (:key, nextval('versions'), 'n') ON CONFLICT (id) DO UPDATE SET version = nextval('versions');
\elif :what < 65
DELETE FROM counters WHERE id = :key;
\elif :what < 80
INSERT INTO log VALUES (nextval('versions'), repeat('x', :key));
\elif :what < 90
INSERT INTO moved VALUES ('k' || :key, nextval('versions')) ON CONFLICT (id) DO NOTHING;
\else
SELECT move('k' || :key, 'k' || :other);
\endif
\if :more = 0
INSERT INTO counters VALUES (:other, nextval('versions'), 'n') ON CONFLICT (id) DO UPDATE SET version = nextval('versions');
DELETE FROM counters WHERE id = :key;
INSERT INTO log VALUES (nextval('versions'), 'more');
SELECT move('k' || :other, 'k' || :key);
\endif
END;
