"""A column's text form to JSON text: one module for each family of types, `encoders` chooses."""
