"""Names as SQL writes them. Pure."""


def identifier(name: str) -> str:
    """Quote `name` as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
