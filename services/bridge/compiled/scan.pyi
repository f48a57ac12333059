"""JSON text read token by token, for the other compiled modules only; scan.pxd has it."""
