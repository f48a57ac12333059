"""Tables of live tests: a bank like pgbench's, and one of every type."""

ACCOUNTS = 2000
BANK_TABLES = """
    CREATE TABLE pgbench_branches (bid int PRIMARY KEY, bbalance int, filler char(88));
    CREATE TABLE pgbench_tellers (tid int PRIMARY KEY, bid int, tbalance int, filler char(84));
    CREATE TABLE pgbench_accounts (aid int PRIMARY KEY, bid int, abalance int, filler char(84));
    CREATE TABLE pgbench_history (tid int, bid int, aid int, delta int, mtime timestamp,
        filler char(22));
"""
BANK = f"""
    INSERT INTO pgbench_branches SELECT i, 0 FROM generate_series(1, 3) i;
    INSERT INTO pgbench_tellers SELECT i, 1 + i % 3, 0 FROM generate_series(1, 30) i;
    INSERT INTO pgbench_accounts SELECT i, 1 + i % 3, 0 FROM generate_series(1, {ACCOUNTS}) i;
"""
TRANSFER = """
    BEGIN;
    UPDATE pgbench_accounts SET abalance = abalance + {delta} WHERE aid = {aid};
    UPDATE pgbench_tellers SET tbalance = tbalance + {delta} WHERE tid = {tid};
    UPDATE pgbench_branches SET bbalance = bbalance + {delta} WHERE bid = {bid};
    INSERT INTO pgbench_history VALUES ({tid}, {bid}, {aid}, {delta}, CURRENT_TIMESTAMP);
    END;
"""
LARGE = f"""
    UPDATE pgbench_accounts SET abalance = abalance + 1;
    UPDATE pgbench_tellers SET tbalance = tbalance + {ACCOUNTS} WHERE tid = 7;
    UPDATE pgbench_branches SET bbalance = bbalance + {ACCOUNTS} WHERE bid = 2;
    INSERT INTO pgbench_history SELECT 7, 2, i, 1, now() FROM generate_series(1, {ACCOUNTS}) i;
"""
TABLES = """
    CREATE TYPE mood AS ENUM ('sad', 'happy');
    CREATE DOMAIN positive AS int CHECK (VALUE > 0);
    CREATE TABLE types (
        id int8 PRIMARY KEY, truth bool, small int2, middle int4, o oid, r float4, d float8,
        price numeric(12, 2), free numeric, m money, day date, at timestamp, at0 timestamp(0),
        instant timestamptz, clock time, zoned timetz, span interval, b bytea, t text,
        padded char(8), short varchar(5), j json, jb jsonb, u uuid, ints int[], words text[],
        kind mood, number positive, r4 int4range, net inet
    );
    CREATE DOMAIN stamps AS timestamptz(3)[];
    CREATE DOMAIN instant AS timestamptz;
    CREATE TABLE lists (
        id int PRIMARY KEY, ints int8[], words text[], prices numeric(8, 2)[], reals float8[],
        truths bool[], days date[], moments timestamp[], clocks time[], bytes bytea[],
        kinds mood[], numbers positive[], at instant, stamps stamps, boxes box[], spans interval[]
    );
    CREATE TABLE whole (id int PRIMARY KEY, note text, big text);
    ALTER TABLE whole REPLICA IDENTITY FULL;
    ALTER TABLE whole ALTER big SET STORAGE EXTERNAL;
    CREATE TABLE log (note text, n int);
    CREATE TABLE emptied (id int PRIMARY KEY, note text);
    CREATE SCHEMA "Odd one";
    CREATE TABLE "Odd one"."T-1" ("Key" int, key text, "a""b.c`d" text, PRIMARY KEY ("Key", key));
"""
ROWS = r"""
    INSERT INTO types VALUES
    (1, true, -32768, 2147483647, 4294967295, 0.1, 1e-300, -1234567890.12, 'NaN', 12.34,
     '0044-03-15 BC', '2026-01-31 12:00:00.000001', '2026-01-31 12:00:00.6',
     '2026-01-31 12:00:00.5+02', '23:59:59.999999', '10:20:30.5+02', '1 mon -2 days 03:00:01.5',
     '\x00ff80', E'a "b"\\\n\r\t,é💡\x01\x02', 'ab', 'äöü', '{"a":  1}', '{"a": [1, null]}',
     'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{1,NULL}', '{"x y",NULL,""}', 'sad', 7, '[1,5)',
     '10.0.0.1/8'),
    (3, false, 0, 0, 0, 'NaN', '-Infinity', 0, 1e50, 0, 'infinity', 'infinity', '-infinity',
     'infinity', '0:00', '0:00+14', '0', '', '', '', '', '[]', '[]',
     '00000000-0000-0000-0000-000000000000', '{}', '{}', 'happy', 1, 'empty', '::1'),
    (4, true, 1, 1, 1, 3.4e38, 1.7976931348623157e308, 0.01, -0.000, -1, '5874897-12-31',
     '294246-12-31 23:59:59.999999', '4713-01-01 00:00:00 BC', '12345-06-07 08:09:10.123456+00',
     '24:00', '12:00-15:59:59', '-1 year', '\x5c', '__debezium', '   ', ' ', 'null', '"x"',
     'ffffffff-ffff-ffff-ffff-ffffffffffff', '{{1,2},{3,4}}', '{NULL}', NULL, NULL, NULL, NULL);
    INSERT INTO lists VALUES
    (1, '{1,NULL,-9223372036854775808}', E'{"a \\"b\\"\\\\",NULL,"",é💡,"NULL"}', '{1.50,NULL}',
     '{0.1,NaN,-Infinity,1e-300,NULL,-0}', '{t,f,NULL}', '{2026-01-31,infinity,NULL}',
     '{2026-01-31 12:00:00.5,-infinity}', '{24:00,10:20:30.000001}', E'{"\\\\x00ff",NULL}',
     '{sad,NULL}', '{7}', '2026-01-31 12:00:00.5+02', '{2026-01-31 12:00:00.5+02,infinity}',
     '{(3,4),(1,2);(5,6),(3,4)}', '{1 mon -2 days}'),
    (2, '{}', '{{a,b},{c,"d e"}}', '{{{1},{2}},{{3},{4}}}', '{}', '{}', '{0044-03-15 BC}',
     '{0044-03-15 12:00:00 BC}', '{}', '{}', '{{happy}}', '{}', '0044-03-15 12:00:00+00 BC',
     '{12345-06-07 08:09:10.123+00,0001-12-31 00:00:00+00 BC}', '{}', '{}'),
    (3, '[0:1][5:6]={{1,2},{3,4}}', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
     NULL, NULL, NULL, NULL);
    INSERT INTO types (id) VALUES (2);
    INSERT INTO types (id, t) SELECT 5, string_agg(md5(i::text), '') FROM generate_series(1, 400) i;
    UPDATE types SET small = 5 WHERE id = 5;
    INSERT INTO whole SELECT i, 'a', repeat('x', 5000) FROM generate_series(1, 6) i;
    UPDATE whole SET note = 'b' WHERE id < 4;
    UPDATE whole SET id = 10 WHERE id = 1;
    DELETE FROM whole WHERE id = 2;
    INSERT INTO log SELECT 'same', 1 FROM generate_series(1, 5);
    INSERT INTO emptied SELECT i, 'x' FROM generate_series(1, 50) i;
    TRUNCATE emptied;
    INSERT INTO emptied VALUES (1, 'again'), (2, 'two'), (3, 'three');
    UPDATE emptied SET id = 20 WHERE id = 2;
    INSERT INTO "Odd one"."T-1" VALUES (1, 'k', 'v'), (1, 'l', NULL);
"""
