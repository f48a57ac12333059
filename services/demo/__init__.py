"""The demonstration: the whole product under pgbench, a killed primary, and an exact comparison."""
