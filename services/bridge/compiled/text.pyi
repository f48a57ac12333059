"""A growing text, for the other compiled modules only; text.pxd has it."""
