"""Names and texts as SQL writes them. Pure."""


def identifier(name: str) -> str:
    """Quote `name` as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Quote `text` as an SQL string that is right whatever standard_conforming_strings says."""
    quoted = "'" + text.replace("'", "''").replace("\\", "\\\\") + "'"
    return f"E{quoted}" if "\\" in text else quoted
