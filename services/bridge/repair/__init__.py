"""Repairs topics in place: publishes what differs from the tables (docs/guides/recovery.md).

diagnosis    what keeps the bridge from starting, and whether a repair helps
scope        which tables can be compared, and why others can't
fold         the rows that the topics tell, key by key
baseline     a new slot, and the tables' rows exactly where it begins
comparison   the rows that differ
compared_tables  the tables of one run, through all of this; encoding: as streaming does
repair       all of it, and one Kafka transaction with the differences
"""
