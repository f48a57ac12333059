"""Keys and values with a schema: Connect's JSON envelope, and what a schema registry serves."""
