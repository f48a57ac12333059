"""The contracts all services share: positions, errors, exit codes, settings, the Kafka wire."""
