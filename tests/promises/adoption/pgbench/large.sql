\set count random(20, 800)
\set copies random(0, 1)
SELECT nextval('blocks') * 1000 AS first \gset
BEGIN;
\if :copies
COPY batch FROM PROGRAM 'seq :first 1 $((:first + :count)) | sed "s/.*/& &/"' (DELIMITER ' ');
\else
UPDATE counters SET version = nextval('versions');
UPDATE batch SET version = nextval('versions') WHERE id IN (SELECT id FROM batch ORDER BY id DESC LIMIT 100);
\endif
END;
