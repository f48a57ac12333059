"""Records with a schema, read back as the JSON text that `kafka.value_format: json` has."""
