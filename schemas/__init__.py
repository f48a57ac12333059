"""The contracts every service shares: positions, errors and exit codes, settings, the Kafka wire."""
